"""How to send each parameter so that, under one budget of bytes, the optimizer gets the least noise."""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from edgc.byte_counts import ByteCount
from edgc.config import EDGCConfig
from edgc.plan.by_volume.choices import Choice, SendLowRank, SendRounded, from_list, to_list
from edgc.plan.by_volume.guard import Guard
from edgc.plan.by_volume.hull import options, spend
from edgc.plan.by_volume.ledger import LEAST_RATE, Ledger, byte_weights
from edgc.plan.by_volume.parameters import PlannedParameter
from edgc.plan.observation import WindowObservation

# A plan stays while it is within the budget, uses this share of it, and a new one would not have this much less noise:
# measurements vary from window to window, and a change may cost a little (docs/bench/replan.md). Not tuned.
LEAST_BUDGET_USED, LEAST_GAIN_OF_PLAN = 0.97, 0.05
# Less noise, of the whole plan, than the best one in which every parameter keeps its method. Not tuned.
LEAST_GAIN_OF_METHODS = 0.1
# Mean noise that is little enough at the first step of a run with a volume of 24. What such a step does not need is
# kept for later ones: the noise of the same bytes grows during a run. Of 0, 0.03 and 0.1 experiments chose 0.03
# (docs/frontier, "Bytes kept for later"). The bound of other volumes goes with this power of theirs, because fewer
# bytes leave more noise. No experiment with the power is recorded.
LITTLE_NOISE, LITTLE_NOISE_POWER = 0.03, 1.7

Choices = list[Choice]  # of all parameters, in the order of ``BudgetPlanner.parameters``


class PlannedChoices(NamedTuple):
    """Choices that spend the budget of a step as well as they can, and what limits its bytes."""

    choices: Choices
    limit: str


class BudgetPlanner:
    """Gives every parameter of all stages its choice, so that the whole run sends its budget.

    Args:
        config: settings with a ``volume``.
        iterations: of the run.
        stages: the parameters of each stage.
        excluded: indices of stages that are never compressed.
        bytes_per_value: of the formats to choose from; ``uncompressed``: of what is not compressed.
        learning_rate: by iteration, in any unit; None: always the same.
        rounds: every parameter is rounded, whatever the budget, because that takes less time.
    """

    def __init__(
        self,
        config: EDGCConfig,
        iterations: int,
        stages: Sequence[Sequence[PlannedParameter]],
        excluded: Collection[int],
        bytes_per_value: Mapping[str, float],
        uncompressed: float,
        learning_rate: Callable[[int], float] | None = None,
        rounds: bool = False,
    ):
        ranks, study, power = config.ranks, config.study, config.study.learning_rate_power
        assert ranks.volume is not None
        self.volume, self.iterations, self.rounds = ranks.volume, iterations, rounds
        self.first = config.warmup(iterations)  # the iteration at which compression begins
        # the parameters of all stages, one stage after another, and the stage of each
        planned = [(index, one) for index, stage in enumerate(stages) if index not in excluded for one in stage]
        self.stage_of = [index for index, _ in planned]
        self.parameters = [one for _, one in planned]
        self.planned_stages = [index for index in range(len(stages)) if index not in excluded]
        self.bytes_per_value = bytes_per_value
        self.bound(ranks.resolved_rmax)
        elements = [sum(one.price * one.elements for one in stage) for stage in stages]
        self.excluded_bytes = uncompressed * sum(elements[index] for index in excluded)
        least = sum(options(one, bytes_per_value)[0].size for one in self.parameters) + self.excluded_bytes
        weights = byte_weights(learning_rate, iterations, power) if learning_rate and power else None
        self.ledger = Ledger(
            self.volume, iterations, 4.0 * sum(elements), uncompressed * sum(elements), least, weights, ranks.window
        )
        self.fidelity = math.nan  # in the last window
        # steps of a learning rate so small that noise does no harm need no more bytes than their budget
        watched = [True] * iterations if weights is None else [one > LEAST_RATE**power for one in weights]
        self.guard = Guard(study.least_fidelity, watched)
        # of each parameter, whether it travels in another encoding since the last decision: what the one before had
        # left is sent in the first window, so that window says little about the new one
        self.changed = [False] * len(self.parameters)
        self.limit = "budget"
        self.choices, self.limit = self._best(self.first)

    def begin(self, iteration: int, sent: ByteCount) -> None:
        """The volume is that of the steps from ``iteration`` on. A warm-up of the usual length comes
        first, or of a window if that is less. ``sent``: bytes of the run before.
        """
        self.ledger.begin(iteration, sent)
        self.first = max(self.first, iteration + min(self.first, self.ledger.window))
        self.choices, self.limit = self._best(self.first)

    def bound(self, most: int | None) -> None:
        """Limit the bytes of each stage's step to those of rank ``most`` in every parameter that can have a rank. None
        removes the limit.
        """
        self.most_of_stages = {} if most is None else self._at_rank(most)
        self.most = math.inf if most is None else sum(self.most_of_stages.values())

    @property
    def reachable(self) -> float:
        """The volume of a run in which every parameter always has its smallest choice after the warm-up."""
        warmup, ledger = min(self.first, self.iterations), self.ledger
        least = warmup * ledger.uncompressed + (self.iterations - warmup) * ledger.least
        return self.iterations * ledger.fp32_bytes / least if least else math.inf

    @property
    def relief(self) -> float:
        """How many times the bytes of its budget a step gets."""
        return self.guard.relief

    def budget(self, iteration: int) -> float:
        """Bytes of the messages of each step from ``iteration`` on."""
        counted = self.ledger.step(iteration, self.relief).total
        return min(counted / (self.ledger.overhead or 1.0) - self.excluded_bytes, self.most)

    def observe(self, window: WindowObservation, outside_budget: bool = False) -> None:
        """Take in a window. ``outside_budget``: the host has summed because nothing was to be compressed."""
        self.ledger.window_outside_budget |= self.rounds
        self.ledger.observe(window, outside_budget)
        nothing = (math.nan, math.nan)
        stages = [window.stages[index] for index in self.stage_of]
        self.parameters = [
            one.with_rows(stage.row_shares.get(one.matrix.name, ()))
            for one, stage in zip(self.parameters, stages, strict=True)
        ]
        seen = [stage.noise.get(one.matrix.name, nothing) for one, stage in zip(self.parameters, stages, strict=True)]
        measured = [
            (one.elements, noise, energy)
            for one, (noise, energy) in zip(self.parameters, seen, strict=True)
            if 0 < energy < math.inf
        ]
        self.fidelity = fidelity(measured)
        mean = mean_energy(measured)
        self.parameters = [
            one.fitted(choice, math.nan if changed else noise).with_energy(energy / mean)
            for one, choice, changed, (noise, energy) in zip(
                self.parameters, self.choices, self.changed, seen, strict=True
            )
        ]

    def decide(self, iteration: int, loss_rises: bool = False) -> None:
        """The choices from ``iteration`` on. They stay as they are unless others pay for the change."""
        self.ledger.counted_to = iteration
        if iteration >= self.iterations:
            return
        if iteration <= self.first:  # nothing has been compressed yet, so nothing changes
            self.choices, self.limit = self._best(iteration)
            return
        self.ledger.learn(self._size(self.choices) + self.excluded_bytes)
        before = self.choices
        if self.rounds:
            self.guard.relief = 1.0
            self.choices, self.limit = self._best(iteration)
        else:
            most = (loss_rises or self.fidelity < self.guard.least) and self._has_most(iteration)
            self.guard.update(self.fidelity, iteration, most, self.ledger.exhausted(), loss_rises)
            self.choices, self.limit = self._kept_or_best(iteration)
        self.changed = [old.encoding != new.encoding for old, new in zip(before, self.choices, strict=True)]
        self.ledger.grant(iteration, self.relief)

    def _kept_or_best(self, iteration: int) -> PlannedChoices:
        """The choices as they are, or the best ones from ``iteration`` on, if these pay for the change."""
        budget = self.budget(iteration)
        best, limit = self._best(iteration, self.choices)
        usual, _ = self._best(iteration, self.choices, same_methods=True)
        if self._size(usual) <= budget and self._noise(best) > (1 - LEAST_GAIN_OF_METHODS) * self._noise(usual):
            best = usual
        size, noise = self._size(self.choices), self._noise(self.choices)
        most = min(budget, self._size(best) / LEAST_BUDGET_USED)  # the best plan may need less than the budget
        fits = LEAST_BUDGET_USED * min(budget, self._size(best)) <= size <= most
        pays = self._noise(best) < (1 - LEAST_GAIN_OF_PLAN) * noise
        return PlannedChoices(self.choices if fits and not pays else best, limit)

    def enough_noise(self, iteration: int) -> float:
        """The mean noise below which a step from ``iteration`` on needs no more bytes: none at the end of the run."""
        if self.relief > 1:
            return 0.0
        return float(LITTLE_NOISE * (self.volume / 24) ** LITTLE_NOISE_POWER * (1 - iteration / self.iterations))

    def _best(self, iteration: int, current: Choices | None = None, same_methods: bool = False) -> PlannedChoices:
        """The choices with the least noise from ``iteration`` on. ``current``: those of now; None before the first."""
        if self.rounds:
            return PlannedChoices([one.rounded for one in self.parameters], self.limit)
        budget, parameters = self.budget(iteration), self.parameters
        if current is not None:
            parameters = [replace(one, current=choice) for one, choice in zip(parameters, current, strict=True)]
        enough = self.enough_noise(iteration)
        best = spend(parameters, self.bytes_per_value, budget, same_methods, enough)
        capped = budget == self.most
        for stage, most in self.most_of_stages.items():  # the link bounds each stage, not only their sum
            own = [index for index, one in enumerate(self.stage_of) if one == stage]
            if sum(parameters[index].size(best[index], self.bytes_per_value) for index in own) > most:
                choices = spend([parameters[index] for index in own], self.bytes_per_value, most, same_methods, enough)
                for index, choice in zip(own, choices, strict=True):
                    best[index] = choice
                capped = True
        if self._size(best) > budget:  # not even the smallest options fit
            return PlannedChoices(best, "the budget is too small")
        return PlannedChoices(best, "link" if capped else "budget")

    def _has_most(self, iteration: int) -> bool:
        """Whether more relief would add no byte to steps from ``iteration`` on."""
        largest = sum(options(one, self.bytes_per_value)[-1].size for one in self.parameters)
        return self.budget(iteration) >= min(self.most, largest)

    def _at_rank(self, rank: int) -> dict[int, float]:
        """Bytes of a step by stage, with this rank in every parameter that can have one, and the finest format in the
        others.
        """
        finest = SendRounded(max(self.bytes_per_value, key=self.bytes_per_value.__getitem__))
        sizes = dict.fromkeys(self.planned_stages, 0.0)
        for stage, one in zip(self.stage_of, self.parameters, strict=True):
            sizes[stage] += one.size(finest if one.directions is None else SendLowRank(rank), self.bytes_per_value)
        return sizes

    def _size(self, choices: Sequence[Choice]) -> float:
        return sum(one.size(choice, self.bytes_per_value) for one, choice in zip(self.parameters, choices, strict=True))

    def _noise(self, choices: Sequence[Choice]) -> float:
        return sum(one.weight * one.noise(choice) for one, choice in zip(self.parameters, choices, strict=True))

    def ranks(self, stage: int) -> dict[str, int]:
        """Ranks by name, of a stage's parameters that travel in low rank, also beside rows."""
        return {one.matrix.name: choice.rank for one, choice in self._chosen(stage) if choice.rank is not None}

    def formats(self, stage: int) -> dict[str, str]:
        """Formats by name, of a stage's parameters that are rounded, or of which rows travel."""
        return {one.matrix.name: choice.format for one, choice in self._chosen(stage) if choice.format is not None}

    def _chosen(self, stage: int) -> Iterator[tuple[PlannedParameter, Choice]]:
        for index, one, choice in zip(self.stage_of, self.parameters, self.choices, strict=True):
            if index == stage:
                yield one, choice

    @property
    def reason(self) -> str:
        """Why the choices are as they are."""
        if self.rounds:
            return "rounding is faster"
        if self.relief > 1:
            return f"{self.guard.cause}: {self.relief:g} times the budget"
        return self.limit

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and lists."""
        changed: dict[str, list[str]] = {str(index): [] for index in self.planned_stages}
        stages: dict[str, dict[str, Any]] = {str(index): {} for index in self.planned_stages}
        for index, one, choice, has_changed in zip(
            self.stage_of, self.parameters, self.choices, self.changed, strict=True
        ):
            stages[str(index)][one.matrix.name] = [*one.shape, to_list(choice), *one.learned()]
            if has_changed:
                changed[str(index)].append(one.matrix.name)
        return {
            "ledger": self.ledger.state_dict(),
            "rounds": self.rounds,
            "guard": self.guard.state_dict(),
            "changed": changed,
            "stages": stages,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken, but round as this planner does. Raises ValueError if the state is of
        other parameters or another release.
        """
        if state.keys() != self.state_dict().keys():
            raise ValueError("the budget's state is of another release of EDGC")
        saved = state["stages"]
        # a stage of which nothing was to be compressed then starts anew
        known = [stage for stage in self.planned_stages if str(stage) in saved]
        for stage in known:
            own = {one.matrix.name: one.shape for one, _ in self._chosen(stage)}
            if {name: values[:3] for name, values in saved[str(stage)].items()} != own:
                raise ValueError("the budget's state is of other parameters")
        self.ledger.load_state_dict(state["ledger"])
        self.guard.load_state_dict(state["guard"])
        for index, (stage, one) in enumerate(zip(self.stage_of, self.parameters, strict=True)):
            if stage in known:
                choice, *learned = saved[str(stage)][one.matrix.name][3:]
                self.choices[index] = from_list(choice)
                self.parameters[index] = one.with_learned(*learned)
                self.changed[index] = one.matrix.name in state["changed"][str(stage)]


def mean_energy(measured: Sequence[tuple[int, float, float]]) -> float:
    """The mean energy of an entry of all gradients; NaN if nothing was measured.

    ``measured``: of each parameter the number of elements, the noise, and the energy of an entry.
    """
    elements = sum(size for size, _, _ in measured)
    return sum(size * energy for size, _, energy in measured) / elements if elements else math.nan


def fidelity(measured: Sequence[tuple[int, float, float]]) -> float:
    """The share of the energy of what the optimizer got that lies along the true gradient, over all parameters whose
    noise is known; NaN if there are none. ``measured``: as of ``mean_energy``.
    """
    kept = [(size * energy, 1 / (1 + own)) for size, own, energy in measured if own >= 0]
    weight = sum(size for size, _ in kept)
    return sum(size * share for size, share in kept) / weight if kept else math.nan
