"""LoCo (Xie et al. 2024, arXiv 2407.04480): 4 bits and a moving average of past errors, kept in 8 bits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.config import EDGCConfig
from edgc.engines.base import MatrixSpec
from edgc.engines.rounding import Rounding
from edgc.error_feedback import ErrorFeedback
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
        feedback: ErrorFeedback,
        communicator: Communicator,
    ) -> Steps[None]:
        before = dict(feedback.errors)
        yield from super().reduce(gradients, ranks, feedback, communicator)
        if all(feedback.errors.get(name) is before.get(name) for name in gradients):
            return  # not finite: nothing was stored
        self.steps += 1
        for name in gradients:
            if self.steps % RESET_EVERY == 0:
                feedback.clear(name)
                continue
            error = (1 - BETA) * feedback.errors[name]
            if name in before:
                error += BETA * before[name].view_as(error)
            feedback.store(name, _in_8_bits(error))


def _in_8_bits(error: Tensor) -> Tensor:
    eight = wire("int8")
    flat = torch.nn.functional.pad(error.reshape(-1), (0, -error.numel() % GROUP)).unsqueeze(0)
    return eight.decode(eight.encode(flat))[0, : error.numel()].view_as(error)
