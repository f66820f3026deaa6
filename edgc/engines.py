"""Engines by name. A new one is a file in ``edgc/compress/engines`` and a line in ``ENGINES``. No torch."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


def _no_argument(argument: str) -> None:
    if argument:
        raise ValueError("this engine takes no argument")


def _share(argument: str) -> None:
    try:
        share = float(argument)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise ValueError("the share of the entries or rows that travel must lie in (0, 1]")


def _rounding(format_name: str) -> Callable[[str], None]:
    """The check of an engine that rounds to this format."""
    ways = {}
    if format_name not in ("int3", "int2", "int1"):
        ways["stochastic"] = "without bias"
    if format_name != "bf16":  # it has no scale
        ways["rotated"] = "by a Hadamard matrix"
    told = " or ".join(f"{name} ({meaning})" for name, meaning in ways.items())

    def check(argument: str) -> None:
        if argument and argument not in ways:
            raise ValueError(f"the argument may be {told}")

    return check


@dataclass(frozen=True)
class EngineEntry:
    """An engine as ``--edgc-engine NAME`` or ``NAME:ARGUMENT`` asks for it.

    ``path``: "module:class", imported when the engine is built. ``fixed``: what the name itself tells the class.
    ``argument``: of the name alone. ``check``: raises ValueError for an argument that the engine does not take.
    ``low_rank``: whether it has a rank. ``keeps_errors``: whether it has an error rule that no setting changes.
    """

    path: str
    fixed: str = ""
    argument: str = ""
    check: Callable[[str], None] = _no_argument
    low_rank: bool = False
    keeps_errors: bool = False


def _rounds_to(format_name: str) -> EngineEntry:
    return EngineEntry("edgc.compress.engines.rounding:Rounding", fixed=format_name, check=_rounding(format_name))


DEFAULT_ENGINE = "powersgd"
# "dense" is no engine: where nothing is compressed, the host's own reduction is left in place.
ENGINES: dict[str, EngineEntry] = {
    "powersgd": EngineEntry("edgc.compress.engines.powersgd:PowerSGD", low_rank=True),
    "alternating": EngineEntry("edgc.compress.engines.alternating:Alternating", low_rank=True),
    "topk": EngineEntry("edgc.compress.engines.sparse:TopK", argument="0.01", check=_share),
    "randomk": EngineEntry("edgc.compress.engines.sparse:RandomK", argument="0.01", check=_share),
    "rows": EngineEntry("edgc.compress.engines.rows:Rows", argument="0.1", check=_share),
    "loco": EngineEntry("edgc.compress.engines.loco:LoCo", keeps_errors=True),
    "onebit": _rounds_to("int1"),
    **{name: _rounds_to(name) for name in ("bf16", "int8", "int4", "int3", "int2")},
}


def has_rank(value: str) -> bool:
    """Whether an engine, as a setting names it, has a rank."""
    name = value.partition(":")[0]
    return name in ENGINES and ENGINES[name].low_rank


def check_engine(value: str) -> None:
    """Raises ValueError, with the rule, for what names no engine."""
    name, colon, argument = value.partition(":")
    if name not in ENGINES and value != "dense":
        raise ValueError(f"must be one of {', '.join([*ENGINES, 'dense'])}")
    if colon and not argument:
        raise ValueError("nothing follows the colon")
    if name in ENGINES:
        ENGINES[name].check(argument or ENGINES[name].argument)


def engine_class(value: str) -> Any:
    """The class of an engine, as a setting names it. Raises KeyError for a name that is not in ``ENGINES``."""
    module, _, name = ENGINES[value.partition(":")[0]].path.partition(":")
    return getattr(import_module(module), name)


def engine_arguments(value: str) -> tuple[str, ...]:
    """What the class takes behind matrices, config and device."""
    name, _, argument = value.partition(":")
    registered = ENGINES[name]
    return tuple(filter(None, (registered.fixed, argument or registered.argument)))
