"""The part of YAML in which configs/{models,clusters}/*.yaml and configs/methods.yaml are written, without PyYAML.

``DRY_RUN=1`` works with nothing but Python 3.9 (scripts/pretrain.sh), which brings no YAML.
"""

from __future__ import annotations

import re
from typing import Any

_COMMENT = re.compile(r"(^|\s)#.*")
_ENTRY = re.compile(r"(?P<indent> *)(?P<key>[a-zA-Z][\w.-]*):(?: +(?P<value>.*))?")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")
# What begins something else than plain text, and plain words that are no text.
_OTHER = re.compile(
    r"[][{}&*!|>'\"%@`,?]|- |[-+.]?\d|[-+]?\.(inf|nan)|(true|false|yes|no|on|off|null|~|=|<<)$", re.IGNORECASE
)


def mapping(text: str) -> dict[str, Any]:
    """Keys with numbers, plain text, text folded by ``>-``, or one more level of such keys.

    Raises ``ValueError``, with the line's number, for any other YAML.
    """
    content: dict[str, Any] = {}
    outer, inner = "", ""  # the key without a value whose entries follow, and their indentation
    lines = [line.rstrip(" ") for line in text.splitlines()]
    place = 0
    for number, line in enumerate(lines, 1):
        if "\t" in line:
            raise _unreadable(number)
    while place < len(lines):
        line = _COMMENT.sub("", lines[place]).rstrip()
        place += 1
        if not line:
            continue
        entry = _ENTRY.fullmatch(line)
        if entry is None or _OTHER.match(entry["key"]):
            raise _unreadable(place)
        indent, key, value = entry["indent"], entry["key"], entry["value"]
        if indent:
            if not outer or indent != (inner or indent):
                raise _unreadable(place)
            inner = indent
            target = content[outer] = content[outer] or {}
        else:
            outer, inner, target = key if value is None else "", "", content
        if key in target or (indent and value is None):
            raise _unreadable(place)
        if value == ">-":
            folded: list[str] = []
            margin = " " * (len(lines[place]) - len(lines[place].lstrip())) if place < len(lines) else ""
            while place < len(lines) and lines[place].startswith(indent + " ") and lines[place].strip():
                if not re.match(rf"{margin}\S", lines[place]):
                    raise _unreadable(place + 1)
                folded.append(lines[place].strip())
                place += 1
            target[key] = " ".join(folded)
        else:
            target[key] = _scalar(value, place)
    return content


def _scalar(text: str | None, line: int) -> Any:
    if text is None:
        return None
    if _NUMBER.fullmatch(text):
        return float(text) if "." in text else int(text)
    if _OTHER.match(text) or ": " in text or text.endswith(":"):
        raise _unreadable(line)
    return text


def _unreadable(line: int) -> ValueError:
    return ValueError(f"line {line}: only PyYAML can read it (pip install pyyaml)")
