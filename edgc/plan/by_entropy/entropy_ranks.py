"""The paper's algorithm: from windows of entropy to a rank for each pipeline stage. No tensors."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from edgc.config import EDGCConfig, RankPolicy
from edgc.plan.by_entropy.alignment import StageTimes
from edgc.plan.by_entropy.rank_model import StageRankModel
from edgc.plan.observation import StageObservation
from edgc.plan.rank_plan import NEVER_COMPRESSED, RankPlan
from edgc.plan.ranks import RANK_MULTIPLE, nearest_rank
from edgc.plan.selection import pays
from edgc.plan.spectrum import dropped, extended, rank_for_dropped
from edgc.specs import MatrixSpec

# Reasons of a stage that entropy has not yet let compress, and of one that it lets from now on
WARM_UP, STABLE = "warm-up", "entropy is stable"
# Settings whose values must be the same for a history to mean the same.
REFERENCES = "static_rank", "rank_model", "entropy_estimator"


class EntropyRanks:
    """Sets a rank per pipeline stage from its entropy history (docs/algorithm.md, 2 to 4).

    Stage 0 here is the paper's stage 1: it holds the embedding and finishes its backward pass last.

    Args:
        config: settings with ``rmin`` and ``rmax`` resolved (see ``resolve_ranks``), if decisions are wanted.
        iterations: length of the run.
        stages: the matrices of each stage that one process compresses; a stage that has none stays dense.
        times: of the stages, by which later ones are aligned to the first.
        replicas: how many processes sum the gradients of which entropy is measured.
    """

    def __init__(
        self,
        config: EDGCConfig,
        iterations: int,
        stages: Sequence[Sequence[MatrixSpec]],
        times: StageTimes,
        replicas: int = 1,
    ):
        self.config, self.iterations, self.matrices, self.times = config, iterations, stages, times
        self.replicas = replicas
        self.models = tuple(
            StageRankModel(tuple((m.rows, m.cols) for m in stage)) if stage else None for stage in stages
        )
        self.history: list[tuple[float, ...]] = []  # entropy per stage, one entry a window
        # of each stage, the entropy at which its compression began, with rank rmax; None: still in its warm-up; NaN:
        # the next one that is measured
        self.anchor: list[float | None] = [None] * len(stages)
        # what a rank leaves out at first, by measured spectra: an energy or a share; None until it is known
        self.tolerated: list[float | None] = [None] * len(stages)

    def observe(self, observations: Sequence[StageObservation]) -> None:
        """Take in a window."""
        self.history.append(tuple(observation.entropy for observation in observations))

    def first_reasons(self) -> tuple[str, ...]:
        """Why each stage is dense at first."""
        return tuple(NEVER_COMPRESSED if model is None else WARM_UP for model in self.models)

    def decide(
        self, iteration: int, plan: RankPlan, energies: Sequence[Mapping[str, Sequence[float]]]
    ) -> tuple[RankPlan, tuple[int | None, ...]]:
        """The plan until ``iteration``, with what has led to the ranks from then on, and these ranks.

        ``energies``: of the window, as in a ``StageObservation``.
        """
        entropy, before, indices = self.history[-1], plan.ranks, range(len(self.models))
        for index, anchor in enumerate(self.anchor):
            if anchor is not None and math.isnan(anchor) and math.isfinite(entropy[index]):
                self.anchor[index] = entropy[index]
        proposed = tuple(self._proposed(index, entropy[index], before[index], energies[index]) for index in indices)
        may_begin = iteration >= self.config.warmup(self.iterations)
        begins = [may_begin and self.anchor[index] is None and self._stable(index) for index in indices]
        for index in indices:
            if begins[index]:
                self.anchor[index] = entropy[index]
        own = [self._own_target(index, proposed[index], begins[index], before[index]) for index in indices]
        targets, reasons = [target for target, _ in own], [reason for _, reason in own]
        first = self._step(before[0], targets[0])
        if self.config.ranks.align and first is not None:
            for index in indices[1:]:
                if self.anchor[index] is not None and not begins[index] and self.times.can_align(index):
                    targets[index], reasons[index] = self.times.aligned(index, first, self._rmax), "alignment"
        ranks = tuple(self._step(*one) for one in zip(before, targets, strict=True))
        plan = replace(plan, entropy=entropy, proposed=proposed, targets=tuple(targets), reasons=tuple(reasons))
        return plan, ranks

    @property
    def _rmax(self) -> int:
        assert self.config.ranks.resolved_rmax is not None
        return self.config.ranks.resolved_rmax

    def _stable(self, stage: int) -> bool:
        """Whether a stage's entropy changed by less than the threshold, in nats, between the last two windows.

        A difference of entropies is the same in every unit of the gradient; a ratio is not.
        """
        if len(self.history) < 2 or self.models[stage] is None:
            return False
        before, now = (entropy[stage] for entropy in self.history[-2:])
        # false for a NaN, and for -inf, the entropy of gradients that are all zero
        return abs(now - before) < self.config.study.entropy_stability

    def _own_target(
        self, stage: int, proposed: float | None, begins: bool, before: int | None
    ) -> tuple[int | None, str]:
        """The rank to which a stage's own entropy leads, within the bounds, and the reason."""
        if self.models[stage] is None:
            return None, NEVER_COMPRESSED
        if self.anchor[stage] is None:
            return None, WARM_UP
        if begins:
            return self._rmax, STABLE
        if proposed is None:  # a resume without alignment leaves no stage dense
            return self._rmax if before is None else before, "nothing measured"
        return self._bounded(proposed), "entropy"

    def _proposed(
        self, stage: int, entropy: float, before: int | None, energies: Mapping[str, Sequence[float]]
    ) -> float | None:
        """CQM: the rank that drops the same norm as rmax did when compression began; None without an entropy."""
        anchor, model = self.anchor[stage], self.models[stage]
        if anchor is None or model is None:
            return None
        if self.config.ranks.rank_model != "gaussian":
            return self._proposed_by_spectrum(stage, before, energies)
        if not math.isfinite(entropy):
            return None
        return model.adjusted_rank(self._rmax, anchor, entropy)

    def _proposed_by_spectrum(
        self, stage: int, rank: int | None, energies: Mapping[str, Sequence[float]]
    ) -> float | None:
        """CQM with measured spectra in place of normal entries; the first that are measured, at ``rank``, set what is
        tolerated. They are of the matrices that are in low rank at every rank: others come and go with it.
        """
        always = [
            one for one in self.matrices[stage] if pays(self._rmax, one.rows, one.cols, self.config.study.min_saving)
        ]
        spectra = [
            extended(energies[matrix.name], min(matrix.rows, matrix.cols))
            for matrix in always
            if energies.get(matrix.name)
        ]
        whole = dropped(spectra, 0)
        if not rank or not 0 < whole < math.inf:
            return None
        unit = whole if self.config.ranks.rank_model == "residual" else 1.0
        tolerated = self.tolerated[stage]
        if tolerated is None:
            self.tolerated[stage] = dropped(spectra, rank) / unit
            return rank
        return rank_for_dropped(spectra, tolerated * unit)

    def _bounded(self, rank: float) -> int:
        assert self.config.ranks.rmin is not None
        return min(max(nearest_rank(rank), self.config.ranks.rmin), self._rmax)

    def _step(self, before: int | None, wanted: int | None) -> int | None:
        """Move from ``before`` towards ``wanted`` by at most the step limit. Dense lies one step beyond rmax."""
        rmax, limit = self._rmax, self.config.ranks.rank_step
        if limit >= RANK_MULTIPLE:
            limit = RANK_MULTIPLE * (limit // RANK_MULTIPLE)
        if wanted is None and before is None:
            return None
        if before is None:
            return rmax
        before = min(before, rmax)  # a resumed run may have a smaller one
        if wanted is None:
            return None if before == rmax else min(before + limit, rmax)
        return min(max(wanted, before - limit), before + limit, rmax)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        return {
            "settings": self.config.subset(REFERENCES),
            "replicas": self.replicas,
            "history": [list(entropy) for entropy in self.history],
            "anchor": list(self.anchor),
            "tolerated": list(self.tolerated),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> bool:
        """Go on where ``state_dict`` was taken, as far as it is in today's units. Whether entropy sets the ranks, and
        did so before.
        """
        then, now = state["settings"], self.config.subset(REFERENCES)
        by_entropy = then["static_rank"] is None and self.config.rank_policy is RankPolicy.ENTROPY
        same_estimator = then["entropy_estimator"] == now["entropy_estimator"]
        # entropy is that of one process's gradient, whose noise depends on its share of the batch
        comparable = same_estimator and state["replicas"] == self.replicas
        self.history = [tuple(entropy) for entropy in state["history"]] if comparable else []
        if by_entropy:  # where it is not comparable, the next window is the new reference of what has begun
            self.anchor = [one if comparable or one is None else math.nan for one in state["anchor"]]
        if then["rank_model"] == now["rank_model"]:
            self.tolerated = list(state["tolerated"])
        return by_entropy
