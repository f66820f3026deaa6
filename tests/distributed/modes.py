"""The modes of training that EDGC works in, as one table: each row is run and checked (test_modes.py).

python -m tests.distributed.modes        runs them all and writes docs/compatibility.md with what was seen
"""

import json
import shlex
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from megatron.edgc.compatibility import UNSUPPORTED
from tests.distributed.megatron_runs import REPOSITORY, TINY_GPT, launch

RANKS = 4
ITERATIONS = 4
SAVED_AT = 2


@dataclass(frozen=True)
class Mode:
    """Megatron's flags. ``tolerance`` of full rank against dense: a share of the way parameters went.

    Sums in another order differ by rounding, which Adam magnifies where gradients are small; in half precision
    the parameters themselves are rounded to steps of that size. ``lost``: how much of what was put in may be in neither
    result nor error: sums in fp32, equalised and back, lose a hundredth of what rounding on the wire feeds back; an
    error in bf16 loses half its last bit, at random. ``format`` of the checkpoints: without apex or
    Transformer Engine Megatron cannot load the distributed optimizer from ``torch_dist``.
    """

    flags: str
    edgc: str = ""
    tolerance: float = 1e-3
    lost: float = 2e-5
    format: str = "torch_dist"
    pp: str = "off"  # messages between stages that travel in low rank
    ranks: int = RANKS
    reduces: bool = True  # whether any gradients are: there are several data-parallel ranks, or a tied embedding

    @property
    def fuses(self) -> bool:
        """Whether the two copies of a tied embedding are summed in one sum."""
        apart = "--untie" in self.flags or "--mtp-num-layers" in self.flags
        tied = "--pipeline-model-parallel-size" in self.flags and not apart
        return tied and "--edgc-no-fuse-embedding-sync" not in self.edgc


# Grouped queries, rotary positions, SwiGLU, RMSNorm, no biases, untied embeddings.
LLAMA = (
    "--group-query-attention --num-query-groups 2 --position-embedding-type rope --swiglu --normalization RMSNorm "
    "--disable-bias-linear --untie-embeddings-and-output-weights --bf16 --use-distributed-optimizer "
    "--overlap-grad-reduce --overlap-param-gather"
)

MODES = {
    "plain DDP": Mode("", format="torch"),
    "overlapped reduction": Mode("--overlap-grad-reduce --ddp-bucket-size 20000"),
    "distributed optimizer": Mode("--use-distributed-optimizer", format="torch"),
    "distributed optimizer, all overlapped": Mode(
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 20000",
        format="torch",
    ),
    "pipeline": Mode("--pipeline-model-parallel-size 2"),
    "pipeline, stages before replicas in the order of ranks": Mode(
        "--pipeline-model-parallel-size 2 --use-tp-pp-dp-mapping"
    ),
    "pipeline, tied embeddings in Megatron's two sums": Mode(
        "--pipeline-model-parallel-size 2", "--edgc-no-fuse-embedding-sync", format="torch"
    ),
    "virtual pipeline, distributed optimizer, all overlapped": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        format="torch",
    ),
    "pipeline, embeddings untied": Mode("--pipeline-model-parallel-size 2 --untie-embeddings-and-output-weights"),
    "pipeline, gradients between stages in low rank": Mode(
        "--pipeline-model-parallel-size 2", pp="backward:powersgd:8"
    ),
    "pipeline, messages both ways in low rank": Mode("--pipeline-model-parallel-size 2", pp="both:powersgd:8"),
    "pipeline, messages both ways in 8 bits": Mode("--pipeline-model-parallel-size 2", pp="both:int8"),
    "virtual pipeline and context parallel, gradients between stages in low rank": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--context-parallel-size 2",
        pp="backward:powersgd:8",
    ),
    "pipeline, Optimus-CC": Mode(
        "--pipeline-model-parallel-size 2",
        "--edgc-preset optimus --edgc-study stage_share=0.5 --edgc-dense-wire int8",
        pp="epilogue:powersgd:8",
    ),
    "virtual pipeline": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--use-distributed-optimizer",
        format="torch",
    ),
    "virtual pipeline, overlapped reduction": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 "
        "--overlap-grad-reduce --ddp-bucket-size 20000"
    ),
    "virtual pipeline, messages both ways in low rank": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1",
        pp="both:powersgd:8",
    ),
    "four stages, virtual pipeline, messages not overlapped and both ways in low rank": Mode(
        "--num-layers 8 --pipeline-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 1 "
        "--no-overlap-p2p-communication --global-batch-size 16",
        pp="both:powersgd:8:int8",
        ranks=8,
    ),
    "four stages, no copies of them, gradients between stages in low rank": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 4", pp="backward:powersgd:8"
    ),
    "four stages, no copies of them, embeddings untied, gradients between stages in low rank": Mode(
        "--num-layers 4 --pipeline-model-parallel-size 4 --untie-embeddings-and-output-weights",
        pp="backward:powersgd:8",
        reduces=False,
    ),
    "pipeline, tensor and sequence parallel, gradients between stages in low rank": Mode(
        "--pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel",
        pp="backward:powersgd:8",
        ranks=8,
    ),
    "tensor parallel": Mode("--tensor-model-parallel-size 2"),
    "tensor and sequence parallel, distributed optimizer": Mode(
        "--tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer", format="torch"
    ),
    "experts": Mode("--num-experts 4 --expert-model-parallel-size 2", format="torch"),
    "experts, distributed optimizer, overlapped reduction": Mode(
        "--num-experts 4 --expert-model-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce",
        format="torch",
    ),
    "context parallel": Mode("--context-parallel-size 2"),
    "context parallel, distributed optimizer, overlapped reduction": Mode(
        "--context-parallel-size 2 --use-distributed-optimizer --overlap-grad-reduce", format="torch"
    ),
    "bf16": Mode("--bf16", tolerance=0.2),
    "bf16, distributed optimizer": Mode("--bf16 --use-distributed-optimizer", tolerance=0.2, format="torch"),
    "bf16, weights gathered in 8 bits": Mode(
        "--bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
        "--edgc-param-wire int8",
        tolerance=0.2,
        format="torch",
    ),
    "bf16, tensor parallel, weights gathered in 4 bits": Mode(
        "--bf16 --use-distributed-optimizer --tensor-model-parallel-size 2",
        "--edgc-param-wire int4",
        tolerance=0.2,
        format="torch",
    ),
    "bf16, experts, weights gathered in 8 bits": Mode(
        "--bf16 --use-distributed-optimizer --num-experts 4 --expert-model-parallel-size 2",
        "--edgc-param-wire int8",
        tolerance=0.2,
        format="torch",
    ),
    "bf16, gradients reduced in bf16": Mode("--bf16 --grad-reduce-in-bf16", tolerance=0.2),
    "bf16, error kept in bf16": Mode("--bf16", "--edgc-error-dtype bf16", tolerance=0.2, lost=8e-3),
    "bf16, distributed optimizer, error kept in fp8, factors in fp16": Mode(
        "--bf16 --use-distributed-optimizer",
        "--edgc-error-dtype fp8 --edgc-wire fp16 --edgc-basis-wire fp16",
        tolerance=0.2,
        lost=0.13,
        format="torch",
    ),
    "fp16, loss scale that overflows at first": Mode(
        "--fp16 --initial-loss-scale 262144 --hysteresis 1", tolerance=0.2
    ),
    "bf16, gradients between stages in low rank": Mode(
        "--bf16 --pipeline-model-parallel-size 2", pp="backward:powersgd:8", tolerance=0.2
    ),
    "fp16 that overflows at first, gradients between stages in low rank": Mode(
        "--fp16 --initial-loss-scale 262144 --hysteresis 1 --pipeline-model-parallel-size 2",
        pp="backward:powersgd:8",
        tolerance=0.2,
    ),
    "Llama shape, bf16, distributed optimizer": Mode(LLAMA, tolerance=0.2, format="torch"),
    "Llama shape, bf16, distributed optimizer, pipeline, gradients between stages in low rank": Mode(
        f"{LLAMA} --pipeline-model-parallel-size 2", pp="backward:powersgd:8", tolerance=0.2, format="torch"
    ),
    "multi-token prediction": Mode("--mtp-num-layers 1 --position-embedding-type rope"),
    "multi-token prediction, pipeline": Mode(
        "--mtp-num-layers 1 --position-embedding-type rope --pipeline-model-parallel-size 2",
        format="torch",  # plain Megatron cannot write these copies of a tied embedding as torch_dist
    ),
    "loss per token": Mode("--calculate-per-token-loss"),
    "average in the collective": Mode("--ddp-average-in-collective"),
    "pipeline, steps that Megatron runs again, messages both ways in low rank": Mode(
        "--check-for-spiky-loss --no-check-for-nan-in-loss-and-grad --error-injection-rate 2 "
        "--pipeline-model-parallel-size 2",
        pp="both:powersgd:8",
    ),
    "steps that Megatron runs again": Mode(
        "--check-for-spiky-loss --no-check-for-nan-in-loss-and-grad --error-injection-rate 2"
    ),
    "Triton's kernels": Mode("", "--edgc-study kernels=fused"),
    "Triton's kernels, distributed optimizer, fp16 that overflows at first, error kept in bf16": Mode(
        "--fp16 --initial-loss-scale 262144 --hysteresis 1 --accumulate-allreduce-grads-in-fp32 "
        "--use-distributed-optimizer --overlap-grad-reduce",
        "--edgc-study kernels=fused --edgc-error-dtype bf16",
        tolerance=0.2,
        lost=8e-3,
        format="torch",
    ),
    "int4 engine, distributed optimizer": Mode(
        "--use-distributed-optimizer --overlap-grad-reduce", "--edgc-engine int4 --edgc-preset paper", format="torch"
    ),
    "topk engine, tensor parallel": Mode(
        "--tensor-model-parallel-size 2", "--edgc-engine topk:0.05 --edgc-preset paper"
    ),
}

FULL_RANK = shlex.split(  # as in dense training no error of a spike is scaled down
    "--edgc --edgc-preset paper --edgc-static-rank 64 --edgc-window 2 --edgc-warmup-fraction 0 "
    "--edgc-study spike_limit=inf"
)
# The preset would round messages between stages and gathered weights by their times: modes that do it say so.
COMPRESSED = shlex.split("--edgc --edgc-pp off --edgc-param-wire off --edgc-window 2 --edgc-warmup-fraction 0.25")
LOW_RANK = shlex.split("--edgc-static-rank 8")


@dataclass(frozen=True)
class Seen:
    """What a mode's runs showed, the worst of all ranks. A check that a run did not live to see is a failure."""

    failed: str = ""
    distance: float = float("nan")  # of full rank from dense, as a share of the way parameters went
    lost: float = float("nan")  # of what was put in, relative to its largest entry
    reductions: int = 0
    apart: tuple[str, ...] = ()  # state or parameters that differ where they must not
    resumed_same: bool = False
    ratio: float = float("nan")  # bytes of gradients, plain Megatron's over EDGC's; 0 where none are sent
    bf16_ratio: float = float("nan")  # the same if plain Megatron's were in bf16
    total_ratio: float = float("nan")  # the same of gradients, gathered weights and messages together
    param_ratio: float = float("nan")  # the same of gathered weights
    message_ratio: float = float("nan")  # the same of messages between stages
    stages: tuple[str, ...] = ()
    # by rank: the chunks that made gradients for the stage before, and those they were taken for
    chunks: tuple[tuple[list[int], list[int]], ...] = ()
    state: float = float("nan")  # bytes a parameter that EDGC keeps
    dense: dict[str, torch.Tensor] = field(default_factory=dict)  # rank 0's parameters of the dense run
    compressed: dict[str, torch.Tensor] = field(default_factory=dict)


# also with a volume (test_volume.py)
WITH_VOLUME = (
    "overlapped reduction",
    "distributed optimizer, all overlapped",
    "pipeline, embeddings untied",
    "virtual pipeline, distributed optimizer, all overlapped",
    "virtual pipeline, messages both ways in low rank",
    "tensor and sequence parallel, distributed optimizer",
    "experts",
    "experts, distributed optimizer, overlapped reduction",
    "context parallel",
    "bf16, weights gathered in 8 bits",
    "bf16, gradients reduced in bf16",
    "fp16, loss scale that overflows at first",
    "Llama shape, bf16, distributed optimizer, pipeline, gradients between stages in low rank",
    "multi-token prediction, pipeline",
    "Triton's kernels, distributed optimizer, fp16 that overflows at first, error kept in bf16",
)


def cases(name: str, mode: Mode, folder: Path) -> list[dict[str, Any]]:
    """The four runs of a mode: dense, full rank, compressed with a checkpoint midway, and on from that checkpoint."""
    # dropout: not even plain Megatron finds its random numbers again on a CPU
    base = [*TINY_GPT, "--attention-dropout", "0", "--hidden-dropout", "0", "--train-iters", str(ITERATIONS)]
    base += shlex.split(mode.flags)
    kernels = "--edgc-study kernels=fused"
    shared = "--edgc-fuse-embedding-sync " * mode.fuses + kernels * (kernels in mode.edgc)
    messages = [] if mode.pp == "off" else ["--edgc-pp"]
    which = "both" if mode.pp.startswith("both") else "backward"
    full = [*FULL_RANK, *(messages and [*messages, f"{which}:powersgd:64"]), *shlex.split(shared)]
    edgc = [
        *base,
        *COMPRESSED,
        *([] if "--edgc-engine" in mode.edgc else LOW_RANK),
        *(messages and [*messages, mode.pp]),
        *shlex.split(mode.edgc),
    ]
    checkpoint = str(folder / name)
    saving = ["--save", checkpoint, "--save-interval", str(SAVED_AT), "--ckpt-format", mode.format]
    resuming = ["--load", checkpoint, "--ckpt-format", mode.format]
    return [
        {"name": f"{name}.dense", "arguments": base},
        {"name": f"{name}.full", "arguments": [*base, *full], "full_rank": True},
        {"name": f"{name}.saved", "arguments": [*edgc, *saving]},
        # not by --ckpt-step, which the distributed optimizer's half of Megatron ignores in the format torch
        {"name": f"{name}.resumed", "arguments": [*edgc, *resuming], "latest": [checkpoint, SAVED_AT]},
    ]


def results(runs: list[dict[str, Any]], folder: Path, ranks: int = RANKS) -> dict[str, list[dict[str, Any]]]:
    """Run them one after another on the same ranks; by name, what each rank has left.

    Where the processes end before the last run, those without a result are started once more, with a warning.
    """

    def files(run: dict[str, Any]) -> list[Path]:
        return [folder / f"{run['name']}-{rank}.pt" for rank in range(ranks)]

    listed, text = folder / "runs.json", ""
    for attempt in range(2):
        waiting = [run for run in runs if not all(file.exists() for file in files(run))]
        if not waiting:
            break
        if attempt:
            warnings.warn(f"started again from {waiting[0]['name']} on, after {text[-5000:]}", stacklevel=1)
        listed.write_text(json.dumps(waiting))
        try:
            text = launch(
                REPOSITORY / "tests" / "distributed" / "mode_runs.py",
                [str(listed), str(folder)],
                ranks,
                timeout=3000,
                torchrun=True,  # the many trainings of one start take more time than it
            ).stdout
        except subprocess.TimeoutExpired as late:
            text = f"{late.output}\n{late}"
            break  # there is no time for another start
        finally:
            with (folder / f"output-{ranks}.txt").open("a") as output:
                output.write(text)
    missing = {"failed": f"left nothing; the output ends with {text[-3000:]}"}
    left = {}
    for run in runs:
        left[run["name"]] = [torch.load(one, weights_only=False) if one.exists() else missing for one in files(run)]
    return left


def judged(name: str, left: dict[str, list[dict[str, Any]]]) -> Seen:
    """What the runs of a mode show together."""
    dense, full, saved, resumed = (left[f"{name}.{part}"] for part in ("dense", "full", "saved", "resumed"))
    for part, run in (("dense", dense), ("full", full), ("saved", saved), ("resumed", resumed)):
        for result in run:
            if "failed" in result:
                return Seen(failed=f"{part}: {result['failed']}")
    sent = [sum(column) for column in zip(*(result["bytes"] for result in saved), strict=True)]
    return Seen(
        distance=max(
            distance(a["parameters"], b["parameters"]) / distance(a["parameters"], a["initial"])
            for a, b in zip(dense, full, strict=True)
        ),
        lost=max(result[part] for run in (saved, resumed) for result in run for part in ("lost", "lost_messages")),
        reductions=sum(result["reductions"] for result in saved),
        apart=(
            *(found for run in (full, saved, resumed) for result in run for found in result["apart"]),
            *(found for run in (full, saved, resumed) for found in different(run)),
        ),
        chunks=tuple(result["chunks"] for result in saved if result["chunks"][1]),
        resumed_same=all(
            a["parameters"].keys() == b["parameters"].keys()
            and all(torch.equal(a["parameters"][key], b["parameters"][key]) for key in a["parameters"])
            for a, b in zip(saved, resumed, strict=True)
        ),
        ratio=sent[1] / max(1, sent[0]),
        bf16_ratio=sent[1] * 2 / saved[0]["gradient_bytes"] / max(1, sent[0]),
        total_ratio=sum(sent[1::2]) / max(1, sum(sent[::2])),
        param_ratio=sent[3] / max(1, sent[2]),
        message_ratio=sent[5] / max(1, sent[4]),
        stages=tuple(dict.fromkeys(stage for result in saved for stage in result["stages"])),
        state=max(result["state_bytes"] / result["elements"] for result in saved),
        dense=dense[0]["parameters"],
        compressed=saved[0]["parameters"],
    )


def different(run: list[dict[str, Any]]) -> list[str]:
    """Parameters that are not the same bits on ranks that hold the same part, or replicas, of the model."""
    found = []
    for result in run:
        pipeline = result["place"][0]
        part = next(other for other in run if other["place"] == result["place"])
        stage = next(other for other in run if other["place"][0] == pipeline)
        for name, parameter in result["parameters"].items():
            other = stage if name in result["replicated"] else part
            if not torch.equal(parameter, other["parameters"][name]):
                found.append(f"{name} at {result['place']}")
    return found


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Euclidean, in all parameters."""
    return float(torch.stack([(a[name].double() - b[name].double()).square().sum() for name in a]).sum().sqrt())


def run_all(names: Iterable[str], folder: Path) -> dict[str, Seen]:
    """Run these modes and judge them."""
    names = list(names)
    left = {}
    for ranks in sorted({MODES[name].ranks for name in names}):
        runs = [case for name in names if MODES[name].ranks == ranks for case in cases(name, MODES[name], folder)]
        left.update(results(runs, folder, ranks))
    return {name: judged(name, left) for name in names}


def page(seen: dict[str, Seen]) -> str:
    """docs/compatibility.md."""
    lines = [
        "# What EDGC works with",
        "",
        "With this page you can see which modes of Megatron EDGC was tested in, and which it refuses.",
        "",
        "## Refused before training",
        "",
        "| flag | why |",
        "|---|---|",
        *(f"| `{flag}` | {why} |" for flag, why, _ in UNSUPPORTED),
        "",
        "## Not tried",
        "",
        "- Transformer Engine, training in FP8 (`--fp8-format`), the precision-aware optimizer.",
        "- Several GPUs. What follows ran on a CPU; some of it also ran on [one GPU](gpu.md#real-runs-on-one-gpu).",
        "- Context parallelism with an attention of Megatron's, since Megatron has none for a CPU. It ran with one of "
        "`megatron/edgc/recipes/cpu.py`.",
        "",
        "## Tested",
        "",
        "Written by `python -m tests.distributed.modes` from runs of four or eight gloo processes on a CPU (torch "
        f"{version('torch')}, megatron-core {version('megatron-core')}, Python {sys.version.split()[0]}). The same "
        "runs are tests. Each mode trains a 2-layer GPT, with `balanced` at a fixed rank of 8 unless its flags say "
        "otherwise, for four steps: dense, at full rank, compressed with a checkpoint after the second step, and on "
        "from that checkpoint.",
        "",
        "- *volume*: whether the mode is also tested with a volume, as the presets have one "
        "(`tests/distributed/test_volume.py`).",
        "- *full rank*: the distance of the parameters from those of plain Megatron, divided by the distance that "
        "plain Megatron's moved. In this run errors of spikes are not scaled down.",
        "- *lost*: whether something is lost: the largest relative difference between gradients with their old errors "
        "and sums with the new ones. What the rule for spikes takes away does not count.",
        "- *ranks agree*: factors, scales and ranks in each data-parallel group, and parameters wherever they are "
        "replicated, are the same bits.",
        "- *resumed*: whether the resumed run ends with the same bits as the one that went on.",
        "- *state*: bytes a parameter that EDGC keeps from step to step, on the process that keeps most. They hold the "
        "error feedback (4 bytes in fp32), eight factors of each matrix in 4 bits, and scales of rows and columns. "
        "EDGC keeps them twice with a loss scale, and where Megatron may run a step again.",
        "- *fewer bytes*: gradient bytes of plain Megatron over those of these four steps. The first step is in "
        "`--edgc-dense-wire` (int4 with `balanced`). A tied embedding's sum between stages counts; EDGC fuses it with "
        "the others unless a flag says no. *Than bf16*: the same if plain Megatron's gradients were in bf16. *In all*: "
        "the same of gradients, of updated weights where they are gathered, and of messages where there are stages, "
        "together; then of each of the latter two.",
        "- Gradients are reduced over the data- and context-parallel ranks together. Triton's kernels ran in its "
        "interpreter.",
        "",
        "| mode | volume | flags | full rank | lost | ranks agree | resumed | state | fewer bytes | than bf16 | in all "
        "|",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, one in seen.items():
        mode = MODES[name]
        pp = "" if mode.pp == "off" else f"--edgc-pp {mode.pp}"
        volume = "yes" if name in WITH_VOLUME else ""
        flags = " ".join(part for part in (mode.flags, mode.edgc, pp, f"--ckpt-format {mode.format}") if part)
        if one.failed:
            lines.append(f"| {name} | {volume} | `{flags}` | failed | | | | | | | |")
            continue
        ratios = {"": one.total_ratio, "weights ": one.param_ratio, "messages ": one.message_ratio}
        in_all = ", ".join(f"{what}{ratio:.1f}x" for what, ratio in ratios.items() if ratio)
        fewer = [f"{ratio:.1f}x" if ratio else "-" for ratio in (one.ratio, one.bf16_ratio)]
        lines.append(
            f"| {name} | {volume} | `{flags}` | {one.distance:.1e} | {one.lost:.0e} | {'no' if one.apart else 'yes'} | "
            f"{'same bits' if one.resumed_same else 'differs'} | {one.state:.2f} | {fewer[0]} | {fewer[1]} | "
            f"{in_all} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        seen = run_all(MODES, Path(folder))
    for name, one in seen.items():
        if one.failed:
            print(f"{name}: {one.failed}", file=sys.stderr)
    (REPOSITORY / "docs" / "compatibility.md").write_text(page(seen))


if __name__ == "__main__":
    main()
