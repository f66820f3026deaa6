"""Real Megatron runs in which a sum is not finite or replicas drift apart: they end with one line, or say so."""

import re
from pathlib import Path

import pytest

from tests.distributed.megatron_runs import TINY_GPT, failure, launch
from tests.distributed.test_megatron_run import losses

FAULTY = Path(__file__).with_name("faulty_run.py")
ITERATIONS = 12
EDGC = [
    *TINY_GPT,
    "--edgc-cpu",
    "--train-iters",
    str(ITERATIONS),
    "--edgc",
    "--edgc-window",
    "4",
    "--edgc-static-rank",
    "8",
    "--edgc-iteration-sampling-rate",
    "0.5",
]
MODES = {"fp32": [], "bf16, distributed optimizer": ["--bf16", "--use-distributed-optimizer", "--overlap-grad-reduce"]}


@pytest.mark.parametrize("mode", MODES)
def test_a_sum_that_is_not_finite_ends_the_run_before_it_reaches_the_weights(mode: str) -> None:
    finished = launch(FAULTY, ["message", *EDGC, *MODES[mode]], processes=2)
    assert finished.returncode != 0
    line = "iteration 6: the summed gradients of stage 1 are not finite. The step is not applied"
    assert re.findall(r"edgc: error: process (\d): " + re.escape(line), finished.stdout), failure(finished.stdout)
    assert len(losses(finished.stdout)) == 5  # of the iterations before


def test_without_megatrons_check_the_run_goes_on_with_a_warning() -> None:
    finished = launch(FAULTY, ["message", *EDGC, "--no-check-for-nan-in-loss-and-grad"], processes=2)
    assert finished.returncode == 0, failure(finished.stdout)
    assert finished.stdout.count("edgc: warning: iteration 6: the summed gradients of stage 1 are not finite") == 1


def test_replicas_that_drift_apart_end_the_run_at_the_end_of_the_window() -> None:
    finished = launch(FAULTY, ["basis", *EDGC], processes=2)
    assert finished.returncode != 0
    line = (
        r"edgc: error: process [01]: iteration 8: processes 0, 1 of one data-parallel group hold different bits in the "
    )
    assert re.search(line, finished.stdout), failure(finished.stdout)
    assert len(losses(finished.stdout)) == 7


@pytest.mark.parametrize(("fault", "said"), [("settings", "process 1: what"), ("all settings", "what")])
def test_settings_that_any_process_refuses_are_said_once(fault: str, said: str) -> None:
    """Also where the first process of the node has nothing to refuse, and waits for the one that has."""
    finished = launch(FAULTY, [fault, *EDGC], processes=2)
    assert finished.returncode != 0
    errors = [line for line in finished.stdout.splitlines() if "edgc: error" in line]
    assert errors == [f"edgc: error: {said} EDGC cannot take"], failure(finished.stdout)
