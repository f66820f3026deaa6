"""Turn text into Megatron's indexed dataset format with a SentencePiece or a Hugging Face tokenizer.

    python tools/preprocess_data.py --python-stdlib --train-sentencepiece 1024 --validation-fraction 0.05 \\
        --output-prefix runs/data/stdlib

writes ``stdlib.model``, ``stdlib_{train,valid}_text_document.{bin,idx}`` and ``stdlib_meta.json`` into ``runs/data``.

1. Scan: read the whole source once. Bad input stops here, before anything is written.
2. Split by document: a hash of the document decides, so neither the order nor the rest of the corpus matters.
3. Tokenizer: train one on the training documents, or take an existing one. One of Hugging Face is saved beside the
   data, as ``..._tokenizer``, so that a run needs no hub.
4. Encode every document, each ended by the token that Megatron takes for the end of a document. Finished parts stay in
   a hidden folder beside the output, ``.stdlib-parts``: the same command goes on there after an interruption.
5. Join the parts and move the files into place, the meta file last: where it exists, the data set is whole. A second
   run with the same source and arguments finds it and does nothing.
"""

import argparse
import json
import os
import shlex
import shutil
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.data import encoding
from tools.data.errors import InputError
from tools.data.outputs import existing_outputs, is_whole, print_summary, tokenizer_path, writes_tokenizer
from tools.data.parts import Parts
from tools.data.sources import make_source
from tools.data.splits import scan
from tools.shared.command import say_error
from tools.shared.megatron import CACHE, data_path


def main(argv: list[str] | None = None) -> int:
    """Run the tool with ``argv`` (the process's own by default) and return its exit status."""
    try:
        preprocess(parse_arguments(argv))
    except InputError as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    else:
        return 0
    say_error("preprocess_data", message)
    return 1


def preprocess(args: Namespace) -> None:
    """Do what the arguments ask for, or nothing where it has been done. Raises ``InputError`` and ``OSError``."""
    tokenizer = encoding.read_tokenizer(args)
    source = make_source(args)
    splits, fingerprint = scan(source, args)
    recipe = {
        "source": fingerprint,
        "tokenizer": tokenizer.identity if tokenizer else args.train_sentencepiece,
        "append_eod": args.append_eod,
        "validation_fraction": args.validation_fraction,
        "seed": args.seed,
    }
    prefix = Path(args.output_prefix)
    meta_path = Path(f"{prefix}_meta.json")
    if not args.overwrite and is_whole(meta_path, recipe):
        print(f"{meta_path}: this source has been preprocessed with these arguments, nothing to do")
        return
    cuts = {"part_bytes": encoding.PART_BYTES, "batch_documents": encoding.BATCH_DOCUMENTS}
    parts = Parts(prefix.with_name(f".{prefix.name}-parts"), {**recipe, **cuts})
    stale = existing_outputs(args)
    # A run that was stopped while it moved its files has left parts and no meta file: what exists is its own.
    if stale and not args.overwrite and (meta_path in stale or not parts.is_for_recipe()):
        raise InputError(
            f"{stale[0]} exists and is not from these arguments and this source; --overwrite replaces it, and a script "
            f"that cannot pass that on makes it anew after: rm -r {shlex.join(map(str, stale))}"
        )

    with parts:
        if tokenizer is None:
            tokenizer = encoding.trained_tokenizer(parts, source, splits, args)
        encoding.encode(source, splits, tokenizer, parts, args)
        whole = parts.folder / "whole"
        shutil.rmtree(whole, ignore_errors=True)
        whole.mkdir()
        parts.merge({name: data_path(whole / prefix.name, name) for name in splits}, tokenizer.vocabulary_size)
        if writes_tokenizer(args):
            tokenizer.save(whole / tokenizer_path(args).name)
        files = sorted(path.relative_to(whole) for path in whole.rglob("*") if path.is_file())
        meta: dict[str, Any] = {
            "source": source.description,
            "tokenizer_type": tokenizer.megatron_type,
            "tokenizer_model": tokenizer_path(args).name,
            "tokenizer_hash": tokenizer.meaning,
            "vocabulary_size": tokenizer.vocabulary_size,
            "eod": tokenizer.end if args.append_eod else None,
            "splits": {name: asdict(split) for name, split in splits.items()},
            "recipe": recipe,
            "files": {file.as_posix(): (whole / file).stat().st_size for file in files},
        }
        (whole / meta_path.name).write_text(json.dumps(meta, indent=2) + "\n")
        for path in stale:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        forget_samples(prefix.parent / CACHE, [Path(data_path(prefix, name)).name for name in ("all", *splits)])
        for name in [*meta["files"], meta_path.name]:
            target = prefix.parent / name
            target.parent.mkdir(exist_ok=True)
            os.replace(whole / name, target)
    print_summary(meta, splits, args)


def forget_samples(cache: Path, names: Sequence[str]) -> None:
    """Remove what Megatron has noted of the documents of these data files: its notes go by path, not by content."""
    for description in cache.glob("*-description.txt"):
        text = description.read_text(errors="replace")
        if any(f'{name}"' in text for name in names):
            for note in cache.glob(f"{description.name.removesuffix('description.txt')}*"):
                note.unlink()


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")  # one line, without the usage


def _fraction(text: str) -> float:
    value = float(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return value


def parse_arguments(argv: list[str] | None = None) -> Namespace:
    """The tool's arguments; ends the process with status 2 and one line where they are wrong."""
    parser = _Parser("preprocess_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    add = parser.add_argument

    text = "files and folders: .jsonl and .json files hold one JSON object a line, any other file is one document"
    source.add_argument("--input", nargs="+", metavar="PATH", help=text)
    source.add_argument("--hf-dataset", metavar="NAME_OR_PATH", help="Hugging Face data set: hub, saved folder or file")
    source.add_argument("--python-stdlib", action="store_true", help="this interpreter's standard library (11.5 MB)")
    add("--glob", default="*", help="which files of a folder, at any depth (default: all)")
    add("--json-key", default="text", help="JSON key or data set column of the text (default: text)")
    add("--hf-config", metavar="NAME", help="configuration of the Hugging Face data set")
    add("--hf-split", default="train", metavar="NAME", help="its split (default: train)")
    most = encoding.TRAINING_BYTES >> 20
    text = f"learn so many pieces from the training documents (from {most} MiB of them at most)"
    tokenizer.add_argument("--train-sentencepiece", type=_positive, metavar="VOCAB_SIZE", help=text)
    tokenizer.add_argument("--sentencepiece-model", metavar="FILE", help="use this model")
    text = "use this one of Hugging Face, and save it beside the data (gpt2 from the hub, or a folder)"
    tokenizer.add_argument("--hf-tokenizer", metavar="NAME_OR_FOLDER", help=text)
    text = "end each document with the tokenizer's end-of-sentence piece or token (default: yes)"
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--validation-fraction", type=_fraction, metavar="SHARE", help="of the documents, held out (default: none)")
    add("--seed", type=int, default=1234, help="of the split (default: 1234)")
    add("--output-prefix", required=True, metavar="PATH", help="path that the names of all files written start with")
    add("--workers", type=_positive, default=1, help="threads that encode (default: 1)")
    add("--overwrite", action="store_true", help="replace what exists at this prefix, even if it is up to date")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
