"""A model of configs/models/ on a cluster of configs/clusters/, as the simulation takes it."""

import argparse
import json
import warnings
from bisect import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from edgc.comm.collectives import all_reduce_bytes
from edgc.compress.engines.powersgd import STORED
from edgc.config.presets import PRESETS
from edgc.hosts.units import MAX_UNITS as UNITS
from edgc.plan.by_volume.choices import ROUNDED
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.times.comm_cost import MESSAGE_GAIN
from edgc.plan.times.gather_times import GatherTimes
from edgc.plan.times.link_times import MAX_TIME_RATIO, LinkTimes, ReductionTime, may_replace_low_rank
from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, read, split_flags
from tools.planning.placement import Network, Placement, StageLinks
from tools.planning.simulation import Link, StageTimes, Step, Unit, simulate
from tools.shared.gpus import GPU, GPU_OF
from tools.shared.layer import Layer, add_arguments

# Assumptions, none of them measured here: the share of a GPU's peak in 16 bits that a training step reaches; bytes of a
# parameter that its optimizer reads and writes at its memory's speed; seconds of latency of a collective among nodes.
REACHED = 0.4
OPTIMIZER_BYTES = 24.0
LATENCY = 40e-6

NOT_PLANNED = (
    *("--use-megatron-fsdp", "--use-torch-fsdp2", "--num-distributed-optimizer-instances", "--multi-latent-attention"),
    *("--grad-reduce-in-bf16", "--recompute-granularity", "--use-precision-aware-optimizer"),
    *("--pipeline-model-parallel-layout", "--mtp-num-layers", "--rampup-batch-size", "--step-batch-size-schedule"),
    *("--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers"),
    *("--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"),
    *("--fp8-format", "--fp4-format", "--moe-layer-freq", "--moe-latent-size", "--expert-tensor-parallel-size"),
    *("--moe-shared-expert-intermediate-size", "--is-hybrid-model", "--hybrid-layer-pattern"),
    *("--hybrid-override-pattern", "--heterogeneous-layers-config-path"),
    "--heterogeneous-layers-config-encoded-json",
)


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
        flags = _flags([*split_flags(cluster.flags, cluster.name), *split_flags(model.flags, model.name), *extra])
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
        chunks, parts = _chunks(flags), "pipeline stages"
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
        )

    @property
    def gbps(self) -> float:
        """Of a GPU to other nodes."""
        return self.network.gbps

    def apart(self, gbps: float) -> list[StageLinks]:
        """Links of stages whose replicas and neighbours are all on other nodes."""
        link = Link(gbps, LATENCY)
        return [StageLinks(*[link] * len(StageLinks._fields))] * self.pipeline

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

    def expert_seconds(self, link: Link) -> float:
        """Of a micro-batch through a chunk: its tokens go to their experts and come back, in each layer."""
        if self.experts is None or self.experts.parallel == 1:
            return 0.0
        elsewhere = (self.experts.parallel - 1) / self.experts.parallel
        layers = self.layers / self.pipeline / self.chunks
        return 2 * layers * link.seconds(self.experts.per_token * self.message_bytes * elsewhere)

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
        return layer * self.layers / self.pipeline * in_turn * self.copies

    @property
    def message_bytes(self) -> float:
        """Of activations, or their gradients, in 16 bits. With sequence parallelism a GPU sends its part, else all."""
        whole = 2.0 * self.micro_batch * self.sequence * self.layer.width
        return whole / self.tensor if self.sequence_parallel else whole


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


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise LaunchError(message)


def _parser() -> _Parser:
    """Of the flags that a step's time depends on here."""
    parser = _Parser(allow_abbrev=False, add_help=False)
    add_arguments(parser)
    for flag in ("--num-layers", "--seq-length", "--micro-batch-size", "--global-batch-size"):
        parser.add_argument(flag, type=int, required=True)
    for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
        parser.add_argument(flag, type=int, default=1)
    for flag in ("--num-layers-per-virtual-pipeline-stage", "--num-experts", "--moe-ffn-hidden-size"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--expert-model-parallel-size", type=int, default=1)
    parser.add_argument("--context-parallel-size", type=int, default=1)
    parser.add_argument("--moe-router-topk", type=int, default=2)
    parser.add_argument("--optimizer", default="adam")
    switches = ("--use-distributed-optimizer", "--overlap-grad-reduce", "--bf16", "--fp16", "--sequence-parallel")
    for flag in (*switches, "--accumulate-allreduce-grads-in-fp32"):
        parser.add_argument(flag, action="store_true")
    parser.add_argument("--num-virtual-stages-per-pipeline-rank", type=int)
    return parser


def _flags(given: Sequence[str]) -> argparse.Namespace:
    """Raises ``LaunchError`` for what the planner cannot compute."""
    parser = _parser()
    flags, others = parser.parse_known_args(list(given))
    named = {flag.partition("=")[0] for flag in others}
    unknown = [flag for flag in NOT_PLANNED if flag in named]
    if flags.context_parallel_size > 1:
        unknown.append("--context-parallel-size")
    if flags.optimizer not in ("adam", "sgd"):
        unknown.append(f"--optimizer {flags.optimizer}")
    if unknown:
        raise LaunchError(f"{', '.join(unknown)}: the planner does not know what that costs")
    if not (flags.bf16 or flags.fp16):
        raise LaunchError("the planner knows training in 16 bits alone: give --bf16 or --fp16")
    if flags.fp16 and not flags.accumulate_allreduce_grads_in_fp32:
        raise LaunchError(
            "without --accumulate-allreduce-grads-in-fp32 Megatron sums gradients in fp16: the planner does not know "
            "what that costs with EDGC"
        )
    for action in parser._actions:
        value = getattr(flags, action.dest)
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise LaunchError(f"{action.option_strings[0]} {value}: must be at least 1")
    return flags


def check_names(flags: Sequence[str]) -> None:
    """Raises ``LaunchError`` for flags that neither the planner nor, if it is there, Megatron or EDGC has."""
    named = [flag.partition("=")[0] for flag in flags if flag.startswith("--")]
    others = set(named) - set(_parser()._option_string_actions) - set(NOT_PLANNED)
    if not others:
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from megatron.training.arguments import add_megatron_arguments  # which takes seconds

            from megatron.edgc import add_arguments as add_edgc
    except ImportError:
        return
    known = add_edgc(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))._option_string_actions
    if unknown := sorted(others - set(known)):
        raise LaunchError(f"{', '.join(unknown)}: pretrain_gpt.py has no such flag")


def _chunks(flags: argparse.Namespace) -> int:
    """Of a stage, in an interleaved schedule. Raises ``LaunchError`` for layers that do not divide."""
    if flags.num_virtual_stages_per_pipeline_rank:
        return int(flags.num_virtual_stages_per_pipeline_rank)
    if flags.num_layers_per_virtual_pipeline_stage is None:
        return 1
    here = flags.num_layers // flags.pipeline_model_parallel_size
    if here % flags.num_layers_per_virtual_pipeline_stage:
        raise LaunchError(
            f"--num-layers-per-virtual-pipeline-stage {flags.num_layers_per_virtual_pipeline_stage} does not divide "
            f"the {here} layers of a stage"
        )
    return int(here // flags.num_layers_per_virtual_pipeline_stage)


@dataclass(frozen=True)
class Contender:
    """A way to reduce gradients. ``bits``: of a gradient value that travels whole, 32 or 16; ``method``: else, of the
    counted steps; ``rank``: a rank, ``NO_RANK`` where the method has none, None: that of the ``volume``; ``messages``:
    the method that rounds gradients between stages, if any; ``weights``: the one that rounds gathered weights.
    """

    name: str
    flags: str
    bits: int = 32
    method: str = ""
    rank: int | None = None
    volume: float = 1.0
    messages: str = ""
    weights: str = ""


def _preset(name: str) -> Contender:
    """One with a volume, which rounds gradients between stages, and gathered weights."""
    own = PRESETS[name]
    messages, weights = (own[setting].partition(":")[2] for setting in ("pp", "param_wire"))
    return Contender(
        name,
        f"--edgc-preset {name}",
        method="balanced",
        volume=own["volume"],
        messages=messages,
        weights=weights,
    )


FP32_FACTORS = "paper"  # a method whose sums are all-reduces in fp32, not in few bits
# An engine without a preset has a dense warm-up in fp32 of a tenth of the run.
_SHORT_WARM_UP = "--edgc-dense-wire int8 --edgc-warmup-fraction 0.025"
CONTENDERS = (
    Contender("dense fp32", "--edgc-engine dense"),
    Contender("dense bf16", "--edgc-engine dense --grad-reduce-in-bf16", bits=16),  # Megatron's own sum
    Contender("int8", f"--edgc-engine int8 {_SHORT_WARM_UP}", method="int8", rank=NO_RANK),
    Contender("int4", f"--edgc-engine int4 {_SHORT_WARM_UP}", method="int4", rank=NO_RANK),
    Contender("PowerSGD, rank 64", "--edgc-preset paper --edgc-static-rank 64", method="paper", rank=64),
    *map(_preset, ("safe", "balanced", "fast")),
)


@dataclass(frozen=True)
class Compressing:
    """Seconds that a stage of so many parameters computes at a rank, if the method has one, and the bytes of its
    messages, before they are sent round: lines of docs/bench/steps.json, or measured ones of the same fields.
    ``per_value``: those bytes of a parameter at the smallest rank.
    """

    elements: float
    ranks: tuple[float, ...]
    seconds: tuple[float, ...]
    sent: tuple[float, ...]
    messages: int
    per_value: float

    @classmethod
    def read(cls, path: Path, title: str, gradient_bytes: int, method: str, gpu: GPU) -> "Compressing | None":
        """Those of a stage with so many bytes of gradients, on such a GPU; None: the file has none.

        Raises ``LaunchError`` for a file that holds no counted steps.
        """
        try:
            rows: list[dict[str, Any]] = json.loads(path.read_text())["rows"]
            wanted = (title, gradient_bytes, gpu.name)
            return cls.of([row for row in rows if (row["model"], row["gradient_bytes"], row["gpu"]) == wanted], method)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LaunchError(f"{path}: has no counted steps: {error}") from error

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]], method: str) -> "Compressing | None":
        """From the lines of one stage; None: none has this method, in units and with one rank for all matrices."""
        own = [row for row in rows if row["method"] == method and row["units"] and len(row["ranks"]) == 1]
        if not own:
            return None
        own.sort(key=lambda row: float(row["ranks"][0]))
        elements = own[0]["gradient_bytes"] / 4
        sent = tuple(float(row["sent_bytes"]) / _ring(row) for row in own)
        return cls(
            elements,
            tuple(float(row["ranks"][0]) for row in own),
            tuple(max(row["host_seconds"], row["device_seconds"]) for row in own),
            sent,
            own[0]["collectives"],
            sent[0] / elements,
        )

    def with_experts(self, experts: "Compressing", ring: float) -> "Compressing":
        """Layers and experts together. ``ring``: bytes that a process sends for each byte of a message among those
        that hold its experts, over those that it sends among all replicas.
        """
        ranks = tuple(sorted({*self.ranks, *experts.ranks}))
        return Compressing(
            self.elements + experts.elements,
            ranks,
            tuple(self.at(rank) + experts.at(rank) for rank in ranks),
            tuple(self.bytes_at(rank) + ring * experts.bytes_at(rank) for rank in ranks),
            self.messages + experts.messages,
            self.per_value,
        )

    def at(self, rank: float) -> float:
        """Seconds: between counted ranks a straight line, which goes on beyond them; below the smallest its time."""
        return _on_line(max(rank, self.ranks[0]), self.ranks, self.seconds)

    def bytes_at(self, rank: float) -> float:
        """Of the messages at a rank. One counted rank says nothing of what has none: then all go with the rank."""
        if self.ranks == (NO_RANK,):
            return self.sent[0]
        if len(self.ranks) == 1:
            return rank * self.sent[0] / self.ranks[0]
        return _on_line(rank, self.ranks, self.sent)

    def rank_of(self, sent: float) -> int:
        """The largest rank whose messages have no more bytes."""
        if len(self.ranks) == 1:
            return int(sent * self.ranks[0] / self.sent[0])
        return int(_on_line(sent, self.sent, self.ranks))


@dataclass(frozen=True)
class Prediction:
    """A step of one contender. ``gbps``: of the slowest reductions; ``rank``: None for what is sent whole."""

    contender: Contender
    gbps: float
    rank: int | None
    step: Step
    gradient_bytes: float  # of a process and step, the layers of a stage

    @property
    def compresses(self) -> bool:
        return self.rank is not None

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def exposed(self) -> float:
        return self.step.exposed()


def predict(
    training: Training, contender: Contender, methods: Mapping[str, Compressing], links: Sequence[StageLinks]
) -> Prediction:
    """One step on these links. ``methods``: what each method takes; one that is not known reduces dense."""
    compressing = methods.get(contender.method)
    half = 0.5 if training.scatters else 1.0
    whole = training.dense_bytes
    slowest = max((own.ring for own in links), key=lambda ring: ring.seconds(whole))
    sent = whole * contender.bits / 32 * half
    units, rank = _dense(sent, training.scatters), None
    if contender.method and compressing is not None and training.replicas > 1:
        round_trip = all_reduce_bytes(1.0, training.replicas)
        share = training.reduced_elements / compressing.elements

        def sent_by(way: Compressing, rank: int) -> float:
            # a rounded sum goes to the process that needs it, one of factors to all
            return round_trip * share * way.bytes_at(rank) * (half if rank == NO_RANK else 1.0)

        def units_of(way: Compressing, rank: int) -> tuple[Unit, ...]:
            count = way.messages // UNITS
            if rank == NO_RANK:
                count = int(count * half)
            # sums in few bits are an all-to-all and an all-gather each, or the former alone where the host scatters
            over = ("direct", "once") if contender.method != FP32_FACTORS else ("ring",)
            if rank == NO_RANK and training.scatters:
                over = ("direct",)
            each = share * way.at(rank) / UNITS, sent_by(way, rank) / UNITS, max(count, 1), over
            return (Unit.of(*each),) * UNITS

        def alone(units: Sequence[Unit]) -> float:
            """Of the slowest stage."""
            return max(sum(sum(one.computing) + sum(own.seconds(one)) for one in units) for own in reductions)

        reductions = [StageTimes(0.0, 0.0, own.ring, once=own.once, direct=own.direct) for own in links]
        if contender.rank is not None:
            rank = contender.rank
        else:
            most = compressing.rank_of(whole / contender.volume / share / round_trip)
            low_rank = partial(units_of, compressing)
            host = alone(_dense(whole * half, training.scatters))
            rank = _rank_worth_its_time(most, lambda rank: alone(low_rank(rank)), host)
            if (rounding := methods.get(ROUNDED)) is not None:
                times = LinkTimes(
                    ReductionTime(host, half),
                    ReductionTime(alone(units_of(rounding, NO_RANK)), sent_by(rounding, NO_RANK) / whole),
                    ReductionTime(alone(low_rank(rank or RANK_MULTIPLE)), 1 / contender.volume),
                    may_replace_low_rank(contender.volume, half),
                )
                if times.rounding_pays:
                    compressing, rank = rounding, NO_RANK
        sent = whole * half if rank is None else sent_by(compressing, rank)
        units = _dense(sent, training.scatters) if rank is None else units_of(compressing, rank)
    forward = training.forward_seconds()
    sends = [_message(training, methods.get(contender.messages), own.before) for own in links]
    gathers = [_gather(training, methods.get(contender.weights), own.once) for own in links]
    of_first = 1 - 1 / training.chunks  # the first stage sends no gradients of its first chunk
    stages = [
        StageTimes(
            forward=forward + (experts := training.expert_seconds(own.tokens)),
            backward=2 * forward + experts + (rounding if place else of_first * rounding),
            link=own.next,
            before=own.before,
            ring=own.ring,
            once=own.once,
            direct=own.direct,
            activations=training.message_bytes,
            gradients=gradients,
            units=units,
            gathered=gathered,
            rounding_weights=rounding_weights,
            optimizer=OPTIMIZER_BYTES * training.updated_elements / training.gpu.memory,
        )
        for place, (own, (gradients, rounding), (gathered, rounding_weights)) in enumerate(
            zip(links, sends, gathers, strict=True)
        )
    ]
    step = simulate(stages, training.micro_batches, training.chunks, training.overlapped)
    return Prediction(contender, slowest.gbps, rank, step, sent)


def _message(training: Training, rounding: Compressing | None, link: Link) -> tuple[float, float]:
    """Bytes of a message with gradients to the stage before, and seconds of rounding it, if that is worth it."""
    plain = training.message_bytes
    if rounding is None or training.pipeline == 1:
        return plain, 0.0
    values = plain / 2 / rounding.elements
    sent, seconds = plain / 2 * rounding.per_value, values * rounding.at(NO_RANK)
    if MESSAGE_GAIN * (seconds + link.seconds(sent)) > link.seconds(plain):
        return plain, 0.0
    return sent, seconds


def _gather(training: Training, rounding: Compressing | None, link: Link) -> tuple[float, float]:
    """Bytes of updated weights that come back, and seconds of rounding them, if that is worth it."""
    if not training.scatters:
        return 0.0, 0.0
    plain = training.dense_bytes / 4  # once, in 16 bits
    if rounding is None:
        return plain, 0.0
    # of a sum in so few bits, which encodes and decodes more
    sent, seconds = plain / 2 * rounding.per_value, training.reduced_elements / rounding.elements * rounding.at(NO_RANK)
    if not GatherTimes(link.seconds(plain), seconds + link.seconds(sent)).rounding_pays:
        return plain, 0.0
    return sent, seconds


def _ring(row: Mapping[str, Any]) -> float:
    """Bytes that a process sends for each byte of a message, among the processes that a line was counted for."""
    return float(row["dense_seconds"] * row["link_gbps"] * 1e9 / 8 / row["gradient_bytes"])


def _on_line(x: float, xs: Sequence[float], ys: Sequence[float]) -> float:
    """Straight lines through points of rising x, of which the first and the last go on beyond them."""
    if len(xs) == 1:
        return ys[0]
    end = min(max(bisect(xs, x), 1), len(xs) - 1)
    slope = (ys[end] - ys[end - 1]) / (xs[end] - xs[end - 1])
    return ys[end] + (x - xs[end]) * slope


def _rank_worth_its_time(rank: int, seconds: Callable[[int], float], host: float) -> int | None:
    """The largest rank up to this one at which reductions take clearly less than the ``host`` seconds of the host's own
    sum; None: there is none.
    """
    while rank >= RANK_MULTIPLE and seconds(rank) > MAX_TIME_RATIO * host:
        rank = min(rank - RANK_MULTIPLE, int(rank * 0.95) // RANK_MULTIPLE * RANK_MULTIPLE)
    return rank if rank >= RANK_MULTIPLE else None


def _dense(sent: float, scatters: bool) -> tuple[Unit, ...]:
    return (Unit((0.0, 0.0), (sent / UNITS,), ("once" if scatters else "ring",)),) * UNITS
