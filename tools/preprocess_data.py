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
import platform
import shutil
import sys
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import batched, islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tools.dataset_parts import Parts  # noqa: E402
from tools.text_tokenizer import (  # noqa: E402
    HuggingFace,
    InputError,
    TextTokenizer,
    read_sentencepiece,
    train_sentencepiece,
)

RECORD_SUFFIXES = (".jsonl", ".json")
HF_FILE_LOADERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Without its tests the standard library of Python 3.12 or 3.13 holds 11.5 MB; the tests would be 20 MB more.
NOT_STDLIB = {"idle_test", "site-packages", "dist-packages", "test", "tests"}
# SentencePiece keeps its training text in memory, and skips long lines: they are cut (at so many characters).
TRAINING_BYTES = 1 << 27
TRAINING_LINE = 1000
BATCH_DOCUMENTS = 256
# A part ends when so much text is in it: about two minutes' work of one thread, which is what a kill can cost.
PART_BYTES = 1 << 28


class Document(NamedTuple):
    """A text and what identifies it for the split: its path in the corpus, or the text itself where it has no name."""

    key: str
    text: str


@dataclass(frozen=True)
class Source:
    """A corpus that can be read more than once. ``documents`` raises ``InputError`` where the text is unusable."""

    description: str
    documents: Callable[[], Iterator[Document]]


@dataclass
class Split:
    """The size of a split: documents that have text, UTF-8 bytes of it, and tokens with the ends of documents."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


type Splits = dict[str, Split]


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
    print(f"preprocess_data: error: {message}", file=sys.stderr)
    return 1


def preprocess(args: Namespace) -> None:
    """Do what the arguments ask for, or nothing where it has been done. Raises ``InputError`` and ``OSError``."""
    tokenizer = read_tokenizer(args)
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
    cuts = {"part_bytes": PART_BYTES, "batch_documents": BATCH_DOCUMENTS}
    parts = Parts(prefix.with_name(f".{prefix.name}-parts"), {**recipe, **cuts})
    stale = existing_outputs(args)
    # A run that was stopped while it moved its files has left parts and no meta file: what exists is its own.
    if stale and not args.overwrite and (meta_path in stale or not parts.is_for_recipe()):
        raise InputError(f"{stale[0]} exists and is not from these arguments and this source; see --overwrite")

    with parts:
        if tokenizer is None:
            tokenizer = trained_tokenizer(parts, source, splits, args)
        encode(source, splits, tokenizer, parts, args)
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
        for name in [*meta["files"], meta_path.name]:
            target = prefix.parent / name
            target.parent.mkdir(exist_ok=True)
            os.replace(whole / name, target)
    print_summary(meta, splits, args)


# Sources


def make_source(args: Namespace) -> Source:
    """The source that the arguments name; raises ``InputError`` where there is nothing to read."""
    if args.python_stdlib:
        return Source(f"standard library of Python {platform.python_version()}", read_stdlib)
    if args.hf_dataset is not None:
        return hf_source(args.hf_dataset, args.hf_config, args.hf_split, args.json_key)
    files = [file for path in args.input for file in list_files(Path(path), args.glob)]

    def documents() -> Iterator[Document]:
        for name, path in files:
            if path.suffix in RECORD_SUFFIXES:
                yield from read_records(path, args.json_key)
            else:
                yield Document(name, read_text(path))

    return Source(", ".join(Path(path).resolve().name for path in args.input), documents)


def read_stdlib() -> Iterator[Document]:
    """The modules of the running interpreter's standard library, without tests and files not in UTF-8."""
    for name, path in list_files(Path(sysconfig.get_path("stdlib")), "*.py"):
        if NOT_STDLIB.isdisjoint(Path(name).parts):
            with suppress(InputError):
                yield Document(name, read_text(path))


def hf_source(name: str, config: str | None, split: str, column: str) -> Source:
    """A column of a Hugging Face data set: one on the hub, one saved to disk, or a json, csv or parquet file."""
    try:
        import datasets
    except ImportError:
        raise InputError("--hf-dataset needs the package 'datasets'") from None
    path = Path(name)
    try:
        if any((path / mark).exists() for mark in ("state.json", "dataset_dict.json")):
            loaded = datasets.load_from_disk(name)
        elif path.is_file() and path.suffix in HF_FILE_LOADERS:
            loaded = datasets.load_dataset(HF_FILE_LOADERS[path.suffix], data_files=name, split=split)
        else:
            loaded = datasets.load_dataset(name, config, split=split)
        dataset = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
    except Exception as error:  # the library raises many kinds, for a wrong name as for a missing network
        reason = str(error).partition("\n")[0]
        raise InputError(f"--hf-dataset {name}, split {split}: {type(error).__name__}: {reason}") from error
    if column not in dataset.column_names:
        raise InputError(f"--hf-dataset {name}: no column {column!r} among {dataset.column_names}; see --json-key")
    rows = dataset.select_columns(column)

    def documents() -> Iterator[Document]:
        for number, row in enumerate(rows):
            yield record(row[column], f"{name}, row {number}", column)

    return Source(f"{path.resolve().name if path.exists() else name}, split {split}", documents)


def list_files(path: Path, glob: str) -> list[tuple[str, Path]]:
    """Name and path of a file, or of a folder's visible files, at any depth, that match ``glob``; sorted by name."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    inside = ((found.relative_to(path), found) for found in path.rglob(glob) if found.is_file())
    files = [(name.as_posix(), found) for name, found in inside if not any(p.startswith(".") for p in name.parts)]
    if not files:
        raise InputError(f"{path}: no file matches {glob!r}")
    return sorted(files)


def read_text(path: Path) -> str:
    """The file's text, line ends as they are; raises ``InputError`` where it is not UTF-8."""
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text at byte {error.start}") from None


def read_records(path: Path, key: str) -> Iterator[Document]:
    """The value of ``key`` in each JSON object of a file with one a line; blank lines are skipped."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}, line {number}"
            if line.isspace():
                continue
            try:
                value = json.loads(line.decode())
            except ValueError as error:
                raise InputError(f"{where}: not JSON: {error}") from None
            if not isinstance(value, dict) or key not in value:
                raise InputError(f"{where}: no key {key!r}; see --json-key")
            yield record(value[key], where, key)


def record(value: object, where: str, key: str) -> Document:
    """A document from a field of a record; raises ``InputError`` where it is not text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise InputError(f"{where}: {key!r} is not text but {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InputError(f"{where}: {key!r} holds half a surrogate pair, which is no text") from None
    return Document(value, value)


# Scan and split


def scan(source: Source, args: Namespace) -> tuple[Splits, str]:
    """Read the source once: its splits, the one to learn from first, and a hash of all documents in their order.

    Raises ``InputError`` where a document is unusable or a split would be empty."""
    splits = {name: Split() for name in (["all"] if args.validation_fraction is None else ["train", "valid"])}
    fingerprint = blake2b(digest_size=16)
    for document in progress(source, "Scanning"):
        split = splits[split_of(document, args)]
        split.documents += 1
        split.bytes += len(document.text.encode())
        fingerprint.update(hash_of("\0".join(document)))
    total = sum(split.documents for split in splits.values())
    if total == 0:
        raise InputError(f"{source.description}: no text in it")
    for name, split in splits.items():
        if split.documents == 0:
            raise InputError(f"the {name} split got none of {total} documents; see --validation-fraction and --seed")
    return splits, fingerprint.hexdigest()


def split_of(document: Document, args: Namespace) -> str:
    """The name of the split that the document belongs to, whatever the other documents are."""
    if args.validation_fraction is None:
        return "all"
    return "valid" if share(str(args.seed), "split", document.key) < args.validation_fraction else "train"


def share(*parts: str) -> float:
    """A number in [0, 1], spread evenly over different ``parts`` and always the same for the same ones."""
    return int.from_bytes(hash_of("\0".join(parts))[:8]) / 2**64


def hash_of(data: str | bytes) -> bytes:
    """A 16-byte hash; of a file's name too, which need not be UTF-8."""
    return blake2b(data if isinstance(data, bytes) else data.encode(errors="surrogateescape"), digest_size=16).digest()


def progress(source: Source, what: str, splits: Splits | None = None, start: int = 0) -> Iterator[Document]:
    """The documents that have text, without the first ``start``, with a progress bar on stderr after a second."""
    documents = islice((document for document in source.documents() if document.text), start, None)
    total = sum(split.documents for split in splits.values()) if splits else None
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log file wants fewer lines
    yield from tqdm(documents, what, total, initial=start, unit=" documents", delay=1, mininterval=interval)


# Tokenizer


def read_tokenizer(args: Namespace) -> TextTokenizer | None:
    """The existing tokenizer, if the arguments name one. Raises ``InputError`` where it is none, or cannot end a
    document."""
    tokenizer: TextTokenizer
    if args.hf_tokenizer is not None:
        name, tokenizer = args.hf_tokenizer, HuggingFace(args.hf_tokenizer)
    elif args.sentencepiece_model is not None:
        name, tokenizer = args.sentencepiece_model, read_sentencepiece(Path(args.sentencepiece_model))
    else:
        return None
    if args.append_eod and tokenizer.end is None:
        raise InputError(f"{name}: no end-of-sentence piece or token to end documents; see --no-append-eod")
    return tokenizer


def trained_tokenizer(parts: Parts, source: Source, splits: Splits, args: Namespace) -> TextTokenizer:
    """A SentencePiece model learnt from the first split, or the one that an interrupted run has learnt from it."""
    if parts.tokenizer.exists():
        return read_sentencepiece(parts.tokenizer)
    learn_from = next(iter(splits))
    size = splits[learn_from].bytes

    def lines() -> Iterator[str]:
        for document in progress(source, "Reading for SentencePiece", splits):
            if split_of(document, args) == learn_from and share("learn", document.key) <= TRAINING_BYTES / size:
                for line in document.text.split("\n"):
                    yield from (line[at : at + TRAINING_LINE] for at in range(0, len(line), TRAINING_LINE))

    print(f"Training SentencePiece on {min(size, TRAINING_BYTES) / 1e6:.1f} MB of text", file=sys.stderr)
    tokenizer = train_sentencepiece(lines(), args.train_sentencepiece)
    unfinished = parts.folder / "unfinished.model"
    tokenizer.save(unfinished)
    unfinished.rename(parts.tokenizer)
    return tokenizer


# Output


def encode(source: Source, splits: Splits, tokenizer: TextTokenizer, parts: Parts, args: Namespace) -> None:
    """Add to the finished parts those that are missing, and count the tokens of each split."""
    end = [tokenizer.end] if args.append_eod else []
    batches = batched(progress(source, "Encoding", splits, parts.documents), BATCH_DOCUMENTS)

    def part() -> Iterator[tuple[str, list[int]]]:
        size = 0
        for batch in batches:
            encoded = tokenizer.encode([document.text for document in batch], args.workers)
            for document, ids in zip(batch, encoded, strict=True):
                size += len(document.text.encode())
                yield split_of(document, args), ids + end
            if size >= PART_BYTES:
                return

    while parts.write(part(), tokenizer.vocabulary_size):
        pass
    for name, split in splits.items():
        split.tokens = parts.tokens[name]


def data_path(prefix: Path, split: str) -> str:
    """A split's data files without their endings, as Megatron's flags want them."""
    return f"{prefix}_text_document" if split == "all" else f"{prefix}_{split}_text_document"


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
    flags = f"--tokenizer-type {meta['tokenizer_type']} --tokenizer-model {tokenizer_path(args)}"
    print(f"{meta['source']}: vocabulary of {meta['vocabulary_size']} pieces, {tokenizer_path(args)}")
    for name, split in splits.items():
        rate = f"{split.bytes / split.tokens:.2f} bytes per token"
        print(f"  {name:5}  {split.documents:,} documents, {split.tokens:,} tokens, {rate}")
        flags += f" --{'' if name == 'all' else name + '-'}data-path {data_path(prefix, name)}"
    print(f"  files  {', '.join(meta['files'])}, {prefix.name}_meta.json in {prefix.parent}")
    print(f"  flags  {flags}")


# Command line


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
    text = f"learn so many pieces from the training documents (from {TRAINING_BYTES >> 20} MiB of them at most)"
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
