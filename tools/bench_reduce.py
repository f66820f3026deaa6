"""Time and bytes of one matrix's reduction, dense against low rank, phase by phase.

    python tools/bench_reduce.py [--processes 2] [--repetitions 10] [--shapes 1024x4096 ...] [--ranks 32 ...]
        [--output docs/bench/reduce.json]

Uses NCCL and one GPU a process where there are as many, else gloo on the CPU. Dense and compressed reductions
alternate; times are medians over the repetitions, of the process for which each was longest. Phases are those that a
profiler shows under the names ``edgc/...`` in training, too; on a GPU they are times of kernels.
"""

import json
import os
import tempfile
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from torch.multiprocessing.spawn import spawn

from tools.benchmarks.common import versions
from tools.benchmarks.reduction import page, process, table
from tools.shared.command import command_parser
from tools.shared.files import write, write_json

SHAPES = ((512, 512), (512, 2048), (1024, 1024), (1024, 4096))
RANKS = (16, 32, 64, 160)


def _shape(text: str) -> tuple[int, int]:
    rows, _, cols = text.partition("x")
    return int(rows), int(cols)


def main() -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--shapes", nargs="+", type=_shape, default=SHAPES, help="ROWSxCOLUMNS")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument(
        "--output", type=Path, help="JSON file for the raw result; a page with the table comes beside it"
    )
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(process, (options, folder), options.processes)  # type: ignore[no-untyped-call]
        result = json.loads(Path(folder, "rows.json").read_text())
    result.update(
        processes=options.processes,
        repetitions=options.repetitions,
        machine=f"{os.cpu_count()} cores, {result.pop('device')}",
        versions=versions(),
    )
    print(table(result["rows"]))
    if options.output:
        write_json(options.output, result, indent=1)
        write(options.output.with_suffix(".md"), page(result, options.output.name).encode())


if __name__ == "__main__":
    main()
