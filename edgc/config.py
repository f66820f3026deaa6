"""Every knob of EDGC in one frozen dataclass: its meaning, unit, default and source."""

import math
from dataclasses import Field, dataclass, field, fields
from typing import Any

import torch

from edgc.entropy import ESTIMATORS

PAPER = "arXiv 2511.10333"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ENGINES = ("powersgd", "dense")


class ConfigError(ValueError):
    """A setting that breaks a rule; the message names the setting, its value and the rule."""


def _knob(default: Any, help: str, unit: str, source: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "unit": unit, "source": source, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class EDGCConfig:
    """Settings of one run. A value that breaks a rule raises ``ConfigError`` here, before anything is built.

    On the command line each field is ``--edgc-`` plus its name with dashes, except ``align``, which is switched off
    by ``--edgc-no-align``.
    """

    engine: str = _knob(
        "powersgd",
        "how gradients are reduced: low-rank with error feedback, or Megatron's own dense all-reduce (which still "
        "counts bytes and entropy)",
        "name",
        "PowerSGD: arXiv 1905.13727",
        ENGINES,
    )
    window: int = _knob(1000, "ranks change only at multiples of this", "iterations", f"{PAPER}, w")
    rmin: int | None = _knob(None, "smallest rank (default: a quarter of rmax)", "rank", f"{PAPER}, r_min")
    rmax: int | None = _knob(
        None,
        "largest rank, and the rank compression starts at (default: where compressed time reaches dense time)",
        "rank",
        f"{PAPER}, r_max",
    )
    rank_step: int = _knob(8, "a rank moves by at most this much a window", "rank", f"{PAPER}, s")
    warmup_fraction: float = _knob(
        0.1, "share of the run that is reduced dense at least", "fraction of iterations", f"{PAPER}, warm-up"
    )
    entropy_stability: float = _knob(
        0.05,
        "the warm-up ends once entropy changes by less than this from window to window",
        "relative change",
        "EDGC's own choice: the paper gives no figure",
    )
    iteration_sampling_rate: float = _knob(
        0.1, "share of iterations whose gradient is measured", "fraction", f"{PAPER}, GDS alpha"
    )
    gradient_sampling_rate: float = _knob(
        0.25, "share of a measured gradient's entries that is read", "fraction", f"{PAPER}, GDS beta"
    )
    entropy_estimator: str = _knob("gaussian", "how entropy is estimated", "name", f"{PAPER}, GDS", tuple(ESTIMATORS))
    static_rank: int | None = _knob(
        None, "one rank for the whole run after the warm-up: plain PowerSGD", "rank", "arXiv 1905.13727"
    )
    align: bool = _knob(
        True, "choose later stages' ranks so that all stages end together (DAC)", "switch", f"{PAPER}, DAC"
    )
    link_gbps: float | None = _knob(
        None,
        "plan for a link of this bandwidth per rank instead of timing this machine's own",
        "Gbit/s",
        "EDGC's own: to plan for a cluster from another machine",
    )
    min_saving: float = _knob(
        2.0,
        "a matrix is compressed only if it then takes at most 1/this of its dense elements",
        "ratio",
        "PyTorch's PowerSGD hook, min_compression_rate",
    )
    error_dtype: str = _knob("fp32", "storage of the error feedback", "dtype", "arXiv 1905.13727", tuple(DTYPES))
    wire_dtype: str = _knob("fp32", "precision in which the factors travel", "dtype", "EDGC's own", tuple(DTYPES))
    log_dir: str | None = _knob(None, "folder of events.jsonl (default: no event log)", "path", "EDGC's own")
    seed: int = _knob(1234, "seed of the first factors and of the sampler", "integer", "EDGC's own")

    def __post_init__(self) -> None:
        for knob in fields(self):
            choices = knob.metadata["choices"]
            value = getattr(self, knob.name)
            if choices:
                _require(value in choices, knob.name, value, f"must be one of {', '.join(choices)}")
        for name in ("rmin", "rmax", "static_rank"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "a rank must be at least 1")
        if self.rmin is not None and self.rmax is not None:
            _require(self.rmin <= self.rmax, "rmin", self.rmin, f"must not exceed rmax = {self.rmax}")
        for name in ("iteration_sampling_rate", "gradient_sampling_rate"):
            value = getattr(self, name)
            _require(0 < value <= 1, name, value, "a sampling rate must lie in (0, 1]")
        _require(0 <= self.warmup_fraction <= 1, "warmup_fraction", self.warmup_fraction, "must lie in [0, 1]")
        _require(self.window >= 2, "window", self.window, "must be at least 2 iterations")
        _require(self.rank_step >= 1, "rank_step", self.rank_step, "must be at least 1")
        _require(self.entropy_stability > 0, "entropy_stability", self.entropy_stability, "must be positive")
        _require(self.min_saving >= 1, "min_saving", self.min_saving, "must be at least 1")
        if self.link_gbps is not None:
            _require(0 < self.link_gbps < math.inf, "link_gbps", self.link_gbps, "must be positive")
        if self.static_rank is not None:
            _require(self.rmin is None, "rmin", self.rmin, "does nothing beside static_rank")
            _require(self.rmax is None, "rmax", self.rmax, "does nothing beside static_rank")

    def check_run(self, iterations: int) -> None:
        """Raise ``ConfigError`` if these settings cannot work in a run of so many iterations."""
        if self.dynamic:
            rule = f"is longer than the run of {iterations} iterations"
            _require(self.window <= iterations, "window", self.window, rule)
            rule = f"measures nothing at {self.iteration_sampling_rate:g} of the iterations"
            _require(self.window * self.iteration_sampling_rate >= 1, "window", self.window, rule)

    @property
    def dynamic(self) -> bool:
        """Whether entropy sets the ranks."""
        return self.engine != "dense" and self.static_rank is None


def flag(name: str) -> str:
    """The command-line flag of a field."""
    return "--edgc-no-align" if name == "align" else "--edgc-" + name.replace("_", "-")


def knobs() -> tuple[Field[Any], ...]:
    """The fields with their metadata (help, unit, source, choices), for a command line or a document."""
    return fields(EDGCConfig)


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    # "not holds" would let NaN through comparisons that are written positively; they are, so NaN fails them.
    if not holds:
        raise ConfigError(f"{flag(name)} = {value}: {rule}")
