"""Row and column scales of past gradients, by which a gradient is divided before compression. No collectives.

Adam divides every entry by the root of its second moment, so an error that is small against the largest rows of a
matrix can be large where it matters: compression should lose alike of all entries in the units of the update. The
second moment of each entry is taken as the product of its row's and its column's (Adafactor, Shazeer and Stern 2018,
arXiv 1804.04235), estimated from the *sums* of past steps: all ranks know them, so no scale travels.
"""

from collections.abc import Iterable, Mapping
from functools import partial

import torch
from torch import Tensor

from edgc.comm.wire import FP32, Packed
from edgc.stacking import map_stacked

DECAY = 0.95  # of the moving averages, per step
LARGEST = 10.0  # times the average is the most that the mean square of one sum counts as: else a spike sets the scales
SIDES = "rows", "columns"
FLOOR = 1e-3  # smallest row or column scale, relative to the root mean square over all: rows of unseen tokens are 0


class Equaliser:
    """Moving averages of the mean square of each row and column, by parameter name."""

    def __init__(self) -> None:
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def scales(self, names: Iterable[str]) -> dict[str, tuple[Tensor, Tensor]]:
        """(rows x 1) and (1 x cols), whose product has root mean square about 1; of what nothing is known, none."""
        known = [name for name in names if name in self._moments]
        rows, cols = (map_stacked(_relative, [self._moments[name][side] for name in known]) for side in (0, 1))
        return {name: (r.unsqueeze(1), c.unsqueeze(0)) for name, r, c in zip(known, rows, cols, strict=True)}

    def update(self, squares: Mapping[str, tuple[Tensor, Tensor]], finite: Tensor) -> None:
        """Take in the mean squares of sums' rows (rows,) and columns (cols,), by name.

        Not if ``finite`` is false, a boolean on the device, and none that are not finite themselves.
        """
        known = [name for name in squares if name in self._moments]
        moved = map_stacked(
            partial(_average, finite),
            *([self._moments[name][side] for name in known] for side in (0, 1)),
            *([squares[name][side] for name in known] for side in (0, 1)),
        )
        for name, (rows, cols) in squares.items():
            if name in self._moments:
                continue
            # zeros stand for "nothing is known"
            self._moments[name] = _average(finite, torch.zeros_like(rows), torch.zeros_like(cols), rows, cols)
        self._moments.update(zip(known, moved, strict=True))

    def state_dict(self) -> dict[str, Packed]:
        """By parameter name and side; its tensors are replaced, never changed: no copies."""
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


def mean_squares(matrix: Tensor, part: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Of each row (rows,) and column (cols,), with zeros for what lies outside ``part`` of the flattened matrix."""
    rows, cols = matrix.shape
    start, stop = part or (0, rows * cols)
    first, last = start // cols, -(-stop // cols)
    squares = matrix[first:last].square()
    flat = squares.view(-1)
    flat[: start - first * cols] = 0
    flat[stop - first * cols :] = 0
    of_rows = squares.new_zeros(rows)
    of_rows[first:last] = squares.sum(dim=1)
    return of_rows / cols, squares.sum(dim=0) / rows


def _average(
    finite: Tensor, rows_before: Tensor, cols_before: Tensor, rows: Tensor, cols: Tensor
) -> tuple[Tensor, Tensor]:
    # Squares may overflow, in the sums of rows, of columns or of both.
    taken = (finite & torch.isfinite(rows.sum(dim=-1) + cols.sum(dim=-1))).unsqueeze(-1)
    # Only ratios matter: there is no bias of a start at the first value to correct.
    unknown = (rows_before.sum(dim=-1) == 0).unsqueeze(-1)
    most, mean = LARGEST * rows_before.mean(dim=-1, keepdim=True), rows.mean(dim=-1, keepdim=True)
    share = torch.where(mean > most, most / mean, 1.0)
    moved_rows = torch.where(unknown, rows, torch.lerp(rows * share, rows_before, DECAY))
    moved_cols = torch.where(unknown, cols, torch.lerp(cols * share, cols_before, DECAY))
    return torch.where(taken, moved_rows, rows_before), torch.where(taken, moved_cols, cols_before)


def _relative(moments: Tensor) -> Tensor:
    mean = moments.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, (moments / mean).sqrt().clamp_min(FLOOR), 1.0)
