"""Settings that do nothing beside others: presets leave them out, and a user's are refused."""

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

from edgc.config.pipeline import Messages
from edgc.config.ranks import BY_ENTROPY, RankPolicy, Ranks
from edgc.engines import DEFAULT_ENGINE, ENGINES, has_rank

NOT_BY_ENTROPY = {"static_rank", "volume"}  # either of them sets ranks in the place of entropy
OF_A_VOLUME = {"learning_rate_power", "least_fidelity"}
UNUSED_BY_VOLUME = {"allocation", "compress_embeddings", "only", "rest_wire"}
OF_LOW_RANK = {"allocation", "wire", "basis_wire", "basis_cycle", "rest_wire", *BY_ENTROPY}
OF_POWERSGD = {"basis_wire", "basis_cycle", "transpose", "warm_start"}  # not of other engines with a rank
OF_ERRORS = {"error_dtype", "error_gain", "whole_error_fraction"}


def with_effect(preset: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What a preset still sets beside the given settings. None is one of these only where the preset sets a value."""
    given = {name: value for name, value in given.items() if value is not None or name in preset}
    engine, void = given.get("engine", DEFAULT_ENGINE), set[str]()
    # who gives a setting of ranks that entropy sets wants it to set them
    by_entropy = BY_ENTROPY - {"align"} - ({"rmax"} if "volume" in preset else set())
    if not has_rank(engine) or given.keys() & (NOT_BY_ENTROPY | by_entropy):
        void |= NOT_BY_ENTROPY if "volume" in given else NOT_BY_ENTROPY | OF_A_VOLUME
    # messages cannot follow ranks that entropy does not set
    if RankPolicy.of(given) is not RankPolicy.ENTROPY and Messages.of(preset.get("pp", "off")).needs_rank:
        void.add("pp")
    void |= _of_other_engines(engine)
    if engine == "dense":
        void |= {"dense_wire", "param_wire", *OF_ERRORS}
    elif _keeps_errors(engine):
        void.add("equalise")
    if not given.get("warm_start", True):
        void.add("basis_cycle")
    return {name: value for name, value in preset.items() if name not in void}


def without_effect(given: Mapping[str, Any], preset: Mapping[str, Any]) -> Iterator[tuple[set[str], str]]:
    """Groups of settings that do nothing beside the given ones, each with the rule. ``preset``: what it sets beside
    these.
    """
    settings, engine = {**preset, **given}, given.get("engine", DEFAULT_ENGINE)
    reason = "" if has_rank(engine) else ", which has no rank"
    yield _of_other_engines(engine), f"does nothing beside the engine {engine}{reason}"
    if engine == "dense":
        yield OF_ERRORS, "does nothing beside the engine dense, which leaves no errors"
    elif _keeps_errors(engine):
        yield {"error_dtype"}, f"does nothing beside the engine {engine}, which keeps errors in a format of its own"
    if settings.get("error_gain", 1.0) == 1:
        yield {"whole_error_fraction"}, "does nothing where every step adds the whole error: error_gain is 1"
    if not settings.get("warm_start", True):
        yield {"basis_cycle"}, "does nothing beside warm_start = off"
    if RankPolicy.of(settings) is not RankPolicy.ENTROPY:
        yield {"entropy_stability"}, "does nothing where entropy sets no ranks"
    volume_flag, static_rank_flag = Ranks.flag("volume"), Ranks.flag("static_rank")
    if (volume := settings.get("volume")) is None:
        yield OF_A_VOLUME, f"does nothing without {volume_flag}"
    else:
        instead = "in its place" if "volume" in given else "as well"
        shown = f"{volume:g}" if isinstance(volume, Real) else volume
        yield UNUSED_BY_VOLUME, f"does nothing beside {volume_flag} {shown}; give {static_rank_flag} {instead}"


def _of_other_engines(engine: str) -> set[str]:
    """Settings that this engine does not read and others do."""
    return OF_LOW_RANK if not has_rank(engine) else OF_POWERSGD if engine != "powersgd" else set()


def _keeps_errors(engine: str) -> bool:
    """Whether this engine has an error rule that no setting changes."""
    known = ENGINES.get(engine.partition(":")[0])
    return known is not None and known.keeps_errors
