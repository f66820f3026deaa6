"""The simulation against steps that were measured on limited links (tools/bench_network.py)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import median
from typing import Any

from tools.network.setups import MODES, Mode
from tools.planning.placement import Network, Placement, StageLinks
from tools.planning.simulation import StageTimes, Unit, simulate
from tools.shared.markdown import header, row
from tools.shared.pictures import GREY, VERMILION, panels, tidy, to_png

FITTED_AT = 135.0  # Mbit/s: what compressing computes is taken from the points at this rate, and from no others
MICRO_BATCHES = 4  # of the measured runs
MESSAGE_BYTES = 8 * 128 * 256 * 4.0  # of a message between stages that is not compressed
SUMS = 4  # messages of a compressed reduction: two sums in few bits
TCP = 1.067  # bytes on a link for one of a message: those of a dense plain step in points.json
INSIDE = 10.0  # Gbit/s between the processes of a namespace; not measured, and much faster than their link
# Modes, and by whose points each is fitted. Two racks compute and send what four workers do, over other links.
FITTED_BY = {
    **{name: name for name in ("plain", "overlapped", "distributed optimizer", "pipeline", "interleaved pipeline")},
    **{"four workers": "four workers", "two racks of two workers": "four workers"},
}

Point = Mapping[str, Any]  # as points.json has it


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


def check(points: Sequence[Point]) -> list[Checked]:
    """Predict the points of limited links that nothing was fitted to.

    From those at ``FITTED_AT``, and from steps without a limit, come what a step computes without a network, what each
    contender computes to compress, and how many bytes its interfaces count for one of ours.
    """
    points = _median_repetitions([point for point in points if point.get("links", "even") == "even"])
    in_time = sorted(points, key=lambda one: one.get("started", 0), reverse=True)
    found = []
    for (name, fitted_by), commit in product(FITTED_BY.items(), dict.fromkeys(point["commit"] for point in in_time)):
        of_mode, fitting = (
            {(p["contender"], p["mbit"]): p for p in points if (p["mode"], p["commit"]) == (mode, commit)}
            for mode in (name, fitted_by)
        )
        fit = _Fit.of(fitted_by, fitting)
        if fit is None:
            continue
        for (contender, mbit), point in of_mode.items():
            of_fit = mbit == FITTED_AT and name == fitted_by
            if mbit is None or of_fit or (contender, FITTED_AT) not in fitting or _messages(MODES[name], point) is None:
                continue
            predicted = fit.seconds(MODES[name], point)
            found.append(Checked(mbit, name, commit, contender, point["step_seconds"], predicted))
    return found


def _median_repetitions(points: Sequence[Point]) -> list[Point]:
    """Of the repetitions of a point the one whose step is the median: single runs vary with the machine's speed."""
    repeated: dict[tuple[Any, ...], list[Point]] = {}
    for point in points:
        repeated.setdefault(tuple(point[name] for name in ("mode", "commit", "contender", "mbit")), []).append(point)
    return [sorted(own, key=lambda one: one["step_seconds"])[(len(own) - 1) // 2] for own in repeated.values()]


@dataclass(frozen=True)
class _Fit:
    """What the points of a mode and commit say, by contender and rate.

    ``passes``: seconds of all passes of a stage in a step without a network.
    """

    mode: Mode
    points: Mapping[tuple[str, float | None], Point]
    passes: float

    @classmethod
    def of(cls, name: str, points: Mapping[tuple[str, float | None], Point]) -> "_Fit | None":
        """None where dense was not measured at the rates that this needs."""
        mode = MODES[name]
        free, dense = points.get(("dense", None)), points.get(("dense", FITTED_AT))
        if dense is None or (free is None and mode.pipeline > 1):
            return None
        if free is None:
            return cls(mode, points, dense["step_seconds"] - cls(mode, points, 0.0).seconds(mode, dense))
        computing = free["step_seconds"] - free["communication_seconds"]
        passes = MICRO_BATCHES * mode.chunks  # of each kind; a stage waits for as many as there are others
        return cls(mode, points, computing * passes / (passes + mode.pipeline - 1))

    def seconds(self, mode: Mode, point: Point) -> float:
        """A step of this point, in a mode that may have other links."""
        fitted = self.points[point["contender"], FITTED_AT]
        compressing, idle = self._compressing(fitted)
        if _dense(point):
            compressing, idle = 0.0, 1.0
        units = _units(mode, point, compressing)
        each = self.passes / MICRO_BATCHES / mode.chunks
        stages = [
            StageTimes(
                each / 3,
                2 * each / 3,
                own.next,
                activations=MESSAGE_BYTES,
                gradients=_gradient_message(mode, point),
                units=units,
                gathered=point.get("weight_bytes") or 0.0,
                before=own.before,
                ring=own.ring,
                once=own.once,
                direct=own.direct,
            )
            for own in _links(mode, point["mbit"], _headers(fitted) * idle)
        ]
        overlapped = "--overlap-grad-reduce" in mode.flags
        return simulate(stages, MICRO_BATCHES, mode.chunks, overlapped, beside=False).seconds

    def _compressing(self, fitted: Point) -> tuple[float, float]:
        """What a reduction computes, and how many times as long as its bytes need it keeps the link.

        Only a run that also compresses without a limit can tell the two apart. Without one the link is taken to be
        busy.
        """
        own = _links(self.mode, FITTED_AT, _headers(fitted))[0]
        stage = StageTimes(0.0, 0.0, own.next, ring=own.ring, once=own.once, direct=own.direct)
        on_link = sum(sum(stage.seconds(unit)) for unit in _units(self.mode, fitted, 0.0))
        free = self.points.get((fitted["contender"], None))
        if free is None or _dense(free) or not on_link:
            return max(fitted["communication_seconds"] - on_link, 0.0), 1.0
        compressing = free["communication_seconds"]
        return compressing, max((fitted["communication_seconds"] - compressing) / on_link, 1.0)


def _dense(point: Point) -> bool:
    """Whether nothing was compressed: EDGC may have found that it does not pay."""
    return set(point["ranks"]) == {None}


def _links(mode: Mode, mbit: float, headers: float) -> list[StageLinks]:
    """Of each stage. Processes that share a namespace are a node, whose link they share."""
    network = Network(mode.links, mode.sharing, mbit / 1e3 / mode.sharing, INSIDE, latency=0.0)
    stages = Placement(1, mode.replicas, mode.pipeline).links(network, wraps=mode.chunks > 1)
    return [StageLinks(*(replace(link, headers=headers) for link in links)) for links in stages]


def _headers(fitted: Point) -> float:
    """Bytes that the interfaces count for one of ours, in this contender's run: gloo's reduce-scatter sends as much as
    an all-reduce.
    """
    weights = fitted.get("weight_bytes") or 0.0
    return float((fitted["interface_bytes"] - TCP * weights) / (fitted["counted_bytes"] - weights))


def _messages(mode: Mode, point: Point) -> float | None:
    """Bytes of a process's messages to other stages in a step; None: an older point that does not tell."""
    if mode.pipeline == 1:
        return 0.0
    if (known := point.get("message_bytes")) is not None:
        return float(known)
    return MESSAGE_BYTES * _pairs(mode) * 2 if point["contender"] == "dense" else None


def _pairs(mode: Mode) -> float:
    """Of messages in a step, one to the next stage and one back, the mean of all processes."""
    return MICRO_BATCHES * (mode.chunks - 1 / mode.pipeline)


def _gradient_message(mode: Mode, point: Point) -> float:
    """Bytes of a message to the stage before. Those to the next one are not compressed."""
    return (_messages(mode, point) or 0.0) / _pairs(mode) - MESSAGE_BYTES if mode.pipeline > 1 else 0.0


def _units(mode: Mode, point: Point, compressing: float) -> tuple[Unit, ...]:
    """The reduction of a stage, the mean of all; none where nothing is reduced."""
    nbytes = point["counted_bytes"] - (_messages(mode, point) or 0.0) - (point.get("weight_bytes") or 0.0)
    if nbytes <= 0:
        return ()
    if _dense(point):
        return (Unit.of(compressing, nbytes, 1),)
    return (Unit.of(compressing, nbytes, SUMS, ("direct", "once")),)


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
        "Of several repetitions of a point the one counts whose step is the median. The runs of each commit are",
        "fitted by themselves. The simulation is told how many bytes a point has sent, and whether it compressed. The",
        "gradients of a stage are one unit. Two racks are fitted to four workers that have a link each. Four processes",
        "share two cores: the pipelines, `four workers` and `two racks of two workers`. There a process computes",
        "faster while another waits, which the simulation does not know. In the other modes each process has a core.",
        "Several units are not checked.",
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
