"""The plan of a run from what its processes know: a pure function, without processes."""

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest

from edgc.config import ConfigError, EDGCConfig
from edgc.hosts.costs import reduction_sizes
from edgc.plan.by_volume.choices import SendRounded
from edgc.plan.by_volume.reduction_sizes import ReductionSizes
from edgc.plan.rank_plan import NO_RANK, Summing
from edgc.plan.ranks import static_ranks
from edgc.plan.run import Run
from edgc.plan.run_plan import plan_run
from edgc.plan.stages import ProcessStage, StageKey, StageKind, dense_because
from edgc.plan.times.comm_cost import LinearCost, StageCost
from edgc.specs import Parameter

RUN = Run(iterations=1000, replicas=4, pipeline_stages=2)
LAYERS = (
    Parameter("embedding.weight", (1000, 64), embedding=True),
    Parameter("fc1.weight", (256, 64)),
    Parameter("fc1.bias", (256,)),
    Parameter("small.weight", (8, 8)),
)
CHEAP = StageCost(LinearCost(0.0, 0.001), 0.02, 0.02)  # 1 ms a rank; the host takes 20 ms
DEAR = StageCost(LinearCost(0.1, 0.001), 0.02, 0.02)


def processes(*costs: StageCost | None) -> list[list[ProcessStage]]:
    """One process a pipeline stage, whose layers cost so much."""
    return [[ProcessStage(StageKey(StageKind.LAYERS, stage), LAYERS, cost)] for stage, cost in enumerate(costs)]


def test_parameters_are_sorted_and_ranks_settled_for_every_stage() -> None:
    plan = plan_run(EDGCConfig.of(window=100), RUN, processes(CHEAP, CHEAP))
    assert plan.compresses and not plan.warnings
    assert (plan.config.ranks.rmin, plan.config.ranks.rmax) == (4, 20)
    assert plan.keys == [StageKey(StageKind.LAYERS, 0), StageKey(StageKind.LAYERS, 1)]
    for stage in plan.stages:
        assert [matrix.name for matrix in stage.selection.matrices] == ["fc1.weight"]
        assert [parameter.name for parameter, _ in stage.selection.others] == [
            "embedding.weight",
            "fc1.bias",
            "small.weight",
        ]
        assert stage.cost == CHEAP and not stage.dense_because


def test_the_slowest_link_limits_the_rank_and_the_slowest_process_is_the_cost_of_its_stage() -> None:
    slow = StageCost(LinearCost(0.0, 0.002), 0.025, 0.025)  # break-even at 12
    known = [*processes(CHEAP, CHEAP), *processes(slow)]
    plan = plan_run(EDGCConfig.of(window=100), RUN, known)
    assert plan.config.ranks.rmax == 12
    assert [stage.cost for stage in plan.stages] == [slow, CHEAP]


@pytest.mark.parametrize(("preset", "rmax"), [("balanced", 348), ("paper", 472)])
def test_a_stage_that_the_step_does_not_wait_for_has_no_say(preset: str, rmax: int) -> None:
    """Compressed, the small stage takes longer than its host, and far less than that of the large stage."""
    large = StageCost(LinearCost(0.05, 0.002), 1.0, 1.0)
    small = StageCost(LinearCost(0.004, 0.00001), 0.0034, 0.0034)
    matrices = Parameter("fc1.weight", (2048, 2048)), Parameter("small.weight", (64, 64))
    known = [
        [ProcessStage(StageKey(StageKind.LAYERS, stage), (matrix,), cost)]
        for stage, (matrix, cost) in enumerate(zip(matrices, (large, small), strict=True))
    ]
    plan = plan_run(EDGCConfig.from_preset(preset, window=50), RUN, known)
    assert plan.compresses and plan.config.ranks.resolved_rmax == rmax


def test_a_link_on_which_no_rank_pays_is_left_dense_with_a_warning_unless_a_rank_is_given() -> None:
    config = EDGCConfig.of(window=100, rest_wire="int8", dense_wire="int8")
    plan = plan_run(config, RUN, processes(CHEAP, DEAR))
    assert not plan.compresses and len(plan.warnings) == 1
    formats = plan.config.formats
    assert (plan.config.engine, formats.rest_wire, formats.dense_wire) == ("dense", "fp32", "fp32")
    asked = plan_run(EDGCConfig.of(window=100, rmax=16), RUN, processes(CHEAP, DEAR))
    assert asked.compresses and (asked.config.ranks.rmin, asked.config.ranks.rmax) == (4, 16)


def test_a_link_on_which_only_rmin_does_not_pay_is_told_so() -> None:
    plan = plan_run(EDGCConfig.of(window=100, rmin=24), RUN, processes(CHEAP, CHEAP))
    assert not plan.compresses
    assert plan.warnings[0].startswith(
        "on this link compression takes longer than the dense reduction above rank 20, and --edgc-rmin is 24: "
    )


@pytest.mark.parametrize(
    ("window", "warmup_fraction", "advice"),
    [
        (499, 0.1, None),
        (500, 0.1, "--edgc-window"),
        (400, 0.85, "--edgc-warmup-fraction"),  # windows end at 400 and 800, and both lie in the warm-up
        (100, 0.85, None),
        (100, 1.0, "--edgc-warmup-fraction"),
    ],
)
def test_a_run_that_ends_before_entropy_can_be_stable_is_warned(
    window: int, warmup_fraction: float, advice: str | None
) -> None:
    config = EDGCConfig.of(window=window, warmup_fraction=warmup_fraction)
    plan = plan_run(config, RUN, processes(CHEAP, CHEAP))
    warned = [warning for warning in plan.warnings if "ends before compression can begin" in warning]
    assert [warning.rpartition(" ")[2] for warning in warned] == ([advice] if advice else [])
    assert not plan_run(EDGCConfig.of(window=window, static_rank=8), RUN, processes(CHEAP, CHEAP)).warnings


@pytest.mark.parametrize(("rate", "warned"), [(0.01, False), (0.001, True)])
def test_a_budget_that_never_gets_a_second_plan_is_warned(rate: float, warned: bool) -> None:
    config = EDGCConfig.from_preset(volume=24.0, iteration_sampling_rate=rate)
    plan = plan_run(config, RUN, processes(CHEAP, CHEAP))
    assert any("its plan never changes" in warning for warning in plan.warnings) == warned


@pytest.mark.parametrize("tilt", [0.9, -0.5])
def test_a_share_with_a_tilt_keeps_its_largest_rank_within_what_pays(tilt: float) -> None:
    plan = plan_run(EDGCConfig.of(static_rank=0.5, rank_tilt=tilt), RUN, processes(CHEAP, CHEAP))
    found = static_ranks(plan.config)
    assert found is not None and 4 < found[1] <= 20  # the break-even rank


def test_messages_that_follow_gradients_stay_uncompressed_where_gradients_do() -> None:
    plan = plan_run(EDGCConfig.of(window=100, pp="backward"), RUN, processes(DEAR, DEAR))
    assert plan.config.pipeline.pp == "off" and len(plan.warnings) == 2
    fused = plan_run(EDGCConfig.of(window=100, kernels="fused"), RUN, processes(DEAR, DEAR))
    assert fused.config.engine == "dense" and fused.config.study.kernels == "plain"
    own_rank = plan_run(EDGCConfig.of(window=100, pp="backward:powersgd:8"), RUN, processes(DEAR, DEAR))
    assert own_rank.config.pipeline.pp == "backward:powersgd:8" and len(own_rank.warnings) == 1


def sizes(bytes_per_value: Mapping[str, float], uncompressed: float = 1.0, run: Run = RUN) -> ReductionSizes:
    return ReductionSizes(
        factors=lambda matrix: 0.6 * (matrix.rows + matrix.cols),
        rows=lambda matrix: (0.5 * matrix.cols, 1.0 * matrix.rows),
        row_format="int4",
        bytes_per_value=bytes_per_value,
        uncompressed=uncompressed,
        run=run,
    )


def test_stages_beyond_the_share_stay_dense_and_their_link_does_not_count() -> None:
    plan = plan_run(EDGCConfig.of(window=100, stage_share=0.5), RUN, processes(CHEAP, DEAR))
    assert plan.compresses and plan.config.ranks.rmax == 20
    assert [bool(stage.dense_because) for stage in plan.stages] == [False, True]
    controller = plan.controller(sizes({}, 4.0))
    assert controller.excluded == {1} and controller.matrices[1] == ()


@pytest.mark.parametrize("kind", [StageKind.EMBEDDING, StageKind.EXPERTS])
def test_where_no_layers_are_summed_the_warm_up_of_what_is_has_its_format_and_counts(kind: StageKind) -> None:
    alone = replace(RUN, replicas=1, expert_replicas=2)
    config = EDGCConfig.from_preset(volume=48.0)
    summed = ProcessStage(StageKey(kind, 0), (Parameter("word", (512, 64), embedding=True),))
    known = [[*own, summed] for own in processes(None, None)]
    assert plan_run(config, alone, known).config.formats.dense_wire == config.formats.dense_wire != "fp32"
    in_fp32 = config.replace(dense_wire="fp32")
    with pytest.raises(ConfigError, match=r"the warm-up of 2.5 % of the run in fp32 alone sends more"):
        plan_run(in_fp32, alone, known)
    plan_run(in_fp32, alone, processes(None, None))  # nothing is sent


def test_a_process_without_copies_keeps_its_gradients_as_they_are() -> None:
    alone = Run(iterations=1000, replicas=1, pipeline_stages=2)
    plan = plan_run(EDGCConfig.of(window=100, dense_wire="int8"), alone, processes(None, None))
    assert plan.config.formats.dense_wire == "fp32" and plan.config.ranks.rmax == 24  # by the matrices alone
    assert all(stage.dense_because for stage in plan.stages)


@pytest.mark.parametrize("settings", [{"rmax": 28}, {"rmin": 28}, {"static_rank": 28}])
def test_a_rank_at_which_nothing_is_saved_is_refused(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="the largest rank that does is 24"):
        plan_run(EDGCConfig.of(window=100, **settings), RUN, processes(CHEAP, CHEAP))


@pytest.mark.parametrize(("only", "largest"), [("fc1", 24), ("other", 4)])
def test_ranks_are_those_of_the_parameters_that_a_study_compresses(only: str, largest: int) -> None:
    """Also where a parameter of the same shape is left out."""
    others = (Parameter("other.weight", (16, 64)), Parameter("fc2.weight", (256, 64)), Parameter("x", (16, 64)))
    known = [[ProcessStage(StageKey(StageKind.LAYERS, 0), (*LAYERS, *others), CHEAP)]]
    with pytest.raises(ConfigError, match=f"the largest rank that does is {largest}"):
        plan_run(EDGCConfig.of(window=100, static_rank=28, only=only), RUN, known)


def test_a_window_longer_than_the_run_is_refused() -> None:
    with pytest.raises(ConfigError, match="longer than the run"):
        plan_run(EDGCConfig.of(window=2000), RUN, processes(CHEAP, CHEAP))


def test_a_volume_needs_no_ranks_and_every_parameter_has_a_choice() -> None:
    config = EDGCConfig.from_preset("balanced", volume=20.0)
    parameters = (Parameter("w", (64, 256)), Parameter("word", (512, 64), embedding=True), Parameter("bias", (64,)))
    stage = ProcessStage(StageKey(StageKind.LAYERS, 0), parameters, StageCost(LinearCost(0.0, 0.01), 4.0, 4.0))
    plan = plan_run(config, RUN, [[stage]])
    assert plan.compresses and plan.config.ranks.rmax == 300  # of the link: three quarters of the rank of 4 s
    first = plan.controller(sizes({"int8": 1.0, "int4": 0.5, "int2": 0.25})).plan
    assert first.matrix_ranks[0] is not None and first.formats[0] is not None
    assert first.matrix_ranks[0].keys() | first.formats[0].keys() == {"w", "word", "bias"}


def without_matrices() -> list[list[ProcessStage]]:
    return [[ProcessStage(StageKey(StageKind.LAYERS, 0), (Parameter("w", (6, 6)), Parameter("bias", (6,))))]]


def test_a_model_without_a_matrix_for_low_rank_is_told_so_and_a_volume_rounds_it() -> None:
    plan = plan_run(EDGCConfig.from_preset("paper", window=100, pp="off"), RUN, without_matrices())
    assert plan.config.engine == "dense" and plan.warnings == (
        "no matrix of this model saves 2x in low rank: reducing dense",
    )
    plan = plan_run(EDGCConfig.from_preset(), RUN, without_matrices())
    assert plan.compresses and plan.tries and not plan.warnings
    first = plan.controller(sizes({"int8": 1.0, "int4": 0.5})).plan
    assert first.formats[0] is not None and first.formats[0].keys() == {"w", "bias"} and not first.by_host


def test_no_link_bounds_a_tied_embedding_beside_layers_without_a_matrix() -> None:
    tied = ProcessStage(StageKey(StageKind.EMBEDDING, 0), (Parameter("word", (1000, 256), embedding=True),))
    plan = plan_run(EDGCConfig.from_preset(), RUN, [[*own, tied] for own in without_matrices()])
    assert plan.config.ranks.rmax is not None and plan.config.ranks.rmax > 64


def test_a_warm_up_in_a_reduce_scatter_counts_as_that() -> None:
    config = EDGCConfig.from_preset(dense_wire="int8", warmup_fraction=0.2)
    plan_run(config, replace(RUN, scatters=True), processes(CHEAP, CHEAP))
    for run in (RUN, replace(RUN, scatters=True, value_bytes=2)):
        with pytest.raises(ConfigError, match="alone sends more than that allows"):
            plan_run(config, run, processes(CHEAP, CHEAP))


def test_a_volume_asks_the_link_unless_a_rank_is_given() -> None:
    known = processes(DEAR, DEAR)
    plan = plan_run(EDGCConfig.from_preset(volume=20.0), RUN, known)
    assert (plan.compresses, plan.tries, plan.config.engine, plan.config.ranks.volume) == (False, True, "powersgd", 20)
    assert "Give --edgc-rmax a rank" in plan.warnings[0]
    first = plan.controller(sizes({"int8": 1.0, "int2": 0.25})).plan
    for iteration in (0, first.first_iteration):
        assert first.summing(iteration) is Summing.HOST, "nothing is even rounded"
    computed = plan_run(EDGCConfig.from_preset(volume=20.0, link_gbps=1.0), RUN, known)
    assert (computed.compresses, computed.tries, computed.config.engine) == (False, False, "dense")
    plan = plan_run(EDGCConfig.from_preset(volume=20.0, rmax=16), RUN, known)
    assert plan.compresses and not plan.tries and (plan.config.ranks.volume, plan.config.ranks.rmax) == (20, 16)


ROUNDED = replace(CHEAP, rounded_seconds=0.010, volume_rank=40)  # the link allows rank 12: 12 ms


@pytest.mark.parametrize(
    ("cost", "settings", "rounds"),
    [
        pytest.param(ROUNDED, {}, True, id="faster"),
        pytest.param(replace(ROUNDED, rounded_seconds=0.011), {}, False, id="not clearly faster than low rank"),
        pytest.param(replace(ROUNDED, volume_rank=8), {}, False, id="nor than the rank that the volume pays for"),
        pytest.param(replace(DEAR, rounded_seconds=0.014, volume_rank=40), {}, True, id="no rank pays"),
        pytest.param(replace(DEAR, rounded_seconds=0.016, volume_rank=40), {}, False, id="nothing pays"),
        pytest.param(ROUNDED, {"rmax": 16}, False, id="a rank is asked for"),
        pytest.param(ROUNDED, {"rmax": 0.2}, False, id="a share of the width is asked for"),
        pytest.param(CHEAP, {}, False, id="not timed"),
    ],
)
def test_gradients_are_rounded_where_that_is_clearly_faster_than_low_rank(
    cost: StageCost, settings: dict[str, int], rounds: bool
) -> None:
    faster = replace(cost, rounded_seconds=cost.rounded_seconds and cost.rounded_seconds / 2)
    known = processes(faster, cost)  # the slower stage counts
    plan = plan_run(EDGCConfig.from_preset(**{"volume": 20.0, **settings}), RUN, known)
    assert plan.rounds == rounds
    if "rmax" in settings or cost.rounded_seconds is None:
        assert plan.link_times is None, "nothing that a slower link could change"
    else:
        assert plan.link_times is not None and plan.link_times.rounding_pays == rounds
        rank = min(cost.volume_rank or 0, 12 if cost.compressed == CHEAP.compressed else 40)
        seconds = cost.host_seconds, cost.rounded_seconds, cost.compressed.at(rank)
        ways = plan.link_times.host, plan.link_times.rounded, plan.link_times.low_rank
        assert [(way.seconds, way.bytes_sent) for way in ways] == list(zip(seconds, (1, 1 / 8, 1 / 20), strict=True))
    assert any("sends more bytes than --edgc-volume 20 allows" in line for line in plan.warnings) == rounds
    controller = plan.controller(sizes({"int8": 1.0, "int4": 0.5, "int2": 0.25}))
    formats = {"embedding.weight": "int4", "fc1.weight": "int4", "fc1.bias": "int8", "small.weight": "int8"}
    assert ((controller.plan.matrix_ranks, controller.plan.formats) == (({}, {}), (formats, formats))) == rounds
    if rounds:
        assert plan.compresses and plan.tries and not controller.plan.by_host
        assert controller.plan.ranks == (NO_RANK, NO_RANK) and controller.plan.reasons[0] == "rounding is faster"


@pytest.mark.parametrize(("scatters", "more"), [(False, True), (True, False)])
def test_rounding_is_said_to_send_more_than_a_volume_only_where_it_does(scatters: bool, more: bool) -> None:
    """A reduce-scatter in 4 bits sends a sixteenth of an all-reduce in fp32, an all-reduce in 4 bits an eighth."""
    known = processes(*2 * [replace(DEAR, rounded_seconds=0.010, volume_rank=40)])
    plan = plan_run(EDGCConfig.from_preset(volume=10.0), replace(RUN, scatters=scatters), known)
    assert plan.rounds and "So gradients are rounded" in plan.warnings[0]
    assert ("sends more bytes than --edgc-volume 10 allows" in plan.warnings[0]) == more


def test_where_the_host_scatters_it_and_rounding_send_half_as_much() -> None:
    """Of gradients in 16 bits every process needs whole sums, so that rounding sends as much as without."""
    for size, host, rounded in ((4, 1 / 2, 1 / 16), (2, 1 / 4, 1 / 8)):
        run = replace(RUN, scatters=True, value_bytes=size)
        times = plan_run(EDGCConfig.from_preset(volume=20.0), run, processes(ROUNDED, ROUNDED)).link_times
        assert times is not None
        assert [way.bytes_sent for way in (times.host, times.rounded, times.low_rank)] == [host, rounded, 1 / 20]


@pytest.mark.parametrize(("cost", "rounds"), [(DEAR, True), (CHEAP, False)])
def test_a_volume_that_allows_rounding_everything_is_rounded_where_no_rank_pays(cost: StageCost, rounds: bool) -> None:
    known = processes(*[replace(cost, rounded_seconds=0.001, volume_rank=40)] * 2)
    plan = plan_run(EDGCConfig.from_preset("safe"), replace(RUN, scatters=True), known)
    assert (plan.compresses, plan.rounds) == (True, rounds)
    assert plan.link_times is not None and not plan.link_times.may_replace, "whatever its link becomes"


def test_where_a_volume_pays_for_less_than_the_smallest_rank_that_rank_is_timed() -> None:
    cost = StageCost(LinearCost(0.07, 0.01), 0.1, 0.1, rounded_seconds=0.06, volume_rank=0)
    plan = plan_run(EDGCConfig.from_preset(volume=200.0), RUN, processes(cost, cost))
    assert plan.rounds and plan.link_times is not None
    assert plan.link_times.low_rank.seconds == pytest.approx(0.11)


@pytest.mark.parametrize("rate", [math.inf, math.nan, -1.0])
def test_a_learning_rate_that_gives_no_step_a_budget_is_refused(rate: float) -> None:
    run = replace(RUN, learning_rate=lambda iteration: rate if iteration == RUN.iterations - 1 else 1.0)
    with pytest.raises(ConfigError, match=f"the learning rate of iteration {RUN.iterations - 1} is {rate}"):
        plan_run(EDGCConfig.from_preset(volume=20.0), run, processes(CHEAP, CHEAP))
    plan_run(EDGCConfig.from_preset("paper", pp="off"), run, processes(CHEAP, CHEAP))


@pytest.mark.parametrize(("settings", "most"), [({}, math.inf), ({"volume": 24.0}, 1000 / 24), ({"volume": 8}, 125)])
@pytest.mark.parametrize("scatters", [False, True])
def test_trials_know_how_many_steps_of_the_host_a_volume_allows(
    settings: dict[str, float], most: float, scatters: bool
) -> None:
    config = EDGCConfig.from_preset(
        **{"preset": "balanced", **settings} if settings else {"preset": "paper", "pp": "off"}
    )
    plan = plan_run(config, replace(RUN, scatters=scatters), processes(CHEAP, CHEAP))
    trials = plan.controller(sizes({"int8": 1.0, "int4": 0.5}, run=replace(RUN, scatters=scatters))).trials
    assert trials is not None
    assert trials.largest_host_steps == pytest.approx(0.3 * most * (2 if scatters else 1) * RUN.iterations / 1000)


def test_a_rank_that_saves_in_a_small_matrix_is_taken() -> None:
    stage = ProcessStage(StageKey(StageKind.LAYERS, 0), (Parameter("w", (8, 64)),), CHEAP)
    plan = plan_run(EDGCConfig.from_preset("paper", static_rank=3, pp="off"), RUN, [[stage]])
    assert plan.config.ranks.static_rank == 3
    with pytest.raises(ConfigError, match="no matrix of this model saves 2x at rank 4"):
        plan_run(EDGCConfig.from_preset("paper", static_rank=4, pp="off"), RUN, [[stage]])


def test_a_stage_that_stays_dense_has_no_say_in_whether_to_round() -> None:
    known = processes(ROUNDED, replace(ROUNDED, rounded_seconds=10.0))
    for share, rounds in ((1.0, False), (0.5, True)):
        assert plan_run(EDGCConfig.from_preset(volume=20.0, stage_share=share), RUN, known).rounds == rounds


def test_the_settled_bound_of_a_volume_is_taken_again_on_resume() -> None:
    stage = ProcessStage(
        StageKey(StageKind.LAYERS, 0), (Parameter("w", (64, 256)),), StageCost(LinearCost(0.0, 0.01), 4.0, 4.0)
    )
    plan = plan_run(EDGCConfig.from_preset(volume=20.0), RUN, [[stage]])
    assert plan.config.ranks.rmax == 300  # no matrix saves 2x there
    assert plan_run(plan.config, RUN, [[stage]]).config == plan.config


def test_a_reduction_takes_no_more_than_three_quarters_of_the_hosts_time() -> None:
    """On a link where rank 8 takes that long, a volume of 10 sends much less than it may."""
    parameters = (Parameter("w", (64, 256)), Parameter("v", (64, 256)))
    for host_seconds, limited in ((11.4, True), (400.0, False)):
        cost = StageCost(LinearCost(0.0, 1.0), host_seconds, host_seconds)
        stage = ProcessStage(StageKey(StageKind.LAYERS, 0), parameters, cost)
        plan = plan_run(EDGCConfig.from_preset(volume=10.0), RUN, [[stage]])
        assert plan.config.ranks.rmax == (8 if limited else 300)
        budget = plan.controller(sizes({"int8": 1.0, "int2": 0.25})).budget
        assert budget is not None
        at_rank_8 = 2 * 8 * 0.6 * (64 + 256)
        assert (budget.budget(25) == pytest.approx(at_rank_8)) == limited == (budget.reason == "link")
        assert (budget._size(budget.choices) <= at_rank_8) == limited


def test_the_learning_rate_sets_the_budget_of_a_step_only_where_that_is_asked_for() -> None:
    run = Run(iterations=1000, replicas=4, learning_rate=lambda iteration: 1e-3 * (1 - iteration / 1000))
    stage = ProcessStage(StageKey(StageKind.LAYERS, 0), (Parameter("w", (64, 256)),), CHEAP)
    found = []
    for power in (0.0, 0.5):
        config = EDGCConfig.from_preset(volume=10.0, rmax=24, learning_rate_power=power)
        budget = plan_run(config, run, [[stage]]).controller(sizes({"int4": 0.5}, run=run)).budget
        assert budget is not None
        found.append(budget.ledger.share[500] / budget.ledger.share[900])
    assert found[0] == pytest.approx(100 / 500)
    assert 1.25 * found[0] < found[1] < 2 * found[0]


def test_steps_of_a_tiny_learning_rate_are_not_guarded_where_it_sets_the_budget_of_a_step() -> None:
    run = Run(iterations=1000, replicas=4, learning_rate=lambda iteration: 1e-3 * (1 - iteration / 1000))
    for power, last in ((0.0, 999), (0.5, 799)):
        config = EDGCConfig.from_preset(volume=10.0, rmax=24, learning_rate_power=power)
        plan = plan_run(config, run, processes(CHEAP, CHEAP))
        budget = plan.controller(sizes({"int8": 1.0, "int4": 0.5}, run=run)).budget
        assert budget is not None
        assert [iteration for iteration, one in enumerate(budget.guard.watched) if one] == list(range(last + 1))


def test_rows_are_a_choice_of_embeddings_alone() -> None:
    parameters = (Parameter("words", (512, 64), embedding=True), Parameter("qkv", (192, 64)))
    stage = ProcessStage(StageKey(StageKind.LAYERS, 0), parameters, CHEAP)
    run = Run(iterations=1000, replicas=4)
    config = EDGCConfig.from_preset(volume=10.0)
    (planned,) = plan_run(config, run, [[stage]]).stages
    rows = {one.matrix.name: one.rows is not None for one in sizes({"int4": 0.5}, run=run).parameters(planned)}
    assert rows == {"words": True, "qkv": False}


def test_a_window_is_at_most_a_twentieth_of_a_run_with_a_volume_and_holds_a_measurement() -> None:
    for iterations, given, rate, window in ((100000, 1000, 0.1, 1000), (4000, 1000, 0.1, 200), (60, 1000, 0.1, 10)):
        config = EDGCConfig.from_preset(window=given, iteration_sampling_rate=rate)
        plan = plan_run(config, Run(iterations=iterations, replicas=4), processes(CHEAP))
        assert plan.config.ranks.window == window


def test_a_volume_that_the_warm_up_alone_exceeds_is_refused() -> None:
    stage = ProcessStage(StageKey(StageKind.LAYERS, 0), (Parameter("w", (64, 256)),))
    config = EDGCConfig.of(volume=24.0, warmup_fraction=0.1)
    with pytest.raises(ConfigError, match="--edgc-volume = 24: the warm-up of 10 % of the run in fp32 alone"):
        plan_run(config, RUN, [[stage]])
    plan_run(config.replace(dense_wire="int8"), RUN, [[stage]])


@pytest.mark.parametrize(
    ("replicas", "experts", "price"), [(4, 2, (1 / 2) / (3 / 4)), (8, 8, 1.0), (2, 4, (3 / 4) / (1 / 2)), (1, 2, 1.0)]
)
def test_the_price_of_experts_is_that_of_their_own_processes(replicas: int, experts: int, price: float) -> None:
    run = Run(iterations=1000, replicas=replicas, expert_replicas=experts)
    assert sizes({"int4": 0.5}, run=run).price(StageKind.EXPERTS) == pytest.approx(price)


def test_an_embedding_of_two_stages_costs_twice_and_layers_that_nobody_shares_nothing() -> None:
    config = EDGCConfig.from_preset("balanced", volume=20.0)
    layers = ProcessStage(StageKey(StageKind.LAYERS, 0), (Parameter("w", (64, 256)),))
    tied = ProcessStage(StageKey(StageKind.EMBEDDING, 0), (Parameter("word", (512, 64), embedding=True),))
    for run, price, count in ((RUN, 2 * (7 / 8) / (3 / 4), 1), (Run(iterations=1000, replicas=1), 1.0, 0)):
        plan = plan_run(config, run, [[layers, tied]])
        messages = sizes({"int4": 0.5}, run=run)
        of_layers, (of_embedding,) = (messages.parameters(stage) for stage in plan.stages)
        assert len(of_layers) == count and of_embedding.price == pytest.approx(price)
        assert of_embedding.size(SendRounded("int4"), messages.bytes_per_value) == pytest.approx(price * 512 * 64 / 2)
    # where the host scatters, rounded sums of layers send half; both stages need all of this one
    scatters = replace(RUN, scatters=True)
    messages = sizes({"int4": 0.25}, run=scatters)
    plan = plan_run(config, scatters, [[layers, tied]])
    (of_layer,), (of_embedding,) = (messages.parameters(stage) for stage in plan.stages)
    assert of_layer.size(SendRounded("int4"), messages.bytes_per_value) == pytest.approx(64 * 256 / 4)
    whole = 2 * (7 / 8) / (3 / 4) * 512 * 64 / 2
    assert of_embedding.size(SendRounded("int4"), messages.bytes_per_value) == pytest.approx(whole)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"volume": 1.0}, "volume = 1.0: must be a finite number above 1"),
        ({"volume": 20.0, "static_rank": 8}, "--edgc-static-rank = 8: does nothing beside --edgc-volume"),
        ({"volume": 20.0, "rmin": 8}, "rmin = 8: does nothing beside --edgc-volume"),
        ({"volume": 20.0, "rank_model": "measured"}, "does nothing beside --edgc-volume"),
        ({"volume": 20.0, "engine": "int4"}, "the engine int4 has no rank"),
        ({"volume": 20.0, "fidelity_share": 0.0}, "needs a fidelity_share above 0"),
        ({"volume": 20.0, "pp": "backward:powersgd"}, "messages have no rank of their own"),
    ],
)
def test_what_does_not_go_with_a_volume_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EDGCConfig.of(**given)


def test_the_warm_up_of_a_volume_counts_what_the_host_sends() -> None:
    settings = {"volume": 8.0, "dense_wire": "fp32", "warmup_fraction": 0.2}
    config = EDGCConfig.from_preset(**settings)
    processes = [[ProcessStage(StageKey(StageKind.LAYERS, 0), LAYERS)]]
    with pytest.raises(ConfigError, match=r"the warm-up of 20 % of the run in fp32 alone sends more"):
        plan_run(config, Run(iterations=1000, replicas=4), processes)
    # a reduce-scatter sends half
    scattered = plan_run(config, Run(iterations=1000, replicas=4, scatters=True), processes)
    assert scattered.config.ranks.volume == 8


def test_the_times_of_a_link_are_those_of_the_stage_whose_host_takes_longest() -> None:
    known = processes(ROUNDED, replace(ROUNDED, host_seconds=0.03))
    times = plan_run(EDGCConfig.from_preset(volume=20.0), RUN, known).link_times
    assert times is not None and times.host.seconds == 0.03


@pytest.mark.parametrize("cost", [ROUNDED, replace(DEAR, rounded_seconds=0.014, volume_rank=40)], ids=["12", "none"])
def test_the_rank_that_the_link_of_now_allows_is_no_bound_for_a_run_that_rounds(cost: StageCost) -> None:
    plan = plan_run(EDGCConfig.from_preset(volume=20.0), RUN, processes(cost, cost))
    assert plan.rounds and plan.config.ranks.rmax == 28  # which saves 2x in the embedding


def test_where_nothing_is_worth_its_time_the_line_names_the_bound_of_a_volume() -> None:
    nearly = StageCost(LinearCost(0.016, 1e-6), 0.02, 0.02)  # 80 % of the host's time
    plan = plan_run(EDGCConfig.from_preset(), RUN, processes(nearly, nearly))
    assert not plan.compresses
    (line,) = plan.warnings
    assert line.startswith("on this link compression takes more than 75 % of the time of the dense reduction at every")


def test_trials_are_told_of_the_slowest_stage() -> None:
    plan = plan_run(EDGCConfig.of(window=100), RUN, processes(CHEAP, replace(CHEAP, host_seconds=0.05)))
    trials = plan.controller(sizes({}, 4.0)).trials
    assert trials is not None and trials.host_seconds == 0.05


@pytest.mark.parametrize(("stages", "compressed"), [(1, 1), (2, 2), (3, 3), (4, 3), (8, 6)])
def test_a_share_of_the_stages_is_rounded_up(stages: int, compressed: int) -> None:
    config, run = EDGCConfig.of(stage_share=0.75), replace(RUN, pipeline_stages=stages)
    keys = [StageKey(StageKind.LAYERS, index) for index in range(stages)]
    assert [not dense_because(key, config, run) for key in keys] == [index < compressed for index in range(stages)]


def test_ranks_of_a_fast_link_end_where_nothing_is_saved() -> None:
    cost = StageCost(LinearCost(0.0, 0.0001), 0.02, 0.02)
    ranks = plan_run(EDGCConfig.of(window=100), RUN, processes(cost, cost)).config.ranks
    assert ranks.rmax == 24, "not 200, at which compressing takes as long as the sum"


@pytest.mark.parametrize(("value_bytes", "ratio"), [(4, 0.5), (2, 1.0)])
def test_the_planner_knows_that_a_rounded_sum_ends_halfway_where_each_process_needs_its_shard(
    value_bytes: int, ratio: float
) -> None:
    """Of gradients in 16 bits every process needs whole sums."""
    whole, scattered = (
        reduction_sizes(
            EDGCConfig.from_preset(), replace(RUN, scatters=scatters, value_bytes=value_bytes)
        ).bytes_per_value["int4"]
        for scatters in (False, True)
    )
    assert scattered == ratio * whole > 0
