"""Row sparsity: the rows of a matrix that hold most energy travel, in few bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.wire import wire
from edgc.compress.engines.base import Sums, Thinning
from edgc.config import EDGCConfig
from edgc.plan.by_volume.choices import rows_that_travel
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite

ROW_FORMAT = "int4"
NORM_WIRE = wire("int8")  # of rows: they only choose


class Rows(Thinning):
    """Per matrix and step, over the processes i, with gradients and errors M_i (rows x columns):

    1. The norms of the rows of M_i are summed: a first message of a byte a row.
    2. The ``share`` of the rows with the largest sums, at least one, is the same on all processes.
    3. These rows are summed in 4 bits: the second message. All others stay in the errors.

    Of an embedding few rows have a gradient in a step, those of the tokens that occur. Choosing by rows needs 1/columns
    of the indices that single values need, and all processes send the same rows, so that the message does not grow with
    their number.
    """

    equalised = False  # scales of rows would hide which hold most

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device, share: str):
        super().__init__(matrices, config, device)
        self.share = float(share)
        self.wire = wire(ROW_FORMAT)

    @classmethod
    def message_bytes(cls, matrix: MatrixSpec) -> tuple[float, float]:
        """The bytes of a row, and those of the norms of all rows."""
        return matrix.cols * wire(ROW_FORMAT).bytes_per_value(), matrix.rows * NORM_WIRE.bytes_per_value()

    def sum(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[Sums]:
        parts = yield from self.sum_rows(tensors, communicator)

        def spread(values: Sequence[Tensor]) -> list[Tensor]:
            return [
                torch.zeros_like(matrix).index_copy_(0, rows, own)
                for matrix, rows, own in zip(tensors, parts.rows, values, strict=True)
            ]

        return Sums(spread(parts.sums), spread(parts.shares), parts.finite)

    def sum_rows(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange["ChosenRows"]:
        """``sum`` without the rows that do not travel."""
        norms, _ = yield from communicator.sum([torch.linalg.vector_norm(m, dim=1) for m in tensors], NORM_WIRE)
        finite = all_finite(norms)
        # stable: of rows with equal norms all processes have to take the same ones
        ordered = [norm.nan_to_num().sort(descending=True, stable=True).indices for norm in norms]
        chosen = [indices[: rows_that_travel(self.share, len(indices))].sort().values for indices in ordered]
        largest = [matrix[rows] for matrix, rows in zip(tensors, chosen, strict=True)]
        sums, shares = yield from communicator.sum(largest, self.wire)
        return ChosenRows(chosen, sums, shares, finite & all_finite(sums))


@dataclass(frozen=True)
class ChosenRows:
    """The (k,) indices of the rows of each matrix that travelled, and (k x cols) sums and shares, as in ``Sums``."""

    rows: Sequence[Tensor]
    sums: Sequence[Tensor]
    shares: Sequence[Tensor]
    finite: Tensor
