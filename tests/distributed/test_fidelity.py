"""What is measured of a reduction at sampled entries, against what the test itself computes of all entries."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.observe.fidelity import FLOOR, Fidelity
from edgc.plan.by_volume.choices import ROW_SHARES
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec, Parameter
from tests.distributed.gloo import run_on_ranks

MATRIX = MatrixSpec("w", 64, 96)
BIAS = Parameter("bias", (64,))
SIZES = {"w": 64 * 96, "bias": 64}
SHARDS = {"w": (0, 2500, 6144), "bias": (0, 0, 64)}
CASES: dict[str, dict[str, Any]] = {
    "powersgd": {"rest_wire": "int8"},
    "powersgd, rounded": {"wire": "int4", "basis_wire": "int6+int4", "rest_wire": "int4", "equalise": True},
    "int4": {"engine": "int4"},
}
STEPS = 3


def reducer(**settings: Any) -> GradientReducer:
    assert dist.group.WORLD is not None
    config = EDGCConfig.of(iteration_sampling_rate=1.0, **settings)
    selection = Selection((MATRIX,), ((BIAS, "one-dimensional"),))
    if not config.low_rank:
        selection = Selection((MATRIX, BIAS.spec))
    made = GradientReducer(selection, config, Communicator(dist.group.WORLD, Traffic()), torch.device("cpu"))
    made.set_rank(8)
    return made


def gradients(rank: int, step: int) -> dict[str, Tensor]:
    """With a common part, in rows of very different scales."""
    own, common = (torch.Generator().manual_seed(seed) for seed in (100 * step + rank, 7))
    w = torch.randn(64, 1, generator=common) @ torch.randn(1, 96, generator=common)
    w = (w + torch.randn(64, 96, generator=own)) * torch.logspace(-1, 1, 64).unsqueeze(1)
    return {"w": w, "bias": torch.randn(64, generator=own)}


def summed(tensor: Tensor) -> Tensor:
    total = tensor.double()
    dist.all_reduce(total)
    return total


def expected(rank: int, settings: dict[str, Any], sharded: bool) -> list[list[float]]:
    """Of ``w`` in every step: cosine, delay, cosine and energy of the error in the unit of the update, the cosine
    and the energy of an entry in the unit of the descent, the cosine of Adam's updates, and the lag. From whole tensors
    in float64.
    """
    under_test, found = reducer(**settings), []
    earlier: Tensor | None = None
    squares: list[Tensor] = []
    means = [torch.zeros(64, 96, dtype=torch.float64) for _ in range(2)]
    for step in range(STEPS):
        local = gradients(rank, step)
        kept = under_test.state.feedback.packed.get("w")
        error = torch.zeros(64, 96) if kept is None else kept.values().view(64, 96)
        true, owed = summed(local["w"]), summed(local["w"] + error)
        run_to_end(under_test.reduce(local, step, shards=SHARDS if sharded else None))
        got = local["w"].double()
        if sharded:  # each process knows its own part
            own = torch.zeros_like(got)
            part = slice(*SHARDS["w"][rank : rank + 2])
            own.view(-1)[part] = got.view(-1)[part]
            got = summed(own)
        now = [true.square(), got.square()]
        before = squares or [one.mean() for one in now]
        squares = [0.9 * old + 0.1 * new for old, new in zip(before, now, strict=True)]
        units = [(square + FLOOR * square.mean()).sqrt() for square in squares]
        g, s = true / units[0], got / units[1]
        unsent = (owed - got) / units[0]
        means = [0.9 * old + 0.1 * new for old, new in zip(means, (true, got), strict=True)]
        energy = (true.square() / units[0]).mean()
        downhill = [one / units[0].sqrt() for one in (true, got)]
        adam = [mean / unit for mean, unit in zip(means, units, strict=True)]
        lag = math.nan
        if earlier is not None:
            both = torch.stack([true.flatten(), earlier.flatten()], dim=1)
            lag = float(torch.linalg.lstsq(both, got.flatten().unsqueeze(1)).solution[1])
        earlier = true
        found.append(
            [
                float((true * got).sum() / (true.norm() * got.norm())),
                float((owed - got).square().sum() / (owed.square().sum() - (owed - got).square().sum())),
                float((g * s).sum() / (g.norm() * s.norm())),
                float(unsent.square().sum() / g.square().sum()),
                float((downhill[0] * downhill[1]).sum() / (downhill[0].norm() * downhill[1].norm())),
                float(energy),
                float((adam[0] * adam[1]).sum() / (adam[0].norm() * adam[1].norm())),
                lag,
            ]
        )
    return found


def measured(
    rank: int, settings: dict[str, Any], scale: float | None, sharded: bool, share: float = math.inf
) -> tuple[list[list[float]], float]:
    """The same as the reducer measures it, and the bytes of three steps."""
    under_test = reducer(fidelity_share=share, **settings)
    for step in range(STEPS):
        local = {name: gradient * (scale or 1.0) for name, gradient in gradients(rank, step).items()}
        loss_scale = None if scale is None else torch.tensor(scale)
        run_to_end(under_test.reduce(local, step, loss_scale, SHARDS if sharded else None))
    seen = [Fidelity.of(one["w"].tolist()) for one in under_test.observer.measurements.fidelity]
    values = [
        [
            one.gradient.cosine,
            one.gradient.delay,
            one.update.cosine,
            one.update.late,
            one.descent.cosine,
            one.energy,
            one.adam.cosine,
            one.lag,
        ]
        for one in seen
    ]
    return values, under_test.communicator.traffic.bytes


def compared(rank: int) -> list[str]:
    wrong = []
    for case, settings in CASES.items():
        for scale, sharded in ((None, False), (1024.0, False), (None, True)):
            wanted = expected(rank, settings, sharded)
            found, _ = measured(rank, settings, scale, sharded)
            if torch.tensor(found).allclose(torch.tensor(wanted), rtol=1e-3, atol=1e-4, equal_nan=True):
                continue
            wrong.append(f"{case}, scale {scale}, sharded {sharded}: {found} and not {wanted}")
    return wrong


def test_cosine_and_delay_are_those_of_whole_tensors() -> None:
    assert run_on_ranks(compared, 2) == [[], []]


def sampled(rank: int) -> list[Any]:
    settings = CASES["powersgd, rounded"]
    whole, _ = measured(rank, settings, None, False)
    _, without = measured(rank, settings, None, False, share=0.0)
    some, with_samples = measured(rank, settings, None, False, share=0.3)
    return [whole, some, with_samples - without]


def test_a_share_of_the_entries_shows_about_the_same_and_is_counted() -> None:
    whole, some, more = run_on_ranks(sampled, 2)[0]
    assert torch.tensor(some).allclose(torch.tensor(whole), rtol=0.4, atol=0.02, equal_nan=True) and some != whole
    entries = sum(math.ceil(0.1 * size) for size in SIZES.values())
    assert more == STEPS * 2 * entries * 4  # an all-reduce of g and of g + e between two


def failed_step(rank: int) -> list[bool]:
    under_test = reducer(fidelity_share=math.inf)
    run_to_end(under_test.reduce(gradients(rank, 0), 0))
    sampler = under_test.state.fidelity
    assert sampler is not None
    before = {name: one.clone() for name, one in sampler.averages.items()}
    local = gradients(rank, 1)
    local["w"][3, 3] = math.inf
    run_to_end(under_test.reduce(local, 1))
    same = all(torch.equal(before[name], one) for name, one in sampler.averages.items())
    seen = under_test.observer.measurements
    nothing = bool(seen.fidelity[1]["w"].isnan().all()) and list(seen.total_fidelity()) == ["w"]

    first = reducer(fidelity_share=math.inf)
    local = gradients(rank, 0)
    local["w"][3, 3] = math.nan
    run_to_end(first.reduce(local, 0))
    run_to_end(first.reduce(gradients(rank, 0), 1))
    after_a_failed_one = first.observer.measurements.fidelity[1]["w"]
    return [same, nothing, torch.equal(after_a_failed_one, seen.fidelity[0]["w"])]


def test_a_step_that_is_not_finite_teaches_nothing() -> None:
    assert run_on_ranks(failed_step, 2) == [[True, True, True]] * 2


def without_ranks(rank: int) -> list[list[str]]:
    """What is measured where no parameter has a rank, and where a resumed run samples otherwise than before."""
    under_test = reducer(fidelity_share=math.inf)
    under_test.set_rank(0, {}, {"w": "int4", "bias": "int8"})
    run_to_end(under_test.reduce(gradients(rank, 0), 0))
    found = [sorted(under_test.observer.measurements.total_fidelity())]
    for settings in ({"fidelity_share": 0.3}, {"fidelity_share": math.inf, "seed": 5}):
        other = reducer(**settings)
        other.set_rank(0, {}, {"w": "int4", "bias": "int8"})
        other.state.load_state_dict(under_test.state.state_dict())
        run_to_end(other.reduce(gradients(rank, 1), 1))
        found.append(sorted(other.observer.measurements.total_fidelity()))
    return found


def test_parameters_without_a_rank_are_measured_too_and_other_samples_begin_anew() -> None:
    assert run_on_ranks(without_ranks, 2)[0] == [["bias", "w"]] * 3


def resumed(rank: int) -> list[list[float]]:
    """What is measured of the third step, in one run and after a state was taken up."""
    found = []
    for stops in (False, True):
        under_test = reducer(fidelity_share=math.inf)
        for step in range(STEPS):
            if stops and step == 2:
                state, under_test = under_test.state.state_dict(), reducer(fidelity_share=math.inf)
                under_test.state.load_state_dict(state)
            run_to_end(under_test.reduce(gradients(rank, step), step))
        found.append(under_test.observer.measurements.fidelity[-1]["w"].tolist())
    return found


def test_a_resumed_run_measures_the_same() -> None:
    whole, parts = run_on_ranks(resumed, 2)[0]
    assert whole == parts


def test_of_two_parts_the_sums_add_up() -> None:
    one, other = Fidelity.of([4, 1, 2, 4, 3, *[1] * 17]), Fidelity.of([0, 3, 0, 0, 0, *[1] * 17])
    both = Fidelity.total([one, other])
    assert (one.gradient.cosine, both.gradient.cosine) == (1, 0.5)
    assert both.gradient.delay == one.gradient.delay == 3 and one.gradient.late == 0.75
    assert math.isnan(Fidelity().gradient.cosine) and math.isnan(Fidelity().gradient.delay)
    assert Fidelity.of([1, 0, 0, 1, 1, *[1] * 17]).gradient.delay == math.inf
    assert Fidelity.total([both]) == both


@pytest.mark.parametrize("share", [-1.0, math.nan])
def test_a_share_below_zero_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match="fidelity_share"):
        EDGCConfig.of(fidelity_share=share)


def rows_seen(rank: int) -> tuple[list[float], float, int]:
    """Shares of the energy that the largest rows hold, where each process has seen four rows of its own; what the
    warm-up's step sent; how often a compressed step shows them.
    """
    under_test = reducer(volume=8.0, dense_wire="int8", warmup_fraction=0.1)
    under_test.set_rank(None)
    own = {"w": torch.zeros(64, 96), "bias": torch.ones(64)}
    own["w"][8 * rank : 8 * rank + 4] = torch.randn(4, 96, generator=torch.Generator().manual_seed(rank))
    under_test.begin(0)
    run_to_end(under_test.reduce(own, 0))
    sent = under_test.communicator.traffic.bytes
    (shares,) = under_test.observer.measurements.row_shares
    under_test.set_rank(8)
    under_test.begin(1)
    run_to_end(under_test.reduce(gradients(rank, 1), 1))
    return shares["w"].tolist(), sent, len(under_test.observer.measurements.row_shares)


def test_a_warm_up_shows_which_share_of_its_rows_holds_a_gradients_energy() -> None:
    (shares, sent, seen), (others, _, _) = run_on_ranks(rows_seen, 2)
    assert shares == others and seen == 1
    *shares, even = shares
    assert even == pytest.approx(8 / 64, rel=0.05)
    largest = dict(zip(ROW_SHARES, shares, strict=True))
    assert 0.45 < largest[0.05] < 0.65, "four rows of eight"
    assert largest[0.14] == pytest.approx(1) and largest[0.01] == pytest.approx(1 / 8, rel=0.4)
    rounded = (64 * 96 + 128) * (1 + 1 / 64)  # the matrix, and the bias in a whole group
    assert sent == pytest.approx(rounded + 64 * 4, rel=0.02), "the norms of all rows are counted"
