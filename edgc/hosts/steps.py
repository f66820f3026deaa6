"""The driver of a step: it brings the plan into the reducers, judges what they have summed, and counts the step."""

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
from torch import Tensor

from edgc.compress.reducer import GradientReducer
from edgc.hosts.stage import Stage
from edgc.plan.loss_watch import window_loss
from edgc.plan.rank_plan import RankPlan, Summing
from edgc.plan.stages import StageKey

RECENT_STEPS = 20  # of whose times the median is taken; of more, a link that changes would show later; not tuned

Ranks = tuple[int | None, ...]


@dataclass(frozen=True)
class Step:
    """A step, and what holds in it.

    ``loss_scale``: 0-dimensional; None without one. ``began``: by the clock, in seconds. ``same_summing``: whether the
    gradients of the step before were summed in the same way. ``ranks``: of all stages; ``usual_ranks``: the same,
    whatever is tried in this step; ``message_ranks``: of boundaries. ``compares_replicas``: whether replicas are
    compared at its end.
    """

    iteration: int  # counted from 0
    loss_scale: Tensor | None
    began: float = math.nan
    summing: Summing = Summing.DENSE
    same_summing: bool = False
    ranks: Ranks = ()
    usual_ranks: Ranks = ()
    message_ranks: Ranks = ()
    compares_replicas: bool = False


NO_STEP = Step(-1, None)  # before the first


@dataclass
class WindowSteps:
    """Of one window: the ``seconds`` of the steps that ended in it, how many steps it had, and of these ``host_steps``
    those that the host has summed. A step ends where the next one begins, so the last of a window counts in the next.
    """

    seconds: list[float] = field(default_factory=list)
    count: int = 0
    host_steps: int = 0

    @property
    def host_step_share(self) -> float:
        return self.host_steps / max(self.count, 1)


class StepDriver:
    """Counts the steps of one process, and gives its stages the ranks of the plan that holds.

    Args:
        keys: the stages of the plan, in order.
        stages: those of this process.
        window: iterations between two plans.
        iteration: the host's clock: the number of the step under way.
        loss_scale: what gradients are multiplied with in the step under way; None without one.
    """

    def __init__(
        self,
        keys: Sequence[StageKey],
        stages: Sequence[Stage],
        window: int,
        iteration: Callable[[], int],
        loss_scale: Callable[[], Tensor | None],
    ):
        self.keys, self.stages, self.window = list(keys), stages, window
        self._iteration, self._loss_scale = iteration, loss_scale
        self.plan = self.message_plan = RankPlan(0, 0, ())
        self.current = NO_STEP  # the step under way, and after its end until the next one begins
        self.window_steps = WindowSteps()  # so far
        self.seconds_by = _no_seconds()
        self._counted: int | None = None  # the last step that has ended

    def adopt(self, plan: RankPlan, message_plan: RankPlan | None) -> None:
        """Use these plans from their first iteration on, and never within a step."""
        if plan.trial != self.plan.trial:
            self.seconds_by = _no_seconds()
        self.plan, self.message_plan = plan, message_plan or self.message_plan

    def step(self) -> Step:
        """The step under way. What asks first, a message or a reduction amid the backward pass, brings in the plan.

        Raises RuntimeError where the step before was never ended.
        """
        iteration = self._iteration()
        if iteration != self.current.iteration:
            step = self._begun(iteration)
            if self.current is not NO_STEP:
                self._check_ended(self.current, step)
                self._time(self.current, step.began - self.current.began)
            self.window_steps.count += 1
            self.window_steps.host_steps += step.summing is Summing.HOST
            self._prepare_stages(step)
            self.current = step
        return self.current

    def _check_ended(self, before: Step, step: Step) -> None:
        if self._counted != before.iteration:
            raise RuntimeError(
                f"step {step.iteration + 1} began, but EDGC was not told that step {before.iteration + 1} had ended. "
                "In a loop on Megatron's parts, set config.finalize_model_grads_func before EDGC is attached"
            )

    def _begun(self, iteration: int) -> Step:
        """The step that follows ``current``, under the plans that hold."""
        before, plan, message_plan = self.current, self.plan, self.message_plan
        began, summing = time.perf_counter(), plan.summing(iteration)
        ranks = _in_use(plan, summing is Summing.COMPRESSED)
        return Step(
            iteration,
            self._loss_scale(),
            began,
            summing,
            same_summing=summing is before.summing,
            ranks=ranks,
            usual_ranks=_in_use(plan, summing is not Summing.DENSE and not plan.by_host),
            message_ranks=_in_use(message_plan, iteration >= message_plan.first_iteration),
            compares_replicas=self.closes_window(iteration) or compressed_anew(ranks, before.ranks),
        )

    def _time(self, step: Step, seconds: float) -> None:
        """A step has taken so long, up to the beginning of the next one."""
        self.window_steps.seconds.append(seconds)
        if step.same_summing and step.summing is not Summing.DENSE:
            alike = self.seconds_by[step.summing is Summing.HOST]
            # a trial is compared with the steps that are next to it
            if self.plan.trial is None or len(alike) < RECENT_STEPS:
                alike.append(seconds)

    def _prepare_stages(self, step: Step) -> None:
        for stage in self.stages:
            index = self.keys.index(stage.key)
            stage.set_rank(step.ranks, index, self.plan, step.summing is Summing.HOST)
            for reducer in stage.reducers:
                reducer.verify = step.compares_replicas

    def closes_window(self, iteration: int) -> bool:
        """Whether this step is the last of a window, or of a warm-up after which a plan begins amid a window.

        That plan is then made of what the warm-up has shown.
        """
        ends = self.plan.first_iteration if self.plan.version == 0 and self.plan.formats else 0
        return (iteration + 1) % self.window == 0 or iteration + 1 == ends

    def note_loss(self, loss: Tensor | float) -> None:
        """The training loss of the last step, one number. Raises ValueError for anything else. Nothing waits for a
        tensor.
        """
        if not isinstance(loss, Tensor):
            try:
                loss = float(loss)  # of NumPy's types too: a checkpoint has plain values
            except (TypeError, ValueError) as error:
                raise ValueError(f"a loss of type {type(loss).__name__}: must be one number") from error
        elif loss.numel() != 1:
            raise ValueError(f"a loss of shape {tuple(loss.shape)}: must be one number")
        else:
            loss = loss.detach().reshape(()).float().clone()  # the caller may use its memory again
        self._losses.append(loss)

    @property
    def _losses(self) -> list[float | Tensor]:
        """Of this window so far. They are kept, and saved, with what a reducer has seen."""
        return self.stages[0].reducers[0].observer.measurements.losses

    def window_loss(self) -> float:
        """Of this window so far (``edgc.plan.loss_watch.window_loss``). Waits for the device."""
        return window_loss([float(loss) for loss in self._losses])

    def take_window(self) -> WindowSteps:
        """The steps since the last call."""
        taken, self.window_steps = self.window_steps, WindowSteps()
        return taken

    def roll_back(self, iteration: int) -> None:
        """Undo what this iteration has done to the reducers' state. Needs reducers that are ``repeatable``."""
        for reducer in self._reducers():
            reducer.roll_back(iteration)

    def not_finite(self) -> list[StageKey]:
        """The stages whose sums of this step are not finite, without loss or gradients of a stage that EDGC leaves."""
        finite = [(stage.key, r.finite) for stage in self.stages for r in stage.reducers if r.finite is not None]
        if not finite or bool(torch.stack([flag for _, flag in finite]).all()):
            return []
        return sorted({key for key, flag in finite if not bool(flag)})

    def end(self, iteration: int) -> bool:
        """Compare replicas where it is time to, and count the step. Returns whether it is a new one.

        Raises ``ReplicaMismatch``.
        """
        if self.current.compares_replicas:
            for reducer in self._reducers():
                reducer.compare_replicas(iteration)
        new = iteration != self._counted  # else the host has run the step again
        self._counted = iteration
        return new

    def _reducers(self) -> list[GradientReducer]:
        return [reducer for stage in self.stages for reducer in stage.reducers]


def _no_seconds() -> dict[bool, deque[float]]:
    """No step times yet, by whether the host sums. They will be those of the last ``RECENT_STEPS`` steps since a trial
    began or ended. The first step after a change of who sums is left out.
    """
    return {by_host: deque(maxlen=RECENT_STEPS) for by_host in (False, True)}


def compressed_anew(active: Sequence[int | None], before: Sequence[int | None]) -> bool:
    """Whether any stage has a rank that it did not have in the step before; of that nothing is known at first."""
    return any(now not in (None, was) for now, was in zip_longest(active, before))


def _in_use(plan: RankPlan, used: bool) -> Ranks:
    """The ranks of a plan, if it is used."""
    return plan.ranks if used else (None,) * len(plan.ranks)
