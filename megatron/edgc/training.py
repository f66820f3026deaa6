"""EDGC in Megatron's training loop: one explicit ``install``, one call a step, one exchange a window."""

import math
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import zip_longest
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_model_config
from megatron.training.training import update_train_iters
from torch import Tensor, nn

from edgc.comm.collectives import Communicator, Traffic
from edgc.comm.overlap import Overlap
from edgc.compress import probe
from edgc.compress.batch import triton_kernels
from edgc.config import ConfigError, EDGCConfig, flag
from edgc.errors import NonFiniteSum
from edgc.observe.timing import BackwardTimer, Spans
from edgc.observe.window import MessageWindow, Part, StageKey, WindowReport, median_or_nan, merge, merge_messages
from edgc.plan.alignment import RANK_MULTIPLE
from edgc.plan.allocation import Allocation, allocate, width
from edgc.plan.controller import (
    NO_RANK,
    Controller,
    RankPlan,
    StageCost,
    StageObservation,
    resolve_ranks,
    smallest_rank,
    static_ranks,
)
from megatron.edgc import pipeline_parallel
from megatron.edgc.checkpointing import RANKS, Checkpoints
from megatron.edgc.compatibility import check_param_wire, compresses_messages, fuses_embedding
from megatron.edgc.data_parallel import Step
from megatron.edgc.embedding import TiedEmbedding
from megatron.edgc.message_costs import break_even, largest_rank, message_costs, message_shape
from megatron.edgc.pipeline_messages import OFF, PipelineMessages, message_config, uncompressed
from megatron.edgc.reporting import Reporter
from megatron.edgc.seam import Seam
from megatron.edgc.stages import Stage, gradient_bytes, stages_of


@dataclass(frozen=True)
class StageSetup:
    """What one rank knows of one of its stages before training; rank 0 prints it and builds the controller from it."""

    stage: StageKey
    allocation: Allocation
    cost: StageCost | None
    break_even: int


class Session:
    """EDGC's part of one training run. ``install`` is a ``post_wrap_hook`` of Megatron's model config."""

    def __init__(self, config: EDGCConfig, args: Namespace):
        self.args = args
        if args.train_iters:  # else Megatron can only count them once it knows its batch sizes
            config.check_run(args.train_iters)
        check_param_wire(config, args)
        fused = fuses_embedding(config, args)
        if not compresses_messages(config, args):
            config = replace(config, **OFF)
        self.requested = config
        self.config = replace(config, pp="backward" if config.pp == "auto" else config.pp, fuse_embedding_sync=fused)
        # With a loss scale, in fp16 or asked for, Megatron skips a step whose gradients overflow.
        self.scaled = bool(args.fp16 or args.loss_scale)
        self.controller: Controller | None = None  # on global rank 0 alone, as the next one
        self.message_controller: Controller | None = None  # where messages between stages are compressed
        self.messages: PipelineMessages | None = None  # where there is a pipeline
        self.stages: list[Stage] = []  # of this rank
        self.keys: list[StageKey] = []  # of the plan
        self.plan = RankPlan(0, 0, ())
        self.message_plan = RankPlan(0, 0, ())
        self._active: tuple[int | None, ...] = ()
        self._verify = False  # whether replicas are compared after this step
        self._message_ranks: tuple[int | None, ...] = ()
        self._step: Step | None = None
        self._counted: int | None = None
        self._step_seconds: list[float] = []
        self._last_step = math.nan

    def install(self, chunks: list[nn.Module], seam: Seam) -> list[nn.Module]:
        """Take over the gradient reduction of the wrapped model chunks. Every rank calls this at the same point."""
        wrapped = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        if len(wrapped) < len(chunks):
            others = sorted({type(chunk).__name__ for chunk in chunks if chunk not in wrapped})
            raise ConfigError(f"--edgc needs Megatron's DDP, not {', '.join(others)}")
        self.chunks = wrapped
        self.iterations = run_length(self.args)
        self.config.check_run(self.iterations)
        device = next(chunks[0].parameters()).device
        self.model_config = get_model_config(chunks[0])
        tied = TiedEmbedding(wrapped) if self.config.fuse_embedding_sync else None
        self.stages = stages_of(wrapped, parallel_state.get_pipeline_model_parallel_rank(), device, tied)

        if self.config.kernels == "fused" and triton_kernels(device) is None:
            Reporter.warn(
                "--edgc-kernels fused: Triton's kernels need Triton and a GPU from Ampere on; plain torch goes on"
            )
        self.config, setups = self._plan_run(device)
        if tied is not None and self.config.fuse_embedding_sync:
            tied.install(seam)
        if self._alone:  # Megatron's own sum and gather over one rank change nothing; rounding would
            self.config = replace(self.config, dense_wire="fp32", param_wire=None)
        sent_back = self._message_costs(device)
        message_settings = self._message_settings(sent_back)
        overlap = Overlap(device)
        for stage in self.stages:
            stage.attach(self.config, overlap, self.begin_step, self._repeatable())
        self.backward_spans = Spans(device)
        sampler = self.stages[0].reducers[0].sampler
        for chunk in wrapped:
            BackwardTimer(chunk, lambda: sampler.measures(self.args.curr_iteration), self.backward_spans)
        self._wrap_finalize(seam)

        stages = _by_stage(setups)
        self.keys = [stage[0].stage for stage in stages]
        left_dense = [self._left_dense(key) for key in self.keys]
        allocations = [stage[0].allocation for stage in stages]
        costs = [_slowest([setup.cost for setup in stage]) for stage in stages]
        if dist.get_rank() == 0:
            self.controller = Controller(
                self.config,
                self.iterations,
                [allocation.matrices for allocation in allocations],
                [None if why else cost for cost, why in zip(costs, left_dense, strict=True)],
                [place for place, why in enumerate(left_dense) if why],
                [sent_back.get(key.pipeline_stage) if key.part is Part.LAYERS else None for key in self.keys],
            )
        if parallel_state.get_pipeline_model_parallel_world_size() > 1:
            self.messages = PipelineMessages(
                self.config, self.args, wrapped, self.begin_step, lambda: self._message_ranks, self._repeatable()
            )
            pipeline_parallel.install(self.messages, seam)
            if message_settings is not None and dist.get_rank() == 0:
                specs = self.messages.specs()
                self.message_controller = Controller(message_settings, self.iterations, specs, [None] * len(specs))
        self._adopt_plans()
        self.reporter = Reporter(self.config, self.args, self.iterations)
        apart = self.stages[0].embedding
        self.reporter.start(self.keys, allocations, costs, left_dense, message_settings, sent_back, apart)
        self.checkpoints = Checkpoints(
            self.args,
            self.requested,
            self.config,
            self.keys,
            self.stages,
            self.controller,
            self.messages,
            self.message_controller,
        )
        self.checkpoints.install(seam, self._resume)
        return chunks

    def _left_dense(self, key: StageKey) -> str:
        """Why a stage's gradients are never compressed; empty if they are."""
        if key.part is Part.LAYERS and self._alone:
            return "no other rank has these parameters"
        share, stages = self.config.stage_share, parallel_state.get_pipeline_model_parallel_world_size()
        if key.part is not Part.EMBEDDING and key.pipeline_stage >= math.ceil(share * stages - 1e-9):
            return f"beyond {flag('stage_share')} {share:g}"
        return ""

    @property
    def _alone(self) -> bool:
        """Whether no other rank has this one's layers, so that only messages between stages can be compressed."""
        return dist.get_world_size(self.stages[0].process_group) == 1

    def _message_costs(self, device: torch.device) -> dict[int, StageCost]:
        """Of the gradients that each stage sends to the one before, by sender, where anything depends on it."""
        config = self.config
        pipelined = parallel_state.get_pipeline_model_parallel_world_size() > 1
        timed = config.pp_follows or self.requested.pp == "auto" or (config.dynamic and config.align)
        if not pipelined or not timed:
            return {}
        found = _all_gather(message_costs(config, self.args, device))
        senders = sorted({sender for costs in found for sender in costs})
        slowest = {sender: _slowest([costs.get(sender) for costs in found]) for sender in senders}
        return {sender: cost for sender, cost in slowest.items() if cost is not None}

    def _message_settings(self, costs: dict[int, StageCost]) -> EDGCConfig | None:
        """The settings of the messages' controller; None where there is none."""
        config, args = self.config, self.args
        if config.pp == "off":
            return None
        if not config.pp_follows:
            limit = largest_rank(config, args, 1.0)
            if config.pp_rank is not None and config.pp_rank > limit:
                rows, cols = message_shape(args)
                raise ConfigError(
                    f"{flag('pp_rank')} = {config.pp_rank}: messages of {rows} x {cols} values are smaller in low rank "
                    f"only up to rank {limit}"
                )
            level = config.pp_rank or NO_RANK
            slower = any(cost.compressed.seconds(level) > cost.dense_seconds for cost in costs.values())
            if self.requested.pp == "auto" and slower:
                Reporter.warn(
                    f"on this link messages between stages take longer in {config.pp_engine} than as they are: they "
                    f"stay uncompressed. Give {flag('pp')} backward to compress them all the same"
                )
                return uncompressed(config)
            return message_config(config)
        usable = RANK_MULTIPLE * (largest_rank(config, args, config.min_saving) // RANK_MULTIPLE)
        if usable:
            usable = min([usable, *map(break_even, costs.values())])
        if not usable:
            Reporter.warn(
                f"messages between stages stay uncompressed: no rank makes them {config.min_saving:g}x smaller and "
                f"takes no longer on this link. Give {flag('pp_rank')} to compress them all the same"
            )
            return uncompressed(config)
        config = message_config(config)
        ranks = {name: getattr(config, name) for name in RANKS}
        return replace(config, **{name: min(rank, usable) for name, rank in ranks.items() if rank is not None})

    def _adopt_plans(self) -> None:
        """Take the plans of rank 0's controllers."""
        controllers = self.controller, self.message_controller
        plans = self._broadcast([None if controller is None else controller.plan for controller in controllers])
        self.plan, self.message_plan = plans[0], plans[1] or self.message_plan

    def _resume(self) -> None:
        """A checkpoint has been loaded, on rank 0 the controllers' state with it."""
        self._adopt_plans()
        for stage in self.stages:
            for group in stage.groups:
                group.edgc_weights.before = None

    def _repeatable(self) -> bool:
        """Whether Megatron may skip a step or run it again: an overflow in fp16, or a result that it doubts."""
        args = self.args
        doubts = args.check_for_spiky_loss or args.check_for_large_grads or args.error_injection_rate > 0
        return bool(self.scaled or doubts or args.rerun_mode == "report_stats")

    def _plan_run(self, device: torch.device) -> tuple[EDGCConfig, list[StageSetup]]:
        """Measure or compute what communication costs, and settle rmin and rmax, alike on every rank."""
        config, main = self.config, self.stages[0]
        communicator = Communicator(main.process_group, Traffic())  # probing is no training traffic
        candidates = allocate(main.parameters, config, smallest_rank(config))
        cost, break_even = None, 0
        if config.dynamic and candidates.matrices and not self._alone:
            host = {"scatters": self.args.use_distributed_optimizer, "half": gradient_bytes(self.args) == 2}
            if config.link_gbps is None:
                groups = [allocate(one.described, config, smallest_rank(config)) for one in main.named if one.described]
                overlapped = self.args.overlap_grad_reduce
                cost = probe.probe(groups, config, communicator, device, **host, overlapped=overlapped)
            else:
                cost = probe.cost_of_link(candidates, config, communicator.ranks, config.link_gbps, **host)
            break_even = probe.break_even(cost, candidates.matrices, config.min_saving)

        def setups(config: EDGCConfig) -> list[StageSetup]:
            # experts and embedding have no cost of their own: the rank that pays is that of the layers around them
            own = [
                StageSetup(
                    stage.key,
                    allocate(stage.parameters, config, smallest_rank(config)),
                    cost if stage.key.part is Part.LAYERS else None,
                    break_even,
                )
                for stage in self.stages
            ]
            return [setup for rank in _all_gather(own) for setup in rank]

        known = setups(config)
        everything = [m for stage in self.stages for m in allocate(stage.parameters, config, RANK_MULTIPLE).matrices]
        usable = max(_all_gather(probe.largest_rank(everything, config.min_saving)))
        _, largest = static_ranks(config) or (None, None)
        for name, rank in (("rmin", config.rmin), ("rmax", config.rmax), ("static_rank", largest)):
            if rank is not None and rank > usable:
                raise ConfigError(
                    f"{flag(name)} = {getattr(config, name)}: no matrix of this model saves {config.min_saving:g}x at "
                    f"rank {rank}; the largest rank that does is {usable}"
                )
        if not config.dynamic:
            return config, known
        taking_part = (s for s in known if s.cost is not None and not self._left_dense(s.stage))
        lowest = usable if self._alone else min((s.break_even for s in taking_part), default=0)
        if config.rmax is None and lowest < max(RANK_MULTIPLE, config.rmin or 0):
            Reporter.warn(
                "on this link compression takes longer than the dense reduction at every rank: reducing dense. "
                "Give --edgc-rmax to compress all the same"
            )
            if config.pp_follows:
                Reporter.warn("messages between stages stay uncompressed, too; give --edgc-pp-rank to compress them")
            if self.requested.fuse_embedding_sync is None:  # then Megatron's own sums will do, overlapped and scattered
                config = replace(config, fuse_embedding_sync=False)
                self.stages = stages_of(self.chunks, parallel_state.get_pipeline_model_parallel_rank(), device)
                known = setups(config)
            return replace(
                config,
                engine="dense",
                rest_wire="fp32",
                dense_wire="fp32",
                rank_tilt=0.0,
                **(OFF if config.pp_follows else {}),
            ), known
        config = resolve_ranks(config, lowest, width(m for s in known for m in s.allocation.matrices))
        if config.rmin is not None and config.rmax is not None and config.rmin > config.rmax:
            raise ConfigError(f"--edgc-rmin = {config.rmin}: must not exceed rmax = {config.rmax}")
        return config, setups(config)

    def _wrap_finalize(self, seam: Seam) -> None:
        """Megatron keeps a ``finalize_model_grads_func`` that is already set, and calls it once a training step."""
        finalize: Callable[..., Any] = self.model_config.finalize_model_grads_func or finalize_model_grads

        def with_edgc(*args: Any, **kwargs: Any) -> Any:
            result = finalize(*args, **kwargs)
            self.after_reduction(self.args.curr_iteration)
            return result

        seam.replace(self.model_config, "finalize_model_grads_func", with_edgc)

    def begin_step(self) -> Step:
        """The step under way. What asks first, a message or a reduction amid the backward pass, brings in the plan."""
        iteration = self.args.curr_iteration  # counted from 0
        if self._step is None or self._step.iteration != iteration:
            now = time.perf_counter()
            if math.isfinite(self._last_step):
                self._step_seconds.append(now - self._last_step)
            self._last_step = now
            dense = (None,) * len(self.plan.ranks)
            before, self._active = self._active, self.plan.ranks if iteration >= self.plan.first_iteration else dense
            closes_window = (iteration + 1) % self.config.window == 0
            self._verify = closes_window or compressed_anew(self._active, before)
            for stage in self.stages:
                place = self.keys.index(stage.key)
                matrix_ranks = self.plan.matrix_ranks[place] if self.plan.matrix_ranks else None
                stage.set_rank(self._active, place, matrix_ranks)
                for reducer in stage.reducers:
                    reducer.verify = self._verify
            ranks = self.message_plan.ranks
            self._message_ranks = ranks if iteration >= self.message_plan.first_iteration else (None,) * len(ranks)
            self._step = Step(iteration, self._loss_scale())
        return self._step

    def _loss_scale(self) -> Tensor | None:
        """What gradients are multiplied with, 0-dimensional."""
        if not self.scaled:
            return None
        scale: Tensor = self.model_config.grad_scale_func(torch.ones((), device=self.stages[0].device))
        return scale.reshape(())  # Megatron's own has one element in one dimension

    def after_reduction(self, iteration: int) -> None:
        """Count the step; at the end of a window exchange what was seen and adopt rank 0's plan."""
        for stage in self.stages:
            stage.end_step()
            for group in stage.groups:
                group.keep_weights()
        if self.scaled and not self._all_finite():
            for stage in self.stages:
                for reducer in stage.reducers:
                    reducer.roll_back(iteration)
            if self.messages is not None:
                self.messages.roll_back(iteration)
        if not self.scaled:
            self._check_sums(iteration)
        if self._verify:
            for stage in self.stages:
                for reducer in stage.reducers:
                    reducer.compare_replicas(iteration)
        if iteration == self._counted:  # Megatron has run the step again
            return
        self._counted = iteration
        completed = iteration + 1
        self.reporter.progress(completed, self._step_seconds)
        closes_window = completed % self.config.window == 0
        if closes_window or completed == self.iterations:
            report = self._exchange(completed, decide=closes_window)
            self.plan, self.message_plan = report.plan, report.message_plan or self.message_plan
            self.reporter.window(report, last=completed == self.iterations)

    def _check_sums(self, iteration: int) -> None:
        """Without a loss scale the optimizer skips no step: a sum that is not finite would reach the weights.

        Megatron's own check looks at the local gradients, before they are summed.
        """
        finite = [(stage, r.finite) for stage in self.stages for r in stage.reducers if r.finite is not None]
        if not finite or bool(torch.stack([flag for _, flag in finite]).all()):
            return
        places = sorted({stage.key for stage, flag in finite if not bool(flag)})
        what = f"iteration {iteration}: the summed gradients of {', '.join(map(str, places))} are not finite"
        if self.args.check_for_nan_in_loss_and_grad:
            raise NonFiniteSum(
                f"{what}. The step is not applied, and EDGC's state is that of before it: resume from the last "
                "checkpoint. With Megatron's --no-check-for-nan-in-loss-and-grad the optimizer would apply them"
            )
        if dist.get_rank(self.stages[0].process_group) == 0:
            print(
                f"edgc: warning: {what}; the optimizer applies them, as --no-check-for-nan-in-loss-and-grad asks",
                file=sys.stderr,
                flush=True,
            )

    def _all_finite(self) -> bool:
        """Whether all gradients are finite on every rank, reduced by whom ever: else the optimizer skips the step."""
        buckets = [
            bucket
            for chunk in self.chunks
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in group.buckets
        ]
        finite = [torch.isfinite(bucket.grad_data).all() for bucket in buckets]
        everywhere = torch.stack(finite).all().to(torch.int32)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)

    def _exchange(self, completed: int, decide: bool) -> WindowReport:
        backward = median_or_nan(self.backward_spans.take_seconds())
        windows = [stage.take_window(backward if stage.key.part is Part.LAYERS else math.nan) for stage in self.stages]
        seen = [window for rank in _all_gather(windows) for window in rank]
        counts = [stage.byte_counts() for stage in self.stages]
        piped = (0.0, 0.0) if self.messages is None else self.messages.byte_counts()
        totals = _all_gather([*(sum(count) for count in zip(*counts, strict=True)), *piped])
        sent = _all_gather([] if self.messages is None else self.messages.take_window())
        report = None
        if self.controller is not None:
            stages = tuple(merge(stage) for stage in _by_stage(seen))
            if decide:
                self.checkpoints.keep_controllers(completed - 1)
                message_ranks = self._gradient_message_ranks()
                self.controller.observe(
                    [
                        StageObservation(
                            s.entropy,
                            s.reduce_seconds,
                            s.micro_backward_seconds,
                            message_ranks.get(s.stage),
                            s.energies,
                        )
                        for s in stages
                    ],
                    self._active,
                )
                self.controller.decide(completed)
            messages = tuple(merge_messages(boundary) for boundary in _by_boundary(sent))
            if decide and self.message_controller is not None:
                self.message_controller.observe([StageObservation(message.entropy) for message in messages])
                self.message_controller.decide(completed)
            report = WindowReport(
                completed,
                self._active,
                self.controller.plan,
                stages,
                median(self._step_seconds) if self._step_seconds else math.nan,
                *(fmean(count) for count in zip(*totals, strict=True)),
                message_ranks=self._message_ranks,
                message_plan=None if self.message_controller is None else self.message_controller.plan,
                messages=messages,
                costs=tuple(self.controller.costs),
            )
        report = self._broadcast(report)
        self._step_seconds = []
        return report

    def _gradient_message_ranks(self) -> dict[StageKey, int | None]:
        """The ranks at which stages have sent activation gradients to the one before, where low rank is asked for."""
        if self.messages is None:
            return {}
        return {
            StageKey(Part.LAYERS, boundary.sender): rank
            for boundary, rank in zip(self.messages.boundaries, self._message_ranks, strict=True)
            if boundary.direction == "backward"
        }

    @staticmethod
    def _broadcast(value: Any) -> Any:
        box = [value]
        dist.broadcast_object_list(box, src=0)
        return box[0]


def compressed_anew(active: Sequence[int | None], before: Sequence[int | None]) -> bool:
    """Whether any stage has a rank that it did not have in the step before; of that nothing is known at first."""
    return any(now not in (None, was) for now, was in zip_longest(active, before))


def run_length(args: Namespace) -> int:
    """Iterations of the run as Megatron counts them, by samples perhaps and with batches that grow on the way."""
    counted = copy(args)  # Megatron itself fills in the count later, and takes a run that has one for another kind
    update_train_iters(counted)
    return int(counted.train_iters)


def _all_gather(value: Any) -> list[Any]:
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def _by_stage(records: Sequence[Any]) -> list[list[Any]]:
    stages = sorted({record.stage for record in records})
    return [[record for record in records if record.stage == stage] for stage in stages]


def _by_boundary(sent: Sequence[Sequence[MessageWindow]]) -> list[list[MessageWindow]]:
    windows = [window for rank in sent for window in rank]
    boundaries = sorted({window.boundary for window in windows})
    return [[window for window in windows if window.boundary == boundary] for boundary in boundaries]


def _slowest(costs: Sequence[StageCost | None]) -> StageCost | None:
    """The cost of a stage whose ranks measured it separately; None if they did not."""
    return max((cost for cost in costs if cost is not None), key=lambda cost: cost.dense_seconds, default=None)
