"""Data parallelism of a plain torch module: one stage, whose gradients are averaged over a group of processes."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from edgc.arithmetic import own_arithmetic
from edgc.byte_counts import ByteCount, RunBytes
from edgc.comm.collectives import AllReduce, Communicator, all_reduce_bytes
from edgc.comm.objects import ProcessGroup, all_gather_objects, all_processes, broadcast_object, processes
from edgc.comm.overlap import Handle, Overlap
from edgc.compress.reducer import GradientReducer
from edgc.config import ConfigError, EDGCConfig, flag
from edgc.hosts.agreement import JOB_SETTINGS, check_run, check_values
from edgc.hosts.checkpoint import (
    STATE_VERSION,
    load_stage,
    misfit,
    restore_measurements,
    resume_controller,
    stage_state,
)
from edgc.hosts.costs import reduction_cost, reduction_sizes
from edgc.hosts.exchange import WindowExchange
from edgc.hosts.module_parameters import ModuleParameters, check_missing
from edgc.hosts.reporting import Reporter
from edgc.hosts.stage import Stage
from edgc.hosts.steps import NO_STEP, StepDriver
from edgc.hosts.units import MIN_UNIT_BYTES, Unit, Units, cut
from edgc.hosts.user_warnings import warn, warn_of_budget, warn_of_kernels
from edgc.observe.window import WindowReport
from edgc.plan.controller import rounded_all
from edgc.plan.run import Run
from edgc.plan.run_plan import plan_run
from edgc.plan.stages import ProcessStage, StageKey, StageKind
from edgc.specs import Parameter
from edgc.timing import Spans

KEY = StageKey(StageKind.LAYERS, 0)
# Taken as asked for, not as the run before has resolved it: a window follows from the length of the run.
KEPT_AS_REQUESTED = (*JOB_SETTINGS, "window")
REMEDY = "set reset_state to go on without it"  # where a state cannot be taken up
STATE_KEYS = {
    *("version", "steps", "requested", "config", "controller", "layout", "tensors", "shapes", "measurements", "bytes")
}


Result = TypeVar("Result")
Arguments = ParamSpec("Arguments")


def device_of(device: torch.device) -> AbstractContextManager[object]:
    """A block in which this is the current CUDA device, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _on_its_device(
    method: Callable[Concatenate["EDGCState", Arguments], Result],
) -> Callable[Concatenate["EDGCState", Arguments], Result]:
    """A method during which the current CUDA device is that of the module.

    NCCL sends objects from the current device, which is the first one in a script that never sets it.
    """

    @wraps(method)
    def call(state: "EDGCState", /, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with device_of(next(iter(state.parameters.names)).device):
            return method(state, *args, **kwargs)

    return call


class EDGCState:
    """What averages a module's gradients, and all that it remembers from step to step.

    It is the state of ``ddp_hook``; without ``DistributedDataParallel`` call ``step`` after each backward pass.

    1. Parameters are cut into a few units (``edgc.hosts.units``), in the order in which a backward pass comes to them.
       Units do not follow DDP's buckets, which DDP rebuilds after the first step: so no state ever moves.
    2. A unit's reduction starts when its last gradient has come, and runs beside the rest of the backward pass.
    3. When all have ended, the processes agree whether all averages are finite. If not, every gradient becomes NaN on
       every process, as a ``GradScaler`` expects, and error feedback and factors are those of before the step.
    4. At the end of a window process 0 decides on the ranks of the next one.

    Args:
        module: the bare module, not one that ``DistributedDataParallel`` has wrapped. Embeddings are told by their
            type, an output layer by the attribute ``is_embedding_or_output_parameter`` of its weight.
        config: settings, or the name of a preset.
        iterations: optimizer steps of the run, those before a checkpoint included.
        group: the processes that average; None: all.
        scaler: the ``torch.amp.GradScaler`` that scales the loss, if one does.
        learning_rate: by step from 0, finite and at least 0, in any unit. A volume spends more bytes in steps of a
            higher rate; None: the same in all.
        unit_bytes: of gradients that are worth a reduction of their own.
        ignored: names of parameters whose gradients are not to be averaged.

    Raises ``ConfigError`` for settings that need a pipeline or sharded weights. Collectives begin with ``start``.
    """

    def __init__(
        self,
        module: nn.Module,
        config: EDGCConfig | str = "balanced",
        *,
        iterations: int,
        group: ProcessGroup | None = None,
        scaler: torch.amp.GradScaler | None = None,
        learning_rate: Callable[[int], float] | None = None,
        unit_bytes: int = MIN_UNIT_BYTES,
        ignored: Collection[str] = (),
    ):
        self.requested = data_parallel_config(config)
        self.requested.check_run(iterations)
        self.iterations, self.group, self.scaler, self.unit_bytes = int(iterations), group, scaler, unit_bytes
        if learning_rate is not None and not callable(learning_rate):
            raise ConfigError(
                f"learning_rate is of type {type(learning_rate).__name__}: must be a function of the step"
            )
        self.learning_rate = learning_rate
        self.parameters = ModuleParameters(module, ignored)
        self.steps = 0  # averaged so far
        self.report: WindowReport | None = None  # of the last window
        self.reporter: Reporter | None = None  # from the first step on
        self._started = self._ended = self._warned_of_nan = False
        self.futures: list[tuple[torch.futures.Future[Tensor], Tensor]] = []  # that ``ddp_hook`` has to resolve
        self._handles: list[Handle] = []
        self._plain = False  # whether gradients of this step are summed as DDP itself would
        self._copies: list[tuple[Tensor, Tensor]] = []  # gradients that are not contiguous, and copies that are

    def __deepcopy__(self, memo: dict[int, Any]) -> "EDGCState":
        """Itself: a copy of a ``DistributedDataParallel`` model has no hook, and only refers to this state."""
        return self

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        """None: a saved ``DistributedDataParallel`` model has no hook. ``state_dict`` is what a checkpoint needs."""
        return type(None), ()

    # -- the run ------------------------------------------------------------------------------------------------------

    @_on_its_device
    def start(self) -> None:
        """Time the link, plan the run and build its reducers, once; the first step does so where nobody has.

        Every process of the group must call this together. Raises ``ConfigError`` for ranks that do not fit the module,
        and where processes have other iterations, settings or parameters.
        """
        if not self._started:
            self._build(self.requested, timed=True)

    def _build(self, config: EDGCConfig, timed: bool) -> None:
        check_run(self.requested, self.iterations, self.parameters, self.group)
        self._close_log()
        self.report = None
        parameters = self.parameters
        self.device = parameters.device
        group = self.group or all_processes()
        uncounted = Communicator.uncounted(group)
        self.processes, self._process = uncounted.world_size, uncounted.process
        run = Run(
            iterations=self.iterations,
            replicas=self.processes,
            value_bytes=parameters.most_frequent_itemsize,
            overlapped=True,
            repeatable=True,  # a step whose sum is not finite changes no state
            learning_rate=self.learning_rate,
        )
        # gradients come about in the reverse order of the parameters
        names = cut(((name, p.nbytes) for p, name in reversed(parameters.names.items())), self.unit_bytes)
        described = [[parameters.described[name] for name in unit] for unit in names]
        cost = reduction_cost(described, config, run, uncounted, self.device) if timed else None
        own = ProcessStage(KEY, tuple(parameter for unit in described for parameter in unit), cost)
        self.run = run
        self.plan = plan_run(config, run, all_gather_objects([own], group))
        self.config = self.plan.config

        step_bytes = ByteCount(
            host=sum(all_reduce_bytes(parameter.nbytes, self.processes) for parameter in parameters.names),
            fp32=sum(all_reduce_bytes(4.0 * parameter.numel(), self.processes) for parameter in parameters.names),
        )
        self.stage = Stage(KEY, self.device, step_bytes)
        self.communicator = Communicator(group, self.stage.traffic)
        self.stage.units = Units([self._unit(*unit) for unit in zip(names, described, strict=True)])
        self.overlap = Overlap(self.device)
        window = self.config.ranks.window
        self.driver = StepDriver(self.plan.keys, [self.stage], window, lambda: self.steps, self._loss_scale)
        self._sizes = reduction_sizes(self.config, run)
        controller = self.plan.controller(self._sizes) if self._process == 0 else None
        self.windows = WindowExchange(self.driver, [self.stage], Spans(self.device), controller, group=group)
        self.windows.adopt_plans()
        self._started = True

    def _announce(self) -> None:
        """Report the start before the first step, not when built: a run that is resumed is built twice."""
        warn_of_kernels(self.config, self.device, self.group)
        for warning in self.plan.warnings:
            warn(warning, self.group)
        self.reporter = Reporter(self.config, self.run, group=self.group)
        self.reporter.start(self.plan)
        if self.steps:
            self.reporter.resume(self.driver.plan, self.windows.controller)
        elif self.windows.controller is not None:  # the run before has said it
            warn_of_budget(self.windows.controller, self.group)

    def _unit(self, names: Sequence[str], parameters: Iterable[Parameter]) -> Unit:
        return Unit(names, GradientReducer.of(parameters, self.config, self.communicator, self.device, self.run))

    def _loss_scale(self) -> Tensor | None:
        if self.scaler is None:
            return None
        scale: Tensor = self.scaler.scale(torch.ones((), device=self.device))
        return scale

    # -- one step -----------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Average the ``grad`` of every parameter in place. For modules that ``DistributedDataParallel`` does not wrap.

        Every process of the group must call this after the backward pass. Raises RuntimeError where a parameter has no
        gradient, and where one has a gradient that was not there, or required none, when EDGC was given the module.
        """
        gradients = self.parameters.gradients()
        self.begin()
        self.add(gradients)
        self.end()

    @_on_its_device
    def begin(self) -> None:
        """A step begins: no gradient has come. Raises RuntimeError after ``close`` and after a step that has failed.

        Before the first step raises ``ConfigError`` where the processes have different parameters.
        """
        if self._ended:
            raise RuntimeError(
                "this EDGC state was closed, or a step of it has failed, or a saved state did not fit it"
            )
        self.start()
        if self.reporter is None:
            check_values(self.parameters, self.group)
            self._announce()
        self._handles, self._copies = [], []
        step = self.driver.step()
        self.stage.units.begin()
        for reducer in self.stage.reducers:
            reducer.begin(step.iteration)
        self._plain = all(reducer.plain for reducer in self.stage.reducers)

    def awaits(self, parameters: Iterable[Tensor]) -> bool:
        """Whether a step is under way in which the gradients of these have not come."""
        if not self._started:
            return False
        names = (self.parameters.names.get(one) for one in parameters)  # type: ignore[call-overload]
        return self.stage.units.awaits(name for name in names if name is not None)

    def add(self, gradients: Mapping[Tensor, Tensor], buffer: Tensor | None = None) -> None:
        """These gradients, by parameter, are complete on this process. They will hold the averages after ``end``.

        ``buffer``: where they are, and nothing else; a plain sum is then one of this buffer, as DDP's own is. Every
        process must add them in the same order. Raises RuntimeError for a parameter that the module does not have.
        """
        named = self.parameters.named(gradients)
        if self._plain and buffer is not None:
            self._sum_buffer(named, buffer)
            return
        strided = {name: gradient for name, gradient in named.items() if not gradient.is_contiguous()}
        copies = {name: gradient.contiguous() for name, gradient in strided.items()}
        self._copies += [(strided[name], copy) for name, copy in copies.items()]
        for unit in self.stage.units.add({**named, **copies}):
            self._reduce(unit)

    @torch.no_grad()
    def _sum_buffer(self, gradients: Mapping[str, Tensor], buffer: Tensor) -> None:
        """Start a plain average of a buffer that has these gradients."""
        step = self.driver.step()
        with own_arithmetic(self.device):
            for unit in self.stage.units.of(gradients):
                own = {name: gradients[name] for name in unit.names if name in gradients}
                unit.reducer.observer.measure(own, step.iteration, step.loss_scale)
            buffer.div_(self.processes)
        self.stage.units.add(gradients)
        message = AllReduce(self.communicator, buffer)
        self._handles.append(self.overlap.start_own(message.start, self.stage.spans))

    @torch.no_grad()
    def _reduce(self, unit: Unit) -> None:
        """Start the reduction of a unit."""
        step, reducer = self.driver.step(), unit.reducer
        gradients = unit.gradients
        with own_arithmetic(self.device):
            reducer.observer.measure(gradients, step.iteration, step.loss_scale)
            torch._foreach_div_(list(gradients.values()), self.processes)
        reduction = reducer.reduce(gradients, step.iteration, step.loss_scale)
        memory = reducer.router.memory(gradients)
        self._handles.append(self.overlap.start(reduction, reducer.state.tensors, self.stage.spans, memory))

    @_on_its_device
    @torch.no_grad()
    def end(self) -> None:
        """Wait for the averages, judge and count the step, and close the window if it is its last one.

        Raises ``ReplicaMismatch`` where processes have drifted apart, and RuntimeError where gradients are missing.
        """
        # unless it comes to its end: reductions under way have lost their step, and no other one may go on with them
        self._ended = True
        check_missing(self.stage.units.missing)
        for handle in self._handles:
            handle.wait()
        if self.driver.plan.trial is not None:
            # Steps are compared. Compressed ones wait for whether sums are finite; in others the CPU would run ahead.
            self.overlap.synchronize()
        if self.driver.not_finite():
            self.driver.roll_back(self.steps)
            for unit in self.stage.units:
                torch._foreach_mul_(list(unit.gradients.values()), math.nan)
            skips = self.scaler is not None and self.scaler.is_enabled()
            if not skips and not self._warned_of_nan:
                self._warned_of_nan = True
                warn(
                    f"step {self.steps + 1}: gradients are not finite. EDGC makes them NaN on every process. An "
                    "optimizer that takes this step has NaN in its weights from now on. If a GradScaler scales the "
                    "loss, give it to EDGC: attach(..., scaler=...)",
                    self.group,
                )
        for gradient, copy in self._copies:
            gradient.copy_(copy)
        self._handles, self._copies = [], []  # else their memory would stay
        for reducer in self.stage.reducers:
            reducer.state.forget()
        self.stage.units.begin()
        self.stage.end_step()
        self.driver.end(self.steps)
        self.steps += 1
        self._ended = False
        last = self.steps == self.iterations
        if self.steps == self.iterations + 1:
            warn(
                f"step {self.steps} of a run of {self.iterations} iterations, as EDGC was told: it goes on, but a "
                "volume holds for those iterations alone. Each average is a step: accumulate micro-batches in no_sync",
                self.group,
            )
        if last or self.driver.closes_window(self.steps - 1):
            self._report(last)

    def note_loss(self, loss: Tensor | float) -> None:
        """The training loss of the step that has just ended, on this process: one number. EDGC then watches it
        (docs/algorithm.md, 10). A tensor may be on any device: nothing waits for it before the window ends.

        Every process may call this after each step, or none. Raises RuntimeError before the first step, and ValueError
        for anything but one number.
        """
        if not self._started or (self.driver.current is NO_STEP and not self.steps):
            raise RuntimeError("note_loss before the first step")
        self.driver.note_loss(loss)

    def _report(self, last: bool) -> None:
        assert self.reporter is not None  # since the first step
        self.report = self.windows.exchange(self.steps)
        self.reporter.window(self.report, last)

    @_on_its_device
    def close(self) -> None:
        """Report what was seen since the last window, and the run's sums. Every process of the group must call this; no
        step may follow.
        """
        stepped = self._started and self.driver.current is not NO_STEP
        if self._started and not self.steps and not self._ended:
            warn(
                "EDGC has seen no step. Give attach the DistributedDataParallel model, or call state.step() "
                "after each backward pass",
                self.group,
            )
        if stepped and not self._ended and self.steps < self.iterations:
            if self.report is None or self.report.iteration < self.steps:
                self._report(last=True)
            elif self.reporter is not None:
                self.reporter.end(self.report)
        self._close_log()
        self._ended = True

    def _close_log(self) -> None:
        if self.reporter is not None:
            self.reporter.events.close()
        self.reporter = None

    # -- checkpoints --------------------------------------------------------------------------------------------------

    @_on_its_device
    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs, the same on every process: plain values and CPU tensors. So one file is enough.

        Every process of the group must call this, between two steps. Of the error feedback it holds the sums over the
        processes, which are all that matters to training; from here on the live run has them divided evenly, as the
        resumed one will.
        """
        self.start()
        layout, tensors = {}, {}
        for name, contents, message in stage_state(self.stage, self.steps):
            layout[name], tensors[name] = contents, message.to("cpu", copy=True)
        own = [reducer.observer.measurements.state_dict() for reducer in self.stage.reducers], self.stage.byte_counts()
        everyone = all_gather_objects(own, self.group)
        controller = self.windows.controller
        return {
            "version": STATE_VERSION,
            "steps": self.steps,
            "requested": self.requested.flat(),
            "config": self.config.flat(),
            "controller": broadcast_object(None if controller is None else controller.state_dict(), self.group),
            "layout": layout,
            "tensors": tensors,
            "shapes": {name: list(parameter.shape) for name, parameter in self.parameters.described.items()},
            "measurements": [measurements for measurements, _ in everyone],
            "bytes": asdict(RunBytes.mean([counts for _, counts in everyone])),
        }

    @_on_its_device
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where ``state_dict`` was taken: at as many processes with the same bits, at others with the same sums.

        Every process of the group must call this. A run with the settings of the one before keeps the ranks that its
        link was found to allow. With ``reset_state`` nothing is taken of the state but the number of steps. Raises
        ``ConfigError`` for what is no such state, another engine, and parameters of other shapes. Where only a part of
        the state had been taken by then, no step may follow.
        """
        if "version" not in state or "steps" not in state:
            raise ConfigError("what was given is no EDGC state: it is not what state_dict has returned")
        if self.requested.job.reset_state:
            warn("starting without the EDGC state, as asked for", self.group)
            self.start()
            self.steps = state["steps"]
            self.windows.resume(self.steps)
            return
        self._check(state)
        if state["steps"] > self.iterations:
            warn(
                f"the EDGC state is of step {state['steps']}, and this run has {self.iterations} iterations: count "
                "those of the whole run, with the steps before the state",
                self.group,
            )
        requested = self.requested.flat()
        same = all(state["requested"].get(name) == requested[name] for name in requested.keys() - set(JOB_SETTINGS))
        # one process has no link that could bound ranks
        before, now = len(state["measurements"]), processes(self.group)
        same &= (before == 1) == (now == 1)
        config = self.requested
        if same:
            config = EDGCConfig.of(**{**state["config"], **{name: requested[name] for name in KEPT_AS_REQUESTED}})
        ended, self._ended = self._ended, True  # of a state that was taken in part no step may be made
        self._build(config, timed=not same)
        if same:  # resolved ranks look as if they had been asked for, and nothing was timed
            saved = state["controller"]
            self.plan = replace(self.plan, tries=saved["trials"] is not None, rounds=rounded_all(saved))
        self.steps = state["steps"]
        load_stage(
            self.stage,
            state["layout"],
            state["tensors"].__getitem__,
            self.steps,
            parts=state["config"]["engine"] == self.config.engine,
            norms=before == now,
        )
        own = state["measurements"][self._process] if before == now else []
        restore_measurements(self.stage.reducers, own)
        self.stage.restore_bytes(RunBytes.of(state["bytes"]))
        if state["config"]["engine"] == self.config.engine:
            # on every process, so that an error is one of all
            controller = self.plan.controller(self._sizes)
            resume_controller(controller, state["controller"], "the state", REMEDY, self.group)
            if self.windows.controller is not None:
                self.windows.controller = controller
        else:
            warn(
                f"the EDGC state is of a run with the engine {state['config']['engine']}, and this link asks for "
                f"{self.config.engine}: the controller starts anew",
                self.group,
            )
        self.windows.resume(self.steps)
        self._ended = ended

    def _check(self, state: Mapping[str, Any]) -> None:
        if state["version"] != STATE_VERSION:
            why = f"EDGC state of version {state['version']}: this release reads {STATE_VERSION}"
            raise ConfigError(f"{why}; {REMEDY}")
        missing = sorted(STATE_KEYS - state.keys()) or sorted(state["layout"].keys() - state["tensors"].keys())
        if missing:
            raise ConfigError(f"the EDGC state cannot be read: it lacks {', '.join(missing)}; {REMEDY}")
        engine = state["requested"]["engine"]
        if engine != self.requested.engine:
            raise ConfigError(f"EDGC state of the engine {engine}, this run has {self.requested.engine}; {REMEDY}")
        if why := misfit(state["layout"], {name: one.elements for name, one in self.parameters.described.items()}):
            raise ConfigError(f"the EDGC state has {why}; {REMEDY}")
        for name, parameter in self.parameters.described.items():
            if (shape := state["shapes"].get(name)) not in (None, list(parameter.shape)):
                why = f"{name} of shape {tuple(shape)}, where this model's has {parameter.shape}"
                raise ConfigError(f"the EDGC state has {why}; {REMEDY}")


def data_parallel_config(config: EDGCConfig | str) -> EDGCConfig:
    """The settings, or those of a preset, without what belongs to a pipeline. Raises ``ConfigError`` for settings that
    ask for more than averaged gradients.
    """
    if isinstance(config, str):
        config = EDGCConfig.from_preset(config)
    if not isinstance(config, EDGCConfig):
        raise ConfigError(
            f"config is of type {type(config).__name__}: must be an EDGCConfig, or the name of a preset. "
            "EDGCConfig.from_preset takes settings by name"
        )
    refused = {
        "pp": not config.pipeline.messages.optional,
        "fuse_embedding_sync": config.pipeline.fuse_embedding_sync,
        "param_wire": not config.formats.weights.optional,
    }
    for name, asked in refused.items():
        if asked:
            raise ConfigError(f"{flag(name)} = {config.flat()[name]}: a data-parallel module has no such messages")
    return config.replace(pp="off", param_wire="off", fuse_embedding_sync=False)
