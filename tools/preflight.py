"""Check on every node, before training, that what the flags ask for is there.

    python tools/preflight.py [--processes-per-node 8] [flags of pretrain_gpt.py]

checks this machine. On several nodes each prints what it has as one line, and one process compares:

    srun --ntasks-per-node 1 python tools/preflight.py --facts [flags] >facts
    python tools/preflight.py --nodes 8 [--processes-per-node 8] [flags] <facts

scripts/pretrain.sh does so before it trains; ``PREFLIGHT_ONLY=1`` stops there. Each problem is one line on stderr that
names the nodes and what mends it; the status is then 1. Where only kernels are missing that Megatron can do without,
the flags that turn them off are printed on stdout. No process group is made.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.launching.checks import shape_of
from tools.launching.configs import LaunchError
from tools.launching.node import from_lines, gather, to_line
from tools.launching.node_checks import check, fitting_flags, summary
from tools.shared.command import command_parser, say_error


def main(argv: list[str] | None = None) -> int:
    """Check and print; returns the exit status."""
    parser = command_parser(__doc__, passes_on=True)
    parser.add_argument("--processes-per-node", type=int, default=1, help="for training, on each node (default: 1)")
    parser.add_argument("--facts", action="store_true", help="print what this node has, and check nothing")
    parser.add_argument("--nodes", type=int, help="read what this many nodes have printed from the standard input")
    options, flags = parser.parse_known_args(argv)
    try:
        shape = shape_of(flags)
        if options.nodes is None:
            printed = os.dup(1)
            os.dup2(2, 1)  # what an import prints is no fact
            nodes = [gather(shape.edgc_cpu, flags)]
            sys.stdout.flush()
            os.dup2(printed, 1)
        else:
            nodes = from_lines(sys.stdin.read().splitlines())
    except LaunchError as error:
        say_error("preflight", error)
        return 2
    if options.facts:
        print(to_line(nodes[0]))
        return 0
    found = check(nodes, options.nodes or 1, shape, options.processes_per_node)
    for problem in found:
        say_error("preflight", problem)
    if found:
        return 1
    added = fitting_flags(nodes[0], shape, flags)
    for flag, why in added.items():
        print(f"preflight: {why}: adding {flag}", file=sys.stderr)
    print(f"preflight: {summary(nodes)}", file=sys.stderr)
    print(*added)
    return 0


if __name__ == "__main__":
    sys.exit(main())
