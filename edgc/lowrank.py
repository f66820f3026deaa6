"""Low-rank factorisation as pure functions of tensors (PowerSGD, arXiv 1905.13727, algorithm 1)."""

import torch
from torch import Tensor

from edgc.seeding import stable_seed


def limited(rank: int, rows: int, cols: int) -> int:
    """The rank clamped to min(rows, cols). Raises ValueError for a rank below 1."""
    if rank < 1:
        raise ValueError(f"rank {rank}: a rank must be at least 1")
    return min(rank, rows, cols)


def orthonormalise(p: Tensor) -> Tensor:
    """Orthonormal basis, in fp32, of the columns of ``p`` (rows x rank with rank <= rows).

    Householder QR: backward stable, and it completes the basis where ``p`` is rank-deficient or zero.
    """
    basis: Tensor = torch.linalg.qr(p.float(), mode="reduced").Q
    return basis


def sorted_basis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Orthonormal basis of the columns of ``factor`` (n x rank, rank <= n), strongest first, and their norms.

    (n x rank) and (rank,), fp32: QR of the columns sorted by norm. Those of warm-started factors are nearly orthogonal,
    so this comes close to singular vectors and values, and no kernel of it makes the host wait for the device.
    """
    strengths, order = torch.linalg.vector_norm(factor.float(), dim=0).sort(descending=True, stable=True)
    return orthonormalise(factor[:, order]), strengths


def random_factor(rows: int, rank: int, device: torch.device, *seed: object) -> Tensor:
    """Gaussian (rows x rank) factor in fp32, drawn on the CPU so that every device and rank gets the same."""
    generator = torch.Generator().manual_seed(stable_seed(*seed))
    return torch.randn(rows, rank, generator=generator).to(device)


def resize(basis: Tensor | None, rows: int, rank: int, device: torch.device, *seed: object) -> Tensor:
    """An orthonormal (rows x rank) basis that keeps what ``basis``, the strongest column first, has learned.

    Fewer columns: the strongest stay. More, or none to begin with: seeded random ones come behind the learned ones.
    """
    learned = 0 if basis is None else basis.shape[1]
    if basis is not None and rank <= learned:
        return basis[:, :rank]
    fresh = random_factor(rows, rank - learned, device, *seed, learned, rank)
    return orthonormalise(fresh if basis is None else torch.cat([basis, fresh], dim=1))
