from argparse import ArgumentParser, Namespace

import pytest

from edgc.config import ConfigError, EDGCConfig, flag, knobs
from megatron.edgc.arguments import add_arguments, config_from_args


def parse(*arguments: str) -> Namespace:
    return add_arguments(ArgumentParser(allow_abbrev=False)).parse_args(arguments)


def test_every_setting_is_a_flag_with_help_unit_default_and_source() -> None:
    text = " ".join(add_arguments(ArgumentParser()).format_help().split())
    for knob in knobs():
        assert flag(knob.name) in text, knob.name
        assert f"[{knob.metadata['unit']}]" in text
        assert knob.metadata["source"] in text
    assert "Default: 1000." in text and "Default: 0.025." in text


def test_flags_become_settings_of_the_right_type() -> None:
    flags = "--edgc --edgc-preset paper --edgc-rmax 64 --edgc-warmup-fraction 0.2 --edgc-no-align --edgc-log-dir x"
    config = config_from_args(parse(*flags.split()))
    paper = {"preset": "paper", "fuse_embedding_sync": False}
    assert config == EDGCConfig(**paper, rmax=64, warmup_fraction=0.2, align=False, log_dir="x")


@pytest.mark.parametrize("given", ["--edgc-wire-dtype int8", "--edgc-density 0.05", "--edgc-stochastic"])
def test_a_flag_of_an_earlier_version_says_what_stands_for_it(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^--edgc-\S+ is gone; now: --edgc-\S+") as caught:
        parse("--edgc", *given.split())
    assert "\n" not in str(caught.value)


def test_without_flags_the_default_preset_holds() -> None:
    assert config_from_args(parse("--edgc")) == EDGCConfig.from_preset({"preset": "balanced"})
    assert config_from_args(parse("--edgc", "--edgc-preset", "paper")) == EDGCConfig.from_preset({"preset": "paper"})
    assert config_from_args(parse("--edgc", "--edgc-engine", "int4")) == EDGCConfig(engine="int4")
    assert config_from_args(parse()) is None


@pytest.mark.parametrize("stray", [["--edgc-rmax", "8"], ["--edgc-no-align"], ["--edgc-window", "1000"]])
def test_a_setting_without_edgc_is_refused(stray: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{stray[0]} given without --edgc"):
        config_from_args(parse(*stray))


def test_what_a_preset_switches_on_can_be_switched_off() -> None:
    config = config_from_args(parse("--edgc", "--edgc-preset", "balanced", "--edgc-no-equalise"))
    assert config is not None and not config.equalise and config.basis_cycle > 1
    plain = config_from_args(parse("--edgc", "--edgc-preset", "paper", "--edgc-equalise"))
    assert plain == EDGCConfig(preset="paper", fuse_embedding_sync=False, equalise=True)
    assert config.fuse_embedding_sync is None  # the run decides
    for prefix, wanted in (("", True), ("no-", False)):
        given = config_from_args(parse("--edgc", f"--edgc-{prefix}fuse-embedding-sync"))
        assert given is not None and given.fuse_embedding_sync is wanted
