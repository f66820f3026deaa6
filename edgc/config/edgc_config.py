"""All settings of a run, in groups."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, fields
from numbers import Integral
from typing import Any

from edgc.config.formats import Formats
from edgc.config.pipeline import MESSAGES, Pipeline
from edgc.config.presets import PRESETS
from edgc.config.ranks import RankPolicy, Ranks
from edgc.config.setting import ConfigError, Settings, check, setting
from edgc.config.study import Study
from edgc.config.without_effect import with_effect, without_effect
from edgc.engines import DEFAULT_ENGINE, ENGINES, check_engine, has_rank

# Steps in few bits before the equaliser's scales are relied on. After one alone the gradient of an embedding grew from
# step to step in some runs (docs/algorithm.md, 5).
LEAST_WARMUP = 2
MOST_PLANNED = 10**7  # iterations of a volume, of which process 0 keeps 24 bytes each
DEFAULT_PRESET: Any = object()  # the preset of who names none


@dataclass(frozen=True, kw_only=True)
class Job(Settings):
    """What may differ between a run and its resume."""

    log_dir: str | None = setting(None, "folder of events.jsonl (default: no event log)", "path", "EDGC's own")
    reset_state: bool = setting(
        False, "resume without the EDGC state that the checkpoint holds", "switch", "EDGC's own"
    )

    def __post_init__(self) -> None:
        self.require_kinds()


@dataclass(frozen=True, kw_only=True)
class EDGCConfig(Settings):
    """Settings of one run. A value that breaks a rule raises ``ConfigError`` here, before anything is built.

    On the command line each setting, whatever its group, is ``--edgc-`` plus its name with dashes; a switch that is on
    by default is switched off by ``--edgc-no-`` plus its name. ``of`` takes the settings without their groups.

    ``rank_policy`` says what sets the ranks by these settings.
    """

    preset: str | None = setting(
        None,
        "what sets the defaults of the other settings: the paper's algorithm (paper), a volume of 8 (safe), 24 "
        "(balanced) or 48 (fast), or the rival Optimus-CC (optimus); the default is balanced for powersgd and none "
        "for other engines",
        "name",
        "docs/frontier/README.md",
        tuple(PRESETS),
    )
    engine: str = setting(
        DEFAULT_ENGINE,
        "how gradients are reduced: in low rank (powersgd, alternating), by a share of their entries (topk, randomk; "
        "topk:0.05 sends 5 %) or of their rows (rows:0.1), "
        "rounded to a few bits (int8, int4, int3, int2, onebit, loco, bf16; int4:stochastic has "
        "no bias, int4:rotated spreads outliers), or by the host's own reduction (dense), with bytes and entropy still "
        "measured",
        "name",
        "docs/algorithm.md, 5",
    )
    compress_embeddings: bool = setting(
        False, "compress embeddings and the output layer in low rank", "switch", "EDGC's own"
    )
    equalise: bool = setting(
        False, "divide by row and column scales of past gradients before compression", "switch", "arXiv 1804.04235"
    )
    basis_cycle: int = setting(
        1, "how many warm-started factors of a matrix powersgd uses in turn", "number", "EDGC's own"
    )
    seed: int = setting(1234, "seed of the first factors and of the sampler", "integer", "EDGC's own")
    ranks: Ranks = Ranks()
    formats: Formats = Formats()
    pipeline: Pipeline = Pipeline()
    job: Job = Job()
    study: Study = setting(
        Study(),
        "settings that only studies vary, as NAME=VALUE with spaces between several",
        "NAME=VALUE",
        "docs/flags.md",
    )

    def __post_init__(self) -> None:
        self.require_kinds()
        try:
            check_engine(self.engine)
        except ValueError as error:
            raise ConfigError(f"{self.flag('engine')} = {self.engine}: {error}") from None
        self.require("basis_cycle", self.basis_cycle >= 1, "must be at least 1")
        if self.study.rank_tilt:
            tilts = self.ranks.static_rank is not None
            self.study.require("rank_tilt", tilts, "tilts only a static rank")
        no_rank = f"the engine {self.engine} has no rank"
        if self.study.kernels == "fused":
            self.study.require("kernels", self.low_rank, no_rank)
        if self.ranks.static_rank is not None:
            self.ranks.require("static_rank", self.low_rank, no_rank)
        if self.ranks.volume is not None:
            self.ranks.require("volume", self.low_rank, no_rank)
            rule = "needs a fidelity_share above 0: the planner goes by what is measured"
            self.ranks.require("volume", self.fidelity_share > 0, rule)
            rule = f"messages have no rank of their own: give one, as in {self.pipeline.messages.which}:powersgd:16"
            self.pipeline.require("pp", not self.pipeline.messages.needs_rank, rule)
        if self.engine != "dense" and ENGINES[name := self.engine.partition(":")[0]].keeps_errors:
            rule = f"the engine {name} keeps errors by its own rule"
            self.require("equalise", not self.equalise, rule)
        if self.engine == "dense":
            rule = "the engine dense sums in fp32"
            for name in ("dense_wire", "rest_wire"):
                self.formats.require(name, getattr(self.formats, name) == "fp32", rule)
        rule = f"{no_rank}; give one to messages, as in {self.pipeline.messages.which}:powersgd:16"
        self.pipeline.require("pp", self.low_rank or not self.pipeline.messages.needs_rank, rule)

    @classmethod
    def from_preset(cls, preset: str | None = DEFAULT_PRESET, **given: Any) -> "EDGCConfig":
        """A preset, overridden by the given settings: ``from_preset("paper", window=200)``.

        By default ``balanced``, or none with an engine other than powersgd. None: no preset. Raises ``ConfigError``.
        """
        engine = given.get("engine", DEFAULT_ENGINE)
        check(isinstance(engine, str), cls.flag("engine"), engine, "must be text")
        if preset is DEFAULT_PRESET:
            preset = "balanced" if engine == DEFAULT_ENGINE else None
        check(isinstance(preset, (str, type(None))), cls.flag("preset"), preset, "must be text")
        settings = with_effect(PRESETS.get(preset or "", {}), given)
        for names, rule in without_effect(given, settings):
            for one in sorted(names & given.keys()):
                check(given[one] == settings.get(one, _default(one)), flag(one), given[one], rule)
        # who says which messages to compress takes the preset's format for them
        _, colon, how = settings.get("pp", "").partition(":")
        if colon and given.get("pp", "off") in MESSAGES[1:]:
            given = {**given, "pp": given["pp"] + colon + how}
        return cls.of(**{"preset": preset, **settings, **given})

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
        steps = _iterations(self.ranks.warmup_fraction, iterations)
        if not self.equalise or self.formats.dense_wire == "fp32" or not steps:
            return steps
        return max(steps, min(LEAST_WARMUP, iterations // 15))

    def whole_error_iterations(self, iterations: int) -> int:
        """Iterations, from the start of a run of so many, in which a step adds the whole error feedback."""
        return _iterations(self.study.whole_error_fraction, iterations)

    def check_run(self, iterations: int) -> None:
        """Raise ``ConfigError`` if these settings cannot work in a run of so many iterations."""
        if not isinstance(iterations, Integral) or iterations < 1:
            raise ConfigError(f"iterations = {iterations}: must be a whole number of at least 1")
        if self.rank_policy is RankPolicy.VOLUME and iterations > MOST_PLANNED:
            raise ConfigError(f"iterations = {iterations}: a volume is planned for at most {MOST_PLANNED}")
        if self.rank_policy is RankPolicy.ENTROPY:
            rule = f"is longer than the run of {iterations} iterations, and entropy sets ranks once a window: give less"
            self.ranks.require("window", self.ranks.window <= iterations, rule)
            rate = self.ranks.iteration_sampling_rate
            rate_flag = self.ranks.flag("iteration_sampling_rate")
            rule = f"measures nothing at {rate:g} of the iterations; give more to {rate_flag}"
            self.ranks.require("window", self.ranks.window * rate >= 1 - 1e-9, rule)

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


def _iterations(fraction: float, iterations: int) -> int:
    """The number of iterations that is this share of so many, rounded up."""
    return math.ceil(fraction * iterations - 1e-9)  # 0.07 of 100 is a little above 7 in binary


def setting_fields() -> tuple[Field[Any], ...]:
    """All settings but those of ``Study``, with their metadata (help, unit, source, choices), for a command line
    or a document.
    """
    found: list[Field[Any]] = []
    for one in fields(EDGCConfig):
        found += fields(SECTIONS[one.name]) if one.name in SECTIONS and one.name != "study" else [one]
    return tuple(found)


def _group(name: str) -> type[Settings]:
    """The class that has this setting."""
    groups: tuple[type[Settings], ...] = (EDGCConfig, *SECTIONS.values())
    (group,) = (group for group in groups if name in {one.name for one in fields(group)})
    return group


def _default(name: str) -> Any:
    return getattr(_group(name), name)  # a dataclass keeps a field's default at this name


def flag(name: str) -> str:
    """The command-line flag of a setting, whatever its group."""
    return _group(name).flag(name)
