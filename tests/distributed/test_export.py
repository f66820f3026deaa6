"""A checkpoint of real Megatron runs becomes a Hugging Face GPT-2 with the same logits, which lm_eval evaluates."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from tests.distributed.megatron_runs import REPOSITORY, TINY_GPT, failure, launch
from tests.distributed.modes import COMPRESSED, LOW_RANK, results
from tools import export_hf, preprocess_data

TOLERANCE = 1e-5  # of logits in fp32, relative to the largest; docs/evaluate.md states it
ITERATIONS = 3
LAYERS = 4
BATCH = (3, 64)
UNTIED = "--untie-embeddings-and-output-weights"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> list[str]:
    """The flags of a tokenizer of 400 pieces, which Megatron pads to 512 rows."""
    source = ["--input", str(REPOSITORY / "README.md"), "--train-sentencepiece", "400"]
    assert preprocess_data.main([*source, "--output-prefix", str(folder / "text")]) == 0
    return ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(folder / "text.model")]


def flags(tokenizer: list[str], *more: object) -> list[str]:
    # large weights: a wrong layout, order or activation shows in the logits of an untrained model
    shape = [
        "--num-layers",
        LAYERS,
        "--init-method-std",
        0.2,
        "--attention-dropout",
        0,
        "--hidden-dropout",
        0,
        "--train-iters",
        ITERATIONS,
    ]
    return [*TINY_GPT, *tokenizer, *map(str, [*shape, *more])]


@pytest.fixture(scope="module")
def trained(folder: Path, tokenizer: list[str]) -> dict[str, list[dict[str, Any]]]:
    """Twins in both formats, of two tensor-parallel ranks times two pipeline stages of two virtual ones; and EDGC's."""

    def case(name: str, *more: object) -> dict[str, Any]:
        saving = ["--save", folder / name, "--save-interval", ITERATIONS]
        return {"name": name, "arguments": flags(tokenizer, "--tensor-model-parallel-size", 2, *saving, *more)}

    stages = ["--pipeline-model-parallel-size", 2, "--num-layers-per-virtual-pipeline-stage", 1]
    runs = [
        case("torch_dist", *stages, "--ckpt-format", "torch_dist"),
        case("torch", *stages, "--ckpt-format", "torch"),
        case("edgc", UNTIED, *COMPRESSED, *LOW_RANK),
    ]
    left = results(runs, folder)
    for ranks in left.values():
        for result in ranks:
            assert "failed" not in result, result["failed"]
    return left


@pytest.fixture(scope="module")
def exported(folder: Path, trained: dict[str, Any]) -> dict[str, Path]:
    outputs = {name: folder / "hf" / name for name in trained}
    for name, output in outputs.items():
        assert export_hf.main(["--load", str(folder / name), "--output", str(output)]) == 0
    return outputs


def model(path: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(path).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "more"), [("torch_dist", []), ("edgc", [UNTIED])])
def test_logits_are_megatrons(
    name: str, more: list[str], folder: Path, tokenizer: list[str], exported: dict[str, Path]
) -> None:
    tokens = torch.randint(400, BATCH, generator=torch.Generator().manual_seed(1))
    torch.save(tokens, folder / "tokens.pt")
    finished = launch(
        REPOSITORY / "tests" / "distributed" / "logits_run.py",
        [
            *(str(folder / "tokens.pt"), str(folder / f"{name}.logits.pt")),
            *flags(tokenizer, *more, "--load", folder / name, "--no-load-optim", "--no-load-rng", "--eval-iters", 0),
            *("--override-opt-param-scheduler", "--make-vocab-size-divisible-by", "256"),
        ],
    )
    assert finished.returncode == 0, failure(finished.stdout)
    megatron: Tensor = torch.load(folder / f"{name}.logits.pt")
    assert megatron.shape == (*BATCH, 512)
    with torch.no_grad():
        ours = model(exported[name])(tokens).logits
    assert ours.shape == (*BATCH, 400)
    largest = float(megatron.abs().max())
    distance = float((ours - megatron[..., :400]).abs().max()) / largest
    print(f"{name}: largest difference {distance:.1e} of logits up to {largest:.1f}")
    assert distance < TOLERANCE


@pytest.mark.slow
def test_both_formats_give_the_same_bits(exported: dict[str, Path]) -> None:
    whole, joined = (model(exported[name]).state_dict() for name in ("torch_dist", "torch"))
    assert joined.keys() == whole.keys()
    for key, tensor in whole.items():
        assert torch.equal(joined[key], tensor), key


# Evaluation

QUESTIONS = [
    {"question": f"{name} is", "choices": [f"the {name} of", "a rank", "in bytes, not dense"], "answer": at % 3}
    for at, name in enumerate(("entropy", "gradient", "loss", "window", "stage", "error", "step", "factor"))
]
CHOICE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: answer
doc_to_choice: choices
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
metadata: {{version: 1.0}}
"""
WORD = """
task: local_word
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: loglikelihood
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[0]}}}}"
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
metadata: {{version: 1.0}}
"""
METRICS = [("choice", "acc"), ("choice", "acc_norm"), ("word", "perplexity"), ("word", "acc")]
UNREACHABLE = "task: local_missing\ndataset_path: nobody/nothing\noutput_type: multiple_choice\ntest_split: test\n"


def accuracy(path: Path) -> float:
    """Of ``local_choice``, without lm_eval."""
    gpt, tokenizer = model(path), AutoTokenizer.from_pretrained(path)
    right = 0
    for entry in QUESTIONS:
        question = tokenizer(entry["question"])["input_ids"]
        scores = []
        for choice in entry["choices"]:
            ids = tokenizer(f"{entry['question']} {choice}")["input_ids"]
            with torch.no_grad():
                logs = gpt(torch.tensor([ids])).logits[0].log_softmax(-1)
            places = range(len(question), len(ids))
            scores.append(sum(float(logs[place - 1, ids[place]]) for place in places))
        right += scores.index(max(scores)) == entry["answer"]
    return right / len(QUESTIONS)


@pytest.mark.slow
def test_twins_are_evaluated_side_by_side(
    folder: Path, exported: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = folder / "tasks"
    tasks.mkdir()
    (tasks / "data.json").write_text("\n".join(json.dumps(entry) for entry in QUESTIONS))
    for name, text in (("choice", CHOICE), ("word", WORD)):
        (tasks / f"{name}.yaml").write_text(text.format(data=tasks / "data.json"))
    (tasks / "missing.yaml").write_text(UNREACHABLE)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(folder / "cache"))
    command = [
        *(f"dense={exported['torch_dist']}", f"edgc={exported['edgc']}"),
        *("--tasks", "local_choice,local_word,local_missing", "--include-path", str(tasks)),
        *("--device", "cpu", "--output", str(folder / "zero_shot")),
    ]
    finished = launch(REPOSITORY / "tools" / "evaluate.py", command)
    assert finished.returncode == 0, finished.stdout[-5000:]
    assert "evaluate: warning: local_missing: its data cannot be loaded" in finished.stdout
    summary = json.loads((folder / "zero_shot" / "zero_shot.json").read_text())
    rows = {(row["task"], row["metric"]): row for row in summary["results"]}
    assert rows.keys() == {(f"local_{task}", m) for task, m in METRICS}
    found = rows["local_choice", "acc"]
    for name, export in (("dense", "torch_dist"), ("edgc", "edgc")):
        assert found["models"][name]["value"] == accuracy(exported[export])
        assert found["models"][name]["stderr"] > 0
    assert found["difference"]["value"] == found["models"]["edgc"]["value"] - found["models"]["dense"]["value"]
    assert summary["missing"].keys() == {"local_missing"}
    page = (folder / "zero_shot" / "zero_shot.md").read_text()
    assert "| task | metric | documents | dense | edgc | edgc − dense |" in page
    assert "| local_choice | acc ↑ | 8 | 0." in page and "- Missing: local_missing" in page
