"""Units of reduction: how a stage is cut, and when a unit is complete."""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import accumulate, batched, pairwise, permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from edgc.comm.wire import wire
from edgc.compress.reducer import GradientReducer
from edgc.errors import NonFiniteSum, StepError
from edgc.hosts.steps import Step
from edgc.hosts.units import MAX_UNITS, MIN_UNIT_BYTES, Unit, Units, cut, cut_shards
from edgc.specs import Parameter, shard_bounds
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_counts import parameters


@pytest.mark.parametrize("sizes", [[100] * 30, [1000, *[10] * 50], [*[10] * 50, 1000], [7, 300, 1, 1, 299, 300]])
def test_a_stage_is_cut_in_order_into_three_units_that_are_about_alike(sizes: list[int]) -> None:
    units = cut(enumerate(sizes), least=1)
    assert [place for unit in units for place in unit] == list(range(len(sizes)))
    assert 2 <= len(units) <= MAX_UNITS and all(units)
    within = [sum(sizes[place] for place in unit) for unit in units]
    assert max(within) < sum(sizes) / MAX_UNITS + max(sizes) + 1


def test_a_small_stage_is_one_unit() -> None:
    assert cut([("a", MIN_UNIT_BYTES // 2), ("b", MIN_UNIT_BYTES // 4)]) == [["a", "b"]]
    assert cut([("a", MIN_UNIT_BYTES), ("b", MIN_UNIT_BYTES)]) == [["a"], ["b"]]
    assert cut([]) == []


def in_a_buffer(sizes: Sequence[int], processes: int) -> list[tuple[int, list[int]]]:
    """The place of each gradient, and its values in the shard of each process of a buffer that holds all in a row."""
    shard, end, found = -(-sum(sizes) // processes), 0, []
    for place, size in enumerate(sizes):
        bounds = shard_bounds(end, end + size, shard, processes)
        found.append((place, [after - before for before, after in pairwise(bounds)]))
        end += size
    return found


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_units_of_a_buffer_in_shards_have_about_as_much_of_each(processes: int) -> None:
    sizes = [30, 1, 10, 1, 40, 1, 40, 1] * 12
    gradients = in_a_buffer(sizes, processes)

    def unevenness(unit: Sequence[int]) -> float:
        """Values of the largest shard over those of a mean one: more than 2 cost more than sums for everyone."""
        of_shards = [sum(gradients[place][1][process] for place in unit) for process in range(processes)]
        return max(of_shards) * processes / sum(of_shards)

    units = cut_shards(gradients, 3)
    assert sorted(place for unit in units for place in unit) == list(range(len(sizes)))
    assert all(unit == sorted(unit) for unit in units), "each in the order in which gradients come"
    assert max(map(unevenness, units)) < 1.3
    within = [sum(sizes[place] for place in unit) for unit in units]
    assert max(within) < 1.2 * sum(sizes) / 3
    assert max(map(unevenness, cut(enumerate(sizes), least=1))) >= min(processes, 2.5) - 0.1


@pytest.mark.parametrize(("processes", "most"), [(8, 1.2), (16, 1.4)])
def test_units_of_a_papers_stage_have_about_as_much_of_each_shard(processes: int, most: float) -> None:
    gradients = in_a_buffer([one.elements for one in parameters(Stage.of("gpt2_12.1b", None))], processes)
    for unit in cut_shards(gradients, 3):
        of_shards = [sum(gradients[place][1][process] for place in unit) for process in range(processes)]
        assert max(of_shards) * processes <= most * sum(of_shards)


@pytest.mark.parametrize(("sharded", "groups"), [(True, 1), (True, 2), (True, 8), (False, 1)])
def test_megatrons_units_follow_shards_where_few_groups_have_them(
    sharded: bool, groups: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One group of all, or an embedding apart, as without overlap; of many, units follow the backward pass."""
    from megatron.edgc import stages

    monkeypatch.setattr(stages, "MIN_UNIT_BYTES", 1)
    monkeypatch.setattr(stages, "process_group", lambda group: None)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 4)
    monkeypatch.setattr(stages.MegatronStage, "__init__", lambda self: None)
    sizes = [30, 10, 40, 40] * 6
    stage: Any = stages.MegatronStage()  # type: ignore[call-arg]
    stage.named, gradients = [], []
    for own in batched(enumerate(sizes), len(sizes) // groups):
        weights = {torch.nn.Parameter(torch.empty(0)): (place, size) for place, size in own}
        ends = list(accumulate(size for _, size in own))
        index = {weight: (end - size, end) for (weight, (_, size)), end in zip(weights.items(), ends, strict=True)}
        bucket = SimpleNamespace(grad_data=torch.empty(ends[-1]), param_to_index=index)
        group: Any = SimpleNamespace(buckets=[bucket], ddp_config=SimpleNamespace(use_distributed_optimizer=sharded))
        described = tuple(Parameter(str(place), (size,)) for place, size in own)
        names = {weight: str(place) for weight, (place, _) in weights.items()}
        stage.named.append(stages.NamedBucketGroup(group, 0, names, described))
        of_group = in_a_buffer([size for _, size in own], 4)
        gradients += [(place, values) for (place, _), (_, values) in zip(own, of_group, strict=True)]
    units = [[int(one.name) for one in unit] for unit in stage.units_of_parameters]
    in_a_row = cut(enumerate(sizes), -(-sum(sizes) // 3))
    assert units == (cut_shards(gradients, 3) if sharded and groups <= 3 else in_a_row) and len(units) == 3


def test_megatrons_units_hold_gradients_of_one_chunk_and_of_one_type() -> None:
    from megatron.edgc import stages

    stage = stages.MegatronStage.__new__(stages.MegatronStage)
    stage.named = []
    for name, chunk, dtype in (
        ("a", 0, torch.bfloat16),
        ("b", 0, torch.float32),
        ("c", 0, torch.float32),
        ("d", 1, torch.float32),
    ):
        group: Any = SimpleNamespace(buckets=[SimpleNamespace(grad_data=torch.empty(8, dtype=dtype))])
        stage.named.append(stages.NamedBucketGroup(group, chunk, {}, (Parameter(name, (8,)),)))
    assert [[one.name for one in unit] for unit in stage.units_of_parameters] == [["a"], ["b", "c"], ["d"]]


@pytest.mark.parametrize(("for_nan", "for_large"), [(False, False), (True, False), (False, True)])
def test_gradients_are_checked_as_megatron_is_asked_to_before_they_are_scaled(for_nan: bool, for_large: bool) -> None:
    from megatron.edgc.bucket_groups import EDGCBucketGroup

    bucket = SimpleNamespace(grad_data=torch.ones(4), gradient_scaling_factor=0.5)
    config = SimpleNamespace(
        check_for_nan_in_grad=for_nan, check_for_large_grads=for_large, average_in_collective=False
    )
    checked: list[tuple[bool, bool, float]] = []
    group: Any = SimpleNamespace(buckets=[bucket], ddp_config=config)
    group.check_grads = lambda *asked: checked.append((*asked, float(bucket.grad_data[0])))
    EDGCBucketGroup._check_and_scale(group)
    assert checked == ([(for_nan, for_large, 1.0)] if for_nan or for_large else [])
    assert bucket.grad_data.tolist() == [0.5] * 4


def test_a_backward_pass_that_is_made_while_its_sums_are_under_way_is_refused() -> None:
    from megatron.edgc.bucket_groups import EDGCBucketGroup

    group: Any = SimpleNamespace(is_first_batch=False, grad_reduce_handle=object())
    with pytest.raises(StepError, match="while the sums of the one before were under way"):
        EDGCBucketGroup.start_grad_sync(group)


def test_only_a_step_that_megatron_runs_again_may_reduce_its_gradients_again() -> None:
    from megatron.edgc.bucket_groups import StageReductions

    anything, group = cast(Any, None), cast(Any, object())
    for reruns in (False, True):
        sums = StageReductions(Units([]), anything, anything, anything, lambda: Step(3, None), reruns)
        sums.groups = [group]
        sums.begin(group, {})
        sums.end(overlapped=True)
        with nullcontext() if reruns else pytest.raises(StepError, match="iteration 4: gradients are reduced a second"):
            sums.begin(group, {})


def test_a_step_that_megatron_doubts_runs_again_where_nothing_was_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with its default flags after a loss that is not finite."""
    from megatron.core.rerun_state_machine import RerunState

    from megatron.edgc import bucket_groups

    machine = SimpleNamespace(state=RerunState.INITIAL_RUN)
    monkeypatch.setattr(bucket_groups, "get_rerun_state_machine", lambda: machine)
    anything, group = cast(Any, None), cast(Any, object())
    reducer = cast(Any, SimpleNamespace(begin=lambda iteration: None, plain=True))
    for plain in (True, False):
        reducer.plain, machine.state = plain, RerunState.INITIAL_RUN
        units = Units([Unit(["w"], reducer)])
        sums = bucket_groups.StageReductions(units, anything, anything, anything, lambda: Step(3, None), False)
        sums.groups = [group]
        sums.begin(group, {})
        sums.end(overlapped=True)
        machine.state = RerunState.RERUNNING_IN_PLACE
        with nullcontext() if plain else pytest.raises(NonFiniteSum, match="iteration 4: Megatron has found a result"):
            sums.begin(group, {})


@pytest.mark.parametrize("second", [True, False])
def test_megatron_sums_gradients_where_no_unit_has_anything_to_compress_or_to_add(second: bool) -> None:
    from megatron.edgc.bucket_groups import StageReductions

    anything, group = cast(Any, None), cast(Any, object())
    reducers = [cast(Any, SimpleNamespace(begin=lambda iteration: None, plain=one)) for one in (True, second)]
    units = Units([Unit([name], reducer) for name, reducer in zip("ab", reducers, strict=True)])
    sums = StageReductions(units, anything, anything, anything, lambda: Step(3, None), False)
    sums.begin(group, {})
    assert sums.plain == second


@pytest.mark.parametrize(
    ("dtype", "name", "kept"),
    [(torch.bfloat16, "int8", True), (torch.float32, "int8", False), (torch.bfloat16, None, False)],
)
def test_weights_of_before_a_step_are_kept_where_their_differences_travel(
    dtype: torch.dtype, name: str | None, kept: bool
) -> None:
    """Those in fp32 are the optimizer's own."""
    from megatron.edgc.bucket_groups import EDGCBucketGroup
    from megatron.edgc.weights import WeightGather

    gather = WeightGather(cast(Any, SimpleNamespace(world_size=2, process=1)), cast(Any, None))
    gather.wire = None if name is None else wire(name)
    values = torch.arange(8, dtype=dtype)
    group: Any = SimpleNamespace(edgc_weights=gather, buckets=[SimpleNamespace(param_data=values)])
    EDGCBucketGroup.keep_weights(group)
    assert (gather.before is not None) == kept
    if gather.before is not None:
        values.zero_()
        assert [shard.tolist() for shard in gather.before] == [[4, 5, 6, 7]]


def units_of(*names: str) -> Units:
    reducer = cast(GradientReducer, cast(Any, None))
    return Units([Unit(list(each), reducer) for each in names])


def test_a_unit_is_complete_when_its_last_gradient_has_come_in_whatever_order() -> None:
    gradients = {name: torch.full((1,), float(place)) for place, name in enumerate("abcd")}
    for order in permutations("abcd"):
        units = units_of("ab", "cd")
        for _ in range(2):  # each step anew
            units.begin()
            seen: list[str] = []
            for name in order:
                assert name in units.missing
                complete = units.add({name: gradients[name]})
                seen.append(name)
                expected = [unit for unit in ("ab", "cd") if name in unit and set(unit) <= set(seen)]
                assert ["".join(unit.names) for unit in complete] == expected
                for unit in complete:
                    assert list(unit.gradients) == list(unit.names), "in the order of the unit, whatever came first"
            assert units.missing == []


def test_gradients_that_come_at_once_may_complete_several_units() -> None:
    units = units_of("ab", "cd")
    units.begin()
    assert units.add({"a": torch.ones(1)}) == []
    complete = units.add({name: torch.ones(1) for name in "dcb"})
    assert {"".join(unit.names) for unit in complete} == {"ab", "cd"}
    assert [unit.names for unit in units.of("db")] == [["c", "d"], ["a", "b"]]
