"""LoCo (Xie et al. 2024, arXiv 2407.04480): 4 bits and a moving average of past errors, kept in 8 bits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.engines.base import MatrixSpec, Reduced
from edgc.engines.rounding import Rounding
from edgc.wire import GROUP, wire

# the settings of DeepSpeed's implementation: err_beta and reset_T of zeropp_loco_param
BETA = 0.8
RESET_EVERY = 1024


class LoCo(Rounding):
    """4-bit rounding whose error is error = beta * error + (1 - beta) * new error, rounded to 8 bits, reset at times.

    So unlike the other engines it forgets a part of what it could not send. On a machine with the memory of a GPU the
    8 bits would be stored; here their values are.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device, wire("int4"))
        self.steps = 0

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        ranks: Mapping[str, int],
        older: Mapping[str, Tensor],
        communicator: Communicator,
    ) -> Steps[Reduced | None]:
        reduced = yield from super().reduce(gradients, ranks, older, communicator)
        if reduced is None:
            return None
        errors = {}
        if (self.steps + 1) % RESET_EVERY:
            for name, error in reduced.errors.items():
                before = older[name].view_as(error) if name in older else torch.zeros_like(error)
                errors[name] = _in_8_bits((1 - BETA) * error + BETA * before)
        return Reduced(errors, self._advance)

    def _advance(self) -> None:
        self.steps += 1


def _in_8_bits(error: Tensor) -> Tensor:
    eight = wire("int8")
    flat = torch.nn.functional.pad(error.reshape(-1), (0, -error.numel() % GROUP)).unsqueeze(0)
    return eight.decode(eight.encode(flat))[0, : error.numel()].view_as(error)
