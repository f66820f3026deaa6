"""What reductions cost: in seconds, before a run is planned, and in bytes, for its controller."""

from collections.abc import Sequence

import torch

from edgc.comm.collectives import Communicator
from edgc.comm.wire import wire
from edgc.compress import probe
from edgc.compress.engines.rows import ROW_FORMAT, Rows
from edgc.compress.sent_bytes import sent_bytes, uncompressed_value_bytes
from edgc.config import EDGCConfig
from edgc.engines import engine_class
from edgc.plan.by_volume.choices import PLANNED_FORMATS
from edgc.plan.by_volume.reduction_sizes import ReductionSizes
from edgc.plan.run import Run
from edgc.plan.selection import select
from edgc.plan.times.comm_cost import StageCost
from edgc.specs import MatrixSpec, Parameter


def reduction_sizes(config: EDGCConfig, run: Run) -> ReductionSizes:
    """The sizes that the controller of a run needs."""
    bytes_per_value = {name: run.rounded_share * wire(name).bytes_per_value() for name in PLANNED_FORMATS}

    def factors(matrix: MatrixSpec) -> float:  # of an engine that may have none
        size: float = engine_class(config.engine).bytes_per_rank(matrix, config)
        return size

    uncompressed = uncompressed_value_bytes(config, run)
    return ReductionSizes(factors, Rows.message_bytes, ROW_FORMAT, bytes_per_value, uncompressed, run)


def reduction_cost(
    units: Sequence[Sequence[Parameter]],
    config: EDGCConfig,
    run: Run,
    communicator: Communicator,
    device: torch.device,
) -> StageCost | None:
    """The cost of reducing this process's layers: timed on its link, or computed from ``link_gbps``. None where no rank
    depends on it.

    ``units``: the parameters that are reduced together. Every process of the communicator must call this at the same
    time.
    """
    selections = [select(unit, config) for unit in units if unit]
    whole = select([parameter for unit in units for parameter in unit], config)
    if not config.rank_depends_on_link or not whole.matrices or run.alone:
        return None
    if config.ranks.link_gbps is None:
        return probe.probe(selections, config, communicator, device, run)
    return sent_bytes(whole, config, communicator.world_size, run).over(config.ranks.link_gbps)
