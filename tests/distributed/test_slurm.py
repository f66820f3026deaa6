"""The paper's scripts in a real Slurm on this machine: killed, requeued, and the same bits as without."""

import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SKIPPED = 77


@pytest.mark.slow
def test_a_job_that_is_killed_and_signalled_trains_what_an_uninterrupted_one_does() -> None:
    done = subprocess.run(
        ["bash", "scripts/test_slurm.sh"], cwd=REPOSITORY, capture_output=True, text=True, timeout=1500
    )
    if done.returncode == SKIPPED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-8000:]
    assert "have the same bits" in done.stdout
