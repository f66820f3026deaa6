"""Read the weights and the arguments of a Megatron checkpoint: no process group, no GPU, no model.

Both formats end as the same whole tensors: ``torch`` by joining the shards of all tensor- and pipeline-parallel
processes, ``torch_dist`` by torch's own distributed checkpoint reader. Optimizer states are not read.
"""

import json
import logging
import pickle
import re
import warnings
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tools.shared.command import reason
from tools.shared.megatron import TRACKER

# Parameters whose tensor-parallel shards lie side by side along this axis; all others are whole in every process.
SHARDED = {
    "word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "linear_qkv.weight": 0,
    "linear_qkv.bias": 0,
    "linear_proj.weight": 1,
    "linear_fc1.weight": 0,
    "linear_fc1.bias": 0,
    "linear_fc2.weight": 1,
}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")


class ExportError(Exception):
    """A checkpoint that cannot be exported; the message is one line that says why."""


@dataclass(frozen=True)
class Checkpoint:
    """Megatron's arguments and the whole tensors of the model, by Megatron's names with layers counted from 0."""

    folder: Path
    format: str
    args: Namespace
    tensors: dict[str, Tensor]


def iteration_folder(load: Path, iteration: int | None) -> Path:
    """The folder of an iteration, by default of the one that Megatron's tracker file names."""
    if not load.is_dir():
        raise ExportError(f"{load}: no such folder")
    if iteration is None:
        tracker = load / TRACKER
        if not tracker.is_file():
            raise ExportError(f"{load}: no {TRACKER} in it: not a folder of Megatron checkpoints; see --iteration")
        named = tracker.read_text().strip()
        if named != "release" and not named.isdigit():
            raise ExportError(f"{tracker}: names no iteration")
    else:
        named = str(iteration)
    folder = load / (named if named == "release" else f"iter_{int(named):07d}")
    if not folder.is_dir():
        raise ExportError(f"{folder}: there is no such checkpoint")
    return folder


def read(folder: Path) -> Checkpoint:
    """Read the checkpoint of one iteration. Raises ``ExportError`` where it is incomplete or of another format."""
    _allow_megatron_classes()
    backend = _sharded_backend(folder)
    if backend == "torch_dist":
        args, tensors = _read_torch_dist(folder)
    elif backend is None and any(folder.glob("mp_rank_*")):
        backend = "torch"
        args, tensors = _read_torch(folder)
    else:
        raise ExportError(f"{folder}: {backend or 'neither torch_dist nor torch'}: not a format that can be exported")
    return Checkpoint(folder, backend, args, {_plain(name): tensor for name, tensor in tensors.items()})


def _allow_megatron_classes() -> None:
    """Let torch unpickle what Megatron saves and nothing else, so that the arguments and states can run no code."""
    with warnings.catch_warnings(action="ignore"):  # Megatron says which optimizers are missing
        from megatron.core.safe_globals import register_safe_globals

        register_safe_globals()


def _sharded_backend(folder: Path) -> str | None:
    """What Megatron's metadata file calls the format; the format ``torch`` has no such file."""
    path = folder / "metadata.json"
    if not path.is_file():
        return None
    try:
        return str(json.loads(path.read_text())["sharded_backend"])
    except (ValueError, KeyError, TypeError):
        raise ExportError(f"{path}: is damaged") from None


def _plain(name: str) -> str:
    """The name without what wrappers such as ``Float16Module`` put in front."""
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


# torch_dist


class _SafePlanner(DefaultLoadPlanner):
    """Reads pickled parts as ``torch.load`` does by default: plain data and the classes that Megatron names."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


def _read_torch_dist(folder: Path) -> tuple[Namespace, dict[str, Tensor]]:
    try:
        reader = FileSystemReader(str(folder))
        stored = reader.read_metadata().state_dict_metadata
        state: dict[str, Any] = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in stored.items()
            if isinstance(entry, TensorStorageMetadata) and _is_weight(name)
        }
        common = [name for name in stored if name.startswith("common_state/")]
        state.update(dict.fromkeys(common))
        logger = logging.getLogger("torch.distributed.checkpoint")
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings(action="ignore"):  # that no process group is there
                state_dict_loader.load(
                    state,
                    storage_reader=reader,
                    planner=_SafePlanner(flatten_state_dict=False, flatten_sharded_tensors=False),
                )
        finally:
            logger.setLevel(level)
        # an older Megatron-core's is a file
        args = _args(state.pop(common[0])[0] if common else _load(folder / "common.pt"), folder)
    # what reader and planner raise on missing, short or unreadable files
    except (OSError, RuntimeError, ValueError, KeyError, EOFError, pickle.UnpicklingError) as error:
        raise ExportError(f"{folder}: is damaged or incomplete: {reason(error)}") from error
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        raise ExportError(f"{folder}: is damaged or incomplete: {reason(cause)}") from error
    return args, dict(_unstacked(state, args.num_layers))


def _is_weight(name: str) -> bool:
    """Neither the optimizer's, nor a generator's, nor EDGC's."""
    return _plain(name).startswith(("embedding.", "decoder.", "output_layer.")) and not name.endswith("_extra_state")


def _unstacked(tensors: Mapping[str, Tensor], layers: int) -> Iterator[tuple[str, Tensor]]:
    """``torch_dist`` stores a parameter of all layers as one tensor, with the layers along its first axis."""
    for name, tensor in tensors.items():
        before, found, after = name.partition("decoder.layers.")
        if not found or after[:1].isdigit():
            yield name, tensor
            continue
        if len(tensor) != layers:
            raise ExportError(f"{name}: has {len(tensor)} layers, the arguments say {layers}")
        for layer, part in enumerate(tensor):
            yield f"{before}{found}{layer}.{after}", part


# torch


def _read_torch(folder: Path) -> tuple[Namespace, dict[str, Tensor]]:
    first = min(path.name for path in folder.glob("mp_rank_*"))
    args = _args(_load(folder / first / "model_optim_rng.pt"), folder)
    tp, pp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
    if getattr(args, "expert_model_parallel_size", 1) > 1:
        raise ExportError("GPT-2 has no experts: --num-experts")
    # stages[p][t][v]: pipeline stage p, tensor-parallel process t, virtual chunk v; activations pass the first chunk of
    # all stages, then the next chunk of each
    stages = [
        [
            _chunks(_load(folder / f"mp_rank_{t:02d}{f'_{p:03d}' if pp > 1 else ''}" / "model_optim_rng.pt"))
            for t in range(tp)
        ]
        for p in range(pp)
    ]
    tensors: dict[str, Tensor] = {}
    offset = 0
    for chunk in range(len(stages[0][0])):
        for processes in stages:
            shards = [chunks[chunk] for chunks in processes]
            numbers = {int(layer[1]) for name in shards[0] if (layer := LAYER.fullmatch(name))}
            for name in shards[0]:
                layer = LAYER.fullmatch(name)
                whole = f"decoder.layers.{offset + int(layer[1])}.{layer[2]}" if layer else name
                tensors[whole] = _joined(name, [shard[name] for shard in shards])
            offset += len(numbers)
    if offset != args.num_layers:
        raise ExportError(f"{folder}: holds {offset} layers, its arguments say {args.num_layers}")
    return args, tensors


def _chunks(state: Mapping[str, Any]) -> list[dict[str, Tensor]]:
    """A process's model chunks: several with a virtual pipeline."""
    keys = (
        ["model"]
        if "model" in state
        else sorted(
            (key for key in state if re.fullmatch(r"model\d+", key)), key=lambda key: int(key.removeprefix("model"))
        )
    )
    return [
        {_plain(name): value for name, value in state[key].items() if isinstance(value, Tensor) and _is_weight(name)}
        for key in keys
    ]


def _joined(name: str, shards: list[Tensor]) -> Tensor:
    """A whole parameter from what each tensor-parallel process has of it."""
    axis = next((axis for ending, axis in SHARDED.items() if name.endswith(ending)), None)
    return shards[0] if axis is None else torch.cat(shards, dim=axis)


# Both


def _load(path: Path) -> Any:
    if not path.is_file():
        raise ExportError(f"{path}: is missing")
    try:
        # mapped into memory, so that the optimizer's states in the same file are not read
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        raise ExportError(f"{path}: is damaged or cut short: {reason(error)}") from error


def _args(state: Any, folder: Path) -> Namespace:
    args = state.get("args") if isinstance(state, Mapping) else None
    if not isinstance(args, Namespace):
        raise ExportError(f"{folder}: holds no Megatron arguments")
    return args
