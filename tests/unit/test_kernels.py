"""The kernels in Triton's interpreter, on the CPU, whether or not there is a GPU."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from edgc.compress.lowrank import Product

pytest.importorskip("triton")  # torch for CPUs only comes without

from tests.interpreter import Accesses, interpreted_kernels  # noqa: E402

# With several blocks and shares of rows, and edges that fill no block; one with the largest rank but one.
SHAPES = [(130, 77, 5), (64, 300, 64), (50, 33, 1), (600, 40, 3), (90, 70, 255)]
YES, NO = torch.tensor(True), torch.tensor(False)
SCALE = torch.tensor(3.0)


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    return interpreted_kernels()


def drawn(rows: int, cols: int, seed: int, transposed: bool = False, dtype: torch.dtype = torch.float32) -> Tensor:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return values.T.contiguous().T if transposed else values


def assert_exact(found: Tensor, expected: Tensor) -> None:
    """But for rounding of fp32."""
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("error_type", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)
def test_project_is_the_product_with_what_it_leaves_in_the_matrix(
    kernels: ModuleType, rows: int, cols: int, rank: int, transposed: bool, scaled: bool, error_type: torch.dtype | None
) -> None:
    gain = 0.5 if transposed else 1.0
    matrix, factor = drawn(rows, cols, 0, transposed), drawn(rank, rows, 1, not transposed)
    error = None if error_type is None else drawn(rows, cols, 2, not transposed, error_type)
    expected = matrix / SCALE if scaled else matrix.clone()
    if error is not None:
        expected += gain * error
    product = kernels.project(matrix, factor, error, SCALE if scaled else None, gain)
    assert torch.equal(matrix, expected)
    assert product.shape == (rank, cols) and product.is_contiguous()
    assert_exact(product, factor.double() @ expected.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)
def test_write_back_leaves_the_average_and_what_was_not_sent(
    kernels: ModuleType, rows: int, cols: int, rank: int, transposed: bool, scaled: bool, dtype: torch.dtype
) -> None:
    waiting = 0.5 if transposed else 0.0
    original, matrix = drawn(rows, cols, 0), drawn(rows, cols, 0, transposed)
    share = Product(drawn(rows, rank, 1), drawn(rank, cols, 2, transposed))
    product = Product(drawn(rows, rank, 7, transposed), drawn(rank, cols, 3))
    older, error = drawn(rows, cols, 4, False, dtype), drawn(rows, cols, 5, not transposed, dtype)
    part = slice(7, rows - 9) if scaled else slice(None)  # the ends of it within blocks
    scale = SCALE if scaled else None
    kernels.write_back(matrix, share, product, YES, older, error, part, scale, seed=6, waiting=waiting)
    remainder = original.double() - share.left.double() @ share.right.double() + waiting * older.double()
    if dtype == torch.float32:
        assert_exact(error, remainder)
    else:  # a step is at most 2^-7 of a value
        torch.testing.assert_close(error.double(), remainder, rtol=2**-7, atol=1e-4)
    expected = original.double()
    expected[part] = (product.left.double() @ product.right.double())[part] * (3 if scaled else 1)
    assert_exact(matrix, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("transposed", [False, True])
def test_without_finite_values_the_older_error_stays_bit_for_bit(
    kernels: ModuleType, transposed: bool, dtype: torch.dtype
) -> None:
    rows, cols, rank = 130, 77, 5
    original, part = drawn(rows, cols, 0), slice(70, 129)
    left, right = drawn(rows, rank, 1), drawn(rank, cols, 2)
    factors = Product(left, right), Product(left, torch.full((rank, cols), float("nan")))
    older = drawn(rows, cols, 4, not transposed, dtype)
    kept = older.clone()
    for state, expected in ((older, kept), (None, torch.zeros_like(kept))):
        matrix, error = drawn(rows, cols, 0, transposed), drawn(rows, cols, 5, transposed, dtype)
        with Accesses(matrix=matrix, older=older) as accesses:
            kernels.write_back(matrix, *factors, NO, state, error, part)
        assert torch.equal(error, expected) and torch.equal(older, kept)
        assert matrix[part].isnan().all()
        assert torch.equal(matrix[:70], original[:70]) and torch.equal(matrix[129:], original[129:])
        assert not accesses.loads["matrix"].any()
        assert (accesses.loads["older"] == (1 if state is not None else 0)).all()


def rounded(kernels: ModuleType, matrix: Tensor, seed: int) -> Tensor:
    """What is left in bf16 of a matrix of which nothing was sent."""
    rows, cols = matrix.shape
    error = torch.empty_like(matrix, dtype=torch.bfloat16)
    nothing = Product(torch.zeros(rows, 1), torch.zeros(1, cols))
    kernels.write_back(matrix.clone(), nothing, nothing, YES, None, error, seed=seed)
    return error


@pytest.mark.parametrize("sign", [1, -1])
def test_rounding_to_bf16_is_one_of_the_two_neighbours_and_unbiased(kernels: ModuleType, sign: int) -> None:
    step = 2.0**-7
    matrix = torch.full((20, 30), sign * (1 + 0.3 * step))
    steps = torch.stack([(rounded(kernels, matrix, seed).double() * sign - 1) / step for seed in range(100)])
    assert steps.unique().tolist() == [0, 1]
    # within 5 standard deviations: of all, of each seed, and of each place
    for mean, draws in ((steps.mean(), steps.numel()), (steps.mean(dim=(1, 2)), 600), (steps.mean(dim=0), 100)):
        assert (mean - 0.3).abs().max() < 5 * (0.3 * 0.7 / draws) ** 0.5
    # neighbours do not round alike: of independent ones 0.58 agree
    for shifted in (steps.roll(1, 0), steps.roll(1, 1), steps.roll(1, 2)):
        assert (steps == shifted).double().mean() == pytest.approx(0.58, abs=0.02)


def test_rounding_depends_on_seed_and_place_only(kernels: ModuleType) -> None:
    matrix = drawn(70, 80, 0)
    first = rounded(kernels, matrix, 1)
    assert torch.equal(first, rounded(kernels, matrix, 1))
    assert torch.equal(first, rounded(kernels, drawn(70, 80, 0, True), 1))
    assert not torch.equal(first, rounded(kernels, matrix, 2))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # NumPy's, of the NaNs
def test_rounding_makes_no_numbers_of_what_is_none(kernels: ModuleType) -> None:
    nans = torch.tensor([2**31 - 1, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    others = torch.tensor([float("inf"), -float("inf"), 1.0])
    found = rounded(kernels, torch.cat([nans, others]).repeat(50, 1), 0).float()
    assert found[:, :3].isnan().all()
    assert torch.equal(found[:, 3:], others.expand(50, 3))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("rows", "cols", "rank"), SHAPES)
def test_each_kernel_goes_over_the_gradient_once(
    kernels: ModuleType, rows: int, cols: int, rank: int, transposed: bool
) -> None:
    matrix, factor = drawn(rows, cols, 0, transposed), drawn(rank, rows, 1)
    error, older = drawn(rows, cols, 2, not transposed), drawn(rows, cols, 3)
    tensors = {"matrix": matrix, "error": error, "older": older}

    with Accesses(**tensors) as accesses:
        kernels.project(matrix, factor)
    assert (accesses.loads["matrix"] == 1).all() and not accesses.stores["matrix"].any()

    with Accesses(**tensors) as accesses:
        kernels.project(matrix, factor, error, SCALE)
    assert all((counts == 1).all() for counts in (accesses.loads["matrix"], accesses.loads["error"]))
    assert (accesses.stores["matrix"] == 1).all() and not accesses.stores["error"].any()

    with Accesses(**tensors) as accesses:
        share, product = (Product(factor.T, drawn(rank, cols, seed)) for seed in (4, 5))
        kernels.write_back(matrix, share, product, YES, older, error)
    assert (accesses.loads["matrix"] == 1).all() and (accesses.stores["matrix"] == 1).all()
    assert (accesses.stores["error"] == 1).all() and not accesses.loads["error"].any()
    assert not accesses.loads["older"].any() and not accesses.stores["older"].any()


def test_what_is_done_twice_is_counted_twice(kernels: ModuleType) -> None:
    matrix, factor = drawn(40, 50, 0), drawn(2, 40, 1)
    with Accesses(matrix=matrix) as accesses:
        kernels.project(matrix, factor, divisor=SCALE)
        kernels.project(matrix, factor)
    assert (accesses.loads["matrix"] == 2).all() and (accesses.stores["matrix"] == 1).all()


def test_the_host_reads_no_tensor(kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*_: object) -> None:
        raise AssertionError("the host would wait for the device")

    for name in ("item", "tolist", "__bool__", "__float__", "__int__"):
        monkeypatch.setattr(Tensor, name, read)
    matrix, factor, error = drawn(40, 50, 0), drawn(2, 40, 1), drawn(40, 50, 2)
    product = Product(factor.T, kernels.project(matrix, factor, error, SCALE))
    kernels.write_back(matrix, product, product, NO, error, torch.empty_like(error), slice(3, 9), SCALE)


def test_what_does_not_fit_is_refused(kernels: ModuleType) -> None:
    matrix, factor, own = torch.zeros(20, 30), torch.zeros(2, 20), torch.zeros(2, 30)
    for args in (
        (matrix.double(), factor),
        (matrix, torch.zeros(2, 30)),
        (matrix, torch.zeros(257, 20)),
        (matrix, torch.zeros(0, 20)),
        (matrix, factor, matrix.half()),
        (matrix, factor, torch.zeros(30, 20)),
        (matrix, factor, matrix, torch.ones(1)),
    ):
        with pytest.raises(ValueError, match="must be"):
            kernels.project(*args)
    product = Product(factor.T, own)
    fitting: dict[str, Any] = {
        "matrix": matrix, "share": product, "product": product, "finite": YES, "older": None, "error": matrix + 1
    }  # fmt: skip
    kernels.write_back(**fitting)
    for wrong in (
        {"share": Product(factor, own)},
        {"product": Product(factor.T, own.T)},
        {"product": Product(torch.zeros(20, 3), torch.zeros(3, 30))},
        {"finite": torch.tensor(1.0)},
        {"older": matrix.bfloat16()},
        {"error": matrix[1:]},
        {"loss_scale": torch.tensor(1)},
        {"rows": slice(0, 9, 2)},
        {"seed": -1},
    ):
        with pytest.raises(ValueError, match="must (be|have)"):
            kernels.write_back(**{**fitting, **wrong})
