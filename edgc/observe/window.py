"""What a window leaves behind: the record of each process, of each stage, and of the whole run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal, TypeVar

from edgc.byte_counts import ByteCount, RunBytes
from edgc.observe.averages import mean_of_finite
from edgc.observe.fidelity import Fidelity
from edgc.observe.moments import GradientStatistics
from edgc.plan.rank_plan import RankPlan
from edgc.plan.stages import StageKey
from edgc.plan.times.comm_cost import StageCost

Direction = Literal["forward", "backward"]
T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Boundary:
    """Two pipeline stages, counted from 0, and what they send: gradients ``backward``, activations ``forward``."""

    direction: Direction
    sender: int
    receiver: int

    @property
    def id(self) -> str:
        """Its name in checkpoints, which stays as it is whatever ``str`` says to the user."""
        return f"{self.direction}-{self.sender}-{self.receiver}"

    def __str__(self) -> str:
        what = "gradients" if self.direction == "backward" else "activations"
        return f"{what} from stage {self.sender + 1} to {self.receiver + 1}"


@dataclass(frozen=True)
class MessageWindow:
    """What one process, or all that send there (``merge``), saw in a window of messages over a boundary."""

    boundary: Boundary
    entropy: float  # of a message's entry, in nats
    bytes: ByteCount  # of this window
    state_bytes: float  # memory of errors and factors
    spikes: float = 0.0  # messages of which the error was scaled down (``edgc.compress.spikes``)

    @classmethod
    def merge(cls, processes: Sequence["MessageWindow"]) -> "MessageWindow":
        """One boundary from the processes that send over it: means, the largest memory, the sum of the spikes."""
        return cls(
            processes[0].boundary,
            mean_of_finite([p.entropy for p in processes]),
            ByteCount.mean([p.bytes for p in processes]),
            max(p.state_bytes for p in processes),
            sum(p.spikes for p in processes),
        )

    def to_event(self) -> dict[str, Any]:
        """Fields of the event log."""
        return {**asdict(self), "boundary": str(self.boundary), **self.bytes.to_event("bytes")}


@dataclass(frozen=True)
class StageWindow:
    """What one process, or all of them (``merge``), saw of one stage in one window; NaN where nothing was measured."""

    stage: StageKey
    entropy: float  # of an entry of the local gradient, in nats; mean over measured steps, then over processes
    residual: float  # norm of what stays unsent over that of what was to be sent; the same means
    reduce_seconds: float  # of all reductions of a step; median over steps, smallest over processes
    micro_backward_seconds: float  # of the backward pass of a micro-batch; the median, then the mean
    bytes: ByteCount  # of gradients in this window; mean over processes
    state_bytes: float  # memory of errors, factors and scales; largest over processes
    spikes: float = 0.0  # gradients of which the error was scaled down
    largest_spike: float = 0.0  # times its running norm
    energies: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)
    statistics: Mapping[str, GradientStatistics] = field(default_factory=dict, repr=False)  # by kind of layer
    fidelity: Mapping[str, Fidelity] = field(default_factory=dict, repr=False)  # by parameter
    row_shares: Mapping[str, Sequence[float]] = field(default_factory=dict, repr=False)  # see ``StageObservation``

    @property
    def cosine(self) -> float:
        """Between what the optimizer got and the true gradient: the mean over sampled entries of their parameters'
        cosines; NaN if no gradient was sampled.
        """
        seen = [(one.entries, one.gradient.cosine) for one in self.fidelity.values()]
        seen = [(entries, cosine) for entries, cosine in seen if math.isfinite(cosine)]
        entries = math.fsum(count for count, _ in seen)
        return math.fsum(count * cosine for count, cosine in seen) / entries if entries else math.nan

    def to_event(self) -> dict[str, Any]:
        """Fields of the event log, without ``energies``: all spectra would swell it."""
        event = {**asdict(self), "stage": str(self.stage), **self.bytes.to_event("dp_bytes")}
        del event["energies"], event["bytes"]
        event["fidelity"] = {name: seen.to_event() for name, seen in self.fidelity.items()}
        return event

    @classmethod
    def merge(cls, processes: Sequence["StageWindow"]) -> "StageWindow":
        """One stage from its processes: means; the shortest reductions, since the others also waited for a late one;
        the largest memory and spike; the sum of the spikes.
        """
        return cls(
            stage=processes[0].stage,
            entropy=mean_of_finite([p.entropy for p in processes]),
            residual=mean_of_finite([p.residual for p in processes]),
            reduce_seconds=min(
                (p.reduce_seconds for p in processes if math.isfinite(p.reduce_seconds)), default=math.nan
            ),
            micro_backward_seconds=mean_of_finite([p.micro_backward_seconds for p in processes]),
            bytes=ByteCount.mean([p.bytes for p in processes]),
            state_bytes=max(p.state_bytes for p in processes),
            spikes=sum(p.spikes for p in processes),
            largest_spike=max(p.largest_spike for p in processes),
            energies=_mean_values([p.energies for p in processes]),
            statistics=_by_name([p.statistics for p in processes], GradientStatistics.mean),
            # data-parallel processes saw the same sums, others hold other parts of the parameter
            fidelity=_by_name([p.fidelity for p in processes], Fidelity.total),
            row_shares=_mean_values([p.row_shares for p in processes]),
        )


@dataclass(frozen=True)
class WindowReport:
    """A closed window as every process gets it from process 0.

    ``ranks`` were in use in it, ``plan`` holds from now on, ``stages`` is what each stage saw, merged over its
    processes. ``step_seconds``: the median of its steps on process 0. ``loss``: the mean training loss; NaN where
    EDGC was not told.

    ``bytes`` are of the whole run so far, the mean over all processes; those of gradients are also of Megatron's own
    sum of a tied embedding's two copies. Of boundaries where low rank is wanted: ``message_ranks`` were in use,
    ``message_plan`` holds from now on. ``costs`` of each stage as corrected by what its reductions took in this window;
    with a volume, or a computed link, as before training.
    """

    iteration: int
    ranks: tuple[int | None, ...]
    plan: RankPlan
    stages: tuple[StageWindow, ...]
    step_seconds: float
    bytes: RunBytes
    message_ranks: tuple[int | None, ...] = ()
    message_plan: RankPlan | None = None
    messages: tuple[MessageWindow, ...] = ()
    costs: tuple[StageCost | None, ...] = ()
    loss: float = math.nan

    def to_event(self) -> dict[str, Any]:
        """Fields of the event log."""
        stages = [stage.to_event() for stage in self.stages]
        messages = [message.to_event() for message in self.messages]
        event = {**asdict(self), "stages": stages, "messages": messages, **self.bytes.to_event()}
        del event["bytes"]
        return event


def _mean_values(several: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, list[float]]:
    """Means by matrix over the processes: replicas saw the same sums, others hold other parts of the stage."""
    means = {}
    for name in several[0]:
        seen = [one[name] for one in several if len(one.get(name, ())) == len(several[0][name])]
        means[name] = [fmean(values) for values in zip(*seen, strict=True)]
    return means


def _by_name(several: Sequence[Mapping[str, T]], combine: Callable[[list[T]], T]) -> dict[str, T]:
    """What the values of each name combine to, of those that have it."""
    names = dict.fromkeys(name for one in several for name in one)
    return {name: combine([one[name] for one in several if name in one]) for name in names}


def by_layer_kind(steps: Sequence[Mapping[str, GradientStatistics]]) -> dict[str, GradientStatistics]:
    """Statistics by kind of layer: means over the layers of a kind, then over steps."""
    mean = GradientStatistics.mean
    return _by_name([_by_name([{layer_kind(name): one} for name, one in step.items()], mean) for step in steps], mean)


def layer_kind(name: str) -> str:
    """The kind of layer of a parameter: ``linear_fc1.weight`` of ``decoder.layers.3.mlp.linear_fc1.weight``."""
    return ".".join(name.split(".")[-2:])
