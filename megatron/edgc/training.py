"""EDGC in Megatron's training loop: one explicit ``install``, one call a step, one exchange a window."""

import math
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_model_config
from torch import nn

from edgc import probe
from edgc.alignment import RANK_MULTIPLE
from edgc.allocation import Allocation, allocate, width
from edgc.collectives import Communicator, Traffic, all_reduce_bytes
from edgc.config import ConfigError, EDGCConfig, flag
from edgc.controller import (
    Controller,
    RankPlan,
    StageCost,
    StageObservation,
    resolve_ranks,
    smallest_rank,
    static_ranks,
)
from edgc.reducer import GradientReducer
from edgc.timing import BackwardTimer, Spans
from megatron.edgc.data_parallel import EDGCBucketGroup, describe, named_bucket_groups
from megatron.edgc.reporting import Reporter
from megatron.edgc.windows import (
    RankWindow,
    WindowReport,
    by_kind,
    mean_or_nan,
    median_or_nan,
    merge,
    merge_statistics,
)


@dataclass(frozen=True)
class StageSetup:
    """What one rank knows of its stage before training; rank 0 prints it and builds the controller from it."""

    stage: int
    allocation: Allocation
    cost: StageCost | None
    break_even: int


class Session:
    """EDGC's part of one training run. ``install`` is a ``post_wrap_hook`` of Megatron's model config."""

    def __init__(self, config: EDGCConfig, args: Namespace):
        self.args = args
        self.iterations: int = args.train_iters or args.train_samples // args.global_batch_size
        config.check_run(self.iterations)
        self.config = config
        self.controller: Controller | None = None  # on global rank 0 alone
        self.reducers: list[GradientReducer] = []
        self.traffic = Traffic()
        self.stage = 0
        self.plan = RankPlan(0, 0, ())
        self.dense_bytes_per_step = 0.0
        self._dense_bytes = 0.0
        self._active: tuple[int | None, ...] = ()
        self._window_start = (0.0, 0.0)
        self._step_seconds: list[float] = []
        self._last_step = math.nan

    def install(self, chunks: list[nn.Module]) -> list[nn.Module]:
        """Take over the gradient reduction of the wrapped model chunks. Every rank calls this at the same point."""
        chunk = chunks[0]
        if len(chunks) != 1 or not isinstance(chunk, DistributedDataParallel):
            raise ConfigError(
                f"--edgc needs one model chunk in Megatron's DDP, not {len(chunks)} of {type(chunk).__name__}"
            )
        self.stage = parallel_state.get_pipeline_model_parallel_rank()
        groups = named_bucket_groups(chunk)
        device = next(chunk.parameters()).device
        parameters = [[describe(name, parameter) for parameter, name in names.items()] for _, names in groups]

        self.config, setups = self._plan_run([p for group in parameters for p in group], groups[0][0], device)
        for (group, _), described in zip(groups, parameters, strict=True):
            reducer = GradientReducer(
                allocate(described, self.config, smallest_rank(self.config)),
                self.config,
                Communicator(group.data_parallel_group, self.traffic),
                device,
            )
            self.reducers.append(reducer)
            for bucket in group.buckets:
                self.dense_bytes_per_step += all_reduce_bytes(
                    bucket.grad_data.numel() * bucket.grad_data.element_size(), reducer.communicator.ranks
                )
        self.reduce_spans, self.backward_spans = Spans(device), Spans(device)
        for (group, names), reducer in zip(groups, self.reducers, strict=True):
            EDGCBucketGroup.attach(group, reducer, names, self.reduce_spans, lambda: self.args.curr_iteration)
        BackwardTimer(chunk, lambda: self.reducers[0].sampler.measures(self.args.curr_iteration), self.backward_spans)
        self._wrap_finalize(chunk)

        stages = _by_stage(setups)
        allocations = [stage[0].allocation for stage in stages]
        costs = [_slowest([setup.cost for setup in stage]) for stage in stages]
        if dist.get_rank() == 0:
            self.controller = Controller(
                self.config,
                self.iterations,
                [allocation.matrices for allocation in allocations],
                costs,
            )
        self.plan = self._broadcast(self.controller.plan if self.controller else None)
        self.reporter = Reporter(self.config, self.args, self.iterations)
        self.reporter.start(allocations, costs)
        if (self.args.save or self.args.load) and self.config.engine != "dense":
            Reporter.warn(
                "checkpoints hold no EDGC state yet: after a resume the error feedback starts at zero and the "
                "controller knows no earlier entropy"
            )
        return chunks

    def _plan_run(
        self, parameters: Sequence[Any], group: Any, device: torch.device
    ) -> tuple[EDGCConfig, list[StageSetup]]:
        """Measure or compute what communication costs, and settle rmin and rmax, alike on every rank."""
        config = self.config
        communicator = Communicator(group.data_parallel_group, Traffic())  # probing is no training traffic
        candidates = allocate(parameters, config, smallest_rank(config))
        cost, break_even = None, 0
        if config.dynamic and candidates.matrices:
            cost = (
                probe.probe(candidates, config, communicator, device)
                if config.link_gbps is None
                else probe.cost_of_link(candidates, config, communicator.ranks, config.link_gbps)
            )
            break_even = probe.break_even(cost, candidates.matrices, config.min_saving)
        setups = _all_gather(StageSetup(self.stage, candidates, cost, break_even))
        everything = allocate(parameters, config, RANK_MULTIPLE).matrices
        usable = max(_all_gather(probe.largest_rank(everything, config.min_saving)))
        _, largest = static_ranks(config) or (None, None)
        for name, rank in (("rmin", config.rmin), ("rmax", config.rmax), ("static_rank", largest)):
            if rank is not None and rank > usable:
                raise ConfigError(
                    f"{flag(name)} = {getattr(config, name)}: no matrix of this model saves {config.min_saving:g}x at "
                    f"rank {rank}; the largest rank that does is {usable}"
                )
        if not config.dynamic:
            return config, setups
        lowest = min((s.break_even for s in setups if s.cost is not None), default=0)
        if config.rmax is None and lowest < max(RANK_MULTIPLE, config.rmin or 0):
            Reporter.warn(
                "on this link compression takes longer than the dense all-reduce at every rank: reducing dense. "
                "Give --edgc-rmax to compress all the same"
            )
            return replace(config, engine="dense", rest_wire="fp32", dense_wire="fp32", rank_tilt=0.0), setups
        config = resolve_ranks(config, lowest, width(m for s in setups for m in s.allocation.matrices))
        if config.rmin is not None and config.rmax is not None and config.rmin > config.rmax:
            raise ConfigError(f"--edgc-rmin = {config.rmin}: must not exceed rmax = {config.rmax}")
        settled = allocate(parameters, config, smallest_rank(config))
        return config, _all_gather(StageSetup(self.stage, settled, cost, break_even))

    def _wrap_finalize(self, chunk: DistributedDataParallel) -> None:
        """Megatron keeps a ``finalize_model_grads_func`` that is already set, and calls it once a training step."""
        model_config = get_model_config(chunk)
        finalize: Callable[..., Any] = model_config.finalize_model_grads_func or finalize_model_grads

        def with_edgc(*args: Any, **kwargs: Any) -> Any:
            self.before_reduction(self.args.curr_iteration)
            result = finalize(*args, **kwargs)
            self.after_reduction(self.args.curr_iteration)
            return result

        model_config.finalize_model_grads_func = with_edgc

    def before_reduction(self, iteration: int) -> None:
        """Use the plan that holds for this iteration (counted from 0)."""
        now = time.perf_counter()
        if math.isfinite(self._last_step):
            self._step_seconds.append(now - self._last_step)
        self._last_step = now
        dense = (None,) * len(self.plan.ranks)
        self._active = self.plan.ranks if iteration >= self.plan.first_iteration else dense
        matrix_ranks = self.plan.matrix_ranks[self.stage] if self.plan.matrix_ranks else None
        for reducer in self.reducers:
            reducer.set_rank(self._active[self.stage], matrix_ranks)

    def after_reduction(self, iteration: int) -> None:
        """Count the step; at the end of a window exchange what was seen and adopt rank 0's plan."""
        self._dense_bytes += self.dense_bytes_per_step
        completed = iteration + 1
        self.reporter.progress(completed, self._step_seconds)
        closes_window = completed % self.config.window == 0
        if closes_window or completed == self.iterations:
            report = self._exchange(completed, decide=closes_window)
            self.plan = report.plan
            self.reporter.window(report, last=completed == self.iterations)

    def _exchange(self, completed: int, decide: bool) -> WindowReport:
        seen = _all_gather(self._take_window())
        totals = _all_gather((self.traffic.bytes, self._dense_bytes))
        report = None
        if self.controller is not None:
            stages = tuple(merge(stage) for stage in _by_stage(seen))
            if decide:
                self.controller.observe(
                    [
                        StageObservation(s.entropy, s.reduce_seconds, s.micro_backward_seconds, s.energies)
                        for s in stages
                    ]
                )
                self.controller.decide(completed)
            report = WindowReport(
                completed,
                self._active,
                self.controller.plan,
                stages,
                median(self._step_seconds) if self._step_seconds else math.nan,
                fmean(sent for sent, _ in totals),
                fmean(dense for _, dense in totals),
            )
        report = self._broadcast(report)
        self._step_seconds = []
        return report

    def _take_window(self) -> RankWindow:
        measurements = [reducer.measurements.take() for reducer in self.reducers]
        sent, dense = self.traffic.bytes, self._dense_bytes
        window = RankWindow(
            stage=self.stage,
            entropy=mean_or_nan([value for m in measurements for value in m.entropy]),
            residual=mean_or_nan([value for m in measurements for value in m.residual]),
            reduce_seconds=median_or_nan(self.reduce_spans.take_seconds()),
            micro_backward_seconds=median_or_nan(self.backward_spans.take_seconds()),
            dp_bytes=sent - self._window_start[0],
            dp_bytes_dense=dense - self._window_start[1],
            energies={name: values for m in measurements for name, values in m.mean_energies().items()},
            statistics=merge_statistics([by_kind(seen) for m in measurements for seen in m.statistics]),
        )
        self._window_start = (sent, dense)
        return window

    @staticmethod
    def _broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def _all_gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _by_stage(records: Sequence[Any]) -> list[list[Any]]:
    stages = sorted({record.stage for record in records})
    return [[record for record in records if record.stage == stage] for stage in stages]


def _slowest(costs: Sequence[StageCost | None]) -> StageCost | None:
    """The cost of a stage whose ranks measured it separately; None if they did not."""
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.dense_seconds, default=None)
