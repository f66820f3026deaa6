"""Compressors that compress well, not only ones that lose nothing: a floor under what each mechanism gains.

Conservation sees nothing of this: an engine that sends noise conserves all that it is given. Floors lie about half-way
between what today's code reaches and what it reaches with the mechanism broken.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from edgc.comm.collectives import Communicator, Traffic, run_to_end
from edgc.compress import probe
from edgc.compress.engines.powersgd import PowerSGD
from edgc.compress.engines.rows import Rows
from edgc.compress.error_feedback import ErrorFeedback
from edgc.compress.reducer import GradientReducer
from edgc.compress.sent_bytes import sent_bytes
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.observe.fidelity import Fidelity
from edgc.plan.allocation import uniform_ranks
from edgc.plan.run import Run
from edgc.plan.selection import Selection, SkippedParameter, select
from edgc.specs import MatrixSpec, Parameter

MATRIX = MatrixSpec("w", 128, 256)
RUN = Run(iterations=1000, replicas=8)
CPU = torch.device("cpu")
RANK = 16


@pytest.fixture(autouse=True)
def group() -> Iterator[None]:
    """A group of this process alone: what rounding loses does not need two."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def communicator() -> Communicator:
    assert dist.group.WORLD is not None
    return Communicator(dist.group.WORLD, Traffic())


class Steps:
    """Reductions of one matrix."""

    def __init__(self, rank: int = RANK, matrix: MatrixSpec = MATRIX, **settings: Any):
        config = EDGCConfig.of(**settings)
        self.name = matrix.name
        self.reducer = GradientReducer(Selection((matrix,)), config, communicator(), CPU)
        self.reducer.set_rank(rank, {matrix.name: rank} if config.low_rank else None)
        self.iteration = 0

    def sum(self, gradient: Tensor) -> Tensor:
        result = gradient.clone()
        run_to_end(self.reducer.reduce({self.name: result}, self.iteration))
        self.iteration += 1
        return result

    def error(self) -> Tensor:
        return self.reducer.state.feedback.packed[MATRIX.name].values().view(MATRIX.rows, MATRIX.cols)


def signal(power: float) -> Tensor:
    """A matrix whose k-th singular value is k^-power."""
    left = torch.linalg.qr(torch.randn(MATRIX.rows, MATRIX.rows))[0]
    right = torch.linalg.qr(torch.randn(MATRIX.cols, MATRIX.rows))[0]
    return (left * torch.arange(1, MATRIX.rows + 1).float() ** -power) @ right.T


def captured(gradient: Tensor, **settings: Any) -> float:
    """The energy that leaves of the same gradient in the 12th step, without errors of earlier ones, as a share of the
    largest energy that the rank can hold.
    """
    steps, sent = Steps(**settings), gradient
    for _ in range(12):
        steps.reducer.state.feedback.clear(steps.name)
        sent = steps.sum(gradient)
    best = torch.linalg.svdvals(gradient)[:RANK].square().sum()
    return float((gradient.square().sum() - (gradient - sent).square().sum()) / best)


def late(constant: Tensor | None = None, **settings: Any) -> float:
    """Energy of the error over that of a constant gradient, in steps 45 to 60."""
    steps, gradient, shares = Steps(**settings), signal(0.5) if constant is None else constant, []
    for _ in range(60):
        steps.sum(gradient)
        shares.append(float(steps.error().square().sum() / gradient.square().sum()))
    return sum(shares[-16:]) / 16


def late_in_units_of_the_update(rank: int = RANK, **settings: Any) -> float:
    """The same for a gradient whose sign changes, with noise, and whose rows and columns have very different scales:
    energies after those are divided out, as Adam does.
    """
    steps, common, shares = Steps(rank, **settings), signal(0.5), []
    rows, cols = torch.logspace(-1.5, 1.5, MATRIX.rows).unsqueeze(1), torch.logspace(-0.5, 0.5, MATRIX.cols)
    for _ in range(80):
        equal = common * torch.randn(()) + 0.05 * torch.randn(MATRIX.rows, MATRIX.cols)
        steps.sum(equal * rows * cols)
        shares.append(float((steps.error() / rows / cols).square().sum() / equal.square().sum()))
    return sum(shares[-20:]) / 20


def test_a_warm_start_finds_nearly_all_that_the_rank_can_hold() -> None:
    gradient = signal(0.5)
    assert captured(gradient) > 0.99
    assert captured(gradient, warm_start=False) < 0.8


@pytest.mark.parametrize(("before", "after"), [(RANK, RANK - 4), (RANK - 4, RANK)])
@pytest.mark.parametrize("engine", ["powersgd", "alternating"])
def test_what_was_learned_outlives_a_change_of_the_rank(engine: str, before: int, after: int) -> None:
    steps, gradient = Steps(before, engine=engine), signal(0.5)
    for rank in [before] * 24 + [after]:
        steps.reducer.set_rank(rank, {MATRIX.name: rank})
        sent = steps.sum(gradient)
        steps.reducer.state.feedback.clear(MATRIX.name)
    best = torch.linalg.svdvals(gradient)[: min(before, after)].square().sum()
    assert float(gradient.square().sum() - (gradient - sent).square().sum()) > 0.95 * best


@pytest.mark.parametrize("engine", ["powersgd", "alternating"])
def test_a_step_near_the_largest_number_spoils_no_later_one(engine: str) -> None:
    steps = Steps(8, MatrixSpec("w", 64, 192), engine=engine)
    for seed in range(20):
        gradient = torch.randn(64, 192, generator=torch.Generator().manual_seed(seed))
        if seed == 9:
            gradient[0, 3] = 2e38  # finite, and so is its norm
        steps.sum(gradient)
        assert all(basis.isfinite().all() for basis in bases(steps))


def bases(steps: Steps) -> list[Tensor]:
    return [packed.values() for packed in steps.reducer.state.state_dict()["engine"].values()]


def test_a_basis_of_the_other_side_is_none() -> None:
    """A run may go on with another ``transpose``."""
    before, after = Steps(8, MatrixSpec("w", 64, 192)), Steps(8, MatrixSpec("w", 64, 192), transpose=False)
    before.sum(torch.randn(64, 192))
    after.reducer.state.load_state_dict(before.reducer.state.state_dict())
    gradient = torch.randn(64, 8) @ torch.randn(8, 192)
    after.iteration = before.iteration
    for _ in range(4):
        total = after.sum(gradient)
    assert (total - gradient).norm() < 0.9 * gradient.norm()


def test_factors_that_take_turns_leave_less_behind() -> None:
    assert late(basis_cycle=8) < 0.85 * late(basis_cycle=1)


def test_errors_of_which_a_part_waits_leave_room_for_the_gradient() -> None:
    """Gradients as of a few hundred tokens each: their own directions hold most of their energy, errors have all."""
    found = {}
    for gain in (1.0, 0.5):
        steps, aligned = Steps(error_gain=gain, equalise=True), []
        generator = torch.Generator().manual_seed(0)
        strengths = torch.arange(1, 65.0).rsqrt()
        for _ in range(60):
            left = torch.randn(MATRIX.rows, 64, generator=generator) * strengths
            gradient = left @ torch.randn(64, MATRIX.cols, generator=generator)
            total = steps.sum(gradient)
            aligned.append(float(torch.nn.functional.cosine_similarity(total.flatten(), gradient.flatten(), dim=0)))
        found[gain] = sum(aligned[30:]) / 30
    assert found[0.5] > found[1.0] + 0.05


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spike", [1.0, 1000.0])
@pytest.mark.parametrize("engine", ["powersgd", "int4", "topk"])
def test_what_waits_is_sent_in_the_end_and_no_spike_takes_of_it(dtype: torch.dtype, spike: float, engine: str) -> None:
    steps = Steps(error_gain=0.5, equalise=True, engine=engine)
    sent, given = torch.zeros(MATRIX.rows, MATRIX.cols), torch.zeros(MATRIX.rows, MATRIX.cols)
    for _ in range(12):
        gradient = signal(0.5).to(dtype)
        sent, given = sent + steps.sum(gradient).float(), given + gradient.float()
    torch.testing.assert_close(sent + steps.error(), given, rtol=1e-4, atol=1e-3)
    older, gradient = steps.error(), spike * signal(0.5).to(dtype)
    left = gradient.float() + 0.5 * older - steps.sum(gradient).float()
    fresh = steps.error() - 0.5 * older
    excess = max(1.0, float((left * fresh).sum() / fresh.square().sum()))
    torch.testing.assert_close(fresh, left / excess, rtol=1e-3, atol=2e-3)
    assert (excess > 100) == (spike > 1)


def test_a_spike_after_a_resume_is_one_by_the_norm_of_before() -> None:
    first, again, gradient = Steps(equalise=True), Steps(equalise=True), signal(0.5)
    first.sum(gradient)
    again.reducer.state.load_state_dict(first.reducer.state.state_dict())
    again.iteration = first.iteration
    assert torch.equal(first.sum(1000 * gradient), again.sum(1000 * gradient))
    assert torch.equal(first.error(), again.error())


def test_a_resumed_run_goes_on_with_the_same_bits_whatever_the_shapes() -> None:
    """Matrices in low rank and a longer one that is rounded: they are scaled together."""
    words, in_low_rank = MatrixSpec("words", 1003, 61), [MatrixSpec(f"w{i}", 37 + 7 * i, 91 + 5 * i) for i in range(12)]
    matrices = (*in_low_rank, words)

    def reducer() -> GradientReducer:
        made = GradientReducer(Selection(matrices), EDGCConfig.of(equalise=True), communicator(), CPU)
        made.set_rank(8, {one.name: 8 for one in in_low_rank}, {"words": "int4"})
        return made

    before, after = reducer(), reducer()
    for iteration in range(6):
        gradients = {one.name: torch.randn(one.rows, one.cols) for one in matrices}
        copies = {name: gradient.clone() for name, gradient in gradients.items()}
        run_to_end(before.reduce(gradients, iteration))
        if iteration >= 3:
            run_to_end(after.reduce(copies, iteration))
            assert all(torch.equal(copies[name], gradient) for name, gradient in gradients.items())
        else:
            after.state.load_state_dict(before.state.state_dict())


@pytest.mark.parametrize("pause", [(None,), (RANK, {}, {"bias": "int8"})], ids=["of all", "of one"])
def test_a_gradient_that_was_sent_whole_for_a_while_is_no_spike_by_its_norm_of_before(pause: tuple[Any, ...]) -> None:
    selection = Selection((MATRIX,), (SkippedParameter(Parameter("bias", (32,)), "one-dimensional"),))
    reducer = GradientReducer(selection, EDGCConfig(), communicator(), CPU)
    compressed = RANK, {MATRIX.name: RANK}, {"bias": "int8"}
    for iteration, (plan, size) in enumerate(((compressed, 1.0), (pause, 1.0), (pause, 1.0), (compressed, 1000.0))):
        reducer.set_rank(*plan)
        reducer.begin(iteration)
        gradient = size * signal(0.5)
        sums = {MATRIX.name: gradient.clone(), "bias": torch.ones(32)}
        run_to_end(reducer.reduce(sums, iteration))
    left = reducer.state.feedback.packed[MATRIX.name].values().view_as(gradient)
    torch.testing.assert_close(sums[MATRIX.name] + left, gradient, rtol=1e-4, atol=1e-2)


def test_the_strongest_columns_get_the_better_format() -> None:
    gradient = signal(1.0)
    assert captured(gradient, basis_wire="int6+int4") > 0.99 > captured(gradient, basis_wire="int4+int6")


@pytest.mark.parametrize("factor", ["basis_wire", "wire"])
def test_outliers_spoil_neither_factor(factor: str) -> None:
    gradient = signal(0.5)
    gradient[::19] *= 20
    gradient[:, ::37] *= 20
    assert captured(gradient, **{factor: "int3"}) > 0.9


def test_outliers_do_not_spoil_the_basis_that_is_kept() -> None:
    """It has a large entry in each of the groups in which it is rounded."""
    gradient = signal(0.5)
    gradient[::8] *= 20
    assert late(gradient) < 10


def test_equalising_saves_the_small_rows_of_a_badly_scaled_matrix() -> None:
    assert late_in_units_of_the_update(equalise=True) < 0.3 * late_in_units_of_the_update()


def test_equalising_does_not_blow_up_the_rows_of_rare_tokens() -> None:
    """An embedding that is not tied to the output layer: most rows have no gradient in a step."""
    words = MatrixSpec("words", 2000, 64, embedding=True, sparse_rows=True)
    steps = Steps(matrix=words, equalise=True, wire="int5", basis_wire="int5")
    generator = torch.Generator().manual_seed(0)
    often, meanings = 1 / torch.arange(1, words.rows + 1.0), torch.randn(16, words.cols, generator=generator)
    aligned, lengths = [], []
    for _ in range(60):
        gradient = torch.zeros(words.rows, words.cols)
        tokens = torch.multinomial(often, 512, replacement=True, generator=generator)
        gradient.index_add_(0, tokens, torch.randn(512, 16, generator=generator) @ meanings)
        total = steps.sum(gradient)
        aligned.append(float(torch.nn.functional.cosine_similarity(total.flatten(), gradient.flatten(), dim=0)))
        lengths.append(float(total.norm() / gradient.norm()))
    assert min(aligned[20:]) > 0.8 and max(lengths[20:]) < 1.2


@pytest.mark.parametrize(
    ("preset", "share", "most"), [("safe", 1 / 4, 1.8), ("balanced", 5 / 32, 4.0), ("fast", 3 / 32, 7.5)]
)
def test_a_preset_leaves_no_more_behind_than_it_did(preset: str, share: float, most: float) -> None:
    settings = {name: value for name, value in PRESETS[preset].items() if name not in ("volume", "pp", "error_gain")}
    rank = int(share * MATRIX.rows)
    found = late_in_units_of_the_update(rank, **settings)
    assert 0 < found < most


def test_the_formats_of_fast_leave_less_behind_than_others_of_the_same_bytes() -> None:
    fast = {name: value for name, value in PRESETS["fast"].items() if name not in ("volume", "pp", "error_gain")}

    def left(basis_wire: str, wire: str) -> float:
        settings = {**fast, "basis_wire": basis_wire, "wire": wire}
        per_rank = PowerSGD.bytes_per_rank(MATRIX, EDGCConfig.of(**settings))
        return late_in_units_of_the_update(int(4 * MATRIX.elements / 48 / per_rank), **settings)

    own = left(fast["basis_wire"], fast["wire"])
    assert own < 0.9 * min(left("int6+int4", "int4"), left("int5", "int5"), left("int8", "int8"))


@pytest.mark.parametrize("engine", ["int4", "int3", "int2", "onebit", "loco"])
def test_a_small_entry_beside_a_large_one_arrives_in_the_end(engine: str) -> None:
    steps, total, gradient = Steps(engine=engine), torch.zeros(()), torch.zeros(MATRIX.rows, MATRIX.cols)
    gradient[::2] = 1.0
    gradient[1, 2] = 0.02  # far below half a step of rounding to 4 bits in a group of ones
    gradient[1, 3] = 1.0
    for _ in range(200):
        total = total + steps.sum(gradient)[1, 2]
    assert float(total) == pytest.approx(200 * 0.02, rel=0.5)


@pytest.mark.parametrize("settings", [{}, {"engine": "int4"}], ids=["rank", "int4"])
def test_each_step_rounds_its_errors_with_random_numbers_of_its_own(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ones in every step would push an error the same way for ever."""
    seeds: list[int] = []
    own = ErrorFeedback._seed_of

    def noted(self: ErrorFeedback, name: str, *occasion: object) -> int:
        seeds.append(own(self, name, *occasion))
        return seeds[-1]

    monkeypatch.setattr(ErrorFeedback, "_seed_of", noted)
    steps = Steps(error_dtype="int8", **settings)
    for _ in range(3):
        steps.sum(signal(0.5))
    assert len(seeds) == len(set(seeds)) == 4, "zeros before the first, too"


def test_rows_with_most_energy_leave_at_once_and_the_others_in_turn() -> None:
    """A gradient as of an embedding: few rows have one in a step, each of them as often as any other."""
    for equalise in (False, True):
        steps, fresh, whole = Steps(engine="rows:0.1", equalise=equalise), 0.0, 0.0
        sent, given = torch.zeros(MATRIX.rows, MATRIX.cols), torch.zeros(MATRIX.rows, MATRIX.cols)
        generator = torch.Generator().manual_seed(0)
        for _ in range(60):
            gradient = torch.zeros(MATRIX.rows, MATRIX.cols)
            rows = torch.randperm(MATRIX.rows, generator=generator)[:16]
            gradient[rows] = torch.randn(16, MATRIX.cols, generator=generator)
            gradient[rows] *= torch.where(torch.arange(16) < 10, 1.0, 0.3).unsqueeze(1)
            total = steps.sum(gradient)
            sent, given = sent + total, given + gradient
            fresh, whole = fresh + float((total * gradient).sum()), whole + float(gradient.square().sum())
            assert int((total.abs().sum(dim=1) > 0).sum()) <= 13
        assert fresh > 0.9 * whole
        assert float((sent - given).norm() / given.norm()) < 0.2


def test_entropy_is_that_of_gradients_without_their_loss_scale() -> None:
    found = []
    for scale in (None, torch.tensor(1024.0)):
        observer = Steps(iteration_sampling_rate=1.0, gradient_sampling_rate=1.0).reducer.observer
        gradient = torch.ones(()) if scale is None else scale
        torch.manual_seed(0)
        observer.measure({MATRIX.name: torch.randn(MATRIX.rows, MATRIX.cols) * gradient}, 0, scale)
        found.append(float(observer.measurements.entropy[0]))
    assert found[0] == pytest.approx(found[1], abs=1e-4) == pytest.approx(1.4189, abs=0.02)  # of a normal law: nats


def test_the_probe_fits_times_to_their_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(scratch: Any, work: Any) -> float:
        return 1 + 0.01 * max(scratch.groups[0].reducer.router.ranks.values(), default=0)

    monkeypatch.setattr(probe._Scratch, "_fastest", seconds)
    cost = probe.probe([Selection((MATRIX,))], EDGCConfig(), communicator(), CPU, RUN)
    assert (cost.compressed.intercept, cost.compressed.slope) == pytest.approx((1, 0.01))
    assert cost.host_seconds == 1


@pytest.mark.parametrize("preset", ["paper", "safe", "balanced"])
def test_the_probe_times_ranks_at_which_the_same_matrices_are_in_low_rank(
    preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes = {"square": (64, 64), "wide": (64, 256), "tall": (256, 64), "small": (16, 16), "long": (512, 128)}
    parameters = [Parameter(name, shape) for name, shape in shapes.items()]
    config = EDGCConfig.from_preset(preset)

    def sent(ranks: Mapping[str, int]) -> float:
        return sum(rank * sum(shapes[name]) for name, rank in ranks.items())

    def seconds(scratch: Any, work: Any) -> float:
        work()  # also at ranks above the sides of a matrix
        return sent(scratch.reducers[0].router.ranks)

    monkeypatch.setattr(probe._Scratch, "_fastest", seconds)
    cost = probe.probe([select(parameters, config)], config, communicator(), CPU, RUN)
    for rank in (8, 16, 24):
        known = sent(uniform_ranks([one.spec for one in parameters], rank, 2.0))
        if config.ranks.volume is not None:
            known = sent(dict.fromkeys(shapes, rank))
        # a twentieth of the elements goes in and out of uniform ranks
        assert cost.compressed.at(rank) == pytest.approx(known, rel=0.001 if config.ranks.volume else 0.1)


@pytest.mark.parametrize(
    ("volume", "scatters", "timed"),
    [(None, False, False), (24.0, False, True), (24.0, True, True), (8.0, True, True)],
)
def test_the_probe_times_rounding_with_a_volume(
    volume: float | None, scatters: bool, timed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(scratch: Any, work: Any) -> float:
        reducer = scratch.groups[0].reducer
        if reducer.router.formats:
            assert not reducer.router.ranks and reducer.router.formats == {MATRIX.name: "int4", "bias": "int8"}
            return 0.25
        return 1 + 0.01 * max(reducer.router.ranks.values(), default=0)

    monkeypatch.setattr(probe._Scratch, "_fastest", seconds)
    selection = Selection((MATRIX,), (SkippedParameter(Parameter("bias", (32,)), "one-dimensional"),))
    given = {"preset": "safe", "volume": volume} if volume else {"preset": "paper"}
    config = EDGCConfig.from_preset(**given)
    run = replace(RUN, scatters=scatters)
    cost = probe.probe([selection], config, communicator(), CPU, run)
    assert cost.rounded_seconds == (0.25 if timed else None)
    if volume is not None and timed:
        rank = cost.volume_rank
        sent = sent_bytes(selection, config, 8, RUN)
        assert rank is not None
        assert sent.at_rank(rank) <= sent.host / volume < sent.at_rank(rank + 1)
        again = probe.probe([selection], config.replace(dense_wire="int4"), communicator(), CPU, run)
        assert again.rounded_seconds == again.dense_seconds == 1, "the warm-up rounds alike"


@pytest.mark.parametrize("scale", [None, 8.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("way", ["low rank", "rows, then low rank", "int4"])
def test_nothing_is_lost_with_a_loss_scale_and_errors_that_wait(
    way: str, dtype: torch.dtype, scale: float | None
) -> None:
    plans: dict[str, tuple[Any, ...]] = {
        "low rank": (RANK, {MATRIX.name: RANK}),
        "rows, then low rank": (RANK, {MATRIX.name: RANK}, {MATRIX.name: "rows:0.1"}),
        "int4": (RANK, {}, {MATRIX.name: "int4"}),
    }
    config = EDGCConfig.of(error_gain=0.5, equalise=True, spike_limit=float("inf"))
    reducer = GradientReducer(Selection((MATRIX,)), config, communicator(), CPU)
    reducer.set_rank(*plans[way])
    given, sent = torch.zeros(MATRIX.rows, MATRIX.cols), torch.zeros(MATRIX.rows, MATRIX.cols)
    for step in range(4):
        gradient = (signal(0.5) * (scale or 1.0)).to(dtype)
        given = given + gradient.float() / (scale or 1.0)
        run_to_end(reducer.reduce({MATRIX.name: gradient}, step, None if scale is None else torch.tensor(scale)))
        sent = sent + gradient.float() / (scale or 1.0)
    left = reducer.state.feedback.packed[MATRIX.name].values().view_as(sent)
    torch.testing.assert_close(sent + left, given, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("plan", [(RANK, {MATRIX.name: RANK}), (RANK, {}, {MATRIX.name: "int2"})], ids=["rank", "int2"])
def test_what_waits_counts_as_owed_where_it_is_measured(plan: tuple[Any, ...]) -> None:
    config = EDGCConfig.of(error_gain=0.25, iteration_sampling_rate=1.0, fidelity_share=float("inf"))
    reducer = GradientReducer(Selection((MATRIX,)), config, communicator(), CPU)
    reducer.set_rank(*plan)
    older = torch.zeros(MATRIX.rows, MATRIX.cols)
    for step in range(3):
        owed = signal(0.5) + older
        gradient = owed - older
        run_to_end(reducer.reduce({MATRIX.name: gradient}, step))
        older = reducer.state.feedback.packed[MATRIX.name].values().view_as(owed).clone()
    seen = Fidelity.of(reducer.observer.measurements.fidelity[-1][MATRIX.name].tolist())
    assert seen.gradient.owed == pytest.approx(float(owed.square().sum()), rel=1e-3)
    assert seen.gradient.unsent == pytest.approx(float(older.square().sum()), rel=1e-3)
    residual = float(reducer.observer.measurements.residual[-1])
    assert residual == pytest.approx(float(older.norm() / owed.norm()), rel=1e-3)


@pytest.mark.parametrize(("by_host", "seen"), [(False, 1), (True, 0)])
def test_rows_are_measured_in_a_warm_up_and_not_where_the_host_sums(by_host: bool, seen: int) -> None:
    config = EDGCConfig.of(volume=8.0, iteration_sampling_rate=1.0)
    reducer = GradientReducer(Selection((MATRIX,)), config, communicator(), CPU)
    plans: list[tuple[Any, ...]] = [(RANK,), (None, None, None, by_host)]
    for step, plan in enumerate(plans):
        reducer.set_rank(*plan)
        reducer.begin(step)
        run_to_end(reducer.reduce({MATRIX.name: signal(0.5)}, step))  # the host's first sum has the error, too
    assert len(reducer.observer.measurements.row_shares) == seen


@pytest.mark.parametrize("shared", [False, True], ids=["all at once", "one parameter"])
def test_the_hosts_sum_takes_the_whole_of_what_waited(shared: bool) -> None:
    config = EDGCConfig.of(error_gain=0.5)
    reducer = GradientReducer(Selection((MATRIX,)), config, communicator(), CPU)
    given, sent = torch.zeros(MATRIX.rows, MATRIX.cols), torch.zeros(MATRIX.rows, MATRIX.cols)
    for step in range(4):
        if step < 3:
            reducer.set_rank(RANK)
        elif shared:
            reducer.set_rank(RANK, {}, {MATRIX.name: "fp32"})
        else:
            reducer.set_rank(None, unrounded=True)
        gradient = signal(0.5)
        given = given + gradient
        run_to_end(reducer.reduce({MATRIX.name: gradient}, step))
        sent = sent + gradient
    assert not reducer.state.feedback.packed
    torch.testing.assert_close(sent, given, rtol=1e-4, atol=1e-4)


def test_a_sum_that_overflows_its_16_bits_alone_is_no_sum() -> None:
    reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig(), communicator(), CPU)
    reducer.set_rank(RANK)
    run_to_end(reducer.reduce({MATRIX.name: (100 * signal(0.5)).half()}, 0, torch.tensor(1.0)))
    before = reducer.state.feedback.packed[MATRIX.name].values().clone()
    assert float(before.abs().max()) > 1
    gradient = signal(0.5).half()
    run_to_end(reducer.reduce({MATRIX.name: gradient}, 1, torch.tensor(2.0**17)))
    assert not bool(reducer.finite) and bool(gradient.isnan().all())
    assert torch.equal(reducer.state.feedback.packed[MATRIX.name].values(), before)


def test_rows_that_add_up_to_infinity_are_no_sum_though_what_they_leave_is_finite(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    own = Rows.sum_rows

    def overflown(self: Rows, tensors: Any, communicator: Any) -> Any:
        """As of two processes whose rows are finite."""
        parts = yield from own(self, tensors, communicator)
        parts.sums[0][0, 0] = float("inf")
        return replace(parts, finite=parts.sums[0].isfinite().all())

    monkeypatch.setattr(Rows, "sum_rows", overflown)
    reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig(), communicator(), CPU)
    reducer.set_rank(RANK, {MATRIX.name: RANK}, {MATRIX.name: "rows:0.1"})
    gradient = signal(0.5)
    run_to_end(reducer.reduce({MATRIX.name: gradient}, 0))
    assert not bool(reducer.finite) and bool(gradient.isnan().all())


@pytest.mark.parametrize("kernels", ["plain", "fused"])
@pytest.mark.parametrize("plan", [(RANK, {MATRIX.name: RANK}), (RANK, {}, {MATRIX.name: "int4"})], ids=["rank", "int4"])
def test_the_whole_error_is_added_early_in_the_run(plan: tuple[Any, ...], kernels: str) -> None:
    def sums(gain: float, fraction: float) -> list[Tensor]:
        config = EDGCConfig.of(error_gain=gain, whole_error_fraction=fraction, kernels=kernels)
        parameter, run = Parameter(MATRIX.name, (MATRIX.rows, MATRIX.cols)), Run(iterations=8, replicas=1)
        reducer = GradientReducer.of([parameter], config, communicator(), CPU, run)
        reducer.set_rank(*plan)
        torch.manual_seed(0)
        found = []
        for step in range(6):
            gradient = signal(0.5)
            run_to_end(reducer.reduce({MATRIX.name: gradient}, step))
            found.append(gradient)
        return found

    whole, half, both = sums(1.0, 0.0), sums(0.5, 0.0), sums(0.5, 0.4)
    same = [torch.equal(one, other) for one, other in zip(both, whole, strict=True)]
    assert same[:4] == [True] * 4 and not any(same[4:]), "0.4 of 8 iterations, rounded up"
    assert not torch.equal(half[1], whole[1])


def test_rounding_at_random_draws_anew_in_each_step() -> None:
    gradient, errors = signal(0.5), []
    for iteration in range(2):
        steps = Steps(engine="int4:stochastic")
        steps.iteration = iteration
        steps.sum(gradient)
        errors.append(steps.error().flatten())
    assert abs(float(torch.corrcoef(torch.stack(errors))[0, 1])) < 0.1


def test_outliers_do_not_spoil_the_one_factor() -> None:
    gradient = signal(0.5)
    gradient[::19] *= 20
    gradient[:, ::37] *= 20
    assert captured(gradient, engine="alternating", wire="int3") > 0.8


@pytest.mark.parametrize("engine", ["int4", "int3"])
def test_equalising_saves_the_small_rows_of_a_matrix_that_is_rounded(engine: str) -> None:
    equalised = late_in_units_of_the_update(engine=engine, equalise=True)
    assert equalised < 0.75 * late_in_units_of_the_update(engine=engine)


def test_scales_of_what_is_rounded_are_those_of_its_sums() -> None:
    steps, rows = Steps(engine="int4", equalise=True), torch.logspace(-1, 1, MATRIX.rows)
    for _ in range(40):
        steps.sum(rows.unsqueeze(1) * torch.randn(MATRIX.rows, MATRIX.cols))
    assert steps.reducer.state.equaliser is not None
    found, _ = steps.reducer.state.equaliser.scales([MATRIX.name])[MATRIX.name]
    torch.testing.assert_close(found.flatten(), rows / rows.square().mean().sqrt(), rtol=0.2, atol=0)


def test_a_vector_has_no_scales() -> None:
    """It would take as much memory as its error."""
    steps = Steps(engine="int4", matrix=MatrixSpec("bias", 1, 128), equalise=True)
    steps.sum(torch.randn(128))
    assert steps.reducer.state.state_dict()["equaliser"] == {}


@pytest.mark.parametrize("engine", ["powersgd", "alternating"])
def test_energies_are_squared_singular_values(engine: str) -> None:
    steps, gradient = Steps(engine=engine, iteration_sampling_rate=1.0), signal(1.0)
    for _ in range(12):
        steps.reducer.state.feedback.clear(MATRIX.name)
        steps.sum(gradient)
    energies = steps.reducer.observer.measurements.energies[-1][MATRIX.name]
    torch.testing.assert_close(energies[:8], torch.arange(1, 9).float() ** -2, rtol=0.1, atol=0)


def test_rotated_rounding_spreads_outliers() -> None:
    gradient, lost = torch.randn(MATRIX.rows, MATRIX.cols), {}
    gradient[:, ::128] *= 100
    for engine in ("int4", "int4:rotated"):
        steps = Steps(engine=engine)
        steps.sum(gradient)
        lost[engine] = float(steps.error()[:, 1:128].square().mean())
    assert lost["int4"] > 0.9 > lost["int4:rotated"]


def test_the_reducer_of_a_sparse_embedding_knows_it() -> None:
    words = Parameter("words", (1000, 64), embedding=True, sparse_rows=True)
    assert words.spec == MatrixSpec("words", 1000, 64, True, True)
    made = GradientReducer.of([words], EDGCConfig.of(equalise=True, compress_embeddings=True), communicator(), CPU)
    assert made.state.equaliser is not None and made.state.equaliser.sparse_rows == {"words"}


@pytest.mark.parametrize("rate", [1.0, 0.1])
def test_the_share_of_samples_is_of_the_whole_run(rate: float) -> None:
    sampler = Steps(fidelity_share=0.0005, iteration_sampling_rate=rate).reducer.state.fidelity
    assert sampler is not None and 3 * rate * sampler.share == pytest.approx(0.0005)


@pytest.mark.parametrize("settings", [{"warm_start": False}, {"basis_cycle": 2}], ids=["each step", "each turn"])
def test_a_cold_start_is_from_another_basis(settings: dict[str, Any]) -> None:
    engine: Any = Steps(**settings).reducer.router.engine
    first, second = (engine.basis(MATRIX, RANK, step).values() for step in (0, 1))
    assert float((first.T @ second).norm() / RANK**0.5) < 0.6


def test_a_state_that_is_kept_twice_takes_twice_the_memory() -> None:
    found = []
    for repeatable in (False, True):
        reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig.of(static_rank=8), communicator(), CPU, repeatable)
        reducer.set_rank(8)
        for step in range(2):
            reducer.begin(step)
            run_to_end(reducer.reduce({MATRIX.name: signal(0.5)}, step))
        found.append(reducer.state.bytes())
    assert found[1] == pytest.approx(2 * found[0], rel=0.01)


def test_the_probe_times_both_factors_that_are_sent_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a tall matrix one has twice as many bytes as the other."""
    seen, reduce = list[int](), GradientReducer.reduce

    def noted(self: Any, gradients: Any, iteration: int, *rest: Any, **named: Any) -> Any:
        seen.append(iteration % 2)
        return reduce(self, gradients, iteration, *rest, **named)

    monkeypatch.setattr(GradientReducer, "reduce", noted)
    monkeypatch.setattr(probe, "fastest", lambda work, *rest: work() or 1.0)
    config = EDGCConfig.of(engine="alternating", dense_wire="fp32")
    cost = probe.probe([Selection((MATRIX,))], config, communicator(), CPU, RUN)
    assert seen == 3 * [1, 0], "three ranks"
    assert cost.compressed.at(8) == pytest.approx(0.5), "seconds of one"


@pytest.mark.parametrize("scatters", [False, True])
def test_the_probe_reduces_as_training_will(scatters: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, reduce = list[bool](), GradientReducer.reduce

    def noted(self: Any, gradients: Any, iteration: int, loss_scale: Any = None, shards: Any = None) -> Any:
        whole.append(shards is None)
        return reduce(self, gradients, iteration, loss_scale, shards)

    monkeypatch.setattr(GradientReducer, "reduce", noted)
    monkeypatch.setattr(probe, "fastest", lambda work, *rest: work() or 1.0)
    cost = probe.probe([Selection((MATRIX,))], EDGCConfig(), communicator(), CPU, replace(RUN, scatters=scatters))
    assert cost.host_seconds == (0.5 if scatters else 1.0) and set(whole) == {not scatters}


def test_every_matrix_has_the_rank_that_the_plan_gives_it() -> None:
    reducer = GradientReducer(
        Selection(tuple(MatrixSpec(name, 64, 64) for name in "abc")), EDGCConfig(), communicator(), CPU
    )
    reducer.set_rank(16, {"a": 4, "b": 16})
    run_to_end(reducer.reduce({name: torch.randn(64, 64) for name in "abc"}, 0))
    engine: Any = reducer.router.engine
    assert {name: len(strengths) for name, strengths in engine.strengths.items()} == {"a": 4, "b": 16}


@pytest.mark.parametrize(("size", "dtype"), [(2, torch.bfloat16), (4, torch.float32)])
def test_the_probe_times_gradients_of_the_hosts_type(
    size: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[torch.dtype]()

    def seconds(scratch: Any, work: Any) -> float:
        seen.update(group.flat.dtype for group in scratch.groups)
        return 1.0

    monkeypatch.setattr(probe._Scratch, "_fastest", seconds)
    probe.probe([Selection((MATRIX,))], EDGCConfig(), communicator(), CPU, replace(RUN, value_bytes=size))
    assert seen == {dtype}


def test_the_time_of_work_is_that_of_its_fastest_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 5.0, 5.0, 8.0, 8.0, 9.0, 9.0, 13.0])
    monkeypatch.setattr(probe, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert probe.fastest(lambda: None, communicator(), CPU) == 1


def test_the_probes_gradients_do_not_grow_from_sum_to_sum() -> None:
    scratch = probe._Scratch([Selection((MATRIX,))], EDGCConfig(), communicator(), CPU, RUN)
    (group,) = scratch.groups
    group.flat.fill_(8.0)  # as after a sum over as many processes
    scratch.host_alone()
    assert float(group.flat.max()) == 1.0


def test_a_larger_loss_scale_makes_no_spike() -> None:
    reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig(), communicator(), CPU)
    reducer.set_rank(RANK)
    gradient, seen = signal(0.5), []
    # the last one is a spike
    for step, (size, scale) in enumerate(((1.0, 1.0), (1024.0, 1024.0), (1024.0, 1.0))):
        run_to_end(reducer.reduce({MATRIX.name: size * gradient}, step, torch.tensor(scale)))
        seen.append(float(reducer.observer.measurements.spikes))
    assert seen == [0, 0, 1]


@pytest.mark.parametrize("value", [1.0, float("inf")])
def test_the_hosts_sum_of_16_bits_is_finite_where_all_its_values_are(value: float) -> None:
    reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig(), communicator(), CPU)
    assert reducer.plain
    run_to_end(reducer.reduce({MATRIX.name: torch.full((MATRIX.rows, MATRIX.cols), value).bfloat16()}, 0))
    assert bool(reducer.finite) == (value == 1)


def test_a_failed_step_in_which_compression_ends_loses_no_error() -> None:
    reducer = GradientReducer(Selection((MATRIX,)), EDGCConfig(), communicator(), CPU)
    reducer.set_rank(RANK)
    run_to_end(reducer.reduce({MATRIX.name: signal(0.5)}, 0))
    before = reducer.state.feedback.packed[MATRIX.name].values().clone()
    reducer.set_rank(None, unrounded=True)
    gradient = signal(0.5)
    gradient[0, 0] = float("inf")
    run_to_end(reducer.reduce({MATRIX.name: gradient}, 1))
    assert bool(gradient.isnan().all())
    assert torch.equal(reducer.state.feedback.packed[MATRIX.name].values(), before)
