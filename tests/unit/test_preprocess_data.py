"""Text in, Megatron's indexed data set out: nothing is lost, nothing half-written is left, bad input is named."""

import json
import random
import re
import shlex
import shutil
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer

from tools import preprocess_data
from tools.data import encoding, sources, text_tokenizer

SCRIPT = Path(preprocess_data.__file__)
VOCABULARY = 400


def python_like(number: int) -> str:
    """A small document; no two are the same."""
    names = [f"{word}_{number}" for word in ("left", "right", "total", "window", "rank")]
    body = "".join(f"    {name} = self.{name}(values, {number})\n\tif not {name}:\r\n" for name in names)
    return f"def function_{number}(self, values):\n{body}        return None  # {number}\n"


DOCUMENTS = [python_like(number) for number in range(40)]
NASTY = [
    "\n\n\t \r\n  two  spaces   \n",
    " ",
    "a\u2581b \u2581\u2581",
    "nul \0 bell \a",
    "<s></s><unk><0x0A> \u2585 \ufeff \u2047",
    "naïve 漢字 🤖 e\u0301 ﬁ \u00a0\u3000\u2028",
]


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "out" / "corpus"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that the tool has trained."""
    prefix = tmp_path_factory.mktemp("model") / "corpus"
    assert run(write_jsonl(prefix.parent, DOCUMENTS), prefix) == 0
    return Path(f"{prefix}.model")


def write_jsonl(folder: Path, documents: list[str], name: str = "corpus.jsonl") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(json.dumps({"text": text, "number": 1}) for text in documents) + "\n")
    return ["--input", str(folder / name)]


def run(source: list[str], prefix: Path, *more: str, tokenizer: Path | None = None) -> int:
    train = ["--train-sentencepiece", str(VOCABULARY)]
    known = ["--sentencepiece-model", str(tokenizer)]
    return preprocess_data.main([*source, "--output-prefix", str(prefix), *(known if tokenizer else train), *more])


def tokens(path: str) -> list[np.ndarray]:
    """The documents of a data set, read by Megatron."""
    dataset = IndexedDataset(path)
    assert dataset.document_indices.tolist() == list(range(len(dataset) + 1))  # one sequence a document
    return [dataset[index].copy() for index in range(len(dataset))]  # the data set unmaps its file when it goes


def texts(prefix: Path, name: str = "text_document", tokenizer: Path | None = None) -> list[str]:
    processor = SentencePieceProcessor(model_file=str(tokenizer or f"{prefix}.model"))
    return [processor.decode(ids[:-1].tolist()) for ids in tokens(f"{prefix}_{name}")]


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()} if folder.exists() else {}


def megatron_arguments(flags: str) -> Namespace:
    """What Megatron's own parser makes of some flags."""
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["pretrain_gpt.py", *shlex.split(flags)]
    try:
        return Namespace(**{**vars(parse_args()), "rank": 1})
    finally:
        sys.argv = argv


def megatron_tokenizer(model: Path) -> Any:
    return build_tokenizer(
        megatron_arguments(f"--tokenizer-type SentencePieceTokenizer --tokenizer-model {model} --vocab-size 1")
    )


# Every source


def from_jsonl(folder: Path) -> list[str]:
    return write_jsonl(folder, DOCUMENTS + NASTY)


def from_text_files(folder: Path) -> list[str]:
    folder.mkdir()
    for number, text in enumerate(DOCUMENTS + NASTY):
        (folder / f"{number:03}.txt").write_bytes(text.encode())
    return ["--input", *map(str, sorted(folder.iterdir()))]


def from_folder(folder: Path) -> list[str]:
    for number, text in enumerate(DOCUMENTS + NASTY):
        path = folder / f"{number // 10:02}" / f"{number:03}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (folder / "picture.png").write_bytes(b"\xff\xd8")
    (folder / ".git").mkdir()
    (folder / ".git" / "hidden.py").write_text("not a document")
    return ["--input", str(folder), "--glob", "*.py"]


def from_hf(kind: str) -> Callable[[Path], list[str]]:
    def save(folder: Path) -> list[str]:
        import datasets

        rows = datasets.Dataset.from_dict({"code": DOCUMENTS + NASTY, "number": list(range(len(DOCUMENTS + NASTY)))})
        path = folder / f"set.{kind}"
        if kind == "folder":
            rows.save_to_disk(path)
        elif kind == "folders":
            datasets.DatasetDict({"learn": rows}).save_to_disk(path)
        elif kind == "parquet":
            rows.to_parquet(path)
        else:
            rows.to_json(path)
        return [
            "--hf-dataset",
            str(path),
            "--json-key",
            "code",
            "--hf-split",
            "learn" if kind == "folders" else "train",
        ]

    return save


SOURCES = {
    "jsonl": from_jsonl,
    "text files": from_text_files,
    "folder": from_folder,
    **{f"hf {kind}": from_hf(kind) for kind in ("folder", "folders", "parquet", "json")},
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_reads_back_exactly(
    source: str, tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    assert run(SOURCES[source](tmp_path / "in"), prefix) == 0
    assert texts(prefix) == DOCUMENTS + NASTY


def test_the_standard_library_is_there_without_its_tests() -> None:
    documents = dict(sources.read_stdlib())
    assert {"json/encoder.py", "textwrap.py"} <= documents.keys()
    assert not [name for name in documents if "test" in name.split("/") or "site-packages" in name]
    assert sum(len(text.encode()) for text in documents.values()) > 10e6


def test_standard_library_files_not_in_utf8_are_left_out(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = from_folder(tmp_path / "lib")
    (tmp_path / "lib" / "latin.py").write_bytes(b"# \xe9\n")
    monkeypatch.setattr(sources.sysconfig, "get_path", lambda name: source[1])
    assert run(["--python-stdlib"], prefix) == 0
    assert texts(prefix) == DOCUMENTS + NASTY


def test_documents_without_text_are_no_documents(tmp_path: Path, prefix: Path, model: Path) -> None:
    assert run(write_jsonl(tmp_path, ["", "one", "", "two"]), prefix, tokenizer=model) == 0
    assert texts(prefix, tokenizer=model) == ["one", "two"]


# Tokenizer


def test_megatron_agrees_on_tokens_eod_and_vocabulary(tmp_path: Path, prefix: Path, model: Path) -> None:
    documents = [text for text in DOCUMENTS + NASTY if "\u2581" not in text]
    assert run(write_jsonl(tmp_path, documents), prefix, tokenizer=model) == 0
    tokenizer = megatron_tokenizer(model)
    assert tokenizer.vocab_size == VOCABULARY
    for text, ids in zip(documents, tokens(f"{prefix}_text_document"), strict=True):
        assert ids.tolist() == [*tokenizer.tokenize(text), tokenizer.eod]
        assert ids.tolist().count(tokenizer.eod) == 1
    meta = json.loads(Path(f"{prefix}_meta.json").read_text())
    assert (meta["eod"], meta["vocabulary_size"]) == (tokenizer.eod, VOCABULARY)


def test_every_character_reads_back(tmp_path: Path, prefix: Path, model: Path) -> None:
    characters = [*map(chr, range(0xD800)), *map(chr, random.Random(0).sample(range(0xE000, 0x110000), 10000))]
    random.Random(0).shuffle(characters)
    documents = ["".join(characters[at : at + 1000]) for at in range(0, len(characters), 1000)]
    assert run(write_jsonl(tmp_path, documents), prefix, tokenizer=model) == 0
    assert texts(prefix, tokenizer=model) == documents


def test_no_end_of_document_where_none_is_wanted(tmp_path: Path, prefix: Path, model: Path) -> None:
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, "--no-append-eod", tokenizer=model) == 0
    processor = SentencePieceProcessor(model_file=str(model))
    assert [ids.tolist() for ids in tokens(f"{prefix}_text_document")] == processor.encode(DOCUMENTS)


def foreign_model(path: Path, **options: Any) -> Path:
    """A model trained with SentencePiece's own defaults: an added space in front, no bytes."""
    with path.open("wb") as writer:
        SentencePieceTrainer.train(
            sentence_iterator=iter(DOCUMENTS), model_writer=writer, vocab_size=100, minloglevel=2, **options
        )
    return path


def hf_tokenizer(folder: Path, size: int = VOCABULARY, **options: Any) -> Path:
    """A byte-level BPE of GPT-2's kind, in a folder as the Hugging Face hub has it."""
    import tokenizers
    from transformers import GPT2Tokenizer

    rules = tokenizers.ByteLevelBPETokenizer()
    rules.train_from_iterator(DOCUMENTS, size, special_tokens=["<|endoftext|>"], show_progress=False)
    model = json.loads(rules.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    GPT2Tokenizer(vocab=model["vocab"], merges=merges, **options).save_pretrained(folder)
    return folder


def test_a_foreign_model_encodes_as_in_megatron(tmp_path: Path, prefix: Path) -> None:
    model = foreign_model(tmp_path / "foreign.model")
    assert run(write_jsonl(tmp_path, DOCUMENTS + NASTY), prefix, tokenizer=model) == 0
    tokenizer = megatron_tokenizer(model)
    expected = [[*tokenizer.tokenize(text), tokenizer.eod] for text in DOCUMENTS + NASTY]
    assert [ids.tolist() for ids in tokens(f"{prefix}_text_document")] == expected


def test_newline_tab_and_indentation_are_a_token_each(model: Path) -> None:
    pieces = SentencePieceProcessor(model_file=str(model)).encode("\n\t\n    a", out_type=str)
    assert pieces == ["\n", "\t", "\n", "▁▁▁▁", "a"]


def test_long_lines_are_learned_from(tmp_path: Path, prefix: Path) -> None:
    line = " ".join(f"{word}{number}" for number in range(2000) for word in ("alpha", "omega"))
    assert len(line) > 20000
    assert run(write_jsonl(tmp_path, [line]), prefix) == 0
    processor = SentencePieceProcessor(model_file=f"{prefix}.model")
    assert "▁alpha" in [processor.id_to_piece(index) for index in range(VOCABULARY)]


def test_a_large_corpus_is_sampled_for_the_tokenizer(
    tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learned: list[str] = []
    train = SentencePieceTrainer.train

    def spy(sentence_iterator: Iterator[str], **options: Any) -> None:
        learned.extend(sentence_iterator)
        train(sentence_iterator=iter(learned), **options)

    monkeypatch.setattr(text_tokenizer.SentencePieceTrainer, "train", spy)
    size = sum(len(text.encode()) for text in DOCUMENTS)
    monkeypatch.setattr(encoding, "TRAINING_BYTES", size // 2)
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix) == 0
    assert 0.25 * size < len("\n".join(learned).encode()) < 0.75 * size
    assert texts(prefix) == DOCUMENTS


@pytest.mark.parametrize(("vocabulary", "dtype"), [(VOCABULARY, np.uint16), (70000, np.int32)])
def test_tokens_are_stored_as_megatron_stores_them(
    vocabulary: int, dtype: type, tmp_path: Path, prefix: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_tokenizer.SentencePieceProcessor, "vocab_size", lambda self: vocabulary)
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, tokenizer=model) == 0
    assert IndexedDataset(f"{prefix}_text_document").index.dtype == dtype
    assert texts(prefix, tokenizer=model) == DOCUMENTS


# Split

SPLIT = ["--validation-fraction", "0.25"]


def split_texts(prefix: Path, model: Path) -> tuple[set[str], set[str]]:
    train, valid = (texts(prefix, f"{name}_text_document", model) for name in ("train", "valid"))
    assert len(train) + len(valid) == len({*train, *valid})
    return set(train), set(valid)


def test_the_split_is_by_document_and_complete(tmp_path: Path, prefix: Path, model: Path) -> None:
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, *SPLIT, tokenizer=model) == 0
    train, valid = split_texts(prefix, model)
    assert train | valid == set(DOCUMENTS)
    assert 4 <= len(valid) <= 16
    assert not Path(f"{prefix}_text_document.bin").exists()


def test_order_and_company_do_not_move_a_document(tmp_path: Path, prefix: Path, model: Path) -> None:
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, *SPLIT, tokenizer=model) == 0
    train, valid = split_texts(prefix, model)
    more = [python_like(number) for number in range(60)]
    random.Random(1).shuffle(more)
    assert run(write_jsonl(tmp_path, more), prefix, *SPLIT, "--overwrite", tokenizer=model) == 0
    more_train, more_valid = split_texts(prefix, model)
    assert train < more_train and valid < more_valid


def test_a_file_keeps_its_split_when_its_text_changes(tmp_path: Path, prefix: Path, model: Path) -> None:
    held_out = []
    for edit in ("", " edited"):
        for number in range(20):
            (tmp_path / f"{number:03}.py").write_text(f"{number:03}{edit}")
        source = ["--input", str(tmp_path), "--glob", "*.py"]
        assert run(source, prefix, *SPLIT, "--overwrite", tokenizer=model) == 0
        held_out.append({text[:3] for text in split_texts(prefix, model)[1]})
    assert held_out[0] == held_out[1] != set()


def test_another_seed_gives_another_split(tmp_path: Path, prefix: Path, model: Path) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run(source, prefix, *SPLIT, tokenizer=model) == 0
    other = prefix.with_name("other")
    assert run(source, other, *SPLIT, "--seed", "7", tokenizer=model) == 0
    assert split_texts(prefix, model) != split_texts(other, model)


def test_the_tokenizer_learns_from_the_training_part_alone(tmp_path: Path, prefix: Path) -> None:
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, *SPLIT) == 0
    train = texts(prefix, "train_text_document")
    alone = prefix.with_name("alone")
    assert run(write_jsonl(tmp_path, train), alone) == 0
    everything = prefix.with_name("everything")
    assert run(write_jsonl(tmp_path, DOCUMENTS), everything) == 0
    models = [Path(f"{path}.model").read_bytes() for path in (prefix, alone, everything)]
    assert models[0] == models[1] != models[2]


# What a run writes


def test_one_input_gives_one_result(tmp_path: Path, prefix: Path) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS + NASTY)
    assert run(source, prefix, *SPLIT) == 0
    again = tmp_path / "again" / prefix.name
    assert run(source, again, *SPLIT, "--workers", "3") == 0
    assert contents(prefix.parent) == contents(again.parent)
    assert len(contents(prefix.parent)) == 6


def test_the_meta_file_tells_what_was_made_and_names_no_path_of_this_machine(
    tmp_path: Path, prefix: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(from_folder(tmp_path / "sources"), prefix, *SPLIT) == 0
    text = Path(f"{prefix}_meta.json").read_text()
    assert str(tmp_path) not in text
    meta = json.loads(text)
    assert (meta["source"], meta["tokenizer_model"]) == ("sources", "corpus.model")
    printed = capsys.readouterr().out
    for name, split in meta["splits"].items():
        stored = tokens(f"{prefix}_{name}_text_document")
        size = sum(len(text.encode()) for text in texts(prefix, f"{name}_text_document"))
        assert split == {"documents": len(stored), "bytes": size, "tokens": sum(map(len, stored))}
        assert f"{split['documents']} documents, {split['tokens']:,} tokens" in printed


def test_megatron_trains_on_the_printed_flags(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.training.utils import get_blend_and_blend_per_split

    prefix = tmp_path / "my data" / "corpus"
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, *SPLIT) == 0
    found = re.search(r"flags +(.*)", capsys.readouterr().out)
    assert found
    args = megatron_arguments(found[1])
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    config = GPTDatasetConfig(
        random_seed=1,
        sequence_length=32,
        blend=blend,
        blend_per_split=blend_per_split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=True,
        path_to_cache=str(tmp_path / "cache"),
    )
    train, valid, test = BlendedMegatronDatasetBuilder(GPTDataset, [50, 10, 0], lambda: True, config).build()
    assert test is None and len(train) >= 50 and len(valid) >= 10
    assert args.padded_vocab_size == 512
    samples = [train[index] for index in range(50)]
    assert max(int(sample["tokens"].max()) for sample in samples) < VOCABULARY
    assert any((sample["tokens"] == 2).any() for sample in samples)
    assert all((sample["loss_mask"][sample["tokens"] == 2] == 0).all() for sample in samples)


def test_a_second_run_does_nothing(
    tmp_path: Path, prefix: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def state() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in prefix.parent.iterdir()}

    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run(source, prefix, tokenizer=model) == 0
    before = state()
    capsys.readouterr()
    assert run(source, prefix, "--workers", "2", tokenizer=model) == 0
    assert state() == before
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 and "nothing to do" in out and not err
    assert run(source, prefix, "--overwrite", tokenizer=model) == 0
    assert all(state()[name] > before[name] for name in before)


CHANGES = {
    "another split": lambda source, prefix: SPLIT,
    "another end": lambda source, prefix: ["--no-append-eod"],
    "another text": lambda source, prefix: write_jsonl(source.parent, DOCUMENTS[1:]) and [],
    "another order": lambda source, prefix: write_jsonl(source.parent, DOCUMENTS[::-1]) and [],
    "a cut file": lambda source, prefix: Path(f"{prefix}_text_document.bin").write_bytes(b"") or [],
    "a lost file": lambda source, prefix: Path(f"{prefix}_text_document.idx").unlink() or [],
    "no meta file": lambda source, prefix: Path(f"{prefix}_meta.json").unlink() or [],
    "a strange meta file": lambda source, prefix: Path(f"{prefix}_meta.json").write_text("[1") and [],
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_data_is_replaced_on_demand_only(
    change: str, tmp_path: Path, prefix: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run(source, prefix, tokenizer=model) == 0
    more = CHANGES[change](Path(source[1]), prefix)
    before = contents(prefix.parent)
    capsys.readouterr()
    assert run(source, prefix, *more, tokenizer=model) == 1
    said = capsys.readouterr().err
    assert "--overwrite" in said and said.count("\n") == 1
    assert contents(prefix.parent) == before
    if change == "another text":  # as a user of a script does
        subprocess.run(["bash", "-c", said[said.index("rm -r ") :]], check=True)
    assert run(source, prefix, *more, *(["--overwrite"] * (change != "another text")), tokenizer=model) == 0
    meta = json.loads(Path(f"{prefix}_meta.json").read_text())
    assert contents(prefix.parent).keys() == {*meta["files"], "corpus_meta.json"}  # nothing stale
    assert run(source, prefix, *more, tokenizer=model) == 0


def test_replacing_a_data_set_drops_what_megatron_has_noted_of_it(tmp_path: Path, prefix: Path, model: Path) -> None:
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, tokenizer=model) == 0
    cache = prefix.parent / "cache"
    cache.mkdir()
    notes = {"1a-GPTDataset-train": f"{prefix}_text_document", "2b-GPTDataset-train": f"{prefix}_other_text_document"}
    for name, path in notes.items():
        (cache / f"{name}-description.txt").write_text(json.dumps({"dataset_path": path}))
        (cache / f"{name}-document_index.npy").write_bytes(b"")
    assert run(write_jsonl(tmp_path, DOCUMENTS[:5]), prefix, "--overwrite", tokenizer=model) == 0
    assert {path.name[:2] for path in cache.iterdir()} == {"2b"}


def test_replacing_a_data_set_keeps_the_model_that_it_is_made_with(tmp_path: Path, prefix: Path, model: Path) -> None:
    prefix.parent.mkdir()
    own = Path(shutil.copy(model, f"{prefix}.model"))
    for _ in range(2):
        assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, "--overwrite", tokenizer=own) == 0
    assert own.read_bytes() == model.read_bytes()


@pytest.mark.parametrize("exception", [MemoryError, KeyboardInterrupt])
def test_an_encoding_interrupted_before_its_first_part_leaves_nothing(
    exception: type[BaseException], tmp_path: Path, prefix: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches = iter([[[1]] * encoding.BATCH_DOCUMENTS])

    def fails_on_the_second_batch(*_: object) -> list[list[int]]:
        ids = next(batches, None)
        if ids is None:
            raise exception
        return ids

    monkeypatch.setattr(text_tokenizer.SentencePiece, "encode", fails_on_the_second_batch)
    documents = [python_like(number) for number in range(2 * encoding.BATCH_DOCUMENTS)]
    with pytest.raises(exception):
        run(write_jsonl(tmp_path, documents), prefix, tokenizer=model)
    assert contents(prefix.parent) == {}


def test_a_full_disk_is_one_line_and_leaves_nothing(
    tmp_path: Path, prefix: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device", "data.bin")

    monkeypatch.setattr(text_tokenizer.SentencePiece, "encode", full)
    assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, tokenizer=model) == 1
    assert capsys.readouterr().err == "preprocess_data: error: data.bin: No space left on device\n"
    assert contents(prefix.parent) == {}


@pytest.mark.parametrize("moves", range(5))
def test_a_run_stopped_while_it_moves_files_does_not_look_whole(
    moves: int, tmp_path: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run(source, prefix) == 0
    replace, left = preprocess_data.os.replace, iter(range(moves))

    def stops(source: Path, target: Path) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(preprocess_data.os, "replace", stops)
        if moves < 4:
            with pytest.raises(KeyboardInterrupt):
                run(source, prefix, "--overwrite")
            assert not Path(f"{prefix}_meta.json").exists()
        else:
            assert run(source, prefix, "--overwrite") == 0
    assert run(source, prefix) == 0  # what lies there is its own: no --overwrite
    assert texts(prefix) == DOCUMENTS
    assert {path.name for path in prefix.parent.iterdir()} == {
        f"corpus{ending}" for ending in (".model", "_meta.json", "_text_document.bin", "_text_document.idx")
    }


# Bad input

BAD_INPUT: dict[str, tuple[list[str], str]] = {
    "no source": (["{train}"], "one of the arguments --input --hf-dataset --python-stdlib is required"),
    "two sources": (["--input", "good.jsonl", "--python-stdlib", "{train}"], "not allowed with argument"),
    "no tokenizer": (
        ["--input", "good.jsonl"],
        "one of the arguments --train-sentencepiece --sentencepiece-model --hf-tokenizer is required",
    ),
    "two tokenizers": (["--input", "good.jsonl", "{train}", "--sentencepiece-model", "x"], "not allowed with argument"),
    "share too large": (["--input", "good.jsonl", "{train}", "--validation-fraction", "1"], "1 is not between 0 and 1"),
    "no workers": (["--input", "good.jsonl", "{train}", "--workers", "0"], "--workers: 0 is not positive"),
    "no file": (["--input", "gone.jsonl", "{train}"], "gone.jsonl: no such file or folder"),
    "no match": (["--input", ".", "--glob", "*.c", "{train}"], "no file matches '*.c'"),
    "empty": (["--input", "empty.txt", "{train}"], "empty.txt: no text in it"),
    "latin": (["--input", "latin.txt", "{train}"], "latin.txt: not UTF-8 text at byte 3"),
    "no key": (["--input", "key.jsonl", "{train}"], "key.jsonl, line 3: no key 'text'"),
    "other key": (["--input", "good.jsonl", "--json-key", "body", "{train}"], "good.jsonl, line 1: no key 'body'"),
    "no object": (["--input", "list.jsonl", "{train}"], "list.jsonl, line 1: no key 'text'"),
    "not JSON": (["--input", "cut.jsonl", "{train}"], "cut.jsonl, line 2: not JSON"),
    "JSON in latin": (["--input", "latin.jsonl", "{train}"], "latin.jsonl, line 1: not JSON"),
    "a number": (["--input", "number.jsonl", "{train}"], "number.jsonl, line 1: 'text' is not text but int"),
    "surrogate": (["--input", "half.jsonl", "{train}"], "half.jsonl, line 1: 'text' holds half a surrogate pair"),
    "vocabulary too large": (
        ["--input", "good.jsonl", "--train-sentencepiece", "60000"],
        "60000: the vocabulary is too large for this corpus, which yields at most",
    ),
    "vocabulary too small": (["--input", "good.jsonl", "--train-sentencepiece", "100"], "which need at least"),
    "no model": (["--input", "good.jsonl", "--sentencepiece-model", "gone.model"], "gone.model: No such file"),
    "strange model": (["--input", "good.jsonl", "--sentencepiece-model", "latin.txt"], "not a SentencePiece model"),
    "empty model": (["--input", "good.jsonl", "--sentencepiece-model", "empty.txt"], "not a SentencePiece model"),
    "endless model": (["--input", "good.jsonl", "--sentencepiece-model", "endless.model"], "no end-of-sentence piece"),
    "no Hugging Face tokenizer": (["--input", "good.jsonl", "--hf-tokenizer", "./gone"], "--hf-tokenizer ./gone: "),
    "endless Hugging Face tokenizer": (["--input", "good.jsonl", "--hf-tokenizer", "endless"], "endless: no end-of"),
    "sparse Hugging Face tokenizer": (["--input", "good.jsonl", "--hf-tokenizer", "sparse"], "its ids go up to 999"),
    "empty split": (
        ["--input", "good.jsonl", "{train}", "--validation-fraction", "1e-9"],
        "the valid split got none of 40 documents",
    ),
    "no data set": (["--hf-dataset", "./gone", "{train}"], "--hf-dataset ./gone"),
    "no column": (["--hf-dataset", "saved", "--json-key", "body", "{train}"], "no column 'body' among ['text']"),
    "no split": (["--hf-dataset", "saved_splits", "--hf-split", "test", "{train}"], "split test: KeyError"),
    "null in a column": (["--hf-dataset", "saved", "{train}"], "saved, row 1: 'text' is not text but NoneType"),
}


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    datasets = pytest.importorskip("datasets")
    folder = tmp_path_factory.mktemp("bad")
    write_jsonl(folder, DOCUMENTS, "good.jsonl")
    files = {
        "empty.txt": b"",
        "latin.txt": b"caf\xe9",
        "key.jsonl": b'{"text": "a"}\n\n{"texts": "b"}\n',
        "list.jsonl": b'["text"]\n',
        "cut.jsonl": b'{"text": "a"}\n{"text": "b\n',
        "latin.jsonl": b'{"text": "caf\xe9"}\n',
        "number.jsonl": b'{"text": 1}\n',
        "half.jsonl": b'{"text": "\\ud800"}\n',
    }
    for name, data in files.items():
        (folder / name).write_bytes(data)
    foreign_model(folder / "endless.model", eos_id=-1)
    hf_tokenizer(folder / "endless", eos_token=None)
    path = hf_tokenizer(folder / "sparse") / "tokenizer.json"
    rules = json.loads(path.read_text())
    rules["model"]["vocab"]["unheard"] = 999
    path.write_text(json.dumps(rules))
    rows = datasets.Dataset.from_dict({"text": ["a", None]})
    rows.save_to_disk(folder / "saved")
    datasets.DatasetDict({"train": rows}).save_to_disk(folder / "saved_splits")
    return folder


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input_is_one_clear_line(
    case: str, bad_files: Path, prefix: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(bad_files)
    arguments, message = BAD_INPUT[case]
    train = ["--train-sentencepiece", str(VOCABULARY)]
    arguments = [word for argument in arguments for word in (train if argument == "{train}" else [argument])]
    try:
        status = preprocess_data.main([*arguments, "--output-prefix", str(prefix)])
    except SystemExit as stop:
        status = stop.code
    out, err = capfd.readouterr()
    # A vocabulary's size is known to be wrong only after its training has been announced.
    lines = [line for line in err.splitlines() if not line.startswith("Training SentencePiece on")]
    assert status in (1, 2) and not out
    assert len(lines) == 1 and lines[0].startswith("preprocess_data: error: ") and message in lines[0]
    assert contents(prefix.parent) == {}


def test_the_script_ends_with_a_status_and_no_traceback(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--input", "gone", "--train-sentencepiece", "300", "--output-prefix", "x"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "preprocess_data: error: gone: no such file or folder\n"
