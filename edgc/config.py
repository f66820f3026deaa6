"""Every setting of EDGC in frozen dataclasses: its meaning, unit, default and source."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from enum import Enum, auto
from functools import cached_property
from numbers import Integral, Real
from typing import Any, get_args, get_type_hints

from edgc.engines import ENGINES, check_engine, has_rank
from edgc.presets import PRESETS

PAPER = "arXiv 2511.10333"
ESTIMATORS = ("gaussian", "histogram", "spacing")
FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "int1")  # comm/wire.py
RANK_MODELS = ("gaussian", "measured", "residual")
# which messages between stages are compressed
MESSAGES = ("off", "auto", "auto-epilogue", "backward", "both", "epilogue")
MESSAGE_ENGINES = ("powersgd", "int8", "int4", "int2")

NOT_BY_ENTROPY = {"static_rank", "volume"}  # either of them sets ranks in the place of entropy
OF_A_VOLUME = {"learning_rate_power", "least_fidelity"}  # settings that do nothing without one
BY_ENTROPY = {"rank_model", "rmin", "rmax", "rank_step", "align"}  # settings that do nothing beside a static rank
OF_LOW_RANK = {"allocation", "wire", "basis_wire", "basis_cycle", "rest_wire", *BY_ENTROPY}  # or without a rank
OF_BASES = {"basis_wire", "basis_cycle", "transpose", "warm_start"}  # of the engine powersgd alone
# Steps in few bits before the equaliser's scales are relied on. After one alone the gradient of an embedding grew from
# step to step in some runs (docs/algorithm.md, 5).
LEAST_WARMUP = 2
UNUSED_BY_VOLUME = {"allocation", "compress_embeddings", "rest_wire"}


KINDS = {int: "a whole number", float: "a number", str: "text", bool: "on or off", type(None): "none"}


class ConfigError(ValueError):
    """A setting that breaks a rule; the message names the setting, its value and the rule."""


class RankPolicy(Enum):
    """What sets the ranks of a run. ``edgc.plan.policies`` has a class for each."""

    NONE = auto()  # the engine ``dense`` compresses nothing
    CONSTANT = auto()  # ``static_rank``; also an engine without a rank, which compresses or does not
    ENTROPY = auto()  # the paper's algorithm
    VOLUME = auto()  # a budget of bytes

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> "RankPolicy":
        """The policy of these settings by name, which may still break a rule. A missing one has its default."""
        engine = settings.get("engine", EDGCConfig.engine)
        if engine == "dense":
            return cls.NONE
        if not has_rank(engine):
            return cls.CONSTANT
        if settings.get("volume") is not None:
            return cls.VOLUME
        return cls.ENTROPY if settings.get("static_rank") is None else cls.CONSTANT


def _setting(default: Any, help: str, unit: str, source: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "unit": unit, "source": source, "choices": choices})


def _rank(value: float | None) -> int | None:
    return None if value is None or value < 1 else int(value)


def _require_kinds(settings: Any) -> None:
    """Raise ``ConfigError`` for a value that is not of its setting's type, or none of its choices. Numbers of other
    libraries become Python's own, which checkpoints and event logs can hold.
    """
    kinds = get_type_hints(type(settings))
    for setting in (one for one in fields(settings) if one.metadata):  # the others are groups of settings
        value, allowed = getattr(settings, setting.name), get_args(kinds[setting.name]) or (kinds[setting.name],)
        number = Real if float in allowed else Integral if int in allowed else ()
        # to Python a bool is a number as well
        if not (bool in allowed if isinstance(value, bool) else isinstance(value, (*allowed, number))):
            raise ConfigError(f"{flag(setting.name)} = {value!r}: must be {' or '.join(KINDS[one] for one in allowed)}")
        if isinstance(value, Real) and not isinstance(value, bool):
            object.__setattr__(settings, setting.name, int(value) if isinstance(value, Integral) else float(value))
        choices = setting.metadata.get("choices")
        if choices and value != setting.default:
            _require(value in choices, setting.name, value, f"must be one of {', '.join(choices)}")


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    # Rules are written as positive comparisons, which NaN fails.
    if not holds:
        raise ConfigError(f"{flag(name)}{'' if isinstance(value, bool) else f' = {value}'}: {rule}")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Settings that only studies vary: on the command line ``--edgc-study NAME=VALUE ...``. A few presets set one.

    A value that breaks a rule raises ``ConfigError``.
    """

    entropy_estimator: str = _setting("gaussian", "how entropy is estimated", "name", f"{PAPER}, GDS", ESTIMATORS)
    # The changes from window to window that recorded runs show are in docs/algorithm.md, 3.
    entropy_stability: float = _setting(
        0.25,
        "a stage's warm-up ends once its entropy changes by less than this from one window to the next",
        "nats",
        "EDGC's own: the paper gives no figure; docs/algorithm.md, 3",
    )
    stage_share: float = _setting(
        1.0,
        "share of the pipeline stages, rounded up, whose gradients are compressed; it takes the first stages, whose "
        "backward passes end last",
        "fraction",
        "Optimus-CC, ASPLOS 2023",
    )
    rank_tilt: float = _setting(
        0.0,
        "how far above its mean a constant rank starts, as a fraction; it falls linearly to as far below",
        "fraction",
        "EDGC's own",
    )
    min_saving: float = _setting(
        2.0,
        "a matrix is compressed only if it then takes at most 1/this of its dense elements",
        "ratio",
        "PyTorch's PowerSGD hook, min_compression_rate",
    )
    error_gain: float = _setting(
        1.0,
        "share of the error feedback that a step adds to a gradient; the rest waits for later steps",
        "fraction",
        "as in EControl: arXiv 2311.05645",
    )
    whole_error_fraction: float = _setting(
        0.0,
        "share of the run, from its start, in which every step adds the whole error feedback, whatever the error_gain",
        "fraction of iterations",
        "docs/algorithm.md, 5",
    )
    transpose: bool = _setting(
        True,
        "powersgd transposes wide matrices, so that its first factor lies on the longer side",
        "switch",
        "EDGC's own",
    )
    warm_start: bool = _setting(
        True, "powersgd starts from the factor of the step before instead of a random one", "switch", "arXiv 1905.13727"
    )
    spike_limit: float = _setting(
        5.0,
        "a gradient above this many times its running norm is a spike: its error is scaled down (inf: none is one)",
        "ratio",
        "docs/algorithm.md, 5",
    )
    fidelity_share: float | None = _setting(
        None,
        "how much is sent to measure, for each parameter, how far and how late the optimizer gets its gradient, as a "
        "share of the bytes of a dense fp32 all-reduce in all iterations; inf measures every entry (default: 0.0005 "
        "with --edgc-volume, else 0, nothing)",
        "fraction",
        "docs/algorithm.md, 9",
    )
    least_fidelity: float = _setting(
        0.1,
        "with --edgc-volume, the share of the energy of what the optimizer gets that must lie along the true gradient; "
        "after a window below it, steps get twice the bytes until it is three times as much; 0: they never do",
        "fraction",
        "docs/algorithm.md, 10",
    )
    learning_rate_power: float = _setting(
        0.0,
        "with --edgc-volume the budget of a step goes with this power of its learning rate, which Megatron's arguments "
        "set (while the rate rises, of the largest one ahead); 0 gives every step the same",
        "exponent",
        "docs/algorithm.md, 10",
    )
    kernels: str = _setting(
        "plain",
        "what low rank computes with: plain torch, or Triton's kernels and Cholesky factorisations (fused), which need "
        "fewer passes over a gradient; on an H100 plain torch took less time with large matrices",
        "name",
        "docs/gpu.md",
        ("plain", "fused"),
    )
    statistics: bool = _setting(
        False,
        "log moments and entropies of the gradients of each kind of layer in every window (slow: for study)",
        "switch",
        "EDGC's own",
    )

    def __post_init__(self) -> None:
        _require_kinds(self)
        _require(0 < self.stage_share <= 1, "stage_share", self.stage_share, "must lie in (0, 1]")
        _require(self.entropy_stability > 0, "entropy_stability", self.entropy_stability, "must be positive")
        _require(0 < self.error_gain <= 1, "error_gain", self.error_gain, "must lie in (0, 1]")
        share = self.whole_error_fraction
        _require(0 <= share <= 1, "whole_error_fraction", share, "must lie in [0, 1]")
        _require(-1 < self.rank_tilt < 1, "rank_tilt", self.rank_tilt, "must lie between -1 and 1")
        _require(self.spike_limit > 1, "spike_limit", self.spike_limit, "must be above 1")
        _require(self.min_saving >= 1, "min_saving", self.min_saving, "must be at least 1")
        # there is relief until it is three times as much
        _require(0 <= self.least_fidelity < 1 / 3, "least_fidelity", self.least_fidelity, "must lie in [0, 1/3)")
        _require(
            0 <= self.learning_rate_power < math.inf,
            "learning_rate_power",
            self.learning_rate_power,
            "must not be negative",
        )
        if self.fidelity_share is not None:
            _require(self.fidelity_share >= 0, "fidelity_share", self.fidelity_share, "must not be negative")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """What sets the ranks of gradients, and when compression starts. Shares of the width are below 1, ranks are not."""

    static_rank: float | None = _setting(
        None,
        "one rank for the whole run after the warm-up (with paper: plain PowerSGD). A value below 1 is a share of the "
        "model's width, the smaller side of most matrices; the break-even rank is taken if it is smaller",
        "rank, or share of the width",
        "arXiv 1905.13727",
    )
    volume: float | None = _setting(
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
    rank_model: str = _setting(
        "gaussian",
        "how the measured gradient sets the rank where it is not static. The rank keeps the norm constant that it "
        "drops, for normal entries of the sampled entropy (gaussian) or by the measured spectrum (measured); or it "
        "keeps the dropped share of the whole norm constant (residual)",
        "name",
        f"{PAPER}, CQM; docs/algorithm.md, 2",
        RANK_MODELS,
    )
    rmin: int | None = _setting(None, "smallest rank (default: a quarter of rmax)", "rank", f"{PAPER}, r_min")
    rmax: float | None = _setting(
        None,
        "largest rank. Where entropy sets the ranks, compression starts there. With --edgc-volume it is the largest "
        "mean rank. A number below 1 is a share of the model's width, or the break-even rank if that is less (default: "
        "the break-even rank, at which a compressed reduction takes as long as the host's own; with --edgc-volume "
        "three quarters as long)",
        "rank, or share of the width",
        f"{PAPER}, r_max",
    )
    rank_step: int = _setting(8, "a rank moves by at most this much a window", "rank", f"{PAPER}, s")
    window: int = _setting(
        1000,
        "iterations between two plans; with --edgc-volume it is at most a twentieth of the run, and the end of the "
        "warm-up also ends a window",
        "iterations",
        f"{PAPER}, w",
    )
    warmup_fraction: float = _setting(
        0.1,
        "smallest share of the run in which everything travels in the format of --edgc-dense-wire",
        "fraction of iterations",
        f"{PAPER}, warm-up",
    )
    iteration_sampling_rate: float = _setting(
        0.1,
        "share of iterations whose gradient is measured; a run of less than some thousand iterations needs more, so "
        "that a window has four of them or more",
        "fraction",
        f"{PAPER}, GDS alpha",
    )
    gradient_sampling_rate: float = _setting(
        0.25, "share of a measured gradient's entries that is read", "fraction", f"{PAPER}, GDS beta"
    )
    allocation: str = _setting(
        "uniform",
        "how matrices share a rank: the same rank for each (uniform); more rank where a byte lowers the loss more, at "
        "equal bytes (waterfill); or the fewest bytes that leave out no more energy (lgreco)",
        "name",
        "docs/algorithm.md, 6",
        ("uniform", "waterfill", "lgreco"),
    )
    align: bool = _setting(
        True, "choose later stages' ranks so that all stages end their step together (DAC)", "switch", f"{PAPER}, DAC"
    )
    link_gbps: float | None = _setting(
        None,
        "plan for a link of this bandwidth per process instead of timing this machine's link; to compress then "
        "counts as taking no time, so that EDGC always compresses",
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
                _require(value >= 1, name, given, "a rank must be at least 1")
            _require(0 < value < math.inf, name, given, "must be a rank, or a share of the width below 1")
            if value >= 1:
                _require(value == int(value), name, given, "a rank must be a whole number")
                object.__setattr__(self, name, int(value))  # flags are floats
        _require_kinds(self)
        if self.rmin is not None and self.rmax is not None and self.rmax >= 1:
            _require(self.rmin <= self.rmax, "rmin", self.rmin, f"must not exceed rmax = {self.rmax}")
        void = {"static_rank": BY_ENTROPY, "volume": {"static_rank", *BY_ENTROPY} - {"rmax"}}
        for given, others in void.items():
            for one in (
                setting for setting in fields(self) if setting.name in others and getattr(self, given) is not None
            ):
                value = getattr(self, one.name)
                rule = f"does nothing beside {flag(given)} {getattr(self, given):g}"
                _require(value == one.default, one.name, value, rule)
        if self.volume is not None:
            _require(1 < self.volume < math.inf, "volume", self.volume, "must be a finite number above 1")
        for name in ("iteration_sampling_rate", "gradient_sampling_rate"):
            value = getattr(self, name)
            _require(1e-6 <= value <= 1, name, value, "a sampling rate must lie between 1e-6 and 1")
        _require(0 <= self.warmup_fraction <= 1, "warmup_fraction", self.warmup_fraction, "must lie in [0, 1]")
        _require(self.window >= 2, "window", self.window, "must be at least 2 iterations")
        _require(self.rank_step >= 1, "rank_step", self.rank_step, "must be at least 1")
        if self.link_gbps is not None:
            _require(0 < self.link_gbps < math.inf, "link_gbps", self.link_gbps, "must be a finite number above 0")

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


@dataclass(frozen=True, kw_only=True)
class Formats:
    """The formats in which values travel and errors are stored."""

    dense_wire: str = _setting(
        "fp32",
        "format of all gradients of a stage that is not compressed, as in the warm-up; all formats but fp32 have error "
        "feedback",
        "format",
        "EDGC's own",
        FORMATS,
    )
    rest_wire: str = _setting(
        "fp32",
        "format of parameters that low rank does not compress (embeddings, one-dimensional parameters, small matrices)",
        "format",
        "EDGC's own",
        FORMATS,
    )
    basis_wire: str = _setting(
        "fp32",
        f"format of powersgd's first factor, one of {', '.join(FORMATS)}; in int6+int4 the strongest quarter of its "
        "columns is in int6, the others are in int4",
        "format",
        "EDGC's own",
    )
    wire: str = _setting(
        "fp32",
        "format in which low-rank factors travel; of powersgd, the second factor",
        "format",
        "EDGC's own",
        FORMATS,
    )
    param_wire: str | None = _setting(
        None,
        "format in which the distributed optimizer's updated weights travel, as differences from the previous weights "
        "(default: Megatron's own all-gather)",
        "format",
        "SDP4Bit: arXiv 2410.15526",
        ("fp8", "int8", "int6", "int5", "int4"),
    )
    error_dtype: str = _setting(
        "fp32",
        "format in which the error feedback is stored; all formats but fp32 round at random, without bias",
        "format",
        "arXiv 1905.13727; rounding: arXiv 1502.02551",
        ("fp32", "bf16", "fp16", "fp8", "int8"),
    )

    def __post_init__(self) -> None:
        _require_kinds(self)
        parts = self.basis_wire.split("+")
        rule = f"must be one of {', '.join(FORMATS)}, or two of them with a plus sign between"
        _require(len(parts) <= 2 and set(parts) <= set(FORMATS), "basis_wire", self.basis_wire, rule)

    @property
    def basis_wires(self) -> tuple[str, str]:
        """The formats of the stronger and of the weaker columns of powersgd's first factor."""
        strong, _, weak = self.basis_wire.partition("+")
        return strong, weak or strong


@dataclass(frozen=True)
class Messages:
    """How messages between pipeline stages are compressed.

    ``which``: see ``MESSAGES``. ``engine``: see ``MESSAGE_ENGINES``. ``rank`` and ``wire``: of low rank alone; None:
    the controller's rank, the pipeline's own format.
    """

    which: str = "off"
    engine: str = "powersgd"
    rank: int | None = None
    wire: str | None = None

    @classmethod
    def of(cls, text: str) -> "Messages":
        """WHICH, WHICH:ENGINE, WHICH:powersgd:RANK or WHICH:powersgd:RANK:FORMAT. Raises ``ConfigError`` for others."""
        which, *rest = text.split(":")
        _require(which in MESSAGES, "pp", text, f"must begin with one of {', '.join(MESSAGES)}")
        if not rest:
            return cls(which)
        _require(which != "off", "pp", text, "nothing is compressed: nothing may follow off")
        engine, *details = rest
        _require(
            engine in MESSAGE_ENGINES, "pp", text, f"{which}: must be followed by one of {', '.join(MESSAGE_ENGINES)}"
        )
        rule = "a rank, and a format of factors behind it, may only follow powersgd"
        _require(not details or (engine == "powersgd" and len(details) <= 2), "pp", text, rule)
        rank, wire = [*details, None, None][:2]
        _require(
            rank is None or (rank.isdecimal() and int(rank) >= 1), "pp", text, "a rank must be a whole number from 1"
        )
        _require(wire is None or wire in FORMATS, "pp", text, f"the format must be one of {', '.join(FORMATS)}")
        return cls(which, engine, None if rank is None else int(rank), wire)

    @property
    def optional(self) -> bool:
        """Whether a run that cannot compress messages may leave them as they are."""
        return self.which in ("off", "auto", "auto-epilogue")

    @property
    def epilogue(self) -> bool:
        """Whether only those are compressed for which the receiving stage would wait idle."""
        return self.which in ("epilogue", "auto-epilogue")

    @property
    def needs_rank(self) -> bool:
        """Whether they take a rank that is not their own: entropy's, or that of the gradients."""
        return self.which != "off" and self.engine == "powersgd" and self.rank is None


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """What is done between the stages of a pipeline."""

    pp: str = _setting(
        "off",
        "which messages between pipeline stages are compressed, and how. Which: gradients (backward), gradients and "
        "activations (both), or gradients for which the receiving stage would wait idle (epilogue); wherever the run's "
        "pipeline allows it and it saves time, gradients (auto) or those of the epilogue (auto-epilogue). How: rounded "
        "(backward:int8, :int4, :int2), or in low rank, at a rank that entropy sets or the gradients have "
        "(backward:powersgd) or that is given (backward:powersgd:16), with factors in the pipeline's own format or in "
        "another (backward:powersgd:16:int8). Without a how, the preset's or powersgd",
        "which:how",
        "Optimus-CC, ASPLOS 2023; rounding: arXiv 2306.10209; docs/algorithm.md, 8",
    )
    fuse_embedding_sync: bool | None = _setting(
        None,
        "sum the gradient of a tied embedding once, over the processes of the first and the last pipeline stage; "
        "Megatron sums it over each stage and then between the two (default: on where there is a tied embedding, off "
        "with the engine dense and the preset paper)",
        "switch",
        "Optimus-CC, ASPLOS 2023",
    )

    def __post_init__(self) -> None:
        _require_kinds(self)
        _ = self.messages  # so that a wrong pp raises here

    @cached_property
    def messages(self) -> Messages:
        """What ``pp`` says."""
        return Messages.of(self.pp)


@dataclass(frozen=True, kw_only=True)
class Job:
    """What may differ between a run and its resume."""

    log_dir: str | None = _setting(None, "folder of events.jsonl (default: no event log)", "path", "EDGC's own")
    reset_state: bool = _setting(
        False, "resume without the EDGC state that the checkpoint holds", "switch", "EDGC's own"
    )

    def __post_init__(self) -> None:
        _require_kinds(self)


@dataclass(frozen=True, kw_only=True)
class EDGCConfig:
    """Settings of one run. A value that breaks a rule raises ``ConfigError`` here, before anything is built.

    On the command line each setting, whatever its group, is ``--edgc-`` plus its name with dashes; a switch that is on
    by default is switched off by ``--edgc-no-`` plus its name. ``of`` takes the settings without their groups.

    ``rank_policy`` says what sets the ranks by these settings.
    """

    preset: str | None = _setting(
        None,
        "what sets the defaults of the other settings: the paper's algorithm (paper), a volume of 8 (safe), 24 "
        "(balanced) or 48 (fast), or the rival Optimus-CC (optimus); the default is balanced for powersgd and none "
        "for other engines",
        "name",
        "docs/frontier/README.md",
        tuple(PRESETS),
    )
    engine: str = _setting(
        "powersgd",
        "how gradients are reduced: in low rank (powersgd, alternating), by a share of their entries (topk, randomk; "
        "topk:0.05 sends 5 %) or of their rows (rows:0.1), "
        "rounded to a few bits (int8, int4, int3, int2, onebit, loco, bf16; int4:stochastic has "
        "no bias, int4:rotated spreads outliers), or by the host's own reduction (dense), with bytes and entropy still "
        "measured",
        "name",
        "docs/algorithm.md, 5",
    )
    compress_embeddings: bool = _setting(
        False, "compress embeddings and the output layer in low rank", "switch", "EDGC's own"
    )
    equalise: bool = _setting(
        False, "divide by row and column scales of past gradients before compression", "switch", "arXiv 1804.04235"
    )
    basis_cycle: int = _setting(
        1, "how many warm-started factors of a matrix powersgd uses in turn", "number", "EDGC's own"
    )
    seed: int = _setting(1234, "seed of the first factors and of the sampler", "integer", "EDGC's own")
    ranks: Ranks = Ranks()
    formats: Formats = Formats()
    pipeline: Pipeline = Pipeline()
    job: Job = Job()
    study: Study = _setting(
        Study(),
        "settings that only studies vary, as NAME=VALUE with spaces between several",
        "NAME=VALUE",
        "docs/flags.md",
    )

    def __post_init__(self) -> None:
        _require_kinds(self)
        try:
            check_engine(self.engine)
        except ValueError as error:
            raise ConfigError(f"{flag('engine')} = {self.engine}: {error}") from None
        _require(self.basis_cycle >= 1, "basis_cycle", self.basis_cycle, "must be at least 1")
        if self.study.rank_tilt:
            tilts = self.ranks.static_rank is not None
            _require(tilts, "rank_tilt", self.study.rank_tilt, "tilts only a static rank")
        no_rank = f"the engine {self.engine} has no rank"
        if self.study.kernels == "fused":
            _require(self.low_rank, "kernels", self.study.kernels, no_rank)
        if self.ranks.static_rank is not None:
            _require(self.low_rank, "static_rank", self.ranks.static_rank, no_rank)
        if self.ranks.volume is not None:
            _require(self.low_rank, "volume", self.ranks.volume, no_rank)
            rule = "needs a fidelity_share above 0: the planner goes by what is measured"
            _require(self.fidelity_share > 0, "volume", self.ranks.volume, rule)
            rule = f"messages have no rank of their own: give one, as in {self.pipeline.messages.which}:powersgd:16"
            _require(not self.pipeline.messages.needs_rank, "pp", self.pipeline.pp, rule)
        if self.engine != "dense" and ENGINES[name := self.engine.partition(":")[0]].keeps_errors:
            rule = f"the engine {name} keeps errors by its own rule"
            _require(not self.equalise, "equalise", True, rule)
        if self.engine == "dense":
            rule = "the engine dense sums in fp32"
            for name in ("dense_wire", "rest_wire"):
                value = getattr(self.formats, name)
                _require(value == "fp32", name, value, rule)
        rule = f"{no_rank}; give one to messages, as in {self.pipeline.messages.which}:powersgd:16"
        _require(self.low_rank or not self.pipeline.messages.needs_rank, "pp", self.pipeline.pp, rule)

    @classmethod
    def from_preset(cls, given: Mapping[str, Any]) -> "EDGCConfig":
        """The preset that ``given`` names, or the default one, overridden by what else it holds."""
        for setting in ("engine", "preset"):  # they tell what the others mean
            value = given.get(setting, "")
            allowed = (str, type(None)) if setting == "preset" else str
            _require(isinstance(value, allowed), setting, value, "must be text")
        usual = "balanced" if given.get("engine", cls.engine) == "powersgd" else None
        name = given.get("preset", usual)
        preset = _beside(given, PRESETS.get(name, {}))
        _refuse_void(given, preset.get("volume"))
        # who says which messages to compress takes the preset's format for them
        _, colon, how = preset.get("pp", "").partition(":")
        if colon and given.get("pp", "off") in MESSAGES[1:]:
            given = {**given, "pp": given["pp"] + colon + how}
        return cls.of(**{"preset": name, **preset, **given})

    @classmethod
    def of(cls, **settings: Any) -> "EDGCConfig":
        """These settings, whatever their groups. Raises ``ConfigError`` for a name that is none of a setting."""
        known = {one.name for group in (cls, *SECTIONS.values()) for one in fields(group)} - SECTIONS.keys()
        if unknown := sorted(settings.keys() - known):
            raise ConfigError(f"{', '.join(unknown)}: there is no such setting")
        groups = {}
        for name, group in SECTIONS.items():
            inside = {one.name for one in fields(group)} & settings.keys()
            if inside:
                groups[name] = group(**{one: settings.pop(one) for one in inside})
        return cls(**settings, **groups)

    def flat(self) -> dict[str, Any]:
        """All settings by name, without their groups: what ``of`` takes."""
        own = {one.name: getattr(self, one.name) for one in fields(self) if one.name not in SECTIONS}
        for name in SECTIONS:
            group = getattr(self, name)
            own.update({one.name: getattr(group, one.name) for one in fields(group)})
        return own

    def subset(self, names: Iterable[str]) -> dict[str, Any]:
        """These settings by name."""
        settings = self.flat()
        return {name: settings[name] for name in names}

    def replace(self, **settings: Any) -> "EDGCConfig":
        """The same with these settings, whatever their group."""
        return EDGCConfig.of(**{**self.flat(), **settings})

    def warmup(self, iterations: int) -> int:
        """Iterations of the warm-up of a run of so many."""
        steps = _part(self.ranks.warmup_fraction, iterations)
        if not self.equalise or self.formats.dense_wire == "fp32" or not steps:
            return steps
        return max(steps, min(LEAST_WARMUP, iterations // 15))

    def whole_error_iterations(self, iterations: int) -> int:
        """Iterations, from the start of a run of so many, in which a step adds the whole error feedback."""
        return _part(self.study.whole_error_fraction, iterations)

    def check_run(self, iterations: int) -> None:
        """Raise ``ConfigError`` if these settings cannot work in a run of so many iterations."""
        if not isinstance(iterations, Integral) or iterations < 1:
            raise ConfigError(f"iterations = {iterations}: must be a whole number of at least 1")
        if self.rank_policy is RankPolicy.ENTROPY:
            rule = f"is longer than the run of {iterations} iterations, and entropy sets ranks once a window: give less"
            _require(self.ranks.window <= iterations, "window", self.ranks.window, rule)
            rate = self.ranks.iteration_sampling_rate
            rule = f"measures nothing at {rate:g} of the iterations; give more to {flag('iteration_sampling_rate')}"
            _require(self.ranks.window * rate >= 1 - 1e-9, "window", self.ranks.window, rule)

    @property
    def fidelity_share(self) -> float:
        """How much is sent to measure fidelity: see ``Study``."""
        given = self.study.fidelity_share
        return given if given is not None else 0.0005 if self.rank_policy is RankPolicy.VOLUME else 0.0

    @property
    def rank_policy(self) -> RankPolicy:
        """What sets the ranks."""
        ranks = self.ranks
        return RankPolicy.of({"engine": self.engine, "static_rank": ranks.static_rank, "volume": ranks.volume})

    @property
    def rank_depends_on_link(self) -> bool:
        """Whether ranks are not given, so that what the link allows bounds them."""
        return self.low_rank and self.ranks.resolved_static_rank is None

    @property
    def low_rank(self) -> bool:
        """Whether the engine has a rank."""
        return has_rank(self.engine)


SECTIONS: Mapping[str, type[Any]] = {
    "ranks": Ranks,
    "formats": Formats,
    "pipeline": Pipeline,
    "job": Job,
    "study": Study,
}


def _part(fraction: float, iterations: int) -> int:
    """The number of iterations that is this share of so many, rounded up."""
    return math.ceil(fraction * iterations - 1e-9)  # 0.07 of 100 is a little above 7 in binary


def _beside(given: Mapping[str, Any], preset: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset still sets beside the given settings."""
    engine, void = given.get("engine", EDGCConfig.engine), set[str]()
    # who gives a setting of ranks that entropy sets wants it to set them
    by_entropy = BY_ENTROPY - {"align"} - ({"rmax"} if "volume" in preset else set())
    if not has_rank(engine) or given.keys() & (NOT_BY_ENTROPY | by_entropy):
        void |= NOT_BY_ENTROPY if "volume" in given else NOT_BY_ENTROPY | OF_A_VOLUME
    # messages cannot follow ranks that entropy does not set
    if RankPolicy.of(given) is not RankPolicy.ENTROPY and Messages.of(preset.get("pp", "off")).needs_rank:
        void.add("pp")
    if engine == "dense":
        void |= {"dense_wire", "rest_wire"}
    elif (known := ENGINES.get(engine.partition(":")[0])) is not None and known.keeps_errors:
        void.add("equalise")
    return {name: value for name, value in preset.items() if name not in void}


def _refuse_void(given: Mapping[str, Any], volume: Any) -> None:
    """Raises ``ConfigError`` for a given setting that the others leave without effect. ``volume``: of the preset."""
    if not has_rank(engine := given.get("engine", EDGCConfig.engine)):
        rule = f"does nothing beside the engine {engine}, which has no rank"
        for setting in (one for one in setting_fields() if one.name in OF_LOW_RANK & given.keys()):
            _require(given[setting.name] == setting.default, setting.name, given[setting.name], rule)
    elif engine != "powersgd":
        for setting in (one for one in (*setting_fields(), *fields(Study)) if one.name in OF_BASES & given.keys()):
            rule = f"does nothing beside the engine {engine}"
            _require(given[setting.name] == setting.default, setting.name, given[setting.name], rule)
    if (volume := given.get("volume", volume)) is not None:
        instead = "in its place" if "volume" in given else "as well"
        shown = f"{volume:g}" if isinstance(volume, Real) else volume
        rule = f"does nothing beside {flag('volume')} {shown}; give {flag('static_rank')} {instead}"
        for one in sorted(UNUSED_BY_VOLUME & given.keys()):
            _require(False, one, given[one], rule)
    else:
        for one in sorted(OF_A_VOLUME & given.keys()):
            _require(not given[one], one, given[one], f"does nothing without {flag('volume')}")


def setting_fields() -> tuple[Field[Any], ...]:
    """All settings but those of ``Study``, with their metadata (help, unit, source, choices), for a command line
    or a document.
    """
    found: list[Field[Any]] = []
    for one in fields(EDGCConfig):
        found += fields(SECTIONS[one.name]) if one.name in SECTIONS and one.name != "study" else [one]
    return tuple(found)


def flag(name: str) -> str:
    """The command-line flag of a setting."""
    if any(one.name == name for one in fields(Study)):
        return f"--edgc-study {name}"
    (setting,) = (setting for setting in setting_fields() if setting.name == name)
    return ("--edgc-no-" if setting.default is True else "--edgc-") + name.replace("_", "-")
