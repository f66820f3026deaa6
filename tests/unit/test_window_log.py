"""What a window leaves on the screen and in TensorBoard."""

import math
from types import SimpleNamespace

import pytest

from edgc.config import EDGCConfig
from edgc.hosts import reporting
from edgc.hosts.reporting import Reporter
from edgc.observe.window import Boundary, MessageWindow, StageWindow, WindowReport
from edgc.plan.rank_plan import RankPlan
from edgc.plan.run import Part, Run, StageKey

PLAN = RankPlan(
    version=2,
    first_iteration=200,
    ranks=(56, 60, None),
    entropy=(-5.2, -5.2, math.nan),
    proposed=(0.0, 0.0, None),
    targets=(16, 60, None),
    reasons=("entropy", "alignment", "warm-up"),
)


def seen(stage: int) -> StageWindow:
    return StageWindow(StageKey(Part.LAYERS, stage), -5.2, math.nan, 0.1, 0.01, 1e6, 2e6, 0.0)


@pytest.mark.parametrize(("iteration", "warned"), [(1000, 1), (200, 0)])
def test_a_volume_that_was_missed_is_named_where_the_run_is_whole(
    iteration: int, warned: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(reporting, "process", lambda group: 0)
    # a volume of 24, and half of the bytes of fp32
    report = WindowReport(
        *(iteration, (64, 64, None), PLAN, tuple(map(seen, range(3))), 0.1, 1e6, 2e6, 0.0, 0.0, 0.0, 0.0),
        dp_bytes_fp32=2e6,
    )
    reporter = Reporter(EDGCConfig.from_preset({}), Run(iterations=1000, replicas=2))
    reporter.parameters = [1, 1, 1]
    reporter.window(report, last=True)
    assert capsys.readouterr().err.count("--edgc-volume 24 was asked for, and the run sent 2.0x fewer bytes") == warned


def test_the_rank_that_entropy_proposed_stands_beside_the_one_that_is_used(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scalars: dict[str, float] = {}
    writer = SimpleNamespace(add_scalar=lambda name, value, iteration: scalars.update({name: value}))
    monkeypatch.setattr(reporting, "process", lambda group: 0)
    message = MessageWindow(Boundary("backward", 1, 0), -3.0, 1e3, 2e3, 0.0)
    report = WindowReport(
        *(200, (64, 64, None), PLAN, tuple(map(seen, range(3))), 0.1, 1e6, 2e6, 0.0, 0.0, 1e3, 2e3),
        message_ranks=(16,),
        message_plan=RankPlan(1, 200, (12,), proposed=(3.25,), targets=(4,), reasons=("entropy",)),
        messages=(message,),
    )
    Reporter(EDGCConfig(), Run(iterations=1000, replicas=2), scalars=lambda: writer).window(report, last=False)
    lines = capsys.readouterr().out.splitlines()
    assert "| rank 64 -> rank 56 (entropy; proposed 0.0; target rank 16) |" in lines[0]
    assert "| rank 64 -> rank 60 (alignment; proposed 0.0) |" in lines[1]
    assert "| dense -> dense (warm-up) |" in lines[2]
    assert "| rank 16 -> rank 12 (entropy; proposed 3.2; target rank 4) |" in lines[3]
    ranks = {name: value for name, value in scalars.items() if name.startswith("edgc/rank")}
    assert ranks == {
        **{"edgc/rank/stage-1": 64, "edgc/rank-proposed/stage-1": 0, "edgc/rank-target/stage-1": 16},
        **{"edgc/rank/stage-2": 64, "edgc/rank-proposed/stage-2": 0, "edgc/rank-target/stage-2": 60},
        **{"edgc/rank/stage-3": 0, "edgc/rank-target/stage-3": 0},
    }
