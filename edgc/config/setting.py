"""What every group of settings has: typed fields with help, and rules that name the flag."""

import os
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

PAPER = "arXiv 2511.10333"
KINDS = {int: "a whole number", float: "a number", str: "text", bool: "on or off", type(None): "none"}


class ConfigError(ValueError):
    """A setting that breaks a rule; the message names the setting, its value and the rule."""


def setting(default: Any, help: str, unit: str, source: str, choices: tuple[str, ...] | None = None) -> Any:
    """A field with what the command line and docs/flags.md say of it. ``choices``: the only values that it takes."""
    return field(default=default, metadata={"help": help, "unit": unit, "source": source, "choices": choices})


def check(holds: bool, flag: str, value: Any, rule: str) -> None:
    """Raise ``ConfigError`` unless the rule holds. Rules are positive comparisons, which NaN fails."""
    if not holds:
        raise ConfigError(f"{flag}{'' if isinstance(value, bool) else f' = {value}'}: {rule}")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of the groups of settings."""

    @classmethod
    def flag(cls, name: str) -> str:
        """The command-line flag of one of these settings."""
        (one,) = (one for one in fields(cls) if one.name == name)
        return ("--edgc-no-" if one.default is True else "--edgc-") + name.replace("_", "-")

    def require(self, name: str, holds: bool, rule: str) -> None:
        """Raise ``ConfigError`` of this setting unless the rule holds."""
        check(holds, self.flag(name), getattr(self, name), rule)

    def require_kinds(self) -> None:
        """Raise ``ConfigError`` for a value that is not of its setting's type, or none of its choices. Numbers of other
        libraries become Python's own, and paths become text, which checkpoints and event logs can hold.
        """
        kinds = get_type_hints(type(self))
        for one in (one for one in fields(self) if one.metadata):  # the others are groups of settings
            value, allowed = getattr(self, one.name), get_args(kinds[one.name]) or (kinds[one.name],)
            if one.metadata["unit"] == "path" and isinstance(value, os.PathLike):
                value = os.fspath(value)
                object.__setattr__(self, one.name, value)
            number = Real if float in allowed else Integral if int in allowed else ()
            # to Python a bool is a number as well
            fits = bool in allowed if isinstance(value, bool) else isinstance(value, (*allowed, number))
            if not fits:
                rule = f"must be {' or '.join(KINDS[kind] for kind in allowed)}"
                raise ConfigError(f"{self.flag(one.name)} = {value!r}: {rule}")
            if isinstance(value, Real) and not isinstance(value, bool):
                object.__setattr__(self, one.name, int(value) if isinstance(value, Integral) else float(value))
            choices = one.metadata.get("choices")
            if choices and value != one.default:
                self.require(one.name, value in choices, f"must be one of {', '.join(choices)}")
