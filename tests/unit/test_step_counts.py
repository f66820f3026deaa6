"""What a step of the paper's models asks of a GPU: launches, messages, memory. No GPU is needed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from edgc.compress.sent_bytes import rank_of_volume
from edgc.config import EDGCConfig
from edgc.config.presets import PRESETS
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.selection import Selection
from edgc.specs import MatrixSpec
from tools import count_step as count_step_command
from tools.benchmarks.common import BALANCED
from tools.benchmarks.gpu_model import device_seconds
from tools.benchmarks.stage import Stage
from tools.benchmarks.step_costs import ROUNDED, gradient_bytes
from tools.benchmarks.step_counts import META, StepCounts, count_step, transient_bytes
from tools.shared.gpus import GPU

PAPER = EDGCConfig.of(**PRESETS["paper"], static_rank=64, min_saving=1.0)
BALANCED_RANKS = EDGCConfig.of(**{**BALANCED, "basis_cycle": 1}, static_rank=64, min_saving=1.0)
MODELS = ("gpt2_12.1b", "gpt2_2.5b")


def test_operators_are_counted_by_kernels_bytes_and_flops() -> None:
    left, right = torch.empty(8, 4, device=META), torch.empty(4, 16, device=META)
    gram = torch.empty(2, 4, 4, device=META, dtype=torch.float64)
    with StepCounts() as counts:
        product = left @ right
        product.view(-1)[3:].mul_(2)
        torch._foreach_add_([torch.empty(3, device=META) for _ in range(50)], 1.0)
        torch.linalg.cholesky_ex(gram)
    assert [one.name for one in counts.listed] == ["mm", "mul_", "_foreach_add_", "linalg_cholesky_ex"]
    assert [one.launches for one in counts.listed] == [1, 1, 2, 1], "a list of 50 tensors takes two"
    assert counts.listed[0].nbytes == 4 * (8 * 4 + 4 * 16 + 8 * 16) and counts.listed[0].flops == 2 * 8 * 4 * 16
    assert counts.listed[1].nbytes == 4 * 2 * (8 * 16 - 3), "reads and writes"
    assert counts.listed[3].columns == 4 and counts.listed[3].double
    with pytest.raises(RuntimeError, match=r"meta|Meta"):
        product.sum().item()  # a host that waits is an error


def test_seconds_follow_the_slowest_of_memory_arithmetic_and_launches() -> None:
    unused = {"flops16": 1e15, "nvlink_gbps": 1.0}
    slow, fast = GPU("slow memory", 1e9, 1e15, 1e15, **unused), GPU("slow arithmetic", 1e15, 1e9, 1e9, **unused)
    with StepCounts() as counts:
        torch.empty(1024, 1024, device=META) @ torch.empty(1024, 1024, device=META)
    assert device_seconds(counts.listed, slow) == pytest.approx(3 * 2**22 / 0.75e9)
    assert device_seconds(counts.listed, fast) == pytest.approx(2 * 2**30 / 0.6e9)
    assert device_seconds(counts.listed, GPU("fast", 1e18, 1e18, 1e18, **unused)) == pytest.approx(2.5e-6)


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_a_papers_stage_takes_few_launches_and_messages(model: str) -> None:
    """The targets are 2,000 launches and 24 messages: docs/bench/steps.md."""
    stage = Stage.of(model, None)
    paper, balanced = (count_step(stage, config, [64]) for config in (PAPER, BALANCED_RANKS))
    assert paper.launches <= 1_150 and paper.collectives <= 9
    # no two matrices of a unit have one shape and one rank
    mixed = count_step(stage, BALANCED_RANKS, [48, 64, 80, 96])
    of_volume = count_step(stage, BALANCED_RANKS, [rank_of_volume(Selection(stage.matrices), BALANCED_RANKS, 24.0)])
    for counts in (balanced, mixed, of_volume):
        assert counts.launches <= 2_000 and counts.collectives <= 12, "four phases of three units"
    for name, config in ROUNDED.items():
        rounded = count_step(stage, config, (NO_RANK,))
        # missed by presets with a volume: the equaliser divides and multiplies matrix by matrix (docs/gpu.md)
        assert rounded.launches <= (2_300 if config.equalise else 2_000), name
        assert rounded.collectives <= 24, name
    assert not dist.is_initialized()


def test_rounding_a_whole_stage_takes_more_messages_only_up_to_a_size() -> None:
    stage = Stage.of("gpt2_12.1b", None)
    twice = replace(stage, matrices=(*stage.matrices, *(replace(one, name=f"9{one.name}") for one in stage.matrices)))
    once, again = (count_step(one, ROUNDED["int8"], (NO_RANK,)) for one in (stage, twice))
    assert again.collectives <= once.collectives and again.launches < 1.5 * once.launches


@pytest.mark.parametrize("model", MODELS)
def test_a_step_of_a_papers_stage_takes_at_most_half_of_the_gradients_in_memory(model: str) -> None:
    stage = Stage.of(model, None)
    of_volume = rank_of_volume(Selection(stage.matrices), BALANCED_RANKS, 24.0)
    for ranks in (None, [64], [of_volume], [of_volume, of_volume, of_volume, "int3"]):
        assert 0 < transient_bytes(stage, BALANCED_RANKS, ranks) <= gradient_bytes(stage) / 2, ranks


def test_matrices_of_one_shape_and_rank_cost_few_launches_more_each() -> None:
    def launches(layers: int, ranks: list[int]) -> int:
        matrices = tuple(MatrixSpec(f"{layer}.qkv", 256, 128) for layer in range(layers))
        return count_step(Stage("small", matrices, 2), BALANCED_RANKS, ranks).launches

    assert launches(8, [16]) - launches(4, [16]) <= 4 * 8
    assert launches(8, [6, 16]) > launches(8, [16]), "a rank less than half as high is another shape"
    assert launches(8, [12, 16]) - launches(8, [16]) < launches(8, [6, 16]) - launches(8, [16]), "a like one is not"


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("no_such", "there is no such file"),
        ("tiny", "its cluster laptop has no link_gbps"),
        ("open.yaml", "open: flags: No closing quotation"),
        ("experts.yaml", "--num-experts: only tools/plan.py counts experts"),
    ],
)
def test_what_cannot_be_counted_is_refused_in_one_line(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
    for name, flags in {"open": f"{sizes} 'x", "experts": f"{sizes} --num-experts 4"}.items():
        Path(f"{name}.yaml").write_text(f"title: a model\ncluster: h100_64\nflags: >-\n  {flags}\n")
    assert count_step_command.main(["--models", model, "--output", str(tmp_path / "steps")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.startswith("count_step: error: ") and said.count("\n") == 1
