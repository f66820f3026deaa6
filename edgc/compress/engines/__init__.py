"""Reduction engines behind one interface. A new idea is one small file here and one line in ``ENGINES``."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from edgc.comm.wire import wire
from edgc.compress.engines.alternating import Alternating
from edgc.compress.engines.base import Elementwise, Engine, LowRank
from edgc.compress.engines.loco import LoCo
from edgc.compress.engines.powersgd import PowerSGD
from edgc.compress.engines.rounding import Rounding
from edgc.compress.engines.sparse import RandomK, TopK
from edgc.config import EDGCConfig
from edgc.specs import MatrixSpec

Build = Callable[[Sequence[MatrixSpec], EDGCConfig, torch.device], Elementwise | LowRank]


def _rounding(name: str, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device) -> Rounding:
    return Rounding(matrices, config, device, wire(name, stochastic=config.stochastic, hadamard=config.hadamard))


# "dense" is no engine: where nothing is compressed, the host's own all-reduce is left in place.
ENGINES: Mapping[str, Build] = {
    "powersgd": PowerSGD,
    "alternating": Alternating,
    "topk": TopK,
    "randomk": RandomK,
    "loco": LoCo,
    "onebit": partial(_rounding, "int1"),
    **{name: partial(_rounding, name) for name in ("bf16", "int8", "int4", "int3", "int2")},
}

__all__ = [
    "ENGINES",
    "Alternating",
    "Elementwise",
    "Engine",
    "LoCo",
    "LowRank",
    "MatrixSpec",
    "PowerSGD",
    "RandomK",
    "Rounding",
    "TopK",
]
