"""The rank model against real SVDs, against a direct integral of the Marchenko-Pastur density, and itself."""

import math

import numpy as np
import pytest

from edgc.plan.by_entropy.rank_model import StageRankModel, residual_norm


def rank_for_residual(norm: float, rows: int, cols: int) -> float:
    """Of a stage of one matrix."""
    return StageRankModel(((rows, cols),)).rank_for_residual(norm)


def adjusted_rank(rank: float, before: float, after: float, rows: int, cols: int) -> float:
    return StageRankModel(((rows, cols),)).adjusted_rank(rank, before, after)


# Tall, wide and square. Fewer draws for larger matrices: their norms scatter less.
SHAPES = {
    (384, 128): 12,
    (128, 384): 12,
    (1024, 160): 4,
    (160, 1024): 4,
    (256, 256): 8,
    (500, 400): 3,
    (512, 512): 3,
}


def mean_energies(rows: int, cols: int, draws: int) -> np.ndarray:
    """Squared singular values, largest first, averaged over Gaussian draws."""
    generator = np.random.default_rng([rows, cols])
    total = np.zeros(min(rows, cols))
    for _ in range(draws):
        total += np.linalg.svd(generator.standard_normal((rows, cols)), compute_uv=False) ** 2
    return total / draws


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_agrees_with_real_svds(shape: tuple[int, int]) -> None:
    energies = mean_energies(*shape, SHAPES[shape])
    limit = min(shape)
    for rank in (0, 1, limit // 16, limit // 8, limit // 4, limit // 2, 3 * limit // 4):
        assert residual_norm(rank, *shape) == pytest.approx(math.sqrt(energies[rank:].sum()), rel=0.01), rank


def test_design_accuracy_at_256_by_1024() -> None:
    energies = mean_energies(256, 1024, 4)
    for rank in range(8, 201, 8):
        assert residual_norm(rank, 256, 1024) == pytest.approx(math.sqrt(energies[rank:].sum()), rel=0.004), rank


@pytest.mark.parametrize("rows, cols", [(256, 256), (128, 256), (30, 300), (7, 70_000)])
def test_agrees_with_the_integrated_density(rows: int, cols: int) -> None:
    aspect = rows / cols
    low, high = (1 - math.sqrt(aspect)) ** 2, (1 + math.sqrt(aspect)) ** 2
    angle = (np.arange(400_000) + 0.5) / 400_000 * math.pi / 2
    x = low + (high - low) * np.sin(angle) ** 2
    density = np.sqrt((high - x) * (x - low)) / (2 * math.pi * aspect * x)
    weight = density * 2 * (high - low) * np.sin(angle) * np.cos(angle) * angle[0] * 2
    count, energy = np.cumsum(weight), np.cumsum(weight * x)
    assert count[-1] == pytest.approx(1, abs=1e-6)
    for kept in (0.05, 0.3, 0.7, 0.95):
        expected = math.sqrt(rows * cols * np.interp(1 - kept, count, energy))
        assert residual_norm(kept * rows, rows, cols) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("rows, cols", [(1, 1), (1, 9), (64, 64), (64, 65), (300, 20), (1024, 4096), (1, 10**9)])
def test_ends_and_symmetry(rows: int, cols: int) -> None:
    limit = min(rows, cols)
    assert residual_norm(0, rows, cols) ** 2 == pytest.approx(rows * cols, rel=1e-14)
    assert residual_norm(limit, rows, cols) == 0
    assert residual_norm(limit + 5, rows, cols) == 0
    assert residual_norm(0.4 * limit, rows, cols) == residual_norm(0.4 * limit, cols, rows)
    assert rank_for_residual(math.sqrt(rows * cols), rows, cols) == pytest.approx(0, abs=1e-9)
    assert rank_for_residual(0, rows, cols) == limit


@pytest.mark.parametrize("rows, cols", [(64, 64), (100, 101), (256, 1024), (4096, 1024), (2, 5000)])
def test_strictly_decreasing_between_whole_ranks_too(rows: int, cols: int) -> None:
    norms = [residual_norm(rank, rows, cols) for rank in np.linspace(0, min(rows, cols), 500)]
    steps = np.diff(norms)
    assert (steps < 0).all()
    # Continuous: g^2 falls by at most the largest eigenvalue, (sqrt(m) + sqrt(n))^2, per rank.
    largest = (math.sqrt(rows) + math.sqrt(cols)) ** 2 * min(rows, cols) / 499
    assert (np.diff(np.square(norms)) >= -largest * (1 + 1e-9)).all()


@pytest.mark.parametrize("rows, cols", [(1, 1), (64, 64), (300, 200), (1024, 4096), (3, 10**6)])
def test_inverse_round_trips(rows: int, cols: int) -> None:
    for rank in np.linspace(0, min(rows, cols), 41):
        assert rank_for_residual(residual_norm(rank, rows, cols), rows, cols) == pytest.approx(rank, abs=1e-8)
    for norm in np.linspace(0.01, 1, 41) * math.sqrt(rows * cols):
        assert residual_norm(rank_for_residual(norm, rows, cols), rows, cols) == pytest.approx(norm, rel=1e-9)


def test_inverse_never_leaves_the_ranks_that_exist() -> None:
    for rows, cols in ((1024, 4096), (64, 64), (1, 10**9), (30, 40), (3, 10**6)):
        for norm in (
            0.0,
            1e-30,
            1e-9,
            *(math.sqrt(rows * cols) * (1 + k * 1e-16) for k in range(-5, 6)),
            1e99,
        ):
            rank = rank_for_residual(norm, rows, cols)
            assert 0 <= rank <= min(rows, cols)
            residual_norm(rank, rows, cols)


def test_inverse_clamps_outside_its_range() -> None:
    assert rank_for_residual(-1, 30, 40) == 30
    assert rank_for_residual(1e200, 30, 40) == pytest.approx(0, abs=1e-12)
    assert rank_for_residual(math.inf, 30, 40) == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("sigma", [1e-6, 0.003, 40.0])
def test_scales_with_sigma_as_a_measured_truncation_does(sigma: float) -> None:
    matrix = sigma * np.random.default_rng(1).standard_normal((320, 200))
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    for rank in (4, 50, 120):
        truncated = (left[:, :rank] * values[:rank]) @ right[:rank]
        assert sigma * residual_norm(rank, 320, 200) == pytest.approx(np.linalg.norm(matrix - truncated), rel=0.01)


def test_design_steepness_at_1024_by_4096() -> None:
    assert adjusted_rank(64, 1.0, 1.0 - 0.051, 1024, 4096) == pytest.approx(15.58, abs=0.01)
    assert adjusted_rank(64, 1.0, 1.0 - 0.067, 1024, 4096) > 0.5
    assert adjusted_rank(64, 1.0, 1.0 - 0.068, 1024, 4096) == pytest.approx(0, abs=1e-9)


def test_adjusted_rank_keeps_the_dropped_norm() -> None:
    before, after = -2.0, -2.02
    rank = adjusted_rank(100, before, after, 512, 768)
    dropped = [math.exp(entropy) * residual_norm(r, 512, 768) for entropy, r in ((before, 100), (after, rank))]
    assert rank < 100
    assert dropped[0] == pytest.approx(dropped[1], rel=1e-9)


def test_adjusted_rank_limits() -> None:
    assert adjusted_rank(64, 3.0, 3.0, 512, 256) == pytest.approx(64, abs=1e-9)
    assert adjusted_rank(64, 3.0, 3.01, 512, 256) > 64
    assert adjusted_rank(64, 0.0, -2000.0, 512, 256) == pytest.approx(0, abs=1e-9)
    assert adjusted_rank(64, 0.0, 2000.0, 512, 256) == pytest.approx(256, abs=1e-9)
    assert adjusted_rank(256, 0.0, -2000.0, 512, 256) == 256


SINGLE_INPUTS = [
    (lambda: residual_norm(-1, 4, 4), "rank = -1"),
    (lambda: residual_norm(math.nan, 4, 4), "rank = nan"),
    (lambda: residual_norm(math.inf, 4, 4), "rank = inf"),
    (lambda: residual_norm(1, 0, 4), "rows, cols = 0, 4"),
    (lambda: residual_norm(1, 4, -2), "rows, cols = 4, -2"),
    (lambda: rank_for_residual(math.nan, 4, 4), "norm = nan"),
    (lambda: rank_for_residual(1, 4, 0), "rows, cols = 4, 0"),
    (lambda: adjusted_rank(1, math.nan, 0, 4, 4), "entropy = nan"),
    (lambda: adjusted_rank(1, 0, -math.inf, 4, 4), "entropy = -inf"),
    (lambda: adjusted_rank(-2, 0, 0, 4, 4), "rank = -2"),
    (lambda: StageRankModel(((4, 4), (0, 4))), "rows, cols = 0, 4"),
    (lambda: StageRankModel(((4, 4),)).residual_norm(-1), "rank = -1"),
    (lambda: StageRankModel(((4, 4),)).rank_for_residual(math.nan), "norm = nan"),
    (lambda: StageRankModel(((4, 4),)).adjusted_rank(1, 0, math.nan), "entropy = nan"),
]


@pytest.mark.parametrize("call, message", SINGLE_INPUTS, ids=[message for _, message in SINGLE_INPUTS])
def test_bad_input_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


MIXED = ((48, 200), (200, 48), (100, 100), (16, 64), (48, 200))


@pytest.mark.parametrize("rank", [0, 3.5, 16, 30, 48, 70, 100, 400])
def test_stage_is_the_sum_over_its_matrices(rank: float) -> None:
    expected = math.sqrt(sum(residual_norm(rank, rows, cols) ** 2 for rows, cols in MIXED))
    assert StageRankModel(MIXED).residual_norm(rank) == pytest.approx(expected, rel=1e-12)


def test_stage_of_equal_matrices_is_one_matrix() -> None:
    stage = StageRankModel(((256, 1024),) * 300)
    assert stage.residual_norm(20) == pytest.approx(math.sqrt(300) * residual_norm(20, 256, 1024), rel=1e-12)
    assert stage.adjusted_rank(64, 1.0, 0.97) == pytest.approx(adjusted_rank(64, 1.0, 0.97, 256, 1024), rel=1e-9)


def test_stage_inverse_round_trips_and_clamps() -> None:
    stage = StageRankModel(MIXED)
    assert stage.limit == 100
    for rank in np.linspace(0, 99.9, 13):
        assert stage.rank_for_residual(stage.residual_norm(rank)) == pytest.approx(rank, abs=1e-8)
    assert stage.rank_for_residual(0) == stage.rank_for_residual(-1) == 100
    assert stage.rank_for_residual(1e9) == stage.rank_for_residual(math.inf) == 0


def test_stage_adjustment_keeps_the_dropped_norm() -> None:
    stage = StageRankModel(MIXED)
    rank = stage.adjusted_rank(20, 0.5, 0.4)
    assert 0 < rank < 20
    assert math.exp(0.4) * stage.residual_norm(rank) == pytest.approx(math.exp(0.5) * stage.residual_norm(20))
    assert stage.adjusted_rank(20, 0.5, 0.6) > 20
    assert stage.adjusted_rank(20, 0.5, -5.0) == 0


def test_stage_without_matrices_drops_nothing() -> None:
    stage = StageRankModel(())
    assert stage.limit == stage.residual_norm(8) == stage.adjusted_rank(8, 0.0, -1.0) == 0
