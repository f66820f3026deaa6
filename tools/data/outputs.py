"""The files of a data set: their names, whether they are complete, and the summary that is printed."""

import json
import shlex
from argparse import Namespace
from pathlib import Path
from typing import Any

from tools.data.splits import Splits
from tools.shared.megatron import data_flag, data_path


def tokenizer_path(args: Namespace) -> Path:
    """Where the tokenizer is, or will be: one of Hugging Face is always beside the data."""
    if args.hf_tokenizer is not None:
        return Path(f"{Path(args.output_prefix)}_tokenizer")
    return Path(args.sentencepiece_model or f"{Path(args.output_prefix)}.model")


def writes_tokenizer(args: Namespace) -> bool:
    """Whether the tokenizer is an output of the tool, and not an input that lies where it has to be."""
    if args.hf_tokenizer is not None:
        return Path(args.hf_tokenizer).resolve() != tokenizer_path(args).resolve()
    return args.sentencepiece_model is None


def existing_outputs(args: Namespace) -> list[Path]:
    """What other runs with this prefix have left, the meta file first. A tokenizer that is an input is none."""
    prefix = Path(args.output_prefix)
    data = [data_path(prefix, split) + ending for split in ("all", "train", "valid") for ending in (".bin", ".idx")]
    tokenizers = [f"{prefix}.model", f"{prefix}_tokenizer"] if writes_tokenizer(args) else []
    return [path for path in map(Path, [f"{prefix}_meta.json", *data, *tokenizers]) if path.exists()]


def is_whole(meta_path: Path, recipe: dict[str, Any]) -> bool:
    """Whether the meta file tells of this recipe and its files are there, at their full size."""
    try:
        meta = json.loads(meta_path.read_text())
        sizes = {name: (meta_path.parent / name).stat().st_size for name in meta["files"]}
        return bool(meta["recipe"] == recipe and meta["files"] == sizes)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def print_summary(meta: dict[str, Any], splits: Splits, args: Namespace) -> None:
    """Print what was written and the Megatron flags that use it."""
    prefix = Path(args.output_prefix)
    flags = ["--tokenizer-type", meta["tokenizer_type"], "--tokenizer-model", str(tokenizer_path(args))]
    print(f"{meta['source']}: vocabulary of {meta['vocabulary_size']} pieces, {tokenizer_path(args)}")
    for name, split in splits.items():
        rate = f"{split.bytes / split.tokens:.2f} bytes per token"
        print(f"  {name:5}  {split.documents:,} documents, {split.tokens:,} tokens, {rate}")
        flags += [data_flag(name), data_path(prefix, name)]
    print(f"  files  {', '.join(meta['files'])}, {prefix.name}_meta.json in {prefix.parent}")
    print(f"  flags  {shlex.join(flags)}")
