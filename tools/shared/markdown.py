"""Tables in Markdown."""

from collections.abc import Iterable, Sequence


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(cells: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [row(cells), "|" + "---|" * len(cells)]
