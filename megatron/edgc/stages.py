"""What one process reduces, by stage of the plan: its pipeline stage's gradients, and apart from them its experts'."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.utils import unwrap_model
from torch import Tensor

from edgc.byte_counts import ByteCount
from edgc.comm.collectives import Communicator
from edgc.comm.overlap import Overlap
from edgc.comm.wire import wire
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.hosts.stage import Stage
from edgc.hosts.steps import Step
from edgc.hosts.units import MAX_UNITS, MIN_UNIT_BYTES, Unit, Units, cut, cut_shards
from edgc.plan.rank_plan import RankPlan
from edgc.plan.run import Run
from edgc.plan.stages import StageKey, StageKind
from edgc.plan.times.gather_times import GatherTimes
from edgc.specs import Parameter, shard_bounds
from megatron.edgc.bucket_groups import EDGCBucketGroup, StageReductions, process_group, sum_bytes
from megatron.edgc.embedding import COPIES, TIED, TiedEmbedding, copies_bytes, tied_copy
from megatron.edgc.weights import WeightGather, gather_times

Names = dict[torch.nn.Parameter, str]
WORDS = "embedding.word_embeddings.weight"


@dataclass(frozen=True)
class NamedBucketGroup:
    """A bucket group of one model chunk and the names of its parameters, unique on this process."""

    group: _ParamAndGradBucketGroup
    chunk: int
    names: Names
    described: tuple[Parameter, ...]

    @property
    def dtype(self) -> torch.dtype:
        """The type of the gradients."""
        found: torch.dtype = self.group.buckets[0].grad_data.dtype
        return found

    @property
    def sizes(self) -> list[tuple[Parameter, int]]:
        """The parameters, each with the bytes of its gradient."""
        return [(parameter, parameter.elements * self.dtype.itemsize) for parameter in self.described]

    def shards(self, processes: int) -> list[tuple[Parameter, list[int]]]:
        """The parameters, each with its values in the shards of each process."""
        places = {
            parameter: (*start_end, bucket.grad_data.numel() // processes)
            for bucket in self.group.buckets
            for parameter, start_end in bucket.param_to_index.items()
        }
        found = []
        for parameter, described in zip(self.names, self.described, strict=True):
            start, end, size = places[parameter]
            bounds = shard_bounds(start, end, size, processes)
            found.append((described, [after - before for before, after in pairwise(bounds)]))
        return found


class MegatronStage(Stage):
    """The bucket groups of one process that share a rank plan, taken over once ``attach`` has been called.

    ``embedding``: the gradient of a tied embedding that Megatron itself sums again, with the copy on another stage.
    """

    def __init__(
        self, key: StageKey, named: Sequence[NamedBucketGroup], device: torch.device, embedding: Tensor | None = None
    ):
        step_bytes = ByteCount() if embedding is None else copies_bytes(embedding)
        for one in named:
            for bucket in one.group.buckets:
                for parameter in one.names.keys() & bucket.param_to_index.keys():
                    gradient = bucket.grad_data[slice(*bucket.param_to_index[parameter])]
                    step_bytes += sum_bytes(one.group, gradient)
        super().__init__(key, device, step_bytes)
        self.embedding = embedding
        self.named = named
        self.groups: list[EDGCBucketGroup] = []
        self.param_wire = "off"  # the format in which updated weights travel

    @property
    def parameters(self) -> list[Parameter]:
        return [parameter for one in self.named for parameter in one.described]

    @property
    def units_of_parameters(self) -> list[list[Parameter]]:
        """What is reduced together: of one chunk, whose gradients come together, and of one type."""
        least = max(MIN_UNIT_BYTES, -(-sum(nbytes for one in self.named for _, nbytes in one.sizes) // MAX_UNITS))
        found: list[list[Parameter]] = []
        for _, run in groupby(self.named, key=lambda one: (one.chunk, one.dtype)):
            named = list(run)
            units = cut((pair for one in named for pair in one.sizes), least)
            # few groups hand most of the gradients over at once: no order of these would let a unit start earlier
            at_once = len(named) <= len(units)
            if len(units) > 1 and at_once and named[0].group.ddp_config.use_distributed_optimizer:
                processes = dist.get_world_size(self.process_group)
                units = cut_shards([pair for one in named for pair in one.shards(processes)], len(units))
            found += units
        return found

    @property
    def process_group(self) -> dist.ProcessGroup:
        return process_group(self.named[0].group)

    def attach(self, config: EDGCConfig, overlap: Overlap, step: Callable[[], Step], run: Run) -> None:
        """Take over the collectives of every bucket group."""
        communicator = Communicator(self.process_group, self.traffic)
        if communicator.world_size == 1:
            config = config.replace(dense_wire="fp32")  # the sum is what is there; rounding would change it
        units = []
        for parameters in self.units_of_parameters:
            reducer = GradientReducer.of(parameters, config, communicator, self.device, run)
            units.append(Unit([parameter.name for parameter in parameters], reducer))
        self.units = Units(units)
        sums = StageReductions(self.units, communicator, self.spans, overlap, step, run.reruns)
        for one in self.named:
            weights = WeightGather(Communicator(self.process_group, self.weights), self.weights_by_host)
            self.groups.append(EDGCBucketGroup.attach(one.group, sums, weights, one.names))
        self.gather_weights(config.formats.param_wire)

    def gather_times(self, name: str, gbps: float | None) -> GatherTimes | None:
        """What gathering the largest bucket's weights takes (``megatron.edgc.weights``). Every process calls this."""
        return gather_times([one.group for one in self.named], name, self.process_group, gbps)

    def gather_weights(self, name: str) -> None:
        """Gather updated weights in this format from now on, or, if it is ``off``, as Megatron does."""
        self.param_wire = name
        for group in self.groups:
            group.edgc_weights.wire = None if name == "off" else wire(name)

    def state_bytes(self) -> int:
        """With the own shards of the weights as the others have them."""
        kept = [shard for group in self.groups for shard in group.edgc_weights.before or ()]
        return super().state_bytes() + sum(shard.nbytes for shard in kept)

    def end_step(self) -> None:
        """Megatron's sum of a tied embedding's two copies is sent beside the buckets."""
        super().end_step()
        if self.embedding is not None:
            self.traffic.count_all_reduce(self.embedding, COPIES)
            self.count_unplanned(copies_bytes(self.embedding))
        for group in self.groups:
            group.keep_weights()


class EmbeddingStage(MegatronStage):
    """The tied embedding, whose copies on the first and the last stage EDGC sums in one sum."""

    def __init__(self, tied: TiedEmbedding, device: torch.device):
        super().__init__(StageKey(StageKind.EMBEDDING, 0), [], device)
        self.tied = tied
        self.step_bytes = tied.step_bytes()

    @property
    def parameters(self) -> list[Parameter]:
        return [Parameter(TIED, self.tied.gradient().shape, embedding=True)]

    @property
    def process_group(self) -> dist.ProcessGroup:
        return self.tied.process_group

    def attach(self, config: EDGCConfig, overlap: Overlap, step: Callable[[], Step], run: Run) -> None:
        """Build the reducer; Megatron's own loop asks for the sum (``TiedEmbedding.install``)."""
        communicator = Communicator(self.process_group, self.traffic)
        reducer = GradientReducer.of(self.parameters, config, communicator, self.device, run)
        self.units = Units([Unit([TIED], reducer)])
        self.tied.attach(reducer, self.spans, step)

    def set_rank(self, active: Sequence[int | None], index: int, plan: RankPlan, by_host: bool = False) -> None:
        """An embedding without a matrix has no warm-up: where entropy sets ranks it goes with the first stage."""
        own = self.tied.reducer.router.selection.matrices or active[index] is not None
        super().set_rank(active, index if own else 0, plan, by_host)


def stages_of(
    chunks: Sequence[DistributedDataParallel],
    pipeline_stage: int,
    device: torch.device,
    tied: TiedEmbedding | None = None,
) -> list[MegatronStage]:
    """The stages of this process: that of its pipeline stage first, also if no other holds a copy of it; its experts,
    if others do; the tied embedding, if EDGC sums it and this process has it.
    """
    stages: list[MegatronStage] = []
    apart = tied.weight if tied is not None else None
    copy = tied_copy(chunks) if tied is None else None
    embedding: Tensor | None = None if copy is None else getattr(copy[1], "main_grad", None)  # none if it is frozen
    for part in (StageKind.LAYERS, StageKind.EXPERTS):
        named = [one for index, chunk in enumerate(chunks) for one in _named(chunk, index, len(chunks), part, apart)]
        if named and (part is StageKind.LAYERS or dist.get_world_size(process_group(named[0].group)) > 1):
            key = StageKey(part, pipeline_stage)
            stages.append(MegatronStage(key, named, device, embedding if part is StageKind.LAYERS else None))
    if tied is not None and tied.weight is not None:
        stages.append(EmbeddingStage(tied, device))
    return stages


def _named(
    chunk: DistributedDataParallel, index: int, chunks: int, kind: StageKind, apart: torch.nn.Parameter | None
) -> list[NamedBucketGroup]:
    # of the bare model, so that a precision wrapper does not change them; chunks number their layers from 0 each
    prefix = f"chunk{index}." if chunks > 1 else ""
    model = unwrap_model(chunk)
    of_model = {parameter: name for name, parameter in model.named_parameters()}
    groups = chunk.expert_parallel_bucket_groups if kind is StageKind.EXPERTS else chunk.bucket_groups
    named = []
    for group in groups:
        names = {
            parameter: of_model[parameter]
            for bucket in group.buckets
            for parameter in bucket.params_list
            if parameter is not apart
        }
        described = tuple(describe(prefix, name, parameter, is_tied(model)) for parameter, name in names.items())
        prefixed = {parameter: prefix + name for parameter, name in names.items()}
        named.append(NamedBucketGroup(group, index, prefixed, described))
    return named


def is_tied(model: torch.nn.Module) -> bool:
    """Whether the word embedding of a bare model is its output layer, too. Of a model that does not say, it may be.

    On a pipeline stage without output layer it is not: its gradient there is that of its tokens alone.
    """
    shared = getattr(model, "share_embeddings_and_output_weights", True)
    return bool(shared and getattr(model, "post_process", True))


def describe(prefix: str, name: str, parameter: torch.nn.Parameter, tied: bool) -> Parameter:
    """What ``edgc.plan.selection`` needs to know of a Megatron parameter. ``tied``: see ``is_tied``."""
    # Megatron marks word embeddings and output layers, but not position embeddings
    embedding = name.startswith("embedding.") or getattr(parameter, "is_embedding_or_output_parameter", False)
    return Parameter(prefix + name, tuple(parameter.shape), embedding, not tied and name == WORDS)
