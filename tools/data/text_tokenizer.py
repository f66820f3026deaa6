"""Tokenizers behind one seam: SentencePiece and Hugging Face, as Megatron's own classes will read them."""

import io
import json
import os
import re
import warnings
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from megatron.edgc.recipes.vocabulary import hash_of_sentencepiece, hash_of_vocabulary
from tools.data.errors import InputError
from tools.shared.command import reason
from tools.shared.sentencepiece import SPACE_MARK


class TextTokenizer(Protocol):
    """Text to token ids, and all that a data set's meta file tells of the tokenizer.

    ``megatron_type`` is the value of Megatron's ``--tokenizer-type``; ``end`` the id that Megatron takes for the end of
    a document, if there is one; ``identity`` a hash of all that decides how text is encoded; ``meaning`` one of what
    the ids mean (``megatron.edgc.recipes.vocabulary``)."""

    megatron_type: str
    vocabulary_size: int
    end: int | None
    identity: str
    meaning: str

    def encode(self, texts: list[str], workers: int) -> list[list[int]]:
        """The ids of each text, without an end of document, in so many threads."""
        ...

    def save(self, path: Path) -> None:
        """Write what Megatron's ``--tokenizer-model`` can name."""
        ...


class SentencePiece:
    """A SentencePiece model, from the content of its file. Raises ``RuntimeError`` where that is none."""

    megatron_type = "SentencePieceTokenizer"

    def __init__(self, model: bytes) -> None:
        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model or b"empty")  # it takes no bytes for no model
        self._mark = [self._processor.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE_MARK.encode()]
        probe = f"a{SPACE_MARK}b"  # kept where there are bytes, and no space is put in front
        self._keeps_mark = self._processor.decode(self._encode_with_mark(probe)) == probe
        self.vocabulary_size: int = self._processor.vocab_size()
        self.end: int | None = self._processor.eos_id() if self._processor.eos_id() >= 0 else None
        self.identity = self.meaning = hash_of_sentencepiece(model)

    def encode(self, texts: list[str], workers: int) -> list[list[int]]:
        encoded: list[list[int]] = self._processor.encode(texts, num_threads=workers)  # outside Python's lock
        for index, text in enumerate(texts):
            if self._keeps_mark and SPACE_MARK in text:
                encoded[index] = self._encode_with_mark(text)
        return encoded

    def _encode_with_mark(self, text: str) -> list[int]:
        first, *rest = self._processor.encode(text.split(SPACE_MARK))
        return [*first, *(token for part in rest for token in self._mark + part)]

    def save(self, path: Path) -> None:
        path.write_bytes(self._model)


class HuggingFace:
    """What ``AutoTokenizer`` finds under a hub's name or in a folder. Raises ``InputError`` where that is unusable.

    Text that looks like a special token stays text, so no document can end before its end."""

    megatron_type = "HuggingFaceTokenizer"

    def __init__(self, name: str) -> None:
        try:
            with warnings.catch_warnings(action="ignore"):
                from transformers import AutoTokenizer
        except ImportError:
            raise InputError("--hf-tokenizer needs the package 'transformers'") from None
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(name)
            rules: str = self._tokenizer.backend_tokenizer.to_str()
        except Exception as error:  # the library raises many kinds, for a wrong name as for a missing network
            raise InputError(f"--hf-tokenizer {name}: {reason(error)}") from error
        end = self._tokenizer.eos_token or self._tokenizer.sep_token  # as in Megatron
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        self.vocabulary_size = len(self._tokenizer)
        if max(vocabulary.values()) >= self.vocabulary_size:
            raise InputError(
                f"--hf-tokenizer {name}: its ids go up to {max(vocabulary.values())}, but Megatron makes embeddings for"
                f" its {self.vocabulary_size} tokens only"
            )
        self.end: int | None = vocabulary[end] if end else None
        self.identity = blake2b(json.dumps([rules, end]).encode(), digest_size=16).hexdigest()
        self.meaning = hash_of_vocabulary(vocabulary, end)

    def encode(self, texts: list[str], workers: int) -> list[list[int]]:
        # The library reads both at its first batch: it starts its threads then and keeps them.
        os.environ["TOKENIZERS_PARALLELISM"] = str(workers > 1).lower()
        os.environ["RAYON_NUM_THREADS"] = str(workers)
        options = {"add_special_tokens": False, "return_attention_mask": False, "return_token_type_ids": False}
        ids: list[list[int]] = self._tokenizer(texts, split_special_tokens=True, verbose=False, **options).input_ids
        return ids

    def save(self, path: Path) -> None:
        for name in ("is_local", "local_files_only"):  # of this process: they would make one tokenizer two folders
            self._tokenizer.init_kwargs.pop(name, None)
        self._tokenizer.save_pretrained(path)


def read_sentencepiece(path: Path) -> SentencePiece:
    """An existing model; raises ``InputError`` where the file is none."""
    try:
        return SentencePiece(path.read_bytes())
    except RuntimeError:
        raise InputError(f"{path}: not a SentencePiece model") from None


def train_sentencepiece(lines: Iterator[str], size: int) -> SentencePiece:
    """Learn a byte-pair encoding of ``size`` pieces that loses nothing: no normalisation, bytes for rare characters, a
    piece each for newline and tab. The same lines give the same model. Raises ``InputError`` for an impossible size."""
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=lines,
            model_writer=model,
            model_type="bpe",
            vocab_size=size,
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
        raise InputError(f"--train-sentencepiece {size}: {_size_advice(str(error))}") from None
    return SentencePiece(model.getvalue())


def _size_advice(message: str) -> str:
    """SentencePiece's complaint about a vocabulary size in this tool's terms."""
    if most := re.search(r"too high.*<= (\d+)", message):
        return f"the vocabulary is too large for this corpus, which yields at most {most[1]} pieces"
    if least := re.search(r"smaller than required_chars\. \d+ vs (\d+)", message):
        return f"the vocabulary is too small for bytes and characters, which need at least {least[1]} pieces"
    return message
