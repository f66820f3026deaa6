"""Time real Megatron runs between processes whose links are limited.

    bash scripts/bench_network.sh [--quick | --overhead | --stage-ends] [--rates 20 60 135 400 0] [--modes plain ...]
        [--contenders dense balanced ...] [--links even ...] [--repetitions 1] [--to-the-end] [--output docs/network]

Every process has a network namespace of its own; a token bucket filter limits its link (tools/network/links.py). Runs
go through pretrain_gpt.py and gloo, and EDGC's own probe decides what to compress. Each finished run adds a line to
runs/network/points.jsonl, and a run that is there is not repeated with the same code. At the end OUTPUT/README.md,
OUTPUT/points.json and OUTPUT/step.png hold every point, whether it ran now or was in OUTPUT before.

With --to-the-end every contender trains 280 iterations, 5 to 10 minutes each at 135 Mbit/s. OUTPUT/curves.json and
OUTPUT/loss.png then hold the training loss over time.

With --linear nothing is trained. Reductions at many ranks are timed, and OUTPUT/linear.md says how far their times are
from a straight line.

With --overhead, steps of Megatron without EDGC are timed beside those of runs with EDGC, without a limit, into
OUTPUT/overhead.json and OUTPUT/overhead.md.

With --stage-ends, pipelines tell when each stage has its sums, with ranks aligned and without, into
OUTPUT/stage_ends.json and OUTPUT/stage_ends.md.

With --quick: dense and `balanced` at 135 Mbit/s, under four minutes, into runs/network/quick.json.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

from tools._root import REPOSITORY
from tools.network import linear, overhead, stage_ends
from tools.network.links import Links, LinksUnavailable, check
from tools.network.page import markdown, older_markdown
from tools.network.pictures import loss_over_time, over_time, picture
from tools.network.points import CHANGING, EVEN, LINKS, UNEVEN, Curve, Point, before_and_after, changes_after
from tools.network.runs import RunFailed, measure, to_the_end
from tools.network.setups import CONTENDERS, CORPUS, MODES, PLANNED, WINDOW
from tools.network.tables import rate_name, table
from tools.shared.changes import CHANGES
from tools.shared.checkout import commit
from tools.shared.command import command_parser, end_on_signals, say_error
from tools.shared.files import locked, write, write_json
from tools.shared.machine import device_name
from tools.shared.megatron import corpus_flags

POINTS = REPOSITORY / "runs" / "network" / "points.jsonl"
CURVES = REPOSITORY / "runs" / "network" / "curves.jsonl"
QUICK = REPOSITORY / "runs" / "network" / "quick.json"
# What times depend on.
CODE = ("edgc", "megatron", "tools/network", "tools/shared/processes.py", "pretrain_gpt.py", "constraints.txt")
QUICK_RATE = 135.0
RATES = (20.0, 60.0, 135.0, 400.0, 0.0)
RANGE = ("dense", "int8", "powersgd", "balanced")
DEFAULTS: dict[str, Any] = {
    **{"rates": RATES, "modes": ["plain"], "contenders": RANGE, "links": EVEN, "windows": 3, "repetitions": 1},
    **{"output": Path("docs/network"), "report": False},
}
# What may be given beside each flag that says what to time; without one, everything.
TAKEN = {
    "quick": {"windows"},
    "linear": {"output", "report"},
    "overhead": {"repetitions", "output", "report"},
    "stage_ends": {"repetitions", "output", "report"},
    "to_the_end": {"rates", "modes", "contenders", "output", "report"},
}


def main(argv: list[str] | None = None) -> int:
    """Time what the command line asks for; returns the exit status."""
    end_on_signals()
    parser = command_parser(__doc__)
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--quick", action="store_true", help="dense and balanced at 135 Mbit/s alone")
    what.add_argument("--to-the-end", action="store_true", help="train whole runs, for their loss over time")
    what.add_argument("--overhead", action="store_true", help="time steps with EDGC and without it, on fast links")
    what.add_argument("--stage-ends", action="store_true", help="time when the stages of pipelines have their sums")
    what.add_argument("--linear", action="store_true", help="time reductions at many ranks, on links of all kinds")
    parser.add_argument("--rates", type=float, nargs="+", help="Mbit/s; 0: no limit (default: 20 60 135 400 0)")
    parser.add_argument(
        "--modes", nargs="+", metavar="MODE", choices=list(MODES), help=_names(MODES, DEFAULTS["modes"])
    )
    parser.add_argument(
        "--contenders", nargs="+", metavar="NAME", choices=list(CONTENDERS), help=_names(CONTENDERS, RANGE)
    )
    parser.add_argument("--links", choices=LINKS, help="how links differ from the rate (default: even)")
    parser.add_argument("--windows", type=int, help="measured windows of seven steps each (default: 3)")
    parser.add_argument("--repetitions", type=int, help="of each run, in turn forwards and backwards (default: 1)")
    parser.add_argument("--output", type=Path, help="folder of the page (default: docs/network)")
    parser.add_argument(
        "--report", action="store_true", default=None, help="time nothing: make the page of the points kept"
    )
    options = parser.parse_args(argv)
    try:
        _fill_in(options)
        _check_lengths(options.windows, options.links, options.repetitions)
        if options.links != EVEN:  # a third of no limit is no limit
            options.rates = list(filter(None, options.rates))
            if not options.rates:
                raise RunFailed(f"--links {options.links!r}: needs a rate above 0")
        if options.quick:
            quick(options.windows)
        elif options.linear:
            fit_lines(options.output, options.report)
        elif options.overhead:
            compare_with_megatron(options.output, options.repetitions, options.report)
        elif options.stage_ends:
            compare_stages(options.output, options.repetitions, options.report)
        else:
            if options.to_the_end and not options.report:
                whole_runs(options.rates, options.modes, options.contenders)
            elif not options.report:
                sweep(
                    options.rates,
                    options.modes,
                    options.contenders,
                    options.links,
                    options.windows,
                    options.repetitions,
                )
            report(options.output)
    except (LinksUnavailable, RunFailed) as error:
        say_error("bench_network", error)
        return 1
    return 0


def _fill_in(options: argparse.Namespace) -> None:
    """Give options that were left out their defaults. Raises ``RunFailed`` for those that would have no effect."""
    given = {name for name in DEFAULTS if getattr(options, name) is not None}
    for what, taken in TAKEN.items():
        if getattr(options, what) and (unused := sorted(given - taken)):
            raise RunFailed(f"--{unused[0]}: has no effect with --{what.replace('_', '-')}")
    for name in DEFAULTS.keys() - given:
        setattr(options, name, DEFAULTS[name])


def _check_lengths(windows: int, links: str, repetitions: int) -> None:
    """Raises ``RunFailed`` for numbers with which runs could not be measured."""
    least, most = 2 if links in CHANGING else 1, PLANNED // WINDOW - 1
    if not least <= windows <= most:
        raise RunFailed(f"--windows {windows}: must be {least} to {most}")
    if repetitions < 1:
        raise RunFailed(f"--repetitions {repetitions}: must be at least 1")


def _names(known: Iterable[str], default: Sequence[str]) -> str:
    """Help that a shell understands."""
    return f"one or more of {', '.join(map(shlex.quote, known))} (default: {' '.join(default)})"


def quick(windows: int) -> None:
    """The point at which dense spends about a third of a step on communication."""
    begun = time.time()
    points = [timed(QUICK_RATE, "plain", contender, EVEN, 0, windows) for contender in ("dense", "balanced")]
    seconds = round(time.time() - begun)  # of both runs, with their start-up
    write_json(QUICK, {"seconds": seconds, "points": [asdict(point) for point in points]})
    print("\n".join(table(points)))
    print(f"written: {QUICK.relative_to(REPOSITORY)}")


def sweep(
    rates: Sequence[float],
    modes: Sequence[str],
    contenders: Sequence[str],
    links: str,
    windows: int,
    repetitions: int,
) -> None:
    """All combinations; what is compared runs one after the other, in turn forwards and backwards. So where some of it
    is missing, as after an interruption, all of it runs again, and the newest runs count.
    """
    check()
    now, machine = commit(REPOSITORY, *CODE), device_name(on_gpu=False)
    known = read() if not now.endswith("+") else []  # local changes may be others by now
    kept = set(map(_identity, known))
    for repetition in range(repetitions):
        for mode in modes:
            for rate in (rate or None for rate in rates):
                session = now, machine, windows, repetition
                if all((rate, mode, contender, links, *session) in kept for contender in contenders):
                    continue
                for contender in contenders[:: -1 if repetition % 2 else 1]:
                    _keep(POINTS, timed(rate, mode, contender, links, repetition, windows))


def whole_runs(rates: Sequence[float], modes: Sequence[str], contenders: Sequence[str]) -> None:
    """All combinations, once."""
    check()
    now = commit(REPOSITORY, *CODE)
    known = read_curves() if not now.endswith("+") else []
    kept = {(curve.mbit, curve.mode, curve.contender, curve.commit) for curve in known}
    for mode in modes:
        for rate in (rate or None for rate in rates):
            for contender in contenders:
                if (rate, mode, contender, now) in kept:
                    continue
                started = round(time.time())
                with Links([rate] * MODES[mode].links) as links:
                    found = to_the_end(links, mode, contender, corpus_flags(str(CORPUS)))
                curve = Curve(rate, mode, contender, commit=now, started=started, changes=len(CHANGES), **found)
                _keep(CURVES, curve)
                print(
                    f"{mode}, {rate_name(rate)}, {contender}: validation loss {curve.val_loss:.4f} after "
                    f"{curve.seconds[-1]:.0f} s of training ({time.time() - started:.0f} s)",
                    flush=True,
                )


def _keep(file: Path, run: Point | Curve) -> None:
    with locked(file.with_name(f".{file.name}.lock")):
        kept = "".join(json.dumps(line) + "\n" for line in [*_lines(file), asdict(run)])
        write(file, kept.encode())


def fit_lines(output: Path, report: bool) -> None:
    """The page of how linear communication is in the rank; with ``report`` of the figures that are there."""
    raw_file = output / "linear.json"
    if not report:
        check()
        output.mkdir(parents=True, exist_ok=True)
        measured = {"machine": device_name(on_gpu=False), "commit": commit(REPOSITORY, *CODE), "ranks": linear.RANKS}
        fits = []
        for name in linear.SETUPS:
            fits += linear.measure(name)
            worst = (f"{fit.formats} within {max(map(abs, fit.residuals)):.0%}" for fit in fits[-2:])
            print(f"{name}: {', '.join(worst)}", flush=True)
        write_json(raw_file, {**measured, "fits": [asdict(fit) for fit in fits]}, indent=1)
    raw = _figures(raw_file, "--linear")
    fits = [linear.Fit(one["links"], one["formats"], tuple(one["seconds"])) for one in raw["fits"]]
    write(output / "linear.png", linear.picture(fits))
    write(output / "linear.md", linear.page(fits, raw["machine"], raw["commit"], "linear").encode())
    print(f"written: {output}/linear.md, linear.json, linear.png")


def compare_with_megatron(output: Path, repetitions: int, report: bool) -> None:
    """The page of what EDGC costs on fast links; with ``report`` of the runs that are there."""
    if not report:
        _measure(output / "overhead.json", overhead.COMPARED, overhead.measure, repetitions)
    raw = _figures(output / "overhead.json", "--overhead")
    runs = [overhead.Run(**{**one, "steps": tuple(one["steps"])}) for one in raw["runs"]]
    write(output / "overhead.md", overhead.page(runs, raw["machine"], raw["commit"]).encode())
    print(f"written: {output}/overhead.md, overhead.json")


def compare_stages(output: Path, repetitions: int, report: bool) -> None:
    """The page of when the stages of pipelines end; with ``report`` of the runs that are there."""
    if not report:
        _measure(output / "stage_ends.json", stage_ends.COMPARED, stage_ends.measure, repetitions)
    raw = _figures(output / "stage_ends.json", "--stage-ends")
    runs = [stage_ends.Run(**one) for one in raw["runs"]]
    write(output / "stage_ends.md", stage_ends.page(runs, raw["machine"], raw["commit"]).encode())
    print(f"written: {output}/stage_ends.md, stage_ends.json")


def _figures(file: Path, what: str) -> dict[str, Any]:
    """Raises ``RunFailed`` where nothing was measured."""
    if not file.is_file():
        raise RunFailed(f"there is no {file}: {what} without --report measures what it holds")
    found: dict[str, Any] = json.loads(file.read_text())
    return found


def _measure(
    file: Path,
    contenders: Sequence[str],
    measure: Callable[[str, int, Sequence[str]], overhead.Run | stage_ends.Run],
    repetitions: int,
) -> None:
    """Runs that follow each other, in turn forwards and backwards, into a file."""
    check()
    file.parent.mkdir(parents=True, exist_ok=True)
    measured = {"machine": device_name(on_gpu=False), "commit": commit(REPOSITORY, *CODE)}
    runs: list[dict[str, Any]] = []
    for repetition in range(repetitions):
        for contender in contenders[:: -1 if repetition % 2 else 1]:
            begun = time.time()
            runs.append(asdict(measure(contender, repetition, corpus_flags(str(CORPUS)))))
            print(f"{contender}, repetition {repetition + 1}: {time.time() - begun:.0f} s", flush=True)
    write_json(file, {**measured, "runs": runs}, indent=1)  # not before: what was interrupted begins anew


def timed(rate: float | None, mode: str, contender: str, kind: str, repetition: int, windows: int) -> Point:
    """One run. ``kind``: of ``LINKS``."""
    started, code = round(time.time()), commit(REPOSITORY, *CODE)
    rates = [rate] * MODES[mode].links
    after = None
    if kind == UNEVEN and rate is not None:
        rates[0] = rate / 3
    if kind in CHANGING and rate is not None:
        before, after = before_and_after(kind, rate)
        rates = [before] * len(rates)
    with Links(rates) as links:

        def during(window: int) -> None:
            if kind in CHANGING and window == 1 + changes_after(windows):
                for place in range(len(rates)):
                    links.limit(place, after)

        found = measure(links, mode, contender, corpus_flags(str(CORPUS)), windows, during)
    known = len(CHANGES)
    point = Point(rate, mode, contender, repetition, commit=code, started=started, links=kind, changes=known, **found)
    link = rate_name(rate) + ("" if kind == EVEN else f", {kind}")
    print(
        f"{mode}, {link}, {contender}: {point.step_seconds:.2f} s a step, of it {point.communication_seconds:.2f} s "
        f"communication ({time.time() - started:.0f} s)",
        flush=True,
    )
    return point


def read() -> list[Point]:
    """The points of runs on this machine."""
    return list(map(_point, _lines(POINTS)))


def read_curves() -> list[Curve]:
    """The whole runs on this machine."""
    return list(map(_curve, _lines(CURVES)))


def _lines(file: Path) -> list[dict[str, Any]]:
    """Without a last line that a killed command left unfinished."""
    lines = file.read_text().split("\n") if file.is_file() else []
    return [json.loads(line) for line in lines[:-1]]


def _curve(fields: dict[str, Any]) -> Curve:
    return Curve(**{**fields, **{name: tuple(fields[name]) for name in ("seconds", "losses")}})


def _point(fields: dict[str, Any]) -> Point:
    lists = ("ranks", "window_seconds")
    return Point(**{**fields, **{name: tuple(fields.get(name, ())) for name in lists}})


def _identity(point: Point) -> tuple[Any, ...]:
    """What runs of the same code have in common if one of them is enough."""
    return point.mbit, point.mode, point.contender, point.links, *point.session


def report(output: Path) -> None:
    """The page of all points and curves, those that it had before among them; of runs with the same code the newest."""
    known = [_point(one) for one in _before(output, "points")]
    by_time = sorted([*read(), *known], key=lambda point: point.started)
    points = list({_identity(p): p for p in by_time}.values())
    if not points:
        raise RunFailed(f"{output}: there are no points; without --to-the-end and --report they are measured")
    drawn = sorted([*read_curves(), *map(_curve, _before(output, "curves"))], key=lambda curve: curve.started)
    curves = list({(curve.mode, curve.mbit, curve.contender, curve.commit): curve for curve in drawn}.values())
    output.mkdir(parents=True, exist_ok=True)
    machine = "; ".join(sorted({point.machine for point in points}))
    if curves:
        write_json(output / "curves.json", {"curves": [asdict(curve) for curve in curves]}, indent=1)
        write(output / "loss.png", loss_over_time(curves))
    write_json(output / "points.json", {"points": [asdict(point) for point in points]}, indent=1)
    write(output / "step.png", picture(points))
    if changing := [point for point in points if point.links in CHANGING]:
        write(output / "changing.png", over_time(changing))
    write(output / "README.md", markdown(points, machine, curves).encode())
    write(output / "older.md", older_markdown(points).encode())
    print(f"written: {output}/README.md, points.json, step.png")


def _before(output: Path, name: str) -> list[dict[str, Any]]:
    """What the page has had."""
    file = output / f"{name}.json"
    found: list[dict[str, Any]] = json.loads(file.read_text())[name] if file.is_file() else []
    return found


if __name__ == "__main__":
    sys.exit(main())
