"""The index of EDGC's state in a checkpoint: what a run has to know of the state before it reads any of it."""

import json
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import nn

from edgc.byte_counts import RunBytes
from edgc.comm.objects import all_gather_objects, broadcast_object, gather_objects
from edgc.config import EDGCConfig
from edgc.hosts.checkpoint import ERROR, STATE_VERSION, Layout
from edgc.plan.controller import Controller
from edgc.plan.stages import StageKey, StageKind
from megatron.edgc.checkpoint.keys import measurements_key, message_key, of_process, replica_group, stage_key
from megatron.edgc.messages.pipeline_messages import PipelineMessages
from megatron.edgc.stages import MegatronStage

RANK_SETTINGS = "rmin", "rmax", "static_rank", "volume"
RESOLVED = "engine", *RANK_SETTINGS  # settings that a probe of the link may have decided
REQUESTED_SETTINGS = *RANK_SETTINGS, "link_gbps"  # those as given, by which it decides
REQUESTED_SETTINGS_OF_MESSAGES = "pp", *REQUESTED_SETTINGS
MESSAGES = "messages"  # beside the stages' ids among the byte counts
TIED_STAGE = StageKey(StageKind.EMBEDDING, 0)
TIED_NAMES = ("word_embeddings.weight", "output_layer.weight")  # of its copies, where they are not summed at once


@dataclass(frozen=True)
class RunState:
    """What of a run a checkpoint keeps the state of, and the settings that decide what a resumed run takes of it.

    ``requested`` are the settings as given, ``config`` as resolved. ``keys`` are the stages of the plan, ``stages``
    those of this process, ``layers`` as of ``layers_of_stages``. Controllers are on global process 0 alone.
    """

    args: Namespace
    requested: EDGCConfig
    config: EDGCConfig
    keys: Sequence[StageKey]
    stages: Sequence[MegatronStage]
    layers: list[list[list[int]]]
    controller: Controller | None
    messages: PipelineMessages | None = None
    message_controller: Controller | None = None


@dataclass(frozen=True)
class SavedStage:
    """What there is of a stage, or of one part that tensor or expert parallelism cuts it into."""

    processes: int  # in its data-parallel group
    layout: Layout


@dataclass(frozen=True)
class SavedMessages:
    """What sets the ranks of messages between stages."""

    boundaries: list[str]  # their ids
    requested: dict[str, Any]
    resolved: dict[str, Any]
    controller: dict[str, Any]


@dataclass(frozen=True)
class Index:
    """What is in a checkpoint, the same on all processes."""

    iteration: int  # steps that are in the checkpoint
    parallel: dict[str, int]  # ``parallel_sizes``
    per_token: bool  # whether gradients are sums over tokens, which Megatron divides after the reduction
    engine: str  # as given
    requested: dict[str, Any]
    resolved: dict[str, Any]
    stages: list[str]  # of the plan, their ids
    controller: dict[str, Any]
    messages: SavedMessages | None  # None: nothing sets their ranks
    weights: dict[str, str]  # how updated ones travel: ``param_wire`` as requested, and as resolved
    replicas: int  # how many processes have left something of the same messages unsent; 0: there is no pipeline
    bytes: dict[str, RunBytes]  # so far: the mean over the processes, by a stage's id, and of messages
    saved: dict[str, SavedStage]  # by ``stage_key``
    layers: list[list[list[int]]]  # of ``layers_of_stages``

    def to_dict(self) -> dict[str, Any]:
        """The index as plain values, as it is saved.

        Those of controllers are a text, in which NaN equals itself: Megatron warns where two processes have values that
        differ.
        """
        messages = self.messages
        return {
            "version": STATE_VERSION,
            **vars(self),
            "controller": json.dumps(self.controller),
            "messages": messages and {**vars(messages), "controller": json.dumps(messages.controller)},
            "bytes": {key: asdict(counts) for key, counts in self.bytes.items()},
            "saved": {key: vars(one) for key, one in self.saved.items()},
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> "Index":
        """What ``to_dict`` was made from, in this version."""
        entries = {name: value for name, value in found.items() if name != "version"}
        controller, messages = json.loads(found["controller"]), found["messages"]
        if messages is not None:
            messages = SavedMessages(**{**messages, "controller": json.loads(messages["controller"])})
        counted = {key: RunBytes.of(counts) for key, counts in found["bytes"].items()}
        saved = {key: SavedStage(**one) for key, one in found["saved"].items()}
        return cls(**{**entries, "controller": controller, "messages": messages, "bytes": counted, "saved": saved})


def gathered_index(
    run: RunState, iteration: int, controllers: Sequence[Any], saved: Mapping[str, SavedStage]
) -> dict[str, Any]:
    """The index of a checkpoint with so many steps, as it is saved. Every process calls this, and gets it.

    ``controllers``: the states of both, on process 0. ``saved``: what this process describes.
    """
    counts = [(stage.key.id, stage.byte_counts()) for stage in run.stages]
    if run.messages is not None:
        counts.append((MESSAGES, RunBytes(messages=run.messages.byte_count())))
    everywhere = gather_objects((saved, counts))
    index = None
    if run.controller is not None:
        of_gradients, of_messages = controllers
        index = Index(
            iteration=iteration,
            parallel=parallel_sizes(run.args),
            per_token=bool(run.args.calculate_per_token_loss),
            engine=run.requested.engine,
            requested=run.requested.subset(REQUESTED_SETTINGS),
            resolved=run.controller.config.subset(RESOLVED),
            stages=[key.id for key in run.keys],
            controller=of_gradients,
            messages=_saved_messages(run, of_messages),
            weights={"requested": run.requested.formats.param_wire, "resolved": run.stages[0].param_wire},
            replicas=0 if run.messages is None else dist.get_world_size(replica_group()),
            bytes=_mean_bytes([count for _, counts in everywhere for count in counts]),
            saved={key: one for described, _ in everywhere for key, one in described.items()},
            layers=run.layers,
        ).to_dict()
    shared: dict[str, Any] = broadcast_object(index)
    return shared


def _saved_messages(run: RunState, controller: Any) -> SavedMessages | None:
    if run.messages is None or run.message_controller is None:
        return None
    return SavedMessages(
        boundaries=[boundary.id for boundary in run.messages.boundaries],
        requested=run.requested.subset(REQUESTED_SETTINGS_OF_MESSAGES),
        resolved=run.message_controller.config.subset(RESOLVED),
        controller=controller,
    )


def _mean_bytes(counts: Sequence[tuple[str, RunBytes]]) -> dict[str, RunBytes]:
    """Over the processes, by key."""
    by_key: dict[str, list[RunBytes]] = {}
    for key, count in counts:
        by_key.setdefault(key, []).append(count)
    return {key: RunBytes.mean(several) for key, several in by_key.items()}


def layers_of_stages(chunks: Sequence[nn.Module]) -> list[list[list[int]]]:
    """The numbers that the model's layers have in the chunks of each pipeline stage. Parameters are named by the place
    of their layer in its chunk. Every process calls this.
    """

    def numbers(chunk: nn.Module) -> list[int]:  # Megatron also numbers what is in a layer
        found = (getattr(module, "layer_number", None) for module in chunk.modules())
        return list(dict.fromkeys(number for number in found if isinstance(number, int)))

    own = [numbers(chunk) for chunk in chunks]
    found = dict(all_gather_objects((parallel_state.get_pipeline_model_parallel_rank(), own)))
    return [found[stage] for stage in sorted(found)]


def parallel_sizes(args: Namespace) -> dict[str, int]:
    """The sizes that decide which parameters, and which parts of them and of their gradients, a process holds."""
    return {
        "tensor": args.tensor_model_parallel_size,
        # with it the gradients of what tensor ranks have alike are parts, which Megatron adds up after the reduction
        "sequence": args.tensor_model_parallel_size if args.sequence_parallel else 1,
        "pipeline": args.pipeline_model_parallel_size,
        "virtual pipeline": args.virtual_pipeline_model_parallel_size or 1,
        "expert": args.expert_model_parallel_size,
        "expert tensor": args.expert_tensor_parallel_size or args.tensor_model_parallel_size,
    }


def in_words(parallel: Mapping[str, int]) -> str:
    """Parallel sizes, for a message to the user."""
    return ", ".join(f"{name}-parallel size {size}" for name, size in parallel.items())


@dataclass(frozen=True)
class RestorableStage:
    """What this process takes of what there is of one of its stages."""

    layout: Layout  # of the tensors that it takes
    processes: int  # of its data-parallel group, when it was saved
    same_processes: bool  # whether there are as many now
    measurements: str | None  # the key of its own; None: the window starts anew


@dataclass(frozen=True)
class RestorableState:
    """What a run takes of a checkpoint, on this process.

    ``same_engine``: more than the errors, which are good for any engine. ``tied_apart``: only one of both runs sums the
    copies of a tied embedding at once, so that their errors are of no use. ``stages``: those of which there is
    something. ``messages``: the key of what this process has left unsent of them; None: that is of other replicas.
    """

    index: Index
    same_engine: bool
    tied_apart: bool
    stages: dict[StageKey, RestorableStage]
    messages: str | None

    @classmethod
    def of(cls, index: Index, run: RunState) -> "RestorableState":
        same_engine = bool(index.resolved["engine"] == run.config.engine)
        tied_apart = (TIED_STAGE.id in index.stages) != (TIED_STAGE in run.keys)

        def takes(name: str) -> bool:
            if name.startswith(ERROR):
                return not (tied_apart and name.endswith(TIED_NAMES))
            return same_engine

        stages = {}
        for stage in run.stages:
            saved, group = index.saved.get(stage_key(stage)), stage.process_group
            if saved is not None:
                layout = {name: contents for name, contents in saved.layout.items() if takes(name)}
                same = saved.processes == dist.get_world_size(group)
                own = of_process(measurements_key(stage), dist.get_rank(group))
                # other processes have measured other things
                stages[stage.key] = RestorableStage(
                    layout, saved.processes, same, own if same and same_engine else None
                )
        messages = None
        if run.messages is not None and index.replicas == dist.get_world_size(replica_group()):
            messages = of_process(message_key(), dist.get_rank(replica_group()))
        return cls(index, same_engine, tied_apart, stages, messages)
