"""The command line and the messages of all commands. Python 3.9 is enough."""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter


def command_parser(description: str | None, *, passes_on: bool = False) -> ArgumentParser:
    """A parser that shows a command's docstring as it is.

    ``passes_on``: the command hands flags that it does not know to another one, so its own cannot be abbreviated.
    """
    return ArgumentParser(
        description=description, formatter_class=RawDescriptionHelpFormatter, allow_abbrev=not passes_on
    )


def end_on_signals() -> None:
    """Let a SIGTERM, and the end of the terminal, end the process as an exception does, so that what it has started
    ends with it.
    """
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda caught, _: sys.exit(128 + caught))


def say_error(command: str, error: object) -> None:
    """One line on stderr that says what is wrong."""
    print(f"{command}: error: {error}", file=sys.stderr)


def reason(error: BaseException) -> str:
    """An exception's kind and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
