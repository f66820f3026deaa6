"""LoCo (Xie et al. 2024, arXiv 2407.04480): 4 bits and a moving average of past errors, kept in 8 bits."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Steps
from edgc.comm.wire import Packed, wire
from edgc.compress.engines.base import Cuts, Reduced
from edgc.compress.engines.rounding import Rounding
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec

# the settings of DeepSpeed's implementation: err_beta and reset_T of zeropp_loco_param
BETA = 0.8
RESET_EVERY = 1024
EIGHT_BITS = wire("int8")


class LoCo(Rounding):
    """4-bit rounding whose error is error = beta * error + (1 - beta) * new error, rounded to 8 bits, reset at times.

    So unlike the other engines it forgets a part of what it could not send. On a machine with the memory of a GPU the
    8 bits would be stored; here their values are.
    """

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device, wire("int4"))

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        reduced = yield from super().reduce(gradients, older, iteration, communicator, shards)
        errors = {}
        if (iteration + 1) % RESET_EVERY:
            for name, error in reduced.errors.items():
                before = older[name].values().view_as(error) if name in older else torch.zeros_like(error)
                errors[name] = Packed((1 - BETA) * error + BETA * before, EIGHT_BITS).values()
        return replace(reduced, errors=errors)
