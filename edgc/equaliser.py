"""Row and column scales of past gradients, by which a gradient is divided before compression. No collectives.

Adam divides every entry by the root of its second moment, so an error that is small against the largest rows of a
matrix can be large where it matters: compression should lose alike of all entries in the units of the update. The
second moment of each entry is taken as the product of its row's and its column's (Adafactor, Shazeer and Stern 2018,
arXiv 1804.04235), estimated from the *sums* of past steps: all ranks know them, so no scale travels.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from edgc.wire import FP32, Packed

DECAY = 0.95  # of the moving averages, per step
SIDES = "rows", "columns"
FLOOR = 1e-3  # smallest row or column scale, relative to the root mean square over all: rows of unseen tokens are 0


class Equaliser:
    """Moving averages of the mean square of each row and column, by parameter name."""

    def __init__(self) -> None:
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}

    def scales(self, name: str, like: Tensor) -> tuple[Tensor, Tensor]:
        """(rows x 1) and (1 x cols), whose product has root mean square about 1; ones while nothing is known."""
        if name not in self._moments:
            return torch.ones_like(like[:, :1]), torch.ones_like(like[:1])
        rows, cols = (_relative(moment) for moment in self._moments[name])
        return rows.unsqueeze(1), cols.unsqueeze(0)

    def update(self, name: str, now: tuple[Tensor, Tensor]) -> None:
        """Take in the mean squares of a sum's rows (rows,) and columns (cols,); one not finite is left out."""
        finite = torch.isfinite(now[0].sum())
        before = self._moments.get(name)
        if before is None:  # only ratios matter, so the start at the first value needs no bias correction
            self._moments[name] = torch.where(finite, now[0], 0.0), torch.where(finite, now[1], 0.0)
        else:
            new = _average(before[0], now[0]), _average(before[1], now[1])
            self._moments[name] = torch.where(finite, new[0], before[0]), torch.where(finite, new[1], before[1])

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


def _average(before: Tensor, now: Tensor) -> Tensor:
    return torch.lerp(now, before, DECAY)


def _relative(moment: Tensor) -> Tensor:
    mean = moment.mean()
    return torch.where(mean > 0, (moment / mean).sqrt().clamp_min(FLOOR), 1.0)
