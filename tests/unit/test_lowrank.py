from typing import Any

import pytest
import torch

from edgc.compress import lowrank
from edgc.compress.engines.powersgd import PowerSGD
from edgc.config import EDGCConfig

CPU = torch.device("cpu")


def spans(basis: torch.Tensor, columns: torch.Tensor) -> bool:
    """Whether every column lies in the span of the orthonormal ``basis``."""
    return torch.allclose(basis @ (basis.T @ columns), columns, atol=1e-4 * float(columns.abs().max()))


DEFICIENT = [
    torch.randn(30, 8),
    torch.zeros(30, 8),
    torch.ones(30, 8),
    1e-20 * torch.randn(30, 8),
    1e30 * torch.randn(30, 8),
    torch.randn(30, 8) * 10.0 ** -torch.arange(0, 16, 2),
    torch.randn(30, 3) @ torch.randn(3, 8),
    torch.zeros(8, 8),
    torch.ones(128, 128),
    torch.randn(96, 1) @ torch.randn(1, 95),
    torch.randn(256, 2) @ torch.randn(2, 128),
]


@pytest.mark.parametrize("orthonormalise", [lowrank.orthonormalise, lowrank.cholesky_basis])
@pytest.mark.parametrize("p", DEFICIENT)
def test_orthonormalise_also_where_the_matrix_is_deficient(p: torch.Tensor, orthonormalise: Any) -> None:
    basis = orthonormalise(p)
    assert torch.allclose(basis.T @ basis, torch.eye(p.shape[1]), atol=1e-5)
    assert spans(basis, p)


def test_many_are_orthonormalised_as_each_is() -> None:
    p = torch.stack([each for each in DEFICIENT if each.shape == (30, 8)])
    for orthonormalise in (lowrank.orthonormalise, lowrank.cholesky_basis):
        assert torch.allclose(orthonormalise(p), torch.stack([orthonormalise(each) for each in p]), atol=1e-5)
    bases, strengths = lowrank.sorted_basis(p)
    for place, each in enumerate(p):
        basis, strength = lowrank.sorted_basis(each)
        assert torch.allclose(bases[place], basis, atol=1e-5) and torch.allclose(strengths[place], strength)


def test_factors_of_like_ranks_are_orthonormalised_as_each_is() -> None:
    """On a GPU they get columns of zeros, so that they are one operation."""
    torch.manual_seed(0)
    engine = PowerSGD([], EDGCConfig.of(static_rank=8, kernels="fused"), CPU)  # whose arithmetic is a GPU's
    factors = [torch.randn(40, rank) * 10.0 ** -torch.linspace(0, 3, rank) for rank in (16, 9, 12, 3)]
    factors += [torch.randn(30, 2) @ torch.randn(2, 8), torch.zeros(30, 5), torch.randn(30, 8)]
    finite = torch.tensor(True)
    bases = engine.orthonormal(factors, finite)
    sorted_bases, strengths = engine.principal(factors, finite)
    for factor, basis, vectors, norms in zip(factors, bases, sorted_bases, strengths, strict=True):
        torch.testing.assert_close(basis, lowrank.cholesky_basis(factor), rtol=0, atol=1e-6)
        alone, own = lowrank.sorted_basis(factor, lowrank.cholesky_basis)
        torch.testing.assert_close(vectors, alone, rtol=0, atol=1e-6)
        torch.testing.assert_close(norms, own)
        assert basis.shape == vectors.shape == factor.shape


def test_norms_of_products_of_like_ranks_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    sizes = {"a": (12, 30, 8), "b": (12, 30, 5), "c": (12, 30, 3), "d": (30, 12, 8), "e": (12, 30, 8)}
    products = {
        name: lowrank.Product(torch.randn(rows, rank), torch.randn(rank, cols))
        for name, (rows, cols, rank) in sizes.items()
    }
    expected = lowrank.squared_norms_of(products)
    monkeypatch.setattr(lowrank, "on_cpu", lambda tensor: False)
    for name, found in lowrank.squared_norms_of(products).items():
        for one, other in zip(found, expected[name], strict=True):
            torch.testing.assert_close(one, other)


def test_a_cholesky_basis_is_that_of_householder_up_to_signs() -> None:
    torch.manual_seed(0)
    p = torch.randn(300, 16) * 10.0 ** -torch.linspace(0, 3, 16)
    both = lowrank.orthonormalise(p).T @ lowrank.cholesky_basis(p)
    assert torch.allclose(both.abs(), torch.eye(16), atol=1e-4)


def test_random_factor_depends_on_the_name_alone() -> None:
    first = lowrank.random_factor(10, 4, CPU, 1, "layer.weight")
    assert torch.equal(first, lowrank.random_factor(10, 4, CPU, 1, "layer.weight"))
    assert not torch.equal(first, lowrank.random_factor(10, 4, CPU, 1, "other.weight"))


def test_growing_keeps_all_learned_columns() -> None:
    basis = lowrank.orthonormalise(torch.randn(40, 6))
    grown = lowrank.resize(basis, 40, 10, CPU, "seed")
    assert grown.shape == (40, 10)
    assert torch.allclose(grown.T @ grown, torch.eye(10), atol=1e-5)
    assert spans(grown, basis)
    assert torch.equal(grown, lowrank.resize(basis, 40, 10, CPU, "seed"))


def test_each_growth_adds_columns_of_its_own() -> None:
    """The same ones would lie in the span of what they were added to before."""
    added = [lowrank.resize(torch.eye(64)[:, :rank], 64, rank + 4, CPU, "seed")[:, rank:] for rank in (4, 8)]
    assert float((added[0].T @ added[1]).norm() / 4**0.5) < 0.6


def test_shrinking_keeps_the_first_columns() -> None:
    basis = lowrank.orthonormalise(torch.randn(40, 6))
    assert torch.equal(lowrank.resize(basis, 40, 3, CPU, "seed"), basis[:, :3])


def test_a_first_basis_is_random_by_seed() -> None:
    first = lowrank.resize(None, 40, 6, CPU, "seed", "a")
    assert torch.allclose(first.T @ first, torch.eye(6), atol=1e-5)
    assert torch.equal(first, lowrank.resize(None, 40, 6, CPU, "seed", "a"))
    assert not torch.equal(first, lowrank.resize(None, 40, 6, CPU, "seed", "b"))


def test_power_iteration_over_warm_started_factors_finds_the_best_subspace() -> None:
    """Re-sampling Q each step captures little, warm-started steps come close to the SVD."""
    torch.manual_seed(0)
    u, v = (lowrank.orthonormalise(torch.randn(256, 256)) for _ in range(2))
    matrix = u * (torch.arange(1, 257).float() ** -0.7) @ v.T
    q = lowrank.random_factor(256, 16, CPU, 1, "m")

    def captured() -> float:
        nonlocal q
        q = matrix.T @ lowrank.orthonormalise(matrix @ q)
        return float(q.norm() / matrix.norm()) ** 2

    first = captured()
    warm = [captured() for _ in range(8)][-1]
    best = float(torch.linalg.svdvals(matrix)[:16].square().sum() / matrix.square().sum())
    assert first < 0.93 * best
    assert warm > 0.99 * best


def test_a_sorted_basis_spans_the_factor_the_strongest_column_first() -> None:
    torch.manual_seed(0)
    sizes = torch.tensor([1.0, 5.0, 0.1, 3.0, 0.2, 4.0])
    factor = lowrank.orthonormalise(torch.randn(40, 6)) * sizes
    basis, strengths = lowrank.sorted_basis(factor)
    assert torch.allclose(strengths, torch.linalg.svdvals(factor), rtol=1e-4)  # where columns are orthogonal
    assert torch.allclose((basis.T @ factor).norm(dim=1), strengths, rtol=1e-4)
    skewed = factor @ torch.randn(6, 6)
    basis, strengths = lowrank.sorted_basis(skewed)
    assert torch.equal(strengths, skewed.norm(dim=0).sort(descending=True).values)
    assert torch.allclose(basis.T @ basis, torch.eye(6), atol=1e-5)
    assert torch.allclose(basis @ (basis.T @ skewed), skewed, atol=1e-5)
    zero_basis, zero = lowrank.sorted_basis(torch.zeros(40, 6))
    assert torch.allclose(zero_basis.T @ zero_basis, torch.eye(6), atol=1e-5) and not zero.any()


def test_a_rank_is_limited_by_the_matrix_and_must_be_at_least_1() -> None:
    assert lowrank.limited(100, 8, 6) == 6
    with pytest.raises(ValueError, match="rank 0"):
        lowrank.limited(0, 8, 6)


def test_a_product_gives_rows_and_squared_norms_of_its_matrix() -> None:
    torch.manual_seed(0)
    product = lowrank.Product(torch.randn(7, 3) * torch.rand(7, 1), torch.randn(3, 5) * torch.rand(1, 5))
    matrix = product.left @ product.right
    written = torch.zeros(5, 7)
    product.T.write(written, slice(1, 3))
    assert torch.allclose(written[1:3], matrix.T[1:3]) and not written[[0, 3, 4]].any()
    rows, cols = product.squared_norms()
    assert torch.allclose(rows, matrix.square().sum(dim=1), rtol=1e-4)
    assert torch.allclose(cols, matrix.square().sum(dim=0), rtol=1e-4)


def test_a_basis_that_grows_has_its_learned_columns_first() -> None:
    learned = lowrank.orthonormalise(torch.randn(32, 4))
    grown = lowrank.resize(learned, 32, 8, torch.device("cpu"), "seed")
    torch.testing.assert_close((grown[:, :4].T @ learned).abs(), torch.eye(4), atol=1e-5, rtol=0)
