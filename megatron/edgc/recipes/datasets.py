"""Checks of the indexed datasets on the command line, before any device is touched."""

import json
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import IndexedDataset, get_bin_path, get_idx_path
from megatron.core.tokenizers.utils.build_tokenizer import SP_TOKENIZERS
from megatron.training.utils import get_blend_and_blend_per_split

from edgc.config import ConfigError
from megatron.edgc.recipes.vocabulary import hash_of_sentencepiece, hash_of_vocabulary


def check_datasets(args: Namespace) -> None:
    """Raise ``ConfigError`` if a dataset is missing, cut short, or encoded by another tokenizer than the run's."""
    if args.mock_data:
        return
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:  # a list of data in a file
        raise ConfigError(f"the data that the flags name cannot be listed: {type(error).__name__}: {error}") from error
    if blend is None and per_split is None:
        raise ConfigError("there is no data: give --data-path, --train-data-path and --valid-data-path, or --mock-data")
    blends = [blend, *(per_split or [])]
    prefixes = {prefix for part in blends if part for prefix in part[0]}
    local = sorted(prefix for prefix in prefixes if "://" not in prefix)  # object storage is Megatron's to read
    for prefix in local:
        _check_files(prefix)
    metas = {prefix: meta for prefix in local if (meta := _meta(prefix))}
    if metas:
        given = _tokenizer_hash(args)
        for prefix, meta in metas.items():
            if meta["tokenizer_hash"] != given:
                raise ConfigError(
                    f"dataset {prefix}: encoded with {meta['tokenizer_type']} {meta['tokenizer_model']}, but "
                    f"{_tokenizer_flags(args)} is another tokenizer, whose ids mean other text"
                )


def use_built_helpers() -> None:
    """Keep Megatron from compiling its index builder anew where the installed package has it.

    The wheel has the compiled module but no makefile, so that compiling it would end the process. It holds for the rest
    of the process.
    """
    with suppress(ImportError):
        import megatron.core.datasets.helpers_cpp  # noqa: F401

        megatron.core.datasets.utils.compile_helpers = _already_built


def _already_built() -> None: ...


def _check_files(prefix: str) -> None:
    index, data = Path(get_idx_path(prefix)), Path(get_bin_path(prefix))
    for file in (index, data):
        if not file.is_file():
            raise ConfigError(f"dataset {prefix}: there is no file {file}")
    try:
        dataset = IndexedDataset(prefix)
        reader = dataset.index
        needed = int(reader.sequence_pointers[-1]) + int(reader.sequence_lengths[-1]) * reader.dtype_size
    except Exception as error:  # Megatron's reader raises whatever numpy or an assert gives on a broken file
        raise ConfigError(f"dataset {prefix}: {index} is no index of Megatron's, or is cut short: {error}") from error
    if data.stat().st_size < needed:
        raise ConfigError(f"dataset {prefix}: {data} is cut short: {data.stat().st_size} of {needed} bytes")


def _meta(prefix: str) -> dict[str, Any] | None:
    """What ``tools/preprocess_data.py`` has noted of these very files and their tokenizer, if it has made them."""
    data = Path(get_bin_path(prefix))
    for ending in ("_train_text_document", "_valid_text_document", "_text_document"):
        if prefix.endswith(ending):
            try:
                meta: dict[str, Any] = json.loads(Path(f"{prefix.removesuffix(ending)}_meta.json").read_text())
                if meta["files"][data.name] == data.stat().st_size and "tokenizer_hash" in meta:
                    return meta
            except (OSError, ValueError, KeyError, TypeError):
                pass  # of another tool, or of other files
    return None


def _tokenizer_hash(args: Namespace) -> str | None:
    """What the ids of the run's tokenizer mean; ``None`` if that cannot be known, as for a ``NullTokenizer``."""
    try:
        if args.tokenizer_type in SP_TOKENIZERS and args.tokenizer_model:
            return hash_of_sentencepiece(Path(args.tokenizer_model).read_bytes())
        if args.tokenizer_type == "HuggingFaceTokenizer" and args.tokenizer_model:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(args.tokenizer_model, trust_remote_code=args.trust_remote_code)
            return hash_of_vocabulary(tokenizer.get_vocab(), tokenizer.eos_token or tokenizer.sep_token)
        if args.tokenizer_type == "GPT2BPETokenizer" and args.vocab_file:
            return hash_of_vocabulary(json.loads(Path(args.vocab_file).read_text()), "<|endoftext|>")
    except Exception as error:  # as many kinds as there are libraries
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(f"{_tokenizer_flags(args)}: {type(error).__name__}: {reason}") from error
    return None


def _tokenizer_flags(args: Namespace) -> str:
    file = {"--tokenizer-model": args.tokenizer_model, "--vocab-file": args.vocab_file}
    values = "".join(f" {flag} {value}" for flag, value in file.items() if value)
    return f"--tokenizer-type {args.tokenizer_type}{values}"
