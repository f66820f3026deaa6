"""GDS on the gradients of a real run: the sampled entropy must follow the full one (paper: trend correlation)."""

from pathlib import Path

import numpy as np
import pytest

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import train

RUN = ["--train-iters", "120", "--edgc", "--edgc-engine", "dense", "--edgc-window", "10"]


def entropies(folder: Path, *sampling: str) -> np.ndarray:
    """Entropy per window of a run whose training is the same whatever is sampled."""
    train([*RUN, "--edgc-log-dir", str(folder), *sampling], processes=2)
    return np.array([event["stages"][0]["entropy"] for event in read_events(folder) if event["event"] == "window"])


@pytest.mark.slow
def test_sampled_entropy_follows_the_full_entropy(tmp_path: Path) -> None:
    full = entropies(tmp_path / "full", "--edgc-iteration-sampling-rate", "1", "--edgc-gradient-sampling-rate", "1")
    sampled = entropies(
        tmp_path / "sampled", "--edgc-iteration-sampling-rate", "0.1", "--edgc-gradient-sampling-rate", "0.25"
    )
    assert len(full) == len(sampled) == 12
    assert not np.array_equal(full, sampled)
    assert np.ptp(full) > 0.1, "entropy must move for a correlation to mean anything"
    assert np.corrcoef(full, sampled)[0, 1] >= 0.9
