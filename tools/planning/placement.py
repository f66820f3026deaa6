"""Where the processes of a run are in a cluster, and what that leaves each of the links that they use.

What it assumes:

- Reductions go round a ring in the order of ranks, one ring for each tensor rank and pipeline stage. A ring is as fast
  as its slowest link.
- What crosses between racks in one direction shares the rack's uplink evenly: reductions among themselves, and messages
  between stages among themselves.
- Each part of a sum goes twice round its ring, and waits for the uplinks' latency each time that it crosses one.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tools.planning.simulation import Link

Edge = tuple[int, int]  # GPUs, from and to


@dataclass(frozen=True)
class Network:
    """Nodes of GPUs. All rates are in Gbit/s and of one direction.

    ``gbps``: of one GPU to other nodes; the first ``slow_nodes`` have ``slow_gbps`` instead. ``inside``: of one GPU to
    others of its node. ``latency``: seconds of any message. ``racks``: so many equal groups of nodes, one after
    another. The GPUs of one share ``uplink_gbps`` to the other racks, and what crosses takes ``uplink_seconds`` longer.
    """

    nodes: int
    gpus_per_node: int
    gbps: float
    inside: float
    latency: float
    racks: int = 1
    uplink_gbps: float | None = None
    uplink_seconds: float = 0.0
    slow_nodes: int = 0
    slow_gbps: float | None = None

    def node(self, gpu: int) -> int:
        return gpu // self.gpus_per_node

    def rack(self, gpu: int) -> int:
        return self.node(gpu) * self.racks // self.nodes

    def crosses(self, edge: Edge) -> bool:
        return self.rack(edge[0]) != self.rack(edge[1])

    def links(self, by_stage: Sequence[Sequence[Sequence[Edge]]], rounds: int) -> list[Link]:
        """The link of each stage, whose traffic takes paths of edges. What is sent goes ``rounds`` times along one."""
        crossing = [edge for paths in by_stage for path in paths for edge in path if self.crosses(edge)]
        leave = Counter(self.rack(source) for source, _ in crossing)
        enter = Counter(self.rack(target) for _, target in crossing)

        def gbps(edge: Edge) -> float:
            nodes = [self.node(gpu) for gpu in edge]
            if nodes[0] == nodes[1]:
                return self.inside
            rate = min(self.slow_gbps if self.slow_gbps and node < self.slow_nodes else self.gbps for node in nodes)
            if self.crosses(edge) and self.uplink_gbps is not None:
                rate = min(rate, self.uplink_gbps / max(leave[self.rack(edge[0])], enter[self.rack(edge[1])]))
            return rate

        found = []
        for paths in by_stage:
            rate = min((gbps(edge) for path in paths for edge in path), default=self.inside)
            crossings = max((sum(map(self.crosses, path)) for path in paths), default=0)
            found.append(Link(rate, self.latency + rounds * crossings * self.uplink_seconds))
        return found


@dataclass(frozen=True)
class Placement:
    """Which process is on which GPU. Tensor ranks lie side by side; then Megatron counts replicas before stages, or
    ``stages_first`` stages before replicas (``--use-tp-pp-dp-mapping``).
    """

    tensor: int
    replicas: int
    pipeline: int
    stages_first: bool = False

    def gpu(self, tensor: int, replica: int, stage: int) -> int:
        outer = stage + self.pipeline * replica if self.stages_first else replica + self.replicas * stage
        return tensor + self.tensor * outer

    def rings(self, stage: int) -> list[list[Edge]]:
        """Of the reductions of a stage."""
        if self.replicas == 1:
            return []
        found = []
        for tensor in range(self.tensor):
            gpus = [self.gpu(tensor, replica, stage) for replica in range(self.replicas)]
            found.append([*pairwise(gpus), (gpus[-1], gpus[0])])
        return found

    def messages(self, stage: int, wraps: bool) -> list[list[Edge]]:
        """What a stage sends to its neighbours; ``wraps``: the last is one of the first, as with several chunks."""
        neighbours = [stage - 1, stage + 1]
        if wraps and self.pipeline > 1:
            neighbours = [place % self.pipeline for place in neighbours]
        return [
            [(self.gpu(tensor, replica, stage), self.gpu(tensor, replica, place))]
            for place in neighbours
            if 0 <= place < self.pipeline
            for tensor in range(self.tensor)
            for replica in range(self.replicas)
        ]

    def links(self, network: Network, wraps: bool = False) -> Iterator[tuple[Link, Link]]:
        """Of each stage, that of its messages and that of its reductions."""
        stages = range(self.pipeline)
        messages = network.links([self.messages(stage, wraps) for stage in stages], 1)
        return zip(messages, network.links([self.rings(stage) for stage in stages], 2), strict=True)
