"""What benchmarks of reductions measure with and on."""

import platform
from importlib.metadata import version
from typing import Any

import torch
import torch.distributed as dist

from edgc.comm.collectives import Communicator
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.plan.selection import Selection
from tools._root import REPOSITORY
from tools.shared.checkout import commit

# The formats of ``balanced`` without its rank policy: a benchmark gives the ranks.
BALANCED: dict[str, Any] = {name: value for name, value in PRESETS["balanced"].items() if name not in ("volume", "pp")}


def make_reducer(selection: Selection, config: EDGCConfig, device: torch.device) -> GradientReducer:
    """A reducer over all processes, which starts to count its traffic."""
    assert dist.group.WORLD is not None
    return GradientReducer(selection, config, Communicator.uncounted(dist.group.WORLD), device)


def versions() -> dict[str, str]:
    """Of what the times depend on; of EDGC with the commit."""
    edgc = f"{version('edgc')} at {commit(REPOSITORY, 'edgc', 'tools/benchmarks')}"
    return {"python": platform.python_version(), "torch": version("torch"), "edgc": edgc}
