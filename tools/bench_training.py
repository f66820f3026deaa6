"""Step times of real Megatron runs on a CPU, dense and with `balanced`, of this checkout beside another one.

    git worktree add --detach ../before COMMIT
    python tools/bench_training.py --against ../before [--widths 256 512] [--repetitions 3]
        [--output docs/bench/training]

Trains a GPT of 4 layers on the corpus of scripts/prepare_corpora.sh, 16 sequences of 128 tokens a step, DP = 2 over
gloo. All run in turn within each repetition, every second repetition in the reverse order. A run's step time is the
median over windows of the median step, without the first window. Writes OUTPUT.json and OUTPUT.md. Each process has one
core: times hold compute and rounding, and a network that costs almost nothing.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

if __name__ == "__main__":
    import _root  # noqa: F401

from edgc.observe.events import read_events
from tools._root import REPOSITORY
from tools.benchmarks.common import versions
from tools.shared.checkout import commit
from tools.shared.command import command_parser, say_error
from tools.shared.files import write, write_json
from tools.shared.machine import device_name
from tools.shared.markdown import header, row
from tools.shared.megatron import corpus_flags

CORPUS = REPOSITORY / "runs" / "data" / "python512"
FLAGS = shlex.split(
    "--num-layers 4 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 --micro-batch-size 8 "
    "--global-batch-size 16 --lr 1e-3 --min-lr 0 --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 "
    "--eval-interval 100000 --log-interval 1000 --edgc --edgc-cpu --edgc-link-gbps 0.05 --edgc-window 10 "
    "--edgc-iteration-sampling-rate 0.2"
)
CONTENDERS = {"dense": ["--edgc-engine", "dense"], "balanced": ["--edgc-preset", "balanced"]}


@dataclass(frozen=True)
class Timing:
    """The step time of one run."""

    width: int
    commit: str
    contender: str
    repetition: int
    step_seconds: float


def main(argv: list[str] | None = None) -> int:
    """Time; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--against", type=Path, required=True, metavar="DIR", help="a checkout of an older commit")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/bench/training"), help="of both files, without ending"
    )
    options = parser.parse_args(argv)
    if not CORPUS.with_name(f"{CORPUS.name}_meta.json").is_file():
        say_error("bench_training", ValueError(f"{CORPUS} is missing: bash scripts/prepare_corpora.sh makes it"))
        return 2
    if options.iterations < 20:
        say_error("bench_training", ValueError("--iterations must be at least 20: two windows"))
        return 2
    checkouts = {commit(folder): folder for folder in (options.against.resolve(), REPOSITORY)}
    if len(checkouts) < 2:
        say_error("bench_training", ValueError(f"{options.against} has the same code as this checkout"))
        return 2
    timings = []
    for width in options.widths:
        runs = [(name, contender) for name in checkouts for contender in CONTENDERS]
        for repetition in range(options.repetitions):
            for name, contender in runs[:: -1 if repetition % 2 else 1]:
                seconds = step_seconds(checkouts[name], width, contender, options.iterations)
                timings.append(Timing(width, name, contender, repetition, seconds))
                print(f"width {width}, {name}, {contender}: {1e3 * seconds:.0f} ms a step", flush=True)
    machine = {"machine": device_name(on_gpu=False), **versions()}
    rows = [asdict(one) for one in timings]
    write_json(options.output.with_suffix(".json"), {**machine, "rows": rows}, indent=1)
    before, after = checkouts
    write(options.output.with_suffix(".md"), page(timings, before, after, machine, options.output.name).encode())
    return 0


def step_seconds(checkout: Path, width: int, contender: str, iterations: int) -> float:
    """Train with the code of a checkout; the median step."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--hidden-size", str(width), "--train-iters", str(iterations), "--edgc-log-dir", folder]
        subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py"]
            + [*corpus_flags(str(CORPUS)), *FLAGS, *own, *CONTENDERS[contender]],
            cwd=checkout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=True,
        )
        windows = [event for event in read_events(Path(folder)) if event["event"] == "window"]
    return median(float(window["step_seconds"]) for window in windows[1:])


def page(timings: list[Timing], before: str, after: str, machine: dict[str, str], raw: str) -> str:
    """The page of these timings."""
    told = ", ".join(value if name == "machine" else f"{name} {value}" for name, value in machine.items())
    lines = [
        "# A training step with `balanced`, before and after",
        "",
        f"Made by `tools/bench_training.py` ({told});",
        f"every run in [{raw}.json]({raw}.json). What `balanced` takes on top of a dense step of the same",
        f"checkout, at commit {before} and at commit {after}: GPTs of 4 layers, DP = 2 on two cores, 16",
        "sequences of 128 tokens a step. Times are medians over runs, with the shortest and the longest. Over loopback",
        "a network costs almost nothing.",
        "",
        *header(["width", "commit", "dense, ms", "balanced, ms", "on top, ms", "of what it was"]),
    ]
    for width in dict.fromkeys(one.width for one in timings):
        on_top = {}
        for name in (before, after):
            found = {
                contender: [1e3 * one.step_seconds for one in timings if (one.width, one.commit, one.contender) == key]
                for contender, key in ((contender, (width, name, contender)) for contender in CONTENDERS)
            }
            on_top[name] = median(found["balanced"]) - median(found["dense"])
            cells = [f"{median(own):.0f} ({min(own):.0f} to {max(own):.0f})" for own in found.values()]
            share = f"{on_top[name] / on_top[before]:.0%}"
            lines.append(row([width, name, *cells, f"{on_top[name]:.0f}", share]))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main())
