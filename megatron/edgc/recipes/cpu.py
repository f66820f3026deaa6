"""Train Megatron on the CPU, where ``--edgc-cpu`` asks for it: send its CUDA calls there.

Megatron-core 0.19 asks ``torch.cuda`` for devices, streams and memory figures throughout. ``redirect()`` points
those calls at harmless CPU stand-ins, by an explicit call before Megatron starts; nothing is patched at import and
nothing is patched in a process that trains on its GPU. Tensors, autograd, gloo and Megatron's schedules stay the real
ones. The redirections hold for the rest of the process and do not go through ``seam.Seam``.
"""

import contextlib
import copy
import logging
import os
import socket
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from edgc.config import ConfigError
from edgc.printing import print_warning

FLAG = "--edgc-cpu"

# Defaults (not overrides) of Megatron's own flags: CUDA-only kernels are off, layers and collectives are the CPU ones.
ARGUMENT_DEFAULTS: dict[str, Any] = {
    "transformer_impl": "local",
    "distributed_backend": "gloo",
    "use_cpu_initialization": True,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "bias_gelu_fusion": False,
    "bias_swiglu_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "no_persist_layer_norm": True,
    "num_workers": 0,
    "disable_jit_fuser": True,
}


def missing_gpu() -> str:
    """Why this process cannot train on a GPU, in one line; empty if it can.

    On a cluster one process that took the CPU instead would leave all others waiting for it.
    """
    index = int(os.environ.get("LOCAL_RANK", "0"))
    try:
        torch.zeros(1, device=f"cuda:{index}")  # a device that is lost may still be counted
    except (RuntimeError, AssertionError) as error:  # the latter from a torch that was built without CUDA
        who = f"rank {os.environ.get('RANK', '0')} on {socket.gethostname()}"
        if 0 < (visible := torch.cuda.device_count()) <= index:
            return (
                f"{who} asks for GPU {index} and sees {visible}: give every process of a node all of its GPUs "
                "(Slurm: --gpus-per-node instead of --gpus-per-task, and no --gpu-bind)"
            )
        return f"{who} cannot use GPU {index} ({str(error).splitlines()[0]}): give {FLAG} to train on the CPU"
    return ""


class _CpuFactories(TorchFunctionMode):
    """Rewrites the device of every torch function from CUDA to CPU, and ``Tensor.type()`` the other way round.

    The optimizer recognises parameters by type strings such as ``torch.cuda.FloatTensor``.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = torch.device("cpu")
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], torch.device("cpu"), *args[2:])
        return func(*args, **kwargs)


def _is_cuda(device: Any) -> bool:
    return (isinstance(device, str) and device.startswith("cuda")) or (
        isinstance(device, torch.device) and device.type == "cuda"
    )


def _nothing(*args: Any, **kwargs: Any) -> None: ...


class _Done:
    """A stream or an event on the CPU, whose operators are synchronous: all that it was given has ended."""

    synchronize = _nothing

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...

    def query(self) -> bool:
        return True


class _Stream(_Done):
    cuda_stream = 0
    wait_stream = wait_event = record_event = _nothing


class _Event(_Done):
    record = wait = _nothing


def redirect() -> None:
    """Point ``torch.cuda`` at the CPU for the rest of the process. Call before Megatron's arguments are parsed.

    Prints one warning line on process 0. A second call does nothing.
    """
    if isinstance(torch.cuda.current_stream, type) and issubclass(torch.cuda.current_stream, _Stream):
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile'd helpers would each compile C++ for minutes
    # tqdm or numpy may have started OpenMP already; torch takes the value from here at any time.
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    # First the import, then the redirections: torch._dynamo tables torch.cuda's functions when Megatron pulls it in.
    import megatron.training.training  # noqa: F401

    _redirect_torch()
    _redirect_megatron()
    if int(os.environ.get("RANK", "0")) == 0:
        print_warning("training on the CPU with local layers over gloo, as asked for")


def _redirect_torch() -> None:
    """The calls of ``torch.cuda``, and the devices that any function of torch is given."""
    cpu = torch.device("cpu")
    replacements: dict[str, Any] = {
        # Megatron asserts is_available() and builds its process groups only when it sees a device.
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: cpu,
        "get_device_name": lambda *args, **kwargs: "CPU",
        "get_device_capability": lambda *args, **kwargs: (0, 0),
        # From major version 10 on, Megatron asks for no CUDA_DEVICE_MAX_CONNECTIONS under tensor parallelism.
        "get_device_properties": lambda *args, **kwargs: SimpleNamespace(name="CPU", major=10, minor=0),
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": _Stream,
        "default_stream": _Stream,
        "stream": lambda stream: contextlib.nullcontext(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "memory_stats": lambda device=None: {},
        "reset_peak_memory_stats": _nothing,
    }
    sizes = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
    replacements |= dict.fromkeys(sizes, lambda *args, **kwargs: 0)
    without_effect = ("set_device", "set_stream", "synchronize", "empty_cache", "manual_seed", "manual_seed_all")
    replacements |= dict.fromkeys(without_effect, _nothing)
    for name, replacement in replacements.items():
        setattr(torch.cuda, name, replacement)
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _nothing
    torch.accelerator.is_available = lambda: False
    _CpuFactories().__enter__()  # type: ignore[no-untyped-call]


def _redirect_megatron() -> None:
    """The few places where Megatron itself, not ``torch.cuda``, insists on a GPU."""
    import megatron.training.training as training

    from megatron.edgc.recipes.datasets import use_built_helpers

    use_built_helpers()  # a script that is not the recipe needs them, too
    _redirect_random_states()
    _redirect_norm()
    _redirect_attention()
    _redirect_optimizer()
    training.set_jit_fusion_options = lambda tp_size=None: None


def _redirect_random_states() -> None:
    import megatron.core.tensor_parallel.random as tensor_parallel_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(state)

    # There the "CUDA" generator now is the CPU's, which Megatron's own check reports at every dropout.
    logging.getLogger(tensor_parallel_random.__name__).setLevel(logging.ERROR)
    tensor_parallel_random._get_cuda_rng_state = get_state
    tensor_parallel_random._set_cuda_rng_state = set_state


def _redirect_norm() -> None:
    """torch's norm does under sequence parallelism what apex's does: work on its part, and mark its weights, whose
    gradients Megatron then sums over the tensor-parallel ranks.
    """
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    build = WrappedTorchNorm.__new__

    def norm(cls: type, config: Any, *args: Any, **kwargs: Any) -> Any:
        alone = copy.copy(config)
        alone.sequence_parallel = False
        module = build(cls, alone, *args, **kwargs)
        for parameter in module.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return module

    WrappedTorchNorm.__new__ = norm


def _redirect_attention() -> None:
    """Context parallelism exists for Transformer Engine's attention alone. Here every process gathers all keys and
    values; the mask says what its own queries see of them.
    """
    from megatron.core import parallel_state
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    class ContextParallelAttention(DotProductAttention):  # type: ignore[misc]
        def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
            alone = copy.copy(config)
            alone.context_parallel_size = 1
            super().__init__(alone, *args, **kwargs)
            if config.context_parallel_size > 1 and config.window_size is not None:
                raise ConfigError("--window-size with context parallelism does not work on a CPU")

        def forward(
            self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, *args: Any, **kw: Any
        ) -> Any:
            group = parallel_state.get_context_parallel_group()
            if group.size() > 1:
                key, value = (gathered(part, group) for part in (key, value))
                if mask is None:  # as on inner pipeline stages
                    indices = torch.arange(len(key))
                    pieces, rank = indices.chunk(2 * group.size()), group.rank()
                    mask = indices > torch.cat([pieces[rank], pieces[-1 - rank]]).unsqueeze(1)
                    mask = mask[None, None]
            return super().forward(query, key, value, mask, *args, **kw)

    def gathered(part: torch.Tensor, group: Any) -> torch.Tensor:
        # of 2n pieces of the sequence rank r holds the r-th from the start and the r-th from the end
        pieces = gather_from_sequence_parallel_region(part, group=group).chunk(2 * group.size())
        return torch.cat([*pieces[::2], *reversed(pieces[1::2])])

    LocalSpecProvider.core_attention = lambda self: ContextParallelAttention


def _redirect_optimizer() -> None:
    """Without apex's Adam, which is for GPUs, the distributed optimizer cannot read what it has saved: fp32 parameters
    are leaves, and the step counts of torch's Adam are not among the states, but one tensor on which all count.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    fill = DistributedOptimizer._set_main_param_and_optimizer_states

    def fill_outside_autograd(self: Any, model_param: Any, tensors: Any) -> None:
        with torch.no_grad():
            fill(self, model_param, {"step": None, **tensors})
            group, index = self.model_param_group_index_map[model_param]
            state = self.optimizer.state[self.optimizer.param_groups[group]["params"][index]]
            state["step"] = state["step"].clone()

    DistributedOptimizer._set_main_param_and_optimizer_states = fill_outside_autograd
