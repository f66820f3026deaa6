"""EDGC: entropy-driven dynamic gradient compression (arXiv 2511.10333). Needs torch and numpy, never Megatron.

With torch's DistributedDataParallel, in each process:

    import edgc

    model = DistributedDataParallel(net)
    state = edgc.attach(model, "balanced", iterations=10_000)  # every gradient is compressed from here on
    ...                                                        # train as before
    torch.save({"model": net.state_dict(), "edgc": state.state_dict()}, file)  # state_dict: on every process

or, where something else wraps the model: ``model.register_comm_hook(edgc.EDGCState(net, iterations=10_000),
edgc.ddp_hook)``. Settings other than a preset's: ``edgc.EDGCConfig.from_preset("paper", window=200)``.

With Megatron-core, in a training script of your own:

    import megatron.edgc

    args = parse_and_validate_args(megatron.edgc.add_arguments)  # adds the --edgc flags
    with megatron.edgc.compressing(args):
        pretrain(pretrain_cfg_container_from_args(args), datasets, model_type, forward_step, model_provider)

``pretrain_gpt.py`` is such a script. What a window showed is in ``state.report`` and, with ``log_dir``, in an event log
that ``read_events`` reads.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edgc.config import ConfigError, EDGCConfig
    from edgc.config.presets import PRESETS
    from edgc.errors import StepError
    from edgc.hosts.ddp import attach, ddp_hook
    from edgc.hosts.module import EDGCState
    from edgc.observe.events import read_events

__version__ = "0.1.0"
__all__ = [
    "PRESETS",
    "ConfigError",
    "EDGCConfig",
    "EDGCState",
    "StepError",
    "attach",
    "ddp_hook",
    "read_events",
]

# Imported when they are asked for: planning needs no torch.
_PLACES = {
    "PRESETS": "edgc.config.presets",
    "ConfigError": "edgc.config",
    "EDGCConfig": "edgc.config",
    "EDGCState": "edgc.hosts.module",
    "StepError": "edgc.errors",
    "attach": "edgc.hosts.ddp",
    "ddp_hook": "edgc.hosts.ddp",
    "read_events": "edgc.observe.events",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
