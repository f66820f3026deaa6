from dataclasses import replace

import pytest

from edgc.allocation import Parameter, allocate, pays, uniform_ranks
from edgc.config import LOW_RANK, EDGCConfig
from edgc.engines import ENGINES, MatrixSpec
from edgc.probe import break_even, cost_of_link, largest_rank

PARAMETERS = [
    Parameter("fc.weight", (256, 64)),
    Parameter("conv.weight", (64, 8, 8)),
    Parameter("fc.bias", (256,)),
    Parameter("small.weight", (8, 8)),
    Parameter("word.weight", (1000, 64), embedding=True),
]


def test_what_low_rank_takes_and_why_it_leaves_the_rest() -> None:
    allocation = allocate(PARAMETERS, EDGCConfig(), min_rank=4)
    assert allocation.matrices == (MatrixSpec("fc.weight", 256, 64), MatrixSpec("conv.weight", 64, 64))
    assert {parameter.name: why for parameter, why in allocation.rest} == {
        "fc.bias": "one-dimensional",
        "small.weight": "saves less than 2x at rank 4",
        "word.weight": "embedding or output layer",
    }
    assert allocation.rest_elements == 256 + 64 + 64000
    with_embeddings = allocate(PARAMETERS, EDGCConfig(compress_embeddings=True), min_rank=4)
    assert with_embeddings.matrices == (*allocation.matrices, MatrixSpec("word.weight", 1000, 64))


@pytest.mark.parametrize("engine", sorted(set(ENGINES) - set(LOW_RANK)))
def test_engines_without_ranks_take_everything(engine: str) -> None:
    allocation = allocate(PARAMETERS, EDGCConfig(engine=engine), min_rank=4)
    assert [matrix.name for matrix in allocation.matrices] == [parameter.name for parameter in PARAMETERS]
    assert MatrixSpec("fc.bias", 1, 256) in allocation.matrices and not allocation.rest


def test_a_matrix_pays_only_below_half_of_full_rank_and_above_the_saving() -> None:
    assert pays(16, 64, 64, 2.0)
    assert not pays(17, 64, 64, 2.0)  # 64*64 / (17*128) < 2
    assert pays(32, 64, 4096, 1.0)
    assert not pays(33, 64, 4096, 1.0)  # above half of 64, though it would save


def test_ranks_leave_out_matrices_that_do_not_pay() -> None:
    matrices = allocate(PARAMETERS, EDGCConfig(), 4).matrices
    assert uniform_ranks(matrices, 16, 2.0) == {"fc.weight": 16, "conv.weight": 16}
    assert uniform_ranks(matrices, 20, 2.0) == {"fc.weight": 20}
    assert largest_rank(matrices, 2.0) == 24  # 256*64 / (24*320) = 2.13
    assert largest_rank((), 2.0) == 0


def test_cost_of_a_link_is_bytes_over_bandwidth() -> None:
    parameters = [Parameter("a", (100, 200)), Parameter("b", (300, 100)), Parameter("bias", (500,))]
    config = EDGCConfig(wire="bf16", basis_wire="fp32", min_saving=1.0)
    allocation = allocate(parameters, config, 4)
    cost = cost_of_link(allocation, config, ranks=4, gbps=0.008)  # 1 MB/s
    assert cost.compressed.seconds(10) == pytest.approx((10 * (400 * 4 + 300 * 2) + 500 * 4) * 1.5 / 1e6)
    assert cost.dense_seconds == pytest.approx(50_500 * 4 * 1.5 / 1e6)
    assert break_even(cost, allocation.matrices, 1.0) == 48  # limited by half of 100, in multiples of 4
    one_factor = replace(config, engine="alternating", rest_wire="bf16", dense_wire="bf16")
    cost = cost_of_link(allocation, one_factor, ranks=4, gbps=0.008)
    assert cost.compressed.seconds(10) == pytest.approx((10 * 700 / 2 * 2 + 500 * 2) * 1.5 / 1e6)
    assert cost.dense_seconds == pytest.approx(50_500 * 2 * 1.5 / 1e6)
