"""What an engine takes, what it leaves and why; and how a stage's rank is shared among its matrices."""

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgc.config import EDGCConfig
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.spectrum import dropped, extended
from edgc.specs import MatrixSpec, Parameter


@dataclass(frozen=True)
class Allocation:
    """Which parameters of one reducer the engine takes, and why it leaves the others."""

    matrices: tuple[MatrixSpec, ...]
    others: tuple[tuple[Parameter, str], ...]

    @property
    def other_elements(self) -> int:
        """Elements that the engine leaves, whatever the rank."""
        return sum(parameter.elements for parameter, _ in self.others)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        return tuple((matrix.rows, matrix.cols) for matrix in self.matrices)


def saving(rank: int, rows: int, cols: int) -> float:
    """Elements of a rows x cols matrix over those of its two factors. Raises ValueError for a rank below 1."""
    if rank < 1:
        raise ValueError(f"rank {rank}: the rank of a matrix must be at least 1")
    return rows * cols / (rank * (rows + cols))


def pays(rank: int, rows: int, cols: int, min_saving: float) -> bool:
    """Whether a matrix is worth compressing at ``rank``: saves enough, and stays below half of full rank."""
    return rank <= min(rows, cols) / 2 and saving(rank, rows, cols) >= min_saving


def largest_rank(matrices: Iterable[MatrixSpec], min_saving: float) -> int:
    """The largest rank, in multiples of 4, at which at least one matrix pays; 0 if none does at 4."""

    def largest(rows: int, cols: int) -> int:
        ranks = range(RANK_MULTIPLE, min(rows, cols) + 1, RANK_MULTIPLE)
        # each rank below one that pays pays, too
        return RANK_MULTIPLE * bisect_left(ranks, True, key=lambda rank: not pays(rank, rows, cols, min_saving))

    return max((largest(*shape) for shape in {(matrix.rows, matrix.cols) for matrix in matrices}), default=0)


def allocate(parameters: Iterable[Parameter], config: EDGCConfig, min_rank: int) -> Allocation:
    """Sort parameters into those that the engine takes and the others.

    An engine without ranks takes everything, as it is. Low rank takes matrices; a parameter of more than two dimensions
    counts as a matrix (``Parameter.spec``). A matrix that does not pay at ``min_rank``, the smallest
    rank of the run, never will.
    """
    matrices: list[MatrixSpec] = []
    others: list[tuple[Parameter, str]] = []
    for parameter in parameters:
        spec = parameter.spec
        if not parameter.elements:
            others.append((parameter, "no elements"))
        elif not config.low_rank and config.engine != "dense":
            matrices.append(spec)
        elif spec.rows == 1:
            others.append((parameter, "one-dimensional"))
        elif parameter.embedding and not config.compress_embeddings and config.ranks.volume is None:
            others.append((parameter, "embedding or output layer"))
        elif pays(min_rank, spec.rows, spec.cols, config.study.min_saving):
            matrices.append(spec)
        else:
            others.append((parameter, f"saves less than {config.study.min_saving:g}x at rank {min_rank}"))
    return Allocation(tuple(matrices), tuple(others))


def width(matrices: Iterable[MatrixSpec]) -> int:
    """The smaller side that most entries' matrices have: the hidden size of a transformer; 0 of nothing."""
    entries: Counter[int] = Counter()
    for matrix in matrices:
        entries[min(matrix.rows, matrix.cols)] += matrix.rows * matrix.cols
    return max(entries, key=lambda side: (entries[side], side), default=0)


def uniform_ranks(matrices: Sequence[MatrixSpec], rank: int, min_saving: float) -> dict[str, int]:
    """Every matrix at the stage's rank; matrices for which that rank does not pay are left out."""
    return {matrix.name: rank for matrix in matrices if pays(rank, matrix.rows, matrix.cols, min_saving)}


def water_filled_ranks(
    matrices: Sequence[MatrixSpec],
    energies: Mapping[str, Sequence[float]],
    rank: int,
    min_saving: float,
    prices: Mapping[str, float] | None = None,
) -> dict[str, int]:
    """The values of one common rank, spent where they carry most energy: reverse water-filling over directions.

    ``energies`` holds the energy of each direction of each matrix's gradient, the largest first, as far as they are
    known; a power law continues them. A direction of a rows x cols matrix is worth its share of that matrix's energy,
    times the matrix's ``descent``, over the rows + cols values that it takes, times the matrix's price (default: 1).
    Steps of 4 ranks are taken in falling order of worth until the values of ``rank`` in every matrix are spent. Every
    matrix keeps half of ``rank``, rounded down to a multiple of 4: what is never sent is never measured. Source:
    rate-distortion theory (Cover and Thomas, section 10.3.3), with values in the place of bits.
    """
    uniform = uniform_ranks(matrices, rank, min_saving)
    planned = {matrix.name: matrix for matrix in matrices if matrix.name in uniform and energies.get(matrix.name)}
    costs = {name: (prices or {}).get(name, 1.0) * (matrix.rows + matrix.cols) for name, matrix in planned.items()}
    floor = min(rank, max(RANK_MULTIPLE, RANK_MULTIPLE * (rank // 2 // RANK_MULTIPLE)))
    ranks = uniform | dict.fromkeys(planned, floor)
    budget = (rank - floor) * sum(costs.values())
    steps = []
    for name, matrix in planned.items():
        spectrum = extended(energies[name], min(matrix.rows, matrix.cols))
        whole = sum(spectrum)
        top = floor
        while whole > 0 and pays(top + RANK_MULTIPLE, matrix.rows, matrix.cols, min_saving):
            share = sum(spectrum[top : top + RANK_MULTIPLE]) / whole
            steps.append((-descent(matrix, whole) * share / costs[name], name, top))
            top += RANK_MULTIPLE
    for _, name, top in sorted(steps):
        # A step that no longer fits ends a matrix's turn: a later one would leave a hole.
        if RANK_MULTIPLE * costs[name] <= budget and ranks[name] == top:
            ranks[name] += RANK_MULTIPLE
            budget -= RANK_MULTIPLE * costs[name]
    return ranks


def water_filled_over_stages(
    stages: Sequence[Sequence[MatrixSpec]],
    energies: Sequence[Mapping[str, Sequence[float]]],
    rank: int,
    min_saving: float,
    prices: Sequence[float],
) -> list[dict[str, int]] | None:
    """One common rank, shared out among the matrices of all stages by one water level (``water_filled_ranks``).

    ``prices``: of each stage's bytes. None if something that could have been measured was not.
    """
    # a stage of which no matrix pays is never measured
    measurable = [place for place, stage in enumerate(stages) if uniform_ranks(stage, rank, min_saving)]
    if not measurable or not all(energies[place] for place in measurable):
        return None
    # parameters of two stages may have the same name
    named = [
        (place, one, replace(one, name=f"{place} {one.name}")) for place, stage in enumerate(stages) for one in stage
    ]
    found = water_filled_ranks(
        [key for _, _, key in named],
        {key.name: energies[place].get(one.name, ()) for place, one, key in named},
        rank,
        min_saving,
        {key.name: prices[place] for place, _, key in named},
    )
    shared: list[dict[str, int]] = [{} for _ in stages]
    for place, one, key in named:
        if key.name in found:
            shared[place][one.name] = found[key.name]
    return shared


def descent(matrix: MatrixSpec, energy: float) -> float:
    """How much a step of Adam along this gradient lowers the loss, in a unit that all matrices share.

    Adam divides each entry by about its root mean square. The loss then falls by the sum of g^2 / rms(g), which is the
    number of entries times rms(g), a multiple of exp(entropy) in each family of distributions. ``energy``: the sum of
    squares.
    """
    return math.sqrt(matrix.rows * matrix.cols * energy)


ERROR_STEPS = 4096  # into which ``fewest_bytes_ranks`` divides the tolerated error


def fewest_bytes_ranks(
    matrices: Sequence[MatrixSpec], energies: Mapping[str, Sequence[float]], rank: int, min_saving: float
) -> dict[str, int]:
    """The fewest values that leave out no more energy, over all matrices, than one common rank does.

    ``energies`` as for ``water_filled_ranks``. Ranks are multiples of 4. Source: L-GreCo (Alimohammadi et al., MLSys
    2024): dynamic programming over layers and a tolerated error in small steps. An error is absolute, so a matrix with
    a large gradient gets much rank.
    """
    uniform = uniform_ranks(matrices, rank, min_saving)
    planned = [matrix for matrix in matrices if matrix.name in uniform and energies.get(matrix.name)]
    spectra = [extended(energies[matrix.name], min(matrix.rows, matrix.cols)) for matrix in planned]
    tolerated = dropped(spectra, rank)
    if tolerated <= 0:
        return uniform
    fewest = np.zeros(ERROR_STEPS + 1)  # values of the matrices so far, by the error that they may make
    chosen = []  # of each matrix, by that error: its choice
    choices: list[list[tuple[int, int]]] = []  # of each matrix: ranks, and the steps of error that they make
    for matrix, spectrum in zip(planned, spectra, strict=True):
        ranks = [r for r in range(RANK_MULTIPLE, len(spectrum), RANK_MULTIPLE) if pays(r, *_shape(matrix), min_saving)]
        steps = [round(ERROR_STEPS * sum(spectrum[r:]) / tolerated) for r in ranks]
        if not ranks:  # a small matrix, at a rank below the first one to try
            return uniform
        rows = np.full((len(ranks), ERROR_STEPS + 1), np.inf)
        for row, r, step in zip(rows, ranks, steps, strict=True):
            if step <= ERROR_STEPS:
                row[step:] = fewest[: ERROR_STEPS + 1 - step] + r * (matrix.rows + matrix.cols)
        chosen.append(rows.argmin(axis=0))
        fewest = rows.min(axis=0)
        choices.append(list(zip(ranks, steps, strict=True)))
    if not np.isfinite(fewest[-1]):  # rounding left no way
        return uniform
    found, left = {}, ERROR_STEPS
    for matrix, best, ways in zip(reversed(planned), reversed(chosen), reversed(choices), strict=True):
        found[matrix.name], step = ways[best[left]]
        left -= step
    return uniform | found


def _shape(matrix: MatrixSpec) -> tuple[int, int]:
    return matrix.rows, matrix.cols
