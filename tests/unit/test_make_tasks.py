"""Zero-shot tasks of local texts: what is asked, and that the same texts ask the same."""

import json
from pathlib import Path

import pytest

from tools import make_tasks

TEXT = "".join(f"line {number} has exactly six words{number}\n" for number in range(60))


def made(texts: Path, output: Path, *more: str) -> dict[str, list[dict[str, object]]]:
    assert make_tasks.main(["--name", "own", "--texts", str(texts), "--output", str(output), *more]) == 0
    return {
        kind: [json.loads(line) for line in (output / f"own_{kind}.jsonl").read_text().splitlines()]
        for kind in ("word_order", "perplexity")
    }


def test_a_question_has_its_line_among_other_orders_of_its_words(tmp_path: Path) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "one.txt").write_text(TEXT)
    (texts / "short.txt").write_text("too short")
    (texts / "other.md").write_text(2 * TEXT)
    found = made(texts, tmp_path / "tasks", "--glob", "*.txt", "--context", "90")
    assert found["perplexity"] == [{"text": TEXT}]
    assert len(found["word_order"]) == make_tasks.QUESTIONS_OF_TEXT
    for question in found["word_order"]:
        context, choices = str(question["context"]), list(question["choices"])  # type: ignore[call-overload]
        right = choices[question["answer"]]
        assert len(context) == 90 and context + right + "\n" in TEXT, "the line that follows"
        assert len(set(choices)) == 4 and {tuple(sorted(one.split())) for one in choices} == {
            tuple(sorted(right.split()))
        }
    assert made(texts, tmp_path / "again", "--glob", "*.txt", "--context", "90") == found
    task = json.loads((tmp_path / "tasks" / "own_perplexity.yaml").read_text())
    assert task["dataset_kwargs"]["data_files"]["test"] == str(tmp_path / "tasks" / "own_perplexity.jsonl")


def test_texts_without_questions_are_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "one").write_text(2000 * "x")
    assert make_tasks.main(["--name", "own", "--texts", str(tmp_path), "--output", str(tmp_path / "tasks")]) == 2
    assert "no text with lines to ask for" in capsys.readouterr().err and not (tmp_path / "tasks").exists()
