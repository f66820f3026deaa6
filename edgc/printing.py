"""What EDGC prints for the user beside its log."""

import sys


def print_warning(text: str) -> None:
    """Print a warning line to the standard error stream. The caller sees to it that one process alone does."""
    print(f"edgc: warning: {text}", file=sys.stderr, flush=True)
