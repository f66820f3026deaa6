"""Real Megatron runs at TP1 PP2 DP2 on four gloo processes."""

import math
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from edgc.observe.events import read_events
from tests.distributed.megatron_runs import PRETRAIN, REPOSITORY, TINY_GPT, failure, launch, train
from tests.distributed.modes import results

# Without alignment and messages no clock enters a decision, so two runs can be compared bit for bit.
ITERATIONS = 24
FOUR_RANKS = ["--pipeline-model-parallel-size", "2", "--train-iters", str(ITERATIONS)]
EDGC = [
    "--edgc",
    "--edgc-preset",
    "paper",
    "--edgc-window",
    "4",
    "--edgc-rmax",
    "12",
    "--edgc-rmin",
    "4",
    "--edgc-no-align",
    "--edgc-pp",
    "off",
] + [
    "--edgc-iteration-sampling-rate",
    "0.5",
]


def losses(output: str) -> list[float]:
    return [float(value) for value in re.findall(r"lm loss: ([0-9.E+-]+|nan|inf)", output)]


def saving(folder: Path) -> list[str]:
    return [
        "--save",
        str(folder),
        "--save-interval",
        "1000",
        "--ckpt-format",
        "torch",
        "--no-save-optim",
        "--no-save-rng",
    ]


def parameters(folder: Path) -> dict[str, Tensor]:
    """The parameters of every stage of the last checkpoint in ``folder``."""
    files = sorted(folder.glob(f"iter_{ITERATIONS:07d}/mp_rank_*/*.pt"))
    assert len(files) == 2, "one file for each pipeline stage"
    return {
        f"{file.parent.name}/{name}": value
        for file in files
        for name, value in torch.load(file, weights_only=False)["model"].items()
        if isinstance(value, Tensor)
    }


def assert_bit_identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys() and a
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.fixture(scope="module")
def edgc_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("edgc")
    return folder, train([*FOUR_RANKS, *EDGC, "--edgc-log-dir", str(folder), *saving(folder / "checkpoint")])


def test_the_loss_is_finite_and_falls(edgc_run: tuple[Path, str]) -> None:
    values = losses(edgc_run[1])
    assert len(values) == ITERATIONS
    assert all(math.isfinite(value) for value in values)
    assert sum(values[-4:]) / 4 < values[0] - 0.5


def test_the_log_tells_what_happened(edgc_run: tuple[Path, str]) -> None:
    start, *windows = read_events(edgc_run[0])
    assert start["event"] == "start" and len(start["stages"]) == 2
    assert [event["iteration"] for event in windows] == [4, 8, 12, 16, 20, 24]
    assert windows[-1]["last"] and not windows[0]["last"]
    used = [tuple(event["ranks"]) for event in windows]
    assert used[0] == (None, None) and used[-1] != (None, None)
    for before, after in zip(windows, windows[1:], strict=False):
        assert tuple(after["ranks"]) == tuple(before["plan"]["ranks"]), "a plan holds from the next window on"
    for event in windows:
        for stage, rank in zip(event["stages"], event["ranks"], strict=True):
            assert math.isfinite(stage["entropy"])
            assert (stage["dp_bytes"] == stage["dp_bytes_dense"]) == (rank is None)
    assert 0 < windows[-1]["dp_bytes"] < windows[-1]["dp_bytes_dense"]
    for before, after in zip(windows, windows[1:], strict=False):
        entries = (after["plan"][name] for name in ("proposed", "targets", "ranks", "reasons"))
        for stage, (proposed, target, rank, reason) in enumerate(zip(*entries, strict=True)):
            assert (proposed is not None) == (reason == "entropy")
            if reason == "entropy":
                assert 4 <= target <= 12 and abs(rank - before["plan"]["ranks"][stage]) <= 8
    assert "; proposed " in edgc_run[1]
    values = losses(edgc_run[1])
    # Megatron's second line is the mean of two steps; a step's loss is known only after its window has ended
    for event, (start_of, end) in zip(windows[1:], pairwise([3, 7, 11, 15, 19, 23]), strict=True):
        assert event["loss"] == pytest.approx(sum(values[start_of:end]) / (end - start_of), rel=1e-4)


def test_what_is_sent_is_what_the_messages_hold(edgc_run: tuple[Path, str]) -> None:
    start, *windows = read_events(edgc_run[0])
    for event in windows:
        for setup, stage, rank in zip(start["stages"], event["stages"], event["ranks"], strict=True):
            matrices = sum(rows * cols for _, rows, cols in setup["matrices"])
            factors = sum((rank or 0) * (rows + cols) for _, rows, cols in setup["matrices"])
            dense = sum(elements for _, elements, _ in setup["rest"])
            # which first and last stage sum once more, with each other
            tied = ("embedding.word_embeddings.weight", "output_layer.weight")
            (embedding,) = (elements for name, elements, _ in setup["rest"] if name in tied)
            # fp32, four steps a window, 2 (W-1)/W = 1 for two processes
            assert stage["dp_bytes"] == 4 * 4 * (dense + embedding + (factors if rank else matrices))


def test_one_seed_gives_one_result_bit_for_bit(edgc_run: tuple[Path, str], tmp_path: Path) -> None:
    train([*FOUR_RANKS, *EDGC, *saving(tmp_path)], torchrun=True)
    assert_bit_identical(parameters(edgc_run[0] / "checkpoint"), parameters(tmp_path))


def test_without_edgc_a_run_is_plain_megatron_bit_for_bit(edgc_run: tuple[Path, str], tmp_path: Path) -> None:
    plain = REPOSITORY / "tests" / "distributed" / "plain_megatron.py"
    train([*FOUR_RANKS, *saving(tmp_path / "plain")], script=plain, torchrun=True)  # without any of EDGC
    train([*FOUR_RANKS, *saving(tmp_path / "ours")])
    reference = parameters(tmp_path / "plain")
    assert_bit_identical(reference, parameters(tmp_path / "ours"))
    # and the comparison can tell: compression leaves its mark
    assert any(
        not torch.equal(reference[name], value) for name, value in parameters(edgc_run[0] / "checkpoint").items()
    )


@pytest.mark.parametrize(("ends", "windows"), [(6, [(4, False), (6, True)]), (8, [(4, False), (8, False)])])
def test_a_run_that_megatron_ends_early_reports_its_sums_and_ends_well(
    tmp_path: Path, ends: int, windows: list[tuple[int, bool]]
) -> None:
    logged = ["--edgc-log-dir", str(tmp_path), "--train-iters", "24"]
    output = train([*EDGC, *logged, "--exit-interval", str(ends)], processes=2)
    assert output.count("edgc | gradients: sent") == 1
    events = read_events(tmp_path)
    assert [(one["iteration"], one["last"]) for one in events if one["event"] == "window"] == windows


def test_a_run_whose_last_iteration_is_skipped_reports_its_sums(tmp_path: Path) -> None:
    logged = ["--edgc-log-dir", str(tmp_path), "--train-iters", "6"]
    output = train([*EDGC, *logged, "--iterations-to-skip", "6"], processes=2)
    assert output.count("edgc | gradients: sent") == 1
    events = read_events(tmp_path)
    assert [(one["iteration"], one["last"]) for one in events if one["event"] == "window"] == [(4, False), (5, True)]


def test_evaluation_alone_needs_no_other_command_line(tmp_path: Path) -> None:
    train([*EDGC, *saving(tmp_path), "--train-iters", "8"], processes=2)
    loading = ["--load", str(tmp_path), "--ckpt-format", "torch", "--no-load-rng", "--skip-train"]
    output = train([*EDGC, *loading, "--train-iters", "8"], processes=2)
    assert "with --skip-train nothing is reduced" in output and "validation loss at" in output


def test_static_rank_is_powersgd_after_the_warm_up_also_on_four_data_parallel_ranks(tmp_path: Path) -> None:
    settings = [
        "--edgc",
        "--edgc-preset",
        "paper",
        "--edgc-static-rank",
        "8",
        "--edgc-warmup-fraction",
        "0.5",
        "--edgc-window",
        "2",
    ]
    train(["--train-iters", "8", *settings, "--edgc-log-dir", str(tmp_path)])
    start, *windows = read_events(tmp_path)
    assert [event["ranks"] for event in windows] == [[None], [None], [8], [8]]
    (setup,) = start["stages"]
    elements = sum(8 * (rows + cols) for _, rows, cols in setup["matrices"]) + sum(e for _, e, _ in setup["rest"])
    assert windows[-1]["stages"][0]["dp_bytes"] == 2 * 4 * elements * 2 * 3 / 4  # two steps in fp32 among four ranks


# 4 batches of 4 samples of 64 tokens, and then 6 of 8: 10 iterations, where 64 samples / 4 are 16
GROWING = ["--train-samples", "64", "--step-batch-size-schedule", "0:4 1024:8"]


def without_batch_size() -> list[str]:
    place = TINY_GPT.index("--global-batch-size")
    return ["--edgc-cpu", *TINY_GPT[:place], *TINY_GPT[place + 2 :]]


def test_the_run_is_as_long_as_megatron_says_also_with_batches_that_grow(tmp_path: Path) -> None:
    static = "--edgc --edgc-preset paper --edgc-static-rank 8 --edgc-warmup-fraction 0.5 --edgc-window 5"
    arguments = [*without_batch_size(), *GROWING, *static.split(), "--edgc-log-dir", str(tmp_path)]
    finished = launch(PRETRAIN, arguments, processes=2)
    assert finished.returncode == 0, failure(finished.stdout)
    assert re.findall(r"iteration +(\d+)/ +(\d+) ", finished.stdout)[-1] == ("10", "10")
    start, *windows = read_events(tmp_path)
    assert start["iterations"] == 10
    assert [(event["iteration"], event["ranks"], event["last"]) for event in windows] == [
        (5, [None], False),
        (10, [8], True),
    ]


def test_a_window_that_a_run_with_growing_batches_never_fills_is_refused() -> None:
    settings = "--edgc --edgc-preset paper --edgc-window 12"
    finished = launch(PRETRAIN, [*without_batch_size(), *GROWING, *settings.split()], processes=2)
    assert finished.returncode != 0
    errors = [line for line in finished.stdout.splitlines() if "edgc: error: " in line]
    assert errors == [
        "edgc: error: --edgc-window = 12: is longer than the run of 10 iterations, and entropy sets ranks once a "
        "window: give less"
    ]
    # the launcher's own traceback is there, but none of ours
    assert "ConfigError" not in finished.stdout and "iteration        1/" not in finished.stdout


LEVERS = shlex.split(
    "--edgc-static-rank 16 --edgc-warmup-fraction 0.25 --edgc-window 4 --edgc-iteration-sampling-rate 0.5 "
    "--edgc-basis-cycle 2 --edgc-rest-wire int8 --edgc-study statistics=on"
)


def test_all_levers_at_once_on_a_pipeline(tmp_path: Path) -> None:
    output = train([*FOUR_RANKS, "--edgc", *LEVERS, "--edgc-log-dir", str(tmp_path)])
    values = losses(output)
    assert all(math.isfinite(value) for value in values) and sum(values[-4:]) / 4 < values[0] - 0.5
    assert "int4 -> rank 16" in output and "rank 16 -> rank 16" in output
    start, *windows = read_events(tmp_path)
    used, common = 0, 0
    # four processes send the tied embedding, three quarters of a message each: three times as much as two send
    for stage, plan, price in zip(start["stages"], windows[-1]["plan"]["matrix_ranks"], (1, 1, 3), strict=True):
        values = {name: price * (rows + cols) for name, rows, cols in stage["matrices"]}
        assert plan.keys() == values.keys()  # random tokens give all matrices much the same spectrum
        used += sum(plan[name] * values[name] for name in plan)
        common += 16 * sum(values.values())
    assert 0.9 * common < used <= common
    last, *_, embedding = windows[-1]["stages"]
    kinds = last["statistics"]
    assert {"linear_fc1.weight", "linear_fc1.bias"} <= kinds.keys()
    assert (embedding["stage"], *embedding["statistics"]) == ("tied embedding", "word_embeddings.weight")
    assert all(kind["histogram_entropy"] <= kind["gaussian_entropy"] + 0.05 for kind in kinds.values())
    assert last["dp_bytes_dense"] / last["dp_bytes"] > 6


@pytest.mark.parametrize(("engine", "fewer"), [("int4", 7), ("topk", 45), ("loco", 7), ("onebit", 25)])
def test_engines_without_ranks_train_too(engine: str, fewer: float, tmp_path: Path) -> None:
    settings = ["--edgc", "--edgc-engine", engine, "--edgc-warmup-fraction", "0.5", "--edgc-window", "4"]
    output = train(["--train-iters", "8", *settings, "--edgc-log-dir", str(tmp_path)], processes=2)
    assert all(math.isfinite(value) for value in losses(output))
    *_, last = read_events(tmp_path)
    assert last["ranks"] == [0]
    assert fewer < last["stages"][0]["dp_bytes_dense"] / last["stages"][0]["dp_bytes"] < 1.35 * fewer


def test_a_loss_scale_changes_no_measured_entropy(tmp_path: Path) -> None:
    measured = "--fp16 --edgc --edgc-engine dense --edgc-window 2 --edgc-iteration-sampling-rate 1 --edgc-log-dir"
    runs = []
    for scale in ("1", "1024"):
        arguments = [*TINY_GPT, "--train-iters", "4", *shlex.split(measured), str(tmp_path / scale)]
        runs.append({"name": scale, "arguments": [*arguments, "--loss-scale", scale]})
    for name, processes in results(runs, tmp_path).items():
        assert "failed" not in processes[0], (name, processes[0])
    one, other = (
        [event for event in read_events(tmp_path / scale) if event["event"] == "window"] for scale in ("1", "1024")
    )
    assert one
    for windows in zip(one, other, strict=True):
        small, large = (window["stages"][0]["entropy"] for window in windows)
        assert small == pytest.approx(large, abs=0.5)  # a scale that stayed in would add 6.9 nats


@pytest.mark.slow
def test_the_default_preset_under_bf16(tmp_path: Path) -> None:
    settings = "--bf16 --edgc --edgc-window 4 --edgc-iteration-sampling-rate 0.5 --edgc-link-gbps 0.05"
    output = train([*FOUR_RANKS, *shlex.split(settings), "--edgc-log-dir", str(tmp_path)])
    values = losses(output)
    assert all(math.isfinite(value) for value in values) and sum(values[-4:]) / 4 < values[0] - 0.5
    start, *windows = read_events(tmp_path)
    assert (start["config"]["preset"], start["config"]["volume"]) == ("balanced", 24)
    last = windows[-1]
    # two stages and the tied embedding, which may go in low rank or in rows
    *layers, tied = last["plan"]["matrix_ranks"]
    assert len(layers) == 2 and all(layers)
    assert "word_embeddings.weight" in tied | last["plan"]["formats"][-1]
    # Megatron sums gradients in fp32 here
    assert start["gradient_bytes"] == 4
    assert last["dp_bytes_dense"] / last["dp_bytes"] == pytest.approx(24, rel=0.02)
    # half of the messages are activations, which stay as they are; gradients in bf16 take four times as much as in int4
    assert start["messages"]["engine"] == "int4"
    sent, dense = windows[-1]["pp_bytes"] - windows[0]["pp_bytes"], windows[-1]["pp_bytes_dense"]
    assert 1.5 < (dense - windows[0]["pp_bytes_dense"]) / sent < 1.6


def test_a_stage_may_hold_the_embedding_alone(tmp_path: Path) -> None:
    layout = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout E|ttL --position-embedding-type rope"
    edgc = "--edgc --edgc-static-rank 4 --edgc-window 2 --edgc-pp off"
    output = train(["--train-iters", "6", *layout.split(), *edgc.split(), "--edgc-log-dir", str(tmp_path)])
    values = losses(output)
    assert values[-1] < values[0] and "tied embedding summed over first and last stage by the host" in output
    start, *_ = read_events(tmp_path)
    assert [name for name, *_ in start["stages"][0]["matrices"]] == ["embedding.word_embeddings.weight"]


def test_where_compression_cannot_win_the_run_is_dense_and_says_so(tmp_path: Path) -> None:
    # over loopback so small a model takes longer to compress than to send; the tilt must not stand in the way
    slow = "--edgc --edgc-static-rank 0.15 --edgc-study rank_tilt=0.5 --edgc-window 4"
    output = train(["--train-iters", "4", *slow.split(), "--edgc-log-dir", str(tmp_path)], processes=2)
    assert "compression takes longer than the dense reduction at every rank: reducing dense" in output
    assert "edgc | stage 1 in fp32" in output and "in int6" not in output
    *_, last = read_events(tmp_path)
    assert last["ranks"] == [None] and last["stages"][0]["dp_bytes"] == last["stages"][0]["dp_bytes_dense"]


def test_a_rank_that_no_matrix_can_have_is_refused() -> None:
    finished = launch(
        PRETRAIN, ["--edgc-cpu", *TINY_GPT, "--train-iters", "4", "--edgc", "--edgc-static-rank", "100"], 2
    )
    assert finished.returncode != 0
    assert "--edgc-static-rank = 100: no matrix of this model saves 2x at rank 100; " in finished.stdout
    assert "the largest rank that does is 24" in finished.stdout


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param([], marks=pytest.mark.slow, id="plain"),
        pytest.param(["--use-distributed-optimizer"], id="distributed optimizer"),
    ],
)
def test_norm_and_zeros_in_the_log_are_of_the_gradient_that_the_optimizer_gets(optimizer: list[str]) -> None:
    sparse = "--edgc --edgc-preset paper --edgc-engine topk:0.01 --edgc-window 2 --edgc-warmup-fraction 0.5"
    logged = ["--train-iters", "4", "--log-num-zeros-in-grad", "--clip-grad", "0.1", *optimizer]
    dense, sent = train(logged, 2), train([*logged, *sparse.split()], 2)
    elements = int(re.findall(r"number of parameters on .*: (\d+)", dense)[0])
    (norms, zeros), (sparse_norms, sparse_zeros) = (
        (
            [float(n) for n in re.findall(r"grad norm: ([0-9.]+)", out)],
            [int(n) for n in re.findall(r"num zeros: (\d+)", out)],
        )
        for out in (dense, sent)
    )
    assert sparse_norms[:2] == norms[:2] and sparse_zeros[:2] == zeros[:2]  # not compressed yet
    # two ranks send a hundredth each, and keep the rest
    assert all(count > 0.97 * elements > 2 * before for count, before in zip(sparse_zeros[2:], zeros[2:], strict=True))
    assert all(0 < norm < 0.9 * before for norm, before in zip(sparse_norms[2:], norms[2:], strict=True))
