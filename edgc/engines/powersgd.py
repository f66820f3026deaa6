"""Low rank with error feedback: PowerSGD (Vogels et al. 2019, arXiv 1905.13727)."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from edgc import lowrank
from edgc.collectives import Communicator, Work
from edgc.compressor import MatrixCompressor
from edgc.config import DTYPES, EDGCConfig
from edgc.engines.base import Engine, MatrixSpec


class PowerSGD(Engine):
    """Per matrix and step, over the ranks i of the data-parallel group, with Q from the step before:

    1. M_i = gradient_i + error_i          in the gradient's own memory
    2. P   = sum_i M_i Q                   first message (rows x rank)
    3. P   = orthonormal(P)
    4. Q_i = M_i^T P                       rounded to the wire's precision
    5. Q   = sum_i Q_i                     second message (cols x rank)
    6. error_i = M_i - P Q_i^T             while the message travels
    7. gradient = P Q^T
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device)
        self.wire_dtype = DTYPES[config.wire_dtype]
        self.compressors = {
            matrix.name: MatrixCompressor(
                matrix.name,
                matrix.rows,
                matrix.cols,
                seed=config.seed,
                error_dtype=DTYPES[config.error_dtype],
                device=device,
            )
            for matrix in matrices
        }
        self._sent: dict[str, Tensor] = {}

    def reduce(
        self, gradients: Mapping[str, Tensor], ranks: Mapping[str, int], communicator: Communicator
    ) -> Iterator[Work]:
        work = [(self.compressors[name], gradient) for name, gradient in gradients.items()]
        factors = []
        for compressor, matrix in work:
            compressor.add_error(matrix)
            factors.append(matrix @ compressor.factor(ranks[compressor.name]))
        yield communicator.all_reduce_packed(factors, self.wire_dtype)

        # Every rank holds the same sum, so every rank takes the same branch. A sum is finite only if all terms are.
        if not torch.stack([torch.isfinite(factor).all() for factor in factors]).all():
            for _, matrix in work:
                matrix.fill_(torch.nan)
            return

        bases = [lowrank.orthonormalise(factor) for factor in factors]
        sent = [(matrix.T @ basis).to(self.wire_dtype).float() for (_, matrix), basis in zip(work, bases, strict=True)]
        summed = [factor.clone() for factor in sent]
        message = communicator.all_reduce_packed(summed, self.wire_dtype)
        for (compressor, matrix), basis, q_local in zip(work, bases, sent, strict=True):
            compressor.store_error(matrix, basis, q_local)
            self._sent[compressor.name] = q_local
        yield message

        for (compressor, matrix), basis, q in zip(work, bases, summed, strict=True):
            torch.mm(basis, q.T, out=matrix)
            compressor.q = q

    def owing(self) -> tuple[str, ...]:
        return tuple(name for name, compressor in self.compressors.items() if compressor.error is not None)

    def flush(self, name: str, gradient: Tensor) -> None:
        self.compressors[name].flush_error(gradient)

    def residual_ratio(self) -> float:
        # P is orthonormal, so |M|^2 = |error|^2 + |Q_i|^2: no second pass over M is needed.
        dropped = sum(
            (
                compressor.error.float().square().sum()
                for compressor in self.compressors.values()
                if compressor.error is not None
            ),
            start=torch.zeros((), device=self.device),
        )
        sent = sum((q.square().sum() for q in self._sent.values()), start=torch.zeros((), device=self.device))
        total = dropped + sent
        return float(torch.sqrt(dropped / total)) if total > 0 else 0.0
