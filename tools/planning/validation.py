"""The simulation against steps that were measured on limited links (tools/bench_network.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median
from typing import Any

from tools.planning.simulation import Link, StageTimes, Unit, simulate
from tools.shared.markdown import header, row
from tools.shared.pictures import GREY, VERMILION, panels, tidy, to_png

FITTED_AT = 135.0  # Mbit/s: what compressing computes is taken from the points at this rate, and from no others
MICRO_BATCHES = 4  # of the measured runs
MESSAGES = 4  # of a compressed step: two sums in few bits
MODES = {"plain": False, "overlapped": True, "distributed optimizer": False}  # whether reductions are overlapped


@dataclass(frozen=True)
class Checked:
    """A measured point and what the simulation says of it, which was fitted to others."""

    mbit: float
    mode: str
    commit: str
    contender: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def check(points: Sequence[Mapping[str, Any]]) -> list[Checked]:
    """Predict the points of limited links, other than those at ``FITTED_AT``.

    From those, and from steps without a limit, come what a step computes without a network, what each contender
    computes to compress, and how many bytes its interfaces count for one of ours.
    """
    # later repetitions may be of other days, on which the machine computed at another speed
    points = [p for p in points if p.get("repetition", 0) == 0 and p.get("links", "even") == "even"]
    in_time = sorted(points, key=lambda one: one.get("started", 0), reverse=True)
    found = []
    for (mode, overlapped), commit in product(MODES.items(), dict.fromkeys(point["commit"] for point in in_time)):
        sweep = [point for point in points if (point["mode"], point["commit"]) == (mode, commit)]
        of_mode = {(point["contender"], point["mbit"]): point for point in sweep}
        free, dense = of_mode.get(("dense", None)), of_mode.get(("dense", FITTED_AT))
        if dense is None:
            continue
        computing = dense["step_seconds"] - _alone(dense).seconds(dense["counted_bytes"])
        if free is not None:
            computing = free["step_seconds"] - free["communication_seconds"]
        for (contender, mbit), point in of_mode.items():
            fitted = of_mode.get((contender, FITTED_AT))
            if mbit in (None, FITTED_AT) or fitted is None:
                continue
            alone = _alone(fitted)
            compressing, idle = _compressing(fitted, of_mode.get((contender, None)), alone)
            if set(point["ranks"]) == {None}:  # dense, or EDGC has found that compressing does not pay
                compressing, idle = 0.0, 1.0
            link = Link(mbit / 1e3, headers=alone.headers * idle)
            predicted = _step(computing, compressing, point["counted_bytes"], link, overlapped)
            found.append(Checked(mbit, mode, commit, contender, point["step_seconds"], predicted))
    return found


def _alone(fitted: Mapping[str, Any]) -> Link:
    """The link at ``FITTED_AT``. Its interface counts so many bytes for one of ours in this contender's run: gloo's
    reduce-scatter sends as much as an all-reduce.
    """
    return Link(FITTED_AT / 1e3, headers=fitted["interface_bytes"] / fitted["counted_bytes"])


def _compressing(fitted: Mapping[str, Any], free: Mapping[str, Any] | None, link: Link) -> tuple[float, float]:
    """What a reduction computes, and how many times as long as its bytes need it keeps the link.

    Only a run that also compresses without a limit can tell the two apart. Without one the link is taken to be busy.
    """
    nbytes = link.seconds(fitted["counted_bytes"])
    if free is None or set(free["ranks"]) == {None}:
        return max(fitted["communication_seconds"] - nbytes, 0.0), 1.0
    compressing = free["communication_seconds"]
    return compressing, max((fitted["communication_seconds"] - compressing) / nbytes, 1.0)


def _step(computing: float, compressing: float, nbytes: float, link: Link, overlapped: bool) -> float:
    unit = Unit.of(compressing, nbytes, MESSAGES if compressing else 1)
    each = computing / MICRO_BATCHES
    stage = StageTimes(each / 3, 2 * each / 3, link, units=(unit,))
    return simulate([stage], MICRO_BATCHES, overlapped=overlapped, beside=False).seconds


def page(checked: Sequence[Checked], source: str, name: str) -> str:
    """The errors as a page."""
    errors = [abs(one.error) for one in checked]
    lines = [
        "# Predicted and measured steps",
        "",
        "Made by `python tools/plan.py --validate docs/network/points.json --output docs/network/predicted`.",
        "The simulation of a step (`tools/planning/simulation.py`) against",
        f"[measured points]({source}) on limited links of a CPU. It knows what a step computes from dense runs without",
        f"a limit, or, in a mode that has none, from those at {FITTED_AT:g} Mbit/s. It knows what compressing computes",
        f"from the runs at {FITTED_AT:g} Mbit/s.",
        "Where a contender also compresses without a limit, the time on the link is fitted to that run and the one at",
        f"{FITTED_AT:g} Mbit/s. The points in the table were not used for fitting.",
        "All are first repetitions, and the runs of each commit are fitted by themselves. The simulation is told how",
        "many bytes a point has sent, and whether it compressed. Here a run is one stage whose gradients are one unit.",
        "So the table checks computing and bytes over a rate. It does not check pipelines, units that overlap with the",
        "backward pass, or links that processes share.",
        "",
        f"**The median error is {median(errors):.0%}, the worst {max(errors):.0%}.** The targets were 10 % and 20 %.",
        "",
        f"![Predicted against measured]({name}.png)",
        "",
        *header(["mode", "link", "commit", "contender", "measured, s", "predicted, s", "error"]),
        *(
            row(
                [
                    one.mode,
                    f"{one.mbit:g} Mbit/s",
                    one.commit,
                    one.contender,
                    f"{one.measured:.2f}",
                    f"{one.predicted:.2f}",
                    f"{one.error:+.0%}",
                ]
            )
            for one in checked
        ),
        "",
    ]
    return "\n".join(lines)


def picture(checked: Sequence[Checked]) -> bytes:
    """Predicted against measured seconds, with a band of 10 %."""
    figure, (axes,) = panels(1, 1, width=4.5, height=3.6)
    most = 1.1 * max(max(one.measured, one.predicted) for one in checked)
    least = 0.9 * min(min(one.measured, one.predicted) for one in checked)
    axes.plot([least, most], [least, most], color=GREY)
    axes.fill_between([least, most], [0.9 * least, 0.9 * most], [1.1 * least, 1.1 * most], color=GREY, alpha=0.2)
    axes.scatter([one.measured for one in checked], [one.predicted for one in checked], color=VERMILION, zorder=3)
    axes.set_xlabel("measured, s a step")
    axes.set_ylabel("predicted, s a step")
    axes.set_xscale("log")
    axes.set_yscale("log")
    tidy(axes)
    return to_png(figure, dpi=90)
