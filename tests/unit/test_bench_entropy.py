"""The page that compares sampled entropy with that of all entries."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgc.observe.observer import GradientObserver
from tools import bench_entropy
from tools.bench_entropy import RATES, Timed, page


def test_every_rate_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    bench_entropy.main(["--widths", "64", "--repetitions", "2", "--output", str(tmp_path / "mine")])
    rows = json.loads((tmp_path / "mine.json").read_text())["rows"]
    assert [(row["iterations"], row["entries"]) for row in rows] == list(RATES)
    assert all(len(row["seconds"]) == 2 and min(row["seconds"]) > 0 for row in rows)
    assert "| 64 | 0.2 million entries | 10% | 25% |" in (tmp_path / "mine.md").read_text()


def test_each_way_measures_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Counting(GradientObserver):
        def measure(self, gradients: Mapping[str, Tensor], iteration: int, loss_scale: Tensor | None = None) -> None:
            if self.measures(iteration):
                seen.append(sum(len(self.sampler.sample(name, one, iteration)) for name, one in gradients.items()))
            super().measure(gradients, iteration, loss_scale)

    monkeypatch.setattr(bench_entropy, "GradientObserver", Counting)
    bench_entropy.measure(64, 1)
    size = 4 * 12 * 64**2
    one_turn = [*10 * [size], *10 * [size // 4], size, size // 4]
    assert seen == [*reversed(one_turn), *one_turn], "the ways take turns"


def test_shares_are_of_the_repetition_beside() -> None:
    whole, sampled = Timed(64, 1.0, 1.0, (1.0, 2.0)), Timed(64, 0.1, 0.25, (0.01, 0.04))
    text = page([whole, sampled], "mine", "a machine", "abc")
    assert "| 100% | 100% | 1500.000 | 100.0 ± 0.0 % |" in text
    assert "| 10% | 25% | 25.000 | 1.5 ± 6.4 % |" in text
