"""The model of a step: schedules, links, reductions, and what the planner makes of them."""

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from edgc.comm.wire import wire
from edgc.compress.message_sender import MessageFormat
from edgc.plan.rank_plan import NO_RANK
from tools import plan
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_costs import gradient_bytes
from tools.launching.configs import CLUSTERS, MODELS, LaunchError
from tools.planning import prediction
from tools.planning.compressing import Compressing
from tools.planning.contenders import CONTENDERS
from tools.planning.page import EDGC, networks, recommended, timeline, way
from tools.planning.placement import Network, Placement, StageLinks
from tools.planning.prediction import Prediction, predict
from tools.planning.schedule import Work, one_forward_one_backward
from tools.planning.simulation import Link, StageTimes, Step, Unit, simulate
from tools.planning.training import LATENCY, Training
from tools.planning.validation import check
from tools.shared.files import write
from tools.shared.gpus import GPUS

FAST = Link(1e9)


def stages(count: int, **settings: object) -> list[StageTimes]:
    return [StageTimes(**{"forward": 1.0, "backward": 2.0, "link": FAST, **settings})] * count  # type: ignore[arg-type]


def passes(order: list[Work]) -> str:
    return " ".join(f"{'B' if work.backward else 'F'}{work.micro_batch}" for work in order)


def test_stages_work_one_forward_one_backward() -> None:
    assert passes(one_forward_one_backward(0, 4, 6)) == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    assert passes(one_forward_one_backward(3, 4, 3)) == "F0 B0 F1 B1 F2 B2"
    assert passes(one_forward_one_backward(0, 4, 2)) == "F0 F1 B0 B1", "fewer micro-batches than stages"


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_each_pass_comes_once_and_backward_after_forward(stage: int, chunks: int) -> None:
    order = one_forward_one_backward(stage, 4, 8, chunks)
    assert len(set(order)) == len(order) == 2 * 8 * chunks
    for work in order:
        if work.backward:
            assert order.index(Work(False, work.chunk, work.micro_batch)) < order.index(work)
    with pytest.raises(ValueError, match="6 micro-batches over 4 stages"):
        one_forward_one_backward(0, 4, 6, 2)


def test_a_pipeline_takes_its_passes_and_its_bubble() -> None:
    assert simulate(stages(1), 5).seconds == pytest.approx(5 * 3)
    assert simulate(stages(4), 8).seconds == pytest.approx((8 + 3) * 3)  # Narayanan et al. 2021, section 2.2
    interleaved = simulate(stages(4, forward=0.5, backward=1.0), 8, chunks=2).seconds
    assert interleaved == pytest.approx((8 + 3 / 2) * 3), "the bubble shrinks by the number of chunks"
    slow = stages(4, link=Link(1e-9, latency=0.1))
    assert simulate(slow, 8).seconds == pytest.approx((8 + 3) * 3 + 6 * 0.1, rel=0.05)


def test_reductions_follow_the_backward_pass_or_hide_behind_it() -> None:
    dense = (Unit((0.0, 0.0), (1e9,)),) * 3
    link = Link(8.0)  # one second for each unit
    plain = simulate(stages(1, link=link, units=dense), 4)
    assert plain.seconds == pytest.approx(4 * 3 + 3) and plain.exposed() == pytest.approx(3)
    hidden = simulate(stages(1, link=link, units=dense), 4, overlapped=True)
    # the units are ready 4/3, 2/3 and 0 seconds before the end
    assert hidden.seconds == pytest.approx(4 * 3 - 4 / 3 + 3)
    assert simulate(stages(1, link=Link(80.0, headers=1.1), units=dense), 4).exposed() == pytest.approx(0.33)
    gathered = simulate(stages(1, link=link, units=dense, gathered=2e9, optimizer=0.5), 4)
    assert gathered.seconds == pytest.approx(4 * 3 + 3 + 0.5 + 2) and gathered.exposed() == pytest.approx(5)


def test_reductions_of_a_later_stage_begin_before_its_last_message_and_let_it_pass() -> None:
    dense = (Unit((0.0, 0.0), (1e9 / 3,)),) * 3  # a third of a second each
    pair = stages(2, link=Link(8.0), activations=1e8, gradients=1e8, units=dense)
    for micro_batches in (1, 4):
        step = simulate(pair, micro_batches, overlapped=True)
        own = [span for span in step.spans if span.stage == 1]
        reductions = [span for span in own if span.kind == "reduce"]
        backward_end = max(span.end for span in own if span.kind == "backward")
        # the first of three units is ready 4/3 s before the backward pass ends
        assert reductions[0].start == pytest.approx(backward_end - 4 / 3)
        last = max((span for span in own if span.kind == "message"), key=lambda span: span.end)
        assert last.start == backward_end, "what the stage before waits for is not held up"
        assert sum(span.seconds for span in reductions) == pytest.approx(1.0)
        # two units are through; the third waits for the message
        assert reductions[-1].end == pytest.approx(backward_end + 0.1 + 1 / 3)
    longer = [replace(one, units=(Unit((0.0, 0.0), (1.5e9,)),) * 2) for one in pair]
    spans = [span for span in simulate(longer, 1, overlapped=True).spans if (span.stage, span.kind) == (1, "reduce")]
    # the first of two units is ready a second before the end
    assert [span.seconds for span in spans] == pytest.approx([1.0, 0.5, 1.5]), "the message goes first"
    assert spans[1].start - spans[0].end == pytest.approx(0.1)


def test_one_unit_computes_while_the_message_of_another_is_under_way() -> None:
    unit = Unit.of(3.0, 2e9, 2)
    assert unit == Unit((1.0, 1.0, 1.0), (1e9, 1e9))
    alone = simulate(stages(1, link=Link(8.0), units=(unit,)), 1).exposed()
    together = simulate(stages(1, link=Link(8.0), units=(unit, unit)), 1).exposed()
    assert alone == pytest.approx(5.0) and together == pytest.approx(6.0), "not 10"
    one_after_another = simulate(stages(1, link=Link(8.0), units=(unit,) * 4), 1).exposed()
    assert 12 <= one_after_another <= 14
    # a CPU has to end the backward pass first
    hidden = simulate(stages(1, units=(Unit.of(0.6, 1.0, 1),) * 3), 4, overlapped=True, beside=True)
    behind = simulate(stages(1, units=(Unit.of(0.6, 1.0, 1),) * 3), 4, overlapped=True, beside=False)
    assert hidden.exposed() == pytest.approx(0.6, abs=0.01) and behind.exposed() == pytest.approx(1.8, abs=0.01)


def test_a_stage_behind_a_slow_link_sets_the_pace() -> None:
    usual = stages(2, units=(Unit((0.0, 0.0), (1e9,)),), link=Link(80.0))
    uneven = [StageTimes(1.0, 2.0, Link(8.0), units=usual[0].units), usual[1]]
    assert simulate(uneven, 4).seconds > simulate(usual, 4).seconds
    assert timeline(simulate(uneven, 4)).startswith(b"\x89PNG")


def test_reductions_of_a_chunk_wait_for_its_own_last_backward_pass() -> None:
    units = (Unit.of(0.0, 1e9, 1),) * 2  # a second each
    link = Link(8.0)
    one = simulate(stages(1, link=link, units=units), 4, overlapped=True)
    two = simulate(stages(1, forward=0.5, backward=1.0, link=link, units=units), 4, chunks=2, overlapped=True)
    begins = sorted(span.start for span in two.spans if span.kind == "reduce")
    ends = sorted(span.end for span in two.spans if span.kind == "backward")
    assert begins[0] < ends[-1] - 1.0 + 1e-9, "that of the first chunk to end does not wait for the other"
    assert two.exposed() <= one.exposed()


@pytest.fixture(scope="module")
def training() -> Training:
    return Training.of("gpt2_12.1b", None)


def costs(training: Training) -> dict[str, Compressing]:
    return plan.costs_of(training, None)


LLAMA = """title: A small Llama
cluster: h100_64
flags: >-
  --num-layers 4 --hidden-size 256 --num-attention-heads 8 --group-query-attention --num-query-groups 2 --swiglu
  --normalization RMSNorm --disable-bias-linear --seq-length 512 --tensor-model-parallel-size 2
  --pipeline-model-parallel-size 2 --micro-batch-size 1 --global-batch-size 64
"""


def test_a_users_own_model_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "llama.yaml"
    own.write_text(LLAMA)
    training = Training.of(str(own), None)
    inside = 640  # 8/3 of the width, in 64s
    layer = 2 * 256 * 256 + 2 * 64 * 256 + 3 * 256 * inside
    assert training.stage_elements == 2 * layer / 2, "two layers of a stage, on one of two tensor ranks"
    kept = tmp_path / "steps.json"
    kept.write_text('{"rows": []}')
    with pytest.raises(LaunchError, match="lacks a step of A small Llama with these flags on H100 SXM"):
        plan.costs_of(training, kept)
    assert not capsys.readouterr().err
    found = costs(training)
    assert "counting a step of A small Llama with these flags on H100 SXM" in capsys.readouterr().err
    norms = 2 * 2 * 256  # two RMSNorms a layer; no biases
    assert found["balanced"].elements == found["paper"].elements == training.stage_elements + norms
    leaps = [40, 44, 52, 56, 68, 72]  # the largest rank of a shape, and the next one
    assert len(found["balanced"].ranks) == 3 and found["paper"].ranks == tuple(sorted([*leaps, 64, 88]))
    assert training.paper_rank == 88, "640 x 256 sends half of its bytes at rank 91"
    for one in CONTENDERS:
        assert predict(training, one, found, training.apart(1.0)).seconds > 0
    own.write_text(LLAMA.replace("h100_64", "laptop"))  # meant for fewer processes than it is planned for
    assert costs(Training.of(str(own), "h100_64"))["balanced"].sent == found["balanced"].sent


def test_flags_after_a_model_change_what_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--hidden-size", "512", "--num-attention-heads", "8", "--tensor-model-parallel-size", "4"]
    training = Training.of("gpt2_2.5b", None, asked)
    found = costs(training)["balanced"]
    assert "with these flags" in capsys.readouterr().err
    biases_and_norms = 13 * (3 * 128 + 512 + 4 * 128 + 512 + 2 * 2 * 512)
    assert found.elements == training.stage_elements + biases_and_norms
    same = tmp_path / "same.yaml"
    own = (MODELS / "gpt2_2.5b.yaml").read_text()
    same.write_text(own.rstrip() + " " + " ".join(asked) + "\n")
    assert costs(Training.of(str(same), None))["balanced"].sent == found.sent, "as from a file"


def test_a_model_on_its_cluster(training: Training) -> None:
    assert (training.replicas, training.micro_batches, training.pipeline) == (8, 16, 4)
    assert 4 * training.stage_elements == pytest.approx(5.39 * 2**30, rel=0.01)  # docs/bench/steps.md
    assert Training.of("gpt2_12.1b", None, ["--num-layers-per-virtual-pipeline-stage", "6"]).chunks == 2
    for cluster, message in (("laptop", "compute_capability must be one of"), ("no_such", "there is no such file")):
        with pytest.raises(LaunchError, match=message):
            Training.of("gpt2_12.1b", cluster)
    with pytest.raises(LaunchError, match="does not divide by 8 replicas"):
        Training.of("gpt2_12.1b", None, ["--global-batch-size", "500"])


def test_without_sequence_parallelism_every_gpu_sends_whole_activations() -> None:
    with_it, without = Training.of("gpt2_12.1b", None), Training.of("gpt2_2.5b", None)
    assert with_it.message_bytes == 2 * with_it.micro_batch * with_it.sequence * with_it.layer.width / 2
    assert without.message_bytes == 2 * without.micro_batch * without.sequence * without.layer.width


def test_tensor_ranks_sum_twice_in_each_layer_and_pass_over_the_links_that_they_have(training: Training) -> None:
    whole = 2 * 4 * 1024 * 4480  # bytes of a micro-batch of activations
    assert training.tensor_seconds(Link(8.0)) == pytest.approx(2 * 12 * 2 * whole * (1 / 2) / 1e9), "12 layers"
    interleaved = Training.of("gpt2_12.1b", None, ["--num-layers-per-virtual-pipeline-stage", "6"])
    assert interleaved.tensor_seconds(Link(8.0)) == pytest.approx(training.tensor_seconds(Link(8.0)) / 2)
    assert replace(training, tensor=1).tensor_seconds(Link(8.0)) == 0
    inside, gbps = training.network.inside, 100.0
    assert {own.tensor.gbps for own in training.apart(gbps)} == {inside}, "a node has eight GPUs"
    assert {own.tensor.gbps for own in replace(training, tensor=16).apart(gbps)} == {gbps}
    assert {own.tensor.gbps for own in Placement(2, 4, 4).links(NETWORK)} == {NETWORK.inside}
    four = replace(NETWORK, nodes=8, gpus_per_node=4)  # eight tensor ranks are on two nodes
    assert {own.tensor.gbps for own in Placement(8, 1, 4).links(four)} == {4 * NETWORK.gbps}
    forward = {
        name: sum(
            span.seconds
            for span in predict(one, CONTENDERS[0], {}, one.apart(gbps)).step.spans
            if (span.stage, span.kind) == (0, "forward")
        )
        for name, one in (("with", training), ("without", replace(training, tensor=1, layers=training.layers // 2)))
    }
    # the same elements on each GPU
    assert forward["with"] == pytest.approx(forward["without"] + 16 * training.tensor_seconds(Link(inside, LATENCY)))


def test_the_mean_step_of_a_run_has_the_warm_up_of_its_flags(training: Training) -> None:
    by_name = {one.name: one for one in CONTENDERS}
    shares = {name: (one.warm_up, one.warm_up_share) for name, one in by_name.items()}
    assert shares == {
        **{"dense fp32": ("", 0.0), "dense bf16": ("", 0.0), "PowerSGD, rank 64": ("", 0.1)},
        **{"int8": ("int8", 0.025), "int4": ("int8", 0.025), "safe": ("int8, equalised", 0.025)},
        **{"balanced": ("int4, equalised", 0.025), "fast": ("int4, equalised", 0.01)},
        **{"paper, r_max": ("", 0.1), "paper, r_min": ("", 0.1), "optimus": ("", 0.1)},
    }
    found = {name: predict(training, one, costs(training), training.apart(10.0)) for name, one in by_name.items()}
    dense, rank_64, int8, balanced = (found[name] for name in ("dense fp32", "PowerSGD, rank 64", "int8", "balanced"))
    assert dense.run_seconds == dense.seconds
    assert rank_64.run_seconds == pytest.approx(0.9 * rank_64.seconds + 0.1 * dense.seconds)
    assert found["int4"].run_seconds == pytest.approx(0.975 * found["int4"].seconds + 0.025 * int8.seconds)
    assert balanced.seconds < balanced.run_seconds < 1.02 * balanced.seconds
    fast = predict(training, by_name["balanced"], costs(training), training.apart(3000.0))
    assert not fast.compresses and fast.run_seconds == fast.seconds, "nothing to warm up"


def test_presets_with_a_volume_equalise_what_they_round(training: Training) -> None:
    found = costs(training)
    plain, equalised = (found[name].at(NO_RANK) for name in ("int4", "int4, equalised"))
    assert 1.2 * plain < equalised < 1.6 * plain, "dividing by scales and back takes more passes"
    balanced, links = next(one for one in CONTENDERS if one.name == "balanced"), training.apart(400.0)
    assert predict(training, balanced, found, links).rank != NO_RANK
    fast = {**found, "int4, equalised": replace(found["int4, equalised"], seconds=(0.0,))}
    assert predict(training, balanced, fast, links).rank == NO_RANK, "it rounds by the time of this, not of plain int4"


def test_optimus_is_left_out_where_edgc_refuses_it(training: Training) -> None:
    def names(flags: list[str]) -> list[str]:
        own = Training.of("gpt2_12.1b", None, flags)
        return [one.contender.flags for one in plan.predict_all(own, {}, own.apart(100.0))]

    assert not any("optimus" in flags for flags in names(["--pipeline-model-parallel-size", "1"]))
    (untied,) = (flags for flags in names(["--untie-embeddings-and-output-weights"]) if "optimus" in flags)
    assert untied == "--edgc-preset optimus --edgc-no-fuse-embedding-sync"


def test_flags_of_edgc_are_refused_and_those_of_the_model_are_on_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["gpt2_12.1b", "--edgc-volume", "12", "--edgc-preset=fast"]) == 2
    assert "--edgc-preset, --edgc-volume: the planner compares the presets" in capsys.readouterr().err
    assert plan.main(["gpt2_12.1b", "--gbps", "10", "--global-batch-size", "256"]) == 0
    assert "With `--global-batch-size 256`." in capsys.readouterr().out


def test_the_papers_largest_rank_is_what_the_link_allows(training: Training) -> None:
    paper = {"paper": costs(training)["paper"]}
    largest, smallest = (one for one in CONTENDERS if one.name.startswith("paper"))
    ranks = {}
    for gbps in (10.0, 200.0, 3000.0):
        ranks[gbps] = tuple(predict(training, one, paper, training.apart(gbps)).rank for one in (largest, smallest))
    assert ranks[10.0] == (1492, 372), "17920 / 2 x 4480 sends half of its bytes at rank 1493"
    assert 184 < (ranks[200.0][0] or 0) < 744 and ranks[3000.0] == (None, None)
    whole = paper["paper"].bytes_at(748) - paper["paper"].bytes_at(744)
    proj = 12 * 4 * (4480 * 2240 - 744 * (4480 + 2240))
    assert whole == pytest.approx(proj, rel=0.04), "above rank 746 the matrices of 4480 x 2240 travel whole"
    dense = predict(training, CONTENDERS[0], {}, training.apart(100.0))
    reduced = predict(training, largest, paper, training.apart(100.0))
    assert reduced.compresses and reduced.gradient_bytes < dense.gradient_bytes


def test_optimus_compresses_the_first_three_of_four_stages(training: Training) -> None:
    methods = {"paper": costs(training)["paper"]}
    optimus = next(one for one in CONTENDERS if one.name == "optimus")
    links = training.apart(10.0)
    own, whole, dense = (
        predict(training, one, methods, links)
        for one in (optimus, replace(optimus, stage_share=1.0), replace(optimus, method=""))
    )
    assert own.rank == 128
    assert own.gradient_bytes == pytest.approx(0.75 * whole.gradient_bytes + 0.25 * dense.gradient_bytes)
    reducing = [
        [
            sum(span.seconds for span in one.step.spans if (span.stage, span.kind) == (stage, "reduce"))
            for stage in (2, 3)
        ]
        for one in (own, dense)
    ]
    assert reducing[0][0] < 0.1 * reducing[1][0] and reducing[0][1] == pytest.approx(reducing[1][1], rel=1e-3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--context-parallel-size", "2"], "--context-parallel-size: the planner does not know"),
        (["--context-parallel-size=2"], "--context-parallel-size: the planner does not know"),
        (["--use-megatron-fsdp"], "--use-megatron-fsdp: the planner does not know"),
        (["--optimizer", "dist_muon"], "--optimizer dist_muon: the planner does not know"),
        (["--grad-reduce-in-bf16"], "--grad-reduce-in-bf16: the planner does not know"),
        (["--multi-latent-attention"], "--multi-latent-attention: the planner does not know"),
        (["--pipeline-model-parallel-layout", "Et*24L"], "--pipeline-model-parallel-layout: the planner does not know"),
        (["--decoder-first-pipeline-num-layers", "9"], "--decoder-first-pipeline-num-layers: the planner does not"),
        (["--mtp-num-layers", "1", "--fp8-format", "hybrid"], "--mtp-num-layers, --fp8-format: the planner does not"),
        (["--rampup-batch-size", "8", "8", "999"], "--rampup-batch-size: the planner does not know"),
        (["--num-experts", "8", "--moe-layer-freq", "2"], "--moe-layer-freq: the planner does not know"),
        (["--micro-batch-size", "0"], "--micro-batch-size 0: must be at least 1"),
        (["--use-precision-aware-optimizer"], "--use-precision-aware-optimizer: the planner does not know"),
        (["--fp16"], "without --accumulate-allreduce-grads-in-fp32 Megatron sums gradients in fp16"),
        (["--micro-batch-size", "two"], "argument --micro-batch-size: invalid int value: 'two'"),
        (["--num-layers", "50"], "--num-layers 50 does not divide by pipeline stages"),
        (["--num-attention-heads", "35"], "--num-attention-heads 35 does not divide by TP = 2"),
        (["--group-query-attention", "--num-query-groups", "5"], "--num-query-groups 5 does not divide by TP = 2"),
        (["--ffn-hidden-size", "17921"], "--ffn-hidden-size 17921 does not divide by TP = 2"),
        (["--num-experts", "2", "--moe-router-topk", "3"], "--moe-router-topk 3: there are 2 experts"),
        (["--num-layers-per-virtual-pipeline-stage", "5"], "does not divide the 12 layers of a stage"),
        (
            ["--num-layers-per-virtual-pipeline-stage", "4", "--global-batch-size", "480"],
            "15 micro-batches do not divide by 4 stages",
        ),
    ],
)
def test_what_the_planner_does_not_know_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        Training.of("gpt2_12.1b", None, flags)
    assert Training.of("gpt2_12.1b", None, ["--num-virtual-stages-per-pipeline-rank", "2"]).chunks == 2


def test_without_matplotlib_the_tables_are_printed_and_pictures_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert plan.main(["gpt2_2.5b", "--gbps", "10", "--context-parallel-size", "1"]) == 0
    assert plan.main(["gpt2_2.5b", "--gbps", "10", "--output", str(tmp_path / "page")]) == 2
    shown = capsys.readouterr()
    assert "## " in shown.out
    assert shown.err == "plan: error: pictures need matplotlib: install EDGC with its extra 'report'\n"


def test_flags_that_nobody_has_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan.main(["gpt2_12.1b", "--hiden-size", "1024", "--lr", "1e-4"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == ("plan: error: --hiden-size: pretrain_gpt.py has no such flag")


def test_costs_are_of_the_clusters_gpu_and_bytes_of_its_replicas(training: Training) -> None:
    size = gradient_bytes(Stage.of("gpt2_12.1b", None))
    assert Compressing.read(plan.COSTS, training.title, size, "paper", GPUS["v100"]) is None, "no V100"
    assert Compressing.read(plan.COSTS, training.title, 2 * size, "paper", training.gpu) is None, "another shape"
    paper = {"paper": costs(training)["paper"]}
    (rank_64,) = (one for one in CONTENDERS if one.rank == 64)
    fewer = replace(training, replicas=2)
    sent = [predict(one, rank_64, paper, one.apart(100.0)).gradient_bytes for one in (training, fewer)]
    assert sent[0] == pytest.approx(244.4e6, rel=0.01) and sent[1] == pytest.approx(sent[0] * (2 / 2) / (2 * 7 / 8))
    alone = replace(training, replicas=1)
    assert not predict(alone, rank_64, paper, alone.apart(100.0)).compresses


def test_experts_are_reduced_among_those_that_hold_them_and_tokens_travel_to_them(training: Training) -> None:
    def with_experts(parallel: int, *more: str) -> Training:
        flags = ["--num-experts", "8", "--expert-model-parallel-size", str(parallel), *more]
        return Training.of("gpt2_12.1b", None, flags)

    third = training.stage_elements // 3  # attention: 4 of 12 w^2
    apart, pairs = with_experts(8), with_experts(4)
    assert (apart.shared_elements, apart.expert_elements) == (third, 2 * third), "one of eight experts"
    assert (apart.expert_replicas, apart.reduced_elements) == (1, third), "nobody else holds it"
    assert apart.dense_bytes == pytest.approx(training.dense_bytes / 3)
    assert (pairs.expert_replicas, pairs.reduced_elements) == (2, 5 * third)
    assert pairs.dense_bytes == pytest.approx(8 * third * 7 / 8 + 8 * 4 * third / 2)
    assert with_experts(8, "--moe-ffn-hidden-size", str(training.layer.width // 4)).expert_elements == pytest.approx(
        third / 8, rel=1e-3
    )
    link = Link(100.0)
    to_and_fro = 2 * 12 * 2 * apart.message_bytes * 7 / 8  # 12 layers of a stage, 2 experts a token
    assert apart.expert_seconds(link) == pytest.approx(to_and_fro * 8 / 100e9)
    assert training.expert_seconds(link) == with_experts(1).expert_seconds(link) == 0
    dense = CONTENDERS[0]
    steps = [predict(one, dense, {}, one.apart(100.0)) for one in (apart, training)]
    assert steps[0].gradient_bytes == pytest.approx(steps[1].gradient_bytes / 3)
    assert steps[0].exposed < steps[1].exposed and steps[0].seconds > steps[1].seconds
    for parallel, message in ((3, "--num-experts 8 does not divide"), (16, "--num-experts 8 does not divide")):
        with pytest.raises(LaunchError, match=message):
            with_experts(parallel)
    with pytest.raises(LaunchError, match="--expert-model-parallel-size 3 does not divide the 8 replicas"):
        Training.of("gpt2_12.1b", None, ["--num-experts", "9", "--expert-model-parallel-size", "3"])


def test_experts_own_matrices_are_counted_and_travel_among_those_that_hold_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --num-experts 8 --moe-ffn-hidden-size 128"
    training = Training.of("gpt2_2.5b", None, [*flags.split(), "--expert-model-parallel-size", "2"])
    layers, experts = plan.reduced(training)
    one = 128 // training.tensor
    assert {(m.rows, m.cols) for m in experts.matrices} == {(one, 512), (512, one)} and len(experts.matrices) == 2 * 4
    assert (layers.data_parallel, experts.data_parallel) == (4, 2)
    assert layers.elements + experts.elements == training.reduced_elements
    found = costs(training)
    assert capsys.readouterr().err.count("counting") == 1
    by_name = {one.name: predict(training, one, found, training.apart(0.1)) for one in CONTENDERS}
    whole = by_name["dense fp32"].gradient_bytes
    for name, least, most in (("int8", 3.8, 4.0), ("int4", 7.2, 8.0), ("balanced", 23.0, 25.0)):
        assert least < whole / by_name[name].gradient_bytes < most, name
    rank = by_name["balanced"].rank
    assert rank is not None and NO_RANK < rank < one
    low_rank = (
        4
        * 64
        * (sum(m.rows + m.cols for m in layers.matrices) * 2 * 3 / 4 + sum(m.rows + m.cols for m in experts.matrices))
    )
    assert by_name["PowerSGD, rank 64"].gradient_bytes == pytest.approx(low_rank, rel=0.2), "biases and norms beside"
    alone = Training.of("gpt2_2.5b", None, [*flags.split(), "--expert-model-parallel-size", "4"])
    assert len(plan.reduced(alone)) == 1, "nobody else holds its experts"


def test_the_memory_has_errors_and_factors(training: Training, capsys: pytest.CaptureFixture[str]) -> None:
    side = training.layer.width // training.tensor  # the shorter one of proj
    values = 12 * 8 * 64 * (3 * 4480 + side)  # layers of a stage, factors in turn
    assert training.factor_bytes(64) == pytest.approx(values / 2, rel=0.1), "in 4 bits, with scales"
    half = Training.of("gpt2_2.5b", None)
    single = replace(half, loss_scale=False)
    assert half.error_bytes == 2 * single.error_bytes
    assert half.factor_bytes(64) == pytest.approx(9 / 8 * single.factor_bytes(64)), "a step replaces one of eight"
    experts = ["--num-experts", "8", "--moe-ffn-hidden-size", "2240", "--expert-model-parallel-size"]
    alone, pairs = (Training.of("gpt2_12.1b", None, [*experts, parallel]) for parallel in ("8", "4"))
    attention = 12 * 8 * 64 * (4480 + side) / 2
    assert alone.factor_bytes(64) == pytest.approx(attention, rel=0.1), "nobody else holds its experts"
    assert pairs.factor_bytes(64) == pytest.approx(attention + 12 * 8 * 64 * 2 * 2 * 1120 / 2, rel=0.1)
    assert plan.main(["gpt2_12.1b", "--gbps", "10"]) == 0
    assert "GiB are factors at rank 698, the largest above." in capsys.readouterr().out


def test_a_page_of_two_models_shows_a_step_of_the_first_on_its_own_link(tmp_path: Path) -> None:
    page = tmp_path / "clusters"
    assert plan.main(["gpt2_12.1b", "gpt2_2.5b", "--gbps", "10", "--output", str(page)]) == 0
    text = page.with_suffix(".md").read_text()
    assert text.count("\n## GPT2-") == 2 and page.with_name("clusters_step.png").is_file()


def test_compression_pays_on_slow_links_and_is_left_on_fast_ones(training: Training) -> None:
    compressing = {"balanced": costs(training)["balanced"]}
    by_name = {one.name: one for one in CONTENDERS}
    slow, fast = (
        {
            name: predict(training, one, compressing, training.apart(gbps))
            for name, one in by_name.items()
            if one.method in ("", "balanced")
        }
        for gbps in (10.0, 3000.0)
    )
    dense, balanced = slow["dense fp32"], slow["balanced"]
    assert balanced.compresses
    assert dense.gradient_bytes / balanced.gradient_bytes == pytest.approx(24, rel=0.02)
    assert balanced.seconds < 0.4 * dense.seconds
    chosen, why = recommended(list(slow.values()))
    assert chosen.contender.name == "fast" and "less time a step" in why
    assert not fast["balanced"].compresses and fast["balanced"].seconds == pytest.approx(fast["dense fp32"].seconds)
    chosen, why = recommended(list(fast.values()))
    assert not chosen.contender.method and "would be faster than dense bf16 by 1 %" in why


def test_a_recommendation_gives_the_bytes_of_its_row() -> None:
    by_name = {one.name: one for one in CONTENDERS}
    bf16, fp16 = Training.of("gpt2_12.1b", None), Training.of("gpt2_2.5b", None)
    assert way(bf16, by_name["dense bf16"]) == "train without EDGC, with Megatron's `--grad-reduce-in-bf16`"
    assert "without Megatron's `--accumulate-allreduce-grads-in-fp32`" in way(fp16, by_name["dense bf16"])
    assert way(bf16, by_name["dense fp32"]) == "train without EDGC"
    for name in ("int8", "int4"):
        flags = "--edgc-dense-wire int8 --edgc-warmup-fraction 0.025"
        assert way(bf16, by_name[name]) == f"`--edgc-engine {name} {flags}`", "no tenth of the run in fp32"


def test_updated_weights_are_gathered_once_in_16_bits(training: Training) -> None:
    scatters = replace(training, scatters=True)
    step = predict(scatters, CONTENDERS[0], {}, scatters.apart(10.0)).step
    sent = 2 * training.stage_elements * 7 / 8  # bytes of a process, among 8 replicas
    gathers = [span.seconds for span in step.spans if span.kind == "gather"]
    assert gathers == pytest.approx([sent * 8 / 10e9] * 4, rel=1e-3)


def test_presets_round_gathered_weights_where_that_is_faster(training: Training) -> None:
    scatters = replace(training, scatters=True)
    balanced = next(one for one in CONTENDERS if one.name == "balanced")
    for gbps, pays in ((10.0, True), (3000.0, False)):
        steps = [
            predict(scatters, one, costs(training), scatters.apart(gbps)).step
            for one in (balanced, replace(balanced, weights=""))
        ]
        gathers = [next(span.seconds for span in step.spans if span.kind == "gather") for step in steps]
        # a byte for each value, and a scale for each 128; vectors fill no group
        assert gathers[0] == pytest.approx((1 + 2 / 128) / 2 * gathers[1] if pays else gathers[1], rel=2e-3)
        assert (steps[0].seconds < steps[1].seconds) == pays
        computing = [sum(span.seconds for span in step.spans if span.kind == "compress") for step in steps]
        assert (computing[0] > computing[1]) == pays


def test_presets_round_messages_between_stages_where_that_is_faster(training: Training) -> None:
    found = costs(training)
    balanced = next(one for one in CONTENDERS if one.name == "balanced")
    plain = replace(balanced, messages="")
    for gbps, pays in ((10.0, True), (3000.0, False)):
        steps = [predict(training, one, found, training.apart(gbps)) for one in (balanced, plain)]
        spans = [[span for span in one.step.spans if span.stage == 2 and span.kind == "message"] for one in steps]
        seconds = [min(span.seconds for span in own) for own in spans]  # those of gradients, if these are shorter
        assert (seconds[0] < 0.3 * seconds[1]) == pays and (steps[0].seconds < steps[1].seconds) == pays
    interleaved = Training.of("gpt2_12.1b", None, ["--num-layers-per-virtual-pipeline-stage", "4"])
    for of, share in ((training, 0.0), (interleaved, 2 / 3)):
        spans = [one.step.spans for one in (predict(of, way, found, of.apart(10.0)) for way in (balanced, plain))]
        first, second = (
            [min(s.seconds for s in own if (s.stage, s.kind) == (stage, "backward")) for own in spans]
            for stage in (0, 1)
        )
        rounds = second[0] - second[1]
        assert rounds > 0 and first[0] - first[1] == pytest.approx(share * rounds), "it sends none of its first chunk"
    single = replace(training, pipeline=1)
    assert predict(single, balanced, found, single.apart(10.0)) == replace(
        predict(single, plain, found, single.apart(10.0)), contender=balanced
    )


def test_paper_and_optimus_send_what_a_stage_waits_for_idle_in_low_rank(training: Training) -> None:
    found = costs(training)
    by_name = {one.name: one for one in CONTENDERS}

    def sent(name: str, links: Sequence[StageLinks], of: Training = training) -> list[float]:
        """Seconds of each message from the third stage to the second, in the order of micro-batches."""
        spans = predict(of, by_name[name], found, links).step.spans
        ends = {span.end for span in spans if span.stage == 2 and span.kind == "backward"}
        return [span.seconds for span in spans if span.stage == 2 and span.kind == "message" and span.start in ends]

    links, width = training.apart(10.0), training.layer.width
    plain, rows = links[2].before.seconds(training.message_bytes), int(training.message_bytes / 2 / width)
    at_16 = MessageFormat(rows, width, 16, wire("bf16"), torch.bfloat16).bytes
    for of in (training, replace(training, replicas=1)):  # also where nothing is left to reduce
        for name in ("paper, r_max", "paper, r_min", "optimus"):
            seconds = sent(name, links, of)
            assert len(seconds) == training.micro_batches
            # all but two: the second stage still has forward passes to do
            assert seconds[:-2] == pytest.approx([plain] * (training.micro_batches - 2))
            assert max(seconds[-2:]) < 0.51 * plain, "half of the bytes, or fewer"
            assert (seconds[-2:] == pytest.approx([links[2].before.seconds(at_16)] * 2, rel=1e-3)) == (
                name == "optimus"
            )
    # on a fast link low rank takes longer than the message as it is; one rank holds between all stages
    one_is_fast = [*links[:3], links[3]._replace(before=training.apart(3000.0)[3].before)]
    for others in (training.apart(3000.0), one_is_fast):
        seconds = sent("paper, r_min", others)
        assert seconds == pytest.approx([seconds[0]] * len(seconds))
    interleaved = Training.of("gpt2_12.1b", None, ["--num-layers-per-virtual-pipeline-stage", "4"])
    for name in ("paper, r_max", "optimus"):
        chunks = sent(name, interleaved.apart(10.0), interleaved)
        assert chunks == pytest.approx([chunks[0]] * len(chunks))
    refused = predict(interleaved, by_name["optimus"], found, interleaved.apart(10.0)).contender
    assert refused.flags == "--edgc-preset optimus --edgc-pp off"


@pytest.mark.parametrize(("gbps", "rounds"), [(10.0, False), (100.0, True), (3000.0, False)])
def test_a_preset_rounds_where_that_is_faster_than_low_rank(training: Training, gbps: float, rounds: bool) -> None:
    found, links = costs(training), training.apart(gbps)
    by_name = {one.name: predict(training, one, found, links) for one in CONTENDERS}
    balanced = by_name["balanced"]
    assert (balanced.rank == NO_RANK) == rounds
    assert (balanced.gradient_bytes == by_name["int4"].gradient_bytes) == rounds
    scattered = replace(training, scatters=True)
    safe = next(one for one in CONTENDERS if one.name == "safe")
    assert predict(scattered, safe, found, scattered.apart(gbps)).rank != NO_RANK, "int4 sends less than it allows"
    slow = replace(found["balanced"], seconds=tuple(1e3 for _ in found["balanced"].ranks))  # no rank is worth its time
    only = predict(scattered, safe, {**found, "balanced": slow}, scattered.apart(gbps))
    assert only.rank == (NO_RANK if gbps < 1000 else None), "and it rounds where nothing else is faster than the host"
    plain = replace(balanced.contender, messages="")
    chosen, low_rank = (
        predict(training, plain, methods, links) for methods in (found, {"balanced": found["balanced"]})
    )
    assert low_rank.rank != NO_RANK and (chosen.seconds < low_rank.seconds) == rounds


def test_rounding_sends_a_byte_or_half_a_byte_of_each_value(training: Training) -> None:
    found = costs(training)

    def predictions(on: Training) -> dict[str, Prediction]:
        return {one.name: predict(on, one, found, on.apart(100.0)) for one in CONTENDERS}

    of, scattered = predictions(training), predictions(replace(training, scatters=True))
    whole = of["dense fp32"].gradient_bytes
    for name, least, most in (("int8", 3.8, 4.0), ("int4", 7.4, 8.0)):
        assert least < whole / of[name].gradient_bytes < most, "with the scales of its groups"
        assert of[name].exposed < of["dense bf16"].exposed
        assert scattered[name].gradient_bytes == pytest.approx(of[name].gradient_bytes / 2)
    low_rank = "PowerSGD, rank 64"
    assert scattered[low_rank].gradient_bytes == pytest.approx(of[low_rank].gradient_bytes)


def test_points_are_predicted_from_others() -> None:
    def point(contender: str, mbit: float | None, step: float, communication: float, size: float) -> dict[str, object]:
        sizes = {"counted_bytes": size, "interface_bytes": 1.1 * size}
        seconds = {"step_seconds": step, "communication_seconds": communication}
        ranks = [None] if contender == "dense" else [40]
        of = {"mode": "plain", "commit": "abc1234", "contender": contender, "mbit": mbit}
        return {**of, "ranks": ranks, **seconds, **sizes}

    # a step of 1 s; 10 MB dense, 1 MB and 0.1 s of computing compressed
    def on_link(size: float, mbit: float) -> float:
        return 1.1 * size * 8 / (mbit * 1e6)

    points = [point("dense", None, 1.0, 0.0, 10e6)]
    for mbit in (20.0, 135.0):
        for contender, size, computing in (("dense", 10e6, 0.0), ("balanced", 1e6, 0.1)):
            seconds = computing + on_link(size, mbit)
            points.append(point(contender, mbit, 1.0 + seconds, seconds, size))
    checked = {one.contender: one for one in check(points)}
    assert checked.keys() == {"dense", "balanced"} and all(one.mbit == 20 for one in checked.values())
    assert all(abs(one.error) < 1e-6 for one in checked.values())
    # other code was timed at one rate alone, on a slower machine
    slower = {**point("dense", 135.0, 9.0, 5.0, 10e6), "commit": "other"}
    assert all(abs(one.error) < 1e-6 for one in check([*points, slower]))
    # on another day the machine took twice as long: that code's runs are fitted by themselves
    newer = [{**one, "commit": "newer", "started": 9} for one in points]
    for one in newer:
        one["step_seconds"] = one["step_seconds"] + 1.0  # type: ignore[operator]
    both = check([*points, *newer])
    assert [one.commit for one in both] == ["newer"] * 2 + ["abc1234"] * 2
    assert all(abs(one.error) < 1e-6 for one in both)
    # where EDGC has reduced dense, nothing was compressed
    dense_again = {**point("balanced", 800.0, 1.0 + on_link(10e6, 800), on_link(10e6, 800), 10e6), "ranks": [None]}
    (found,) = (one for one in check([*points, dense_again]) if one.mbit == 800)
    assert abs(found.error) < 1e-6
    # messages that wait for each other keep the link longer than their bytes; only a run without a limit can tell
    waiting = [point("bf16", None, 1.1, 0.1, 5e6)]
    for mbit in (20.0, 135.0):
        waiting.append(point("bf16", mbit, 1.1 + 1.5 * on_link(5e6, mbit), 0.1 + 1.5 * on_link(5e6, mbit), 5e6))
    (found,) = (one for one in check([*points, *waiting]) if one.contender == "bf16")
    assert abs(found.error) < 1e-6
    (found,) = (one for one in check([*points, *waiting[1:]]) if one.contender == "bf16")
    assert found.error < -0.1
    # of repetitions the one with the median step counts
    repeated = [{**points[1], "repetition": place} for place in range(3)]
    repeated[0]["step_seconds"], repeated[2]["step_seconds"] = 99.0, 0.1
    assert all(abs(one.error) < 1e-6 for one in check([*points[:1], *repeated, *points[2:]]))
    points[1]["step_seconds"] = 2 * points[1]["step_seconds"]  # type: ignore[operator]
    assert {one.contender: one for one in check(points)}["dense"].error == pytest.approx(-0.5)


def test_the_command_writes_a_page_flags_and_raw_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, flags = tmp_path / "mine" / "clusters_2.5b", tmp_path / "own" / "flags"  # folders that are not there yet
    given = ["gpt2_2.5b", "--gbps", "1", "--output", str(output), "--write-flags", str(flags)]
    assert plan.main(given) == 0
    assert "GPT2-2.5B" in capsys.readouterr().out
    assert flags.read_text() == "--edgc-preset fast\n"
    raw = json.loads(Path(f"{output}.json").read_text())
    assert {row["gbps"] for row in raw["rows"]} == {1.0, 12.5}, "the cluster's own link as well"
    page = Path(f"{output}.md").read_text()
    assert "no step was measured" in page and "clusters_2.5b_step.png" in page and "(clusters_2.5b.png)" in page
    assert all((output.parent / name).is_file() for name in ("clusters_2.5b.png", "clusters_2.5b_step.png"))
    assert plan.main([]) == 2 and plan.main(["no_such_model"]) == 2
    # 1 Gbit/s was asked for; on the cluster's link of 400 nothing would be compressed
    assert plan.main(["gpt2_12.1b", "--gbps", "400", "--write-flags", str(flags)]) == 0
    assert flags.read_text() == "--edgc-engine dense --grad-reduce-in-bf16\n", "Megatron's own sum"
    capsys.readouterr()
    assert plan.main(["gpt2_2.5b", "--gbps", "400", "--write-flags", str(flags)]) == 2, "fp16 has no such flag"
    assert plan.main(["gpt2_2.5b", "--gbps", "1", "25", "--write-flags", str(flags)]) == 2
    said = capsys.readouterr()
    assert "--write-flags: no flags can do this" in said.err and "--write-flags needs one rate" in said.err
    assert "GPT2-2.5B" in said.out, "the tables are there all the same"
    (tmp_path / "file").write_text("")
    assert plan.main(["gpt2_2.5b", "--output", str(tmp_path / "file" / "clusters")]) == 2
    assert "/file: File exists" in capsys.readouterr().err
    missing = tmp_path / "none.json"
    assert plan.main(["gpt2_2.5b", "--costs", str(missing)]) == 2 and plan.main(["--validate", str(missing)]) == 2
    with pytest.raises(SystemExit):
        plan.main(["gpt2_2.5b", "--gbps", "0"])
    assert capsys.readouterr().err.count("must be above 0") == 1
    nothing = tmp_path / "points.json"
    nothing.write_text('{"points": []}')
    assert plan.main(["--validate", str(nothing)]) == 2


def test_flags_for_a_cluster_are_of_the_order_of_ranks_that_is_best_on_it(tmp_path: Path) -> None:
    assert plan.main(["gpt2_2.5b", "--write-flags", str(tmp_path / "flags")]) == 0
    # in Megatron's order the replicas of these stages are on one node, where nothing pays
    assert (tmp_path / "flags").read_text() == "--edgc-preset fast --use-tp-pp-dp-mapping\n"


NETWORK = Network(nodes=4, gpus_per_node=8, gbps=10.0, inside=1000.0, latency=0.0)


def rates(network: Network, stages_first: bool = False) -> list[tuple[float, float]]:
    """Gbit/s of each stage's slower messages and of its reductions: 2 tensor ranks, 4 replicas, 4 stages."""
    found = Placement(2, 4, 4, stages_first).links(network)
    return [(min(one.next.gbps, one.before.gbps), one.ring.gbps) for one in found]


def test_replicas_of_a_stage_share_a_node_or_lie_on_all() -> None:
    # by Megatron's order each stage is on a node of its own
    assert Placement(2, 4, 4).rings(1) == [
        [(8 + tensor + 2 * a, 8 + tensor + 2 * b) for a, b in ((0, 1), (1, 2), (2, 3), (3, 0))] for tensor in (0, 1)
    ]
    assert rates(NETWORK) == [(10.0, 1000.0)] * 4
    # else each replica is
    assert rates(NETWORK, stages_first=True) == [(1000.0, 10.0)] * 4


def test_rings_and_messages_over_an_uplink_share_it() -> None:
    racks = replace(NETWORK, racks=2, uplink_gbps=32.0, uplink_seconds=0.001)
    # messages of the 8 processes of stage 2 leave the first rack, those of stage 3 the second
    assert rates(racks) == [(10.0, 1000.0), (4.0, 1000.0), (4.0, 1000.0), (10.0, 1000.0)]
    # all 8 rings leave each rack once, and the messages stay inside
    assert rates(racks, stages_first=True) == [(1000.0, 4.0)] * 4
    ring = Placement(2, 4, 4, True).links(racks)[0].ring
    assert ring.latency == pytest.approx(2 * 2 * 0.001), "twice round a ring that crosses twice"
    assert rates(replace(racks, uplink_gbps=1000.0), stages_first=True) == [(1000.0, 10.0)] * 4


def test_one_slow_node_slows_the_rings_that_pass_it() -> None:
    slow = replace(NETWORK, slow_nodes=1, slow_gbps=2.0)
    assert rates(slow, stages_first=True) == [(1000.0, 2.0)] * 4
    assert rates(slow) == [(2.0, 1000.0), (2.0, 1000.0), (10.0, 1000.0), (10.0, 1000.0)]


def test_a_ring_uses_the_network_of_all_its_gpus_on_a_node() -> None:
    four = replace(NETWORK, nodes=8)  # 16 replicas of one stage, four on each of eight nodes
    assert [one.ring.gbps for one in Placement(2, 32, 1).links(four)] == [40.0]
    assert [one.ring.gbps for one in Placement(2, 32, 1).links(replace(four, inside=30.0))] == [30.0]
    uneven = replace(four, nodes=3, gpus_per_node=10)  # 5, 5 and 2 of 12
    assert [one.ring.gbps for one in Placement(2, 12, 1).links(uneven)] == [20.0]


def test_a_message_takes_the_link_that_it_goes_over() -> None:
    sites = replace(NETWORK, racks=2, uplink_gbps=8.0, uplink_seconds=0.01)
    links = Placement(2, 4, 4).links(sites)  # a stage on each node, two on each site
    assert [one.next.gbps for one in links] == [10.0, 1.0, 10.0, 1000.0]  # the last stage sends none
    assert [one.before.gbps for one in links] == [1000.0, 10.0, 1.0, 10.0]
    assert [one.next.latency for one in links] == [0.0, 0.01, 0.0, 0.0]
    slow, fast = Link(1.0), Link(1000.0)
    sends = {"activations": 1e8, "gradients": 1e8, "forward": 0.1, "backward": 0.1}
    both, back = (simulate([StageTimes(link=slow, before=before, **sends)] * 2, 1).seconds for before in (None, fast))
    assert both - back == pytest.approx(slow.seconds(1e8) - fast.seconds(1e8)), "the gradients alone go back"


def test_an_all_to_all_takes_each_gpus_own_links() -> None:
    """A gigabyte of 64 replicas, of which 8 share a node: each sends 56 of its 64 parts over its own network."""
    network = Network(nodes=8, gpus_per_node=8, gbps=12.5, inside=1000.0, latency=0.0)
    sent = 1e9 * 63 / 64

    def seconds(network: Network) -> tuple[float, float]:
        (links,) = Placement(1, 64, 1).links(network)
        return links.direct.seconds(sent), links.once.seconds(sent)

    direct, around = seconds(network)
    assert direct == pytest.approx(1e9 * 56 / 64 * 8 / 12.5e9) and around == pytest.approx(sent * 8 / 100e9)
    # half of every rack's 32 messages cross its uplink
    direct, around = seconds(replace(network, racks=2, uplink_gbps=10.0))
    assert direct == pytest.approx(16e9 * 8 / 10e9) and around == pytest.approx(sent * 8 / 10e9)
    # one slow node makes all wait, and where all share a node there is no network
    assert seconds(replace(network, slow_nodes=1, slow_gbps=2.5))[0] == pytest.approx(5 * 1e9 * 56 / 64 * 8 / 12.5e9)
    assert Placement(1, 8, 8).links(network)[0].direct.gbps == pytest.approx(1000.0)


def test_gradients_of_experts_go_round_the_processes_that_hold_the_same() -> None:
    """Eight replicas on two nodes: of the four that share the experts, each has its like on the other node."""
    network = Network(nodes=2, gpus_per_node=4, gbps=10.0, inside=1000.0, latency=0.0)
    placed = Placement(1, 8, 1, experts=4)
    assert placed.groups(0) == [list(range(8))]
    assert placed.groups(0, of_experts=True) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert placed.sharing_experts(0) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    (alone,) = placed.links(network)
    (half,) = replace(placed, of_experts=0.5).links(network)
    assert (alone.ring.gbps, alone.tokens.gbps) == pytest.approx((40.0, 1000.0))
    assert half.ring.seconds(1e9) == pytest.approx(0.5e9 * 8 / 40e9 + 0.5e9 * 8 / 10e9)
    moe = Training.of("gpt2_12.1b", None, ["--num-experts", "8", "--expert-model-parallel-size", "4"])
    placement = moe.placement(stages_first=False)
    assert placement.experts == 4 and placement.of_experts == pytest.approx(7.71 / (7.71 + 3.37), rel=0.01)
    assert Training.of("gpt2_12.1b", None).placement(stages_first=False).of_experts == 0


def test_a_message_waits_for_the_uplink_as_often_as_it_crosses() -> None:
    """A ring crosses between two sites twice: an all-reduce goes round it twice, a gather once."""
    sites = Network(nodes=2, gpus_per_node=8, gbps=100.0, inside=1000.0, latency=0.0, racks=2, uplink_seconds=5e-3)
    (links,) = Placement(1, 16, 1).links(sites)
    assert (links.ring.latency, links.once.latency, links.direct.latency) == pytest.approx((0.02, 0.01, 0.005))
    unit = Unit.of(0.0, 0.0, 4, ("direct", "once"))
    over = StageTimes(1.0, 2.0, links.ring, once=links.once, direct=links.direct)
    assert over.seconds(unit) == pytest.approx([0.005, 0.01] * 2)
    assert over.seconds(Unit.of(0.0, 0.0, 1)) == pytest.approx([0.02])


@pytest.mark.parametrize(
    ("name", "scatters", "over"),
    [
        ("dense fp32", False, {"ring"}),
        ("dense fp32", True, {"once"}),
        ("int4", False, {"direct", "once"}),
        ("int4", True, {"direct"}),
        ("PowerSGD, rank 64", False, {"ring"}),
        ("fast", False, {"direct", "once"}),
    ],
)
def test_each_kind_of_sum_goes_over_its_own_links(
    name: str, scatters: bool, over: set[str], training: Training, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[StageTimes] = []
    monkeypatch.setattr(prediction, "simulate", lambda stages, *_: seen.extend(stages) or Step())
    contender = next(one for one in CONTENDERS if one.name == name)
    own = replace(training, scatters=scatters)
    predict(own, contender, costs(training), own.apart(1.0))
    assert {name for unit in seen[0].units for name in unit.over} == over


def test_the_order_of_ranks_decides_whether_compression_pays() -> None:
    training = Training.of("gpt2_2.5b", None)
    compressing = costs(training)
    by_order = [plan.predict_all(training, compressing, training.placed(NETWORK, order)) for order in (False, True)]
    (inside, why), (across, _) = map(recommended, by_order)
    assert training.placement(stages_first=False).rings_stay_in_nodes(NETWORK)
    assert not training.placement(stages_first=True).rings_stay_in_nodes(NETWORK)
    # gradients stay in a node, where nothing is faster than Megatron's own sum; messages between stages leave it
    assert inside.contender.messages and not inside.compresses and "less time a step" in why
    assert across.compresses


def test_nothing_that_is_faster_is_left_out_of_a_recommendation() -> None:
    training = Training.of("gpt2_2.5b", None)
    compressing = costs(training)
    for network in networks(training.network).values():
        for order in (False, True):
            predictions = plan.predict_all(training, compressing, training.placed(network, order))
            dense = min(one.seconds for one in predictions if not one.contender.method)
            faster = [one for one in predictions if one.contender.name in EDGC and one.seconds < 0.99 * dense]
            assert bool(recommended(predictions)[0].contender.method) == bool(faster)


def test_a_model_in_32_bits_is_refused(tmp_path: Path) -> None:
    text = (CLUSTERS / "v100_32.yaml").read_text()
    file = tmp_path / "own.yaml"
    file.write_text(text.replace("--fp16 --initial-loss-scale 65536 --accumulate-allreduce-grads-in-fp32 ", ""))
    with pytest.raises(LaunchError, match="16 bits alone: give --bf16 or --fp16"):
        Training.of("gpt2_2.5b", str(file))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["gpt2_12.1b", "--output", "/"], "--output /: needs a name"),
        (["gpt2_12.1b", "--write-flags", "FOLDER"], "must be a file"),
        (["--validate", "[1]"], "has no points of tools/bench_network.py"),
        (["--validate", '{"a": 1}'], "has no points of tools/bench_network.py"),
        (["--validate", "[1]", "--gbps", "1"], "takes --output alone beside it, not --gbps"),
    ],
)
def test_what_cannot_be_read_or_written_is_one_line(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if options[0] == "--validate":
        (tmp_path / "points.json").write_text(f'{{"points": {options[1]}}}')
        options = ["--validate", str(tmp_path / "points.json"), *options[2:]]
    assert plan.main([one.replace("FOLDER", str(tmp_path)) for one in options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*.draft"))


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    with pytest.raises(OSError):
        write(tmp_path, b"a folder is in its place")
    assert not list(tmp_path.parent.glob(f".{tmp_path.name}*"))


def test_a_contenders_own_interface_says_how_many_bytes_travel_for_one_of_ours() -> None:
    """As where gloo's reduce-scatter sends as much as an all-reduce: of the dense run alone."""

    def point(contender: str, mbit: float | None, computing: float, size: float, headers: float) -> dict[str, object]:
        communication = computing + (0.0 if mbit is None else headers * size * 8 / (mbit * 1e6))
        of = {"mode": "plain", "commit": "abc1234", "contender": contender, "mbit": mbit}
        seconds = {"step_seconds": 1.0 + communication, "communication_seconds": communication}
        ranks = [None] if contender == "dense" else [40]
        return {**of, **seconds, "ranks": ranks, "counted_bytes": size, "interface_bytes": headers * size}

    points = [point("dense", mbit, 0.0, 10e6, 1.6) for mbit in (None, 60.0, 135.0)]
    points += [point("balanced", mbit, 0.1, 1e6, 1.06) for mbit in (60.0, 135.0)]
    found = check(points)
    assert sorted(one.contender for one in found) == ["balanced", "dense"]
    assert [one.error for one in found] == pytest.approx([0.0, 0.0], abs=1e-6)


def test_pipelines_and_shared_links_are_predicted_from_others() -> None:
    """A point is made of what takes so long by hand: each pass, message and sum in turn."""
    message, sums = 1.048576e6, 3e6

    def point(mode: str, contender: str, mbit: float | None, step: float, reducing: float, **sizes: float) -> Any:
        of = {"mode": mode, "commit": "abc1234", "contender": contender, "mbit": mbit}
        ranks = [None] if contender == "dense" else [40]
        counted = {"counted_bytes": sum(sizes.values()), "interface_bytes": 1.1 * sum(sizes.values())}
        seconds = {"step_seconds": step, "communication_seconds": reducing}
        kinds = {name: size for name, size in sizes.items() if name != "gradient_bytes"}
        return {**of, **seconds, **counted, **kinds, "ranks": ranks}

    def on_link(size: float, mbit: float | None) -> float:
        return 0.0 if mbit is None else 1.1 * size * 8 / (mbit * 1e6)

    # Four micro-batches, 0.1 s forward and 0.2 s backward. The second stage waits for its first message, and once for
    # one to the first stage and one back. At the end the first stage waits for a message and makes its last pass.
    def pipeline(mbit: float | None) -> float:
        return 0.1 + 4 * 0.3 + 0.2 + 4 * on_link(message, mbit)

    mode = "pipeline"
    points = [point(mode, "dense", rate, pipeline(rate), 0.0, message_bytes=4 * message) for rate in (None, 135, 100)]
    (whole,) = check(points)
    assert (whole.mode, whole.mbit) == (mode, 100) and whole.error == pytest.approx(0, abs=1e-6)
    # gradients in a quarter of the bytes
    (of_less,) = (
        one
        for one in check(
            [*points, *(point(mode, "int8", rate, 2.0, 0.0, message_bytes=2.5 * message) for rate in (135.0, 100.0))]
        )
        if one.contender == "int8"
    )
    assert whole.predicted - of_less.predicted == pytest.approx(2 * 0.75 * on_link(message, 100))

    # Two chunks a stage: passes are half as long, and the second stage waits for one. The first micro-batch crosses
    # three boundaries, and so does the last gradient on its way back. One of them lies between the last stage and the
    # first.
    def interleaved(mbit: float | None) -> Any:
        seconds = 4 * 0.3 + 0.15 if mbit is None else 1.0  # with a limit it does not matter here
        return point("interleaved pipeline", "dense", mbit, seconds, 0.0, message_bytes=12 * message)

    found = check([interleaved(mbit) for mbit in (None, 135.0, 1e4, 100.0)])
    quick, slow = (one.predicted - 1.35 for one in found)
    assert quick == pytest.approx(6 * on_link(message, 1e4)) and slow > 6 * on_link(message, 100.0)

    # a ring crosses each uplink once; of an all-to-all two processes send two parts of three each over it
    def workers(mode: str, contender: str, mbit: float, all_to_all: float) -> Any:
        reducing = on_link(sums / 2, mbit) * (2 if contender == "dense" else 1 + all_to_all)
        return point(mode, contender, mbit, 1.0 + reducing, reducing, gradient_bytes=sums)

    of_each = [workers("four workers", name, 135.0, 1.0) for name in ("dense", "int8")]
    of_racks = [workers("two racks of two workers", name, 60.0, 4 / 3) for name in ("dense", "int8")]
    errors = [one.error for one in check([*of_each, *of_racks])]
    assert errors == pytest.approx([0, 0], abs=1e-6)


def test_a_cluster_file_describes_its_network(tmp_path: Path) -> None:
    def training(**keys: float) -> Training:
        own = (CLUSTERS / "v100_32.yaml").read_text()
        file = tmp_path / "own.yaml"
        file.write_text(own + "".join(f"{key}: {value}\n" for key, value in keys.items()))
        return Training.of("gpt2_2.5b", str(file))

    network = training(racks=2, uplink_gbps=50, uplink_ms=5, slow_nodes=1, slow_gbps=2).network
    assert (network.racks, network.uplink_gbps, network.uplink_seconds) == (2, 50, 0.005)
    assert (network.slow_nodes, network.slow_gbps) == (1, 2)
    assert "as in the cluster's file" in networks(network) and "as in the cluster's file" not in networks(NETWORK)
    for keys, message in (
        ({"racks": 3}, "4 nodes do not divide by racks = 3"),
        ({"uplink_gbps": 5}, "need racks of 2 or more"),
        ({"slow_nodes": 1}, "go together"),
        ({"racks": 0}, "a positive whole number"),
    ):
        with pytest.raises(LaunchError, match=message):
            training(**keys)
