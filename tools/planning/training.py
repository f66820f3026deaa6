"""What a step depends on, from a model of configs/models/, a cluster of configs/clusters/ and more flags."""

import argparse
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgc.comm.collectives import all_reduce_bytes
from edgc.compress.engines.powersgd import STORED
from edgc.config.presets import PRESETS
from edgc.specs import MatrixSpec
from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, read, split_flags
from tools.planning.flags import chunks_of_stage, read_flags
from tools.planning.placement import Network, Placement, StageLinks
from tools.planning.simulation import Link
from tools.shared.gpus import GPU, GPU_OF
from tools.shared.layer import Layer
from tools.shared.paper_ranks import paper_ranks

# Assumptions, none of them measured here: the share of a GPU's peak in 16 bits that a training step reaches; bytes of a
# parameter that its optimizer reads and writes at its memory's speed; seconds of latency of a collective among nodes.
REACHED = 0.4
OPTIMIZER_BYTES = 24.0
LATENCY = 40e-6


@dataclass(frozen=True)
class Experts:
    """Those of every layer: ``count`` in all, of which a process holds one in ``parallel``. ``per_token``: those that a
    token goes to. ``width``: of one, inside.
    """

    count: int
    parallel: int
    per_token: int
    width: int


@dataclass(frozen=True)
class Training:
    """What of a model's flags and its cluster a step depends on."""

    title: str
    layers: int
    layer: Layer
    sequence: int
    tensor: int
    pipeline: int
    chunks: int
    replicas: int
    micro_batch: int
    micro_batches: int
    scatters: bool
    overlapped: bool
    gpu: GPU
    network: Network
    loss_scale: bool
    experts: Experts | None = None
    sequence_parallel: bool = True
    tied: bool = True  # whether the word embedding is the output layer, too
    changed: str = ""  # flags beside those of the files

    @classmethod
    def of(cls, model_name: str, cluster_name: str | None, extra: Sequence[str] = ()) -> "Training":
        """Raises ``LaunchError`` for a cluster of CPUs, one whose link is not known, and sizes that do not divide."""
        model = read(Model, MODELS, model_name)
        cluster = read(Cluster, CLUSTERS, cluster_name or model.cluster)
        if cluster.compute_capability not in GPU_OF:
            known = ", ".join(map(str, GPU_OF))
            raise LaunchError(f"{cluster.name}: compute_capability must be one of {known}: others have no constants")
        if cluster.link_gbps is None:
            raise LaunchError(f"{cluster.name}: link_gbps is missing")
        # the order of tools/launching: what comes last wins
        flags = read_flags([*split_flags(cluster.flags, cluster.name), *split_flags(model.flags, model.name), *extra])
        network = _network(cluster)
        processes = cluster.nodes * cluster.gpus_per_node
        across = flags.tensor_model_parallel_size * flags.pipeline_model_parallel_size
        if processes % across:
            raise LaunchError(f"{cluster.name}: {processes} GPUs do not divide by TP x PP = {across}")
        replicas = processes // across
        if flags.global_batch_size % (replicas * flags.micro_batch_size):
            raise LaunchError(
                f"--global-batch-size {flags.global_batch_size} does not divide by {replicas} replicas of "
                f"micro-batches of {flags.micro_batch_size}"
            )
        _check_layer(flags)
        experts = _experts(flags)
        if experts is not None and replicas % experts.parallel:
            raise LaunchError(
                f"--expert-model-parallel-size {experts.parallel} does not divide the {replicas} replicas of a stage"
            )
        chunks, parts = chunks_of_stage(flags), "pipeline stages"
        if chunks > 1:
            parts += " and their chunks"
        if flags.num_layers % (flags.pipeline_model_parallel_size * chunks):
            raise LaunchError(f"--num-layers {flags.num_layers} does not divide by {parts}")
        micro_batches = flags.global_batch_size // (replicas * flags.micro_batch_size)
        if chunks > 1 and micro_batches % flags.pipeline_model_parallel_size:
            raise LaunchError(
                f"{micro_batches} micro-batches do not divide by {flags.pipeline_model_parallel_size} stages, as an "
                "interleaved schedule needs"
            )
        return cls(
            title=model.title,
            layers=flags.num_layers,
            layer=Layer.of(flags),
            sequence=flags.seq_length,
            tensor=flags.tensor_model_parallel_size,
            pipeline=flags.pipeline_model_parallel_size,
            chunks=chunks,
            replicas=replicas,
            micro_batch=flags.micro_batch_size,
            micro_batches=micro_batches,
            scatters=flags.use_distributed_optimizer,
            overlapped=flags.overlap_grad_reduce,
            gpu=GPU_OF[cluster.compute_capability],
            network=network,
            loss_scale=flags.fp16,
            experts=experts,
            sequence_parallel=flags.sequence_parallel,
            tied=not flags.untie_embeddings_and_output_weights,
            changed=shlex.join(extra),
        )

    @property
    def gbps(self) -> float:
        """Of a GPU to other nodes."""
        return self.network.gbps

    def apart(self, gbps: float) -> list[StageLinks]:
        """Links of stages whose replicas and neighbours are all on other nodes. Tensor ranks share one, if they can."""
        link = Link(gbps, LATENCY)
        own = StageLinks(*[link] * len(StageLinks._fields))
        if self.tensor <= self.network.gpus_per_node:
            own = own._replace(tensor=Link(self.network.inside, LATENCY))
        return [own] * self.pipeline

    def placement(self, stages_first: bool) -> Placement:
        experts = 1 if self.experts is None else self.experts.parallel
        of_experts = all_reduce_bytes(self.expert_elements * 4.0, self.expert_replicas) / (self.dense_bytes or 1.0)
        return Placement(self.tensor, self.replicas, self.pipeline, stages_first, experts, of_experts)

    def placed(self, network: Network, stages_first: bool) -> list[StageLinks]:
        """Links of stages where their processes are."""
        return self.placement(stages_first).links(network, self.chunks > 1)

    @property
    def layers_here(self) -> float:
        """Of a stage, on one of its tensor ranks."""
        return self.layers / self.pipeline / self.tensor

    @property
    def shared_elements(self) -> int:
        """Parameters of a stage's layers on one GPU that all replicas hold; no embeddings."""
        elements = self.layer.attention_elements
        if self.experts is None:
            elements += self.layer.mlp_elements()
        return int(elements * self.layers_here)

    @property
    def expert_elements(self) -> int:
        """Parameters of a stage's experts on one GPU."""
        if self.experts is None:
            return 0
        here = self.experts.count / self.experts.parallel * self.layers_here
        return int(self.layer.mlp_elements(self.experts.width) * here)

    @property
    def expert_replicas(self) -> int:
        """Processes that hold the same experts."""
        return self.replicas // (1 if self.experts is None else self.experts.parallel)

    @property
    def stage_elements(self) -> int:
        """Parameters of a stage's layers on one GPU, embeddings apart."""
        return self.shared_elements + self.expert_elements

    @property
    def reduced_elements(self) -> int:
        """Those of them that another GPU holds as well."""
        return self.shared_elements + (self.expert_elements if self.expert_replicas > 1 else 0)

    @property
    def dense_bytes(self) -> float:
        """That a GPU sends in a dense all-reduce of its layers' gradients in fp32."""
        own = all_reduce_bytes(self.shared_elements * 4.0, self.replicas)
        return own + all_reduce_bytes(self.expert_elements * 4.0, self.expert_replicas)

    @property
    def updated_elements(self) -> float:
        """Parameters that the optimizer of one GPU updates."""
        if not self.scatters:
            return self.stage_elements
        return self.shared_elements / self.replicas + self.expert_elements / self.expert_replicas

    def forward_seconds(self) -> float:
        """Of a micro-batch through a chunk of layers: products of matrices and of the attention."""
        tokens = self.micro_batch * self.sequence
        elements = self.layer.attention_elements
        if self.experts is None:
            elements += self.layer.mlp_elements()
        else:
            elements += self.experts.per_token * self.layer.mlp_elements(self.experts.width)
        per_layer = 2 * elements * tokens + 4 * self.sequence * self.layer.heads * tokens
        flops = per_layer * self.layers_here / self.chunks
        return flops / (REACHED * self.gpu.flops16)

    def tensor_seconds(self, link: Link) -> float:
        """Of a micro-batch through a chunk, in either pass: the sums over its tensor ranks, two in each layer (Shoeybi
        et al. 2019). With sequence parallelism they are reduce-scatters and all-gathers, of as many bytes.
        """
        if self.tensor == 1:
            return 0.0
        layers = self.layers / self.pipeline / self.chunks
        return 2 * layers * link.seconds(all_reduce_bytes(self.activation_bytes, self.tensor))

    def expert_seconds(self, link: Link) -> float:
        """Of a micro-batch through a chunk: its tokens go to their experts and come back, in each layer."""
        if self.experts is None or self.experts.parallel == 1:
            return 0.0
        elsewhere = (self.experts.parallel - 1) / self.experts.parallel
        layers = self.layers / self.pipeline / self.chunks
        return 2 * layers * link.seconds(self.experts.per_token * self.message_bytes * elsewhere)

    @property
    def paper_rank(self) -> int:
        """The largest rank at which any matrix sends at most half of its bytes. With experts, the smaller one of theirs
        and of the other matrices, since beyond that nothing is counted.
        """
        own = self.layer if self.experts is None else replace(self.layer, inside=self.experts.width)
        matrices = [MatrixSpec(name, *shape) for name, shape in own.matrices(self.tensor).items()]
        if self.experts is None:
            return paper_ranks(matrices)[-1]
        of_experts = [matrix for matrix in matrices if matrix.name in ("fc1", "fc2")]
        others = [matrix for matrix in matrices if matrix not in of_experts]
        return min(paper_ranks(of_experts)[-1], paper_ranks(others)[-1])

    @property
    def copies(self) -> int:
        """Of EDGC's state on a GPU: with a loss scale it also keeps that of before a step."""
        return 2 if self.loss_scale else 1

    @property
    def error_bytes(self) -> float:
        """That EDGC keeps on a GPU for the errors of its layers, in fp32."""
        return 4.0 * self.reduced_elements * self.copies

    def factor_bytes(self, rank: int) -> float:
        """That presets with a volume keep on a GPU for factors of this rank, of which they use several in turn."""
        own, of_mlp = self.layer, 1.0
        if self.experts is not None:
            own = replace(own, inside=self.experts.width)
            of_mlp = self.experts.count / self.experts.parallel if self.expert_replicas > 1 else 0.0
        layer = 0.0
        for name, (rows, cols) in own.matrices(self.tensor).items():
            side = min(rows, cols)
            layer += STORED.tensor_bytes(min(rank, side) * side) * (of_mlp if name in ("fc1", "fc2") else 1.0)
        in_turn = int(PRESETS["balanced"]["basis_cycle"])
        # a step replaces one of them, of which a copy is kept
        return layer * self.layers / self.pipeline * (in_turn + self.copies - 1)

    @property
    def message_bytes(self) -> float:
        """Of activations, or their gradients, in 16 bits. With sequence parallelism a GPU sends its part, else all."""
        return self.activation_bytes / self.tensor if self.sequence_parallel else self.activation_bytes

    @property
    def activation_bytes(self) -> float:
        """Of a micro-batch, in 16 bits."""
        return 2.0 * self.micro_batch * self.sequence * self.layer.width


def _network(cluster: Cluster) -> Network:
    """Raises ``LaunchError`` for racks that do not divide the nodes, and for half of a pair of keys."""
    assert cluster.link_gbps is not None and cluster.compute_capability is not None
    racks = cluster.racks or 1
    if cluster.nodes % racks:
        raise LaunchError(f"{cluster.name}: {cluster.nodes} nodes do not divide by racks = {racks}")
    if racks == 1 and (cluster.uplink_gbps or cluster.uplink_ms):
        raise LaunchError(f"{cluster.name}: uplink_gbps and uplink_ms need racks of 2 or more")
    if (cluster.slow_nodes is None) != (cluster.slow_gbps is None):
        raise LaunchError(f"{cluster.name}: slow_nodes and slow_gbps go together")
    return Network(
        cluster.nodes,
        cluster.gpus_per_node,
        cluster.link_gbps,
        cluster.inside_gbps or GPU_OF[cluster.compute_capability].nvlink_gbps,
        LATENCY,
        racks,
        cluster.uplink_gbps,
        (cluster.uplink_ms or 0.0) / 1e3,
        cluster.slow_nodes or 0,
        cluster.slow_gbps,
    )


def _check_layer(flags: argparse.Namespace) -> None:
    """Raises ``LaunchError`` for a layer that tensor parallelism cannot share out evenly."""
    layer, tensor = Layer.of(flags), flags.tensor_model_parallel_size
    groups = flags.num_query_groups if flags.group_query_attention else flags.num_attention_heads
    for name, size in (
        ("--num-attention-heads", flags.num_attention_heads),
        ("--num-query-groups", max(groups, tensor)),  # with fewer than TP, several processes hold the same one
        ("--ffn-hidden-size", layer.inside),
        ("--moe-ffn-hidden-size", flags.moe_ffn_hidden_size or 0),
    ):
        if size % tensor:
            raise LaunchError(f"{name} {size} does not divide by TP = {tensor}")


def _experts(flags: argparse.Namespace) -> Experts | None:
    """Raises ``LaunchError`` for experts that cannot be shared evenly."""
    if flags.num_experts is None:
        return None
    parallel = flags.expert_model_parallel_size
    if flags.num_experts % parallel:
        raise LaunchError(f"--num-experts {flags.num_experts} does not divide by EP = {parallel}")
    if flags.moe_router_topk > flags.num_experts:
        raise LaunchError(f"--moe-router-topk {flags.moe_router_topk}: there are {flags.num_experts} experts")
    return Experts(
        flags.num_experts, parallel, flags.moe_router_topk, flags.moe_ffn_hidden_size or Layer.of(flags).inside
    )
