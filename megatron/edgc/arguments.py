"""The ``--edgc-*`` flags, made from the settings of ``EDGCConfig``."""

import argparse
import types
import typing
from argparse import ArgumentParser, Namespace

from edgc.config import ConfigError, EDGCConfig, flag, setting_fields
from edgc.flags import description, study_from


def add_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add ``--edgc`` and one flag for every setting of ``EDGCConfig``."""
    group = parser.add_argument_group(
        "edgc", "entropy-driven dynamic gradient compression; 'python -m edgc flags' prints these flags alone, by group"
    )
    group.add_argument("--edgc", action="store_true", help="compress the data-parallel gradient reduction")
    for setting in setting_fields():
        text = f"[{setting.metadata['unit']}] {description(setting)}".replace("%", "%%")
        if _scalar(setting.type) is bool:
            # both, since a preset may have switched it on, and None leaves it to the run
            name = setting.name.replace("_", "-")
            for prefix, action, help in (("", "store_true", text), ("no-", "store_false", f"do without --edgc-{name}")):
                group.add_argument(
                    f"--edgc-{prefix}{name}",
                    dest=f"edgc_{setting.name}",
                    action=action,
                    default=argparse.SUPPRESS,
                    help=help,
                )
        elif setting.name == "study":
            group.add_argument(
                flag(setting.name), dest="edgc_study", nargs="+", action="extend", default=argparse.SUPPRESS, help=text
            )
        else:
            group.add_argument(
                flag(setting.name),
                dest=f"edgc_{setting.name}",
                type=_scalar(setting.type),
                default=argparse.SUPPRESS,  # the dataclass holds the defaults, and "given" can be told from "not given"
                choices=setting.metadata["choices"],
                help=text,
            )
    return parser


def config_from_args(args: Namespace) -> EDGCConfig | None:
    """The run's settings; None without ``--edgc``. Raises ``ConfigError``, also for an EDGC flag without ``--edgc``."""
    given = {
        setting.name: getattr(args, f"edgc_{setting.name}")
        for setting in setting_fields()
        if hasattr(args, f"edgc_{setting.name}")
    }
    if not args.edgc:
        stray = sorted(flag(name) for name in given)
        if stray:
            raise ConfigError(f"{', '.join(stray)} given without --edgc: add --edgc to compress gradients")
        return None
    if "study" in given:
        given |= study_from(given.pop("study"))
    return EDGCConfig.from_preset(**given)


def _scalar(hint: object) -> type:
    """int for ``int | None`` and the like."""
    if isinstance(hint, types.UnionType):
        (hint,) = (option for option in typing.get_args(hint) if option is not types.NoneType)
    assert isinstance(hint, type)
    return hint
