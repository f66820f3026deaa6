"""Megatron's flags for a data set of ``preprocess_data.py``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from tools.launching.configs import LaunchError
from tools.shared.megatron import CACHE, data_flag, data_path

DATA_FLAGS = ("--data-path", "--train-data-path", "--data-args-path", "--per-split-data-args-path", "--mock-data")


class DataError(LaunchError):
    """A run whose data is not there."""


def data_flags(prefix: str | None, given: Sequence[str]) -> list[str]:
    """Where data and tokenizer are, by tools/preprocess_data.py; nothing if ``given`` has flags that say so."""
    if any(flag in given for flag in DATA_FLAGS):
        return []
    if prefix is None:
        raise DataError(f"no data: set DATA to a data set's prefix, or give one of {', '.join(DATA_FLAGS)}")
    meta = Path(f"{prefix}_meta.json")
    try:
        known = json.loads(meta.read_text(encoding="utf-8"))
        kind, tokenizer = known["tokenizer_type"], meta.with_name(known["tokenizer_model"])
        splits = list(known["splits"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"data {prefix}: {meta} is missing or damaged ({type(error).__name__}): "
            "make the data with tools/preprocess_data.py, or name it by Megatron's own flags"
        ) from error
    if "--tokenizer-model" in given:
        flags = []
    elif tokenizer.exists():
        flags = ["--tokenizer-type", kind, "--tokenizer-model", str(tokenizer)]
    else:
        raise DataError(
            f"data {prefix}: its tokenizer {tokenizer} is not there: give --tokenizer-type {kind} --tokenizer-model"
        )
    for split in splits:
        path = data_path(prefix, split)
        if absent := [path + ending for ending in (".idx", ".bin") if not Path(path + ending).is_file()]:
            raise DataError(f"data {prefix}: there is no {absent[0]}")
        flags += [data_flag(split), path]
    return [*flags, "--data-cache-path", str(meta.parent / CACHE)]


def placeholder_flags(prefix: str, given: Sequence[str]) -> list[str]:
    """The flags as they may look once the data is there."""
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "gpt2"]
    return [*([] if "--tokenizer-model" in given else tokenizer), data_flag("all"), data_path(prefix, "all")]
