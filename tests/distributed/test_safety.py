"""What a reduction does with spikes, zeros, repeated steps and replicas that differ, over gloo groups."""

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress.engines import sparse
from edgc.compress.engines.rows import Rows
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig, Study
from edgc.config.presets import PRESETS
from edgc.errors import ReplicaMismatch
from edgc.plan.run import Run
from edgc.specs import Parameter
from tests.distributed.gloo import run_on_ranks

CPU = torch.device("cpu")
LIMIT = Study().spike_limit
SIDE = 128
RANK = 8


def reducer(*parameters: Parameter, repeatable: bool = False, **settings: Any) -> GradientReducer:
    config = EDGCConfig.of(**{"iteration_sampling_rate": 1e-6, **settings})
    assert dist.group.WORLD is not None
    communicator = Communicator(dist.group.WORLD, Traffic())
    run = Run(iterations=4, replicas=2, repeatable=repeatable)  # with the presets two steps add the whole error
    return GradientReducer.of(parameters, config, communicator, CPU, run)


def of_preset(name: str) -> dict[str, Any]:
    """A preset's settings with a rank for matrices of this size."""
    return {**PRESETS[name], "volume": None, "static_rank": RANK}


def true_gradient() -> Tensor:
    """Of norm 1, with singular values that fall by a power law."""
    generator = torch.Generator().manual_seed(5)
    left, right = (torch.linalg.qr(torch.randn(SIDE, SIDE, generator=generator)).Q for _ in range(2))
    matrix = left @ torch.diag(torch.arange(1.0, SIDE + 1) ** -0.7) @ right
    return matrix / matrix.norm()


def noisy(step: int, rank: int) -> Tensor:
    """With so much noise on each of two processes that a dense sum has a cosine of 0.71 to the true gradient."""
    noise = torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(100 * step + rank))
    return true_gradient() + noise * (math.sqrt(2) / SIDE)


SPIKE_AT = 40


SPIKES = {"paper": 100.0, "balanced": 100.0, "fast": 1000.0}


def cosines(rank: int) -> dict[str, tuple[list[float], list[float]]]:
    """By preset, with and without the limit."""
    found = {}
    for preset, factor in SPIKES.items():
        found[preset] = cosines_of(rank, preset, factor), cosines_of(rank, preset, factor, math.inf)
    return found


def cosines_after_a_spike_in_one_corner(rank: int) -> dict[str, list[float]]:
    """By preset; such a spike has other scales of rows and columns than the gradients before it."""
    return {preset: cosines_of(rank, preset, factor, corner=6) for preset, factor in SPIKES.items()}


def cosines_under_the_limit(rank: int) -> list[float]:
    return cosines_of(rank, "balanced", 0.95 * LIMIT)


def cosines_of(rank: int, preset: str, factor: float, limit: float = LIMIT, corner: int = SIDE) -> list[float]:
    """Of each step's sum to the true gradient; one process has one gradient so many times as large, in one corner."""
    under_test = reducer(Parameter("w", (SIDE, SIDE)), **of_preset(preset), spike_limit=limit)
    truth, found = true_gradient(), []
    under_test.set_rank(RANK)
    for step in range(SPIKE_AT + 21):
        gradient = noisy(step, rank)
        if step == SPIKE_AT and rank == 0:
            generator = torch.Generator().manual_seed(999)
            spike = torch.randn(SIDE, SIDE, generator=generator)
            spike[corner:], spike[:, corner:] = 0, 0
            gradient = spike * (factor * gradient.norm() / spike.norm())
        run_to_end(under_test.reduce({"w": gradient}, step))
        # clipping by norm, as the optimizer does after the reduction, changes no cosine
        found.append(float((gradient * truth).sum() / gradient.norm()))
    measured, expected = under_test.observer.take(), rank == 0 and factor > limit
    assert float(measured.spikes) == (1 if expected else 0)
    if expected:
        assert float(measured.largest_spike) == pytest.approx(factor, rel=0.1)
    return found


@pytest.fixture(scope="module")
def spiked() -> dict[str, Any]:
    """Cosines that the first of two processes has seen, by case."""
    seen: dict[str, Any] = run_on_ranks(all_cosines, 2)[0]
    return seen


def all_cosines(rank: int) -> dict[str, Any]:
    return {
        "whole": cosines(rank),
        "corner": cosines_after_a_spike_in_one_corner(rank),
        "under the limit": cosines_under_the_limit(rank),
    }


def test_a_spike_is_not_replayed_by_error_feedback(spiked: dict[str, Any]) -> None:
    """A dense sum is back in one step."""
    for preset, (found, without) in spiked["whole"].items():
        usual = sum(found[20:SPIKE_AT]) / 20
        assert 0.2 < usual < 0.5  # rank 8 of 128
        after = found[SPIKE_AT + 1 :]
        assert after[0] > 0.7 * usual
        assert min(sum(after[start : start + 4]) / 4 for start in range(len(after) - 3)) > 0.8 * usual
        assert abs(without[SPIKE_AT + (20 if preset == "fast" else 10)]) < 0.1


def test_a_spike_in_one_corner_does_not_set_the_scales_of_later_steps(spiked: dict[str, Any]) -> None:
    for found in spiked["corner"].values():
        usual, after = sum(found[20:SPIKE_AT]) / 20, found[SPIKE_AT + 1 :]
        # 0.32: what was left where the whole error was added; the usual cosine was 0.37 then, and is 0.48 with a half
        assert min(sum(after[start : start + 4]) / 4 for start in range(len(after) - 3)) > max(0.32, 0.75 * usual)


def test_a_spike_just_under_the_limit_does_little_harm(spiked: dict[str, Any]) -> None:
    """So the limit is low enough."""
    found = spiked["under the limit"]
    usual, after = sum(found[20:SPIKE_AT]) / 20, found[SPIKE_AT + 1 :]
    assert min(after) > 0.5 * usual
    assert sum(after[8:16]) / 8 > 0.8 * usual


def what_is_lost(rank: int) -> tuple[float, float]:
    """Of sum plus errors, in the step of a spike and in one without, beside what the error is scaled down by."""
    under_test = reducer(Parameter("w", (SIDE, SIDE)), **of_preset("balanced"))
    under_test.set_rank(RANK)
    lost = []
    for step in range(4):
        gradient = noisy(step, rank)
        kept = under_test.state.feedback.packed.get("w")
        older = torch.zeros_like(gradient).double() if kept is None else kept.values().double()
        owed, waiting = gradient.double() + older, (1 - under_test.error_gain(step)) * older
        excess = 1.0
        if step == 2 and rank == 1:
            norms = under_test.state.norms.values()
            assert norms is not None
            owed += 299 * gradient.double()
            gradient *= 300
            excess = float(gradient.norm() / norms[0]) / LIMIT
        dist.all_reduce(owed)
        run_to_end(under_test.reduce({"w": gradient}, step))
        left = (under_test.state.feedback.packed["w"].values().double() - waiting) * excess + waiting
        dist.all_reduce(left)
        lost.append(float((owed - gradient.double() - left).abs().max() / owed.abs().max()))
    return lost[2], max(lost[:2] + lost[3:])


def test_all_but_what_a_spikes_error_is_scaled_down_by_is_conserved() -> None:
    for with_spike, without in run_on_ranks(what_is_lost, 2):
        assert with_spike < 1e-5 and without < 1e-5


ENORMOUS = [  # rows, type of the gradients, and the step: in the warm-up, rounded, or in low rank
    (256, torch.float32, 4),
    (64, torch.float32, 4),
    (64, torch.bfloat16, 4),
    (64, torch.float32, 1),
    (64, torch.float32, 0),
]


def enormous(rank: int) -> list[list[bool]]:
    return [enormous_of(rank, preset, *case) for preset in ("safe", "balanced", "fast") for case in ENORMOUS]


def enormous_of(rank: int, preset: str, rows: int, dtype: torch.dtype, at: int) -> list[bool]:
    """Whether each step's sum is finite, and no error is enormous; one step's gradients have a norm of 3e20."""
    under_test = reducer(Parameter("w", (rows, 1024)), Parameter("bias", (64,)), **of_preset(preset))
    finite = []
    for step in range(8):
        under_test.set_rank(None if step < 2 else RANK)
        generator = torch.Generator().manual_seed(10 * step + rank)
        local = {"w": torch.randn(rows, 1024, generator=generator), "bias": torch.randn(64, generator=generator)}
        local = {name: gradient.to(dtype) for name, gradient in local.items()}
        if step == at:
            local = {name: gradient * (3e20 / gradient.norm()) for name, gradient in local.items()}
        run_to_end(under_test.reduce(local, step))
        kept = [float(error.values().abs().max()) for error in under_test.state.feedback.packed.values()]
        finite.append(all(bool(torch.isfinite(gradient).all()) for gradient in local.values()))
        finite[-1] &= max(kept, default=0.0) < 1e3
        moments = under_test.state.state_dict()["equaliser"]
        assert all(bool(torch.isfinite(moment.values()).all()) for moment in moments.values())
    return finite


def test_a_finite_spike_that_overflows_squares_harms_no_step() -> None:
    assert run_on_ranks(enormous, 2) == [[[True] * 8] * 3 * len(ENORMOUS)] * 2


def first_step_fails(rank: int) -> list[str]:
    """Presets that a first step which is not finite leaves otherwise than no step."""
    changed = []
    parameters = Parameter("w", (64, 96)), Parameter("bias", (64,))
    for preset in ("safe", "balanced", "fast", "paper"):
        under_test, twin = (reducer(*parameters, **of_preset(preset)) for _ in range(2))
        for step in range(4):
            for each in (under_test, twin):
                each.set_rank(RANK)
                generator = torch.Generator().manual_seed(10 * step + rank)
                local = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
                if step == 0:
                    if each is twin:
                        continue
                    local["w"][0, 0] = math.nan
                run_to_end(each.reduce(local, step))
                each.result = local  # type: ignore[attr-defined]
            if step and any(
                not torch.equal(twin.result[name], value)  # type: ignore[attr-defined]
                for name, value in under_test.result.items()  # type: ignore[attr-defined]
            ):
                changed.append(f"{preset}: step {step}")
    return changed


def test_a_first_step_that_is_not_finite_changes_no_state() -> None:
    assert run_on_ranks(first_step_fails, 2) == [[], []]


ENGINES = {"alternating": {"engine": "alternating", "static_rank": RANK}, "powersgd": {"static_rank": RANK}}


def captured(rank: int) -> dict[str, tuple[float, float]]:
    return {
        name: (captured_of(rank, settings, False), captured_of(rank, settings, True))
        for name, settings in ENGINES.items()
    }


def captured_of(rank: int, settings: dict[str, Any], zero_step: bool) -> float:
    """Share of a constant gradient's energy in the sum of a step, perhaps after a step of zeros."""
    under_test, truth = reducer(Parameter("w", (SIDE, SIDE)), **settings), true_gradient()
    under_test.set_rank(RANK)
    for step in range(11):
        under_test.state.feedback.clear("w")  # without errors the basis alone decides
        gradient = torch.zeros(SIDE, SIDE) if zero_step and step == 9 else truth.clone()
        run_to_end(under_test.reduce({"w": gradient}, step))
    return float((gradient.norm() / (2 * truth).norm()) ** 2)


def test_a_step_of_zeros_keeps_the_learned_basis() -> None:
    for before, after in run_on_ranks(captured, 2)[0].values():
        assert before > 0.6
        assert after > 0.95 * before


def lost_of_16_bits(rank: int) -> list[float]:
    """What is lost of gradients in bf16, of two processes together: rounded, in low rank, and rows before low rank."""
    found = []
    for engine, level, formats in (("int4", 0, None), ("powersgd", RANK, None), ("powersgd", RANK, {"w": "rows:0.1"})):
        under_test = reducer(Parameter("w", (SIDE, SIDE), embedding=True), engine=engine, compress_embeddings=True)
        under_test.set_rank(level, {"w": level} if formats else None, formats)
        gradient = noisy(0, rank).bfloat16()
        owed = gradient.double()
        run_to_end(under_test.reduce({"w": gradient}, 0))
        owed -= under_test.state.feedback.packed["w"].values().double().view(SIDE, SIDE)
        dist.all_reduce(owed)
        found.append(float((owed - gradient.double()).abs().max() / owed.abs().max()))
    return found


def test_what_16_bits_cut_off_a_sum_is_fed_back_once_and_not_by_each_process() -> None:
    for found in run_on_ranks(lost_of_16_bits, 2):
        assert max(found) < 1e-5


def settled(rank: int) -> float:
    """The running norm after a checkpoint. The second process has had no gradient yet."""
    under_test = reducer(Parameter("w", (SIDE, SIDE)), engine="int4")
    under_test.set_rank(0)
    run_to_end(under_test.reduce({"w": torch.full((SIDE, SIDE), 1.0 - rank)}, 0))
    for _ in under_test.state.summed_errors(under_test.communicator, 1):
        pass
    norms = under_test.state.norms.values()
    assert norms is not None
    return float(norms)


def test_after_a_checkpoint_all_have_the_mean_norm_of_those_that_saw_a_gradient() -> None:
    assert run_on_ranks(settled, 2) == [SIDE, SIDE]


def repeated(rank: int) -> tuple[list[int], list[int]]:
    """Entries measured: of steps that are repeated, and of one that is repeated after its window was taken."""
    under_test = reducer(Parameter("w", (SIDE, SIDE)), repeatable=True, iteration_sampling_rate=1.0)
    under_test.set_rank(RANK)

    def step(iteration: int) -> None:
        gradient = noisy(iteration, rank)
        under_test.begin(iteration)
        under_test.observer.measure({"w": gradient}, iteration)
        run_to_end(under_test.reduce({"w": gradient}, iteration))

    for iteration in (0, 1, 1, 1, 2):
        step(iteration)
    first = under_test.observer.take()
    step(2)
    step(3)
    second = under_test.observer.take()
    return tuple(  # type: ignore[return-value]
        [len(seen.entropy), len(seen.residual), len(seen.energies)] for seen in (first, second)
    )


def test_a_repeated_step_is_measured_once() -> None:
    assert run_on_ranks(repeated, 2) == [([3, 3, 3], [1, 1, 1])] * 2


def noise(rank: int) -> list[Tensor]:
    """What rounding at random leaves of the same gradient in buckets that differ in their parameters' names."""
    errors = []
    for name in "ab":
        under_test = reducer(Parameter(name, (SIDE, SIDE)), engine="int4:stochastic")
        under_test.set_rank(0)
        run_to_end(under_test.reduce({name: noisy(0, 0)}, 0))
        errors.append(under_test.state.feedback.packed[name].values().clone())
    return errors


def test_buckets_draw_noise_of_their_own() -> None:
    (first, second), (other_rank, _) = run_on_ranks(noise, 2)
    for one, other in ((first, second), (first, other_rank)):
        assert abs(float(torch.corrcoef(torch.stack([one.view(-1), other.view(-1)]))[0, 1])) < 0.1


def large_indices(rank: int) -> tuple[bool, float]:
    """Whether int64 indices give what int32 ones do, and bytes an entry."""
    results = []
    for largest in (sparse.LARGEST_INDEX, 10):
        sparse.LARGEST_INDEX = largest
        under_test = reducer(Parameter("w", (SIDE, SIDE)), Parameter("bias", (99,)), engine="topk:0.01")
        under_test.set_rank(0)
        local = {"w": noisy(0, rank), "bias": noisy(1, rank)[0, :99].clone()}
        run_to_end(under_test.reduce(local, 0))
        results.append((local, under_test.communicator.traffic.bytes))
    (small, _), (large, sent) = results
    return all(torch.equal(small[name], large[name]) for name in small), sent / (164 + 1)


def test_top_k_sends_indices_beyond_int32_in_int64() -> None:
    assert run_on_ranks(large_indices, 2) == [(True, 12.0)] * 2


def empty_parameters(rank: int) -> list[str]:
    parameters = Parameter("none", (0, 5)), Parameter("nothing", (5, 0)), Parameter("w", (SIDE, SIDE))
    seen = []
    for settings in (of_preset("balanced"), {"engine": "topk"}, {"engine": "int4"}):
        under_test = reducer(*parameters, **settings)
        for level in (None, RANK):
            under_test.set_rank(level)
            local = {p.name: torch.ones(p.shape) for p in parameters}
            run_to_end(under_test.reduce(local, 0))
            seen.append("ok" if bool(torch.isfinite(local["w"]).all()) else "not finite")
    without = reducer(**of_preset("balanced"))  # as a bucket that holds a tied embedding alone
    run_to_end(without.reduce({}, 0))
    without.compare_replicas(0)
    for levels in ((0,), (4, {"w": 0})):
        with pytest.raises(ValueError, match="rank 0: the rank of a matrix must be at least 1"):
            reducer(*parameters, **of_preset("balanced")).set_rank(*levels)  # type: ignore[arg-type]
    return seen


def test_parameters_without_elements_are_nothing_to_do_and_rank_0_is_an_error() -> None:
    assert run_on_ranks(empty_parameters, 2) == [["ok"] * 6] * 2


PERTURBED = {"factors": "balanced", "scales": "balanced", "sum": "paper", "rank": "paper"}


def perturbed(rank: int) -> dict[tuple[str, int | None], str]:
    return {(what, wrong): perturbed_in(rank, what, wrong) for what in PERTURBED for wrong in (2, None)}


def perturbed_in(rank: int, what: str, wrong: int | None) -> str:
    """What the comparison says; one process is made to differ by as little as can be."""
    parameters = Parameter("first", (SIDE, 64)), Parameter("second", (64, SIDE))
    under_test = reducer(*parameters, **of_preset(PERTURBED[what]))
    under_test.verify = True

    def step(iteration: int) -> None:
        generator = torch.Generator().manual_seed(10 * iteration + rank)
        own = {p.name: torch.randn(p.shape, generator=generator) for p in parameters}
        run_to_end(under_test.reduce(own, iteration))

    under_test.set_rank(RANK)
    step(0)
    if rank == wrong:
        if what == "factors":
            packed = under_test.router.engine.bases["second", 0]
            packed.message = packed.message.clone()
            packed.message[0, 3] ^= 1
        elif what == "scales":
            rows, cols = under_test.state.equaliser._moments["second"]
            under_test.state.equaliser._moments["second"] = rows, cols * (1 + 1e-7)
        elif what == "rank":
            under_test.router.ranks["second"] += 1
        else:
            engine = under_test.router.engine
            own = engine.orthonormal
            engine.orthonormal = lambda *arguments: [basis * (1 + 1e-7) for basis in own(*arguments)]
            step(1)
    elif what == "sum":
        step(1)
    try:
        under_test.compare_replicas(1)
    except ReplicaMismatch as error:
        return str(error)
    return "same"


def test_replicas_that_differ_in_a_bit_are_found() -> None:
    first, *others = run_on_ranks(perturbed, 3)
    assert all(other == first for other in others)  # every process sees the same
    for (what, wrong), message in first.items():
        if wrong is None:
            assert message == "same"
        else:
            # compare_replicas(1) is of the second step; the message counts iterations as Megatron's log does.
            assert message.startswith("iteration 2: process 2 holds other bits than most")
            assert f"in the {what} of {'first' if what == 'sum' else 'second'}." in message


def counted_at_a_checkpoint(rank: int) -> tuple[float, float]:
    """Bytes of a step, and after a checkpoint as well."""
    under_test = reducer(Parameter("w", (SIDE, SIDE)), engine="int4")
    under_test.set_rank(0)
    run_to_end(under_test.reduce({"w": noisy(0, rank)}, 0))
    before = under_test.communicator.traffic.bytes
    for _ in under_test.state.summed_errors(under_test.communicator, 1):
        pass
    return before, under_test.communicator.traffic.bytes


def test_a_checkpoint_is_no_training_traffic() -> None:
    for before, after in run_on_ranks(counted_at_a_checkpoint, 2):
        assert after == before > 0


def rows_apart(rank: int, wrong: int | None) -> str:
    """What the comparison of replicas says if the rows that travelled differ on one process."""
    under_test = reducer(Parameter("w", (SIDE, 64), embedding=True), **of_preset("balanced"))
    under_test.verify = True
    under_test.set_rank(RANK, {"w": RANK}, {"w": "rows:0.1"})
    own = Rows.sum_rows

    def perturbed(self: Rows, tensors: Any, communicator: Any) -> Any:
        parts = yield from own(self, tensors, communicator)
        if rank == wrong:
            parts.sums[0].mul_(1 + 1e-6)
        return parts

    Rows.sum_rows = perturbed  # type: ignore[method-assign]
    run_to_end(under_test.reduce({"w": noisy(0, rank)[:, :64].contiguous()}, 0))
    try:
        under_test.compare_replicas(0)
    except ReplicaMismatch as error:
        return str(error)
    return "same"


def test_replicas_whose_rows_differ_are_found() -> None:
    assert run_on_ranks(rows_apart, 2, None) == ["same"] * 2
    assert all("different bits in the sum of w." in message for message in run_on_ranks(rows_apart, 2, 1))
