"""Limited links between processes, and the page of what was timed on them."""

import subprocess
import sys
import time
from dataclasses import replace

import pytest

from tools.network.links import Links, LinksUnavailable, check
from tools.network.page import markdown, over_time, picture, table
from tools.network.runs import CHANGING, CONTENDERS, MODES, Point

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


POINT = Point(135.0, "plain", "dense", 0, 2.0, 0.8, 14e6, 14.5e6, 40e6, 21, (None,), "abc1234", round(time.time()))


def test_the_table_compares_with_dense_on_the_same_link_in_the_same_repetition() -> None:
    slow = replace(POINT, mbit=20.0, step_seconds=6.0, communication_seconds=4.8)
    points = [
        *(
            POINT,
            slow,
            replace(slow, step_seconds=5.0, repetition=1),
            replace(POINT, contender="int8", step_seconds=1.5, communication_seconds=0.2, counted_bytes=3.6e6),
        ),
        replace(slow, contender="balanced", step_seconds=3.0, communication_seconds=1.2, ranks=(40,)),
        replace(slow, contender="balanced", step_seconds=3.4, communication_seconds=1.2, ranks=(40,), repetition=1),
    ]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table(points)[2:]]
    assert [(row[0], row[2], row[3], row[4]) for row in rows] == [
        ("20 Mbit/s", "dense", "6.00", ""),
        ("20 Mbit/s", "balanced", "3.00", "-50%"),
        ("20 Mbit/s", "dense", "5.00", ""),
        ("20 Mbit/s", "balanced", "3.40", "-32%"),
        ("135 Mbit/s", "dense", "2.00", ""),
        ("135 Mbit/s", "int8", "1.50", "-25%"),
    ]
    assert rows[0][5] == "4.80 (80%)" and rows[1][6] == "-75%" and rows[5][7] == "3.60" and rows[1][9] == "40"
    assert [row[1] for row in rows[:2]] == ["abc1234", "abc1234, old"], "only what compresses gets old"
    changing = replace(POINT, links=CHANGING, window_seconds=(2.0, 2.1, 2.5, 4.0))
    page = markdown([*points, changing], "a machine")
    assert "## Plain\n" in page and f"## Plain, {CHANGING}" in page and "changing.png" in page and "abc1234" in page
    assert picture([*points, changing]).startswith(b"\x89PNG") and over_time([changing]).startswith(b"\x89PNG")


def test_every_contender_has_a_flag_and_every_mode_its_processes() -> None:
    assert all(flags.startswith("--edgc-") for flags in CONTENDERS.values())
    assert MODES["pipeline"].processes == 4 and MODES["four workers"].processes == 4
