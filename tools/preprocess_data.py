"""Turn text into Megatron's indexed dataset format with a SentencePiece tokenizer.

    python tools/preprocess_data.py --python-stdlib --train-sentencepiece 1024 --validation-fraction 0.05 \\
        --output-prefix runs/data/stdlib

writes ``stdlib.model``, ``stdlib_{train,valid}_text_document.{bin,idx}`` and ``stdlib_meta.json`` into ``runs/data``.

1. Scan: read the whole source once. Bad input stops here, before anything is written.
2. Split by document: a hash of the document decides, so neither the order nor the rest of the corpus matters.
3. Tokenizer: train one on the training documents, or read an existing one.
4. Encode every document in a temporary folder beside the output, each ended by the tokenizer's end-of-sentence
   piece, which is what Megatron's ``SentencePieceTokenizer`` takes for the end of a document.
5. Move the files into place, the meta file last: where it exists, the data set is whole. A second run with the same
   source and arguments finds it and does nothing.
"""

import argparse
import io
import json
import os
import platform
import re
import sys
import sysconfig
import tempfile
import warnings
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from hashlib import blake2b
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tqdm import tqdm

RECORD_SUFFIXES = (".jsonl", ".json")
HF_FILE_LOADERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Without its tests the standard library of Python 3.12 or 3.13 holds 11.5 MB; the tests would be 20 MB more.
NOT_STDLIB = {"idle_test", "site-packages", "dist-packages", "test", "tests"}
# SentencePiece keeps its training text in memory, and skips long lines: they are cut (at so many characters).
TRAINING_BYTES = 1 << 27
TRAINING_LINE = 1000
# SentencePiece writes a space as this character and so reads the character back as a space.
SPACE_MARK = "\u2581"
BATCH_DOCUMENTS = 64


class InputError(Exception):
    """The user's input or arguments cannot be used; the message is one line that says why."""


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
    tokenizer = None if args.sentencepiece_model is None else read_sentencepiece(args)
    source = make_source(args)
    splits, fingerprint = scan(source, args)
    recipe = {
        "source": fingerprint,
        "tokenizer": hash_of(tokenizer.serialized_model_proto()).hex() if tokenizer else args.train_sentencepiece,
        "append_eod": args.append_eod,
        "validation_fraction": args.validation_fraction,
        "seed": args.seed,
    }
    prefix = Path(args.output_prefix)
    meta_path = Path(f"{prefix}_meta.json")
    if not args.overwrite and is_whole(meta_path, recipe):
        print(f"{meta_path}: this source has been preprocessed with these arguments, nothing to do")
        return
    stale = existing_outputs(args)
    if stale and not args.overwrite:
        raise InputError(f"{stale[0]} exists and is not from these arguments and this source; see --overwrite")

    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as folder:
        draft = Path(folder, prefix.name)
        if tokenizer is None:
            tokenizer = train_sentencepiece(source, splits, args)
            Path(f"{draft}.model").write_bytes(tokenizer.serialized_model_proto())
        encode(source, splits, tokenizer, draft, args)
        meta: dict[str, Any] = {
            "source": source.description,
            "tokenizer_type": "SentencePieceTokenizer",
            "tokenizer_model": tokenizer_path(args).name,
            "vocabulary_size": tokenizer.vocab_size(),
            "eod": tokenizer.eos_id() if args.append_eod else None,
            "splits": {name: asdict(split) for name, split in splits.items()},
            "recipe": recipe,
            "files": {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())},
        }
        Path(f"{draft}_meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for path in stale:
            path.unlink()
        for name in [*meta["files"], meta_path.name]:
            os.replace(Path(folder, name), prefix.with_name(name))
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


def progress(source: Source, what: str, splits: Splits | None = None) -> Iterator[Document]:
    """The documents that have text, with a progress bar on stderr once the step has taken a second."""
    documents = (document for document in source.documents() if document.text)
    total = sum(split.documents for split in splits.values()) if splits else None
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log file wants fewer lines
    yield from tqdm(documents, what, total, unit=" documents", delay=1, mininterval=interval)


# Tokenizer


def read_sentencepiece(args: Namespace) -> SentencePieceProcessor:
    """The existing model; raises ``InputError`` where it is none, or cannot end a document."""
    try:
        tokenizer = SentencePieceProcessor(model_proto=Path(args.sentencepiece_model).read_bytes() or b"empty")
    except RuntimeError:
        raise InputError(f"{args.sentencepiece_model}: not a SentencePiece model") from None
    if args.append_eod and tokenizer.eos_id() < 0:
        raise InputError(f"{args.sentencepiece_model}: no end-of-sentence piece to end documents; see --no-append-eod")
    return tokenizer


def train_sentencepiece(source: Source, splits: Splits, args: Namespace) -> SentencePieceProcessor:
    """Learn a byte-pair encoding that loses nothing: no normalisation, bytes for rare characters, a piece each for
    newline and tab. The same documents give the same model. Raises ``InputError`` for an impossible size."""
    learn_from = next(iter(splits))
    size = splits[learn_from].bytes

    def lines() -> Iterator[str]:
        for document in progress(source, "Reading for SentencePiece", splits):
            if split_of(document, args) == learn_from and share("learn", document.key) <= TRAINING_BYTES / size:
                for line in document.text.split("\n"):
                    yield from (line[at : at + TRAINING_LINE] for at in range(0, len(line), TRAINING_LINE))

    print(f"Training SentencePiece on {min(size, TRAINING_BYTES) / 1e6:.1f} MB of text", file=sys.stderr)
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines(),
            model_writer=model,
            model_type="bpe",
            vocab_size=args.train_sentencepiece,
            byte_fallback=True,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,  # a piece for an indentation
            user_defined_symbols=["\n", "\t"],
            num_threads=1,  # the number is stored in the model
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InputError(f"--train-sentencepiece {args.train_sentencepiece}: {size_advice(str(error))}") from None
    return SentencePieceProcessor(model_proto=model.getvalue())


def size_advice(message: str) -> str:
    """SentencePiece's complaint about a vocabulary size in this tool's terms."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return f"the vocabulary is too large for this corpus, which yields at most {most[1]} pieces"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"the vocabulary is too small for bytes and characters, which need at least {least[1]} pieces"
    return message


def make_encoder(tokenizer: SentencePieceProcessor, workers: int) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to token ids. It runs in ``workers`` threads of SentencePiece, outside Python's lock."""
    mark = [tokenizer.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]

    def encode_with_mark(text: str) -> list[int]:
        first, *rest = tokenizer.encode(text.split(SPACE_MARK))
        return [*first, *(token for part in rest for token in mark + part)]

    probe = f"a{SPACE_MARK}b"
    keeps_mark = tokenizer.decode(encode_with_mark(probe)) == probe  # it has bytes, and puts no space in front

    def encode_texts(texts: list[str]) -> list[list[int]]:
        encoded: list[list[int]] = tokenizer.encode(texts, num_threads=workers)
        for index, text in enumerate(texts):
            if keeps_mark and SPACE_MARK in text:
                encoded[index] = encode_with_mark(text)
        return encoded

    return encode_texts


# Output


def encode(source: Source, splits: Splits, tokenizer: SentencePieceProcessor, prefix: Path, args: Namespace) -> None:
    """Write the data files that start with ``prefix``, and count the tokens of each split."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says which optimizers are missing; nothing is trained here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(tokenizer.vocab_size())
    builders = {name: IndexedDatasetBuilder(f"{data_path(prefix, name)}.bin", dtype) for name in splits}
    encode_texts = make_encoder(tokenizer, args.workers)
    end = [tokenizer.eos_id()] if args.append_eod else []
    for batch in batched(progress(source, "Encoding", splits), BATCH_DOCUMENTS):
        for document, ids in zip(batch, encode_texts([document.text for document in batch]), strict=True):
            name = split_of(document, args)
            builders[name].add_document(ids + end, [len(ids + end)])
            splits[name].tokens += len(ids + end)
    for name, builder in builders.items():
        builder.finalize(f"{data_path(prefix, name)}.idx")


def data_path(prefix: Path, split: str) -> str:
    """A split's data files without their endings, as Megatron's flags want them."""
    return f"{prefix}_text_document" if split == "all" else f"{prefix}_{split}_text_document"


def tokenizer_path(args: Namespace) -> Path:
    """Where the tokenizer is, or will be."""
    return Path(args.sentencepiece_model or f"{Path(args.output_prefix)}.model")


def existing_outputs(args: Namespace) -> list[Path]:
    """What other runs with this prefix have left, the meta file first. A model is no output where it is an input."""
    prefix = Path(args.output_prefix)
    data = [data_path(prefix, split) + ending for split in ("all", "train", "valid") for ending in (".bin", ".idx")]
    model = [f"{prefix}.model"] if args.sentencepiece_model is None else []
    return [path for path in map(Path, [f"{prefix}_meta.json", *data, *model]) if path.exists()]


def is_whole(meta_path: Path, recipe: dict[str, Any]) -> bool:
    """Whether the meta file tells of this recipe and its files are there, at their full size."""
    try:
        meta = json.loads(meta_path.read_text())
        sizes = {name: meta_path.with_name(name).stat().st_size for name in meta["files"]}
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
    text = "end each document with the tokenizer's end-of-sentence piece (default: yes)"
    add("--append-eod", action=argparse.BooleanOptionalAction, default=True, help=text)
    add("--validation-fraction", type=_fraction, metavar="SHARE", help="of the documents, held out (default: none)")
    add("--seed", type=int, default=1234, help="of the split (default: 1234)")
    add("--output-prefix", required=True, metavar="PATH", help="path that the names of all files written start with")
    add("--workers", type=_positive, default=1, help="threads that encode (default: 1)")
    add("--overwrite", action="store_true", help="replace what exists at this prefix, even if it is up to date")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
