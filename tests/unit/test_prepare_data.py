"""Hugging Face tokenizers, a run that is killed and goes on, and ``scripts/prepare_openwebtext.sh``."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_preprocess_data import (
    DOCUMENTS,
    NASTY,
    SPLIT,
    VOCABULARY,
    build_tokenizer,
    contents,
    hf_tokenizer,
    megatron_arguments,
    python_like,
    tokens,
    write_jsonl,
)
from tests.unit.test_preprocess_data import run as run_with_sentencepiece
from tools import preprocess_data
from tools.data import encoding
from tools.data.parts import Parts
from tools.data.text_tokenizer import HuggingFace

pytest.importorskip("transformers")
REPOSITORY = Path(preprocess_data.__file__).parents[1]
CORPUS = [python_like(number) for number in range(600)] + NASTY


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    return tmp_path / "out" / "corpus"


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_tokenizer(tmp_path_factory.mktemp("bpe") / "small")


def run(source: list[str], prefix: Path, bpe: Path, *more: str) -> int:
    return preprocess_data.main([*source, "--hf-tokenizer", str(bpe), "--output-prefix", str(prefix), *more])


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# Hugging Face tokenizers


def test_megatron_agrees_on_tokens_eod_and_vocabulary(
    tmp_path: Path, prefix: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    documents = DOCUMENTS + NASTY
    assert run(write_jsonl(tmp_path, documents), prefix, bpe) == 0
    flags = capsys.readouterr().out.split("flags")[1]
    assert f"--tokenizer-type HuggingFaceTokenizer --tokenizer-model {prefix}_tokenizer " in flags
    arguments = megatron_arguments(flags)
    tokenizer: Any = build_tokenizer(arguments)
    assert arguments.padded_vocab_size == 512
    meta = json.loads(Path(f"{prefix}_meta.json").read_text())
    assert (meta["eod"], meta["vocabulary_size"]) == (tokenizer.eod, tokenizer.vocab_size)
    for text, ids in zip(documents, tokens(f"{prefix}_text_document"), strict=True):
        assert ids.tolist() == [*tokenizer.tokenize(text), tokenizer.eod]
        assert tokenizer.detokenize(ids[:-1].tolist()) == text
    assert str(tmp_path) not in "".join(path.read_text() for path in prefix.parent.rglob("*.json"))


def test_a_special_token_in_the_text_ends_no_document(tmp_path: Path, prefix: Path, bpe: Path) -> None:
    assert run(write_jsonl(tmp_path, ["before <|endoftext|> after"]), prefix, bpe) == 0
    (ids,) = tokens(f"{prefix}_text_document")
    assert ids.tolist().count(0) == 1 and ids[-1] == 0


def test_a_tokenizer_that_adds_tokens_to_every_text_adds_none(tmp_path: Path, prefix: Path, bpe: Path) -> None:
    adds = Path(shutil.copytree(bpe, tmp_path / "adds"))
    rules = json.loads((adds / "tokenizer.json").read_text())
    first = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    one = [first, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    rules["post_processor"] = {"type": "TemplateProcessing", "single": one, "pair": one, "special_tokens": special}
    (adds / "tokenizer.json").write_text(json.dumps(rules))
    # GPT2Tokenizer would rebuild the rules; the plain class reads them as they are.
    config = json.loads((adds / "tokenizer_config.json").read_text())
    (adds / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "PreTrainedTokenizerFast"}))
    assert HuggingFace(str(adds))._tokenizer("a").input_ids[0] == 0
    assert run(write_jsonl(tmp_path, ["text"]), prefix, adds) == 0
    (ids,) = tokens(f"{prefix}_text_document")
    assert ids.tolist().count(0) == 1 and ids[-1] == 0


def test_the_saved_tokenizer_is_the_same_one(tmp_path: Path, prefix: Path, bpe: Path) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run(source, prefix, bpe) == 0
    saved = Path(f"{prefix}_tokenizer")
    one, other = HuggingFace(str(bpe)), HuggingFace(str(saved))
    assert (one.identity, one.meaning) == (other.identity, other.meaning)
    # The data set can be made again with what lies beside it, which then stays.
    before = snapshot(saved)
    assert run(source, prefix, saved, "--overwrite") == 0
    assert snapshot(saved) == before


@pytest.mark.parametrize("change", ["vocabulary", "end", "rules"])
def test_identity_and_meaning_follow_the_content(change: str, tmp_path: Path, bpe: Path) -> None:
    other = Path(shutil.copytree(bpe, tmp_path / "other"))
    for name, was, becomes in {
        "vocabulary": [("tokenizer.json", '"!": 1', '"!": 2'), ("tokenizer.json", '"\\"": 2', '"\\"": 1')],
        "end": [("tokenizer_config.json", '"eos_token": "<|endoftext|>"', '"eos_token": "!"')],
        "rules": [("tokenizer_config.json", '"add_prefix_space": false', '"add_prefix_space": true')],
    }[change]:
        text = (other / name).read_text()
        assert text.count(was) == 1
        (other / name).write_text(text.replace(was, becomes))
    one, two = HuggingFace(str(bpe)), HuggingFace(str(other))
    assert one.identity != two.identity
    assert (one.meaning != two.meaning) == (change != "rules")


def test_another_tokenizer_replaces_data_on_demand_only(
    tmp_path: Path, prefix: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_jsonl(tmp_path, DOCUMENTS)
    assert run_with_sentencepiece(source, prefix) == 0
    assert run(source, prefix, bpe) == 1
    assert "--overwrite" in capsys.readouterr().err
    assert run(source, prefix, bpe, "--overwrite") == 0
    assert not Path(f"{prefix}.model").exists()
    capsys.readouterr()
    assert run(source, prefix, bpe) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert run_with_sentencepiece(source, prefix, "--overwrite") == 0
    assert not Path(f"{prefix}_tokenizer").exists()


# An interrupted run goes on


@pytest.mark.parametrize("change", ["text", "arguments", "a cut part", "a lost part", "half a JSON file"])
def test_parts_that_do_not_fit_are_made_again(
    change: str,
    tmp_path: Path,
    prefix: Path,
    bpe: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(encoding, "PART_BYTES", 60_000)
    monkeypatch.setattr(encoding, "BATCH_DOCUMENTS", 16)
    source = write_jsonl(tmp_path, CORPUS)
    with monkeypatch.context() as patch:
        encode, left = HuggingFace.encode, iter(range(30))
        patch.setattr(HuggingFace, "encode", lambda *texts: next(left) is not None and encode(*texts))
        with pytest.raises(RuntimeError):  # from the end of ``left``
            run(source, prefix, bpe, *SPLIT)
    parts = prefix.parent / ".corpus-parts"
    assert {path.name for path in parts.glob("*.json")} == {"recipe.json", "00000.json", "00001.json"}
    more: list[str] = []
    if change == "text":
        source = write_jsonl(tmp_path, CORPUS[1:])
    elif change == "arguments":
        more = ["--no-append-eod"]
    elif change == "a cut part":
        (parts / "00001_train.bin").write_bytes(b"cut")
    elif change == "a lost part":
        (parts / "00001_train.idx").unlink()
    else:
        (parts / "00001.json").write_text('{"documents": 16')
    capsys.readouterr()
    assert run(source, prefix, bpe, *SPLIT, *more) == 0
    told = capsys.readouterr().err
    assert ("of other arguments or another source, discarded" in told) == (change in ("text", "arguments"))
    straight = tmp_path / "straight" / prefix.name
    assert run(source, straight, bpe, *SPLIT, *more) == 0
    assert snapshot(prefix.parent) == snapshot(straight.parent)


def test_two_runs_at_once_do_not_write_one_data_set(
    tmp_path: Path, prefix: Path, bpe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Parts(prefix.parent / ".corpus-parts", {}):
        assert run(write_jsonl(tmp_path, DOCUMENTS), prefix, bpe) == 1
        assert "another run is writing this data set" in capsys.readouterr().err
    assert contents(prefix.parent) == {}


# The script, in a stand-in for the repository. Its interpreter is the one of the tests, with small parts, and kills
# itself in the third one if asked.

INTERPRETER = """
import os, signal, sys
from itertools import islice
from tools import preprocess_data
from tools.data import encoding
from tools.data.parts import Parts
encoding.PART_BYTES, encoding.BATCH_DOCUMENTS = 60_000, 16
write = Parts.write
def dies(parts, documents, vocabulary_size):
    def some():
        yield from islice(documents, 10)
        os.kill(os.getpid(), signal.SIGKILL)
    die = "DIES" in os.environ and len(parts._finished) == 2
    return write(parts, some() if die else documents, vocabulary_size)
Parts.write = dies
sys.exit(preprocess_data.main(sys.argv[2:]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    (folder / "scripts").mkdir(parents=True)
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / "scripts" / "setup_env.sh").write_text("")
    (folder / "interpreter.py").write_text(INTERPRETER)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{folder}/interpreter.py" "$@"\n')
    python.chmod(0o755)
    return Path(shutil.copy(REPOSITORY / "scripts" / "prepare_openwebtext.sh", folder / "scripts"))


def prepare(script: Path, folder: Path, *more: str, **environment: str) -> subprocess.CompletedProcess[str]:
    cache = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(REPOSITORY)}
    return subprocess.run(
        ["bash", str(script), *more],
        cwd=folder,
        env={**os.environ, **cache, **environment},
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("kind", ["hf", "sentencepiece"])
def test_the_script_is_killed_and_goes_on_to_the_same_bits(
    kind: str, script: Path, tmp_path: Path, bpe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    datasets.Dataset.from_dict({"text": CORPUS}).to_parquet(tmp_path / "web.parquet")
    tokenizer = str(bpe) if kind == "hf" else "sentencepiece"
    more = ["--validation-fraction", "0.1"]
    known = ["--hf-tokenizer", str(bpe)] if kind == "hf" else []
    if kind == "sentencepiece":
        more += ["--train-sentencepiece", str(VOCABULARY)]
    environment = {"HF_DATASET": "web.parquet", "TOKENIZER": tokenizer, "DATA": "killed/web"}
    killed = prepare(script, tmp_path, *more, **environment, DIES="yes")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    parts = tmp_path / "killed" / ".web-parts"
    assert list((tmp_path / "killed").iterdir()) == [parts]
    assert {path.name for path in parts.glob("*.json")} == {"recipe.json", "00000.json", "00001.json"}
    done = prepare(script, tmp_path, *more, **environment)
    assert done.returncode == 0, done.stderr
    assert "going on after" in done.stderr and "Training SentencePiece" not in done.stderr
    straight = [*known, "--output-prefix", str(tmp_path / "straight" / "web"), *more]
    assert preprocess_data.main(["--hf-dataset", str(tmp_path / "web.parquet"), *straight]) == 0  # in one part
    assert snapshot(tmp_path / "killed") == snapshot(tmp_path / "straight")
    meta = json.loads((tmp_path / "killed" / "web_meta.json").read_text())
    assert meta["splits"]["train"]["documents"] + meta["splits"]["valid"]["documents"] == len(CORPUS)


def test_the_script_without_settings_asks_for_openwebtext_and_gpt2(script: Path, tmp_path: Path) -> None:
    (script.parents[1] / "interpreter.py").write_text("import sys\nprint(*sys.argv[2:], sep='\\n')\n")
    assert prepare(script, tmp_path, "--workers", "3").stdout.splitlines() == [
        *["--hf-dataset", "Skylion007/openwebtext", "--hf-tokenizer", "gpt2", "--validation-fraction", "0.0005"],
        *["--output-prefix", str(script.parents[1] / "runs/data/openwebtext"), "--workers", "3"],
    ]
