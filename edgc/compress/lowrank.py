"""Low-rank factorisation as pure functions of tensors (PowerSGD, arXiv 1905.13727, algorithm 1)."""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu
from edgc.seeding import stable_seed
from edgc.stacking import map_padded, map_stacked

LARGEST_NORM = 1e36  # of a column that is orthonormalised; QR overflowed at 1.7e38, and not at 1e38


@dataclass(frozen=True)
class Product:
    """A matrix as the product of ``left`` (rows x rank) and ``right`` (rank x cols)."""

    left: Tensor
    right: Tensor

    @property
    def T(self) -> "Product":  # noqa: N802 - as of a tensor
        return Product(self.right.T, self.left.T)

    def residual_of(self, matrix: Tensor) -> Tensor:
        """What this product leaves of a matrix, as a new one."""
        return torch.addmm(matrix, self.left, self.right, alpha=-1)

    def write(self, matrix: Tensor, rows: slice) -> None:
        """Compute these rows of the matrix, into those of ``matrix``."""
        torch.mm(self.left[rows], self.right, out=matrix[rows])

    def squared_norms(self) -> tuple[Tensor, Tensor]:
        """Squared norms of each row (... x rows) and column (... x cols) of the matrix, without computing it.

        Rounding may leave a little below 0.
        """
        rows = (((self.right @ self.right.mT) @ self.left.mT) * self.left.mT).sum(dim=-2)  # as the left factor lies
        cols = ((self.left.mT @ self.left @ self.right) * self.right).sum(dim=-2)
        return rows, cols


def squared_norms_of(products: Mapping[str, Product]) -> dict[str, tuple[Tensor, Tensor]]:
    """``Product.squared_norms`` of each, by name: those of equal shapes at once, on a GPU also those of like ranks."""
    lefts, rights = ([getattr(product, side) for product in products.values()] for side in ("left", "right"))
    if all(on_cpu(left) for left in lefts):
        pairs = map_stacked(lambda left, right: Product(left, right).squared_norms(), lefts, rights)
    else:  # columns of zeros change no norm
        columns = [right.T for right in rights]
        pairs = map_padded(lambda left, right: Product(left, right.mT).squared_norms(), lefts, columns)
    return dict(zip(products, pairs, strict=True))


def limited(rank: int, rows: int, cols: int) -> int:
    """The rank clamped to min(rows, cols). Raises ValueError for a rank below 1."""
    if rank < 1:
        raise ValueError(f"rank {rank}: a rank must be at least 1")
    return min(rank, rows, cols)


def orthonormalise(p: Tensor) -> Tensor:
    """Orthonormal basis, in fp32, of the columns of ``p`` (... x rows x rank with rank <= rows).

    Householder QR: backward stable, and it completes the basis where ``p`` is rank-deficient or zero.
    """
    basis: Tensor = torch.linalg.qr(p.float(), mode="reduced").Q
    return basis


def cholesky_basis(p: Tensor) -> Tensor:
    """``orthonormalise`` by three Cholesky factorisations of Gram matrices, of which a GPU does many at once.

    Shifted CholeskyQR3 (Fukaya et al. 2020, SIAM J. Sci. Comput. 42) in float64 of columns scaled to norm 1. It needs
    independent columns, so each gets a millionth of a random one, which is what completes the basis where ``p`` is
    rank-deficient or zero. The first factorisation, of a Gram matrix with a small multiple of 1 added, cannot fail and
    leaves a condition number that the other two are good for.
    """
    columns = p.double()
    norms = torch.linalg.vector_norm(columns, dim=-2, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
    rows, rank = p.shape[-2:]
    completion = _completing_columns(rows, 1 << (rank - 1).bit_length(), p.device)[:, :rank]
    basis = torch.add(columns / norms, completion, alpha=1e-6)
    shift = 11 * rank * (rows + rank) * torch.finfo(torch.float64).eps * rank
    for added in (shift, 0.0, 0.0):
        gram = basis.mT @ basis
        if added:
            gram.diagonal(dim1=-2, dim2=-1).add_(added)
        factor, _ = torch.linalg.cholesky_ex(gram)  # does not make the CPU wait to see whether it failed
        basis = torch.linalg.solve_triangular(factor.mT, basis, upper=True, left=False)
    return basis.float()


@functools.cache  # ranks in powers of two: a model has few such shapes, whatever rank its matrices get
def _completing_columns(rows: int, rank: int, device: torch.device) -> Tensor:
    """Random columns of norm about 1 in fp32, the same on every process."""
    return (random_factor(rows, rank, torch.device("cpu"), "completion") / math.sqrt(rows)).to(device)


def forget_shapes() -> None:
    """Free the columns that are kept for shapes so far: a probe has had larger ranks than training will."""
    _completing_columns.cache_clear()


def sorted_basis(factor: Tensor, orthonormalise: Callable[[Tensor], Tensor] = orthonormalise) -> tuple[Tensor, Tensor]:
    """Orthonormal basis of the columns of ``factor`` (... x n x rank, rank <= n), strongest first, and their norms.

    (... x n x rank) and (... x rank), fp32: QR of the columns sorted by norm. Those of warm-started factors are nearly
    orthogonal, so this comes close to singular vectors and values, and no kernel of it makes the CPU wait.
    """
    strengths, order = torch.linalg.vector_norm(factor.float(), dim=-2).sort(descending=True, stable=True)
    return orthonormalise(factor.gather(-1, order.unsqueeze(-2).expand_as(factor))), strengths


def teaches(strengths: Tensor) -> Tensor:
    """Whether a factor whose columns have these norms, (... x rank), the strongest first, is good for a basis: (...).

    One of zeros, as of a step without gradient, would teach unit vectors. Near the largest number of fp32 Householder
    QR overflows, although the factor is finite.
    """
    strongest = strengths[..., 0]
    return (strongest > 0) & (strongest < LARGEST_NORM)


def random_factor(rows: int, rank: int, device: torch.device, *seed: object) -> Tensor:
    """Gaussian (rows x rank) factor in fp32, drawn on the CPU so that every device and process gets the same."""
    generator = torch.Generator().manual_seed(stable_seed(*seed))
    return torch.randn(rows, rank, generator=generator, dtype=torch.float32, device="cpu").to(device)


def resize(basis: Tensor | None, rows: int, rank: int, device: torch.device, *seed: object) -> Tensor:
    """An orthonormal (rows x rank) basis that keeps what ``basis``, the strongest column first, has learned.

    Fewer columns: the strongest stay. More, or none to begin with: seeded random ones come behind the learned ones.
    """
    learned = 0 if basis is None else basis.shape[1]
    if basis is not None and rank <= learned:
        return basis[:, :rank]
    fresh = random_factor(rows, rank - learned, device, *seed, learned, rank)
    return orthonormalise(fresh if basis is None else torch.cat([basis, fresh], dim=1))
