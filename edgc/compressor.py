"""State of one compressed matrix: its warm-started factor Q and its error feedback. No collectives."""

import torch
from torch import Tensor

from edgc import lowrank


class MatrixCompressor:
    """PowerSGD with error feedback for one gradient matrix of ``rows`` x ``cols``.

    ``q`` (cols x rank, fp32) is identical on every rank of the data-parallel group; ``error`` (rows x cols) is this
    rank's own, and None while it is zero. Both are keyed by the parameter's *name*, so that a rebuilt bucket or
    another process finds the same state.
    """

    def __init__(self, name: str, rows: int, cols: int, *, seed: int, error_dtype: torch.dtype, device: torch.device):
        self.name, self.rows, self.cols = name, rows, cols
        self.seed, self.error_dtype, self.device = seed, error_dtype, device
        self.q: Tensor | None = None
        self.error: Tensor | None = None

    @property
    def rank(self) -> int:
        """Columns of Q; 0 before the first ``factor``."""
        return 0 if self.q is None else self.q.shape[1]

    def factor(self, rank: int) -> Tensor:
        """Q at this rank, clamped to min(rows, cols). Where that is a change, learned columns and the error stay."""
        rank = min(rank, self.rows, self.cols)
        if rank < 1:
            raise ValueError(f"rank {rank} of {self.name}: a rank must be at least 1")
        if self.q is None:
            self.q = lowrank.random_factor(self.cols, rank, self.device, self.seed, self.name)
        elif rank != self.rank:
            self.q = lowrank.resize(self.q, rank, self.seed, self.name, self.rank, rank)
        return self.q

    def add_error(self, gradient: Tensor) -> None:
        """gradient += error, in place."""
        if self.error is not None:
            gradient.add_(self.error)

    def flush_error(self, gradient: Tensor) -> None:
        """Hand the whole error to a gradient that will travel exactly, and forget it."""
        self.add_error(gradient)
        self.error = None

    def store_error(self, matrix: Tensor, basis: Tensor, q_local: Tensor) -> None:
        """error = M - P Q_local^T: what this rank's own projection dropped.

        ``q_local`` is the factor as it travelled, so that rounding on the wire is fed back too. Taking the group's
        gradient here instead would make the error random-walk with this rank's own noise.
        """
        if self.error is None:
            self.error = torch.empty(self.rows, self.cols, dtype=self.error_dtype, device=self.device)
        if self.error_dtype == matrix.dtype:
            torch.addmm(matrix, basis, q_local.T, alpha=-1, out=self.error)
        else:
            self.error.copy_(torch.addmm(matrix, basis, q_local.T, alpha=-1))
