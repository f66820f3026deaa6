"""Make zero-shot tasks for tools/evaluate.py of local texts, which no model compared may have been trained on.

    python tools/make_tasks.py --name go --texts runs/data/texts/go/runtime --glob '*.go' --output runs/tasks
    python tools/evaluate.py dense=runs/dense/hf edgc=runs/edgc/hf --include-path runs/tasks \\
        --tasks go_word_order,go_perplexity --output runs/zero_shot

go_word_order asks, after some text, in which of four orders the words of the next line stand. go_perplexity is the
perplexity of whole texts. The same texts and arguments make the same tasks.
"""

import json
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.shared.command import command_parser, say_error
from tools.shared.files import write

LEAST_TEXT = 1000  # bytes: shorter texts are left out
LINES_BEFORE, WORDS, ORDERS = 8, range(4, 11), 4  # before a line that is asked for, its words, and their orders
QUESTIONS_OF_TEXT = 4
WORD_ORDER: Mapping[str, Any] = {
    **{"output_type": "multiple_choice", "doc_to_text": "{{context}}", "doc_to_choice": "choices"},
    **{"doc_to_target": "answer", "target_delimiter": ""},
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}
PERPLEXITY: Mapping[str, Any] = {
    **{"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"},
    "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
}


def main(argv: list[str] | None = None) -> int:
    parser = command_parser(__doc__)
    parser.add_argument("--name", required=True, help="first part of the tasks' names")
    parser.add_argument("--texts", type=Path, nargs="+", required=True, metavar="FOLDER")
    parser.add_argument("--glob", default="*", help="which files of a folder, at any depth (default: all)")
    parser.add_argument("--documents", type=int, default=120, help="texts that are drawn (default: 120)")
    parser.add_argument("--context", type=int, default=100, help="characters before a question (default: 100)")
    parser.add_argument("--output", type=Path, required=True, help="folder of the tasks and their data")
    options = parser.parse_args(argv)
    paths = sorted(path for folder in options.texts for path in folder.rglob(options.glob) if path.is_file())
    texts = [path.read_text(errors="ignore") for path in paths if path.stat().st_size > LEAST_TEXT]
    draw = random.Random(1)
    texts = draw.sample(texts, min(options.documents, len(texts)))
    asked = [question for text in texts for question in questions(text, options.context, draw)]
    if not asked:
        say_error("make_tasks", f"{' '.join(map(str, options.texts))}: no text with lines to ask for")
        return 2
    for kind, documents, task in (
        ("word_order", asked, WORD_ORDER),
        ("perplexity", [{"text": text} for text in texts], PERPLEXITY),
    ):
        _write_task(options.output, f"{options.name}_{kind}", documents, task)
    print(f"{options.name}: {len(asked)} questions on {len(texts)} texts, in {options.output}")
    return 0


def questions(text: str, context: int, draw: random.Random) -> Iterator[dict[str, Any]]:
    """Of some lines of a text: what stands before them, and their words in several orders, one of which is right."""
    lines = text.splitlines(keepends=True)
    places = [place for place in range(LINES_BEFORE, len(lines)) if len(lines[place].split()) in WORDS]
    for place in draw.sample(places, min(QUESTIONS_OF_TEXT, len(places))):
        words = lines[place].split()
        right = " ".join(words)
        orders = {right} | {" ".join(draw.sample(words, len(words))) for _ in range(ORDERS - 1)}
        if len(orders) == ORDERS:
            before = "".join(lines[place - LINES_BEFORE : place])[-context:]
            indent = lines[place][: -len(lines[place].lstrip())]
            choices = sorted(orders)
            yield {"context": before + indent, "choices": choices, "answer": choices.index(right)}


def _write_task(folder: Path, name: str, documents: Sequence[Mapping[str, Any]], task: Mapping[str, Any]) -> None:
    """A task of lm_eval's. Its YAML file is written as JSON, which is YAML as well."""
    data = folder / f"{name}.jsonl"
    write(data, "".join(json.dumps(document) + "\n" for document in documents).encode())
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    whole = {"task": name, **source, **task, "metadata": {"version": 1}}
    write(folder / f"{name}.yaml", (json.dumps(whole, indent=1) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
