"""What every engine owes its user, over real gloo groups (docs/algorithm.md, 5)."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange, Traffic, run_to_end
from edgc.comm.wire import FP32, GROUP, wire
from edgc.compress.engines.base import Sums, Thinning
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.engines import ENGINES, EngineEntry
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite
from tests.distributed.gloo import run_on_ranks

MATRICES = (MatrixSpec("tall", 48, 20), MatrixSpec("wide", 12, 40), MatrixSpec("square", 24, 24))
CPU = torch.device("cpu")


class Sixteenths(Thinning):
    """A new engine: every value travels as a multiple of 1/16."""

    def sum(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[Sums]:
        shares = [torch.round(tensor * 16) / 16 for tensor in tensors]
        sums, _ = yield from communicator.sum(shares, FP32)
        return Sums(sums, shares, all_finite(sums))


# by label: settings
CASES: dict[str, dict[str, Any]] = {
    **{name: {"engine": name} for name in (*ENGINES, "sixteenths")},
    "powersgd, rounded": {"engine": "powersgd", "wire": "int4", "basis_wire": "int8"},
    "powersgd, graded": {"engine": "powersgd", "wire": "int4", "basis_wire": "int6+int4"},
    "powersgd, cold": {"engine": "powersgd", "warm_start": False},
    "powersgd, not turned": {"engine": "powersgd", "transpose": False, "wire": "int4", "basis_wire": "int8"},
    "powersgd, in turn": {"engine": "powersgd", "basis_cycle": 3},
    "powersgd, bf16": {"engine": "powersgd", "wire": "bf16", "basis_wire": "bf16"},
    "alternating, rounded": {"engine": "alternating", "wire": "int2"},
    "int4, stochastic": {"engine": "int4:stochastic"},
    "topk, denser": {"engine": "topk:0.1"},
    "rows, then powersgd": {
        "formats": {"tall": "rows:0.1", "wide": "rows:0.3"},
        "wire": "int6",
        "basis_wire": "int6",
        "equalise": True,
    },
}


class Bench:
    """An engine with all matrices and its error feedback, over a counted group."""

    def __init__(self, formats: dict[str, str] | None = None, **settings: Any):
        assert dist.group.WORLD is not None
        # The one line that a new engine needs; here and not in the module, so that other tests do not see the engine.
        ENGINES["sixteenths"] = EngineEntry("tests.distributed.test_engines:Sixteenths")
        self.communicator = Communicator(dist.group.WORLD, Traffic())
        self.reducer = GradientReducer(Selection(MATRICES), EDGCConfig.of(**settings), self.communicator, CPU)
        self.formats = formats
        self.iteration = 0

    def step(self, gradients: dict[str, Tensor], rank: int = 4) -> None:
        self.reducer.set_rank(rank, {matrix.name: rank for matrix in MATRICES}, self.formats)
        run_to_end(self.reducer.reduce(gradients, self.iteration))
        self.iteration += 1

    def errors(self) -> dict[str, Tensor]:
        kept = self.reducer.state.feedback.packed
        return {
            m.name: kept[m.name].values().view(m.rows, m.cols).clone()
            if m.name in kept
            else torch.zeros(m.rows, m.cols)
            for m in MATRICES
        }


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """Different on every rank and step, with a common part of low rank so that there is something to learn."""
    own = torch.Generator().manual_seed(1000 * step + rank)
    common = torch.Generator().manual_seed(7)
    result = {}
    for matrix in MATRICES:
        signal = torch.randn(matrix.rows, 3, generator=common) @ torch.randn(3, matrix.cols, generator=common)
        result[matrix.name] = signal + torch.randn(matrix.rows, matrix.cols, generator=own)
    return result


def summed(local: dict[str, Tensor]) -> dict[str, Tensor]:
    """The exact sum over the group in float64."""
    total = {name: tensor.double() for name, tensor in local.items()}
    for tensor in total.values():
        dist.all_reduce(tensor)
    return total


def lost(bench: Bench, rank: int, schedule: list[int]) -> float:
    """Largest |sum of (gradient + old error) - result - sum of new errors| over steps, relative to the gradient."""
    worst = 0.0
    for step, r in enumerate(schedule):
        local = gradients(rank, step)
        owed = summed({name: local[name] + error for name, error in bench.errors().items()})
        bench.step(local, r)
        left = summed(bench.errors())
        for name, result in local.items():
            worst = largest(worst, (owed[name] - result - left[name]).abs().max() / owed[name].abs().max())
    return worst


def largest(*values: float | Tensor) -> float:
    """The largest value, NaN if any is: ``max`` may lose one."""
    return float(torch.stack([torch.as_tensor(value, dtype=torch.float64) for value in values]).max())


def each(rank: int, cases: list[str]) -> dict[str, Any]:
    """Per case: what is lost, and the results and state after 8 steps."""
    outcome = {}
    for case in cases:
        bench = Bench(**CASES[case])
        gap = lost(bench, rank, [4, 4, 8, 8, 4, 12, 12, 4])
        results = gradients(rank, 50)
        bench.step(results)
        outcome[case] = gap, results
    return outcome


@pytest.mark.parametrize("ranks", [2, 3])
def test_nothing_is_lost_and_every_rank_gets_the_same_bits(ranks: int) -> None:
    first, *others = run_on_ranks(each, ranks, list(CASES))
    gaps = {case: gap for case, (gap, _) in first.items()}
    # LoCo forgets by design
    assert {case: gap for case, gap in gaps.items() if not gap <= 5e-6} == {"loco": gaps["loco"]}
    for case, (_, results) in first.items():
        for other in others:
            assert all(torch.equal(results[name], other[case][1][name]) for name in results), case


def tracking(rank: int) -> dict[str, float]:
    """Relative distance between the sum of 60 results and the sum of 60 true gradients, worst matrix."""
    distance = {}
    for case, settings in CASES.items():
        bench = Bench(**settings)
        exact = {m.name: torch.zeros(m.rows, m.cols, dtype=torch.float64) for m in MATRICES}
        result = {name: tensor.clone() for name, tensor in exact.items()}
        for step in range(60):
            local = gradients(rank, step)
            for name, total in summed(local).items():
                exact[name] += total
            bench.step(local, rank=8)
            for name, total in local.items():
                result[name] += total
        distance[case] = largest(*((exact[name] - result[name]).norm() / exact[name].norm() for name in exact))
    return distance


def test_error_feedback_catches_up_over_steps() -> None:
    distances = run_on_ranks(tracking, 2)[0]
    # one entry in a hundred or ten of a normal distribution, or its signs alone
    slow = {"topk": 0.5, "randomk": 0.9, "topk, denser": 0.1, "onebit": 0.2}
    assert {case: distance for case, distance in distances.items() if not distance <= slow.get(case, 0.1)} == {}


def full_rank(rank: int) -> float:
    bench, worst = Bench(engine="powersgd"), 0.0
    for step in range(3):
        local = gradients(rank, step)
        exact = summed(local)
        bench.step(local, rank=1000)
        worst = largest(worst, *((exact[n] - g).abs().max() / exact[n].abs().max() for n, g in local.items()))
    return worst


def test_full_rank_is_the_dense_all_reduce() -> None:
    assert all(worst < 5e-6 for worst in run_on_ranks(full_rank, 2))


def not_finite(rank: int) -> list[str]:
    """Cases in which a bad gradient goes unseen or changes the engine."""
    wrong = []
    for case, settings in CASES.items():
        bench = Bench(**settings)
        bench.step(gradients(rank, 0))
        twin = Bench(**settings)
        twin.step(gradients(rank, 0))
        local = gradients(rank, 1)
        if rank == 1:
            local["wide"][3, 5] = torch.inf
        bench.step(local)
        bench.iteration -= 1  # a step that failed is repeated
        if not all(gradient.isnan().all() for gradient in local.values()):
            wrong.append(f"{case}: not seen")
        after, expected = gradients(rank, 2), gradients(rank, 2)
        bench.step(after)
        twin.step(expected)
        if any(not torch.equal(after[name], expected[name]) for name in after):
            wrong.append(f"{case}: state changed")
    return wrong


def test_a_gradient_that_is_not_finite_on_one_rank_is_seen_on_all_and_changes_no_state() -> None:
    assert run_on_ranks(not_finite, 2) == [[], []]


def overflowing(rank: int) -> list[str]:
    """Engines that do not see that finite gradients have a sum that is not."""
    wrong = []
    for case, settings in CASES.items():
        bench = Bench(**settings)
        local = {name: torch.full_like(gradient, 2e38) for name, gradient in gradients(rank, 0).items()}
        bench.step(local)
        if bool(bench.reducer.finite) or not all(gradient.isnan().all() for gradient in local.values()):
            wrong.append(case)
    return wrong


def test_a_sum_of_finite_gradients_that_overflows_is_seen() -> None:
    assert run_on_ranks(overflowing, 2) == [[], []]


def apart(rank: int) -> tuple[Tensor, Tensor]:
    """How far this rank's error is from its gradient, which is what was taken off it, and the sum."""
    bench = Bench(engine="powersgd")
    local = gradients(rank, 0)
    put_in = local["wide"].clone()
    bench.step(local)
    return put_in - bench.errors()["wide"], local["wide"]


def test_an_error_takes_off_a_workers_own_share_of_the_sum_and_not_the_mean() -> None:
    (first, total), (second, _) = run_on_ranks(apart, 2)
    torch.testing.assert_close(first + second, total, atol=1e-4, rtol=0)
    assert float((first - second).norm() / first.norm()) > 0.1


def bytes_sent(rank: int) -> dict[str, dict[str, float]]:
    sent = {}
    for case, settings in CASES.items():
        bench = Bench(**settings)
        for step in range(2):
            bench.step(gradients(rank, step))
        sent[case] = dict(bench.communicator.traffic.by_collective)
    return sent


def test_bytes_are_those_of_the_messages() -> None:
    ranks = 3
    sent, *_ = run_on_ranks(bytes_sent, ranks)
    elements = [m.rows * m.cols for m in MATRICES]
    rows, cols = [4 * m.rows for m in MATRICES], [4 * m.cols for m in MATRICES]
    short, long = ([4 * side(m.rows, m.cols) for m in MATRICES] for side in (min, max))
    quarter, others = [x / 4 for x in long], [3 * x / 4 for x in long]
    share = (ranks - 1) / ranks

    def rounded(name: str, values: list[float]) -> float:
        groups = sum(math.ceil(part / GROUP) for part in values)  # no group reaches across two tensors
        return wire(name).message_bytes(math.ceil(groups / ranks) * ranks * GROUP) * share

    assert sent["powersgd"] == {"all-reduce": pytest.approx(2 * 2 * 4 * sum(rows + cols) * share)}
    assert sent["alternating"] == {"all-reduce": pytest.approx(2 * 4 * sum(rows + cols) * share)}
    for case, per_phase in {
        "powersgd, rounded": 2 * (rounded("int8", long) + rounded("int4", short)),
        "powersgd, not turned": 2 * (rounded("int8", rows) + rounded("int4", cols)),
        "powersgd, graded": 2 * (rounded("int6", quarter) + rounded("int4", others) + rounded("int4", short)),
        "alternating, rounded": rounded("int2", rows) + rounded("int2", cols),
        "int4": 2 * rounded("int4", elements),
        "loco": 2 * rounded("int4", elements),
        "onebit": 2 * rounded("int1", elements),
    }.items():
        assert sent[case] == {"all-to-all": pytest.approx(per_phase), "all-gather": pytest.approx(per_phase)}, case
    by_rows = rounded("int8", [m.rows for m in MATRICES])
    by_rows += rounded("int4", [math.ceil(0.1 * m.rows) * m.cols for m in MATRICES])
    assert sent["rows"] == {"all-to-all": pytest.approx(2 * by_rows), "all-gather": pytest.approx(2 * by_rows)}
    kept = sum(max(1, round(0.01 * m.rows * m.cols)) for m in MATRICES)
    assert sent["topk"] == {"all-gather": pytest.approx(2 * 8 * kept * (ranks - 1))}
    assert 0.9 * 2 * 2 * 4 * kept * share <= sent["randomk"]["all-reduce"] <= 2 * 2 * 4 * (kept + 1) * share
