"""The paper's models on their clusters, without a GPU: Megatron accepts them, and they are as large as their names."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

REPOSITORY = Path(__file__).resolve().parents[2]
VOCABULARY = 50257


def described(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "tools/describe.py", *arguments], cwd=REPOSITORY, capture_output=True, text=True, timeout=300
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    page = tmp_path_factory.mktemp("describe") / "page.md"
    page.write_text("before\n<!-- tools/describe.py -->\nold\n<!-- end -->\nafter\n")
    done = described("gpt2_12.1b", "gpt2_2.5b", "--write", str(page))
    assert done.returncode == 0, done.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert done.stdout.strip() in text
    needs: list[dict[str, Any]] = json.loads(page.with_suffix(".json").read_text())
    return needs


def test_models_are_as_large_as_their_names_and_fit(found: list[dict[str, Any]]) -> None:
    for model, (hidden, layers) in zip(found, [(4480, 48), (1920, 52)], strict=True):
        tensor = model["parallel"]["tensor"]
        padded = -(-VOCABULARY // (128 * tensor)) * 128 * tensor
        # weights and biases of a layer; what tensor-parallel ranks hold copies of: norms and two of the biases
        split, copied = 12 * hidden**2 + 7 * hidden, 6 * hidden
        whole = layers * (split + tensor * copied) + tensor * 2 * hidden
        whole += 2 * padded * hidden + tensor * 1024 * hidden
        assert model["parameters"] == whole
        assert abs(whole / 1e9 / model["billions"] - 1) < 0.01
        assert [stage["layers"] for stage in model["stages"]] == [layers // 4] * 4
        for stage in model["stages"]:
            parts = sum(stage[part] for part in ("weights", "gradients", "optimizer", "activations", "edgc"))
            assert stage["weights"] * 9 == stage["weights"] + stage["gradients"] + stage["optimizer"]
            assert parts < model["memory_gib"] * 2**30
            assert 0 < stage["sent"]["32"] < stage["sent"]["128"] < stage["sent"]["dense"]


def test_all_bytes_of_a_step_are_there_and_a_state_that_is_kept_twice(found: list[dict[str, Any]]) -> None:
    for model, (hidden, scaled) in zip(found, [(4480, False), (1920, True)], strict=True):
        data, tensor = model["parallel"]["data"], model["parallel"]["tensor"]
        padded = -(-VOCABULARY // (128 * tensor)) * 128 * tensor
        embedding = 4 * padded * hidden / tensor
        for place, stage in enumerate(model["stages"]):
            ends = place in (0, 3)  # the copies of the tied embedding, summed over the two of them in fp32
            reduced = 2 * stage["gradients"] * (data - 1) / data
            assert stage["sent"]["dense"] == reduced + ends * embedding
            assert stage["messages"] == model["message_bytes"] * (1 if ends else 2)
            assert stage["gathered"] == 0
            if ends:  # the paper's preset leaves both sums of the embedding to Megatron
                assert stage["sent"]["32"] > model["stages"][1]["sent"]["32"] + embedding * (1 + 2 * (data - 1) / data)
        # fp16 with a loss scale keeps the errors of the step before, in fp32 of the matrices of all layers
        matrices = 12 * hidden**2 * model["stages"][1]["layers"] / tensor
        assert 4 * matrices < model["stages"][1]["edgc"] / (1 + scaled) < 1.02 * 4 * matrices


def test_a_page_without_a_place_for_tables_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing here\n")
    done = described("gpt2_12.1b", "--write", str(page))
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert f"describe: error: {page}: tables stand between the lines" in done.stderr


def test_a_fused_sum_and_gathered_weights_are_counted() -> None:
    page = described("gpt2_12.1b", "--use-distributed-optimizer", "--edgc-preset", "balanced").stdout
    first, second, *_, last = [row.split(" | ") for row in page.splitlines() if row[:3] in ("| 1", "| 2", "| 3", "| 4")]
    dense = {row[0]: float(row[9].replace(",", "")) for row in (first, second, last)}
    low = {row[0]: float(row[10].replace(",", "").split()[0]) for row in (first, second, last)}
    # a reduce-scatter, and the embedding's own sum; fused, its factors cost less than a tenth of that
    assert dense["| 2"] == pytest.approx(10119 / 2, rel=1e-3) and dense["| 1"] > dense["| 2"] + 452
    assert low["| 1"] < low["| 2"] + 45
    gathered, messages = second[12].split(", ")
    whole, rounded = (float(part.replace(",", "")) for part in gathered.split(" or "))
    assert whole == pytest.approx(1446 * 2 * 7 / 8, rel=1e-3) and rounded == pytest.approx(whole * 65 / 128, rel=1e-3)
    assert float(messages.strip(" |")) == pytest.approx(2 * 294, rel=1e-2)
    # in all: what EDGC sends against all that Megatron does
    sent = low["| 2"] + rounded + 2 * 294
    assert f"in all {(dense['| 2'] + whole + 2 * 294) / sent:.1f}x)" in second[10]


def test_stages_that_stay_dense_send_what_megatron_sends() -> None:
    page = described("gpt2_2.5b", "--method", "optimus").stdout
    (last,) = [row.split(" | ") for row in page.splitlines() if row.startswith("| 4 ")]
    assert float(last[10].split("(")[1].split("x")[0]) < 1.2  # the embedding's sum alone is of factors


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-experts", "8", "--disable-bias-linear"], "--num-experts: only tools/plan.py counts experts"),
        (["--method", "dense"], "the engine dense has no ranks to show"),
    ],
)
def test_what_has_no_table_is_refused(arguments: list[str], message: str) -> None:
    done = described("gpt2_2.5b", *arguments)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1


def test_the_committed_page_holds_what_the_tool_says_today(found: list[dict[str, Any]]) -> None:
    assert json.loads((REPOSITORY / "docs" / "paper-runs.json").read_text()) == found


def test_what_megatron_refuses_and_a_misnamed_model_are_told_in_one_line(tmp_path: Path) -> None:
    done = described("gpt2_2.5b", "--num-layers", "51")
    assert done.returncode == 2
    assert done.stderr.startswith("describe: error: gpt2_2.5b on v100_32: ")
    assert done.stderr.count("\n") == 1
    flags = "--num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32"
    own = tmp_path / "own.yaml"
    content = {
        "title": "own",
        "cluster": "laptop",
        "billions": 1.0,
        "flags": f"{flags} --train-iters 1000 --micro-batch-size 1 --lr 1e-3",
    }
    own.write_text(yaml.safe_dump(content))
    done = described(str(own), "--ranks", "4", "8")
    assert done.returncode == 1
    assert "own: 0.003 billion parameters are more than 1 % from 1" in done.stderr
