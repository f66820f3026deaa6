"""``pretrain_gpt.py``, which also records when the reductions of each step begin and end.

    python -m tools.network.recorded_run FILE [arguments of pretrain_gpt.py]

Each step adds a line to FILE: the seconds of the machine's clock at which this process ended its backward pass, and at
which its gradients were summed.
"""

import sys
import time
from pathlib import Path
from typing import Any

import pretrain_gpt
from megatron.edgc.recipes import cpu


def record(file: Path) -> None:
    """From now on Megatron's DDP writes there."""
    from megatron.core.distributed import DistributedDataParallel  # must see the redirection to the CPU

    finish = DistributedDataParallel.finish_grad_sync

    def finish_and_tell(ddp: Any, *args: Any, **kwargs: Any) -> None:
        begin = time.monotonic()
        finish(ddp, *args, **kwargs)
        with file.open("a") as lines:
            lines.write(f"{begin:.4f} {time.monotonic():.4f}\n")

    DistributedDataParallel.finish_grad_sync = finish_and_tell


def main(argv: list[str]) -> int:
    """Train; returns the exit status."""
    file, redirect = Path(argv[0]), cpu.redirect

    def redirect_and_record() -> None:
        redirect()
        record(file)

    cpu.redirect = redirect_and_record
    sys.argv[1:] = argv[1:]
    return pretrain_gpt.main()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
