"""The table of zero-shot tasks: which models and tasks, and what a difference's error is. lm_eval itself runs in
tests/distributed/test_export.py."""

import math
from pathlib import Path
from typing import Any

import pytest

from tools import evaluate
from tools.evaluate import EvaluationError, available, parse_models
from tools.evaluation.page import markdown
from tools.evaluation.scores import difference, summarise


def result(right: list[int], perplexity: float = 9.0) -> dict[str, Any]:
    """What lm_eval leaves of a task with so many documents."""
    share = sum(right) / len(right)
    return {
        "results": {
            "task": {
                "alias": "task",
                "acc,none": share,
                "acc_stderr,none": 0.1,
                "perplexity,none": perplexity,
                "perplexity_stderr,none": "N/A",
            }
        },
        "versions": {"task": 1.0},
        "n-samples": {"task": {"original": len(right), "effective": len(right)}},
        "higher_is_better": {"task": {"acc": True, "perplexity": False}},
        "samples": {
            "task": [
                {"doc_id": at, "filter": "none", "acc": float(one), "perplexity": -math.log(perplexity)}
                for at, one in enumerate(right)
            ]
        },
    }


def test_the_error_of_a_difference_is_that_of_paired_documents() -> None:
    dense, edgc = result([1, 1, 0, 0]), result([1, 1, 1, 0])
    found = difference(dense, edgc, "task", "acc")
    # differences 0 0 1 0: standard deviation 0.5, over the root of 4 documents
    assert found == {"value": pytest.approx(0.25), "stderr": pytest.approx(0.25)}
    assert difference(dense, dense, "task", "acc") == {"value": 0, "stderr": 0}


def test_a_difference_of_what_is_no_mean_has_no_error() -> None:
    assert difference(result([1, 0], 9.0), result([1, 0], 8.0), "task", "perplexity") == {"value": -1, "stderr": None}
    other = result([1, 0])
    other["samples"]["task"][0]["doc_id"] = 7
    assert difference(result([1, 1]), other, "task", "acc") == {"value": -0.5, "stderr": None}


def test_the_error_of_a_difference_of_bits_per_byte_is_that_of_a_ratio() -> None:
    """Three documents, of which one has ten times the bytes."""
    nats = {"dense": [-10.0, -25.0, -180.0], "edgc": [-11.0, -24.0, -190.0]}
    sizes = [10, 20, 200]

    def bits(name: str) -> float:
        return -sum(nats[name]) / math.log(2) / sum(sizes)

    def of(name: str) -> dict[str, Any]:
        found = result([1, 1, 1])
        found["results"]["task"] = {"bits_per_byte,none": bits(name)}
        found["samples"]["task"] = [
            {"doc_id": place, "filter": "none", "bits_per_byte": (value, size)}
            for place, (value, size) in enumerate(zip(nats[name], sizes, strict=True))
        ]
        return found

    gap = bits("edgc") - bits("dense")
    found = difference(of("dense"), of("edgc"), "task", "bits_per_byte")
    beside = [((a - b) / math.log(2) - gap * n) / (230 / 3) for a, b, n in zip(*nats.values(), sizes, strict=True)]
    assert found["value"] == pytest.approx(gap)
    assert found["stderr"] == pytest.approx(math.sqrt(sum(one**2 for one in beside) / 2 / 3))
    same = difference(of("dense"), of("dense"), "task", "bits_per_byte")
    assert same == {"value": 0, "stderr": 0}


@pytest.mark.parametrize("names", [["dense"], ["dense", "edgc"], ["a", "b", "c"]])
def test_the_table_has_a_column_a_model(names: list[str]) -> None:
    rows = summarise({name: result([1, 0, 0, 0]) for name in names})
    page = markdown(
        {
            "models": {name: {"folder": name, "export": None} for name in names},
            "missing": {"piqa": "OfflineModeIsEnabled: no network"},
            "limit": 4,
            "results": rows,
            "versions": {"lm_eval": "0"},
            "machine": "a CPU",
        }
    )
    paired = " | +0.0000 ± 0.0000" if len(names) == 2 else ""
    assert f"| task | acc ↑ | 4 |{' 0.2500 ± 0.1000 |' * len(names)}"[:-2] + f"{paired} |" in page
    assert "| task | perplexity ↓ | 4 | 9.0000 |" in page
    assert "Only the first 4 documents" in page and "Missing: piqa" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["hf"], "is not NAME=FOLDER"),
        (["a=hf", "a=hf"], "is the name of two models"),
        (["a=nowhere"], "no such folder"),
        (["a=empty"], "no config.json"),
        (["a=megatron"], "is a Megatron checkpoint: export it first, with tools/export_hf.py"),
    ],
)
def test_what_is_no_hugging_face_model_is_refused(
    given: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, file in (("hf", "config.json"), ("empty", "notes"), ("megatron", "latest_checkpointed_iteration.txt")):
        Path(name).mkdir()
        Path(name, file).touch()
    assert parse_models(["a=hf"]) == {"a": Path("hf")}
    assert evaluate.main([*given, "--output", "out"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("evaluate: error: ") and message in error and error.count("\n") == 1


class Manager:
    """Stands in for lm_eval's."""

    all_tasks = ("here", "away")

    def load(self, tasks: list[str]) -> None:
        if tasks == ["away"]:
            raise ConnectionError("no network\nand more")


def test_a_task_without_data_is_left_out_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert available(Manager(), ["here", "away"]) == (["here"], {"away": "ConnectionError: no network"})
    assert "away: its data cannot be loaded: ConnectionError: no network" in capsys.readouterr().err
    with pytest.raises(EvaluationError, match="knows no task nowhere"):
        available(Manager(), ["here", "nowhere"])
