"""From documents to token ids: the tokenizer, read or trained, and the parts that it encodes."""

import sys
from argparse import Namespace
from collections.abc import Iterator
from itertools import batched
from pathlib import Path

from tools.data.errors import InputError
from tools.data.parts import Parts
from tools.data.sources import Source
from tools.data.splits import Splits, progress, share, split_of
from tools.data.text_tokenizer import HuggingFace, TextTokenizer, read_sentencepiece, train_sentencepiece

# SentencePiece keeps its training text in memory, and skips long lines: they are cut (at so many characters).
TRAINING_BYTES = 1 << 27
TRAINING_LINE = 1000
BATCH_DOCUMENTS = 256
# A part ends when so much text is in it: about two minutes' work of one thread, which is what a kill can cost.
PART_BYTES = 1 << 28


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


def encode(source: Source, splits: Splits, tokenizer: TextTokenizer, parts: Parts, args: Namespace) -> None:
    """Add to the finished parts those that are missing, and count the tokens of each split."""
    end = [tokenizer.end] if args.append_eod and tokenizer.end is not None else []
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
