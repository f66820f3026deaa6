"""The ways to reduce gradients that are compared."""

from dataclasses import dataclass
from typing import Any

from edgc.config.presets import PRESETS
from edgc.config.ranks import Ranks
from edgc.plan.rank_plan import NO_RANK
from tools.shared.methods import equalised


@dataclass(frozen=True)
class Contender:
    """A way to reduce gradients. ``bits``: of a gradient value that travels whole, 32 or 16; ``method``: else, of the
    counted steps; ``rank``: a rank, ``NO_RANK`` where the method has none, None: that of the ``volume``, or without one
    this ``rank_share`` of the largest rank that is not slower than the host's own sum; ``stage_share``: of the stages,
    which are compressed. ``messages``: the method that compresses gradients between stages, if any. One in low rank
    does so for those that a stage waits for idle, at ``message_rank``; None: at the rank of its reductions, where that
    saves time. ``fuses``: it asks for one sum of a tied embedding's copies, so for a pipeline. ``weights``: the method
    that rounds gathered weights; ``warm_up``: the one that rounds gradients in the warm-up, if any, which has this
    ``warm_up_share`` of the run.
    """

    name: str
    flags: str
    bits: int = 32
    method: str = ""
    rank: int | None = None
    volume: float | None = None
    rank_share: float = 1.0
    stage_share: float = 1.0
    messages: str = ""
    message_rank: int | None = None
    fuses: bool = False
    weights: str = ""
    warm_up: str = ""
    warm_up_share: float = 0.0


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
        warm_up=equalised(own["dense_wire"]),
        warm_up_share=own["warmup_fraction"],
    )


def _engine(name: str) -> Contender:
    """One that rounds. Without these flags its warm-up would be a tenth of the run in fp32."""
    flags = f"--edgc-engine {name} --edgc-dense-wire int8 --edgc-warmup-fraction 0.025"
    return Contender(name, flags, method=name, rank=NO_RANK, warm_up="int8", warm_up_share=0.025)


def _powersgd(name: str, flags: str, **settings: Any) -> Contender:
    """One with factors and a warm-up in fp32."""
    return Contender(name, flags, method=FP32_FACTORS, warm_up_share=Ranks().warmup_fraction, **settings)


FP32_FACTORS = "paper"  # a method whose sums are all-reduces in fp32, not in few bits
CONTENDERS = (
    Contender("dense fp32", "--edgc-engine dense"),
    Contender("dense bf16", "--edgc-engine dense --grad-reduce-in-bf16", bits=16),  # Megatron's own sum
    _engine("int8"),
    _engine("int4"),
    _powersgd("PowerSGD, rank 64", "--edgc-preset paper --edgc-static-rank 64", rank=64),
    # entropy sets the rank between these two
    _powersgd("paper, r_max", "--edgc-preset paper", messages=FP32_FACTORS),
    _powersgd("paper, r_min", "--edgc-preset paper", messages=FP32_FACTORS, rank_share=1 / 4),
    _powersgd(
        "optimus",
        "--edgc-preset optimus",
        rank=PRESETS["optimus"]["static_rank"],
        stage_share=PRESETS["optimus"]["stage_share"],
        messages=FP32_FACTORS,
        message_rank=int(PRESETS["optimus"]["pp"].rpartition(":")[2]),
        fuses=PRESETS["optimus"]["fuse_embedding_sync"],
    ),
    *map(_preset, ("safe", "balanced", "fast")),
)
