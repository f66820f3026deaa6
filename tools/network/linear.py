"""Over which range T_com(r) = c + eta r holds: reductions at many ranks, timed between limited links.

As a module this is one of the processes:  python -m tools.network.linear GROUPS OUTPUT
"""

import json
import math
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from edgc.comm.collectives import Communicator, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.plan.times.comm_cost import LinearCost
from edgc.specs import Parameter
from tools.network.links import Links
from tools.network.runs import failed, started
from tools.shared.intervals import T_95, Interval
from tools.shared.markdown import header, row
from tools.shared.pictures import BLUE, VERMILION, panels, tidy, to_png
from tools.shared.processes import under_way

RANKS = 4, 8, 16, 24, 32, 48, 64, 96, 128
LARGE = 16  # the rank from which on the line holds
REPETITIONS = 7  # of which the median counts; one more comes before them
LAYERS, WIDTH = 4, 256  # of the model of tools/network/setups.py
FORMATS: Mapping[str, Mapping[str, object]] = {
    "fp32": {"preset": "paper"},
    "balanced": {"preset": "balanced", "basis_cycle": 1},
}
COLORS = {"fp32": BLUE, "balanced": VERMILION}


@dataclass(frozen=True)
class Setup:
    """Links in Mbit/s (None: no limit), and how many processes share each: so many groups reduce at the same time."""

    rates: tuple[float | None, float | None]
    groups: int = 1


SETUPS = {
    "60 Mbit/s": Setup((60.0, 60.0)),
    "135 Mbit/s": Setup((135.0, 135.0)),
    "400 Mbit/s": Setup((400.0, 400.0)),
    "no limit": Setup((None, None)),
    "135 and 45 Mbit/s": Setup((135.0, 45.0)),
    "135 Mbit/s, shared by two groups": Setup((135.0, 135.0), groups=2),
}


@dataclass(frozen=True)
class Fit:
    """``LinearCost`` fitted to ``seconds`` at ``RANKS``."""

    links: str  # of ``SETUPS``
    formats: str  # of ``FORMATS``
    seconds: tuple[float, ...]

    @property
    def cost(self) -> LinearCost:
        return LinearCost.fit(RANKS, self.seconds)

    @property
    def residuals(self) -> list[float]:
        """Of what was measured over what the line says, less 1, at each rank."""
        return [seconds / self.cost.at(rank) - 1 for rank, seconds in zip(RANKS, self.seconds, strict=True)]

    @property
    def half_widths(self) -> tuple[float, float]:
        """Of the 95 % intervals of c and η, by the seconds that the line leaves; infinite for a c that was set to 0."""
        cost, ranks = self.cost, np.asarray(RANKS, dtype=float)
        left = sum((seconds - cost.at(rank)) ** 2 for rank, seconds in zip(RANKS, self.seconds, strict=True))
        if cost.intercept == 0:
            freedom = len(ranks) - 1
            return math.inf, T_95[freedom] * math.sqrt(left / freedom / float(ranks @ ranks))
        freedom, centred = len(ranks) - 2, ranks - ranks.mean()
        slope = T_95[freedom] * math.sqrt(left / freedom / float(centred @ centred))
        return slope * math.sqrt(float(ranks @ ranks) / len(ranks)), slope


def measure(name: str) -> list[Fit]:
    """Time all formats and ranks on links of ``SETUPS``. Raises ``RunFailed``."""
    setup = SETUPS[name]
    with Links(setup.rates) as links, tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "seconds.json")
        command = ["-m", "tools.network.linear", str(setup.groups), str(output)]
        places = [place for place in range(len(setup.rates)) for _ in range(setup.groups)]
        with started(links, [(place, command) for place in places], Path(folder)) as processes:
            while under_way(processes):
                time.sleep(0.1)
            if any(process.poll() for process in processes):
                raise failed(name, Path(folder))
        found: Mapping[str, Sequence[float]] = json.loads(output.read_text())
    return [Fit(name, formats, tuple(seconds)) for formats, seconds in found.items()]


def main() -> None:
    """One of the processes. Those of a group are in different namespaces; the first of all writes the seconds."""
    groups, output = int(sys.argv[1]), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    process = dist.get_rank()
    members = [dist.new_group(list(range(place, dist.get_world_size(), groups))) for place in range(groups)]
    group = members[process % groups]
    assert isinstance(group, dist.ProcessGroup)
    communicator = Communicator.uncounted(group)
    shapes = {"qkv": (3 * WIDTH, WIDTH), "proj": (WIDTH, WIDTH), "fc1": (4 * WIDTH, WIDTH), "fc2": (WIDTH, 4 * WIDTH)}
    parameters = [Parameter(f"{layer}.{kind}", shape) for layer in range(LAYERS) for kind, shape in shapes.items()]
    found = {}
    for formats, settings in FORMATS.items():
        # at rank 128 a square matrix saves nothing; one in a million iterations is measured
        given: dict[str, Any] = {
            **settings,
            "static_rank": RANKS[0],
            "min_saving": 1.0,
            "iteration_sampling_rate": 1e-6,
        }
        config = EDGCConfig.from_preset(**given)
        seconds = []
        for rank in RANKS:
            reducer = GradientReducer.of(parameters, config, communicator, torch.device("cpu"))
            reducer.set_rank(rank)
            seconds.append(median([_seconds(reducer, parameters, 1 + turn) for turn in range(1 + REPETITIONS)][1:]))
        found[formats] = seconds
    if process == 0:
        output.write_text(json.dumps(found))
    dist.destroy_process_group()


def _seconds(reducer: GradientReducer, parameters: Sequence[Parameter], iteration: int) -> float:
    """Of the slowest process."""
    gradients = {parameter.name: torch.randn(parameter.shape) for parameter in parameters}
    dist.barrier()
    begin = time.perf_counter()
    run_to_end(reducer.reduce(gradients, iteration))
    taken = torch.tensor(time.perf_counter() - begin, dtype=torch.float64)
    dist.all_reduce(taken, op=dist.ReduceOp.MAX)
    return float(taken)


def page(fits: Sequence[Fit], machine: str, commit: str, name: str) -> str:
    """The fits as a page."""
    size = 4 * LAYERS * 12 * WIDTH**2 / 1e6
    lines = [
        "# Is communication linear in the rank?",
        "",
        f"Made by `bash scripts/bench_network.sh --linear` (commit {commit}; {machine}).",
        f"The raw figures are in [{name}.json]({name}.json).",
        "",
        f"- What is timed is one reduction of the gradients of {LAYERS} layers of width {WIDTH}.",
        f"  They are {size:.1f} MB in fp32.",
        "- Two processes reduce them in low rank. Each process has its own network namespace, and so its own link.",
        "- In the last two rows a second pair of processes uses the same two links.",
        "  It runs the same reduction at the same time.",
        f"- A time is that of the slowest process, the median of {REPETITIONS} reductions. It includes computing.",
        "- *Formats*: the factors travel in fp32, or in the formats of `balanced`.",
        "- *c* and *η* belong to the line T = c + η r. It is fitted to the times T at all ranks r of the table.",
        "  After ± stands half of the 95 % interval, by what the line leaves of these times. A *c* that would be below",
        "  0 is set to 0, and has none.",
        "- The column of a rank shows how far the time lies above (+) or below (-) the line there.",
        "",
        f"![Time against rank]({name}.png)",
        "",
        _answer(fits),
        "",
        *header(["link", "formats", "c, ms", "η, ms", *map(str, RANKS)]),
    ]
    for fit in fits:
        cost = fit.cost
        of_c, of_slope = fit.half_widths
        c, slope = Interval(1e3 * cost.intercept, 1e3 * of_c), Interval(1e3 * cost.slope, 1e3 * of_slope)
        figures = [c.number(1), slope.number(2), *(f"{one:+.0%}" for one in fit.residuals)]
        lines.append(row([fit.links, fit.formats, *figures]))
    return "\n".join([*lines, ""])


def _answer(fits: Sequence[Fit]) -> str:
    """How far times lie from the lines, at large ranks and at small ones."""

    def worst(formats: str, large: bool) -> str:
        own = [fit.residuals for fit in fits if fit.formats == formats]
        found = [abs(one) for fit in own for rank, one in zip(RANKS, fit, strict=True) if (rank >= LARGE) == large]
        return f"{max(found):.1%} in {formats if formats == 'fp32' else f'the formats of `{formats}`'}"

    formats = list(dict.fromkeys(fit.formats for fit in fits))
    large, small = (", ".join(worst(name, of) for name in formats) for of in (True, False))
    return f"From rank {LARGE} on, times are at most this far from the line: {large}. At smaller ranks: {small}."


def picture(fits: Sequence[Fit]) -> bytes:
    """Seconds against rank, a panel for each link, with the lines."""
    names = list(dict.fromkeys(fit.links for fit in fits))
    columns = min(len(names), 3)
    figure, several = panels(-(-len(names) // columns), columns, width=3.6, height=2.8)
    for name, axes in zip(names, several, strict=False):
        for fit in (one for one in fits if one.links == name):
            color = COLORS[fit.formats]
            axes.plot(RANKS, fit.seconds, "o", color=color, markersize=4, label=fit.formats)
            axes.plot([0, RANKS[-1]], [fit.cost.at(rank) for rank in (0, RANKS[-1])], color=color, linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_title(name, fontsize=9)
        axes.set_xlabel("rank")
        axes.set_ylabel("s a reduction")
        tidy(axes)
        axes.legend(fontsize=7)
    return to_png(figure, dpi=80)


if __name__ == "__main__":
    main()
