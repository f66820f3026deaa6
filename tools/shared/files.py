"""Files that a command writes: whole or not at all, and parts of pages."""

import json
from collections.abc import Callable
from pathlib import Path

END = "<!-- end -->"


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    draft = path.with_name(f".{path.name}.draft")
    draft.write_bytes(content)
    draft.replace(path)


def write_json(
    path: Path, content: object, *, indent: int = 2, default: Callable[[object], object] | None = None
) -> None:
    """Write content as JSON; ``default`` turns what JSON has no type for into something that it has."""
    write(path, (json.dumps(content, indent=indent, default=default) + "\n").encode())


class PageError(Exception):
    """A page that cannot take tables; the message is one line that says why."""


def around_tables(page: Path, start: str) -> tuple[str, str]:
    """What a page has before the comment ``start`` and after ``END``. Raises ``PageError`` where it lacks one."""
    try:
        before, found, rest = page.read_text(encoding="utf-8").partition(start)
    except (OSError, UnicodeDecodeError) as error:
        raise PageError(f"{page}: {error}") from error
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise PageError(f"{page}: tables stand between the lines {start} and {END}, which it does not have")
    return before, after


def write_tables(page: Path, start: str, tables: str, figures: object) -> None:
    """Replace what stands between the comments ``start`` and ``END`` of a Markdown page by tables.

    The figures go to a JSON file beside the page, of the same name. Raises ``PageError``.
    """
    before, after = around_tables(page, start)
    write(page, f"{before}{start}\n{tables}\n\n{END}{after}".encode())
    write_json(page.with_suffix(".json"), figures, indent=1)
