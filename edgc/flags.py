"""EDGC's settings as flags: for a terminal, and as the page docs/flags.md. No torch."""

import re
from collections.abc import Iterator
from dataclasses import Field, fields
from textwrap import fill
from typing import Any

from edgc.config import GROUPS, PRESETS, EDGCConfig, Study, knobs

WIDTH = 100  # characters
INTRODUCTION = (
    "These flags change how EDGC compresses. Many runs need only --edgc-preset, and most only the first group. With "
    "Megatron they stand beside --edgc. In Python each flag is the field of edgc.config.EDGCConfig with the same name. "
    "Defaults are those of the default preset, balanced."
)


def description(knob: Field[Any]) -> str:
    """Meaning, default and source of a setting in one line."""
    default = _default(knob)
    return f"{knob.metadata['help']}.{default and f' Default: {default}.'} Source: {knob.metadata['source']}."


def text() -> str:
    """Every flag by group."""
    lines = [fill(INTRODUCTION, WIDTH)]
    for title, members in _groups():
        lines += ["", f"{title}:"]
        for knob in members:
            choices, unit = knob.metadata["choices"], knob.metadata["unit"]
            value = f"{{{','.join(choices)}}}" if choices else "" if unit == "switch" else f"<{unit}>"
            lines.append(f"  {_spelling(knob)} {value}".rstrip())
            lines.append(fill(description(knob), WIDTH, initial_indent=" " * 8, subsequent_indent=" " * 8))
    return "\n".join(lines) + "\n"


def markdown() -> str:
    """The page docs/flags.md."""
    lines = ["# Flags", "", _marked(INTRODUCTION), ""]
    lines += ["`python -m edgc flags` prints this list; `python -m edgc flags --markdown` writes this page."]
    for title, members in _groups():
        lines += ["", f"## {title}", "", "| flag | meaning | unit | default | source |", "|---|---|---|---|---|"]
        for knob in members:
            meta = knob.metadata
            choices = "; one of " + ", ".join(f"`{choice}`" for choice in meta["choices"]) if meta["choices"] else ""
            lines.append(
                f"| `{_spelling(knob)}` | {_marked(meta['help'])}{choices} | {meta['unit']} | {_default(knob)} "
                f"| {_linked(meta['source'])} |"
            )
    lines += ["", "## Levers for studies", "", "`--edgc-study NAME=VALUE ...` varies what no run needs to set.", ""]
    lines += ["| name | meaning | unit | default | source |", "|---|---|---|---|---|"]
    for lever in fields(Study):
        meta = lever.metadata
        choices = "; one of " + ", ".join(f"`{choice}`" for choice in meta["choices"]) if meta["choices"] else ""
        lines.append(
            f"| `{lever.name}` | {_marked(meta['help'])}{choices} | {meta['unit']} | {_value(lever.default)} "
            f"| {_linked(meta['source'])} |"
        )
    lines += ["", "## What the presets set", "", f"| | {' | '.join(f'`{name}`' for name in PRESETS)} |"]
    lines += ["|---" * (len(PRESETS) + 1) + "|"]
    levers = {lever.name for lever in fields(Study)}
    for knob in (*knobs(), *fields(Study)):
        if any(knob.name in preset for preset in PRESETS.values()):
            values = (_value(preset.get(knob.name, knob.default)) for preset in PRESETS.values())
            name = _name(knob) if knob.name not in levers else f"--edgc-study {knob.name}"
            lines.append(f"| `{name}` | {' | '.join(values)} |")
    return "\n".join(lines) + "\n"


def _groups() -> Iterator[tuple[str, list[Field[Any]]]]:
    by_name = {knob.name: knob for knob in knobs()}
    for title, names in GROUPS.items():
        yield title, [by_name[name] for name in names]


def _name(knob: Field[Any]) -> str:
    return "--edgc-" + knob.name.replace("_", "-")


def _spelling(knob: Field[Any]) -> str:
    name = _name(knob)
    return f"{name}, {name.replace('--edgc-', '--edgc-no-')}" if knob.metadata["unit"] == "switch" else name


def _default(knob: Field[Any]) -> str:
    # A setting without one, and the preset, say in their help what holds then.
    return "" if knob.name == "preset" else _value(getattr(EDGCConfig.from_preset({}), knob.name))


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return "" if value is None or isinstance(value, Study) else str(value)


def _marked(words: str) -> str:
    return re.sub(r"(--edgc[\w-]*|edgc\.[\w.]+)", r"`\1`", words)


def _linked(source: str) -> str:
    source = re.sub(r"arXiv (\d+\.\d+)", r"[arXiv \1](https://arxiv.org/abs/\1)", source)
    return re.sub(r"docs/(\S+\.md)", r"[\1](\1)", source)
