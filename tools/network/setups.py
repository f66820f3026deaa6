"""How the models of runs on limited links train: modes, contenders and their flags."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from edgc.config import EDGCConfig
from tools._root import REPOSITORY
from tools.shared.changes import changed, other_preset, preset

CORPUS = REPOSITORY / "runs" / "data" / "network"
WINDOW = 7  # iterations; the first one is the warm-up of most contenders and is not measured
PLANNED = 40 * WINDOW  # of the run that is begun: the warm-up of ``balanced`` is one window of it
# The learning rate stays, so that the steps that are measured have the mean budget of a run.
MEGATRON = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 8 --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 "
    f"--eval-interval 100000 --log-interval 1000 --seed 1 --train-iters {PLANNED}"
)
MODEL = [*MEGATRON, *shlex.split(f"--edgc --edgc-cpu --edgc-window {WINDOW} --edgc-iteration-sampling-rate 0.2")]
# Of a run to its end: a learning rate that ends at 0, so that its last loss can be compared.
WHOLE = shlex.split("--lr-decay-style cosine --lr-warmup-iters 20 --min-lr 0 --eval-iters 20")
SEQUENCES = 32  # of a data-parallel process and step: 4,096 tokens


@dataclass(frozen=True)
class Mode:
    """How a model is trained.

    ``pipeline``: stages, each of ``replicas`` processes and with ``chunks`` of the model. ``sharing``: so many
    processes share a namespace, and so a link to the others.
    """

    flags: str
    replicas: int = 2
    pipeline: int = 1
    chunks: int = 1
    sharing: int = 1

    @property
    def processes(self) -> int:
        return self.replicas * self.pipeline

    @property
    def links(self) -> int:
        return self.processes // self.sharing


MODES = {
    "plain": Mode(""),
    "overlapped": Mode("--overlap-grad-reduce"),
    "distributed optimizer": Mode("--use-distributed-optimizer"),
    "distributed optimizer, overlapped": Mode("--use-distributed-optimizer --overlap-grad-reduce"),
    "distributed optimizer, weights in bf16": Mode("--use-distributed-optimizer --bf16"),
    "pipeline": Mode("--pipeline-model-parallel-size 2", pipeline=2),
    "interleaved pipeline": Mode(
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", pipeline=2, chunks=2
    ),
    "four workers": Mode("", replicas=4),
    "two racks of two workers": Mode("", replicas=4, sharing=2),
    # where low rank computes long: short sequences, so that the passes do not
    "width 2048": Mode(
        "--num-layers 1 --hidden-size 2048 --num-attention-heads 16 --seq-length 16 --max-position-embeddings 16"
    ),
}
_BEGUN = "--edgc-warmup-fraction 0.025 --edgc-study entropy_stability=9 --edgc-rmax 64 --edgc-rank-step 128"
_EIGHT_BITS = "--edgc-basis-wire int8 --edgc-wire int8 --edgc-rest-wire int8 --edgc-dense-wire int8"
CONTENDERS = {
    "dense": "--edgc-engine dense",
    "dense-bf16-sums": "--edgc-engine dense --grad-reduce-in-bf16",  # Megatron's own, of models in bf16 alone
    "bf16": "--edgc-engine bf16 --edgc-warmup-fraction 0.025",
    "int8": "--edgc-engine int8 --edgc-dense-wire int8 --edgc-warmup-fraction 0.025",
    "int4": "--edgc-engine int4 --edgc-dense-wire int8 --edgc-warmup-fraction 0.025",
    "powersgd": "--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025",  # in fp32, as torch's hook
    "powersgd-int8": f"--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025 {_EIGHT_BITS}",
    "optimus": "--edgc-preset optimus --edgc-static-rank 64 --edgc-warmup-fraction 0.025",
    "paper": "--edgc-preset paper",
    # begins to compress after two windows, at a given rank, which may move by more than the paper's 8 a window
    "paper-begun": f"--edgc-preset paper {_BEGUN}",
    "paper-not-aligned": f"--edgc-preset paper {_BEGUN} --edgc-no-align",
    "safe": "--edgc-preset safe",
    "balanced": "--edgc-preset balanced",
    "balanced-low-rank": "--edgc-preset balanced --edgc-rmax 1024",  # whatever the probe says
    "balanced-whole-weights": "--edgc-preset balanced --edgc-param-wire off",  # gathered as Megatron does
    "balanced-int4-weights": "--edgc-preset balanced --edgc-param-wire int4",
    "fast": "--edgc-preset fast",
}


# What presets with a volume said in all runs that did not keep what their preset stood for.
UNRECORDED = "no error waits, and small parameters travel in 5 or 6 bits, within the same volume"


def is_old(mode: str, contender: str, changes: int, more: Sequence[str] = ()) -> bool:
    """Whether today's code compresses otherwise than that with so many of ``tools.shared.changes.CHANGES``.

    ``more``: flags of the run beside the contender's.
    """
    given = [*more, *shlex.split(CONTENDERS[contender])]
    engine = dict(pairwise(given)).get("--edgc-engine", EDGCConfig.engine)
    return bool(changed(engine, MODES[mode].pipeline, given, changes))


def flags(mode: str, contender: str) -> str:
    """The flags of a run that is timed, without paths and the length of what is measured."""
    return shlex.join([*MODEL, *shlex.split(MODES[mode].flags), *shlex.split(CONTENDERS[contender])])


def meaning(mode: str, contender: str) -> dict[str, Any]:
    """What the preset of a contender stands for today."""
    return preset(shlex.split(flags(mode, contender)))


def older_preset(mode: str, contender: str, then: Mapping[str, Any] | None) -> str:
    """What the preset of a run stood for and does not stand for today; empty if nothing.

    ``then``: ``meaning`` when the run began; None: the run is from before that was kept.
    """
    if then is None:
        return UNRECORDED if has_volume(mode, contender) else ""
    return ", ".join(other_preset(then, shlex.split(flags(mode, contender))))


def has_volume(mode: str, contender: str) -> bool:
    """Whether a volume of its preset bounds the bytes of a contender."""
    return "volume" in meaning(mode, contender)


def arguments(mode: Mode, contender: str, folder: Path, data: Sequence[str], more: Sequence[str]) -> list[str]:
    """Everything after ``pretrain_gpt.py``."""
    return [
        *MODEL,
        *data,
        *("--global-batch-size", str(SEQUENCES * mode.replicas), "--edgc-log-dir", str(folder)),
        *shlex.split(mode.flags),
        *shlex.split(CONTENDERS[contender]),
        *more,
    ]
