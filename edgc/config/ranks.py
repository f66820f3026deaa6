"""What sets the ranks of gradients."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import Enum, auto
from numbers import Real
from typing import Any

from edgc.config.setting import PAPER, Settings, setting
from edgc.engines import DEFAULT_ENGINE, has_rank

RANK_MODELS = ("gaussian", "measured", "residual")
BY_ENTROPY = {"rank_model", "rmin", "rmax", "rank_step", "align"}  # settings that do nothing beside a static rank


class RankPolicy(Enum):
    """What sets the ranks of a run. ``edgc.plan.policies`` has a class for each."""

    NONE = auto()  # the engine ``dense`` compresses nothing
    CONSTANT = auto()  # ``static_rank``; also an engine without a rank, which compresses or does not
    ENTROPY = auto()  # the paper's algorithm
    VOLUME = auto()  # a budget of bytes

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "RankPolicy":
        """The policy of these settings by name, which may still break a rule. A missing one has its default."""
        engine = settings.get("engine", DEFAULT_ENGINE)
        if engine == "dense":
            return cls.NONE
        if not has_rank(engine):
            return cls.CONSTANT
        if settings.get("volume") is not None:
            return cls.VOLUME
        return cls.ENTROPY if settings.get("static_rank") is None else cls.CONSTANT


@dataclass(frozen=True, kw_only=True)
class Ranks(Settings):
    """What sets the ranks of gradients, and when compression starts. Shares of the width are below 1, ranks are not."""

    static_rank: float | None = setting(
        None,
        "one rank for the whole run after the warm-up (with paper: plain PowerSGD). A value below 1 is a share of the "
        "model's width, the smaller side of most matrices; the break-even rank is taken if it is smaller",
        "rank, or share of the width",
        "arXiv 1905.13727",
    )
    volume: float | None = setting(
        None,
        "compression ratio of the gradients over the whole run, warm-up included: 24 allows a 24th of the bytes of "
        "all-reduces in fp32. A planner spends them: it gives every parameter a rank, a share of its rows, or a number "
        "of bits, by the noise that was measured in what the optimizer got. --edgc-rest-wire, "
        "--edgc-compress-embeddings and --edgc-allocation are refused beside it. --edgc-static-rank, "
        "--edgc-rank-model, --edgc-rmin and --edgc-rank-step replace the volume of a preset: ranks then follow them. "
        "No step sends more than --edgc-rmax in all matrices would. Where no --edgc-rmax is given, and rounding every "
        "gradient to 4 bits is clearly faster on this link than low rank, they are rounded, whatever the volume",
        "ratio",
        "EDGC's own: docs/algorithm.md, 10",
    )
    rank_model: str = setting(
        "gaussian",
        "how measurements set the rank where it is not static. gaussian: the norm that the rank drops stays constant, "
        "computed for normal entries of the sampled entropy. measured: the same, by the measured spectrum. residual: "
        "the dropped share of the whole norm stays constant",
        "name",
        f"{PAPER}, CQM; docs/algorithm.md, 2",
        RANK_MODELS,
    )
    rmin: int | None = setting(None, "smallest rank (default: a quarter of rmax)", "rank", f"{PAPER}, r_min")
    rmax: float | None = setting(
        None,
        "largest rank. Where entropy sets the ranks, compression starts there. With --edgc-volume it is the largest "
        "mean rank. A number below 1 is a share of the model's width, but at most the break-even rank: the largest "
        "rank whose reduction takes at most as long as the host's own, or with --edgc-volume at most three quarters "
        "as long (default: the break-even rank)",
        "rank, or share of the width",
        f"{PAPER}, r_max",
    )
    rank_step: int = setting(8, "a rank moves by at most this much a window", "rank", f"{PAPER}, s")
    window: int = setting(
        1000,
        "iterations between two plans; with --edgc-volume at most a twentieth of the run, but never fewer than one "
        "measured iteration needs",
        "iterations",
        f"{PAPER}, w",
    )
    warmup_fraction: float = setting(
        0.1,
        "smallest share of the run in which everything travels in the format of --edgc-dense-wire",
        "fraction of iterations",
        f"{PAPER}, warm-up",
    )
    iteration_sampling_rate: float = setting(
        0.1,
        "share of iterations whose gradient is measured; a run of less than some thousand iterations needs more, so "
        "that a window has four of them or more",
        "fraction",
        f"{PAPER}, GDS alpha",
    )
    gradient_sampling_rate: float = setting(
        0.25, "share of a measured gradient's entries that is read", "fraction", f"{PAPER}, GDS beta"
    )
    allocation: str = setting(
        "uniform",
        "how matrices share a rank: the same rank for each (uniform); more rank where a byte lowers the loss more, at "
        "equal bytes (waterfill); or the fewest bytes that leave out no more energy (lgreco)",
        "name",
        "docs/algorithm.md, 6",
        ("uniform", "waterfill", "lgreco"),
    )
    align: bool = setting(
        True, "choose later stages' ranks so that all stages end their step together (DAC)", "switch", f"{PAPER}, DAC"
    )
    link_gbps: float | None = setting(
        None,
        "plan for a link of this bandwidth per process instead of timing this machine's link. EDGC then assumes that "
        "compressing takes no time: it compresses wherever that sends fewer bytes than the host",
        "Gbit/s",
        "EDGC's own: to plan for a cluster from another machine",
    )

    def __post_init__(self) -> None:
        for name in ("rmin", "static_rank", "rmax"):
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Real):
                continue  # of a kind that is refused below
            value = float(given)
            if name == "rmin":
                self.require(name, value >= 1, "a rank must be at least 1")
            self.require(name, 0 < value < math.inf, "must be a rank, or a share of the width below 1")
            if value >= 1:
                self.require(name, value == int(value), "a rank must be a whole number")
                object.__setattr__(self, name, int(value))  # flags are floats
        self.require_kinds()
        if self.rmin is not None and self.rmax is not None and self.rmax >= 1:
            self.require("rmin", self.rmin <= self.rmax, f"must not exceed rmax = {self.rmax}")
        void = {"static_rank": BY_ENTROPY, "volume": {"static_rank", *BY_ENTROPY} - {"rmax"}}
        for instead in (name for name in void if getattr(self, name) is not None):
            rule = f"does nothing beside {self.flag(instead)} {getattr(self, instead):g}"
            for one in (one for one in fields(self) if one.name in void[instead]):
                self.require(one.name, getattr(self, one.name) == one.default, rule)
        if self.volume is not None:
            self.require("volume", 1 < self.volume < math.inf, "must be a finite number above 1")
            bounds = self.rmax is None or self.rmax < 1 or self.rmax >= 4  # the smallest rank of a plan
            self.require("rmax", bounds, "must be at least 4 beside a volume, or a share of the width")
        for name in ("iteration_sampling_rate", "gradient_sampling_rate"):
            value = getattr(self, name)
            self.require(name, 1e-6 <= value <= 1, "a sampling rate must lie between 1e-6 and 1")
        self.require("warmup_fraction", 0 <= self.warmup_fraction <= 1, "must lie in [0, 1]")
        self.require("window", self.window >= 2, "must be at least 2 iterations")
        self.require("rank_step", self.rank_step >= 1, "must be at least 1")
        if self.link_gbps is not None:
            self.require("link_gbps", 0 < self.link_gbps < math.inf, "must be a finite number above 0")

    @property
    def resolved(self) -> dict[str, int | None]:
        """``rmin``, ``rmax`` and ``static_rank`` as far as they are ranks."""
        return {"rmin": self.rmin, "rmax": self.resolved_rmax, "static_rank": self.resolved_static_rank}

    @property
    def resolved_static_rank(self) -> int | None:
        """``static_rank``; None if it is not given or still a share of the width."""
        return _rank(self.static_rank)

    @property
    def resolved_rmax(self) -> int | None:
        """``rmax``; None if it is not known or still a share of the width."""
        return _rank(self.rmax)


def _rank(value: float | None) -> int | None:
    return None if value is None or value < 1 else int(value)
