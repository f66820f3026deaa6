"""Tables in Markdown."""

from collections.abc import Iterable, Sequence

from edgc.plan.rank_plan import NO_RANK


def row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def header(cells: Sequence[str]) -> list[str]:
    """The first two lines of a table."""
    return [row(cells), "|" + "---|" * len(cells)]


def rank_in_words(rank: int | None) -> str:
    """The rank as tables have it: ``dense``, ``rounded`` without a rank, or the number."""
    return "dense" if rank is None else "rounded" if rank == NO_RANK else str(rank)
