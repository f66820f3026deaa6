"""What is compressed, what travels dense and why; and how a stage's rank is shared among its matrices."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from edgc.engines.base import MatrixSpec


@dataclass(frozen=True)
class Parameter:
    """A parameter as the allocation sees it. ``embedding``: a word or position embedding or the output layer."""

    name: str
    shape: tuple[int, ...]
    embedding: bool = False
    shared: bool = False

    @property
    def elements(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count


@dataclass(frozen=True)
class Allocation:
    """Which parameters of one reducer may be compressed, and why the others are not."""

    matrices: tuple[MatrixSpec, ...]
    dense: tuple[tuple[Parameter, str], ...]

    @property
    def dense_elements(self) -> int:
        """Elements that travel dense in every step, whatever the rank."""
        return sum(parameter.elements for parameter, _ in self.dense)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((matrix.rows, matrix.cols) for matrix in self.matrices)


def saving(rank: int, rows: int, cols: int) -> float:
    """Elements of a rows x cols matrix over those of its two factors."""
    return rows * cols / (rank * (rows + cols))


def pays(rank: int, rows: int, cols: int, min_saving: float) -> bool:
    """Whether a matrix is worth compressing at ``rank``: saves enough, and stays below half of full rank."""
    return rank <= min(rows, cols) / 2 and saving(rank, rows, cols) >= min_saving


def allocate(parameters: Iterable[Parameter], min_rank: int, min_saving: float) -> Allocation:
    """Sort parameters into matrices that may be compressed and others that always travel dense.

    A parameter of more than two dimensions counts as a matrix of its first dimension by all others. A matrix that
    does not pay at ``min_rank``, the smallest rank of the run, never will.
    """
    matrices: list[MatrixSpec] = []
    dense: list[tuple[Parameter, str]] = []
    for parameter in parameters:
        if len(parameter.shape) < 2:
            dense.append((parameter, "one-dimensional"))
        elif parameter.shared:
            dense.append((parameter, "tied embedding, reduced again across stages"))
        elif parameter.embedding:
            dense.append((parameter, "embedding or output layer"))
        else:
            rows, cols = parameter.shape[0], parameter.elements // parameter.shape[0]
            if pays(min_rank, rows, cols, min_saving):
                matrices.append(MatrixSpec(parameter.name, rows, cols))
            else:
                dense.append((parameter, f"saves less than {min_saving:g}x at rank {min_rank}"))
    return Allocation(tuple(matrices), tuple(dense))


def uniform_ranks(matrices: Sequence[MatrixSpec], rank: int, min_saving: float) -> dict[str, int]:
    """Every matrix at the stage's rank; matrices for which that rank does not pay are left out: they travel dense."""
    return {matrix.name: rank for matrix in matrices if pays(rank, matrix.rows, matrix.cols, min_saving)}
