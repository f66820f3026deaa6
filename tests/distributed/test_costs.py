"""What DAC knows of the link: probed before training, and corrected by what reductions take in it."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from edgc.observe.events import read_events
from edgc.plan.times.comm_cost import LinearCost, StageCost
from tests.distributed.megatron_runs import REPOSITORY, train

SLOW_LINK = REPOSITORY / "tests" / "distributed" / "slow_link_run.py"
PROBED = REPOSITORY / "tests" / "distributed" / "probed_run.py"
FOUR_CHUNKS = shlex.split(
    "--num-layers 8 --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --train-iters 12"
)
EDGC = shlex.split(
    "--edgc --edgc-preset paper --edgc-window 4 --edgc-rmin 4 --edgc-rmax 12 --edgc-warmup-fraction 0.25 "
    "--edgc-study entropy_stability=10 --edgc-iteration-sampling-rate 0.5"
)


def stage_cost(fields: dict[str, Any]) -> StageCost:
    return StageCost(**{**fields, "compressed": LinearCost(**fields["compressed"])})


@pytest.mark.parametrize(
    "overlap",
    [pytest.param([], marks=pytest.mark.slow, id="in turn"), pytest.param(["--overlap-grad-reduce"], id="overlapped")],
)
def test_a_stage_of_four_chunks_takes_in_training_what_was_probed(overlap: list[str], tmp_path: Path) -> None:
    train([*FOUR_CHUNKS, *overlap, *EDGC, "--edgc-log-dir", str(tmp_path)], script=SLOW_LINK)
    start, *windows = read_events(tmp_path)
    probed = [stage_cost(stage["cost"]) for stage in start["stages"]]
    assert [window["ranks"] for window in windows[:2]] == [[None, None]] * 2 and None not in windows[2]["ranks"]
    for window in windows:
        for stage, (cost, rank) in enumerate(zip(probed, window["ranks"], strict=True)):
            # of 40 ms each: four sums of a chunk, or of its two factors, one of them with the rest
            assert cost.seconds(rank) > (0.16 if rank is None else 0.32)
            seconds = window["stages"][stage]["reduce_seconds"]
            assert seconds is not None and 0.6 < seconds / cost.seconds(rank) < 1.6
            corrected = stage_cost(window["costs"][stage])
            assert corrected != cost and corrected.seconds(rank) == pytest.approx(seconds)


def test_a_run_that_rounds_goes_on_so_where_low_rank_is_faster_now(tmp_path: Path) -> None:
    edgc = shlex.split("--edgc --edgc-window 2 --edgc-iteration-sampling-rate 0.5 --edgc-warmup-fraction 0.1")
    flags = ["--train-iters", "8", "--ckpt-format", "torch", "--attention-dropout", "0", "--hidden-dropout", "0", *edgc]
    found = {}
    for name, seconds, more in (
        ("whole", ["0.1", "0.5"], ["--save", str(tmp_path / "other"), "--save-interval", "4"]),
        ("first", ["0.1", "0.5"], ["--exit-interval", "4", "--save", str(tmp_path), "--save-interval", "1000"]),
        ("then", ["0.5", "0.1"], ["--load", str(tmp_path)]),
    ):
        log = tmp_path / name
        output = train(["--probed", *seconds, *flags, *more, "--edgc-log-dir", str(log)], 2, PROBED)
        *_, end = read_events(log)
        assert end["plan"]["reasons"] == ["rounding is faster"] and end["ranks"] == [0]
        found[name] = re.findall(r"lm loss: ([0-9.E+-]+)", output)[-1], end["dp_bytes"], output
    assert found["whole"][:2] == found["then"][:2]
    assert "So gradients are rounded, although that sends more bytes than --edgc-volume 24 allows" in found["first"][2]
    assert "compressed gradients go on rounded as in iter_0000004, whatever was timed now" in found["then"][2]
