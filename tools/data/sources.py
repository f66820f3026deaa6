"""Corpora: files and folders, Hugging Face data sets, the standard library."""

import json
import platform
import sysconfig
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tools.data.errors import InputError
from tools.shared.command import reason

RECORD_SUFFIXES = (".jsonl", ".json")
HF_FILE_LOADERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}
# Without its tests the standard library of Python 3.12 or 3.13 holds 11.5 MB; the tests would be 20 MB more.
NOT_STDLIB = {"idle_test", "site-packages", "dist-packages", "test", "tests"}


class Document(NamedTuple):
    """A text and what identifies it for the split: its path in the corpus, or the text itself where it has no name."""

    key: str
    text: str


@dataclass(frozen=True)
class Source:
    """A corpus that can be read more than once. ``documents`` raises ``InputError`` where the text is unusable."""

    description: str
    documents: Callable[[], Iterator[Document]]


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
        raise InputError(f"--hf-dataset {name}, split {split}: {reason(error)}") from error
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
    if not glob or Path(glob).is_absolute():
        raise InputError(f"glob {glob!r}: must be a pattern of paths inside the folder, such as *.txt")
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
