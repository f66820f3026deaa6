"""What today's code makes of a run: what its preset stands for, and what has changed since earlier results."""

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from edgc.config import BY_ENTROPY, NOT_BY_ENTROPY, OF_A_VOLUME, EDGCConfig, Messages, RankPolicy
from edgc.config.presets import PRESETS
from edgc.engines import has_rank

EMBEDDING_SUM = "embedding sum counted"  # before this change bytes lack what Megatron sums between stages

# With these flags a pipeline does not fuse the sum of a tied embedding, and EDGC does not see it as tied.
NOT_FUSED = {"--edgc-no-fuse-embedding-sync", "--mtp-num-layers"}

# What has changed since the first lines in what a run of the same flags computes or counts, oldest first, and whether
# it concerns an engine on so many pipeline stages with these arguments. docs/frontier/lists.md says more of each. A
# line's ``changes`` is how many of them its code had.
CHANGES: tuple[tuple[str, Callable[[str, int, Sequence[str]], bool]], ...] = (
    ("basis by QR", lambda engine, *_: has_rank(engine)),
    ("only factors scaled", lambda engine, *_: has_rank(engine)),
    (EMBEDDING_SUM, lambda _, stages, __: stages > 1),
    ("spikes scaled down", lambda engine, *_: engine != "dense"),
    ("spike limit 10", lambda engine, *_: engine != "dense"),
    ("errors of spikes limited", lambda engine, *_: engine != "dense"),
    ("rank by descent", lambda engine, _, arguments: has_rank(engine) and _fills(arguments)),
    ("signs before few bits", lambda engine, _, arguments: has_rank(engine) and _few_bits(arguments)),
    ("rows measured first", lambda engine, _, arguments: has_rank(engine) and _volume(arguments) > 0),
    ("last steps within the budget", lambda engine, _, arguments: has_rank(engine) and _volume(arguments) >= 48),
    ("rows of embeddings alone", lambda engine, _, arguments: has_rank(engine) and _volume(arguments) > 0),
    ("bytes kept for later", lambda engine, _, arguments: has_rank(engine) and _volume(arguments) > 0),
    (
        "scales of rare rows bounded",
        lambda engine, stages, arguments: (
            engine != "dense"
            and _equalises(arguments)
            and (
                "--untie-embeddings-and-output-weights" in arguments or stages > 1 and bool(NOT_FUSED & set(arguments))
            )
        ),
    ),
    (
        "few bytes while the learning rate rises",
        lambda engine, _, arguments: has_rank(engine) and _by_learning_rate(arguments) and _rises(arguments),
    ),
    (
        "experts priced as layers",
        lambda engine, _, arguments: (
            has_rank(engine)
            and int(dict(pairwise(arguments)).get("--expert-model-parallel-size", 1)) > 1
            and (_volume(arguments) > 0 or _fills(arguments))
        ),
    ),
)


# Flags of older lines, and how today's say the same.
RESPELLED = (
    (r"--edgc-engine (topk|randomk)\b(.*?) --edgc-density (\S+)", r"--edgc-engine \1:\3\2"),
    (r"--edgc-engine (int\d)\b(.*?) --edgc-stochastic\b", r"--edgc-engine \1:stochastic\2"),
    (r"--edgc-engine (int\d)\b(.*?) --edgc-hadamard\b", r"--edgc-engine \1:rotated\2"),
    (r"--edgc-rank-tilt (\S+)", r"--edgc-study rank_tilt=\1"),
    (r"--edgc-stage-share (\S+)", r"--edgc-study stage_share=\1"),
    (r"--edgc-error-decay (\S+)", r"--edgc-study error_decay=\1"),
    (r"--edgc-error-average (\S+)", r"--edgc-study error_average=\1"),
    (r"--edgc-no-warm-start\b", "--edgc-study warm_start=off"),
    (r"--edgc-no-transpose\b", "--edgc-study transpose=off"),
    (r"--edgc-no-local-error\b", "--edgc-study local_error=off"),
    (r"--edgc-statistics\b", "--edgc-study statistics=on"),
    (r"--edgc-pp (\w+) --edgc-pp-rank (\d+) --edgc-pp-wire (\w+)", r"--edgc-pp \1:powersgd:\2:\3"),
    (r"--edgc-pp (\w+) --edgc-pp-rank (\d+)", r"--edgc-pp \1:powersgd:\2"),
    (r"--edgc-pp (\w+) --edgc-pp-engine (\w+)", r"--edgc-pp \1:\2"),
    (r"--edgc-basis-wire (\w+) --edgc-weak-basis-wire \1\b", r"--edgc-basis-wire \1"),
    (r"--edgc-weak-basis-wire int6\b", "--edgc-basis-wire int6"),  # beside presets whose strong columns are in int6
)


def respelled(flags: str) -> str:
    """Flags of an older line as today's code takes them."""
    for then, now in RESPELLED:
        flags = re.sub(then, now, flags)
    return flags


def respelled_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a preset of older lines as today's code has them."""
    now = dict(settings)
    if now.get("rank_model") == "constant":
        del now["rank_model"]
        now["static_rank"] = now.pop("rank_share", None)
    if "weak_basis_wire" in now:
        now["basis_wire"] = f"{now['basis_wire']}+{now.pop('weak_basis_wire')}"
    if "pp_rank" in now:
        which = "epilogue" if now.pop("pp_epilogue_only", False) else now["pp"]
        now["pp"] = f"{which}:powersgd:{now.pop('pp_rank')}"
    if "pp_engine" in now:
        now["pp"] = f"{now['pp']}:{now.pop('pp_engine')}"
    return now


def other_preset(then: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """What the preset of a run said that the preset in these arguments does not say today: names with values.

    ``then``: ``preset`` of the run, when it began.
    """
    meaning, today, defaults = respelled_settings(then), preset(arguments), EDGCConfig().flat()
    found = []
    for name in sorted(meaning.keys() | today.keys()):
        before, after = (one.get(name, defaults[name]) for one in (meaning, today))
        if before != after and name != "fuse_embedding_sync":  # that is one of the changes
            found.append(f"{name} {before}")
    return found


def changed(engine: str, stages: int, arguments: Sequence[str], known: int) -> str:
    """What has changed for such a run since code that had the first ``known`` of the ``CHANGES``; empty: nothing."""
    return ", ".join(text for text, applies in CHANGES[known:] if applies(engine, stages, arguments))


def _fills(arguments: Sequence[str]) -> bool:
    """Whether ranks are shared out by water-filling."""
    given = [value for flag, value in pairwise(arguments) if flag == "--edgc-allocation"]
    return (given[-1] if given else preset(arguments).get("allocation")) == "waterfill"


def _by_learning_rate(arguments: Sequence[str]) -> bool:
    """Whether the budget of a step goes with its learning rate."""
    given = [value.partition("=")[2] for value in arguments if value.startswith("learning_rate_power=")]
    power = given[-1] if given else preset(arguments).get("learning_rate_power", 0.0)
    return _volume(arguments) > 0 and float(power) > 0


def _rises(arguments: Sequence[str]) -> bool:
    """Whether the learning rate has a warm-up of its own."""
    given = dict(pairwise(arguments))  # the last of each
    return any(float(given.get(f"--lr-warmup-{unit}", 0)) > 0 for unit in ("iters", "samples", "fraction"))


def _volume(arguments: Sequence[str]) -> float:
    """The volume of a run; 0 without a budget."""
    given = dict(pairwise(arguments))
    if "--edgc-volume" in given:
        return float(given["--edgc-volume"])
    return 0.0 if "--edgc-static-rank" in given else float(preset(arguments).get("volume", 0.0))


def _equalises(arguments: Sequence[str]) -> bool:
    """Whether gradients are divided by scales of rows and columns."""
    given = [flag == "--edgc-equalise" for flag in arguments if flag in ("--edgc-equalise", "--edgc-no-equalise")]
    return given[-1] if given else bool(preset(arguments).get("equalise"))


def _few_bits(arguments: Sequence[str]) -> bool:
    """Whether factors travel in fewer than 4 bits."""
    formats = [value for flag, value in pairwise(arguments) if flag in ("--edgc-wire", "--edgc-basis-wire")]
    return bool({"int1", "int2", "int3"} & {part for value in formats for part in value.split("+")})


def preset(arguments: Sequence[str]) -> dict[str, Any]:
    """What the preset in these arguments, the last one if there are several, stands for today.

    Without what it says of messages between stages, and of a tied embedding on two of them, if there are none or a flag
    says it, or if no entropy sets the ranks that they would follow. Without what only a volume uses, if there is none.
    Without the format of gathered weights, unless weights in 16 bits are gathered and no flag says it.
    """
    names = [value for flag, value in pairwise(arguments) if flag == "--edgc-preset"]
    meaning = PRESETS[names[-1]] if names else {}
    pipeline = "--pipeline-model-parallel-size" in arguments
    embedding = {"--edgc-fuse-embedding-sync", "--edgc-no-fuse-embedding-sync"}
    void = set() if pipeline and "--edgc-pp" not in arguments else {"pp"}
    given = {flag.removeprefix("--edgc-").replace("-", "_"): value for flag, value in pairwise(arguments)}
    by_entropy = RankPolicy.of(given) is RankPolicy.ENTROPY
    if Messages.of(meaning.get("pp", "off")).needs_rank and not by_entropy:
        void.add("pp")
    if "volume" not in given and (given.keys() & (NOT_BY_ENTROPY | BY_ENTROPY - {"rmax"}) or not by_entropy):
        void |= OF_A_VOLUME
    if not pipeline or embedding & set(arguments):
        void.add("fuse_embedding_sync")
    rounds_weights = "--use-distributed-optimizer" in arguments and {"--bf16", "--fp16"} & set(arguments)
    if not rounds_weights or "param_wire" in given or given.get("engine") == "dense":
        void.add("param_wire")
    return {name: value for name, value in meaning.items() if name not in void}
