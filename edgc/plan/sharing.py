"""How the ranks of stages are shared out among their matrices, from what a window has measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from edgc.config import EDGCConfig
from edgc.plan.allocation import fewest_bytes_ranks, water_filled_over_stages, water_filled_ranks
from edgc.plan.rank_plan import RankPlan
from edgc.specs import MatrixSpec


@dataclass(frozen=True)
class Sharing:
    """By ``--edgc-allocation``.

    ``matrices``: of each stage. ``energies``: of each stage, as in a ``StageObservation``. ``prices``: of the bytes of
    each stage, where one rank is shared out over all of them.
    """

    config: EDGCConfig
    matrices: Sequence[Sequence[MatrixSpec]]
    energies: Sequence[Mapping[str, Sequence[float]]]
    prices: Sequence[float]

    def adopted(self, iteration: int, plan: RankPlan, ranks: tuple[int | None, ...]) -> RankPlan:
        """The plan with these ranks from ``iteration`` on; it is a new one only if a rank changes."""
        if self.config.ranks.allocation == "waterfill" and self.config.ranks.fixed is not None:
            matrix_ranks = self._by_one_level(plan, ranks)
        else:
            matrix_ranks = tuple(self._within_stage(plan, place, rank) for place, rank in enumerate(ranks))
        if (ranks, matrix_ranks) == (plan.ranks, plan.matrix_ranks or (None,) * len(ranks)):
            return plan
        # a constant rank may begin later
        first = max(iteration, plan.first_iteration)
        return replace(plan, version=plan.version + 1, first_iteration=first, ranks=ranks, matrix_ranks=matrix_ranks)

    def _within_stage(self, plan: RankPlan, place: int, rank: int | None) -> Mapping[str, int] | None:
        if self.config.ranks.allocation == "uniform" or not rank:
            return None
        if not self.energies[place]:
            return _as_before(plan, place, rank)
        share = water_filled_ranks if self.config.ranks.allocation == "waterfill" else fewest_bytes_ranks
        return share(self.matrices[place], self.energies[place], rank, self.config.study.min_saving)

    def _by_one_level(self, plan: RankPlan, ranks: tuple[int | None, ...]) -> tuple[Mapping[str, int] | None, ...]:
        """One rank, shared out among the matrices of all stages by one water level."""
        places = [place for place, rank in enumerate(ranks) if rank]
        found = water_filled_over_stages(
            [self.matrices[place] for place in places],
            [self.energies[place] for place in places],
            max((ranks[place] or 0 for place in places), default=0),
            self.config.study.min_saving,
            [self.prices[place] for place in places],
        )
        if found is None:
            return tuple(_as_before(plan, place, rank) for place, rank in enumerate(ranks))
        shared = dict(zip(places, found, strict=True))
        return tuple(shared.get(place) for place in range(len(ranks)))


def _as_before(plan: RankPlan, place: int, rank: int | None) -> Mapping[str, int] | None:
    """Where nothing has been measured since."""
    return plan.matrix_ranks[place] if plan.ranks[place] == rank and plan.matrix_ranks else None
