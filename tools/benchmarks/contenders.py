"""Ways to compress one stage's gradients: this project's, and PyTorch's hook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from edgc.comm.collectives import run_to_end
from edgc.config import EDGCConfig
from edgc.plan.selection import Selection
from tools.benchmarks.common import BALANCED, make_reducer
from tools.benchmarks.stage import Stage

WARM_UP = 9  # steps: the hook's first two are no low rank, and ``balanced`` has a basis for each of eight
FP32: dict[str, Any] = {"iteration_sampling_rate": 1e-6, "min_saving": 1.0}
CONTENDERS: dict[str, dict[str, Any]] = {
    "fused": {**FP32, "kernels": "fused"},
    "plain": FP32,
    "fused, balanced": {**FP32, **BALANCED, "kernels": "fused"},
    "plain, balanced": {**FP32, **BALANCED},
}

Step = Callable[[Tensor], object]  # what it is given is compressed, and replaced by what comes out


class Bucket:
    """What PyTorch's hook asks of a ``GradBucket``, which only DDP can make."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor]):
        self._flat, self._views = flat, list(views)

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


def contender(name: str, stage: Stage, rank: int, device: torch.device) -> Step:
    """A step of the contender of this name, all matrices at this rank."""
    if name == "hook":
        assert dist.group.WORLD is not None
        state = PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,  # the least it takes
            min_compression_rate=1,
            batch_tensors_with_same_shape=True,
        )

        def hook(flat: Tensor) -> object:
            bucket: Any = Bucket(flat, list(stage.views(flat).values()))
            return powerSGD_hook(state, bucket).wait()

        return hook
    reducer = make_reducer(Selection(stage.matrices), EDGCConfig.of(**CONTENDERS[name]), device)
    reducer.set_rank(rank, {matrix.name: rank for matrix in stage.matrices})
    iteration = iter(range(1, 10**9))
    return lambda flat: run_to_end(reducer.reduce(stage.views(flat), next(iteration)))
