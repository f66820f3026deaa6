"""Bytes that a reduction will send, computed before it runs, and what they take at a given bandwidth."""

from dataclasses import dataclass

from edgc.comm.collectives import all_reduce_bytes
from edgc.comm.wire import wire
from edgc.config import EDGCConfig
from edgc.engines import engine_class
from edgc.plan.by_volume.choices import rest_format
from edgc.plan.run import Run
from edgc.plan.selection import Selection
from edgc.plan.times.comm_cost import LinearCost, StageCost


@dataclass(frozen=True)
class SentBytes:
    """What a process sends in the reductions of a step of a stage, in bytes.

    ``compressed``: at a rank. ``uncompressed``: in EDGC's own sums without compression. ``host``: in the host's sums.
    """

    compressed: LinearCost
    uncompressed: float
    host: float

    def at_rank(self, rank: int | None) -> float:
        """Bytes at this rank; None: uncompressed."""
        return self.uncompressed if rank is None else self.compressed.at(rank)

    def over(self, gbps: float) -> StageCost:
        """What they take on links of ``gbps`` Gbit/s, without latency."""
        return StageCost(self.compressed, self.uncompressed, self.host).scaled(8 / (gbps * 1e9))


def sent_bytes(selection: Selection, config: EDGCConfig, processes: int, run: Run) -> SentBytes:
    """Bytes of a stage whose data-parallel group has so many processes."""
    # A rounded sum of which each process needs its shard ends halfway, unless one needs most of what there is: so it is
    # with what low rank does not take.
    rest = all_reduce_bytes(_rest_bytes(selection, config), processes)
    factors = all_reduce_bytes(_bytes_per_rank(selection, config), processes)
    values = selection.matrix_elements + selection.other_elements
    uncompressed = all_reduce_bytes(values * uncompressed_value_bytes(config, run), processes)
    host = all_reduce_bytes(values * run.host_value_bytes, processes)
    return SentBytes(LinearCost(rest, factors), uncompressed, host)


def uncompressed_value_bytes(config: EDGCConfig, run: Run) -> float:
    """The bytes of one value in EDGC's own sums without compression: see ``Run.uncompressed_value_bytes``."""
    form = wire(config.formats.dense_wire)
    return run.uncompressed_value_bytes(None if form.exact else form.bytes_per_value())


def rank_of_volume(selection: Selection, config: EDGCConfig, volume: float) -> int:
    """The mean rank at which a step sends ``volume`` times fewer bytes than an all-reduce in fp32."""
    allowed = 4 * (selection.matrix_elements + selection.other_elements) / volume
    return int(LinearCost(_rest_bytes(selection, config), _bytes_per_rank(selection, config)).rank(allowed))


def _rest_bytes(selection: Selection, config: EDGCConfig) -> float:
    """Bytes of a message of what the engine leaves."""
    return selection.other_elements * wire(rest_format(config)).bytes_per_value()


def _bytes_per_rank(selection: Selection, config: EDGCConfig) -> float:
    """Bytes of a message of factors, per unit of rank."""
    engine = engine_class(config.engine)
    return float(sum(engine.bytes_per_rank(matrix, config) for matrix in selection.matrices))
