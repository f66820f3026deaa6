"""Row and column scales of past gradients, by which a gradient is divided before compression. No collectives.

Adam divides every entry by the root of its second moment, so an error that is small against the largest rows of a
matrix can be large where it matters: compression should lose alike of all entries in the units of the update. The
second moment of each entry is taken as the product of its row's and its column's (Adafactor, Shazeer and Stern 2018,
arXiv 1804.04235), estimated from the *sums* of past steps: all processes know them, so no scale travels.
"""

import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgc.comm.packed import Packed
from edgc.comm.wire import FP32

# Of the moving averages, per step: about the mean of the last 20 squares. Not tuned.
SCALE_DECAY = 0.95
# The squared norm of one sum counts as at most so many times its average: else a spike in a few rows would set the
# scales of the next hundred steps. Not tuned.
LARGEST_GROWTH = 10.0
SIDES = "rows", "columns"
# The smallest row or column scale, relative to the root mean square over all, keeps the division harmless where a row
# has hardly any gradient. Not tuned.
SCALE_FLOOR = 1e-3
# Where rows have a gradient only when their tokens occur, the row of a rare token has a small scale until then: divided
# by it, the row would outweigh all others, and what compression leaves out of it would fall upon them. Trials with 0.3
# are in docs/frontier/trials.json.
SCALE_FLOOR_OF_SPARSE_ROWS = 0.3


class Equaliser:
    """Moving averages of the squared norm of each row and column, by parameter name.

    ``sparse_rows``: names of parameters whose rows have a gradient in some steps alone.
    """

    def __init__(self, sparse_rows: Collection[str] = ()) -> None:
        self.sparse_rows = frozenset(sparse_rows)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._together: _Sides | None = None  # the last moments, all in one

    def scales(self, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """(rows x 1) and (1 x cols), whose product has root mean square about 1; of what nothing is known, none."""
        known = [name for name in names if name in self._moments]
        if not known:
            return {}
        moments = self._stacked(known)
        floors = [SCALE_FLOOR_OF_SPARSE_ROWS if name in self.sparse_rows else SCALE_FLOOR for name in moments.names]
        found = dict(zip(moments.names, moments.relative(floors), strict=True))
        return {name: (found[name][0].unsqueeze(1), found[name][1].unsqueeze(0)) for name in known}

    def update(self, squares: Mapping[str, tuple[Tensor, Tensor]], finite: Tensor) -> None:
        """Take in the squared norms of sums' rows (rows,) and columns (cols,), by name.

        Not if ``finite`` is false, a boolean on the device, and none that are not finite themselves.
        """
        if not squares:
            return
        names = list(squares)
        new = _Sides.of(names, list(squares.values()))
        for name, pair in squares.items():  # zeros stand for "nothing is known"
            if name not in self._moments:
                self._moments[name] = torch.zeros_like(pair[0]), torch.zeros_like(pair[1])
        old = self._stacked(names, alone=True)
        of_rows, of_cols = new.values.sum(dim=-1)
        before = old.values[0].sum(dim=-1)
        # Squares may overflow, in sums of rows, of columns or of both, and so may ``LARGEST_GROWTH`` times them below.
        taken = finite & (of_rows + of_cols < torch.finfo(torch.float32).max / LARGEST_GROWTH)
        # Only ratios matter: there is no bias of a start at the first value to correct.
        # After very many zeros moments are so small that no square would count beside them: they begin anew.
        known, most = before > torch.finfo(torch.float32).tiny, LARGEST_GROWTH * before
        fresh = torch.where(known, (1 - SCALE_DECAY) * most / torch.maximum(of_rows, most), 1.0)
        kept = known.float() * SCALE_DECAY
        moved = torch.addcmul(old.values * kept.unsqueeze(1), new.values, fresh.unsqueeze(1))
        self._together = replace(new, values=torch.where(taken.unsqueeze(1), moved, old.values))
        self._moments.update(zip(names, self._together.parts(), strict=True))

    def _stacked(self, names: Sequence[str], alone: bool = False) -> "_Sides":
        """The moments of these names, or those of the last update if these are among them (``alone``: are all)."""
        last = self._together
        if last is not None and (last.names == list(names) or (not alone and {*last.names}.issuperset(names))):
            return last
        return _Sides.of(names, [self._moments[name] for name in names])

    def state_dict(self) -> dict[str, Packed]:
        """The averages by parameter name and side. Tensors are replaced, never changed, so these are no copies."""
        return {
            f"{name}:{side}": Packed(moment, FP32)
            for name, pair in self._moments.items()
            for side, moment in zip(SIDES, pair, strict=True)
        }

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        """Go on where ``state_dict`` was taken."""
        names = dict.fromkeys(key.rpartition(":")[0] for key in state)
        self._together = None
        self._moments = {
            name: (state[f"{name}:{SIDES[0]}"].values(), state[f"{name}:{SIDES[1]}"].values()) for name in names
        }


def squared_norms(matrix: Tensor, part: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Squared norms of each row (rows,) and column (cols,), of what lies in ``part`` of the flattened matrix."""
    rows, cols = matrix.shape
    start, stop = part or (0, rows * cols)
    first, last = start // cols, -(-stop // cols)
    squares = matrix[first:last].square()
    flat = squares.view(-1)
    flat[: start - first * cols] = 0
    flat[stop - first * cols :] = 0
    of_rows = squares.new_zeros(rows)
    of_rows[first:last] = squares.sum(dim=1)
    return of_rows, squares.sum(dim=0)


@dataclass(frozen=True)
class _Sides:
    """Vectors of the rows and of the columns of matrices in one tensor: (2, matrices, the longest), ending in zeros.

    So a few operations are enough for all of them.
    """

    names: list[str]
    lengths: list[tuple[int, int]]  # of rows and columns, by matrix
    values: Tensor

    @classmethod
    def of(cls, names: Sequence[str], pairs: Sequence[tuple[Tensor, Tensor]]) -> "_Sides":
        vectors = [pair[side] for side in (0, 1) for pair in pairs]
        values = vectors[0].new_zeros(len(vectors), max(map(len, vectors)))
        torch._foreach_copy_([row[: len(own)] for row, own in zip(values.unbind(), vectors, strict=True)], vectors)
        return cls(list(names), [(len(rows), len(cols)) for rows, cols in pairs], values.view(2, len(pairs), -1))

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The vectors."""
        return [
            (rows[:of_rows], cols[:of_cols])
            for rows, cols, (of_rows, of_cols) in zip(
                *(side.unbind() for side in self.values), self.lengths, strict=True
            )
        ]

    def relative(self, floors: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        """Scales of moments, not below a floor for each matrix; ones where nothing is known."""
        device = self.values.device
        means = self.values.sum(dim=-1, keepdim=True) / _lengths(tuple(self.lengths), device)
        scales = (self.values / means).nan_to_num_(1.0).clamp_min_(_squares(tuple(floors), device)).sqrt_()
        return replace(self, values=scales).parts()


@functools.lru_cache(maxsize=256)  # of each unit and plan
def _lengths(lengths: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """(2, matrices, 1)"""
    return torch.tensor(lengths, dtype=torch.float32, device="cpu").T.unsqueeze(-1).to(device)


@functools.lru_cache(maxsize=256)
def _squares(floors: tuple[float, ...], device: torch.device) -> Tensor:
    """(matrices, 1)"""
    return torch.tensor(floors, dtype=torch.float32, device="cpu").square().unsqueeze(1).to(device)
