"""Files that a command writes: whole or not at all, and parts of pages."""

import fcntl
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

END = "<!-- end -->"


def with_ending(path: Path, ending: str) -> Path:
    """The path with this ending behind its name, in which a dot, as in ``gpt2_12.1b``, begins no ending."""
    return path.with_name(path.name + ending)


def write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all, in a folder that is made if there is none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        draft.write_bytes(content)
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


def write_json(
    path: Path, content: object, *, indent: int = 2, default: Callable[[object], object] | None = None
) -> None:
    """Write content as JSON; ``default`` turns what JSON has no type for into something that it has."""
    write(path, (json.dumps(content, indent=indent, default=default) + "\n").encode())


@contextmanager
def locked(lock: Path) -> Iterator[None]:
    """Hold this file's lock, after waiting for the process that has it. It ends with the process as well."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as opened:
        with suppress(OSError):  # a file system without locks
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


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
