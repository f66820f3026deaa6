"""Pretraining where every sum over a process group takes 40 ms longer, whoever asks for it, unless it is tiny.

    python tests/distributed/slow_link_run.py MEGATRON'S FLAGS

Nothing else then sets how long a reduction of a small model takes.
"""

import time
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron.edgc.recipes import cpu

cpu.redirect()

from megatron.edgc.recipes.pretrain import pretrain_gpt  # noqa: E402

SECONDS = 0.04
TINY = 200  # values: losses and norms, and what ranks tell each other to start together

all_reduce = dist.all_reduce


def slow(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
    if tensor.numel() > TINY:
        time.sleep(SECONDS)
    return all_reduce(tensor, *args, **kwargs)


dist.all_reduce = slow

if __name__ == "__main__":
    pretrain_gpt(True)
