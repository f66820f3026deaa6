"""Every knob of EDGC in one frozen dataclass: its meaning, unit, default and source."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, asdict, dataclass, field, fields
from typing import Any

from edgc.compress.engines import ENGINES, check_engine, has_rank

PAPER = "arXiv 2511.10333"
ESTIMATORS = ("gaussian", "histogram", "spacing")
FORMATS = ("fp32", "bf16", "fp16", "fp8", "int8", "int6", "int5", "int4", "int3", "int2", "int1")  # comm/wire.py
RANK_MODELS = ("gaussian", "measured", "residual", "constant")

# What safe, balanced and fast share: several warm-started factors used in turn, gradients equalised, one rank for the
# whole run that energy shares out among the matrices, a short warm-up in int8, and gradients rounded on their way from
# stage to stage. Evidence: docs/frontier, docs/convergence.md.
_FRONT = {
    "rank_model": "constant",
    "equalise": True,
    "basis_cycle": 8,
    "allocation": "waterfill",
    "dense_wire": "int8",
    "pp": "auto",
}
_EIGHT_BITS = {"basis_wire": "int8", "wire": "int8", "rest_wire": "int8", "pp_engine": "int8"}
_FEW_BITS = {
    "basis_wire": "int6",
    "weak_basis_wire": "int4",
    "wire": "int4",
    "compress_embeddings": True,
    "pp_engine": "int4",
}
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {"fuse_embedding_sync": False},  # as published
    "safe": {**_FRONT, **_EIGHT_BITS, "warmup_fraction": 0.025, "rank_share": 1 / 4},
    "balanced": {**_FRONT, **_FEW_BITS, "rest_wire": "int6", "warmup_fraction": 0.025, "rank_share": 5 / 32},
    "fast": {**_FRONT, **_FEW_BITS, "rest_wire": "int4", "warmup_fraction": 0.01, "rank_share": 3 / 32},
    # the rival of the paper (Song et al., ASPLOS 2023), for pipelines with tied embeddings; the share is our choice
    "optimus": {
        "pp": "backward",
        "pp_rank": 16,
        "pp_epilogue_only": True,
        "fuse_embedding_sync": True,
        "static_rank": 128,
        "stage_share": 3 / 4,
    },
}


class ConfigError(ValueError):
    """A setting that breaks a rule; the message names the setting, its value and the rule."""


def _knob(default: Any, help: str, unit: str, source: str, choices: tuple[str, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": help, "unit": unit, "source": source, "choices": choices})


def _require_choices(settings: Any) -> None:
    for knob in fields(settings):
        choices, value = knob.metadata["choices"], getattr(settings, knob.name)
        if choices and value != knob.default:
            _require(value in choices, knob.name, value, f"must be one of {', '.join(choices)}")


def _require(holds: bool, name: str, value: Any, rule: str) -> None:
    # "not holds" would let NaN through comparisons that are written positively; they are, so NaN fails them.
    if not holds:
        raise ConfigError(f"{flag(name)} = {value}: {rule}")


@dataclass(frozen=True, kw_only=True)
class Study:
    """Levers that only studies vary: on the command line ``--edgc-study NAME=VALUE ...``. Only ``optimus`` sets one.

    A value that breaks a rule raises ``ConfigError``.
    """

    entropy_estimator: str = _knob("gaussian", "how entropy is estimated", "name", f"{PAPER}, GDS", ESTIMATORS)
    # The changes from window to window that recorded runs show are in docs/algorithm.md, 3.
    entropy_stability: float = _knob(
        0.25,
        "a stage's warm-up ends once its entropy changes by less than this from one window to the next",
        "nats",
        "EDGC's own: the paper gives no figure; docs/algorithm.md, 3",
    )
    stage_share: float = _knob(
        1.0,
        "share of the pipeline stages, rounded up, whose gradients are compressed; it takes the first stages, whose "
        "backward passes end last",
        "fraction",
        "Optimus-CC, ASPLOS 2023",
    )
    rank_tilt: float = _knob(
        0.0,
        "how far above its mean a constant rank starts, as a fraction; it falls linearly to as far below",
        "fraction",
        "EDGC's own",
    )
    min_saving: float = _knob(
        2.0,
        "a matrix is compressed only if it then takes at most 1/this of its dense elements",
        "ratio",
        "PyTorch's PowerSGD hook, min_compression_rate",
    )
    error_decay: float = _knob(
        1.0, "share of the error feedback that is kept from step to step", "fraction", "EDGC's own"
    )
    error_average: float = _knob(
        0.0, "weight of older errors in a moving average that is fed back", "fraction", "LoCo: arXiv 2407.04480"
    )
    local_error: bool = _knob(
        True,
        "powersgd computes the error against this process's own gradient, not against the mean of all processes",
        "switch",
        "docs/algorithm.md, 5",
    )
    transpose: bool = _knob(
        True,
        "powersgd transposes wide matrices, so that its first factor lies on the longer side",
        "switch",
        "EDGC's own",
    )
    warm_start: bool = _knob(
        True, "powersgd starts from the factor of the step before instead of a random one", "switch", "arXiv 1905.13727"
    )
    spike_limit: float = _knob(
        5.0,
        "the error that a gradient of more than so many times its running norm leaves is scaled down (inf: none is)",
        "ratio",
        "docs/algorithm.md, 5",
    )
    statistics: bool = _knob(
        False,
        "log moments and entropies of the gradients of each kind of layer in every window (slow: for study)",
        "switch",
        "EDGC's own",
    )

    def __post_init__(self) -> None:
        _require_choices(self)
        _require(0 < self.stage_share <= 1, "stage_share", self.stage_share, "must lie in (0, 1]")
        _require(self.entropy_stability > 0, "entropy_stability", self.entropy_stability, "must be positive")
        _require(0 <= self.error_decay <= 1, "error_decay", self.error_decay, "must lie in [0, 1]")
        _require(0 <= self.error_average < 1, "error_average", self.error_average, "must lie in [0, 1)")
        _require(-1 < self.rank_tilt < 1, "rank_tilt", self.rank_tilt, "must lie between -1 and 1")
        _require(self.spike_limit > 1, "spike_limit", self.spike_limit, "must be above 1")
        _require(self.min_saving >= 1, "min_saving", self.min_saving, "must be at least 1")


@dataclass(frozen=True, kw_only=True)
class EDGCConfig:
    """Settings of one run. A value that breaks a rule raises ``ConfigError`` here, before anything is built.

    On the command line each field is ``--edgc-`` plus its name with dashes; a switch that is on by default is switched
    off by ``--edgc-no-`` plus its name.
    """

    preset: str | None = _knob(
        None,
        "what sets the defaults of the other settings: the paper's algorithm (paper), EDGC's own from many bytes to "
        "few (safe, balanced, fast), or the rival Optimus-CC (optimus); the default is balanced for powersgd and none "
        "for other engines",
        "name",
        "docs/frontier/README.md",
        tuple(PRESETS),
    )
    engine: str = _knob(
        "powersgd",
        "how gradients are reduced: in low rank (powersgd, alternating), by a share of their entries (topk, randomk; "
        "topk:0.05 sends 5 %), rounded to a few bits (int8, int4, int3, int2, onebit, loco, bf16; int4:stochastic has "
        "no bias, int4:rotated spreads outliers), or by the host's own reduction (dense), with bytes and entropy still "
        "measured",
        "name",
        "docs/algorithm.md, 5",
    )
    window: int = _knob(1000, "ranks change only at multiples of this", "iterations", f"{PAPER}, w")
    rmin: int | None = _knob(None, "smallest rank (default: a quarter of rmax)", "rank", f"{PAPER}, r_min")
    rmax: int | None = _knob(
        None,
        "largest rank, at which compression starts (default: the break-even rank, at which a compressed reduction "
        "takes as long as the host's own, or --edgc-rank-share of the width if that is less)",
        "rank",
        f"{PAPER}, r_max",
    )
    rank_share: float | None = _knob(
        None,
        "rmax is at most this share of the model's width, the smaller side of most matrices; a given rmax wins",
        "fraction",
        "EDGC's own",
    )
    rank_step: int = _knob(8, "a rank moves by at most this much a window", "rank", f"{PAPER}, s")
    warmup_fraction: float = _knob(
        0.1,
        "smallest share of the run in which everything travels in the format of --edgc-dense-wire",
        "fraction of iterations",
        f"{PAPER}, warm-up",
    )
    iteration_sampling_rate: float = _knob(
        0.1, "share of iterations whose gradient is measured", "fraction", f"{PAPER}, GDS alpha"
    )
    gradient_sampling_rate: float = _knob(
        0.25, "share of a measured gradient's entries that is read", "fraction", f"{PAPER}, GDS beta"
    )
    rank_model: str = _knob(
        "gaussian",
        "what sets the rank. The rank keeps the norm constant that it drops, for normal entries of the sampled entropy "
        "(gaussian) or by the measured spectrum (measured); or it keeps the dropped share of the whole norm constant "
        "(residual); or it is always rmax (constant)",
        "name",
        f"{PAPER}, CQM; docs/algorithm.md, 2",
        RANK_MODELS,
    )
    allocation: str = _knob(
        "uniform",
        "how the matrices of a stage share its rank: the same rank for each (uniform), or more rank where a byte "
        "carries more energy, at equal bytes (waterfill)",
        "name",
        "docs/algorithm.md, 6",
        ("uniform", "waterfill"),
    )
    static_rank: int | None = _knob(
        None, "one rank for the whole run after the warm-up (with paper: plain PowerSGD)", "rank", "arXiv 1905.13727"
    )
    align: bool = _knob(
        True, "choose later stages' ranks so that all stages end their step together (DAC)", "switch", f"{PAPER}, DAC"
    )
    link_gbps: float | None = _knob(
        None,
        "plan for a link of this bandwidth per process instead of timing this machine's link",
        "Gbit/s",
        "EDGC's own: to plan for a cluster from another machine",
    )
    error_dtype: str = _knob(
        "fp32",
        "format in which the error feedback is stored; all formats but fp32 round at random, without bias",
        "format",
        "arXiv 1905.13727; rounding: arXiv 1502.02551",
        ("fp32", "bf16", "fp16", "fp8", "int8"),
    )
    kernels: str = _knob(
        "plain",
        "what low rank computes with: plain torch, or Triton's kernels and Cholesky factorisations, which need fewer "
        "passes over a gradient; no GPU has run them yet",
        "name",
        "docs/gpu.md",
        ("plain", "fused"),
    )
    wire: str = _knob(
        "fp32",
        "format in which low-rank factors travel; of powersgd, the second factor",
        "format",
        "EDGC's own",
        FORMATS,
    )
    basis_wire: str = _knob("fp32", "format of powersgd's first factor", "format", "EDGC's own", FORMATS)
    weak_basis_wire: str | None = _knob(
        None,
        "format of the weaker three quarters of the first factor's columns (default: that of the others)",
        "format",
        "EDGC's own",
        FORMATS,
    )
    basis_cycle: int = _knob(
        1, "how many warm-started factors of a matrix powersgd uses in turn", "number", "EDGC's own"
    )
    rest_wire: str = _knob(
        "fp32",
        "format of parameters that low rank does not compress (embeddings, one-dimensional parameters, small matrices)",
        "format",
        "EDGC's own",
        FORMATS,
    )
    dense_wire: str = _knob(
        "fp32",
        "format of all gradients of a stage that is not compressed, as in the warm-up; all formats but fp32 have error "
        "feedback",
        "format",
        "EDGC's own",
        FORMATS,
    )
    param_wire: str | None = _knob(
        None,
        "format in which the distributed optimizer's updated weights travel, as differences from the previous weights "
        "(default: Megatron's own all-gather)",
        "format",
        "SDP4Bit: arXiv 2410.15526",
        ("fp8", "int8", "int6", "int5", "int4"),
    )
    pp: str = _knob(
        "off",
        "which messages between pipeline stages are compressed: gradients (backward), gradients and activations "
        "(both), or gradients if that takes no longer on this link (auto)",
        "name",
        "Optimus-CC, ASPLOS 2023; docs/algorithm.md, 8",
        ("off", "auto", "backward", "both"),
    )
    pp_engine: str = _knob(
        "powersgd",
        "how messages between stages are compressed: in low rank, or every value rounded",
        "name",
        "rounding: arXiv 2306.10209",
        ("powersgd", "int8", "int4", "int2"),
    )
    pp_rank: int | None = _knob(
        None,
        "rank of messages between stages (default: set by the entropy of the messages if entropy sets ranks, otherwise "
        "that of the gradients)",
        "rank",
        "Optimus-CC, ASPLOS 2023",
    )
    pp_wire: str | None = _knob(
        None,
        "format in which the factors of messages between stages travel (default: the pipeline's own, fp32 or bf16)",
        "format",
        "EDGC's own",
        FORMATS,
    )
    pp_epilogue_only: bool = _knob(
        False,
        "compress only the gradients between stages for which the receiving stage would wait idle",
        "switch",
        "Optimus-CC, ASPLOS 2023",
    )
    fuse_embedding_sync: bool | None = _knob(
        None,
        "sum the gradient of a tied embedding once, over the processes of the first and the last pipeline stage; "
        "Megatron sums it over each stage and then between the two (default: on where there is a tied embedding, off "
        "with the engine dense and the preset paper)",
        "switch",
        "Optimus-CC, ASPLOS 2023",
    )
    compress_embeddings: bool = _knob(
        False, "compress embeddings and the output layer in low rank", "switch", "EDGC's own"
    )
    equalise: bool = _knob(
        False, "divide by row and column scales of past gradients before compression", "switch", "arXiv 1804.04235"
    )
    study: Study = _knob(
        Study(),
        "levers that only studies vary, as NAME=VALUE with spaces between several",
        "NAME=VALUE",
        "docs/flags.md",
    )
    reset_state: bool = _knob(False, "resume without the EDGC state that the checkpoint holds", "switch", "EDGC's own")
    log_dir: str | None = _knob(None, "folder of events.jsonl (default: no event log)", "path", "EDGC's own")
    seed: int = _knob(1234, "seed of the first factors and of the sampler", "integer", "EDGC's own")

    def __post_init__(self) -> None:
        _require_choices(self)
        try:
            check_engine(self.engine)
        except ValueError as error:
            raise ConfigError(f"{flag('engine')} = {self.engine}: {error}") from None
        for name in ("rmin", "rmax", "static_rank", "pp_rank"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "a rank must be at least 1")
        if self.rmin is not None and self.rmax is not None:
            _require(self.rmin <= self.rmax, "rmin", self.rmin, f"must not exceed rmax = {self.rmax}")
        for name in ("iteration_sampling_rate", "gradient_sampling_rate"):
            value = getattr(self, name)
            _require(0 < value <= 1, name, value, "a sampling rate must lie in (0, 1]")
        _require(0 <= self.warmup_fraction <= 1, "warmup_fraction", self.warmup_fraction, "must lie in [0, 1]")
        _require(self.window >= 2, "window", self.window, "must be at least 2 iterations")
        _require(self.basis_cycle >= 1, "basis_cycle", self.basis_cycle, "must be at least 1")
        _require(self.rank_step >= 1, "rank_step", self.rank_step, "must be at least 1")
        if self.rank_share is not None:
            _require(0 < self.rank_share <= 1, "rank_share", self.rank_share, "must lie in (0, 1]")
        if self.study.rank_tilt:
            constant = self.static_rank is not None or (self.low_rank and self.rank_model == "constant")
            _require(constant, "rank_tilt", self.study.rank_tilt, "tilts only a constant rank")
        if self.kernels == "fused":
            _require(self.low_rank, "kernels", self.kernels, f"the engine {self.engine} has no rank")
        if self.link_gbps is not None:
            _require(0 < self.link_gbps < math.inf, "link_gbps", self.link_gbps, "must be positive")
        if self.engine != "dense" and ENGINES[name := self.engine.partition(":")[0]].keeps_errors:
            rule = f"the engine {name} keeps errors by its own rule"
            _require(not self.equalise, "equalise", True, rule)
            _require(self.study.error_decay == 1, "error_decay", self.study.error_decay, rule)
            _require(self.study.error_average == 0, "error_average", self.study.error_average, rule)
        if self.engine == "dense":
            _require(self.dense_wire == "fp32", "dense_wire", self.dense_wire, "the engine dense sums in fp32")
        if self.pp == "off":
            for name in ("pp_rank", "pp_wire"):
                _require(getattr(self, name) is None, name, getattr(self, name), "does nothing with --edgc-pp off")
            _require(self.pp_engine == "powersgd", "pp_engine", self.pp_engine, "does nothing with --edgc-pp off")
            _require(not self.pp_epilogue_only, "pp_epilogue_only", True, "does nothing with --edgc-pp off")
        else:
            ranked = self.low_rank or not self.pp_follows
            _require(ranked, "pp", self.pp, f"the engine {self.engine} has no rank; give --edgc-pp-rank")
            for name in ("pp_rank", "pp_wire"):
                rule = f"does nothing with --edgc-pp-engine {self.pp_engine}"
                _require(self.pp_engine == "powersgd" or getattr(self, name) is None, name, getattr(self, name), rule)
            rule = "activations have no such end of a step; only --edgc-pp backward has"
            _require(not self.pp_epilogue_only or self.pp != "both", "pp_epilogue_only", True, rule)
        if self.static_rank is not None:
            _require(self.rmin is None, "rmin", self.rmin, "does nothing beside static_rank")
            _require(self.rmax is None, "rmax", self.rmax, "does nothing beside static_rank")
            _require(self.low_rank, "static_rank", self.static_rank, f"the engine {self.engine} has no rank")
        if self.rank_model == "constant":
            rule = "the rank is constant; --edgc-preset paper or --edgc-rank-model gaussian lets entropy move it"
            _require(self.rmin is None, "rmin", self.rmin, rule)

    @classmethod
    def from_preset(cls, given: Mapping[str, Any]) -> "EDGCConfig":
        """The preset that ``given`` names, or the default one, overridden by what else it holds."""
        usual = "balanced" if given.get("engine", cls.engine) == "powersgd" else None
        preset = given.get("preset", usual)
        settings = {"preset": preset, **PRESETS.get(preset, {}), **given}
        void = ["static_rank"] if not has_rank(settings.get("engine", cls.engine)) else []
        if "pp_engine" not in given and {"pp_rank", "pp_wire"} & given.keys():
            void.append("pp_engine")  # who gives a rank or a format of factors means low rank
        if settings.get("pp") == "off":
            void += ["pp_engine", "pp_rank", "pp_wire", "pp_epilogue_only"]
        if given.get("pp_engine", cls.pp_engine) != "powersgd":
            void += ["pp_rank", "pp_wire"]
        settings = {name: value for name, value in settings.items() if name in given or name not in void}
        if "basis_wire" in given and "weak_basis_wire" not in given:
            settings["weak_basis_wire"] = None  # who asks for a format of the first factor means all of it
        return cls.of(**settings)

    @classmethod
    def of(cls, **settings: Any) -> "EDGCConfig":
        """These settings; those of ``Study`` may stand beside the others, or in a mapping ``study``."""
        names = {lever.name for lever in fields(Study)}
        study = settings.pop("study", {})
        levers = dict(study) if isinstance(study, Mapping) else asdict(study)
        levers |= {name: settings.pop(name) for name in names & settings.keys()}
        return cls(**settings, study=Study(**levers))

    def check_run(self, iterations: int) -> None:
        """Raise ``ConfigError`` if these settings cannot work in a run of so many iterations."""
        if self.dynamic and self.rank_model != "constant":
            rule = f"is longer than the run of {iterations} iterations"
            _require(self.window <= iterations, "window", self.window, rule)
            rule = f"measures nothing at {self.iteration_sampling_rate:g} of the iterations"
            _require(self.window * self.iteration_sampling_rate >= 1, "window", self.window, rule)

    @property
    def dynamic(self) -> bool:
        """Whether ranks are not given, but set by entropy or, once, by what the link and the model allow."""
        return self.low_rank and self.static_rank is None

    @property
    def pp_follows(self) -> bool:
        """Whether messages between stages take a rank that is not their own: entropy's, or that of the gradients."""
        return self.pp != "off" and self.pp_engine == "powersgd" and self.pp_rank is None

    @property
    def low_rank(self) -> bool:
        """Whether the engine has a rank."""
        return has_rank(self.engine)


def flag(name: str) -> str:
    """The command-line flag of a field."""
    if any(lever.name == name for lever in fields(Study)):
        return f"--edgc-study {name}"
    (knob,) = (knob for knob in fields(EDGCConfig) if knob.name == name)
    return ("--edgc-no-" if knob.default is True else "--edgc-") + name.replace("_", "-")


# Flags of earlier versions, and what stands for them now.
GONE: Mapping[str, str] = {
    "--edgc-density": "--edgc-engine topk:SHARE",
    "--edgc-stochastic": "--edgc-engine int4:stochastic",
    "--edgc-hadamard": "--edgc-engine int4:rotated",
    "--edgc-statistics": "--edgc-study statistics=on",
    "--edgc-no-warm-start": "--edgc-study warm_start=off",
    "--edgc-no-transpose": "--edgc-study transpose=off",
    "--edgc-no-local-error": "--edgc-study local_error=off",
    **{
        f"--edgc-{name.replace('_', '-')}": f"--edgc-study {name}=VALUE"
        for name in (
            "entropy_estimator",
            "entropy_stability",
            "stage_share",
            "rank_tilt",
            "min_saving",
            "error_decay",
            "error_average",
        )
    },
    "--edgc-power-iterations": "nothing: a second iteration cost more bytes than it saved loss",
    "--edgc-residual-wire": "nothing: the residual stays in the error feedback",
    **{
        f"--edgc-{name}-dtype": f"--edgc-{name}"
        for name in ("wire", "basis-wire", "weak-basis-wire", "rest-wire", "dense-wire", "param-wire", "pp-wire")
    },
}

# Every setting once, by what it is about, for a command line or a document.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "What most runs need": (
        "preset",
        "engine",
        "rmax",
        "static_rank",
        "window",
        "warmup_fraction",
        "pp",
        "param_wire",
        "error_dtype",
        "log_dir",
    ),
    "Rank policy": (
        "rank_model",
        "rmin",
        "rank_share",
        "rank_step",
        "allocation",
        "align",
        "link_gbps",
        "iteration_sampling_rate",
        "gradient_sampling_rate",
    ),
    "Compression of gradients": (
        "compress_embeddings",
        "equalise",
        "basis_cycle",
        "kernels",
    ),
    "Formats": ("dense_wire", "rest_wire", "basis_wire", "weak_basis_wire", "wire"),
    "Pipeline": ("pp_engine", "pp_rank", "pp_wire", "pp_epilogue_only", "fuse_embedding_sync"),
    "Run": ("seed", "reset_state", "study"),
}


def knobs() -> tuple[Field[Any], ...]:
    """The fields with their metadata (help, unit, source, choices), for a command line or a document."""
    return fields(EDGCConfig)


def study_from(words: Sequence[str]) -> dict[str, Any]:
    """Levers of ``Study`` from NAME=VALUE each. Raises ``ConfigError`` for other names and values of another type."""
    known = {lever.name: lever for lever in fields(Study)}
    found: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if name not in known or not equals:
            raise ConfigError(f"--edgc-study {word}: must be NAME=VALUE, with a name of {', '.join(known)}")
        default = known[name].default
        try:
            if isinstance(default, bool):
                found[name] = {"on": True, "off": False}[text]
            else:
                found[name] = float(text) if isinstance(default, float) else text
        except (KeyError, ValueError):
            wanted = "on or off" if isinstance(default, bool) else "a number"
            raise ConfigError(f"--edgc-study {word}: must be {wanted}") from None
    return found
