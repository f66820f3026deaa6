"""EDGC for Megatron-core: this project's portion of the ``megatron`` namespace package.

A training script of your own needs three lines:

    import megatron.edgc                                             # 1

    args = parse_and_validate_args(megatron.edgc.add_arguments)      # 2: the --edgc flags beside Megatron's
    with megatron.edgc.compressing(args):                            # 3
        pretrain(pretrain_cfg_container_from_args(args), datasets, model_type, forward_step, model_provider)

A script that builds its model from a ``ModelConfig`` gives that as well: ``compressing(args, model_config)``. A loop
that calls Megatron's parts itself calls ``attach(chunks)`` on the chunks that Megatron's DDP has wrapped.
``examples/pretrain_bert.py`` is such a script.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.edgc.arguments import add_arguments
    from megatron.edgc.entry import attach, compressing

__all__ = ["add_arguments", "attach", "compressing"]

# Imported when they are asked for: what checks the installed Megatron must not import it.
_PLACES = {
    "add_arguments": "megatron.edgc.arguments",
    "attach": "megatron.edgc.entry",
    "compressing": "megatron.edgc.entry",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)
