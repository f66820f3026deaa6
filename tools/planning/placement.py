"""Where the processes of a run are in a cluster, and what that leaves each of the links that they use.

What it assumes:

- All-reduces, reduce-scatters and all-gathers go round a ring in the order of ranks, one ring for each tensor rank and
  pipeline stage. A ring is as fast as its slowest link. Where several of its GPUs share a node, it uses the network of
  all of them: NCCL makes several rings, and was measured so (NVIDIA/nccl, issue 569).
- In an all-to-all, with which a sum in few bits begins, each GPU sends every other one its part, over its own network.
- What crosses between racks in one direction shares the rack's uplink evenly: reductions among themselves, and messages
  between stages among themselves.
- Each part of an all-reduce goes twice round its ring, that of a reduce-scatter or an all-gather once. It waits for the
  uplinks' latency each time that it crosses one.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

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

    def fewest(self, path: Sequence[Edge]) -> int:
        """How many of a path's GPUs are on the node that has fewest of them."""
        return min(Counter(map(self.node, {gpu for edge in path for gpu in edge})).values())

    def links(self, groups: Sequence[Sequence[Sequence[Edge]]], rounds: int) -> list[Link]:
        """The link of each group of paths, which are edges. What is sent goes ``rounds`` times along one."""
        crossing = [edge for paths in groups for path in paths for edge in path if self.crosses(edge)]
        leave = Counter(self.rack(source) for source, _ in crossing)
        enter = Counter(self.rack(target) for _, target in crossing)

        def gbps(edge: Edge, gpus: int) -> float:
            nodes = [self.node(gpu) for gpu in edge]
            if nodes[0] == nodes[1]:
                return self.inside
            slowest = min(self.slow_gbps if self.slow_gbps and node < self.slow_nodes else self.gbps for node in nodes)
            rate = min(gpus * slowest, self.inside)
            if self.crosses(edge) and self.uplink_gbps is not None:
                rate = min(rate, self.uplink_gbps / max(leave[self.rack(edge[0])], enter[self.rack(edge[1])]))
            return rate

        found = []
        for paths in groups:
            rate = min((gbps(edge, self.fewest(path)) for path in paths for edge in path), default=self.inside)
            crossings = max((sum(map(self.crosses, path)) for path in paths), default=0)
            found.append(Link(rate, self.latency + rounds * crossings * self.uplink_seconds))
        return found

    def direct(self, groups: Sequence[Sequence[Sequence[int]]]) -> list[Link]:
        """The link of all-to-alls, of each set of groups of GPUs. It takes the bytes that a GPU sends in all."""
        load: Counter[int] = Counter()  # of each rack's uplink, by bytes of a GPU
        for group in (group for several in groups for group in several if len(group) > 1):
            for rack, here in Counter(map(self.rack, group)).items():
                load[rack] += here * (len(group) - here) / (len(group) - 1)  # type: ignore[assignment]

        def gbps(gpu: int, group: Sequence[int]) -> float:
            others, here = len(group) - 1, sum(self.node(one) == self.node(gpu) for one in group)
            rates = [self.inside * others / (here - 1)] if here > 1 else []
            if here <= others:
                own = self.slow_gbps if self.slow_gbps and self.node(gpu) < self.slow_nodes else self.gbps
                rates.append(own * others / (others + 1 - here))
            if self.uplink_gbps is not None and load[self.rack(gpu)]:
                rates.append(self.uplink_gbps / load[self.rack(gpu)])
            return min(rates)

        found = []
        for several in groups:
            rate = min((gbps(gpu, group) for group in several if len(group) > 1 for gpu in group), default=self.inside)
            crosses = any(len(set(map(self.rack, group))) > 1 for group in several)
            found.append(Link(rate, self.latency + crosses * self.uplink_seconds))
        return found


class StageLinks(NamedTuple):
    """What a stage sends over: to the next stage, to the one before, and in its reductions. ``ring``: all-reduces;
    ``once``: reduce-scatters and all-gathers; ``direct``: all-to-alls. ``tokens``: those of tokens among experts.
    ``tensor``: all-reduces among its tensor ranks.
    """

    next: Link
    before: Link
    ring: Link
    once: Link
    direct: Link
    tokens: Link
    tensor: Link


@dataclass(frozen=True)
class Placement:
    """Which process is on which GPU. Tensor ranks lie side by side; then Megatron counts replicas before stages, or
    ``stages_first`` stages before replicas (``--use-tp-pp-dp-mapping``). Every ``experts`` replicas share out the
    experts, of whose gradients the share ``of_experts`` is.
    """

    tensor: int
    replicas: int
    pipeline: int
    stages_first: bool = False
    experts: int = 1
    of_experts: float = 0.0

    def gpu(self, tensor: int, replica: int, stage: int) -> int:
        outer = stage + self.pipeline * replica if self.stages_first else replica + self.replicas * stage
        return tensor + self.tensor * outer

    def groups(self, stage: int, of_experts: bool = False) -> list[list[int]]:
        """The GPUs that reduce a stage's gradients among themselves, or those of its experts."""
        step = self.experts if of_experts else 1
        return [
            [self.gpu(tensor, one, stage) for one in range(first, self.replicas, step)]
            for tensor in range(self.tensor)
            for first in range(step)
        ]

    def sharing_experts(self, stage: int) -> list[list[int]]:
        """The GPUs that send tokens to each other's experts."""
        every = range(0, self.replicas, self.experts)
        return [
            [self.gpu(tensor, first + one, stage) for one in range(self.experts)]
            for tensor in range(self.tensor)
            for first in every
        ]

    def rings(self, stage: int, of_experts: bool = False) -> list[list[Edge]]:
        """Of the reductions of a stage, or of those of its experts."""
        return [_ring(gpus) for gpus in self.groups(stage, of_experts) if len(gpus) > 1]

    def tensor_rings(self, stage: int) -> list[list[Edge]]:
        """Of the sums of a stage's activations, and of their gradients, among its tensor ranks."""
        groups = [
            [self.gpu(tensor, replica, stage) for tensor in range(self.tensor)] for replica in range(self.replicas)
        ]
        return [_ring(gpus) for gpus in groups if len(gpus) > 1]

    def rings_stay_in_nodes(self, network: Network) -> bool:
        """Whether no reduction leaves a node."""
        rings = [ring for stage in range(self.pipeline) for ring in self.rings(stage)]
        return all(network.node(source) == network.node(target) for ring in rings for source, target in ring)

    def messages(self, stage: int, to: int, wraps: bool) -> list[list[Edge]]:
        """What a stage sends to the one beside it, ``to``; ``wraps``: the last is beside the first, as with several
        chunks.
        """
        if wraps and self.pipeline > 1:
            to %= self.pipeline
        if not 0 <= to < self.pipeline:
            return []
        return [
            [(self.gpu(tensor, replica, stage), self.gpu(tensor, replica, to))]
            for tensor in range(self.tensor)
            for replica in range(self.replicas)
        ]

    def links(self, network: Network, wraps: bool = False) -> list[StageLinks]:
        """Of each stage."""
        stages = range(self.pipeline)
        ways = [self.messages(stage, stage + step, wraps) for step in (1, -1) for stage in stages]
        messages, tokens = network.links(ways, 1), network.direct([self.sharing_experts(stage) for stage in stages])
        reductions = self._reductions(network, of_experts=False)
        if self.of_experts:
            both = zip(reductions, self._reductions(network, of_experts=True), strict=True)
            reductions = [[self._one_after_another(*pair) for pair in zip(*kinds, strict=True)] for kinds in both]
        tensor = network.links([self.tensor_rings(stage) for stage in stages], 2)
        parts = messages[: self.pipeline], messages[self.pipeline :], *reductions, tokens, tensor
        return [StageLinks(*links) for links in zip(*parts, strict=True)]

    def _reductions(self, network: Network, of_experts: bool) -> list[list[Link]]:
        """Links of each stage: of all-reduces, of what goes round once, and of all-to-alls."""
        stages = range(self.pipeline)
        rings = [self.rings(stage, of_experts) for stage in stages]
        direct = network.direct([self.groups(stage, of_experts) for stage in stages])
        return [network.links(rings, 2), network.links(rings, 1), direct]

    def _one_after_another(self, shared: Link, experts: Link) -> Link:
        """The link of what goes over one, and then, as far as it is of experts, over the other."""
        rate = 1 / ((1 - self.of_experts) / shared.gbps + self.of_experts / experts.gbps)
        return Link(rate, max(shared.latency, experts.latency))


def _ring(gpus: Sequence[int]) -> list[Edge]:
    """Each to the next, and the last to the first."""
    return [*pairwise(gpus), (gpus[-1], gpus[0])]
