"""What this process tells the others before a run is planned: its parameters, and what reducing them costs."""

from collections.abc import Sequence

import torch

from edgc.comm.collectives import Communicator
from edgc.comm.wire import wire
from edgc.compress import probe
from edgc.compress.engines import engine_class
from edgc.compress.engines.rows import ROW_FORMAT, Rows
from edgc.config import EDGCConfig
from edgc.plan.allocation import allocate
from edgc.plan.controller import StageCost, smallest_rank
from edgc.plan.run import MessageSizes, Run
from edgc.specs import MatrixSpec, Parameter

CHOICES = "int8", "int6", "int5", "int4", "int3", "int2"  # of the formats, those that a budget chooses from


def message_sizes(config: EDGCConfig, run: Run) -> MessageSizes:
    """For the controller of a run. Where the host's own sum is a reduce-scatter, which sends half of what an all-reduce
    does, so do rounded values. Factors and rows do not: in that unit they take twice as much.
    """

    def factors(matrix: MatrixSpec) -> float:
        cost: float = engine_class(config.engine).bytes_per_rank(matrix, config)
        return 2 * cost if run.scatters else cost

    def rows(matrix: MatrixSpec) -> tuple[float, float]:
        each, norms = Rows.message_bytes(matrix)
        return (2 * each, 2 * norms) if run.scatters else (each, norms)

    warmup = wire(config.formats.dense_wire)
    uncompressed = float(run.gradient_bytes) if warmup.exact else warmup.bytes_per_value()
    # sums in 16 bits are known to all processes, so that what they cut off can be fed back
    whole = 2 if run.scatters and run.gradient_bytes == 2 else 1
    bytes_per_value = {name: whole * wire(name).bytes_per_value() for name in CHOICES}
    return MessageSizes(factors, rows, ROW_FORMAT, bytes_per_value, uncompressed, run)


def reduction_cost(
    groups: Sequence[Sequence[Parameter]],
    config: EDGCConfig,
    run: Run,
    communicator: Communicator,
    device: torch.device,
) -> StageCost | None:
    """Of the layers of this process: timed on its link, or computed from ``link_gbps``; None where no rank depends on
    it.

    ``groups``: the parameters of each group that is reduced by itself. Every process of the communicator must call
    this at the same time.
    """
    allocations = [allocate(group, config, smallest_rank(config)) for group in groups if group]
    whole = allocate([parameter for group in groups for parameter in group], config, smallest_rank(config))
    if not config.dynamic or not whole.matrices or run.alone:
        return None
    half = run.gradient_bytes == 2
    if config.ranks.link_gbps is None:
        return probe.probe(allocations, config, communicator, device, run.scatters, half, run.overlapped)
    return probe.cost_of_link(whole, config, communicator.world_size, config.ranks.link_gbps, run.scatters, half)
