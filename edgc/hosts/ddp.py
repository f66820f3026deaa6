"""torch's ``DistributedDataParallel`` as a host: EDGC as its communication hook."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from edgc.comm.objects import GradBucket, process
from edgc.config import ConfigError, EDGCConfig
from edgc.hosts.module import EDGCState
from edgc.printing import print_lines

# that sum gradients themselves; by name, because to import the last one takes half a second
WRAPPERS = {"DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "DeepSpeedEngine"}


def attach(
    model: nn.Module,
    config: EDGCConfig | str = "balanced",
    *,
    iterations: int,
    scaler: torch.amp.GradScaler | None = None,
    learning_rate: Callable[[int], float] | None = None,
) -> EDGCState:
    """Let EDGC average the gradients of a ``DistributedDataParallel`` model, or of a bare module.

    The arguments are those of ``EDGCState``. A bare module's gradients are averaged when ``step`` is called. Every
    process calls this at the same point. Raises ``ConfigError`` for settings, ranks and models that EDGC cannot take.
    """
    model = getattr(model, "_orig_mod", model)  # of what torch.compile has made
    if not isinstance(model, DistributedDataParallel):
        for inner in model.modules():
            if WRAPPERS & {one.__name__ for one in type(inner).__mro__}:
                raise ConfigError(
                    f"{type(model).__name__} has a {type(inner).__name__} inside, which sums gradients itself. EDGC "
                    "takes a DistributedDataParallel model, or a module that nothing else sums"
                )
        state = EDGCState(model, config, iterations=iterations, scaler=scaler, learning_rate=learning_rate)
        state.start()
        if process() == 0:
            name = type(model).__name__
            print_lines(
                [f"{name} is not wrapped in DistributedDataParallel: state.step() after each backward pass averages"]
            )
        return state
    if model.find_unused_parameters and not model.static_graph:
        raise ConfigError(
            "find_unused_parameters: DDP drops the average of a parameter that no process has used in a step, and with "
            "it what error feedback has sent. Set it to False if each step uses all parameters (Hugging Face's "
            "Trainer: ddp_find_unused_parameters=False), or static_graph=True if a parameter is used always or never"
        )
    state = EDGCState(
        model.module,
        config,
        iterations=iterations,
        group=model.process_group,
        scaler=scaler,
        learning_rate=learning_rate,
        unit_bytes=model.bucket_bytes_cap,
        ignored=model.parameters_to_ignore,
    )
    state.start()
    model.register_comm_hook(state, ddp_hook)
    return state


def ddp_hook(state: EDGCState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The communication hook: ``model.register_comm_hook(EDGCState(module, iterations=...), ddp_hook)``.

    Averages over the process group, as DDP itself does. DDP hands its buckets over in the same order on every process.
    With ``no_sync`` it does so once for all accumulated micro-batches. The futures of a step resolve together, when
    all processes know whether its averages are finite; until then reductions run beside the backward pass.

    DDP must not have ``find_unused_parameters``: see ``attach``, which refuses it. A hook does not know.
    """
    # Not by the bucket's number: in the first step of a static graph every bucket has number 0, and none is the last.
    if not state.awaits(bucket.parameters()):
        state.begin()
        state.futures = []
    gradients = {p: _as_laid_out(p, flat) for p, flat in zip(bucket.parameters(), bucket.gradients(), strict=True)}
    state.add(gradients, bucket.buffer())
    devices: list[int | str | torch.device] | None = [state.device] if state.device.type == "cuda" else None
    future: torch.futures.Future[Tensor] = torch.futures.Future(devices=devices)
    state.futures.append((future, bucket.buffer()))
    if bucket.is_last() or state.stage.units.complete:
        state.end()
        for waiting, buffer in state.futures:
            waiting.set_result(buffer)
        state.futures = []
    return future


def _as_laid_out(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient as the parameter is laid out: DDP's view of it has the values in the order of its memory."""
    if parameter.is_contiguous() or not torch.ops.aten.is_non_overlapping_and_dense(parameter):
        return gradient
    return gradient.as_strided(parameter.shape, parameter.stride(), gradient.storage_offset())
