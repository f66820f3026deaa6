"""The documents of a corpus, read one by one, and the split that each belongs to."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice

from tqdm import tqdm

from tools.data.errors import InputError
from tools.data.sources import Document, Source


@dataclass
class Split:
    """The size of a split: documents that have text, UTF-8 bytes of it, and tokens with the ends of documents."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


type Splits = dict[str, Split]


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
