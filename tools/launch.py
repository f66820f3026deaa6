"""Check the shapes of a training run and print its command for scripts/pretrain.sh.

    python tools/launch.py --model gpt2_12.1b --method edgc --data runs/data/openwebtext --run runs/gpt2_12.1b
        [--cluster h100_64] [--nodes N] [--processes-per-node N] [--seed N] [--record] [--data-placeholder]
        [flags of pretrain_gpt.py]

A model is a file of configs/models/, a cluster one of configs/clusters/, a method a line of configs/methods.yaml.
Prints assignments for the shell: ``arguments``, what follows ``pretrain_gpt.py``, an array; ``nodes`` and
``processes_per_node``; ``iterations`` of the whole run; its ``folder``; ``notes``, lines to show, an array. What cannot
work is refused with one line, before a GPU is touched. Python 3.9 is enough, with or without PyYAML.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.launching.attempts import ATTEMPTS, check_checkpoint, record
from tools.launching.configs import LaunchError
from tools.launching.plan import plan
from tools.shared.command import command_parser, say_error


def main(argv: list[str] | None = None) -> int:
    """Check and print; returns the exit status."""
    parser = command_parser(__doc__, passes_on=True)
    parser.add_argument("--model", required=True, help="name in configs/models/, or a file")
    parser.add_argument("--method", required=True, help="name in configs/methods.yaml")
    parser.add_argument("--cluster", help="name in configs/clusters/, or a file (default: that of the model)")
    parser.add_argument("--data", help="prefix that tools/preprocess_data.py was given")
    parser.add_argument("--run", required=True, type=Path, help="folder in which the run gets one of the method's name")
    parser.add_argument("--nodes", type=int, help="nodes at hand (default: those of the cluster)")
    parser.add_argument("--processes-per-node", type=int, help="processes on each (default: the cluster's GPUs)")
    parser.add_argument("--seed", type=int, default=1234)
    parser.add_argument("--record", action="store_true", help=f"add the command to {ATTEMPTS} in the run's folder")
    parser.add_argument("--data-placeholder", action="store_true", help="go on without data, to show the command")
    options, extra = parser.parse_known_args(argv)
    try:
        launch = plan(options, extra)
        check_checkpoint(launch)
        if options.record:
            record(launch)
    except (LaunchError, OSError) as error:
        say_error("launch", error)
        return 2
    print(f"folder={shlex.quote(str(launch.folder))}")
    print(f"arguments=({shlex.join(launch.arguments)})")
    print(f"nodes={launch.nodes}")
    print(f"processes_per_node={launch.processes_per_node}")
    print(f"iterations={launch.iterations}")
    print(f"notes=({shlex.join(launch.notes)})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
