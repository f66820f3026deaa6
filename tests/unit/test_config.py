from typing import Any

import pytest

from edgc.compress.engines import ENGINES, engine_class
from edgc.compress.engines.base import Elementwise, LowRank
from edgc.config import PRESETS, ConfigError, EDGCConfig, flag, knobs


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rmin": 64, "rmax": 32}, r"--edgc-rmin = 64: must not exceed rmax = 32"),
        ({"rmin": 0}, r"--edgc-rmin = 0: a rank must be at least 1"),
        ({"rmax": -4}, r"--edgc-rmax = -4"),
        ({"static_rank": 0}, r"--edgc-static-rank = 0"),
        ({"static_rank": 8, "rmax": 16}, r"--edgc-rmax = 16: does nothing beside static_rank"),
        ({"iteration_sampling_rate": 0.0}, r"--edgc-iteration-sampling-rate = 0.0: .*\(0, 1\]"),
        ({"gradient_sampling_rate": 1.5}, r"--edgc-gradient-sampling-rate = 1.5"),
        ({"gradient_sampling_rate": float("nan")}, r"--edgc-gradient-sampling-rate = nan"),
        ({"window": 1}, r"--edgc-window = 1: must be at least 2"),
        ({"rank_step": 0}, r"--edgc-rank-step = 0"),
        ({"warmup_fraction": 1.1}, r"--edgc-warmup-fraction = 1.1"),
        ({"min_saving": 0.5}, r"--edgc-study min_saving = 0.5"),
        ({"link_gbps": 0.0}, r"--edgc-link-gbps = 0.0"),
        ({"entropy_estimator": "guess"}, r"--edgc-study entropy_estimator = guess: must be one of gaussian"),
        ({"error_dtype": "fp4"}, r"--edgc-error-dtype = fp4"),
        ({"rank_share": 0.0}, r"--edgc-rank-share = 0.0: must lie in \(0, 1\]"),
        ({"preset": "best"}, r"--edgc-preset = best: must be one of paper, safe, balanced, fast"),
        ({"engine": "magic"}, r"--edgc-engine = magic"),
        ({"wire": "int7"}, r"--edgc-wire = int7: must be one of fp32, bf16"),
        ({"engine": "dense", "dense_wire": "int8"}, r"--edgc-dense-wire = int8: the engine dense sums in fp32"),
        ({"basis_cycle": 0}, r"--edgc-basis-cycle = 0: must be at least 1"),
        ({"error_decay": 1.5}, r"--edgc-study error_decay = 1.5: must lie in \[0, 1\]"),
        ({"error_average": 1.0}, r"--edgc-study error_average = 1.0: must lie in \[0, 1\)"),
        ({"rank_tilt": 1.0, "static_rank": 8}, r"--edgc-study rank_tilt = 1.0: must lie between -1 and 1"),
        ({"rank_tilt": 0.5}, r"--edgc-study rank_tilt = 0.5: tilts only a constant rank"),
        ({"rank_tilt": 0.5, "engine": "int4", "rank_model": "constant"}, r"--edgc-study rank_tilt = 0.5: tilts only"),
        (
            {"engine": "loco", "equalise": True},
            r"--edgc-equalise = True: the engine loco keeps errors by its own rule",
        ),
        ({"engine": "loco", "error_decay": 0.5}, r"--edgc-study error_decay = 0.5: the engine loco keeps"),
        ({"engine": "topk:0"}, r"--edgc-engine = topk:0: the share of the entries that travel must lie in \(0, 1\]"),
        ({"engine": "topk:some"}, "--edgc-engine = topk:some: the share"),
        ({"engine": "int4:random"}, "--edgc-engine = int4:random: the argument may be stochastic"),
        ({"engine": "powersgd:4"}, "--edgc-engine = powersgd:4: this engine takes no argument"),
        ({"engine": "zip"}, "--edgc-engine = zip: must be one of powersgd, "),
        ({"engine": "int4", "static_rank": 8}, r"--edgc-static-rank = 8: the engine int4 has no rank"),
    ],
)
def test_a_broken_rule_is_named_with_its_flag_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EDGCConfig.of(**settings)


def test_a_window_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="--edgc-window = 1000: is longer than the run of 500 iterations"):
        EDGCConfig().check_run(500)
    with pytest.raises(ConfigError, match="--edgc-window = 9: measures nothing at 0.1 of the iterations"):
        EDGCConfig.of(window=9).check_run(500)
    EDGCConfig().check_run(1000)
    EDGCConfig.of(static_rank=8).check_run(500)  # no window is needed where nothing is decided


def test_defaults_are_the_papers() -> None:
    config = EDGCConfig()
    assert (config.window, config.rank_step, config.warmup_fraction) == (1000, 8, 0.1)
    assert (config.iteration_sampling_rate, config.gradient_sampling_rate) == (0.1, 0.25)


def test_every_knob_says_what_it_is() -> None:
    for knob in knobs():
        assert all(knob.metadata[key] for key in ("help", "unit", "source")), knob.name
    assert flag("warmup_fraction") == "--edgc-warmup-fraction"
    assert flag("align") == "--edgc-no-align"
    assert flag("equalise") == "--edgc-equalise"


def test_every_engine_is_where_its_registration_says() -> None:
    for name, registered in ENGINES.items():
        engine = engine_class(name)
        assert issubclass(engine, LowRank if registered.low_rank else Elementwise)
        assert (engine.error_rule is not None) == registered.keeps_errors
        assert EDGCConfig.of(engine=name).low_rank == registered.low_rank


def test_a_preset_gives_defaults_that_what_is_given_overrides() -> None:
    assert EDGCConfig.from_preset({}) == EDGCConfig.from_preset({"preset": "balanced"}) != EDGCConfig()
    balanced = EDGCConfig.from_preset({"preset": "balanced", "wire": "int8", "rmax": 64})
    assert (balanced.preset, balanced.wire, balanced.basis_wire, balanced.rmax) == ("balanced", "int8", "int6", 64)
    balanced.check_run(500)  # no window is needed where the rank is constant
    assert balanced.weak_basis_wire == "int4"
    assert EDGCConfig.from_preset({"preset": "balanced", "basis_wire": "fp32"}).weak_basis_wire is None
    for name in PRESETS:
        EDGCConfig.from_preset({"preset": name})
    with pytest.raises(ConfigError, match="--edgc-preset = best"):
        EDGCConfig.from_preset({"preset": "best"})


def test_what_a_preset_says_of_messages_and_ranks_is_void_without_them() -> None:
    assert EDGCConfig.from_preset({"preset": "optimus", "pp": "off"}).pp_rank is None
    assert EDGCConfig.from_preset({"preset": "optimus", "engine": "int8"}).static_rank is None
    assert EDGCConfig.from_preset({"preset": "optimus", "pp_engine": "int8"}).pp_rank is None
    ranked = EDGCConfig.from_preset({"preset": "balanced", "pp_rank": 8})  # a rank means low rank
    assert (ranked.pp, ranked.pp_engine, ranked.pp_rank) == ("auto", "powersgd", 8)
    with pytest.raises(ConfigError, match="--edgc-pp-rank = 8: does nothing with --edgc-pp-engine int4"):
        EDGCConfig.of(pp="backward", pp_engine="int4", pp_rank=8)
    with pytest.raises(ConfigError, match="--edgc-pp-engine = int4: does nothing with --edgc-pp off"):
        EDGCConfig.of(pp_engine="int4")
    with pytest.raises(ConfigError, match="--edgc-pp-rank = 8: does nothing with --edgc-pp off"):
        EDGCConfig.from_preset({"preset": "optimus", "pp": "off", "pp_rank": 8})
