import math

import pytest
import torch

from edgc.compress.equaliser import SCALE_FLOOR, SCALE_FLOOR_OF_SPARSE_ROWS, Equaliser, squared_norms


def scaled_noise(rows: torch.Tensor, cols: torch.Tensor, step: int) -> torch.Tensor:
    noise = torch.randn(len(rows), len(cols), generator=torch.Generator().manual_seed(step))
    return rows[:, None] * noise * cols


def scale(equaliser: Equaliser, like: torch.Tensor) -> torch.Tensor:
    rows, cols = equaliser.scales(["w"]).get("w", (torch.ones(like.shape[0], 1), torch.ones(1, like.shape[1])))
    return rows * cols


def update(equaliser: Equaliser, squares: tuple[torch.Tensor, torch.Tensor], finite: bool = True) -> None:
    equaliser.update({"w": squares}, torch.tensor(finite))


def test_dividing_by_the_scale_makes_rows_and_columns_alike() -> None:
    rows, cols = torch.logspace(-2, 2, 40), torch.logspace(-1, 1, 60)
    equaliser = Equaliser()
    for step in range(20):
        update(equaliser, squared_norms(scaled_noise(rows, cols, step)))
    fresh = scaled_noise(rows, cols, 99)
    equal = fresh / scale(equaliser, fresh)
    for dim in (0, 1):
        strengths = equal.square().mean(dim=dim).sqrt()
        assert strengths.max() / strengths.min() < 2.5
    assert fresh.square().mean(dim=1).sqrt().max() > 1e3 * fresh.square().mean(dim=1).sqrt().min()


def test_scales_are_ones_before_anything_is_known_and_after_zeros() -> None:
    equaliser, like = Equaliser(), torch.randn(3, 5)
    assert torch.equal(scale(equaliser, like), torch.ones(3, 5))
    update(equaliser, squared_norms(torch.zeros(3, 5)))
    assert torch.equal(scale(equaliser, like), torch.ones(3, 5))


def test_a_row_that_was_never_touched_has_a_small_scale_but_not_none() -> None:
    equaliser, total = Equaliser(), torch.ones(10, 6)
    total[4] = 0
    update(equaliser, squared_norms(total))
    found = scale(equaliser, total)
    assert torch.allclose(found[4], torch.full((6,), SCALE_FLOOR)) and (found[0] > 1).all()
    equaliser.sparse_rows = frozenset(["w"])
    assert torch.allclose(scale(equaliser, total)[4], torch.full((6,), SCALE_FLOOR_OF_SPARSE_ROWS))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_sum_that_is_not_finite_is_left_out(bad: float) -> None:
    equaliser, total = Equaliser(), torch.randn(4, 4)
    update(equaliser, squared_norms(total))
    before = scale(equaliser, total)
    broken = total.clone()
    broken[1, 1] = bad
    update(equaliser, squared_norms(broken))
    assert torch.equal(scale(equaliser, total), before)
    update(equaliser, squared_norms(10 * torch.randn(4, 4)), finite=False)
    assert torch.equal(scale(equaliser, total), before)


@pytest.mark.parametrize("shape", [(256, 1024), (64, 1024), (1024, 64)])
def test_squares_that_overflow_on_one_side_only_are_left_out(shape: tuple[int, int]) -> None:
    """Of a matrix with a norm of 3e20 the mean squares are finite for rows or for columns, and infinite for others."""
    equaliser, total = Equaliser(), torch.randn(shape)
    update(equaliser, squared_norms(total))
    before = scale(equaliser, total)
    squares = squared_norms(total)
    for overflowing in ((squares[0] * math.inf, squares[1]), (squares[0], squares[1] * math.inf)):
        update(equaliser, overflowing)
        assert torch.equal(scale(equaliser, total), before)


def test_zeros_and_failed_steps_leave_nothing_behind() -> None:
    """A state of zeros must act as none, bit for bit: later averages start at the first value."""
    fresh, failed, total = Equaliser(), Equaliser(), torch.randn(5, 7)
    update(failed, squared_norms(total * math.nan), finite=False)
    update(failed, squared_norms(torch.zeros(5, 7)))
    for factor in (1.0, 2.0):
        for equaliser in (fresh, failed):
            update(equaliser, squared_norms(total * factor))
        assert torch.equal(scale(fresh, total), scale(failed, total))
        for key, moment in fresh.state_dict().items():
            assert torch.equal(moment.message, failed.state_dict()[key].message)


def test_equal_matrices_are_averaged_as_each_is() -> None:
    together, matrices = Equaliser(), {name: torch.randn(5, 4) for name in "abc"} | {"d": torch.randn(4, 5)}
    alone = {name: Equaliser() for name in matrices}
    for step in range(3):
        squares = {name: squared_norms(matrix + step) for name, matrix in matrices.items()}
        together.update(squares, torch.tensor(True))
        for name, equaliser in alone.items():
            equaliser.update({name: squares[name]}, torch.tensor(True))
    for name, (rows, cols) in together.scales(matrices).items():
        own_rows, own_cols = alone[name].scales({name: matrices[name]})[name]
        assert torch.allclose(rows, own_rows) and torch.allclose(cols, own_cols)


def test_one_long_vector_is_no_length_for_all_others() -> None:
    """Else 256 small matrices beside an embedding would take nine times the memory of their gradients."""
    equaliser = Equaliser()
    shapes = {**{f"expert{index}": (64, 32) for index in range(256)}, "words": (20_000, 32)}
    squares = {name: (torch.rand(rows), torch.rand(cols)) for name, (rows, cols) in shapes.items()}
    equaliser.update(squares, torch.tensor(True))
    moments = [moment.values() for moment in equaliser.state_dict().values()]
    held = {moment.untyped_storage().data_ptr(): moment.untyped_storage().nbytes() for moment in moments}
    assert sum(held.values()) < 2.5 * sum(moment.nbytes for moment in moments)
    small = {name: pair for name, pair in squares.items() if name != "words"}
    alone = Equaliser()
    alone.update(small, torch.tensor(True))
    found = equaliser.scales(shapes)
    assert list(found) == list(shapes) and all(found[name][0].shape == (shapes[name][0], 1) for name in found)
    for name, (rows, cols) in alone.scales(small).items():
        assert torch.allclose(rows, found[name][0]) and torch.allclose(cols, found[name][1])


def test_averages_forget() -> None:
    equaliser = Equaliser()
    rows = torch.tensor([1.0, 10.0])
    update(equaliser, squared_norms(rows[:, None].expand(2, 3)))
    for _ in range(200):
        update(equaliser, squared_norms(rows.flip(0)[:, None].expand(2, 3)))
    found = scale(equaliser, torch.empty(2, 3))
    assert found[0, 0] / found[1, 0] == pytest.approx(10, rel=0.01)


def test_squared_norms_of_parts_add_up_to_those_of_the_whole() -> None:
    matrix = torch.randn(7, 5)
    parts = [squared_norms(matrix, part) for part in ((0, 0), (0, 13), (13, 14), (14, 35), (35, 35))]
    for side, whole in enumerate(squared_norms(matrix)):
        assert torch.allclose(sum(part[side] for part in parts), whole)
        assert torch.allclose(whole, matrix.square().sum(dim=1 - side))


def test_a_matrix_that_wakes_after_thousands_of_zeros_is_scaled_anew() -> None:
    equaliser, zeros = Equaliser(), (torch.zeros(64), torch.zeros(64))
    update(equaliser, (torch.full((64,), 1e4), torch.full((64,), 1e4)))
    for _ in range(2500):
        update(equaliser, zeros)
    rows = torch.cat([torch.full((32,), 1e4), torch.full((32,), 1e2)])
    for _ in range(2):
        update(equaliser, (rows, torch.full((64,), float(rows.mean()))))
    assert torch.allclose(equaliser.scales(["w"])["w"][0].view(-1), (rows / rows.mean()).sqrt())


def test_one_large_sum_does_not_set_the_scales() -> None:
    equaliser, usual, spike = Equaliser(), torch.ones(20, 30), torch.zeros(20, 30)
    spike[:2] = 1000
    for _ in range(20):
        update(equaliser, squared_norms(usual))
    before = scale(equaliser, usual)
    update(equaliser, squared_norms(spike))
    # the rows of the spike weigh 10 times the average at a weight of 0.05, and not a million times
    assert (scale(equaliser, usual) / before)[:2].max() < 2.5
    update(equaliser, squared_norms(2 * usual))  # a sum of twice the norm counts in full
    assert (scale(equaliser, usual) / before)[:2].max() < 2.5


@pytest.mark.parametrize("size", [7e16, 8e16, 1e17, 2e17, 1e18])
def test_first_sums_near_the_largest_squares_leave_finite_moments(size: float) -> None:
    equaliser = Equaliser()
    for factor in (size, 1.0, 1.0):
        update(equaliser, squared_norms(factor * torch.randn(64, 64)))
    assert all(bool(torch.isfinite(kept.values()).all()) for kept in equaliser.state_dict().values())
