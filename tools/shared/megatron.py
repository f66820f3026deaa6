"""Names of Megatron's files and flags. Python 3.9 is enough."""

from __future__ import annotations

import json
from pathlib import Path

CACHE = "cache"  # folder beside data files, for Megatron's notes of which sample is where
TRACKER = "latest_checkpointed_iteration.txt"  # in a folder of checkpoints: names the newest


def data_path(prefix: object, split: str) -> str:
    """A split's data files without their endings, as Megatron's flags want them; ``all`` is a whole corpus."""
    return f"{prefix}_text_document" if split == "all" else f"{prefix}_{split}_text_document"


def data_flag(split: str) -> str:
    """The flag that takes a split's ``data_path``."""
    return "--data-path" if split == "all" else f"--{split}-data-path"


def corpus_flags(corpus: str) -> list[str]:
    """Megatron's flags of a data set with its tokenizer, by the prefix of their files."""
    return [
        *("--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", f"{corpus}.model"),
        *(data_flag("train"), data_path(corpus, "train"), data_flag("valid"), data_path(corpus, "valid")),
        *("--data-cache-path", str(Path(corpus).parent / CACHE)),
    ]


def corpus_digest(corpus: str) -> str:
    """What a data set was made of, of the notes that tools/preprocess_data.py leaves beside it; empty without them."""
    notes = Path(f"{corpus}_meta.json")
    try:
        known = json.loads(notes.read_text(encoding="utf-8"))
        return f"{known['recipe']['source'][:12]}-{known['tokenizer_hash'][:12]}"
    except (OSError, ValueError, KeyError, TypeError):
        return ""
