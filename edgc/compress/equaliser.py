"""Row and column scales of past gradients, by which a gradient is divided before compression. No collectives.

Adam divides every entry by the root of its second moment, so an error that is small against the largest rows of a
matrix can be large where it matters: compression should lose alike of all entries in the units of the update. The
second moment of each entry is taken as the product of its row's and its column's (Adafactor, Shazeer and Stern 2018,
arXiv 1804.04235), estimated from the *sums* of past steps: all processes know them, so no scale travels.
"""

from collections.abc import Collection, Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from edgc.comm.packed import Packed
from edgc.comm.wire import FP32
from edgc.stacking import by_shape, map_stacked, stacked

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

    def scales(self, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """(rows x 1) and (1 x cols), whose product has root mean square about 1; of what nothing is known, none."""
        known = [name for name in names if name in self._moments]
        found: dict[str, tuple[Tensor, Tensor]] = {}
        for floor, sparse in ((SCALE_FLOOR, False), (SCALE_FLOOR_OF_SPARSE_ROWS, True)):
            own = [name for name in known if (name in self.sparse_rows) == sparse]
            relative = partial(_relative, floor=floor)
            rows, cols = (map_stacked(relative, [self._moments[name][side] for name in own]) for side in (0, 1))
            found |= {name: (r.unsqueeze(1), c.unsqueeze(0)) for name, r, c in zip(own, rows, cols, strict=True)}
        return found

    def update(self, squares: Mapping[str, tuple[Tensor, Tensor]], finite: Tensor) -> None:
        """Take in the squared norms of sums' rows (rows,) and columns (cols,), by name.

        Not if ``finite`` is false, a boolean on the device, and none that are not finite themselves.
        """
        if not squares:
            return
        names = list(squares)
        sums = [[squares[name][side] for name in names] for side in (0, 1)]
        # zeros stand for "nothing is known"
        moments = [
            [
                self._moments[name][side] if name in self._moments else torch.zeros_like(one)
                for name, one in zip(names, own, strict=True)
            ]
            for side, own in enumerate(sums)
        ]
        groups = by_shape(*sums)
        of_rows, of_cols, before = (
            torch.cat([stacked([own[index] for index in indices]).sum(dim=-1) for indices in groups])
            for own in (*sums, moments[0])
        )
        # Squares may overflow, in sums of rows, of columns or of both, and so may ``LARGEST_GROWTH`` times them below.
        taken = finite & (of_rows + of_cols < torch.finfo(torch.float32).max / LARGEST_GROWTH)
        # Only ratios matter: there is no bias of a start at the first value to correct.
        # After very many zeros moments are so small that no square would count beside them: they begin anew.
        known, most = before > torch.finfo(torch.float32).tiny, LARGEST_GROWTH * before
        fresh = torch.where(known, (1 - SCALE_DECAY) * most / torch.maximum(of_rows, most), 1.0)
        weights = [taken, fresh, known.float() * SCALE_DECAY]
        per_group = zip(*(torch.split(one.unsqueeze(-1), [len(g) for g in groups]) for one in weights), strict=True)
        for indices, (own_taken, own_fresh, own_kept) in zip(groups, per_group, strict=True):
            rows, cols = (
                _moved(
                    own_taken, own_fresh, own_kept, *(stacked([one[p] for p in indices]) for one in (new, old))
                ).unbind()
                for new, old in zip(sums, moments, strict=True)
            )
            for index, of_row, of_col in zip(indices, rows, cols, strict=True):
                self._moments[names[index]] = (of_row, of_col)

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


def _moved(taken: Tensor, fresh: Tensor, kept: Tensor, squares: Tensor, moments: Tensor) -> Tensor:
    """(count, n) moments with (count, 1) weights of them and of these squares, where these are ``taken``."""
    return torch.where(taken, torch.addcmul(moments * kept, squares, fresh), moments)


def _relative(moments: Tensor, floor: float) -> Tensor:
    """Scales; ones where nothing is known."""
    return (moments / moments.mean(dim=-1, keepdim=True)).nan_to_num_(1.0).clamp_min_(floor**2).sqrt_()
