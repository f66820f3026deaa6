"""What a model of configs/models/ needs on its cluster: parameters, memory of a GPU, and bytes of a step.

    python tools/describe.py configs/models/gpt2_12.1b.yaml [MORE ...] [--cluster h100_64] [--ranks 32 128]
        [--write docs/paper-runs.md] [flags of pretrain_gpt.py]

No GPU is needed. Megatron checks the arguments as on that cluster; then each pipeline stage is built by Megatron on the
meta device, of which only shapes exist. With ``--write`` the tables take the place of those between two comments in
that file, and the figures go to a JSON file of its name.

- weights, gradients, optimizer: exact, by the types that the flags choose; Adam. Activations: Megatron's own estimate
  for the first stage, which has most. EDGC: errors and kept factors at the largest of the ranks, twice where Megatron
  may skip a step or run it again (a loss scale, checks of the loss): then EDGC keeps the state before the step. What
  NCCL, CUDA and the allocator take comes on top.
- bytes of a step: those that one process sends for its stage's gradients: Megatron's reduction, and low rank in the
  formats of the method at each rank, each with the sum of a tied embedding between the first and the last stage; and
  beside them the messages to other stages, as Megatron sends them, and the distributed optimizer's updated weights: as
  Megatron gathers them and, after an ``or``, as EDGC does where rounding them saves time.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, read
from tools.launching.needs import needs
from tools.launching.needs_table import misnamed, table
from tools.shared.command import command_parser, say_error
from tools.shared.files import PageError, around_tables, write_tables

START = "<!-- tools/describe.py -->"


def main(argv: list[str] | None = None) -> int:
    """Print the tables; returns the exit status."""
    parser = command_parser(__doc__, passes_on=True)
    parser.add_argument("models", nargs="+", metavar="MODEL", help="file in configs/models/, or a name there")
    parser.add_argument("--cluster", help="name in configs/clusters/, or a file (default: that of the model)")
    parser.add_argument("--method", default="edgc", help="name in configs/methods.yaml (default: edgc)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[32, 128], help="ranks to show (default: 32 128)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between this file's two comments")
    options, extra = parser.parse_known_args(argv)
    found = []
    try:
        if options.write is not None:
            around_tables(options.write, START)  # what is wrong with it is said before a minute has gone
        with ProcessPoolExecutor(
            1, mp_context=multiprocessing.get_context("spawn"), max_tasks_per_child=1
        ) as processes:
            for name in options.models:
                model = read(Model, MODELS, name)
                cluster = read(Cluster, CLUSTERS, options.cluster or model.cluster)
                work = partial(needs, model, cluster, options.method, options.ranks, extra)
                found.append(processes.submit(work).result())
    except (LaunchError, PageError) as error:
        say_error("describe", error)
        return 2
    tables = "\n\n".join(table(one) for one in found)
    print(tables)
    if options.write is not None:
        write_tables(options.write, START, tables, [asdict(one) for one in found])
    wrong = [message for message in map(misnamed, found) if message]
    for message in wrong:
        say_error("describe", message)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
