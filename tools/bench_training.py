"""Step times of real Megatron runs on a CPU, dense and with `balanced`, of this checkout beside another one.

    git worktree add --detach ../before COMMIT
    python tools/bench_training.py --against ../before [--widths 256 512] [--repetitions 3]
        [--output docs/bench/training]
    python tools/bench_training.py --report

Trains a GPT of 4 layers on the corpus of scripts/prepare_corpora.sh, 16 sequences of 128 tokens a step, DP = 2 over
gloo. All run in turn within each repetition, every second repetition in the reverse order. A run's step time is the
median over windows of the median step, without the first window. What `balanced` adds is taken within a repetition.
OUTPUT.json gets every run as it ends, OUTPUT.md the page, which --report makes of OUTPUT.json without training. Each
process has one core: times hold compute and rounding, and a network that costs almost nothing.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections import Counter
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
from tools.shared.files import with_ending, write, write_json
from tools.shared.machine import device_name
from tools.shared.markdown import header, row
from tools.shared.megatron import corpus_flags
from tools.shared.processes import CPU_TRAINING
from tools.shared.runs import RunError

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
    parser.add_argument("--against", type=Path, metavar="DIR", help="a checkout of an older commit")
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 512])
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/bench/training"), help="of both files, without ending"
    )
    parser.add_argument("--report", action="store_true", help="time nothing: make the page of OUTPUT.json")
    options = parser.parse_args(argv)
    try:
        if not options.report:
            train(options.against, options.widths, options.iterations, options.repetitions, options.output)
        raw = json.loads(with_ending(options.output, ".json").read_text())
        timings = [Timing(**one) for one in raw.pop("rows")]
        text = page(timings, raw, options.output.name)
    except (OSError, ValueError, RunError) as error:
        say_error("bench_training", error)
        return 1 if isinstance(error, RunError) else 2
    write(with_ending(options.output, ".md"), text.encode())
    return 0


def train(against: Path | None, widths: list[int], iterations: int, repetitions: int, output: Path) -> None:
    """Time all runs. Raises ValueError for what cannot be timed, ``RunError`` where training fails."""
    if not CORPUS.with_name(f"{CORPUS.name}_meta.json").is_file():
        raise ValueError(f"{CORPUS} is missing: bash scripts/prepare_corpora.sh makes it")
    if iterations < 20:
        raise ValueError("--iterations must be at least 20: two windows")
    if against is None:
        raise ValueError("--against DIR is missing: the checkout to compare with")
    checkouts = {commit(folder): folder for folder in (against.resolve(), REPOSITORY)}
    if len(checkouts) < 2:
        raise ValueError(f"{against} has the same code as this checkout")
    timings: list[Timing] = []
    runs = [(name, contender) for name in checkouts for contender in CONTENDERS]
    for width in widths:
        for repetition in range(repetitions):
            for name, contender in runs[:: -1 if repetition % 2 else 1]:
                seconds = step_seconds(checkouts[name], width, contender, iterations)
                timings.append(Timing(width, name, contender, repetition, seconds))
                print(f"width {width}, {name}, {contender}: {1e3 * seconds:.0f} ms a step", flush=True)
                raw = {"machine": device_name(on_gpu=False), **versions(), "rows": [asdict(one) for one in timings]}
                write_json(with_ending(output, ".json"), raw, indent=1)


def step_seconds(checkout: Path, width: int, contender: str, iterations: int) -> float:
    """Train with the code of a checkout; the median step. Raises ``RunError`` if training fails."""
    with tempfile.TemporaryDirectory() as folder:
        own = ["--hidden-size", str(width), "--train-iters", str(iterations), "--edgc-log-dir", folder]
        done = subprocess.run(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "pretrain_gpt.py"]
            + [*corpus_flags(str(CORPUS)), *FLAGS, *own, *CONTENDERS[contender]],
            cwd=checkout,
            env={**os.environ, **CPU_TRAINING, "PYTHONPATH": str(checkout)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        if done.returncode != 0:
            raise RunError(f"width {width}, {contender}, {checkout}: {done.stdout[-1500:]}")
        windows = [event for event in read_events(Path(folder)) if event["event"] == "window"]
    return median(float(window["step_seconds"]) for window in windows[1:])


def page(timings: list[Timing], machine: dict[str, str], raw: str) -> str:
    """The page of these timings, the older commit first. A repetition that an interrupted command left undone is not in
    it. Raises ValueError where that leaves nothing to compare.
    """
    told = ", ".join(value if name == "machine" else f"{name} {value}" for name, value in machine.items())
    before, after = dict.fromkeys(one.commit for one in sorted(timings, key=lambda one: one.repetition))
    whole = len(CONTENDERS) * 2
    lines = [
        "# A training step with `balanced`, before and after",
        "",
        f"Made by `tools/bench_training.py` ({told});",
        f"every run in [{raw}.json]({raw}.json). What `balanced` takes on top of a dense step of the same",
        f"checkout, at commit {before} and at commit {after}: GPTs of 4 layers, DP = 2 on two cores, 16",
        "sequences of 128 tokens a step. Each difference and each share is of runs of one repetition, which ran one",
        "after the other. The table has medians over the repetitions, with the least and the most. Over loopback",
        "a network costs almost nothing.",
        "",
        *header(["width", "commit", "dense, ms", "balanced, ms", "on top, ms", "of what it was"]),
    ]
    for width in dict.fromkeys(one.width for one in timings):
        seconds = {
            (one.commit, one.contender, one.repetition): one.step_seconds for one in timings if one.width == width
        }
        ran = Counter(repetition for _, _, repetition in seconds)
        repetitions = sorted(repetition for repetition, runs in ran.items() if runs == whole)
        if not repetitions:
            continue
        on_top = {}
        for name in (before, after):
            dense, balanced = (
                [1e3 * seconds[name, contender, repetition] for repetition in repetitions]
                for contender in ("dense", "balanced")
            )
            on_top[name] = [b - d for d, b in zip(dense, balanced, strict=True)]
            cells = [_spread(own) for own in (dense, balanced, on_top[name])]
            shares = [100 * now / was for was, now in zip(on_top[before], on_top[name], strict=True)]
            lines.append(row([width, name, *cells, "" if name == before else f"{_spread(shares)} %"]))
    return "\n".join([*lines, ""])


def _spread(values: list[float]) -> str:
    return f"{median(values):.0f} ({min(values):.0f} to {max(values):.0f})"


if __name__ == "__main__":
    sys.exit(main())
