"""EDGC in Megatron's training loop: one explicit ``install``, one ``step`` a step, one exchange a window."""

from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.utils import get_model_config
from megatron.training import training
from megatron.training.global_vars import get_tensorboard_writer
from torch import Tensor, nn

from edgc.comm.collectives import Communicator
from edgc.comm.objects import all_gather_objects
from edgc.comm.overlap import Overlap
from edgc.config import ConfigError, EDGCConfig, RankPolicy
from edgc.errors import NonFiniteSum, StepError
from edgc.hosts.costs import reduction_cost, reduction_sizes
from edgc.hosts.exchange import WindowExchange
from edgc.hosts.reporting import Reporter
from edgc.hosts.steps import StepDriver
from edgc.hosts.user_warnings import warn, warn_of_budget, warn_of_kernels
from edgc.observe.backward_timer import BackwardTimer
from edgc.observe.events import EventLog
from edgc.observe.window import WindowReport
from edgc.plan.controller import ControlledStage, Controller
from edgc.plan.run import Run
from edgc.plan.run_plan import RunPlan, plan_run
from edgc.plan.stages import ProcessStage, StageKey, StageKind, slowest
from edgc.plan.times.comm_cost import StageCost
from edgc.plan.times.gather_times import GatherTimes
from edgc.stacking import all_finite
from edgc.timing import Spans
from megatron.edgc.checkpoint.hooks import CheckpointHooks
from megatron.edgc.checkpoint.index import RunState, layers_of_stages
from megatron.edgc.checkpoint.saving import CheckpointSaver
from megatron.edgc.compatibility import (
    check_ddp,
    check_megatron,
    check_options,
    compresses_messages,
    embedding_apart,
    fuses_embedding,
    rounds_weights,
)
from megatron.edgc.embedding import TiedEmbedding
from megatron.edgc.messages import p2p_communicator
from megatron.edgc.messages.costs import message_costs
from megatron.edgc.messages.pipeline_messages import PipelineMessages
from megatron.edgc.messages.plan import MessageChoice, choose_messages
from megatron.edgc.run import described_run, scales_loss
from megatron.edgc.seam import Seam
from megatron.edgc.stages import MegatronStage, stages_of


class Session:
    """EDGC's part of one training run: what ``megatron.edgc.attach`` returns.

    ``args`` are Megatron's, validated. State is saved and loaded with Megatron's own checkpoints.
    Raises ``ConfigError`` for options that EDGC cannot take.
    """

    # what there is once ``install`` has been given the model
    model_config: Any
    run: Run
    driver: StepDriver
    windows: WindowExchange
    reporter: Reporter
    saver: CheckpointSaver

    def __init__(self, config: EDGCConfig, args: Namespace):
        check_megatron()
        self.args = args
        if args.train_iters:  # else Megatron can only count them once it knows its batch sizes
            config.check_run(args.train_iters)
        if not rounds_weights(config, args):
            config = config.replace(param_wire="off")
        fused, with_messages = fuses_embedding(config, args), compresses_messages(config, args)
        if not with_messages:
            config = config.replace(pp="off")
        check_options(config, args)
        if args.rank == 0:
            EventLog(config.job.log_dir).close()  # before all processes have met, an error is that of one alone
        self.requested = config
        self.config = config.replace(fuse_embedding_sync=fused)
        self.scaled = scales_loss(args)
        self.seam = Seam()
        self.chunks: list[DistributedDataParallel] = []  # of the model
        self.keys: list[StageKey] = []  # all stages of the plan
        self.stages: list[MegatronStage] = []  # those of this process
        self.messages: PipelineMessages | None = None  # where there is a pipeline
        self.tied: TiedEmbedding | None = None  # where the sum of its copies is EDGC's
        self.installed = False  # on a model
        self.completed = 0  # steps, those of this process
        self.report: WindowReport | None = None  # of the last window

    def close(self) -> None:
        """Report what was seen since the last window of a run that ends before its last step, and its sums. Give
        Megatron its functions back. The model's bucket groups stay EDGC's: they end with the model.

        Every process calls this; no step may follow.
        """
        try:
            self._end_early()
        finally:
            self.seam.close()

    def install(self, chunks: list[nn.Module]) -> list[nn.Module]:
        """Take over the gradient reduction of the wrapped model chunks, and return them: a ``post_wrap_hook``.

        Every process calls this at the same point, before a checkpoint is loaded.
        """
        self.seam.hold()
        if self.chunks:
            raise ConfigError(
                "EDGC was given a second model that Megatron's DDP has wrapped, and reduces the gradients of one. If "
                "this run does not train it, build it with wrap_with_ddp=False"
            )
        self._take_model(chunks)
        self.run = described_run(self.args)
        parameter = next((one for chunk in chunks for one in chunk.parameters()), None)  # a chunk may have no layers
        device = torch.device("cpu") if parameter is None else parameter.device  # then ``_plan`` refuses the stage
        warn_of_kernels(self.config, device)
        plan = self._plan(device)
        self.config, self.keys = plan.config, plan.keys
        weight_times = self._time_weights()
        sent_back = self._message_costs(device)
        message_choice = choose_messages(self.config, self.args, sent_back)
        for line in (*plan.warnings, *filter(None, [message_choice.warning])):
            warn(line)

        self.driver = StepDriver(
            self.keys, self.stages, self.config.ranks.window, lambda: int(self.args.curr_iteration), self._loss_scale
        )
        overlap = Overlap(device)
        for stage in self.stages:
            stage.attach(self.config, overlap, self.driver.step, self.run)
        backward = self._timed_backward(device)
        self._wrap_finalize()
        self._wrap_train_step()
        if self.run.pipeline_stages > 1:
            self.messages = PipelineMessages(self.config, self.args, self.chunks, self.driver.step, self.run.repeatable)
            p2p_communicator.install(self.messages, self.seam)

        controller = message_controller = None
        if dist.get_rank() == 0:
            of_layers = [sent_back.get(k.pipeline_stage) if k.kind is StageKind.LAYERS else None for k in plan.keys]
            controller = plan.controller(reduction_sizes(self.config, self.run), of_layers)
            message_controller = self._message_controller(message_choice)
        self.windows = WindowExchange(self.driver, self.stages, backward, controller, self.messages, message_controller)
        self.windows.adopt_plans()
        self.reporter = Reporter(
            self.config, self.run, self.args.log_interval, get_tensorboard_writer, packages=["megatron-core"]
        )
        apart = self.stages[0].embedding
        embedding_bytes = None if apart is None else apart.nbytes
        self.reporter.start(
            plan, message_choice.settings, sent_back, embedding_bytes, embedding_apart(self.args), weight_times
        )
        if controller is not None:
            warn_of_budget(controller)
        self._install_checkpoints()
        self.installed = True
        return chunks

    def _take_model(self, chunks: Sequence[nn.Module]) -> None:
        """Check the model's chunks, and learn from them what Megatron's arguments do not say."""
        self.chunks = [chunk for chunk in chunks if isinstance(chunk, DistributedDataParallel)]
        if len(self.chunks) < len(chunks):
            others = sorted({type(chunk).__name__ for chunk in chunks if chunk not in self.chunks})
            raise ConfigError(f"--edgc needs Megatron's DDP, not {', '.join(others)}")
        for chunk in self.chunks:
            check_ddp(chunk.ddp_config, self.args)
        self.model_config = get_model_config(chunks[0])
        if not compresses_messages(self.config, self.args, self.model_config):
            self.config, self.requested = self.config.replace(pp="off"), self.requested.replace(pp="off")

    def _message_controller(self, choice: MessageChoice) -> Controller | None:
        """The controller of messages between stages; None where none are compressed."""
        if self.messages is None or choice.settings is None:
            return None
        stages = [
            ControlledStage(matrices, excluded=boundary.sender in choice.left_alone)
            for matrices, boundary in zip(self.messages.specs(), self.messages.boundaries, strict=True)
        ]
        return Controller(choice.settings, self.run.iterations, stages)

    def _install_checkpoints(self) -> None:
        """Save EDGC's state with Megatron's, and load it with that."""
        state = RunState(
            self.args,
            self.requested,
            self.config,
            self.keys,
            self.stages,
            layers_of_stages(self.chunks),
            self.windows.controller,
            self.messages,
            self.windows.message_controller,
        )
        self.saver = CheckpointSaver(state)
        CheckpointHooks(state, self.chunks, self.saver, self._resume).install(self.seam)

    def _plan(self, device: torch.device) -> RunPlan:
        """The same plan on every process, and the stages of this one. A tied embedding is one of them unless the run
        never compresses anything.
        """
        stage = parallel_state.get_pipeline_model_parallel_rank()
        tied = TiedEmbedding(self.chunks) if self.config.pipeline.fuse_embedding_sync else None
        self.stages = stages_of(self.chunks, stage, device, tied)
        empty = self._empty_stages(stage)
        if empty and tied is not None and self.requested.pipeline.fuse_embedding_sync is None:
            self.config = self.config.replace(
                fuse_embedding_sync=False
            )  # the embedding is then a parameter of its stage
            self.stages, tied = stages_of(self.chunks, stage, device), None
            empty = self._empty_stages(stage)
        if empty:
            beside = " besides a tied embedding; give --edgc-no-fuse-embedding-sync" if tied is not None else ""
            raise ConfigError(f"pipeline stage {', '.join(empty)} has no parameters to train{beside}")
        layers = self.stages[0]
        # probing is no training traffic
        communicator = Communicator.uncounted(layers.process_group)
        cost = reduction_cost(layers.units_of_parameters, self.config, self.run, communicator, device)
        plan = plan_run(self.config, self.run, self._gather_process_stages(cost))
        given_back = not plan.compresses and not plan.tries  # else a resumed run has one stage more, or less
        if given_back and tied is not None and self.requested.pipeline.fuse_embedding_sync is None:
            # then Megatron's own sums will do, overlapped and scattered
            self.stages, tied = stages_of(self.chunks, stage, device), None
            dense = plan_run(
                plan.config.replace(fuse_embedding_sync=False), self.run, self._gather_process_stages(cost)
            )
            plan = replace(plan, config=dense.config, stages=dense.stages)
        if tied is not None:
            tied.install(self.seam)
        self.tied = tied
        return plan

    def _empty_stages(self, stage: int) -> list[str]:
        """The stages that reduce nothing but a tied embedding, counted from 1; the same on all processes."""
        own = next((one for one in self.stages if one.key.kind is StageKind.LAYERS), None)
        empty = own is None or not any(parameter.elements for parameter in own.parameters)
        found = {index for index in all_gather_objects(stage + 1 if empty else None) if index}
        return [str(index) for index in sorted(found)]

    def _gather_process_stages(self, cost: StageCost | None) -> list[list[ProcessStage]]:
        """What each process knows of its stages. Experts and embedding have no cost: the layers around them pay."""
        own = [
            ProcessStage(stage.key, tuple(stage.parameters), cost if stage.key.kind is StageKind.LAYERS else None)
            for stage in self.stages
        ]
        return all_gather_objects(own)

    def _message_costs(self, device: torch.device) -> dict[int, StageCost]:
        """The cost of gradients that each stage sends to the one before, by sender, where anything depends on it."""
        config = self.config
        messages = config.pipeline.messages
        decides = messages.needs_rank or (messages.optional and messages.which != "off")
        timed = decides or (config.rank_policy is RankPolicy.ENTROPY and config.ranks.align)
        if self.run.pipeline_stages == 1 or not timed:
            return {}
        found = all_gather_objects(message_costs(config, self.args, device))
        senders = sorted({sender for costs in found for sender in costs})
        worst = {sender: slowest([costs.get(sender) for costs in found]) for sender in senders}
        return {sender: cost for sender, cost in worst.items() if cost is not None}

    def _time_weights(self) -> GatherTimes | None:
        """Decide whether updated weights are rounded where that is left to their times; these times. The same on every
        process. Experts follow the layers around them.
        """
        weights, gbps = self.config.formats.weights, self.config.ranks.link_gbps
        if weights.format is None or not weights.optional:
            return None
        times = GatherTimes.slowest(all_gather_objects(self.stages[0].gather_times(weights.format, gbps)))
        pays = times is not None and times.rounding_pays
        self.config = self.config.replace(param_wire=weights.format if pays else "off")
        return times

    def _timed_backward(self, device: torch.device) -> Spans:
        """Timed backward passes of the micro-batches of measured iterations."""
        spans, sampler = Spans(device), self.stages[0].reducers[0].observer.sampler
        for chunk in self.chunks:
            BackwardTimer(chunk, lambda: sampler.measures(self.args.curr_iteration), spans)
        return spans

    def _wrap_finalize(self) -> None:
        """Megatron keeps a ``finalize_model_grads_func`` that is already set, and calls it once a training step."""
        finalize: Callable[..., Any] = self.model_config.finalize_model_grads_func or finalize_model_grads

        def with_edgc(*args: Any, **kwargs: Any) -> Any:
            result = finalize(*args, **kwargs)
            self.step()
            return result

        self.seam.replace(self.model_config, "finalize_model_grads_func", with_edgc)

    def _wrap_train_step(self) -> None:
        """Learn the training loss of each step, the first of those that Megatron returns on the last pipeline stage."""

        def with_edgc(*args: Any, **kwargs: Any) -> Any:
            result = train_step(*args, **kwargs)
            losses, *_ = result
            loss = next(iter(losses.values()), None)
            if isinstance(loss, Tensor) and loss.numel() == 1:
                self.note_loss(loss)
            return result

        train_step = self.seam.replace(training, "train_step", with_edgc)

    def _resume(self, iteration: int) -> None:
        """A checkpoint of this iteration has been loaded, on process 0 the controllers' state with it."""
        self.windows.resume(iteration)
        self.reporter.resume(self.driver.plan, self.windows.controller)
        for stage in self.stages:
            for group in stage.groups:
                group.forget_weights()

    def _loss_scale(self) -> Tensor | None:
        """What gradients are multiplied with, 0-dimensional."""
        if not self.scaled:
            return None
        if self.model_config.grad_scale_func is None:
            raise StepError(
                "this run scales its loss, and EDGC does not know the scale: set config.grad_scale_func, as Megatron's "
                "own loop does (optimizer.scale_loss), before the first step"
            )
        device = self.stages[0].device
        scale = self.model_config.grad_scale_func(torch.ones((), device=device))
        return torch.as_tensor(scale, device=device).reshape(())  # Megatron's own has one element in one dimension

    def step(self) -> None:
        """After all reductions of a step, before the optimizer's: count it; at the end of a window exchange what was
        seen and adopt process 0's plan. Megatron calls it with ``finalize_model_grads_func``.

        Raises ``StepError`` for a step whose gradients must not reach the weights.
        """
        iteration = self.args.curr_iteration
        self._check_tied(iteration)
        self._check_messages(iteration)
        for stage in self.stages:
            stage.end_step()
        if not self.scaled:
            self._check_sums(iteration)
        elif not self._all_finite():
            self.driver.roll_back(iteration)
            if self.messages is not None:
                self.messages.roll_back(iteration)
        if not self.driver.end(iteration):
            return
        self.completed = iteration + 1
        self.reporter.progress(self.completed, self.driver.window_steps.seconds)
        last = self.completed == self.run.iterations
        if last or self.driver.closes_window(iteration):
            self.report = self.windows.exchange(self.completed, lambda: self.saver.keep_controllers(iteration))
            self.reporter.window(self.report, last)

    def note_loss(self, loss: Tensor | float) -> None:
        """The training loss of the step that has just ended, on processes that know it: one number. EDGC then watches
        it (docs/algorithm.md, 10). Megatron's own loop needs no call. Raises ValueError for more than one number.
        """
        self.driver.note_loss(loss)

    def _end_early(self) -> None:
        if not self.completed or self.completed == self.run.iterations:
            return
        if not dist.is_initialized():  # Megatron has ended it, as after --exit-signal-handler-for-training
            return
        if self.report is None or self.report.iteration < self.completed:
            self.reporter.window(self.windows.exchange(self.completed), last=True)
        else:
            self.reporter.end(self.report)

    def _check_tied(self, iteration: int) -> None:
        """Raises ``StepError`` where nothing has asked for the sum of a tied embedding that EDGC has taken over.

        On every process: one that went on would wait for the others.
        """
        if self.tied is None:
            return
        asked, self.tied.asked = self.tied.asked, False
        if not asked:
            raise StepError(
                f"iteration {iteration + 1}: the gradient of the tied embedding was not summed: this run's "
                "finalize_model_grads_func does not call Megatron's finalize_model_grads. Call it there, or, if your "
                "function itself sums both copies, give --edgc-no-fuse-embedding-sync"
            )

    def _check_messages(self, iteration: int) -> None:
        """Raises ``StepError`` where messages were to be compressed and did not pass through EDGC, on every process."""
        if self.messages is None or not self.messages.directions or self.messages.began(iteration):
            return
        raise StepError(
            f"iteration {iteration + 1}: messages between stages did not pass through EDGC: this run gives Megatron's "
            "schedule a p2p_communicator of its own. Give --edgc-pp off"
        )

    def _check_sums(self, iteration: int) -> None:
        """Without a loss scale the optimizer skips no step: a sum that is not finite would reach the weights.

        Megatron's own check looks at the local gradients, before they are summed.
        """
        indices = self.driver.not_finite()
        if not indices:
            return
        what = f"iteration {iteration + 1}: the summed gradients of {', '.join(map(str, indices))} are not finite"
        if self.args.check_for_nan_in_loss_and_grad:
            raise NonFiniteSum(
                f"{what}. The step is not applied: resume from the last checkpoint. With Megatron's "
                "--no-check-for-nan-in-loss-and-grad the optimizer would apply them"
            )
        message = f"{what}; the optimizer applies them, as --no-check-for-nan-in-loss-and-grad asks"
        warn(message, self.stages[0].process_group)

    def _all_finite(self) -> bool:
        """Whether all gradients are finite on every process, whoever has summed them. Else the optimizer skips."""
        gradients = [
            bucket.grad_data
            for chunk in self.chunks
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups
            for bucket in group.buckets
        ]
        everywhere = all_finite(gradients).to(torch.int32)
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        return bool(everywhere)
