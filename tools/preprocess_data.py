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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import batched
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tqdm import tqdm

DATA_NAMES = {"all": "text_document", "train": "train_text_document", "valid": "valid_text_document"}
RECORD_SUFFIXES = (".jsonl", ".json")
HF_FILE_LOADERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Without its tests the standard library of 3.12 and 3.13 is 11.5 MB; the tests are 20 MB more, much of it generated.
NOT_STDLIB = {"idle_test", "site-packages", "dist-packages", "test", "tests"}
# SentencePiece keeps its training text in memory and forbids "words" of 2^16 characters.
TRAINING_BYTES = 1 << 27
TRAINING_LINE = 1000
# SentencePiece writes a space as this character and so reads the character back as a space.
SPACE_MARK = "\u2581"
BATCH_DOCUMENTS = 256


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
class Scan:
    """What one pass over a source finds: documents and UTF-8 bytes per split, and a hash of all documents in order."""

    documents: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    fingerprint: str = ""


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


def preprocess(args: argparse.Namespace) -> None:
    """Do what the arguments ask for, or nothing where it has been done. Raises ``InputError`` and ``OSError``."""
    prefix = Path(args.output_prefix)
    trains = args.train_sentencepiece is not None
    model = None if trains else read_sentencepiece(args.sentencepiece_model)
    source = make_source(args)
    found = scan(source, args)
    recipe = {
        "source": found.fingerprint,
        "tokenizer": args.train_sentencepiece if model is None else blake2b(model, digest_size=16).hexdigest(),
        "append_eod": args.append_eod,
        "validation_fraction": args.validation_fraction,
        "seed": args.seed,
    }
    meta_path = beside(prefix, "_meta.json")
    if not args.overwrite and is_whole(meta_path, recipe):
        print(f"{meta_path}: this source has been preprocessed with these arguments, nothing to do")
        return
    stale = [path for path in possible_outputs(prefix, trains) if path.exists()]
    if stale and not args.overwrite:
        raise InputError(f"{stale[0]} exists and was not made by these arguments from this source; see --overwrite")

    prefix.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=prefix.parent, prefix=f".{prefix.name}-") as folder:
        draft = Path(folder) / prefix.name
        if model is None:
            model = train_sentencepiece(source, found, args)
            beside(draft, ".model").write_bytes(model)
        processor = SentencePieceProcessor(model_proto=model)
        tokens = encode(source, found, processor, draft, args)
        meta = {
            "source": source.description,
            "tokenizer": {
                "type": "SentencePieceTokenizer",
                "file": beside(prefix, ".model").name if trains else Path(args.sentencepiece_model).name,
                "vocabulary_size": processor.vocab_size(),
                "eod": processor.eos_id() if args.append_eod else None,
            },
            "splits": {
                split: {
                    "path": f"{prefix.name}_{DATA_NAMES[split]}",
                    "documents": found.documents[split],
                    "bytes": found.bytes[split],
                    "tokens": tokens[split],
                }
                for split in splits(args)
            },
            "recipe": recipe,
            "files": {path.name: path.stat().st_size for path in sorted(Path(folder).iterdir())},
        }
        beside(draft, "_meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        for path in stale:
            path.unlink()
        for name in [*meta["files"], meta_path.name]:
            os.replace(Path(folder) / name, prefix.parent / name)
    print_summary(prefix, meta, str(beside(prefix, ".model")) if trains else args.sentencepiece_model)


# Sources


def make_source(args: argparse.Namespace) -> Source:
    """The source that the arguments name; raises ``InputError`` where there is nothing to read."""
    if args.python_stdlib:
        return stdlib_source()
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


def stdlib_source() -> Source:
    """The running interpreter's standard library, a document a module, without tests and files not in UTF-8."""
    root = Path(sysconfig.get_path("stdlib"))

    def documents() -> Iterator[Document]:
        for name, path in list_files(root, "*.py"):
            if NOT_STDLIB.isdisjoint(Path(name).parts):
                try:
                    document = Document(name, read_text(path))
                except InputError:
                    continue
                yield document

    return Source(f"standard library of Python {platform.python_version()}", documents)


def hf_source(name: str, config: str | None, split: str, column: str) -> Source:
    """A column of a Hugging Face data set: one on the hub, one saved to disk, or a json, csv or parquet file."""
    try:
        import datasets
    except ImportError:
        raise InputError("--hf-dataset needs the package 'datasets'") from None
    path = Path(name)
    try:
        if (path / "state.json").exists() or (path / "dataset_dict.json").exists():
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
        raise InputError(f"--hf-dataset {name}: no column {column!r} among {', '.join(dataset.column_names)}")
    texts = dataset.select_columns(column)

    def documents() -> Iterator[Document]:
        for number, row in enumerate(texts):
            yield record(row[column], f"{name}, row {number}", column)

    return Source(f"{path.name if path.exists() else name}, split {split}", documents)


def list_files(path: Path, glob: str) -> list[tuple[str, Path]]:
    """Name and path of a file, or of the visible files of a folder tree that match ``glob``; names are in order."""
    if path.is_file():
        return [(path.name, path)]
    if not path.is_dir():
        raise InputError(f"{path}: no such file or folder")
    inside = ((found.relative_to(path), found) for found in path.rglob(glob) if found.is_file())
    files = sorted((name.as_posix(), found) for name, found in inside if not any(p.startswith(".") for p in name.parts))
    if not files:
        raise InputError(f"{path}: no file matches {glob!r}")
    return files


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


def scan(source: Source, args: argparse.Namespace) -> Scan:
    """Read the source once; raises ``InputError`` where a document is unusable or a split would be empty."""
    found = Scan()
    fingerprint = blake2b(digest_size=16)
    for document in progress(source, "Scanning"):
        split = split_of(document, args)
        found.documents[split] += 1
        found.bytes[split] += len(document.text.encode())
        fingerprint.update(digest(document.key, document.text))
    if not found.documents:
        raise InputError(f"{source.description}: no text in it")
    for split in splits(args):
        if not found.documents[split]:
            total = found.documents.total()
            raise InputError(f"no document of {total} fell into the {split} split; change --validation-fraction or --seed")
    found.fingerprint = fingerprint.hexdigest()
    return found


def splits(args: argparse.Namespace) -> list[str]:
    """Names of the splits, which are keys of ``DATA_NAMES``; the first is the one to learn from."""
    return ["all"] if args.validation_fraction is None else ["train", "valid"]


def split_of(document: Document, args: argparse.Namespace) -> str:
    """The split that the document belongs to, whatever the other documents are."""
    if args.validation_fraction is None:
        return "all"
    return "valid" if share(str(args.seed), "split", document.key) < args.validation_fraction else "train"


def share(*parts: str) -> float:
    """A number in [0, 1] that is spread evenly over different ``parts`` and always the same for the same ones."""
    return int.from_bytes(digest(*parts)[:8]) / 2**64


def digest(*parts: str) -> bytes:
    """A 16-byte hash of some texts, or of file names that are not UTF-8."""
    return blake2b("\0".join(parts).encode(errors="surrogateescape"), digest_size=16).digest()


def progress(source: Source, what: str, total: int | None = None) -> Iterable[Document]:
    """The documents that have text, with a progress bar on stderr once the step has taken a second."""
    documents = (document for document in source.documents() if document.text)
    interval = 0.1 if sys.stderr.isatty() else 10  # seconds; a log file wants fewer lines
    return tqdm(documents, what, total, unit=" documents", delay=1, mininterval=interval)


# Tokenizer


def read_sentencepiece(path: str) -> bytes:
    """The model file's content; raises ``InputError`` where it is no model."""
    model = Path(path).read_bytes()
    try:
        SentencePieceProcessor(model_proto=model)
    except RuntimeError:
        model = b""
    if not model:
        raise InputError(f"--sentencepiece-model {path}: not a SentencePiece model")
    return model


def train_sentencepiece(source: Source, found: Scan, args: argparse.Namespace) -> bytes:
    """Learn a byte-pair encoding that loses nothing: no normalisation, bytes for rare characters, and a piece of their
    own for newline and tab. The same documents give the same model. Raises ``InputError`` for an impossible size."""
    learn_from = splits(args)[0]
    size = found.bytes[learn_from]
    fraction = TRAINING_BYTES / size

    def lines() -> Iterator[str]:
        for document in progress(source, "Reading for SentencePiece", found.documents.total()):
            if split_of(document, args) == learn_from and share("sentencepiece", document.key) <= fraction:
                for line in document.text.split("\n"):
                    yield from (line[at : at + TRAINING_LINE] for at in range(0, len(line), TRAINING_LINE))

    print(f"Training a SentencePiece model on {min(size, TRAINING_BYTES) / 1e6:.1f} MB of text", file=sys.stderr)
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
            allow_whitespace_only_pieces=True,  # an indentation is one piece
            user_defined_symbols=["\n", "\t"],
            num_threads=1,  # the number is stored in the model
            minloglevel=2,
        )
    except RuntimeError as error:
        raise InputError(f"--train-sentencepiece {args.train_sentencepiece}: {size_advice(str(error))}") from None
    return model.getvalue()


def size_advice(message: str) -> str:
    """SentencePiece's complaint about a vocabulary size, in the terms of this tool."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return f"more pieces than this corpus yields; at most {most[1]}"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"fewer pieces than bytes and characters need; at least {least[1]}"
    return message


def make_encoder(processor: SentencePieceProcessor, workers: int) -> Callable[[list[str]], list[list[int]]]:
    """A function from texts to token ids; it runs in ``workers`` threads of SentencePiece, outside Python's lock."""
    mark = [processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]

    def encode_marked(text: str) -> list[int]:
        first, *rest = processor.encode(text.split(SPACE_MARK))
        return first + [token for part in rest for token in mark + part]

    def encode_texts(texts: list[str]) -> list[list[int]]:
        encoded = processor.encode(texts, num_threads=workers)
        if keeps_mark:
            for index, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[index] = encode_marked(text)
        return encoded

    probe = f"a{SPACE_MARK}b"
    keeps_mark = processor.decode(encode_marked(probe)) == probe  # the model has bytes and adds no space in front
    return encode_texts


# Output


def encode(
    source: Source, found: Scan, processor: SentencePieceProcessor, draft: Path, args: argparse.Namespace
) -> Counter[str]:
    """Write the data files beside ``draft`` and return the tokens per split, ends of documents included."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron says which optimizers are missing; nothing is trained here
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    end = [processor.eos_id()] if args.append_eod else []
    if end == [-1]:
        raise InputError("the model has no end-of-sentence piece to end a document with; see --no-append-eod")
    dtype = DType.optimal_dtype(processor.vocab_size())
    paths = {split: beside(draft, f"_{DATA_NAMES[split]}") for split in splits(args)}
    builders = {split: IndexedDatasetBuilder(f"{path}.bin", dtype) for split, path in paths.items()}
    encode_texts = make_encoder(processor, args.workers)
    tokens: Counter[str] = Counter()
    for batch in batched(progress(source, "Encoding", found.documents.total()), BATCH_DOCUMENTS):
        for document, ids in zip(batch, encode_texts([document.text for document in batch]), strict=True):
            split = split_of(document, args)
            builders[split].add_document(ids + end, [len(ids + end)])
            tokens[split] += len(ids + end)
    for split, builder in builders.items():
        builder.finalize(f"{paths[split]}.idx")
    return tokens


def beside(prefix: Path, ending: str) -> Path:
    """The path that starts with ``prefix`` and goes on with ``ending``."""
    return prefix.with_name(prefix.name + ending)


def possible_outputs(prefix: Path, with_model: bool) -> list[Path]:
    """Whatever a run with this prefix may write, the meta file first."""
    data = [f"_{name}{suffix}" for name in DATA_NAMES.values() for suffix in (".bin", ".idx")]
    return [beside(prefix, ending) for ending in ["_meta.json", *data, *([".model"] if with_model else [])]]


def is_whole(meta_path: Path, recipe: dict[str, Any]) -> bool:
    """Whether the meta file tells of this recipe and its files are there, at their full size."""
    try:
        meta = json.loads(meta_path.read_text())
        sizes = {name: (meta_path.parent / name).stat().st_size for name in meta["files"]}
        return bool(meta["recipe"] == recipe and meta["files"] == sizes)
    except (OSError, ValueError, KeyError):
        return False


def print_summary(prefix: Path, meta: dict[str, Any], tokenizer: str) -> None:
    """Print what was written and the Megatron flags that use it."""
    print(f"{meta['source']}: vocabulary of {meta['tokenizer']['vocabulary_size']} pieces in {tokenizer}")
    flags = ["--tokenizer-type SentencePieceTokenizer", f"--tokenizer-model {tokenizer}"]
    for split, facts in meta["splits"].items():
        print(
            f"  {split:5}  {facts['documents']} documents, {facts['tokens']} tokens,"
            f" {facts['bytes'] / facts['tokens']:.2f} bytes per token"
        )
        flags.append(f"--{'' if split == 'all' else split + '-'}data-path {prefix.parent / facts['path']}")
    print(f"  files  {', '.join(meta['files'])}, {prefix.name}_meta.json in {prefix.parent}")
    print(f"  use    {' '.join(flags)}")


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


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The tool's arguments; ends the process with status 2 and one line where they are wrong."""
    parser = _Parser("preprocess_data", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sources = parser.add_argument_group("source").add_mutually_exclusive_group(required=True)
    sources.add_argument(
        "--input",
        nargs="+",
        metavar="PATH",
        help="files and folders; .jsonl and .json files hold one JSON object a line, any other file is one document",
    )
    sources.add_argument("--hf-dataset", metavar="NAME_OR_PATH", help="Hugging Face data set: hub, saved folder or file")
    sources.add_argument("--python-stdlib", action="store_true", help="this interpreter's standard library (11.5 MB)")
    parser.add_argument("--glob", default="*", help="which files of a folder, at any depth (default: all)")
    parser.add_argument("--json-key", default="text", help="JSON key or data set column of the text (default: text)")
    parser.add_argument("--hf-config", metavar="NAME", help="configuration of the Hugging Face data set")
    parser.add_argument("--hf-split", default="train", metavar="NAME", help="its split (default: train)")
    tokenizers = parser.add_argument_group("tokenizer").add_mutually_exclusive_group(required=True)
    tokenizers.add_argument(
        "--train-sentencepiece",
        type=_positive,
        metavar="VOCAB_SIZE",
        help=f"learn so many pieces from the training documents (at most {TRAINING_BYTES >> 20} MiB of them)",
    )
    tokenizers.add_argument("--sentencepiece-model", metavar="FILE", help="use this model")
    parser.add_argument(
        "--append-eod",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="end each document with the tokenizer's end-of-sentence piece (default: yes)",
    )
    parser.add_argument("--validation-fraction", type=_fraction, metavar="SHARE", help="of the documents (default: none)")
    parser.add_argument("--seed", type=int, default=1234, help="of the split (default: 1234)")
    parser.add_argument("--output-prefix", required=True, metavar="PATH", help="of all files written")
    parser.add_argument("--workers", type=_positive, default=1, help="threads that encode (default: 1)")
    parser.add_argument("--overwrite", action="store_true", help="replace what exists, even if it is up to date")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
