"""What compressing the gradients of one pipeline stage costs: fused kernels, plain torch, PyTorch's hook, a copy.

    python tools/bench_gpu.py [--models gpt2_12.1b gpt2_2.5b] [--ranks 16 32 64 128] [--layers N] [--repetitions 20]
        [--write docs/gpu.md]

One process, so that no message is waited for: what is timed is compressing and decompressing alone. On a GPU by
events, on a CPU by its clock, as the page says: such times are no GPU's. Contenders take turns within each repetition,
and inputs rotate through more memory than a cache has; times are medians.

- copy: a copy within the device of as many bytes as low rank with error feedback moves at the least, which are 3 reads
  and 2 writes of the gradient. Its share of a time is the share of the roofline.
- fused, plain: this project's, in fp32 as PyTorch's hook is, and in the formats of ``balanced``; all matrices have one
  rank, which makes more of them equal than the presets' ranks by matrix do.
- hook: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook on the same tensors.
- The bytes that are saved over the time give the link below which compressing takes less time than it saves, without
  latency and overlap.

With ``--write`` the tables take the place of those between two comments in that file, and the figures go to a JSON file
of its name.
"""

import sys
import tempfile
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

import torch
import torch.distributed as dist

from tools.benchmarks.common import versions
from tools.benchmarks.gpu import break_even_gbps, exactness, measure, sampling
from tools.benchmarks.gpu_tables import tables
from tools.benchmarks.stage import Stage
from tools.launching.configs import LaunchError
from tools.shared.command import command_parser, say_error
from tools.shared.files import PageError, around_tables, write_tables
from tools.shared.machine import device_name

START = "<!-- tools/bench_gpu.py -->"


def main(argv: list[str] | None = None) -> int:
    """Measure what the command line asks for; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2_12.1b", "gpt2_2.5b"], help="names in configs/models/")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, help="at most so many of a stage (default: all)")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between this file's two comments")
    arguments = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        if options.write is not None:
            around_tables(options.write, START)  # what is wrong with it is said before an hour has gone
        known = [Stage.of(name, options.layers) for name in options.models]
    except (LaunchError, PageError) as error:
        say_error("bench_gpu", error)
        return 2
    stages = []
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        for stage in known:
            rows = [row for rank in options.ranks for row in measure(stage, rank, options.repetitions, device)]
            for row in rows:
                row["break_even_gbps"] = break_even_gbps(stage, row)
            stages.append(
                {
                    "title": stage.title,
                    "elements": stage.elements,
                    "data_parallel": stage.data_parallel,
                    "rows": rows,
                    "sampling": sampling(stage, options.repetitions, device),
                    "exactness": {rank: exactness(stage, rank, device) for rank in options.ranks},
                }
            )
        dist.destroy_process_group()
    result = {
        "command": " ".join(["python tools/bench_gpu.py", *arguments]),
        "device_type": device.type,
        "device": device_name(device.type == "cuda"),
        "versions": versions(),
        "repetitions": options.repetitions,
        "stages": stages,
    }
    text = tables(result)
    print(text)
    if options.write is not None:
        write_tables(options.write, START, text, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
