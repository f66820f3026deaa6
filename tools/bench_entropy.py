"""Time what measuring the entropy of gradients takes: of all entries in every iteration, and of the paper's samples.

    python tools/bench_entropy.py [--widths 256 1024] [--output docs/bench/entropy]

Gradients are random, of four layers of a width. One thread on the CPU measures them in ten iterations, as a reducer
does. The ways take turns. Writes OUTPUT.json and OUTPUT.md.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch

if __name__ == "__main__":
    import _root  # noqa: F401

from edgc.config import EDGCConfig
from edgc.observe.observer import GradientObserver
from edgc.specs import MatrixSpec
from tools._root import REPOSITORY
from tools.benchmarks.common import versions
from tools.shared.checkout import commit
from tools.shared.command import command_parser
from tools.shared.files import with_ending, write, write_json
from tools.shared.intervals import Interval
from tools.shared.machine import device_name
from tools.shared.markdown import header, row

LAYERS, ITERATIONS, REPETITIONS = 4, 10, 15
WHOLE = (1.0, 1.0)
RATES = (WHOLE, (1.0, 0.25), (0.1, 1.0), (0.1, 0.25))  # of iterations, of entries; the last ones are the paper's


@dataclass(frozen=True)
class Timed:
    """``seconds``: of an iteration, the mean of ten, of each repetition. The repetitions of all rates took turns."""

    width: int
    iterations: float
    entries: float
    seconds: tuple[float, ...]


def main(argv: list[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--widths", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, default=Path("docs/bench/entropy"), help="without ending")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = [timed for width in options.widths for timed in measure(width, options.repetitions)]
    machine, at = device_name(on_gpu=False), commit(REPOSITORY)
    made = {"commit": at, "machine": machine, "versions": versions(), "rows": [asdict(one) for one in found]}
    write_json(with_ending(options.output, ".json"), made, indent=1)
    write(with_ending(options.output, ".md"), page(found, options.output.name, machine, at).encode())
    print(f"written: {options.output}.json, {options.output}.md")


def measure(width: int, repetitions: int) -> list[Timed]:
    """All ``RATES`` at one width. One more repetition comes before those that count."""
    shapes = {"qkv": (3 * width, width), "proj": (width, width), "fc1": (4 * width, width), "fc2": (width, 4 * width)}
    matrices = [MatrixSpec(f"{layer}.{kind}", *shape) for layer in range(LAYERS) for kind, shape in shapes.items()]
    gradients = {matrix.name: torch.randn(matrix.rows, matrix.cols) for matrix in matrices}
    found: dict[tuple[float, float], list[float]] = {rates: [] for rates in RATES}
    for turn in range(1 + repetitions):
        for rates in RATES if turn % 2 else reversed(RATES):
            config = EDGCConfig.from_preset("paper", iteration_sampling_rate=rates[0], gradient_sampling_rate=rates[1])
            observer = GradientObserver(matrices, config)
            begin = time.perf_counter()
            for iteration in range(ITERATIONS):
                observer.begin(iteration)
                observer.measure(gradients, iteration)
            found[rates].append((time.perf_counter() - begin) / ITERATIONS)
    return [Timed(width, *rates, tuple(seconds[1:])) for rates, seconds in found.items()]


def page(found: Sequence[Timed], name: str, machine: str, at: str) -> str:
    """The table. Shares are those of repetitions that ran one after the other."""
    whole = {one.width: one.seconds for one in found if (one.iterations, one.entries) == WHOLE}
    lines = [
        "# What measuring entropy costs",
        "",
        f"Made by `python tools/bench_entropy.py` ({machine}, one thread; commit {at}). Every repetition is in",
        f"[{name}.json]({name}.json).",
        "",
        f"- What is timed is the entropy of the gradients of {LAYERS} layers of a width, over {ITERATIONS} iterations.",
        "  The gradients are random.",
        "- *Iterations* and *entries*: the shares of them that are measured. The paper measures a quarter of the",
        "  entries in every tenth iteration.",
        f"- A time is that of one iteration: the mean of the {ITERATIONS}, and of these the median of the repetitions.",
        "- *Of all*: the share of what all entries in every iteration take, the mean of the repetitions ± half its",
        "  95 % confidence interval.",
        "",
        *header(["width", "gradient", "iterations", "entries", "ms an iteration", "of all"]),
    ]
    for one in found:
        shares = [own / all_of_it for own, all_of_it in zip(one.seconds, whole[one.width], strict=True)]
        size = LAYERS * 12 * one.width**2
        share = f"{Interval.of([100 * share for share in shares]).number(1)} %"
        measured = f"{one.iterations:.0%}", f"{one.entries:.0%}", f"{1e3 * median(one.seconds):.3f}"
        lines.append(row([one.width, f"{size / 1e6:.1f} million entries", *measured, share]))
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
