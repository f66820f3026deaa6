"""The page that compares sampled entropy with that of all entries."""

import json
from pathlib import Path

import pytest
import torch

from tools import bench_entropy
from tools.bench_entropy import RATES, Timed, page


def test_every_rate_has_a_row_and_samples_take_less_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bench_entropy.main(["--widths", "64", "--repetitions", "2", "--output", str(tmp_path / "mine")])
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert [(row["iterations"], row["entries"]) for row in rows] == list(RATES)
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert "| 64 | 0.2 million entries | 10% | 25% |" in (tmp_path / "mine.md").read_text()


def test_shares_are_of_the_repetition_beside() -> None:
    whole, sampled = Timed(64, 1.0, 1.0, (1.0, 2.0)), Timed(64, 0.1, 0.25, (0.01, 0.04))
    text = page([whole, sampled], "mine", "a machine", "abc")
    assert "| 100% | 100% | 1500.000 | 100.0 ± 0.0 % |" in text
    assert "| 10% | 25% | 25.000 | 1.5 ± 6.4 % |" in text
