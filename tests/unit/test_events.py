import math
from pathlib import Path

import pytest

from edgc.config import ConfigError
from edgc.observe.events import EventLog, read_events


def test_events_are_appended_one_a_line_and_read_back(tmp_path: Path) -> None:
    EventLog(str(tmp_path / "run")).write("start", config={"rmax": 8})
    EventLog(str(tmp_path / "run")).write("window", entropy=(1.5, math.nan), cost=math.inf)
    first, second = read_events(tmp_path / "run")
    assert (first["event"], first["config"]) == ("start", {"rmax": 8})
    assert (second["entropy"], second["cost"]) == ([1.5, None], None)
    assert second["time"] >= first["time"]


def test_a_line_cut_short_by_a_kill_is_ignored(tmp_path: Path) -> None:
    log = EventLog(str(tmp_path))
    log.write("start")
    log.write("window")
    path = tmp_path / EventLog.FILE
    path.write_text(path.read_text()[:-9])
    assert [event["event"] for event in read_events(tmp_path)] == ["start"]
    resumed = EventLog(str(tmp_path))
    resumed.write("start")
    resumed.write("window")
    assert [event["event"] for event in read_events(tmp_path)] == ["start", "start", "window"]


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    EventLog(None).write("start")
    assert list(tmp_path.iterdir()) == []


def test_a_log_that_cannot_be_written_is_one_clear_error(tmp_path: Path) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    with pytest.raises(ConfigError, match=f"--edgc-log-dir = {taken}: no event log can be written"):
        EventLog(str(taken))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which every write finds full")
def test_a_disk_that_fills_up_ends_the_log_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = EventLog(str(tmp_path))
    log._file = open("/dev/full", "w", encoding="utf-8")  # noqa: SIM115
    for _ in range(2):
        log.write("window")
    log.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("edgc: warning: the event log ends here: ") and "space" in line
