"""EDGC's settings as flags: for a terminal, and as the page docs/flags.md. No torch."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from textwrap import fill
from typing import Any

from edgc.config import UNUSED_BY_VOLUME, ConfigError, EDGCConfig, Study, setting_fields
from edgc.config.presets import PRESETS

WIDTH = 100  # characters
INTRODUCTION = (
    "These flags change how EDGC compresses. Many runs need only --edgc-preset, and most only the first group. With "
    "Megatron they stand beside --edgc, which switches EDGC on, and perhaps --edgc-cpu, which trains without GPUs. In "
    "Python edgc.EDGCConfig.from_preset takes them as arguments. "
    "Defaults are those of the default preset, balanced. An engine other than powersgd has no default preset: it then "
    "sums the first tenth of the run in fp32. The lists in docs/frontier give --edgc-dense-wire int8 and "
    "--edgc-warmup-fraction 0.025 to such an engine."
)

# Every setting once, by what it is about, for a command line or a document.
HEADINGS: Mapping[str, tuple[str, ...]] = {
    "What most runs need": (
        "preset",
        "volume",
        "engine",
        "rmax",
        "static_rank",
        "window",
        "warmup_fraction",
        "pp",
        "param_wire",
        "error_dtype",
        "log_dir",
    ),
    "Rank policy": (
        "rank_model",
        "rmin",
        "rank_step",
        "allocation",
        "align",
        "link_gbps",
        "iteration_sampling_rate",
        "gradient_sampling_rate",
    ),
    "Compression of gradients": (
        "compress_embeddings",
        "equalise",
        "basis_cycle",
    ),
    "Formats": ("dense_wire", "rest_wire", "basis_wire", "wire"),
    "Pipeline": ("fuse_embedding_sync",),
    "Run": ("seed", "reset_state", "study"),
}


def description(setting: Field[Any]) -> str:
    """Meaning, default and source of a setting in one line."""
    default = _default(setting)
    return f"{setting.metadata['help']}.{default and f' Default: {default}.'} Source: {setting.metadata['source']}."


def text() -> str:
    """Every flag by group, without the settings of studies."""
    lines = [fill(INTRODUCTION, WIDTH)]
    for title, members in _groups():
        lines += ["", f"{title}:"]
        for setting in members:
            choices, unit = setting.metadata["choices"], setting.metadata["unit"]
            value = f"{{{','.join(choices)}}}" if choices else "" if unit == "switch" else f"<{unit}>"
            lines.append(f"  {_spelling(setting)} {value}".rstrip())
            lines.append(fill(description(setting), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page docs/flags.md."""
    lines = ["# Flags", "", _marked(INTRODUCTION), ""]
    lines += [
        "`python -m edgc flags` prints this list without the settings of studies; `python -m edgc flags --markdown` "
        "writes this page."
    ]
    for title, members in _groups():
        lines += ["", f"## {title}", "", "| flag | meaning | unit | default | source |", "|---|---|---|---|---|"]
        lines += [_row(_spelling(setting), setting, _default(setting)) for setting in members]
    lines += ["", "## Settings of studies", "", "`--edgc-study NAME=VALUE ...` varies what no run needs to set.", ""]
    lines += ["| name | meaning | unit | default | source |", "|---|---|---|---|---|"]
    usual = EDGCConfig.from_preset().flat()
    lines += [_row(one.name, one, _value(usual[one.name])) for one in fields(Study)]
    of_studies = {one.name for one in fields(Study)}
    unused = ", ".join(f"`--edgc-{name.replace('_', '-')}`" for name in sorted(UNUSED_BY_VOLUME - of_studies))
    lines += ["", "## What the presets set", ""]
    lines += [f"`safe`, `balanced` and `fast` use {unused} only where a rank is given, or entropy sets it.", ""]
    lines += [f"| | {' | '.join(f'`{name}`' for name in PRESETS)} |"]
    lines += ["|---" * (len(PRESETS) + 1) + "|"]
    for setting in (*setting_fields(), *fields(Study)):
        if any(setting.name in preset for preset in PRESETS.values()):
            values = (_value(preset.get(setting.name, setting.default)) for preset in PRESETS.values())
            name = _name(setting) if setting.name not in of_studies else f"--edgc-study {setting.name}"
            lines.append(f"| `{name}` | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _row(name: str, setting: Field[Any], default: str) -> str:
    meta = setting.metadata
    choices = "; one of " + ", ".join(f"`{choice}`" for choice in meta["choices"]) if meta["choices"] else ""
    return f"| `{name}` | {_marked(meta['help'])}{choices} | {meta['unit']} | {default} | {_linked(meta['source'])} |"


def _groups() -> Iterator[tuple[str, list[Field[Any]]]]:
    by_name = {setting.name: setting for setting in setting_fields()}
    for title, names in HEADINGS.items():
        yield title, [by_name[name] for name in names]


def _name(setting: Field[Any]) -> str:
    return "--edgc-" + setting.name.replace("_", "-")


def _spelling(setting: Field[Any]) -> str:
    name = _name(setting)
    return f"{name}, {name.replace('--edgc-', '--edgc-no-')}" if setting.metadata["unit"] == "switch" else name


def _default(setting: Field[Any]) -> str:
    # A setting without one, and the preset, say in their help what holds then.
    return "" if setting.name == "preset" else _value(EDGCConfig.from_preset().flat().get(setting.name))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or isinstance(value, Study) else str(value)


def _marked(words: str) -> str:
    return re.sub(r"(--edgc[\w-]*|edgc\.[\w.]+)", r"`\1`", words)


def _linked(source: str) -> str:
    source = re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"docs/(\S+\.md)", r"[\1](\1)", source)


def study_from(words: Sequence[str]) -> dict[str, Any]:
    """Settings of ``Study`` from NAME=VALUE each. Raises ``ConfigError`` for other names and values of another type."""
    known = {one.name: one for one in fields(Study)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise ConfigError(f"--edgc-study {word}: must be NAME=VALUE, with a name of {', '.join(known)}")
        default = known[name].default
        try:
            if isinstance(default, bool):
                found[name] = {"on": True, "off": False}[text]
            else:
                found[name] = text if isinstance(default, str) else float(text)
        except (KeyError, ValueError):
            wanted = "on or off" if isinstance(default, bool) else "a number"
            raise ConfigError(f"--edgc-study {word}: must be {wanted}") from None
    return found
