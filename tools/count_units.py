"""Count what a step takes if a pipeline stage is cut into more or fewer units of reduction, and compute its time.

    python tools/count_units.py [--units 1 2 3 4 6 12] [--models gpt2_12.1b gpt2_2.5b] [--output docs/bench/units]

Writes OUTPUT.json and OUTPUT.md. No GPU is needed. Times are those of the model of docs/bench/steps.md, in which units
take turns as the planner simulates them.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

from edgc.hosts.units import MAX_UNITS
from tools.benchmarks.common import versions
from tools.benchmarks.step_costs import Count, by_units
from tools.launching.configs import LaunchError
from tools.planning.simulation import Link, StageTimes, Unit, simulate
from tools.planning.training import Training
from tools.shared.command import command_parser, say_error
from tools.shared.files import with_ending, write, write_json
from tools.shared.markdown import header, row


@dataclass(frozen=True)
class Timed:
    """A counted step, and the seconds from the end of the backward pass to that of the last reduction.

    ``alone``: every unit starts when the backward pass has ended. ``overlapped``: as soon as its gradients are there.
    ``backward_seconds``: of the last micro-batch, which alone can hide reductions.
    """

    count: Count
    backward_seconds: float
    alone: float
    overlapped: float


def main(argv: list[str] | None = None) -> int:
    """Count, and write both files; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--units", nargs="+", type=int, default=[1, 2, 3, 4, 6, 12], help="numbers of units")
    parser.add_argument("--models", nargs="+", default=["gpt2_12.1b", "gpt2_2.5b"], help="names in configs/models/")
    parser.add_argument("--output", type=Path, default=Path("docs/bench/units"), help="of both files, without ending")
    options = parser.parse_args(argv)
    if min(options.units) < 1:
        parser.error("--units: must be at least 1")
    try:
        steps = [timed(one, name) for name in options.models for one in by_units(name, options.units)]
    except LaunchError as error:
        say_error("count_units", error)
        return 2
    write_json(
        with_ending(options.output, ".json"),
        {"versions": versions(), "rows": [asdict(one) for one in steps]},
        indent=1,
    )
    write(with_ending(options.output, ".md"), page(steps, options.output.name).encode())
    print(f"written: {options.output}.json, {options.output}.md")
    return 0


def timed(count: Count, model: str) -> Timed:
    """The reductions of this step after a backward pass of one micro-batch of this file's model."""
    backward = 2 * Training.of(model, None).forward_seconds()
    unit = Unit.of(
        max(count.host_seconds, count.device_seconds) / count.units,
        count.sent_bytes / count.units,
        count.collectives // count.units,
    )
    link = Link(count.link_gbps, count.latency_seconds / count.collectives)
    stage = StageTimes(0.0, backward, link, units=(unit,) * count.units)
    alone, overlapped = (simulate([stage], 1, overlapped=overlapped).exposed() for overlapped in (False, True))
    return Timed(count, backward, alone, overlapped)


def page(steps: Sequence[Timed], raw: str) -> str:
    """The page of these steps."""
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# How many units of reduction",
        "",
        f"Made by `tools/count_units.py` ({told}); raw figures in [{raw}.json]({raw}.json).",
        f"EDGC cuts a pipeline stage into at most {MAX_UNITS} [units](../algorithm.md#5-reduction). This page has more",
        "and fewer. Launches, messages and memory are counted, and **times are computed, not measured**: columns and",
        "assumptions are those of [a step, counted](steps.md). Two units take turns: while one computes, the message",
        "of the other is under way. *After the backward pass*: how long the reductions still take when it has ended.",
        "*Alone*: all units start there. *With overlap*: a unit starts when its share of the backward pass of the last",
        "micro-batch is done, as with `--overlap-grad-reduce`. That pass is computed at 40 % of the GPU's peak. The",
        "larger rank of `balanced` is the one that its volume allows. [Why there are three](../gpu.md#how-many-units).",
        "",
    ]
    for title in dict.fromkeys(one.count.model for one in steps):
        own = [one for one in steps if one.count.model == title]
        first = own[0]
        lines += [
            f"## {title}",
            "",
            f"{first.count.gradient_bytes / 2**30:.2f} GiB of gradients in fp32, {first.count.gpu}, "
            f"{first.count.link_gbps:g} Gbit/s a process, a backward pass of {1e3 * first.backward_seconds:.0f} ms.",
            "",
            *header(
                ["method", "rank", "units", "launches", "messages", "memory", "computing, ms", "messages, ms"]
                + ["after the backward pass, ms: alone", "with overlap"]
            ),
            *(row(_cells(one)) for one in own),
            "",
        ]
    return "\n".join(lines)


def _cells(one: Timed) -> list[Any]:
    count = one.count
    assert count.transient_bytes is not None
    seconds = (
        max(count.host_seconds, count.device_seconds),
        count.latency_seconds + count.wire_seconds,
        one.alone,
        one.overlapped,
    )
    return [
        f"`{count.method}`",
        ", ".join(map(str, count.ranks)) if any(count.ranks) else "",
        count.units,
        f"{count.launches:,}",
        count.collectives,
        f"{count.transient_bytes / count.gradient_bytes:.2f}",
        *(f"{1e3 * value:.0f}" for value in seconds),
    ]


if __name__ == "__main__":
    sys.exit(main())
