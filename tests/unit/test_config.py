import math
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgc.compress.engines.base import Elementwise, LowRank
from edgc.config import ConfigError, EDGCConfig, Messages, RankPolicy, Study, flag, setting_fields
from edgc.config.presets import PRESETS
from edgc.engines import ENGINES, engine_class


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rmin": 64, "rmax": 32}, r"--edgc-rmin = 64: must not exceed rmax = 32"),
        ({"rmin": 0}, r"--edgc-rmin = 0: a rank must be at least 1"),
        ({"rmax": -4}, r"--edgc-rmax = -4"),
        ({"static_rank": 0}, r"--edgc-static-rank = 0"),
        ({"static_rank": 8, "rmax": 16}, r"--edgc-rmax = 16: does nothing beside --edgc-static-rank 8"),
        ({"iteration_sampling_rate": 0.0}, r"--edgc-iteration-sampling-rate = 0.0: .* between 1e-6 and 1"),
        ({"gradient_sampling_rate": 1.5}, r"--edgc-gradient-sampling-rate = 1.5"),
        ({"gradient_sampling_rate": float("nan")}, r"--edgc-gradient-sampling-rate = nan"),
        ({"window": 1}, r"--edgc-window = 1: must be at least 2"),
        ({"rank_step": 0}, r"--edgc-rank-step = 0"),
        ({"warmup_fraction": 1.1}, r"--edgc-warmup-fraction = 1.1"),
        ({"min_saving": 0.5}, r"--edgc-study min_saving = 0.5"),
        ({"link_gbps": 0.0}, r"--edgc-link-gbps = 0.0"),
        ({"entropy_estimator": "guess"}, r"--edgc-study entropy_estimator = guess: must be one of gaussian"),
        ({"error_dtype": "fp4"}, r"--edgc-error-dtype = fp4"),
        ({"static_rank": 8.5}, r"--edgc-static-rank = 8.5: a rank must be a whole number"),
        ({"static_rank": float("nan")}, r"--edgc-static-rank = nan: must be a rank, or a share"),
        ({"static_rank": 8, "rank_step": 4}, r"--edgc-rank-step = 4: does nothing beside --edgc-static-rank"),
        ({"volume": 8, "rank_model": "measured"}, r"--edgc-rank-model = measured: does nothing beside --edgc-volume"),
        ({"volume": 8, "align": False}, r"--edgc-no-align: does nothing beside --edgc-volume"),
        ({"volume": 8, "least_fidelity": 0.34}, r"least_fidelity = 0.34: must lie in \[0, 1/3\)"),
        ({"volume": math.inf}, r"--edgc-volume = inf: must be a finite number above 1"),
        ({"engine": "topk:"}, r"--edgc-engine = topk:: nothing follows the colon"),
        ({"static_rank": 0.25, "rmin": 4}, r"--edgc-rmin = 4: does nothing beside --edgc-static-rank"),
        ({"basis_wire": "int6+int4+int2"}, r"--edgc-basis-wire = int6\+int4\+int2: must be one of fp32, "),
        ({"basis_wire": "int6+"}, r"--edgc-basis-wire = int6\+: must be one of"),
        (
            {"pp": "forward"},
            r"--edgc-pp = forward: must begin with one of off, auto, auto-epilogue, backward, ",
        ),
        ({"pp": "off:int4"}, r"--edgc-pp = off:int4: nothing is compressed"),
        ({"pp": "both:int7"}, r"--edgc-pp = both:int7: both: must be followed by one of powersgd, int8"),
        ({"pp": "both:int4:8"}, r"--edgc-pp = both:int4:8: a rank, .* may only follow powersgd"),
        ({"pp": "both:powersgd:0"}, r"--edgc-pp = both:powersgd:0: a rank must be a whole number from 1"),
        ({"pp": "both:powersgd:8:int9"}, r"--edgc-pp = .*: the format must be one of fp32"),
        (
            {"pp": "both:powersgd", "engine": "int4"},
            r"--edgc-pp = both:powersgd: the engine int4 has no rank; .* in both:powersgd:16",
        ),
        ({"static_rank": float("inf")}, r"--edgc-static-rank = inf: must be a rank, or a share"),
        ({"rmin": 4.5}, r"--edgc-rmin = 4.5: a rank must be a whole number"),
        ({"pp_rank": 4, "window": 50}, r"^pp_rank: there is no such setting"),
        ({"kernels": "fused", "engine": "int4"}, r"--edgc-study kernels = fused: the engine int4 has no rank"),
        ({"preset": "best"}, r"--edgc-preset = best: must be one of paper, safe, balanced, fast"),
        ({"engine": "magic"}, r"--edgc-engine = magic"),
        ({"param_wire": "int3"}, r"--edgc-param-wire = int3: must be off, or one of fp8, int8, "),
        ({"param_wire": "auto"}, r"--edgc-param-wire = auto: must be off, or one of fp8, int8, "),
        ({"wire": "int7"}, r"--edgc-wire = int7: must be one of fp32, bf16"),
        ({"engine": "dense", "dense_wire": "int8"}, r"--edgc-dense-wire = int8: the engine dense sums in fp32"),
        ({"engine": "dense", "rest_wire": "int4"}, r"--edgc-rest-wire = int4: the engine dense sums in fp32"),
        ({"window": "100"}, "--edgc-window = '100': must be a whole number"),
        ({"window": 50.0}, "--edgc-window = 50.0: must be a whole number"),
        ({"volume": "24"}, "--edgc-volume = '24': must be a number or none"),
        ({"rmax": np.int64(-5)}, r"--edgc-rmax = -5: must be a rank"),
        ({"rmin": np.int64(0)}, r"--edgc-rmin = 0: a rank must be at least 1"),
        ({"static_rank": np.float32(2.5)}, r"--edgc-static-rank = 2.5: a rank must be a whole number"),
        ({"static_rank": True}, r"--edgc-static-rank = True: must be a number"),
        ({"seed": True}, "--edgc-seed = True: must be a whole number"),
        ({"equalise": 1}, "--edgc-equalise = 1: must be on or off"),
        ({"pp": None}, "--edgc-pp = None: must be text"),
        ({"basis_cycle": 0}, r"--edgc-basis-cycle = 0: must be at least 1"),
        ({"error_gain": 0.0}, r"--edgc-study error_gain = 0.0: must lie in \(0, 1\]"),
        ({"whole_error_fraction": 1.5}, r"--edgc-study whole_error_fraction = 1.5: must lie in \[0, 1\]"),
        ({"rank_tilt": 1.0, "static_rank": 8}, r"--edgc-study rank_tilt = 1.0: must lie between -1 and 1"),
        ({"rank_tilt": 0.5}, r"--edgc-study rank_tilt = 0.5: tilts only a static rank"),
        (
            {"engine": "loco", "equalise": True},
            r"--edgc-equalise: the engine loco keeps errors by its own rule",
        ),
        (
            {"engine": "topk:0"},
            r"--edgc-engine = topk:0: the share of the entries or rows that travel must lie in \(0, 1\]",
        ),
        ({"engine": "topk:some"}, "--edgc-engine = topk:some: the share"),
        ({"engine": "int4:random"}, "--edgc-engine = int4:random: the argument may be stochastic"),
        (
            {"engine": "int3:stochastic"},
            r"--edgc-engine = int3:stochastic: the argument may be rotated \(by a Hadamard",
        ),
        ({"engine": "onebit:stochastic"}, "--edgc-engine = onebit:stochastic: the argument may be rotated"),
        ({"engine": "bf16:rotated"}, "--edgc-engine = bf16:rotated: the argument may be stochastic"),
        ({"engine": "powersgd:4"}, "--edgc-engine = powersgd:4: this engine takes no argument"),
        ({"engine": "zip"}, "--edgc-engine = zip: must be one of powersgd, "),
        ({"engine": "int4", "static_rank": 8}, r"--edgc-static-rank = 8: the engine int4 has no rank"),
    ],
)
def test_a_broken_rule_is_named_with_its_flag_and_value(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EDGCConfig.of(**settings)


def test_a_path_becomes_text() -> None:
    assert EDGCConfig.of(log_dir=Path("runs") / "log").job.log_dir == "runs/log"


def test_numbers_of_numpy_become_those_of_python() -> None:
    given = {"window": np.int64(200), "seed": np.int32(3), "warmup_fraction": np.float32(0.5), "volume": np.float64(24)}
    settings = EDGCConfig.from_preset(**{"preset": "balanced", **given}).flat()
    assert {name: (settings[name], type(settings[name])) for name in given} == {
        "window": (200, int),
        "seed": (3, int),
        "warmup_fraction": (0.5, float),
        "volume": (24.0, float),
    }


def test_a_setting_that_does_nothing_beside_a_volume_is_named_whatever_the_volume_is() -> None:
    for volume in (24, "24"):
        with pytest.raises(ConfigError, match=r"--edgc-allocation = uniform: does nothing beside --edgc-volume 24;"):
            EDGCConfig.from_preset(volume=volume, allocation="uniform")


@pytest.mark.parametrize("void", [{"wire": "int4"}, {"basis_wire": "int4"}, {"basis_cycle": 4}, {"rest_wire": "int4"}])
def test_formats_of_factors_are_refused_beside_an_engine_without_any(void: dict[str, Any]) -> None:
    for preset in ("paper", "balanced"):
        with pytest.raises(ConfigError, match=f"{flag(*void)} = .*: does nothing beside the engine int4, which has no"):
            EDGCConfig.from_preset(**{"preset": preset, "engine": "int4", **void})


def test_a_window_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="--edgc-window = 1000: is longer than the run of 500 iterations"):
        EDGCConfig().check_run(500)
    with pytest.raises(ConfigError, match="--edgc-window = 9: measures nothing at 0.1 of the iterations"):
        EDGCConfig.of(window=9).check_run(500)
    EDGCConfig().check_run(1000)
    EDGCConfig.of(static_rank=8).check_run(500)  # no window is needed where nothing is decided
    EDGCConfig.of(window=49, iteration_sampling_rate=1 / 49).check_run(
        500
    )  # one measurement, whatever 1/49 is in binary


def test_a_warm_up_is_its_fraction_of_the_run_in_decimals() -> None:
    assert EDGCConfig.of(warmup_fraction=0.07).warmup(100) == 7
    assert EDGCConfig.of(warmup_fraction=0.025).warmup(500) == 13
    balanced = EDGCConfig.from_preset()
    assert [balanced.warmup(iterations) for iterations in (10, 40, 60, 100, 500)] == [1, 2, 2, 3, 13]
    for other in (balanced.replace(dense_wire="fp32"), balanced.replace(equalise=False)):
        assert other.warmup(40) == 1, "nothing is taken for a scale that rounding has made zero"
    assert balanced.replace(warmup_fraction=0.0).warmup(60) == 0


def test_a_share_of_the_run_adds_whole_error_iterations() -> None:
    assert [EDGCConfig.from_preset().whole_error_iterations(iterations) for iterations in (1, 500, 1001)] == [
        1,
        200,
        401,
    ]
    assert EDGCConfig.from_preset("paper").whole_error_iterations(500) == 0


def test_what_is_refused_beside_a_volume_says_what_to_give() -> None:
    with pytest.raises(ConfigError, match="give --edgc-static-rank as well"):
        EDGCConfig.from_preset(allocation="uniform")
    with pytest.raises(ConfigError, match="give --edgc-static-rank in its place"):
        EDGCConfig.from_preset(volume=24, allocation="uniform")


def test_defaults_are_the_papers() -> None:
    config = EDGCConfig()
    assert (config.ranks.window, config.ranks.rank_step, config.ranks.warmup_fraction) == (1000, 8, 0.1)
    assert (config.ranks.iteration_sampling_rate, config.ranks.gradient_sampling_rate) == (0.1, 0.25)


def test_every_setting_says_what_it_is() -> None:
    for setting in setting_fields():
        assert all(setting.metadata[key] for key in ("help", "unit", "source")), setting.name
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
    assert EDGCConfig.from_preset() == EDGCConfig.from_preset("balanced") != EDGCConfig()
    for given in ({"engine": 5}, {"engine": None}, {"preset": ["balanced"]}):
        with pytest.raises(ConfigError, match="must be text"):
            EDGCConfig.from_preset(**given)
    balanced = EDGCConfig.from_preset("balanced", wire="int8", static_rank=64)
    assert (balanced.preset, balanced.formats.wire, balanced.ranks.static_rank) == ("balanced", "int8", 64)
    balanced.check_run(500)  # no window is needed where the rank is static
    assert balanced.formats.basis_wires == ("int5", "int5")
    assert EDGCConfig.from_preset("fast").formats.basis_wires == ("int5", "int3")
    single = EDGCConfig.from_preset("balanced", basis_wire="fp32")
    assert single.formats.basis_wires == ("fp32", "fp32")
    assert EDGCConfig.from_preset("balanced", pp="both").pipeline.pp == "both:int4"
    for name in PRESETS:
        EDGCConfig.from_preset(name)
    for wrong, said in (({"preset": "best"}, "--edgc-preset = best"), ({"pp": "forward"}, "--edgc-pp = forward: must")):
        with pytest.raises(ConfigError, match=said):
            EDGCConfig.from_preset(**wrong)


def test_what_a_preset_says_of_messages_and_ranks_is_void_without_them() -> None:
    assert EDGCConfig.from_preset("optimus", pp="off").pipeline.messages == Messages()
    assert EDGCConfig.from_preset("optimus", engine="int8").ranks.static_rank is None
    ranked = EDGCConfig.from_preset("balanced", pp="auto:powersgd:8")
    assert ranked.pipeline.messages == Messages("auto", "powersgd", 8)
    # the paper's messages follow entropy's ranks
    assert EDGCConfig.from_preset("paper").pipeline.messages == Messages("auto-epilogue", "powersgd")
    for given in ({"engine": "dense"}, {"engine": "int4"}, {"static_rank": 128}, {"volume": 12}):
        assert EDGCConfig.from_preset(**{"preset": "paper", **given}).pipeline.messages == Messages()


def test_the_dense_engine_leaves_out_what_a_preset_rounds() -> None:
    config = EDGCConfig.from_preset("balanced", engine="dense")
    assert (config.engine, config.ranks.volume) == ("dense", None)
    assert (config.formats.dense_wire, config.formats.rest_wire) == ("fp32", "fp32")
    assert (config.formats.param_wire, EDGCConfig.from_preset("balanced").formats.param_wire) == ("off", "auto:int8")


def test_a_preset_leaves_out_what_an_engine_does_not_read() -> None:
    rounding = EDGCConfig.from_preset("balanced", engine="int4")
    assert (rounding.formats.rest_wire, rounding.basis_cycle, rounding.ranks.allocation) == ("fp32", 1, "uniform")
    alternating = EDGCConfig.from_preset("balanced", engine="alternating")
    assert (alternating.formats.basis_wire, alternating.formats.wire) == ("fp32", "int5")
    assert EDGCConfig.from_preset(static_rank=8, wire="int5").formats.wire == "int5"


def test_an_engine_with_errors_of_its_own_leaves_out_the_equaliser_of_a_preset() -> None:
    assert not EDGCConfig.from_preset("balanced", engine="loco").equalise
    with pytest.raises(ConfigError, match="--edgc-equalise: the engine loco keeps errors by its own rule"):
        EDGCConfig.from_preset("balanced", engine="loco", equalise=True)


def test_a_setting_of_ranks_that_entropy_sets_lets_it_set_them() -> None:
    for given in ({"rank_model": "measured"}, {"rmin": 4}, {"rank_step": 4}):
        config = EDGCConfig.from_preset(**{"preset": "balanced", **given})
        assert config.rank_policy is RankPolicy.ENTROPY
    config = EDGCConfig.from_preset("optimus", rmax=64)
    assert (config.ranks.static_rank, config.ranks.rmax) == (None, 64)


@pytest.mark.parametrize(
    ("given", "policy"),
    [
        ({"engine": "dense"}, RankPolicy.NONE),
        ({"engine": "int4"}, RankPolicy.CONSTANT),
        ({"static_rank": 0.1}, RankPolicy.CONSTANT),
        ({"preset": "paper"}, RankPolicy.ENTROPY),
        ({}, RankPolicy.VOLUME),
    ],
)
def test_one_policy_sets_the_ranks(given: dict[str, object], policy: RankPolicy) -> None:
    assert EDGCConfig.from_preset(**given).rank_policy is policy


def test_a_preset_of_a_volume_takes_a_bound_on_the_rank_another_volume_or_a_rank() -> None:
    def ranks(**given: float) -> tuple[float | None, ...]:
        own = EDGCConfig.from_preset(**{"preset": "balanced", **given}).ranks
        return own.volume, own.rmax, own.static_rank

    assert ranks() == (24, None, None) and ranks(rmax=16) == (24, 16, None)
    assert ranks(volume=12, rmax=16) == (12, 16, None) and ranks(static_rank=16) == (None, None, 16)
    assert EDGCConfig.from_preset("fast", engine="int4").ranks.volume is None


def test_a_volume_that_is_given_is_spent_as_the_preset_spends_its_own() -> None:
    own, given = (EDGCConfig.from_preset(**one) for one in ({}, {"volume": 24.0}))
    assert given == own and own.study.learning_rate_power == 0.7
    assert EDGCConfig.from_preset("fast", volume=12.0).study.learning_rate_power == 0.7
    assert EDGCConfig.from_preset(static_rank=16).study.learning_rate_power == 0.0


@pytest.mark.parametrize("given", [{"static_rank": 16}, {"engine": "int4"}, {"preset": "paper"}, {"rmin": 8}])
def test_what_only_a_volume_spends_is_refused_without_one(given: dict[str, object]) -> None:
    for name in ("learning_rate_power", "least_fidelity"):
        with pytest.raises(ConfigError, match=f"{name} = 0.3: does nothing without --edgc-volume"):
            EDGCConfig.from_preset(**{**given, name: 0.3})


@pytest.mark.parametrize("unused", [{"rest_wire": "int8"}, {"allocation": "uniform"}, {"compress_embeddings": False}])
def test_what_a_volume_decides_itself_cannot_be_given_beside_it(unused: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="does nothing beside --edgc-volume 24; give --edgc-static-rank as well"):
        EDGCConfig.from_preset(**unused)
    EDGCConfig.from_preset(**{**unused, "static_rank": 8})


def test_alignment_is_not_for_a_volume_and_does_not_take_its_place() -> None:
    with pytest.raises(ConfigError, match="--edgc-no-align: does nothing beside --edgc-volume"):
        EDGCConfig.from_preset(align=False)
    assert EDGCConfig.from_preset(align=True) == EDGCConfig.from_preset()
    assert EDGCConfig.from_preset(align=False, rmin=8).ranks.volume is None


@pytest.mark.parametrize("unused", [{"basis_wire": "int8"}, {"basis_cycle": 2}, {"warm_start": False}])
def test_bases_of_powersgd_cannot_be_set_for_another_engine(unused: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="does nothing beside the engine alternating"):
        EDGCConfig.from_preset(**{"engine": "alternating", **unused})
    EDGCConfig.from_preset(engine="alternating", basis_cycle=1)
    EDGCConfig.from_preset(engine="alternating", preset="balanced")  # sets them


@pytest.mark.parametrize("unused", [{"rmax": 16}, {"align": False}, {"rank_step": 4}, {"allocation": "lgreco"}])
def test_what_sets_a_rank_cannot_be_given_to_an_engine_without_one(unused: dict[str, object]) -> None:
    for engine in ("int4", "dense"):
        with pytest.raises(ConfigError, match=f"does nothing beside the engine {engine}, which has no rank"):
            EDGCConfig.from_preset(**{"engine": engine, **unused})


@pytest.mark.parametrize(
    ("unused", "beside", "rule"),
    [
        ({"error_dtype": "bf16"}, {"engine": "dense"}, "beside the engine dense, which leaves no errors"),
        ({"error_gain": 0.5}, {"engine": "dense"}, "beside the engine dense, which leaves no errors"),
        ({"error_dtype": "bf16"}, {"engine": "loco"}, "beside the engine loco, which keeps errors in a format of its"),
        ({"whole_error_fraction": 0.3}, {"error_gain": 1.0}, "where every step adds the whole error"),
        ({"basis_cycle": 4}, {"warm_start": False}, "beside warm_start = off"),
        ({"entropy_stability": 1.0}, {"static_rank": 8}, "where entropy sets no ranks"),
        ({"entropy_stability": 1.0}, {}, "where entropy sets no ranks"),
    ],
)
def test_what_nothing_would_read_is_refused(unused: dict[str, object], beside: dict[str, object], rule: str) -> None:
    with pytest.raises(ConfigError, match=f"does nothing {rule}"):
        EDGCConfig.from_preset(**unused, **beside)


def test_a_preset_leaves_out_what_nothing_would_read() -> None:
    assert EDGCConfig.from_preset(warm_start=False).basis_cycle == 1
    assert EDGCConfig.from_preset("balanced", engine="dense").study.error_gain == 1
    assert EDGCConfig.from_preset("paper", entropy_stability=1.0).study.entropy_stability == 1


def test_settings_keep_their_values_with_and_without_their_groups() -> None:
    for name in PRESETS:
        config = EDGCConfig.from_preset(name)
        assert EDGCConfig.of(**config.flat()) == config == config.replace()
        assert config.replace(window=7) == EDGCConfig.of(**{**config.flat(), "window": 7}) != config
    assert len(config.flat()) == len(setting_fields()) - 1 + len(fields(Study))


def test_names_that_settings_know_are_those_of_the_rooms_that_need_torch() -> None:
    from edgc import config
    from edgc.comm.wire import WIRES
    from edgc.observe import entropy

    assert set(config.FORMATS) == set(WIRES) and set(config.ESTIMATORS) == set(entropy.ESTIMATORS)


def test_what_is_sampled_costs_at_most_a_thousandth_of_a_dense_run() -> None:
    """By default, of a layer of width 1024 with its biases and norms; how much is sent is counted elsewhere."""
    import torch

    from edgc.compress.state import CompressionState
    from edgc.observe.fidelity import SUMS_PER_ENTRY

    config = EDGCConfig.from_preset()
    sampler = CompressionState(config, None, torch.device("cpu"), 0).fidelity
    assert sampler is not None
    sizes = [3 * 1024 * 1024, 1024 * 1024, 4096 * 1024, 4096 * 1024, 3 * 1024, 4096, *[1024] * 6]
    entries = sum(len(sampler.indices(f"{place}", size, torch.device("cpu"))) for place, size in enumerate(sizes))
    sent = SUMS_PER_ENTRY * entries * config.ranks.iteration_sampling_rate
    assert 0 < sent / sum(sizes) <= 0.001


def test_none_changes_a_preset_only_where_the_preset_has_another_value() -> None:
    balanced = EDGCConfig.from_preset()
    assert EDGCConfig.from_preset(rmin=None) == EDGCConfig.from_preset(static_rank=None) == balanced
    assert EDGCConfig.from_preset(volume=None).ranks.volume is None
    assert EDGCConfig.from_preset("optimus", static_rank=None).ranks.static_rank is None
