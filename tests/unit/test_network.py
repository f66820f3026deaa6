"""Limited links between processes, and the page of what was timed on them."""

import math
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tools import bench_network
from tools.network import linear, overhead, runs, stage_ends
from tools.network.links import Links, LinksUnavailable, check
from tools.network.overhead import ALONE, COMPARED, MAPPED, Run, step_seconds
from tools.network.page import markdown, older_markdown
from tools.network.pictures import loss_over_time, over_time, picture
from tools.network.points import EVEN, FALLING, FREED, LIMITED, RISING, Curve, Point
from tools.network.runs import seconds_of_training
from tools.network.setups import CONTENDERS, MODES, flags, meaning
from tools.network.tables import (
    _crossing,
    by_link,
    changing_table,
    curve_table,
    keeps_speed,
    newest,
    repeated,
    sweep,
    table,
)
from tools.shared import checkout
from tools.shared.changes import CHANGES
from tools.shared.processes import IN_HEAP

SERVER = """
import socket
with socket.create_server(("", 5000)) as server:
    print("listening", flush=True)
    connection = server.accept()[0]
    while connection.recv(1 << 16):
        pass
    connection.sendall(b"!")
"""
CLIENT = """
import socket, sys, time
connection = socket.create_connection((sys.argv[1], 5000))
begin = time.perf_counter()
connection.sendall(b"x" * int(sys.argv[2]))
connection.shutdown(socket.SHUT_WR)
connection.recv(1)
print(time.perf_counter() - begin)
"""
SIZE = 3_000_000


def seconds(links: Links) -> float:
    """That it takes to send 3 MB from the first namespace to the second."""
    command = links.command(1, [sys.executable, "-c", SERVER])
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "listening\n"
        client = links.command(0, [sys.executable, "-c", CLIENT, links.address(1), str(SIZE)])
        return float(subprocess.run(client, capture_output=True, text=True, check=True).stdout)


def test_a_link_is_as_slow_as_asked_and_counts_what_it_carries() -> None:
    try:
        check()
    except LinksUnavailable as why:
        pytest.skip(f"links cannot be limited here: {why}")
    with Links([20.0, None]) as links:
        before = links.sent(0)
        slow = seconds(links)
        assert slow > 1.1, "1.2 s at 20 Mbit/s"
        assert 1.0 < (links.sent(0) - before) / SIZE < 1.15, "with headers"
        links.limit(0, 200.0)
        assert seconds(links) < 0.75 * slow
        links.limit(0, None)
        links.limit(1, 20.0)
        assert seconds(links) > 1.1, "the receiver's link limits, too"
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert "edgc-" not in listed, "nothing is left"


MEASURED = (
    *("step_seconds", "communication_seconds", "counted_bytes", "interface_bytes", "start_bytes", "steps", "ranks"),
    *("flags", "window_seconds", "preset_settings"),
)
POINT = Point(
    *(135.0, "plain", "dense", 0, 2.0, 0.8, 14e6, 14.5e6, 40e6, 21, (None,), "abc1234", round(time.time())),
    flags=flags("plain", "dense"),
    preset_settings={},
    in_heap=True,
)


def changed(point: Point, **changes: Any) -> Point:
    """With the flags that a run so changed has today, and with what its preset means today."""
    other = replace(point, **changes)
    today = meaning(other.mode, other.contender)
    return replace(other, flags=flags(other.mode, other.contender), preset_settings=today)


def test_the_table_compares_with_dense_on_the_same_link_in_the_same_repetition() -> None:
    slow = changed(POINT, mbit=20.0, step_seconds=6.0, communication_seconds=4.8)
    points = [
        *(
            POINT,
            slow,
            changed(slow, step_seconds=5.0, repetition=1),
            changed(POINT, contender="int8", step_seconds=1.5, communication_seconds=0.2, counted_bytes=3.6e6),
        ),
        changed(slow, contender="balanced", step_seconds=3.0, communication_seconds=1.2, ranks=(40,)),
        changed(slow, contender="balanced", step_seconds=3.4, communication_seconds=1.2, ranks=(40,), repetition=1),
    ]
    rows = cells(table(points))
    assert [(row[0], row[2], row[3], row[4]) for row in rows] == [
        ("20 Mbit/s", "dense", "6.00", ""),
        ("20 Mbit/s", "balanced", "3.00", "-50%"),
        ("20 Mbit/s", "dense", "5.00", ""),
        ("20 Mbit/s", "balanced", "3.40", "-32%"),
        ("135 Mbit/s", "dense", "2.00", ""),
        ("135 Mbit/s", "int8", "1.50", "-25%"),
    ]
    assert rows[0][6] == "4.80 (80%)" and rows[1][7] == "-75%" and rows[5][8] == "3.60" and rows[1][10] == "40"
    assert [row[1] for row in rows[:2]] == ["abc1234", "abc1234, old"], "only what compresses gets old"
    assert cells(table([replace(POINT, in_heap=False)]))[0][1] == "abc1234, mapped"
    newer = [changed(one, commit="def5678", started=one.started + 99) for one in (slow, points[4])]
    newer[0] = changed(newer[0], step_seconds=4.0)
    rows = cells(table([*newer, *points]))
    assert [(row[1][:7], row[3], row[4]) for row in rows[:6]] == [
        ("abc1234", "6.00", ""),
        ("abc1234", "3.00", "-50%"),
        ("abc1234", "5.00", ""),
        ("abc1234", "3.40", "-32%"),
        ("def5678", "4.00", ""),
        ("def5678", "3.00", "-25%"),
    ], "each code is compared with its own dense run"
    changing = changed(POINT, links=FALLING, window_seconds=(2.0, 2.1, 2.5, 4.0))
    page = markdown([*points, changing], "a machine")
    assert "## Plain\n" in page and f"## Plain, {FALLING}" in page and "changing.png" in page and "abc1234" in page
    assert picture([*points, changing]).startswith(b"\x89PNG") and over_time([changing]).startswith(b"\x89PNG")


def test_the_page_has_the_newest_code_of_each_contender_and_another_page_the_rest() -> None:
    def at(code: str, *contenders: str, mbit: float = 135.0, links: str = EVEN) -> list[Point]:
        run = changed(
            POINT, mbit=mbit, links=links, commit=code, started=POINT.started + int(code), window_seconds=(1.0,) * 6
        )
        return [changed(run, contender=name) for name in contenders]

    first, second = at("1", "dense", "int8", "balanced"), at("2", "dense", "balanced")
    elsewhere = [*at("1", "dense", "balanced", mbit=60.0), *at("1", "dense", "balanced", links=FALLING)]
    points = [*second, *first, *elsewhere]
    shown, older = newest(points)
    assert all(point in shown for point in [*first[:2], *second, *elsewhere]) and len(shown) == len(points) - 1
    assert sorted((point.commit, point.contender) for point in older) == [("1", "balanced"), ("1", "dense")]
    assert newest([*first, *at("3", "dense")])[0] == [*first[1:], first[0], *at("3", "dense")], "dense repeats nothing"
    page, rest = (
        [
            tuple(cell.strip() for cell in line.split("|")[2:4])
            for line in text.split("## Plain")[1].splitlines()
            if "135 Mbit/s |" in line
        ]
        for text in (markdown([*second, *first], "a machine"), older_markdown(points))
    )
    assert page == [("1", "dense"), ("1, old", "int8"), ("2", "dense"), ("2, old", "balanced")]
    assert rest == [("1", "dense"), ("1, old", "balanced")]


def test_a_sweep_is_of_the_newest_code_at_most_rates_and_of_the_median_repetition() -> None:
    newer = changed(POINT, commit="def5678", started=POINT.started + 9)
    times = [changed(newer, repetition=place, step_seconds=seconds) for place, seconds in enumerate((2.5, 2.2, 2.1))]
    newest = changed(newer, commit="9999999", started=POINT.started + 99)
    points = [POINT, changed(POINT, mbit=60.0), *times, changed(newer, mbit=60.0), newest]
    assert [
        (one.commit, one.mbit, one.step_seconds) for one in sweep([*points, changed(newer, links=FALLING)], "plain")
    ] == [
        ("def5678", 135.0, 2.2),
        ("def5678", 60.0, 2.0),
    ]


def cells(lines: list[str]) -> list[list[str]]:
    """Of a table without its header."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


def test_the_summary_has_medians_over_three_repetitions_of_todays_code() -> None:
    points = [changed(POINT, repetition=place) for place in range(3)]
    new = changed(POINT, contender="balanced", changes=len(CHANGES))
    for place, seconds in enumerate((1.2, 1.0, 1.5)):
        points.append(changed(new, repetition=place, step_seconds=seconds, communication_seconds=seconds / 10))
    assert repeated(points[:5]) == [], "two are too few"
    assert repeated([*points[:5], changed(points[5], changes=0)]) == [], "one is old"
    assert repeated([*points[:5], changed(points[5], commit="def5678")]) == [], "one is of other code"
    assert cells(repeated(points)) == [
        [
            "plain",
            "135 Mbit/s",
            "abc1234",
            "balanced",
            "3",
            "**-40%** (-50% to -25%)",
            "-38 % ± 31",
            "**-85%** (-88% to -81%)",
            "-85 % ± 8",
            "40% to 40%",
        ]
    ]


def test_the_table_by_link_has_all_plain_runs_of_a_contender() -> None:
    points = [changed(POINT, repetition=place) for place in range(2)]
    points += [changed(POINT, contender="balanced", repetition=0, step_seconds=1.0, changes=0)]  # of older code
    points += [changed(POINT, contender="balanced", repetition=1, step_seconds=1.2, changes=len(CHANGES))]
    others = [changed(points[-1], contender="fast"), changed(points[-1], repetition=2)]  # the last has no dense run
    others += [changed(one, mode="overlapped") for one in points]
    assert cells(by_link([*points, *others], "balanced")) == [
        ["135 Mbit/s", "2", "**-45%** (-50% to -40%)", "-45 % ± 64", "**+0%** (+0% to +0%)", "+0 % ± 0", "40% to 40%"]
    ]
    assert by_link(points[:2], "balanced") == []
    assert "## `balanced` by link" in markdown(points, "a machine")


@pytest.mark.parametrize("other", [{"machine": "another"}, {"window_seconds": (1.0,) * 6}])
def test_runs_of_another_machine_or_length_are_compared_with_their_own_dense_run(other: dict[str, Any]) -> None:
    balanced = changed(POINT, contender="balanced", step_seconds=1.0, changes=len(CHANGES))
    later = [changed(one, step_seconds=2 * one.step_seconds, **other) for one in (POINT, balanced)]
    points = [POINT, balanced, *(replace(one, started=one.started + 99) for one in later)]
    assert [row[4] for row in cells(table(points))] == ["", "-50%", "", "-50%"]
    third = [changed(one, repetition=1) for one in (POINT, balanced)]
    assert repeated([*points, *third]) == [], "two of one session and one of another"
    assert len({bench_network._identity(point) for point in points}) == 4


def test_the_rate_that_keeps_the_speed_lies_between_those_that_were_timed() -> None:
    def at(contender: str, mbit: float | None, communication: float) -> Point:
        point = changed(POINT, contender=contender, mbit=mbit, communication_seconds=communication)
        return replace(point, changes=len(CHANGES))

    points = [at("dense", None, 1e-9), at("dense", 800.0, 0.1), at("dense", 100.0, 0.8)]
    points += [at("balanced", None, 0.02), at("balanced", 20.0, 0.08), at("int8", 100.0, 0.1)]
    points += [at("powersgd", 400.0, 0.3), at("powersgd", 100.0, 0.5)]
    other_day = replace(at("dense", 135.0, 1.9), commit="def5678")
    other_day_of_int4 = [replace(at("int4", rate, 0.1), commit="def5678") for rate in (20.0, 135.0)]
    found = keeps_speed([*points, other_day, *other_day_of_int4])
    assert found["int4"] == [(20.0, True)] * 4, "its own sweep"
    half, most, nine, nearly = found["dense"]  # of steps of 2 s
    assert half == (100.0, True), "no rate was timed at which reductions take half of a step"
    # 0.2 of 2 s at a seventh of the way from 1/800 to 1/100
    assert nine == (pytest.approx(1 / (1 / 800 + (1 / 100 - 1 / 800) / 7)), False)
    assert most == (pytest.approx(1 / (1 / 800 + (1 / 100 - 1 / 800) * 3 / 7)), False) and nearly[0] == 800.0
    assert found["balanced"] == [(20.0, True)] * 4 and "int8" not in found, "one point is no sweep"
    assert found["powersgd"][2:] == [(math.inf, False)] * 2, "at no rate that was timed"
    assert keeps_speed([at("dense", None, 0.0)]) == {}
    page = markdown(points, "a machine")
    assert f"| dense | abc1234 | at most 100 Mbit/s | from {most[0]:.0f} Mbit/s | from {nine[0]:.0f} Mbit/s |" in page
    assert "| powersgd | abc1234 | at most 100 Mbit/s | from 160 Mbit/s | at no rate timed | at no rate timed |" in page


def test_the_slowest_rate_that_keeps_the_speed_counts_where_a_faster_one_does_not() -> None:
    assert _crossing([(0.0, 0.96), (1 / 800, 0.88), (1 / 400, 0.91)], 0.9) == (400.0, True)
    assert _crossing([(0.0, 0.96), (1 / 800, 0.88)], 0.9) == (pytest.approx(1067, rel=1e-3), False)


def test_a_run_whose_links_change_has_a_time_before_and_one_after() -> None:
    run = changed(POINT, mbit=900.0, links=FALLING, window_seconds=(1.0, 1.2, 1.1, 3.0, 2.0, 2.2))
    assert cells(changing_table([run])) == [
        ["900 Mbit/s then 300 Mbit/s", "abc1234", "dense", "1.10", "2.20", "14.00", "dense"]
    ]
    rising = changed(run, links=RISING)
    assert cells(changing_table([rising]))[0][0] == "300 Mbit/s then 900 Mbit/s"
    freed = changed(run, links=FREED)
    assert cells(changing_table([freed]))[0][0] == "900 Mbit/s then no limit"
    assert over_time([run, rising]).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [(FALLING, 90.0, 30.0), (RISING, 30.0, 90.0), (LIMITED, None, 90.0), (FREED, 90.0, None)],
)
def test_links_change_in_the_middle_of_what_is_measured(
    kind: str, before: float | None, after: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []

    class Recorded(Links):
        def __enter__(self) -> Links:
            self.now = list(self._rates)
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def limit(self, place: int, rate: float | None) -> None:
            self.now[place] = rate

    def measure(links: Recorded, *given: Any) -> dict[str, Any]:
        *_, windows, during = given
        for window in range(1, 2 + windows):
            during(window)
            seen.append(tuple(links.now))
        return {name: getattr(POINT, name) for name in MEASURED}

    monkeypatch.setattr(bench_network, "Links", Recorded)
    monkeypatch.setattr(bench_network, "measure", measure)
    point = bench_network.timed(90.0, "plain", "dense", kind, 0, 4)
    assert seen == [(before, before)] * 2 + [(after, after)] * 3, (
        "the warm-up and two windows, then two windows and the end"
    )
    assert point.links == kind


def test_tensors_stay_in_the_heap_unless_a_run_leaves_that_out(tmp_path: Path) -> None:
    class Here:
        def address(self, place: int) -> str:
            return "127.0.0.1"

        def command(self, place: int, command: Sequence[str]) -> list[str]:
            return list(command)

    script = ["-c", "import os; print(os.environ.get('MALLOC_MMAP_MAX_'))"]
    for without, told in (((), "0"), (IN_HEAP, "None")):
        with runs.started(Here(), [(0, script)], tmp_path, without) as (process,):  # type: ignore[arg-type]
            process.wait(60)
        assert (tmp_path / "0.log").read_text().strip() == told


def test_the_page_of_overhead_compares_with_megatron_alone_in_the_same_repetition() -> None:
    log = " iteration 1/ 280 | elapsed time per iteration (ms): 1250.0 | learning rate: 1.0\n"
    assert step_seconds(3 * log) == (1.25, 1.25, 1.25)
    times = {(name, 1): (2.0, 2.0, 2.0) for name in COMPARED} | {(ALONE, 2): (1.0, 1.0, 1.0)}
    times |= {(ALONE, 0): (1.0, 1.0, 1.6), ("dense", 0): (1.0, 1.1, 1.1), ("balanced", 0): (1.1, 1.2, 1.6)}
    times |= {(MAPPED, 0): (1.2, 1.2, 1.2)}
    runs = [Run(name, repetition, steps, 100.0 * repetition) for (name, repetition), steps in times.items()]
    rows = cells(overhead.page(runs, "a machine", "abc1234").splitlines()[-14:])
    assert rows[3:6] == [
        [MAPPED, "1", "1.20", "+20.0%", "+0.0%", "0"],
        [MAPPED, "2", "2.00", "+0.0%", "+0.0%", "100"],
        [MAPPED, "median", "**1.60**", "**+10.0%**", "**+0.0%**", "**50**"],
    ]
    assert rows[6] == ["dense", "1", "1.10", "+10.0%", "-11.1%", "0"]
    assert rows[11] == ["balanced", "median", "**1.60**", "**+10.0%**", "**+4.2%**", "**50**"]


def test_the_page_of_stage_ends_has_the_slowest_process_of_each_stage() -> None:
    first = (((1.0, 1.5), (11.0, 11.5)), ((1.2, 1.7), (11.2, 11.4)))  # two processes, two steps
    second = (((0.5, 1.9), (10.5, 11.0)), ((0.7, 1.8), (10.7, 11.1)))
    run = stage_ends.Run("paper-begun", 0, (None, 40), (*first, *second))
    assert run.begins(1) == pytest.approx([0.6, 10.6]) and run.ends(0) == [1.7, 11.5]
    (row,) = cells(stage_ends.page([run], "a machine", "abc1234").splitlines()[-3:])
    assert row == ["1", "paper-begun", "dense, 40", "0.50", "0.50", "0.90", "**-0.10** (-0.40 to +0.20)", "9.60"]


def test_the_page_of_stage_ends_compares_steps_of_the_same_repetition() -> None:
    def run(contender: str, repetition: int, step: float, wait: float) -> stage_ends.Run:
        first, second = ((0.0, 1.0), (step, 1.0 + step)), ((0.0, 1.0 - wait), (step, 1.0 + step - wait))
        return stage_ends.Run(contender, repetition, (8, 8), (first, first, second, second))

    runs = [run("dense", 0, 4.0, 0.5), run("paper-not-aligned", 0, 3.0, 0.5), run("paper-begun", 0, 3.3, 0.1)]
    runs += [run("dense", 1, 8.0, 0.5), run("paper-not-aligned", 1, 6.0, 0.5), run("paper-begun", 1, 6.6, 0.1)]
    assert cells(stage_ends.page(runs, "a machine", "abc1234").splitlines()[-4:]) == [
        ["paper-not-aligned", "-0.50 ± 0.00", "4.50 ± 19.06", "-25.0 % ± 0.0"],
        ["paper-begun", "-0.10 ± 0.00", "4.95 ± 20.96", "+10.0 % ± 0.0"],
    ]


def test_what_is_measured_is_of_the_steps_after_a_warm_up_of_any_length() -> None:
    stages = [{"reduce_seconds": 0.25}, {"reduce_seconds": None}]
    closed = [
        {
            "iteration": end,
            "total_bytes": 100.0 * end,
            "time": 2.0 * end,
            "step_seconds": 1.5,
            "stages": stages,
            "ranks": [8],
        }
        for end in (3, 7, 14, 21)
    ]
    found = runs.measured(closed, [50.0, 360.0, 800.0, 1500.0, 2340.0], 3)
    assert found["steps"] == 18 and found["counted_bytes"] == 100.0 and found["mean_seconds"] == 2.0
    assert found["start_bytes"] == 310.0 and found["interface_bytes"] == 110.0
    assert found["step_seconds"] == 1.5 and found["communication_seconds"] == 0.25 and found["ranks"] == (8,)


def test_a_point_with_other_flags_is_old() -> None:
    assert not POINT.old and replace(POINT, flags=POINT.flags.replace("--lr 1e-3", "--lr 1e-4")).old


def test_the_page_says_which_rows_are_of_presets_that_stood_for_something_else() -> None:
    today = changed(POINT, contender="balanced", commit="def5678", changes=len(CHANGES))
    settings: dict[str, Any] = dict(today.preset_settings or {})
    assert settings["error_gain"] == 0.5 and not today.older_preset
    unknown = replace(today, commit="abc1234", preset_settings=None)
    other = replace(unknown, preset_settings={**settings, "error_gain": 1.0})
    assert "no error waits" in unknown.older_preset and other.older_preset == "error_gain 1.0"
    for contender in ("dense", "int4", "powersgd"):
        assert not replace(changed(POINT, contender=contender), preset_settings=None).older_preset, "no volume"
    curve = Curve(135.0, "plain", "balanced", (1.0,) * 40, (1.0,) * 40, 2.0, 4e9, "abc1234", 1)
    assert curve.older_preset and not replace(curve, preset_settings=settings).older_preset
    rises = [label for label, _ in CHANGES].index("few bytes while the learning rate rises")
    assert replace(curve, changes=rises).old, "whole runs have a warm-up of the learning rate"
    assert not replace(curve, changes=len(CHANGES)).old

    assert "older preset" not in markdown([POINT, today], "a machine")
    points = [
        POINT,
        other,
        replace(today, started=other.started + 99),
        changed(POINT, commit="def5678", started=POINT.started + 99),
    ]
    shown, older = markdown(points, "a machine"), older_markdown(points)
    assert "| def5678 | balanced |" in shown and "older preset" not in shown
    assert "    - `error_gain 1.0` in `balanced` (abc1234);" in older and "in all others" not in older
    assert "| abc1234, older preset | balanced |" in older
    text = markdown([POINT, unknown], "a machine")
    assert "within the same volume, in all others." in text and "| abc1234, older preset | balanced |" in text
    assert keeps_speed([unknown, replace(unknown, mbit=20.0)]), "summaries keep what is known of them"
    steps = [Run(name, 0, (1.0,), 0.0, {}) for name in COMPARED[:3]]
    page = overhead.page([*steps, Run("balanced", 0, (1.0,), 0.0, None)], "a machine", "abc1234")
    assert "- `balanced` is an older preset here. What differs: no error waits" in page
    assert "older" not in overhead.page([*steps, Run("balanced", 0, (1.0,), 0.0, settings)], "a machine", "abc1234")


def test_seconds_of_training_hold_what_lies_between_the_steps() -> None:
    windows = [{"time": 100.0 + 15 * place, "iteration": 7 * (1 + place), "step_seconds": 2.0} for place in range(3)]
    assert seconds_of_training(windows) == (14.0, 29.0, 44.0)


def test_a_sweep_times_what_is_not_there_and_keeps_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []

    def measured(rate: float | None, mode: str, contender: str, kind: str, repetition: int, windows: int) -> Point:
        timed.append((contender, repetition))
        return changed(
            POINT,
            **{"mbit": rate, "mode": mode, "contender": contender, "repetition": repetition, "commit": code},
            window_seconds=(1.0,) * windows,
            machine="this one",
        )

    monkeypatch.setattr(bench_network, "device_name", lambda on_gpu: "this one")
    code = "abc1234"
    monkeypatch.setattr(bench_network, "POINTS", tmp_path / "points.jsonl")
    monkeypatch.setattr(bench_network, "check", lambda: None)
    monkeypatch.setattr(bench_network, "commit", lambda *_: code)
    monkeypatch.setattr(bench_network, "timed", measured)
    asked = [135.0], ["plain"], ["dense", "balanced"], "even"
    bench_network.sweep(*asked, windows=3, repetitions=2)
    assert timed == [("dense", 0), ("balanced", 0), ("balanced", 1), ("dense", 1)], "in turn forwards and backwards"
    with (tmp_path / "points.jsonl").open("a") as lines:
        lines.write('{"mbit": 13')  # a killed command's
    bench_network.sweep(*asked, windows=3, repetitions=3)
    assert timed[4:] == [("dense", 2), ("balanced", 2)], "only what is missing"
    assert len(bench_network.read()) == 6
    bench_network.sweep(*asked, windows=4, repetitions=1)
    assert len(timed) == 8, "with more windows it is another run"
    bench_network.sweep([135.0], ["plain"], ["dense", "fast"], "even", windows=3, repetitions=1)
    assert timed[8:] == [("dense", 0), ("fast", 0)], "none is set against a run of another time"
    code = "abc1234+"
    for _ in range(2):
        bench_network.sweep(*asked, windows=3, repetitions=1)
    assert len(timed) == 14, "what had local changes may have had others"
    code = checkout.commit(tmp_path)  # no repository
    for _ in range(2):
        bench_network.sweep(*asked, windows=3, repetitions=1)
    assert len(timed) == 18, "nobody knows what code that was"


def test_whole_runs_are_compared_with_the_dense_one() -> None:
    losses = tuple(6.0 - place / 10 for place in range(40))
    dense = Curve(
        135.0,
        "plain",
        "dense",
        tuple(14.0 * (1 + place) for place in range(40)),
        losses,
        2.0,
        4e9,
        "abc",
        1,
        by_clock=True,
        in_heap=True,
    )
    other = replace(dense, contender="balanced", seconds=tuple(7.0 * (1 + p) for p in range(40)), val_loss=2.01)
    older = replace(dense, commit="old", seconds=tuple(99.0 * (1 + place) for place in range(40)), started=0)
    rows = cells(curve_table([older, other, dense]))[1:]
    assert [row[2:8] for row in rows] == [
        ["dense", "abc", "560", "", "2.0000", ""],
        ["balanced", "abc, old, older preset", "280", "-50%", "2.0100", "+0.50%"],
    ]
    assert loss_over_time([dense, other]).startswith(b"\x89PNG")
    assert "## Loss over time" in markdown([POINT], "a machine", [dense])


def test_residuals_are_what_a_line_leaves() -> None:
    straight = linear.Fit("135 Mbit/s", "fp32", tuple(0.1 + 0.01 * rank for rank in linear.RANKS))
    assert max(map(abs, straight.residuals)) < 1e-9
    assert (straight.cost.intercept, straight.cost.slope) == (pytest.approx(0.1), pytest.approx(0.01))
    bent = replace(straight, formats="balanced", seconds=(*straight.seconds[:-1], 2 * straight.seconds[-1]))
    assert bent.residuals[-1] > 0.05 and min(bent.residuals) < -0.05
    page = linear.page([straight, bent], "a machine", "abc", "linear")
    assert "| 135 Mbit/s | fp32 | 100.0 ± 0.0 | 10.00 ± 0.00 | +0% |" in page
    assert linear.picture([straight, bent]).startswith(b"\x89PNG")


def test_a_line_has_the_intervals_of_least_squares() -> None:
    ranks = np.asarray(linear.RANKS, dtype=float)
    noise = np.random.default_rng(0).normal(0.0, 0.05, len(ranks))
    fit = linear.Fit("60 Mbit/s", "fp32", tuple(2.0 + 0.01 * ranks + noise))
    _, covariance = np.polyfit(ranks, fit.seconds, 1, cov=True)
    quantile = 2.365  # of 9 - 2 degrees of freedom
    assert fit.half_widths == pytest.approx(tuple(quantile * np.sqrt(np.diag(covariance))[::-1]))
    through_zero = linear.Fit("60 Mbit/s", "fp32", tuple(0.01 * ranks - 0.01))
    of_c, of_slope = through_zero.half_widths
    assert of_c == math.inf and 0 < of_slope < 0.001
    assert "| 60 Mbit/s | fp32 | 0.0 | " in linear.page([through_zero], "a machine", "abc", "linear")


def test_every_contender_has_a_flag_and_every_mode_its_processes() -> None:
    assert all(flags.startswith("--edgc-") for flags in CONTENDERS.values())
    assert MODES["pipeline"].processes == 4 and MODES["four workers"].processes == 4


@pytest.mark.parametrize("what", ["linear", "overhead", "stage-ends"])
def test_a_page_without_figures_is_refused_in_one_line(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench_network.main([f"--{what}", "--report", "--output", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert said.startswith("bench_network: error: there is no ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["--windows", "0"], "--windows 0: must be 1 to 39"),
        (["--windows", "40"], "--windows 40: must be 1 to 39"),
        (["--windows", "1", "--links", "a third from the middle on"], "--windows 1: must be 2 to 39"),
        (["--repetitions", "0"], "--repetitions 0: must be at least 1"),
        (["--links", "one at a third", "--rates", "0"], "--links 'one at a third': needs a rate above 0"),
        (["--report"], "there are no points"),
        (["--quick"], "--output: has no effect with --quick"),
        (["--linear", "--windows", "3"], "--windows: has no effect with --linear"),
        (["--stage-ends", "--rates", "60"], "--rates: has no effect with --stage-ends"),
        (["--to-the-end", "--repetitions", "2"], "--repetitions: has no effect with --to-the-end"),
    ],
)
def test_what_could_not_be_measured_or_shown_is_refused_in_one_line(
    given: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_network, "POINTS", tmp_path / "points.jsonl")
    assert bench_network.main([*given, "--output", str(tmp_path / "page")]) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
