"""``python -m edgc flags``: EDGC's flags, without those of the host."""

import argparse
import sys

from edgc import __version__, flags


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m edgc")
    parser.add_argument("--version", action="version", version=f"edgc {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("flags", help="print EDGC's flags, those that most runs need first")
    command.add_argument("--markdown", action="store_true", help="as the page docs/flags.md")
    sys.stdout.write(flags.markdown() if parser.parse_args().markdown else flags.text())


if __name__ == "__main__":
    main()
