import math

from edgc.config import EDGCConfig
from edgc.plan.allocation import RankAllocation, descent, fewest_bytes_ranks, uniform_ranks, water_filled_ranks
from edgc.plan.rank_plan import RankPlan
from edgc.plan.selection import pays
from edgc.specs import MatrixSpec

TWINS = (MatrixSpec("a", 256, 256), MatrixSpec("b", 256, 256))


def test_ranks_leave_out_matrices_that_do_not_pay() -> None:
    matrices = [MatrixSpec("fc.weight", 256, 64), MatrixSpec("conv.weight", 64, 64)]
    assert uniform_ranks(matrices, 16, 2.0) == {"fc.weight": 16, "conv.weight": 16}
    assert uniform_ranks(matrices, 20, 2.0) == {"fc.weight": 20}


def spent(ranks: dict[str, int]) -> int:
    return sum(512 * rank for rank in ranks.values())


def test_equal_spectra_share_alike() -> None:
    energies = {"a": [2.0**-i for i in range(16)], "b": [2.0**-i for i in range(16)]}
    assert water_filled_ranks(TWINS, energies, 16, 2.0) == {"a": 16, "b": 16}


def test_rank_goes_where_a_step_lowers_the_loss_more() -> None:
    """The root of the energy counts: b's direction i is worth what a's i - log2(100) is."""
    energies = {"a": [2.0**-i for i in range(32)], "b": [1e4 * 2.0**-i for i in range(32)]}
    assert descent(TWINS[1], 1e4) == 100 * descent(TWINS[0], 1.0) == 25600
    assert water_filled_ranks(TWINS, energies, 16, 2.0) == {"a": 12, "b": 20}
    # in another unit of the gradient it is the same plan
    scaled = {name: [1e6 * one for one in own] for name, own in energies.items()}
    assert water_filled_ranks(TWINS, scaled, 16, 2.0) == {"a": 12, "b": 20}


def test_an_embedding_with_the_spectrum_of_a_layer_but_more_energy_an_entry_gets_more_rank() -> None:
    matrices = (MatrixSpec("layer", 256, 64), MatrixSpec("word", 256, 64))
    energies = {"layer": [1 / (1 + i) for i in range(16)], "word": [9 / (1 + i) for i in range(16)]}
    ranks = water_filled_ranks(matrices, energies, 16, 2.0)
    assert ranks["word"] == 24 and ranks["layer"] == 8


def test_rank_goes_where_the_spectrum_is_flat_but_not_all_of_it() -> None:
    energies = {"a": [2.0**-i for i in range(16)], "b": [1.0] * 16}
    ranks = water_filled_ranks(TWINS, energies, 16, 2.0)
    assert ranks == {"a": 8, "b": 24}, "half of the common rank is kept"


def test_directions_of_smaller_matrices_cost_less() -> None:
    matrices = (MatrixSpec("large", 1024, 256), MatrixSpec("small", 256, 256))
    energies = {"large": [1.0] * 16, "small": [1.0] * 16}
    ranks = water_filled_ranks(matrices, energies, 16, 2.0)
    assert ranks["small"] > 16 > ranks["large"]
    assert 16 * (1280 + 512) - 4 * 512 < 1280 * ranks["large"] + 512 * ranks["small"] <= 16 * (1280 + 512)


def test_dear_bytes_buy_less_rank() -> None:
    energies = {"a": [1 / (1 + i) for i in range(64)], "b": [1 / (1 + i) for i in range(64)]}
    assert water_filled_ranks(TWINS, energies, 16, 2.0, {"b": 2.0}) == {"a": 24, "b": 12}


def test_best_of_all_plans_of_equal_bytes() -> None:
    """Against every plan of two matrices, in steps of 4."""
    energies = {"a": [1 / (1 + i) for i in range(64)], "b": [1 / (1 + i) ** 0.3 for i in range(64)]}

    def captured(ranks: dict[str, int]) -> float:
        wholes = {n: sum(energies[n] + _tail(energies[n])) for n in ranks}
        return sum(math.sqrt(wholes[n]) * sum(energies[n][: ranks[n]]) / wholes[n] for n in ranks)

    def _tail(known: list[float]) -> list[float]:
        return [known[-1] * (64 / place) ** (1.0 if known is energies["a"] else 0.3) for place in range(65, 257)]

    chosen = water_filled_ranks(TWINS, energies, 32, 2.0)
    assert spent(chosen) == 2 * 32 * 512
    every = [{"a": a, "b": 64 - a} for a in range(16, 49, 4)]
    assert captured(chosen) >= max(captured(plan) for plan in every) - 1e-9


def test_unknown_spectra_and_zero_gradients_keep_the_common_rank_or_the_floor() -> None:
    assert water_filled_ranks(TWINS, {}, 16, 2.0) == {"a": 16, "b": 16}
    zero = water_filled_ranks(TWINS, {"a": [0.0] * 16, "b": [1.0] * 16}, 16, 2.0)
    assert zero["a"] == 8 and zero["b"] == 24
    assert water_filled_ranks(TWINS, {"a": [1.0] * 4, "b": [1.0] * 4}, 4, 2.0) == {"a": 4, "b": 4}


def test_the_fewest_bytes_of_all_plans_that_leave_out_no_more() -> None:
    """Against every plan of three matrices, in steps of 4."""
    matrices = (MatrixSpec("a", 64, 64), MatrixSpec("b", 256, 64), MatrixSpec("c", 64, 64))
    energies = {
        "a": [1 / (1 + i) for i in range(64)],
        "b": [3 / (1 + i) ** 2 for i in range(64)],
        "c": [0.2 / (1 + i) ** 0.3 for i in range(64)],
    }

    def left_out(ranks: dict[str, int]) -> float:
        return sum(sum(energies[name][rank:]) for name, rank in ranks.items())

    def values(ranks: dict[str, int]) -> int:
        return sum(ranks[matrix.name] * (matrix.rows + matrix.cols) for matrix in matrices)

    tolerated = left_out({"a": 12, "b": 12, "c": 12})
    usable = {m.name: [r for r in range(4, 33, 4) if pays(r, m.rows, m.cols, 1.5)] for m in matrices}
    every = [{"a": a, "b": b, "c": c} for a in usable["a"] for b in usable["b"] for c in usable["c"]]
    best = min(values(ranks) for ranks in every if left_out(ranks) <= tolerated)
    chosen = fewest_bytes_ranks(matrices, energies, 12, 1.5)
    assert left_out(chosen) <= 1.001 * tolerated and values(chosen) <= best < values({"a": 12, "b": 12, "c": 12})
    # the error is absolute: beside a gradient a hundred times as large the others do not count
    large = {**energies, "a": [1e4 * e for e in energies["a"]]}
    assert fewest_bytes_ranks(matrices, large, 12, 1.5) == {"a": 12, "b": 4, "c": 4}
    small = [MatrixSpec("small", 6, 1000)]
    assert fewest_bytes_ranks(small, {"small": [4.0, 2.0]}, 2, 1.5) == {"small": 2}, "no multiple of 4 pays"
    assert fewest_bytes_ranks(matrices, {}, 12, 1.5) == {"a": 12, "b": 12, "c": 12}
    assert fewest_bytes_ranks(matrices, {name: [0.0] * 8 for name in energies}, 12, 1.5) == {"a": 12, "b": 12, "c": 12}


def test_ranks_of_matrices_go_with_the_rank_of_their_stage_where_nothing_was_measured() -> None:
    config = EDGCConfig.of(allocation="waterfill", window=10)
    allocation = RankAllocation(config, [[MatrixSpec("w", 256, 256)]], [{}], [1.0])
    plan = RankPlan(1, 0, (32,), ({"w": 28},))
    assert allocation.with_ranks(10, plan, (32,)).matrix_ranks == ({"w": 28},)
    assert allocation.with_ranks(10, plan, (16,)).matrix_ranks == (None,)
