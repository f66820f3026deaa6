"""What EDGC prints for the user beside its log."""

import sys
from collections.abc import Iterable


def print_warning(text: str) -> None:
    """Print a warning line to the standard error stream. The caller sees to it that one process alone does."""
    print(f"edgc: warning: {text}", file=sys.stderr, flush=True)


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to the standard output, in one piece. The caller sees to it that one process alone does."""
    print("\n".join(f"edgc | {line}" for line in lines), flush=True)
