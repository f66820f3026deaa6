"""Names and shapes of parameters. No torch: what decides needs no tensors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

# Places in a flattened gradient, one more than there are processes: process i needs what lies between the i-th and the
# next.
ShardBounds = Sequence[int]


def shard_bounds(start: int, end: int, shard: int, processes: int) -> ShardBounds:
    """Where each process's shard of one gradient begins and ends: ``processes + 1`` places in the flattened gradient.

    The gradient fills ``start:end`` of a buffer that is cut into ``processes`` shards of ``shard`` values.
    """
    return [min(max(process * shard, start), end) - start for process in range(processes + 1)]


@dataclass(frozen=True)
class MatrixSpec:
    """A gradient seen as a matrix: the parameter's name and rows x cols (1 x elements for a vector).

    ``embedding`` and ``sparse_rows``: as of ``Parameter``.
    """

    name: str
    rows: int
    cols: int
    embedding: bool = False
    sparse_rows: bool = False

    @property
    def elements(self) -> int:
        return self.rows * self.cols


@dataclass(frozen=True)
class Parameter:
    """A parameter as ``edgc.plan.selection`` sees it.

    ``embedding``: a word or position embedding or the output layer. ``sparse_rows``: a word embedding that is not an
    output layer as well, so that a row has a gradient only in steps in which its token occurs.
    """

    name: str
    shape: tuple[int, ...]
    embedding: bool = False
    sparse_rows: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def spec(self) -> MatrixSpec:
        """The parameter as a matrix: the first dimension by all others; a vector is one row."""
        rows = self.shape[0] if len(self.shape) > 1 else 1
        return MatrixSpec(self.name, rows, self.elements // rows if rows else 0, self.embedding, self.sparse_rows)
