from dataclasses import replace

import pytest

from edgc.compress.sent_bytes import rank_of_volume, sent_bytes
from edgc.config import ConfigError, EDGCConfig
from edgc.engines import ENGINES, has_rank
from edgc.plan.run import Run
from edgc.plan.selection import largest_rank, pays, select, width
from edgc.specs import MatrixSpec, Parameter

PARAMETERS = [
    Parameter("fc.weight", (256, 64)),
    Parameter("conv.weight", (64, 8, 8)),
    Parameter("fc.bias", (256,)),
    Parameter("small.weight", (8, 8)),
    Parameter("word.weight", (1000, 64), embedding=True),
]


def test_what_low_rank_takes_and_why_it_leaves_the_rest() -> None:
    selection = select(PARAMETERS, EDGCConfig(), min_rank=4)
    assert selection.matrices == (MatrixSpec("fc.weight", 256, 64), MatrixSpec("conv.weight", 64, 64))
    assert {parameter.name: why for parameter, why in selection.others} == {
        "fc.bias": "one-dimensional",
        "small.weight": "saves less than 2x at rank 4",
        "word.weight": "embedding or output layer",
    }
    assert selection.other_elements == 256 + 64 + 64000
    with_embeddings = select(PARAMETERS, EDGCConfig.of(compress_embeddings=True), min_rank=4)
    assert with_embeddings.matrices == (*selection.matrices, MatrixSpec("word.weight", 1000, 64, embedding=True))


@pytest.mark.parametrize("engine", sorted(name for name in ENGINES if not has_rank(name)))
def test_engines_without_ranks_take_everything(engine: str) -> None:
    selection = select(PARAMETERS, EDGCConfig.of(engine=engine), min_rank=4)
    assert [matrix.name for matrix in selection.matrices] == [parameter.name for parameter in PARAMETERS]
    assert MatrixSpec("fc.bias", 1, 256) in selection.matrices and not selection.others


@pytest.mark.parametrize("engine", ["powersgd", "int2"])
def test_a_study_may_leave_the_engine_only_some_parameters(engine: str) -> None:
    selection = select(PARAMETERS, EDGCConfig.of(engine=engine, only="fc|small"), min_rank=2)
    taken = {"fc.weight", "small.weight"} | ({"fc.bias"} if engine == "int2" else set())
    assert {matrix.name for matrix in selection.matrices} == taken
    why = {parameter.name: reason for parameter, reason in selection.others}
    assert why.keys() == {parameter.name for parameter in PARAMETERS} - taken
    assert why["conv.weight"] == why["word.weight"] == "not in --edgc-study only"


def test_a_choice_of_parameters_that_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="--edgc-study only = fc.: must be a regular expression"):
        EDGCConfig.of(only="fc(")
    with pytest.raises(ConfigError, match="--edgc-study only = fc: does nothing beside --edgc-volume 24"):
        EDGCConfig.from_preset("balanced", only="fc")


def test_a_matrix_pays_only_below_half_of_full_rank_and_above_the_saving() -> None:
    assert pays(16, 64, 64, 2.0)
    assert not pays(17, 64, 64, 2.0)  # 64*64 / (17*128) < 2
    assert pays(32, 64, 4096, 1.0)
    assert not pays(33, 64, 4096, 1.0)  # above half of 64, though it would save


def test_the_largest_rank_is_that_of_the_matrix_that_bears_most() -> None:
    assert largest_rank(select(PARAMETERS, EDGCConfig()).matrices, 2.0) == 24  # 256*64 / (24*320) = 2.13
    assert largest_rank([MatrixSpec("narrow", 16, 100_000)], 1.0) == 8, "half of full rank"
    assert largest_rank([MatrixSpec("exact", 64, 64)], 4.0) == 8, "saves just enough"
    assert largest_rank([MatrixSpec("small", 8, 8)], 2.0) == largest_rank((), 2.0) == 0


@pytest.mark.parametrize(("given", "least"), [({}, 4), ({"rmin": 12, "rmax": 16}, 12), ({"static_rank": 20}, 20)])
def test_what_does_not_pay_at_the_smallest_rank_of_the_settings_is_left(given: dict[str, int], least: int) -> None:
    config = EDGCConfig.of(**given)
    assert select(PARAMETERS, config) == select(PARAMETERS, config, least)
    assert f"saves less than 2x at rank {least}" in {one.why for one in select(PARAMETERS, config).others}


def test_cost_of_a_link_is_bytes_over_bandwidth() -> None:
    parameters = [Parameter("a", (100, 200)), Parameter("b", (300, 100)), Parameter("bias", (500,))]
    config = EDGCConfig.of(wire="bf16", basis_wire="fp32", min_saving=1.0)
    selection, run = select(parameters, config), Run(iterations=1000, replicas=4)
    cost = sent_bytes(selection, config, processes=4, run=run).over(0.008)  # 1 MB/s
    assert cost.compressed.at(10) == pytest.approx((10 * (500 * 4 + 200 * 2) + 500 * 4) * 1.5 / 1e6)
    assert cost.dense_seconds == pytest.approx(50_500 * 4 * 1.5 / 1e6)
    assert cost.largest_rank(cost.host_seconds) == 80 and largest_rank(selection.matrices, 1.0) == 48
    one_factor = config.replace(engine="alternating", rest_wire="bf16", dense_wire="bf16")
    cost = sent_bytes(selection, one_factor, processes=4, run=run).over(0.008)
    assert cost.compressed.at(10) == pytest.approx((10 * 700 / 2 * 2 + 500 * 2) * 1.5 / 1e6)
    assert cost.dense_seconds == pytest.approx(50_500 * 2 * 1.5 / 1e6)
    # what compression has to beat is the host's own all-reduce, in fp32
    assert cost.host_seconds == pytest.approx(50_500 * 4 * 1.5 / 1e6)
    of_half = sent_bytes(selection, one_factor, 4, replace(run, value_bytes=2)).over(0.008)
    assert of_half.host_seconds == cost.host_seconds / 2


def test_beside_a_volume_small_parameters_cost_what_a_plan_sends_of_them() -> None:
    parameters = [Parameter("a", (100, 200)), Parameter("bias", (500,))]
    with_volume = EDGCConfig.of(volume=24, min_saving=1.0)
    selection, run = select(parameters, with_volume), Run(iterations=1000, replicas=4)
    one, other = (with_volume.replace(rest_wire=form) for form in ("fp32", "int4"))
    assert sent_bytes(selection, one, 4, run) == sent_bytes(selection, other, 4, run)
    assert rank_of_volume(selection, one, 5.0) == rank_of_volume(selection, other, 5.0)
    of_a_rank = [config.replace(volume=None, static_rank=4) for config in (one, other)]
    assert sent_bytes(selection, of_a_rank[0], 4, run) != sent_bytes(selection, of_a_rank[1], 4, run)


def test_the_width_is_the_smaller_side_of_most_entries() -> None:
    many_small = [MatrixSpec(f"head{i}", 64, 512) for i in range(3)]
    assert width([*many_small, MatrixSpec("fc", 2048, 512), MatrixSpec("qkv", 1536, 512)]) == 512
    assert width([]) == 0
