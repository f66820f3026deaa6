"""A counted step of a model's stage, and what it would take on a GPU by the model of ``gpu_model``."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from edgc.comm.collectives import all_reduce_bytes
from edgc.compress.sent_bytes import rank_of_volume
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.hosts.units import MAX_UNITS
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec
from tools.benchmarks.common import BALANCED
from tools.benchmarks.gpu_model import step_time
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_counts import BY_MATRIX, count_step, parameters, transient_bytes
from tools.launching.configs import CLUSTERS, MODELS, Cluster, LaunchError, Model, read
from tools.shared.gpus import GPU, GPU_OF
from tools.shared.methods import equalised
from tools.shared.paper_ranks import paper_ranks

RANK = 64
SINGLE = (32, RANK, 128)  # those of the benchmark on a GPU
MIXED = (48, 64, 80, 96)  # as a budget gives them, though more of them
PAPER_AT_RANK = EDGCConfig.of(**PRESETS["paper"], static_rank=RANK)
BALANCED_AT_RANK = EDGCConfig.of(**BALANCED, static_rank=RANK, min_saving=1.0)
ROUNDED = {name: EDGCConfig.of(engine=name) for name in ("int8", "int4")}
ROUNDED |= {equalised(name): config.replace(equalise=True) for name, config in ROUNDED.items()}


@dataclass(frozen=True)
class Count:
    """One way to reduce, and what a step of it takes; seconds by the model."""

    model: str
    gpu: str
    link_gbps: float
    method: str
    ranks: tuple[int, ...]  # 0 where the method has none
    units: int  # at most; 0: by matrix
    launches: int
    collectives: int
    gradient_bytes: int  # of the stage, in fp32
    moved_bytes: int
    flops: int
    sent_bytes: float
    transient_bytes: int | None  # the most beside gradients and state; of units, where it was counted
    host_seconds: float
    device_seconds: float
    latency_seconds: float
    wire_seconds: float
    dense_seconds: float  # of an all-reduce in fp32
    warm_up_transient_bytes: int | None


def gradient_bytes(stage: Stage) -> int:
    """Of a stage's parameters, in fp32."""
    return 4 * sum(parameter.elements for parameter in parameters(stage))


def all_ways(name: str) -> Iterator[Count]:
    """The page's rows of a model on its cluster: by matrix and in units, with their memory. Raises ``LaunchError``."""
    stage, count = _on_its_cluster(name)
    warm_up = transient_bytes(stage, BALANCED_AT_RANK, None)
    for method, config, ranks in (
        *(("paper", PAPER_AT_RANK, (rank,)) for rank in _ranks_of_paper(stage.matrices, SINGLE)),
        *(("balanced", BALANCED_AT_RANK, (rank,)) for rank in SINGLE),
        ("balanced", BALANCED_AT_RANK, MIXED),
        ("balanced", BALANCED_AT_RANK, (max(MIXED),)),
        ("balanced", BALANCED_AT_RANK, (balanced_rank(stage),)),
    ):
        if ranks == (RANK,):
            yield count(method, config, ranks, BY_MATRIX, None, warm_up)
        yield count(method, config, ranks, MAX_UNITS, transient_bytes(stage, config, ranks), warm_up)
    for method, config in ROUNDED.items():
        memory = transient_bytes(stage, config, (NO_RANK,))
        yield count(method, config, (NO_RANK,), MAX_UNITS, memory, warm_up)


def by_units(name: str, numbers: Sequence[int]) -> Iterator[Count]:
    """Steps of a model on its cluster, cut into so many units, with their memory. Raises ``LaunchError``."""
    stage, count = _on_its_cluster(name)
    for method, config, rank in (
        ("paper", PAPER_AT_RANK, RANK),
        ("balanced", BALANCED_AT_RANK, RANK),
        ("balanced", BALANCED_AT_RANK, balanced_rank(stage)),
        ("int4", ROUNDED["int4"], NO_RANK),
    ):
        for units in numbers:
            yield count(method, config, (rank,), units, transient_bytes(stage, config, (rank,), units))


def _on_its_cluster(name: str) -> tuple[Stage, Callable[..., Count]]:
    model = read(Model, MODELS, name)
    cluster, stage = read(Cluster, CLUSTERS, model.cluster), Stage.of(name, None)
    if cluster.link_gbps is None or cluster.compute_capability not in GPU_OF:
        raise LaunchError(f"{name}: its cluster {cluster.name} has no link_gbps, or no GPU whose constants are known")
    gpu = GPU_OF[cluster.compute_capability]
    return stage, partial(_count, replace(stage, title=model.title), gpu, cluster.link_gbps)


def ways_in_units(stage: Stage, gpu: GPU, link_gbps: float) -> Iterator[Count]:
    """What a planner needs of a stage: one rank for all matrices, or none, in units, without their memory."""
    # what one replica alone would send says nothing of the messages
    stage = replace(stage, data_parallel=max(stage.data_parallel, 2))
    for rank in _ranks_of_paper(stage.matrices, (RANK,)):
        yield _count(stage, gpu, link_gbps, "paper", PAPER_AT_RANK, (rank,))
    for rank in sorted({RANK, max(MIXED), balanced_rank(stage)}):
        yield _count(stage, gpu, link_gbps, "balanced", BALANCED_AT_RANK, (rank,))
    for method, config in ROUNDED.items():
        yield _count(stage, gpu, link_gbps, method, config, (NO_RANK,))


def _ranks_of_paper(matrices: Sequence[MatrixSpec], small: Sequence[int]) -> list[int]:
    """Those between which a step's time is about a straight line: it leaps where a matrix begins to travel whole."""
    *leaps, largest = paper_ranks(matrices)
    after = [rank + RANK_MULTIPLE for rank in leaps]
    return sorted({*small, min(2 * SINGLE[-1], largest), *leaps, *after, largest})


def balanced_rank(stage: Stage) -> int:
    """The rank that the volume of `balanced` pays for."""
    return rank_of_volume(Selection(stage.matrices), BALANCED_AT_RANK, PRESETS["balanced"]["volume"])


def _count(
    stage: Stage,
    gpu: GPU,
    link_gbps: float,
    method: str,
    config: EDGCConfig,
    ranks: Sequence[int],
    units: int = MAX_UNITS,
    memory: int | None = None,
    warm_up: int | None = None,
) -> Count:
    counts = count_step(stage, config, ranks, units)
    time = step_time(counts, gpu, link_gbps)
    gradients = gradient_bytes(stage)
    return Count(
        model=stage.title,
        gpu=gpu.name,
        link_gbps=link_gbps,
        method=method,
        ranks=tuple(ranks),
        units=units,
        launches=counts.launches,
        collectives=counts.collectives,
        gradient_bytes=gradients,
        moved_bytes=counts.nbytes,
        flops=counts.flops,
        sent_bytes=counts.sent,
        transient_bytes=memory,
        host_seconds=time.host,
        device_seconds=time.device,
        latency_seconds=time.latency,
        wire_seconds=time.wire,
        dense_seconds=all_reduce_bytes(gradients, stage.data_parallel) * 8 / (link_gbps * 1e9),
        warm_up_transient_bytes=warm_up,
    )
