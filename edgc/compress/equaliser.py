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
# The smallest row or column scale, relative to the root mean square over all. A row that has hardly any gradient for
# long, and then has one, outweighs the others until its scale has grown: docs/algorithm.md, 5. Not tuned.
SCALE_FLOOR = 1e-3
# Where rows have a gradient only when their tokens occur, the row of a rare token has a small scale until then: divided
# by it, the row would outweigh all others, and what compression leaves out of it would fall upon them. Trials with 0.3
# are in docs/frontier/trials.json.
SCALE_FLOOR_OF_SPARSE_ROWS = 0.3
# Vectors of several lengths are padded to the longest one, if that takes at most so many values, or at most this share
# of those of the gradients.
PADDED_VALUES, PADDED_SHARE = 2**20, 1 / 256

Scales = dict[str, tuple[Tensor, Tensor]]  # of the rows (rows x 1) and the columns (1 x cols) of matrices, by name


class Equaliser:
    """Moving averages of the squared norm of each row and column, by parameter name.

    ``sparse_rows``: names of parameters whose rows have a gradient in some steps alone.
    """

    def __init__(self, sparse_rows: Collection[str] = ()) -> None:
        self.sparse_rows = frozenset(sparse_rows)
        self._moments: dict[str, tuple[Tensor, Tensor]] = {}
        self._stacks: dict[tuple[str, ...], _Sides] = {}  # the same moments, of the last update

    def scales(self, names: Iterable[str]) -> Scales:
        """(rows x 1) and (1 x cols), whose product has root mean square about 1; of what nothing is known, none.

        Their last bits depend on the names, and on the order of these.
        """
        known = [name for name in names if name in self._moments]
        found: Scales = {}
        for group in _groups({name: _shape(self._moments[name]) for name in known}):
            floors = [SCALE_FLOOR_OF_SPARSE_ROWS if name in self.sparse_rows else SCALE_FLOOR for name in group]
            found.update(zip(group, self._stacked(group).relative(floors), strict=True))
        return {name: (found[name][0].unsqueeze(1), found[name][1].unsqueeze(0)) for name in known}

    def update(self, squares: Mapping[str, tuple[Tensor, Tensor]], finite: Tensor) -> None:
        """Take in the squared norms of sums' rows (rows,) and columns (cols,), by name, in the order of ``scales``.

        Not if ``finite`` is false, a boolean on the device, and none that are not finite themselves.
        """
        for name, pair in squares.items():  # zeros stand for "nothing is known"
            if name not in self._moments:
                self._moments[name] = torch.zeros_like(pair[0]), torch.zeros_like(pair[1])
        self._stacks = {
            group: self._moved(self._stacked(group), _Sides.of([squares[name] for name in group]), finite)
            for group in _groups({name: _shape(pair) for name, pair in squares.items()})
        }
        for group, moments in self._stacks.items():
            self._moments.update(zip(group, moments.parts(), strict=True))

    @staticmethod
    def _moved(old: "_Sides", new: "_Sides", finite: Tensor) -> "_Sides":
        """The moments after a step whose squared norms are ``new``."""
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
        return replace(new, values=torch.where(taken.unsqueeze(1), moved, old.values))

    def _stacked(self, group: tuple[str, ...]) -> "_Sides":
        """The moments of a group. They lie alike whether they are of the last update, of an older one or of a
        checkpoint, because the order of additions, and so the last bit of a mean, depends on that.
        """
        if group in self._stacks:
            return self._stacks[group]
        return _Sides.of([self._moments[name] for name in group])

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
        self._stacks = {}
        self._moments = {
            name: (state[f"{name}:{SIDES[0]}"].values(), state[f"{name}:{SIDES[1]}"].values()) for name in names
        }


def squared_norms(matrix: Tensor, part: tuple[int, int] | None = None) -> tuple[Tensor, Tensor]:
    """Squared norms of each row (rows,) and column (cols,), of what lies in ``part`` of the flattened matrix."""
    rows, cols = matrix.shape
    if part is None:
        squares = matrix.square()
        return squares.sum(dim=1), squares.sum(dim=0)
    start, stop = part
    first, last = start // cols, -(-stop // cols)
    squares = matrix[first:last].square()
    flat = squares.view(-1)
    flat[: start - first * cols] = 0
    flat[stop - first * cols :] = 0
    of_rows = squares.new_zeros(rows)
    of_rows[first:last] = squares.sum(dim=1)
    return of_rows, squares.sum(dim=0)


def _shape(pair: tuple[Tensor, Tensor]) -> tuple[int, int]:
    return len(pair[0]), len(pair[1])


def _groups(shapes: Mapping[str, tuple[int, int]]) -> list[tuple[str, ...]]:
    """Names of matrices whose vectors are handled at once: all, or those whose longest ones are about as long."""
    longest = {name: max(shape) for name, shape in shapes.items()}
    padded = 2 * len(longest) * max(longest.values(), default=0)
    gradients = sum(rows * cols for rows, cols in shapes.values())
    apart = padded > max(PADDED_VALUES, PADDED_SHARE * gradients)
    found: dict[int, list[str]] = {}
    for name, length in longest.items():
        found.setdefault(length.bit_length() if apart else 0, []).append(name)
    return [tuple(names) for names in found.values()]


@dataclass(frozen=True)
class _Sides:
    """Vectors of the rows and of the columns of matrices in one tensor: (2, matrices, the longest), ending in zeros.

    So a few operations are enough for all of them.
    """

    shapes: list[tuple[int, int]]  # of the matrices
    values: Tensor

    @classmethod
    def of(cls, pairs: Sequence[tuple[Tensor, Tensor]]) -> "_Sides":
        vectors = [pair[side] for side in (0, 1) for pair in pairs]
        values = vectors[0].new_zeros(len(vectors), max(map(len, vectors)))
        torch._foreach_copy_([row[: len(own)] for row, own in zip(values.unbind(), vectors, strict=True)], vectors)
        return cls([_shape(pair) for pair in pairs], values.view(2, len(pairs), -1))

    def parts(self) -> list[tuple[Tensor, Tensor]]:
        """The vectors."""
        return [
            (rows[:of_rows], cols[:of_cols])
            for rows, cols, (of_rows, of_cols) in zip(
                *(side.unbind() for side in self.values), self.shapes, strict=True
            )
        ]

    def relative(self, floors: Sequence[float]) -> list[tuple[Tensor, Tensor]]:
        """Scales of moments, not below a floor for each matrix; ones where nothing is known."""
        device = self.values.device
        means = self.values.sum(dim=-1, keepdim=True) / _lengths(tuple(self.shapes), device)
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
