"""The Hugging Face tokenizer that gives the same ids as the one that a Megatron checkpoint was trained with."""

import inspect
from argparse import Namespace
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tools.export.checkpoint import ExportError
from tools.shared.command import reason
from tools.shared.sentencepiece import SPACE_MARK

SENTENCEPIECE = ("SentencePieceTokenizer", "GPTSentencePieceTokenizer", "Llama2Tokenizer")
NORMAL, USER_DEFINED, UNUSED = 1, 4, 5  # kinds of pieces that can be found in a text
BPE = 2  # the kind of model
# Encoded by both before anything is written: indentations, line ends, spaces at both ends, bytes, control symbols.
SAMPLES = (
    "The quick brown fox jumps over the lazy dog. It's 3.14, isn't it?",
    "def function(self, values):\n    if not values:\n\t\treturn None  # 42\r\n        yield from values\n\n\n",
    "   two  spaces   here    and     at the end  ",
    "na\u00efve \u6f22\u5b57 \U0001f916 e\u0301 \ufb01 \u00a0\u3000\u2028 \ufeff \u2047",
    "nul \0 bell \a <s></s><unk><0x0A> <pad> [INST] <|endoftext|>",
    f"a{SPACE_MARK}b {SPACE_MARK}{SPACE_MARK} \t\t\n \n",
    "aaaaaaaaa ababababa !!!!!! ------ ======== 1000000 ...... (((()))) \\\\\\ //// ____init____",
    " ",
    "x",
)


def build_tokenizer(args: Namespace, override: Path | None) -> PreTrainedTokenizerBase:
    """The tokenizer that the checkpoint's arguments name; ``override`` says where its file is now.

    Raises ``ExportError`` for another kind of tokenizer, one that cannot be read, and one that gives other ids.
    """
    kind, model = args.tokenizer_type, str(override or args.tokenizer_model or "")
    if getattr(args, "special_tokens", None):
        raise ExportError("--special-tokens: tokens added to a tokenizer are not exported")
    if kind in SENTENCEPIECE:
        if args.tokenizer_sentencepiece_legacy or not args.tokenizer_sentencepiece_ignore_extra_whitespaces:
            raise ExportError("a SentencePiece tokenizer in legacy mode or that counts extra spaces is not exported")
        return from_sentencepiece(Path(model))
    if kind == "HuggingFaceTokenizer":
        return _hugging_face(model, args)
    if kind == "GPT2BPETokenizer":
        return _hugging_face(str(override or "gpt2"), args)
    raise ExportError(f"--tokenizer-type {kind}: has no Hugging Face tokenizer of the same ids")


def _hugging_face(name: str, args: Namespace) -> PreTrainedTokenizerBase:
    """As Megatron gets it: from the hub or a folder, or with the vocabulary and the merges of two files."""
    files = {"vocab_file": args.vocab_file, "merges_file": args.merge_file}
    files = {key: path for key, path in files.items() if path}
    for path in files.values():
        if not Path(path).is_file():
            raise ExportError(f"tokenizer: there is no file {path}; see --tokenizer-model")
    try:
        if len(files) == 2 and args.tokenizer_type == "GPT2BPETokenizer":
            from transformers import GPT2Tokenizer

            # named otherwise before transformers 5
            old = "vocab_file" in inspect.signature(GPT2Tokenizer).parameters
            names = ("vocab_file", "merges_file") if old else ("vocab", "merges")
            named = dict(zip(names, (args.vocab_file, args.merge_file), strict=True))
            tokenizer: PreTrainedTokenizerBase = GPT2Tokenizer(**named)
        else:
            tokenizer = AutoTokenizer.from_pretrained(name, **files)
    except Exception as error:  # the library raises many kinds, for a wrong name as for a missing network
        raise ExportError(f"tokenizer {name}: {reason(error)}; see --tokenizer-model") from error
    if tokenizer.eos_token_id is None:
        raise ExportError(f"tokenizer {name}: has no token that ends a document")
    return tokenizer


def from_sentencepiece(path: Path) -> PreTrainedTokenizerBase:
    """A fast tokenizer of a SentencePiece model, compared with it on ``SAMPLES``; raises ``ExportError``."""
    if not path.is_file():
        raise ExportError(f"tokenizer: there is no file {path}; see --tokenizer-model")
    proto = _proto(path)
    processor = SentencePieceProcessor(model_proto=path.read_bytes())
    if processor.eos_id() < 0:
        raise ExportError(f"{path}: has no piece that ends a document")
    tokenizer = _tokenizer(proto, path)
    # Documents begin where another has ended: no text was seen after the begin-of-sentence piece. Control symbols
    # spelled out in a text are text to SentencePiece, so they are split here, too.
    end = processor.id_to_piece(processor.eos_id())
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=end,
        eos_token=end,
        unk_token=processor.id_to_piece(processor.unk_id()),
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
    )
    check(fast, processor, path)
    return fast


def check(fast: PreTrainedTokenizerBase, processor: SentencePieceProcessor, path: Path) -> None:
    """Raise ``ExportError`` where the two give other ids, or have other numbers of tokens."""
    if len(fast) != processor.get_piece_size():
        raise ExportError(f"{path}: {processor.get_piece_size()} pieces became {len(fast)} tokens")
    for sample in SAMPLES:
        ours, theirs = fast(sample)["input_ids"], processor.encode(sample)
        if ours != theirs:
            raise ExportError(
                f"{path}: as a Hugging Face tokenizer it gives other ids, so it is not exported: "
                f"{sample!r} becomes {ours[:20]} and not {theirs[:20]}"
            )


def _proto(path: Path) -> Any:
    """The model's parts, read with the protocol buffer that ships with sentencepiece."""
    from google.protobuf.message import DecodeError
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]  # made when it is imported
    try:
        proto.ParseFromString(path.read_bytes())
    except DecodeError:
        raise ExportError(f"{path}: not a SentencePiece model") from None
    if not proto.pieces:
        raise ExportError(f"{path}: not a SentencePiece model")
    return proto


def _tokenizer(proto: Any, path: Path) -> Tokenizer:
    spec = proto.trainer_spec
    if spec.model_type != BPE:
        # a unigram tokenizer of Hugging Face's takes "</s>" spelled out in a text for the end of it
        raise ExportError(f"{path}: not a BPE model: no Hugging Face tokenizer gives the same ids")
    model = models.BPE(
        vocab={piece.piece: number for number, piece in enumerate(proto.pieces)},
        merges=_merges(proto),
        unk_token=proto.pieces[spec.unk_id].piece,
        fuse_unk=True,
        byte_fallback=spec.byte_fallback,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normalizer(proto.normalizer_spec)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE_MARK, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if proto.normalizer_spec.add_dummy_prefix else []),
        ]
    )
    # Matched in the normalised text and never merged with what stands beside them, as SentencePiece does it.
    frozen = [piece.piece for piece in proto.pieces if piece.type == USER_DEFINED]
    tokenizer.add_tokens([AddedToken(piece, normalized=True) for piece in frozen])
    return tokenizer


def _merges(proto: Any) -> list[tuple[str, str]]:
    """All pairs of pieces that make a piece, the best scores first: SentencePiece merges the best pair that it sees."""
    scores = {piece.piece: piece.score for piece in proto.pieces if piece.type in (NORMAL, UNUSED)}
    merges = []
    for whole, _ in sorted(scores.items(), key=lambda entry: -entry[1]):
        pairs = ((whole[:at], whole[at:]) for at in range(1, len(whole)))
        merges += [(left, right) for left, right in pairs if left in scores and right in scores]
    return merges


def _normalizer(spec: Any) -> Any:
    steps: list[Any] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(" "))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE_MARK)])
