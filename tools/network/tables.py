"""Tables of points: by mode, repeated, and which link keeps the speed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from tools.network.points import EVEN, Curve, Point, before_and_after, changes_after
from tools.network.setups import CONTENDERS, MODES
from tools.shared.intervals import Interval
from tools.shared.markdown import header, rank_in_words, row

KEPT = (0.5, 0.8, 0.9, 0.95)  # shares of the speed without reductions


def table(points: Sequence[Point]) -> list[str]:
    """A row for each rate, repetition and contender of one mode, compared with the dense run of that repetition.

    Runs of one rate are in the order in which they began, a repetition of one code together.
    """
    lines = header(
        ["link", "commit", "contender", "s a step", "against dense", "mean", "communication, s", "against dense"]
        + ["MB a step, counted", "by the interface", "ranks"]
    )
    for own in _runs(points):
        dense = of_contender(own, "dense")
        for contender in CONTENDERS:
            for point in of_contender(own, contender):
                cells = [
                    rate_name(point.mbit),
                    dated(point),
                    contender,
                    f"{point.step_seconds:.2f}",
                    _change(point, dense, "step_seconds"),
                    f"{point.mean_seconds:.2f}" if point.mean_seconds else "",
                    f"{point.communication_seconds:.2f} ({point.communication_seconds / point.step_seconds:.0%})",
                    _change(point, dense, "communication_seconds"),
                    f"{point.counted_bytes / 1e6:.2f}",
                    f"{point.interface_bytes / 1e6:.2f}",
                    _ranks(point) if contender not in ("dense", "bf16", "int8", "int4") else "",
                ]
                lines.append(row(cells))
    return lines


def changing_table(points: Sequence[Point]) -> list[str]:
    """A row for each run whose links change: a step before it and after it, each the median over windows."""
    lines = header(
        ["link", "commit", "contender", "s a step before", "after", "MB a step, counted", "ranks at the end"]
    )
    for point in sorted(points, key=lambda one: (by_rate(one.mbit), one.started)):
        place = changes_after(len(point.window_seconds))
        before, after = point.window_seconds[:place], point.window_seconds[place:]
        cells = [
            " then ".join(two_rates(point)),
            dated(point),
            point.contender,
            *(f"{median(own):.2f}" for own in (before, after)),
        ]
        lines.append(row([*cells, f"{point.counted_bytes / 1e6:.2f}", _ranks(point)]))
    return lines


def two_rates(point: Point) -> list[str]:
    """Before and after the links change."""
    assert point.mbit is not None
    return list(map(rate_name, before_and_after(point.links, point.mbit)))


def dated(run: Point | Curve) -> str:
    marks = {"old": run.old, "older preset": run.older_preset, "mapped": not run.in_heap}
    return ", ".join([run.commit, *(mark for mark, holds in marks.items() if holds)])


def _ranks(point: Point) -> str:
    return ", ".join(map(rank_in_words, point.ranks))


@dataclass(frozen=True)
class Compared:
    """A run and the dense run beside it."""

    point: Point
    dense: Point

    @property
    def step(self) -> float:
        """How much longer its steps are, as a share: below 0 if they are shorter."""
        return self.point.step_seconds / self.dense.step_seconds - 1

    @property
    def communication(self) -> float:
        """The same of its reductions."""
        return self.point.communication_seconds / self.dense.communication_seconds - 1


def against_dense(points: Sequence[Point], mode: str) -> list[Compared]:
    """All runs of one mode on even links that have a dense run of the same repetition, by rate and then by time."""
    found = []
    for run in _runs([point for point in points if (point.mode, point.links) == (mode, EVEN)]):
        for dense in of_contender(run, "dense")[:1]:
            found += [Compared(point, dense) for point in run if point.contender != "dense"]
    return found


def repeated(points: Sequence[Point]) -> list[str]:
    """A row for each contender with three repetitions or more of one code, the newest such: changes against dense. Of
    what compresses, that code is today's, but for what presets stand for.
    """
    lines = header(["mode", "link", "commit", "contender", "repetitions", *_CHANGES])
    for mode in MODES:
        pairs: dict[tuple[float, str, tuple[str, str, int]], list[Compared]] = {}
        for one in against_dense(points, mode):
            if not one.point.old:
                alike = one.point.session[:3]  # all but the repetition
                pairs.setdefault((by_rate(one.point.mbit), one.point.contender, alike), []).append(one)
        # runs are in the order of time, so that newer code takes the place of older
        newest = {(rate, contender): own for (rate, contender, _), own in pairs.items() if len(own) >= 3}
        for (rate, contender), own in newest.items():
            lines.append(row([mode, rate_name(rate), dated(own[0].point), contender, len(own), *_changes(own)]))
    return lines if len(lines) > 2 else []


def by_link(points: Sequence[Point], contender: str) -> list[str]:
    """A row for each rate at which a contender ran in plain mode: changes against dense of all its runs, those of older
    code included.
    """
    at: dict[float, list[Compared]] = {}
    for one in against_dense(points, "plain"):
        if one.point.contender == contender:
            at.setdefault(by_rate(one.point.mbit), []).append(one)
    found = [row([rate_name(rate), len(own), *_changes(own)]) for rate, own in at.items()]
    return [*header(["link", "runs", *_CHANGES]), *found] if found else []


_CHANGES = ("step", "step, mean", "communication", "communication, mean", "share of a dense step")


def _changes(own: Sequence[Compared]) -> list[str]:
    """The cells of ``_CHANGES``: medians with the least and the most, and means with their intervals."""
    shares = [one.dense.communication_seconds / one.dense.step_seconds for one in own]
    cells = []
    for changes in ([one.step for one in own], [one.communication for one in own]):
        cells += [
            f"**{median(changes):+.0%}** ({min(changes):+.0%} to {max(changes):+.0%})",
            Interval.of(changes).percent(0),
        ]
    return [*cells, f"{min(shares):.0%} to {max(shares):.0%}"]


def keeps_speed(points: Sequence[Point]) -> dict[str, list[tuple[float, bool]]]:
    """By contender, for each of ``KEPT``: the lowest rate at which a step's reductions leave that share of it to the
    rest, and whether no lower rate was timed. An infinite rate: at none that was timed.

    Of plain runs, those of a contender of one sweep. A share is of one run, so that the speed of the machine in that
    hour matters little. Between two rates it is taken to be linear in 1 / rate.
    """
    found: dict[str, list[tuple[float, bool]]] = {}
    for contender in CONTENDERS:
        kept = sorted(
            (1 / by_rate(point.mbit), 1 - point.communication_seconds / point.step_seconds)
            for point in _own_sweep(points, contender)
        )
        if len(kept) > 1:
            found[contender] = [_crossing(kept, share) for share in KEPT]
    return found


def _own_sweep(points: Sequence[Point], contender: str) -> list[Point]:
    """Of plain runs of one contender, that today's code repeats."""
    return sweep([point for point in of_contender(points, contender) if not point.old], "plain")


def _crossing(kept: Sequence[tuple[float, float]], share: float) -> tuple[float, bool]:
    """``kept``: (1 / rate, share of the speed), the highest rate first."""
    least, last = kept[-1]
    if last >= share:
        return (1 / least, True) if least else (math.inf, False)
    for (near, fast), (far, slow) in reversed(list(pairwise(kept))):
        if fast >= share > slow:
            inverse = near + (far - near) * (fast - share) / (fast - slow)
            return (1 / inverse if inverse else math.inf), False
    return math.inf, False


def speed_table(points: Sequence[Point]) -> list[str]:
    """The rates of ``keeps_speed``."""
    found = keeps_speed(points)
    if len(found) < 2:
        return []
    lines = header(["contender", "commit", *(f"{share:.0%} of the speed" for share in KEPT)])
    for contender, rates in found.items():
        of = dated(_own_sweep(points, contender)[0])
        lines.append(row([contender, of, *(_least_rate(rate, below) for rate, below in rates)]))
    return lines


def _least_rate(rate: float, below: bool) -> str:
    if math.isinf(rate):
        return "at no rate timed"
    return f"{'at most ' if below else 'from '}{rate:.0f} Mbit/s"


def curve_table(curves: Sequence[Curve]) -> list[str]:
    """A row for each whole run, compared with the dense one."""
    lines = header(
        ["mode", "link", "contender", "commit", "s of training", "against dense", "validation loss", "gap", "GB sent"]
    )
    for curve in sorted(curves, key=place_of):
        run = curve.mode, curve.mbit, curve.commit
        dense = next((c for c in curves if (c.mode, c.mbit, c.commit) == run and c.contender == "dense"), None)
        compared = dense is not None and curve is not dense
        cells = [
            curve.mode,
            rate_name(curve.mbit),
            curve.contender,
            dated(curve),
            f"{curve.seconds[-1]:.0f}{'' if curve.by_clock else '*'}",
            f"{curve.seconds[-1] / dense.seconds[-1] - 1:+.0%}" if dense and compared else "",
            f"{curve.val_loss:.4f}",
            f"{curve.val_loss / dense.val_loss - 1:+.2%}" if dense and compared else "",
            f"{curve.counted_bytes / 1e9:.2f}",
        ]
        lines.append(row(cells))
    return lines


def newest(points: Sequence[Point]) -> tuple[list[Point], list[Point]]:
    """Those of each contender's newest code in each mode and on each kind of links, and all others, which are older.

    Dense runs are in either, or in both, beside those that are compared with them.
    """

    def place(point: Point) -> tuple[str, str, float]:
        return point.mode, point.links, by_rate(point.mbit)

    def beside(point: Point) -> tuple[object, ...]:
        return *place(point), *point.session

    in_time = sorted(points, key=lambda point: point.started)
    last = {(place(point), point.contender): point.commit for point in in_time}
    compared = [point for point in points if point.contender != "dense"]
    shown = [point for point in compared if last[place(point), point.contender] == point.commit]
    older = [point for point in compared if point not in shown]
    of_shown, of_older = ({beside(point) for point in several} for several in (shown, older))
    for point in points:
        if point.contender == "dense":
            if beside(point) in of_shown or last[place(point), "dense"] == point.commit:
                shown.append(point)
            if beside(point) in of_older or point not in shown:
                older.append(point)
    return shown, older


def sweep(points: Sequence[Point], mode: str) -> list[Point]:
    """On even links, with the code that was timed at most rates, the newest one of several: of each rate and contender
    the repetition whose step is the median.

    A line through points of several days would show how fast the machine was.
    """
    by_code: dict[str, dict[tuple[float | None, str], list[Point]]] = {}
    for point in sorted(points, key=lambda one: one.started):
        if (point.mode, point.links) == (mode, EVEN):
            by_code.setdefault(point.commit, {}).setdefault((point.mbit, point.contender), []).append(point)
    places = max(reversed(by_code.values()), key=lambda own: len({mbit for mbit, _ in own}), default={})
    return [sorted(same, key=lambda point: point.step_seconds)[(len(same) - 1) // 2] for same in places.values()]


def _runs(points: Sequence[Point]) -> list[list[Point]]:
    """Those of one rate, code, machine, length and repetition, by rate and then by time."""
    runs: dict[tuple[object, ...], list[Point]] = {}
    for point in sorted(points, key=lambda one: (by_rate(one.mbit), one.started)):
        runs.setdefault((by_rate(point.mbit), *point.session), []).append(point)
    return list(runs.values())


def of_contender(points: Sequence[Point], contender: str) -> list[Point]:
    return [point for point in points if point.contender == contender]


def _change(point: Point, dense: Sequence[Point], field: str) -> str:
    """Against the dense run of the same repetition."""
    reference = next((getattr(one, field) for one in dense), 0)
    return f"{getattr(point, field) / reference - 1:+.0%}" if reference and point.contender != "dense" else ""


def rate_name(rate: float | None) -> str:
    return "no limit" if rate in (None, math.inf) else f"{rate:.4g} Mbit/s"


def by_rate(rate: float | None) -> float:
    return math.inf if rate is None else rate


def place_of(curve: Curve) -> tuple[int, float, int]:
    """Among others: by mode, rate and contender."""
    return list(MODES).index(curve.mode), by_rate(curve.mbit), list(CONTENDERS).index(curve.contender)
