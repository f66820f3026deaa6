"""Real training in which something goes wrong inside a reduction: what a network or a GPU may do, not what EDGC does.

    faulty_run.py FAULT ...

FAULT: ``message``: in the sixth iteration process 1 receives bytes that decode to infinity. ``basis``: from the sixth
iteration on, process 1 computes orthonormal bases that differ in the last bits. ``settings``, ``all settings``: before
training process 1, or each, finds settings that EDGC cannot take. The other arguments are those of ``pretrain_gpt.py``.
"""

import os
import sys

from megatron.edgc.recipes import cpu

fault = sys.argv.pop(1)
cpu.redirect()

import torch  # noqa: E402
from megatron.training import get_args  # noqa: E402

import pretrain_gpt  # noqa: E402
from edgc.comm.wire import Wire  # noqa: E402
from edgc.compress import lowrank  # noqa: E402
from edgc.config import ConfigError  # noqa: E402

FROM = 5  # iterations are counted from 0
decode, orthonormalise = Wire.decode, lowrank.orthonormalise


def faulty() -> bool:
    return os.environ["RANK"] == "1" and getattr(get_args(), "curr_iteration", 0) >= FROM


def infinite(wire: Wire, message: torch.Tensor) -> torch.Tensor:
    values = decode(wire, message)
    if faulty() and get_args().curr_iteration == FROM:
        values = values + torch.inf
    return values


def nearly(factor: torch.Tensor) -> torch.Tensor:
    basis = orthonormalise(factor)
    return basis * (1 + 1e-7) if faulty() else basis


def refused() -> None:
    if fault == "all settings" or os.environ["RANK"] == "1":
        raise ConfigError("what EDGC cannot take")


if "settings" in fault:
    pretrain_gpt.check_megatron = refused
elif fault == "message":
    Wire.decode = infinite  # type: ignore[method-assign]
else:
    lowrank.orthonormalise = nearly
sys.exit(pretrain_gpt.main())
