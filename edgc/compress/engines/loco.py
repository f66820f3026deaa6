"""LoCo (Xie et al. 2024, arXiv 2407.04480): 4 bits and a moving average of past errors, kept in 8 bits."""

from collections.abc import Sequence

import torch

from edgc.comm.wire import wire
from edgc.compress.engines.rounding import Rounding
from edgc.compress.error_feedback import ErrorRule
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec


class LoCo(Rounding):
    """4-bit rounding whose error is a moving average, stored in 8 bits and reset at times.

    So unlike the other engines it forgets a part of what it could not send. Constants: err_beta and reset_T of
    DeepSpeed's zeropp_loco_param.
    """

    error_rule = ErrorRule(wire("int8"), average=0.8, reset_every=1024)

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device):
        super().__init__(matrices, config, device, "int4")
