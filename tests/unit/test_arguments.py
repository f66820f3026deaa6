from argparse import ArgumentParser, Namespace

import pytest

from edgc.config import ConfigError, EDGCConfig, flag, setting_fields
from megatron.edgc.arguments import add_arguments, config_from_args


def parse(*arguments: str) -> Namespace:
    return add_arguments(ArgumentParser(allow_abbrev=False)).parse_args(arguments)


def test_every_setting_is_a_flag_with_help_unit_default_and_source() -> None:
    text = " ".join(add_arguments(ArgumentParser()).format_help().split())
    for setting in setting_fields():
        assert flag(setting.name) in text, setting.name
        assert f"[{setting.metadata['unit']}]" in text
        assert setting.metadata["source"] in text
    assert "Default: 1000." in text and "Default: 0.025." in text


def test_flags_become_settings_of_the_right_type() -> None:
    flags = "--edgc --edgc-preset paper --edgc-rmax 64 --edgc-warmup-fraction 0.2 --edgc-no-align --edgc-log-dir x"
    config = config_from_args(parse(*flags.split()))
    paper = {"preset": "paper", "pp": "auto-epilogue:powersgd", "fuse_embedding_sync": False}
    assert config == EDGCConfig.of(**paper, rmax=64, warmup_fraction=0.2, align=False, log_dir="x")


def test_without_flags_the_default_preset_holds() -> None:
    assert config_from_args(parse("--edgc")) == EDGCConfig.from_preset("balanced")
    assert config_from_args(parse("--edgc", "--edgc-preset", "paper")) == EDGCConfig.from_preset("paper")
    assert config_from_args(parse("--edgc", "--edgc-engine", "int4")) == EDGCConfig.of(engine="int4")
    assert config_from_args(parse()) is None


@pytest.mark.parametrize("stray", [["--edgc-rmax", "8"], ["--edgc-no-align"], ["--edgc-window", "1000"]])
def test_a_setting_without_edgc_is_refused(stray: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{stray[0]} given without --edgc"):
        config_from_args(parse(*stray))


def test_what_a_preset_switches_on_can_be_switched_off() -> None:
    config = config_from_args(parse("--edgc", "--edgc-preset", "balanced", "--edgc-no-equalise"))
    assert config is not None and not config.equalise and config.basis_cycle > 1
    plain = config_from_args(parse("--edgc", "--edgc-preset", "paper", "--edgc-equalise"))
    assert plain == EDGCConfig.from_preset("paper", equalise=True) and plain.equalise
    assert config.pipeline.fuse_embedding_sync is None  # the run decides
    for prefix, wanted in (("", True), ("no-", False)):
        given = config_from_args(parse("--edgc", f"--edgc-{prefix}fuse-embedding-sync"))
        assert given is not None and given.pipeline.fuse_embedding_sync is wanted


def test_levers_of_studies_are_named_with_their_values() -> None:
    config = config_from_args(
        parse("--edgc", "--edgc-study", "rank_tilt=-0.5", "warm_start=off", "--edgc-static-rank", "8")
    )
    assert config is not None and (config.study.rank_tilt, config.study.warm_start) == (-0.5, False)
    twice = config_from_args(parse("--edgc", "--edgc-study", "min_saving=3", "--edgc-study", "statistics=on"))
    assert twice is not None and (twice.study.min_saving, twice.study.statistics) == (3.0, True)
    optimus = config_from_args(parse("--edgc", "--edgc-preset", "optimus", "--edgc-study", "statistics=on"))
    assert optimus is not None and optimus.study.stage_share == 0.75  # the preset's own lever stays


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("rank_tilt", "--edgc-study rank_tilt: must be NAME=VALUE, with a name of entropy_estimator, "),
        ("window=5", "--edgc-study window=5: must be NAME=VALUE"),
        ("min_saving=much", "--edgc-study min_saving=much: must be a number"),
        ("warm_start=0", "--edgc-study warm_start=0: must be on or off"),
        ("min_saving=0.5", "--edgc-study min_saving = 0.5: must be at least 1"),
        ("entropy_estimator=guess", "--edgc-study entropy_estimator = guess: must be one of gaussian"),
    ],
)
def test_a_wrong_lever_is_told_in_one_line(given: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_args(parse("--edgc", "--edgc-study", given))
    assert str(caught.value).startswith(says) and "\n" not in str(caught.value)
