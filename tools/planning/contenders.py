"""The ways to reduce gradients that are compared."""

from dataclasses import dataclass

from edgc.config.presets import PRESETS
from edgc.plan.rank_plan import NO_RANK


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
