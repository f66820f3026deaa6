"""How the ranks of stages are shared out among their matrices, from what a window has measured."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.rank_plan import RankPlan
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.selection import pays
from edgc.plan.spectrum import dropped, extended
from edgc.specs import MatrixSpec

ERROR_STEPS = 4096  # into which ``fewest_bytes_ranks`` divides the tolerated error


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
    measurable = [index for index, stage in enumerate(stages) if uniform_ranks(stage, rank, min_saving)]
    if not measurable or not all(energies[index] for index in measurable):
        return None
    # parameters of two stages may have the same name
    named = [
        (index, one, replace(one, name=f"{index} {one.name}")) for index, stage in enumerate(stages) for one in stage
    ]
    found = water_filled_ranks(
        [key for _, _, key in named],
        {key.name: energies[index].get(one.name, ()) for index, one, key in named},
        rank,
        min_saving,
        {key.name: prices[index] for index, _, key in named},
    )
    shared: list[dict[str, int]] = [{} for _ in stages]
    for index, one, key in named:
        if key.name in found:
            shared[index][one.name] = found[key.name]
    return shared


def descent(matrix: MatrixSpec, energy: float) -> float:
    """How much a step of Adam along this gradient lowers the loss, in a unit that all matrices share.

    Adam divides each entry by about its root mean square. The loss then falls by the sum of g^2 / rms(g), which is the
    number of entries times rms(g), a multiple of exp(entropy) in each family of distributions. ``energy``: the sum of
    squares.
    """
    return math.sqrt(matrix.elements * energy)


def fewest_bytes_ranks(
    matrices: Sequence[MatrixSpec], energies: Mapping[str, Sequence[float]], rank: int, min_saving: float
) -> dict[str, int]:
    """The fewest values that leave out no more energy, over all matrices, than one common rank does, up to half a step
    of error for each matrix.

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
        every = range(RANK_MULTIPLE, len(spectrum), RANK_MULTIPLE)
        ranks = [r for r in every if pays(r, matrix.rows, matrix.cols, min_saving)]
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


# by ``--edgc-allocation``; ``uniform`` shares nothing out
ALLOCATORS = {"waterfill": water_filled_ranks, "lgreco": fewest_bytes_ranks}


@dataclass(frozen=True)
class RankAllocation:
    """Shares the ranks of stages out among their matrices by ``--edgc-allocation``.

    ``matrices``: of each stage. ``energies``: of each stage, as in a ``StageObservation``. ``prices``: of the bytes of
    each stage, where one rank is shared out over all of them.
    """

    config: EDGCConfig
    matrices: Sequence[Sequence[MatrixSpec]]
    energies: Sequence[Mapping[str, Sequence[float]]]
    prices: Sequence[float]

    @property
    def uniform(self) -> bool:
        """Whether every matrix has its stage's rank."""
        return self.config.ranks.allocation not in ALLOCATORS

    def with_ranks(self, iteration: int, plan: RankPlan, ranks: tuple[int | None, ...]) -> RankPlan:
        """The plan with these ranks from ``iteration`` on; it is a new one only if a rank changes."""
        if self.config.ranks.allocation == "waterfill" and self.config.rank_policy is RankPolicy.CONSTANT:
            matrix_ranks = self._by_one_level(plan, ranks)
        else:
            matrix_ranks = tuple(self._within_stage(plan, index, rank) for index, rank in enumerate(ranks))
        if (ranks, matrix_ranks) == (plan.ranks, plan.matrix_ranks or (None,) * len(ranks)):
            return plan
        # a constant rank may begin later
        first = max(iteration, plan.first_iteration)
        return replace(plan, version=plan.version + 1, first_iteration=first, ranks=ranks, matrix_ranks=matrix_ranks)

    def _within_stage(self, plan: RankPlan, index: int, rank: int | None) -> Mapping[str, int] | None:
        if self.uniform or not rank:
            return None
        if not self.energies[index]:
            return _as_before(plan, index, rank)
        share = ALLOCATORS[self.config.ranks.allocation]
        return share(self.matrices[index], self.energies[index], rank, self.config.study.min_saving)

    def _by_one_level(self, plan: RankPlan, ranks: tuple[int | None, ...]) -> tuple[Mapping[str, int] | None, ...]:
        """One rank, shared out among the matrices of all stages by one water level."""
        indices = [index for index, rank in enumerate(ranks) if rank]
        found = water_filled_over_stages(
            [self.matrices[index] for index in indices],
            [self.energies[index] for index in indices],
            max((ranks[index] or 0 for index in indices), default=0),
            self.config.study.min_saving,
            [self.prices[index] for index in indices],
        )
        if found is None:
            return tuple(_as_before(plan, index, rank) for index, rank in enumerate(ranks))
        shared = dict(zip(indices, found, strict=True))
        return tuple(shared.get(index) for index in range(len(ranks)))


def _as_before(plan: RankPlan, index: int, rank: int | None) -> Mapping[str, int] | None:
    """The ranks as they are, where nothing has been measured since."""
    return plan.matrix_ranks[index] if plan.ranks[index] == rank and plan.matrix_ranks else None
