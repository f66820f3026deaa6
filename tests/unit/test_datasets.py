"""A run with another tokenizer than its data's is refused; data that tells nothing of its tokenizer is not checked."""

import json
import shutil
import sys
from pathlib import Path

import pytest
from megatron.core.datasets import utils

from edgc.config import ConfigError
from megatron.edgc.recipes import datasets
from megatron.edgc.recipes.datasets import check_datasets
from tests.unit.test_preprocess_data import DOCUMENTS, SPLIT, hf_tokenizer, megatron_arguments, run, write_jsonl
from tools import preprocess_data

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prefixes sp, hf and whole (not split), with other tokenizers other.model and other_bpe beside them."""
    folder = tmp_path_factory.mktemp("data")
    source = write_jsonl(folder, DOCUMENTS)
    assert run(source, folder / "sp", *SPLIT) == 0
    assert run(source, folder / "whole", tokenizer=folder / "sp.model") == 0
    bpe = ["--hf-tokenizer", str(hf_tokenizer(folder / "bpe"))]
    assert preprocess_data.main([*source, *bpe, *SPLIT, "--output-prefix", str(folder / "hf")]) == 0
    assert run(write_jsonl(folder, DOCUMENTS[:30], "less.jsonl"), folder / "other") == 0
    hf_tokenizer(folder / "other_bpe", size=300)
    for name in ("bpe", "other_bpe"):
        vocabulary = json.loads((folder / name / "tokenizer.json").read_text())["model"]["vocab"]
        (folder / f"{name}-vocab.json").write_text(json.dumps(vocabulary))
    return folder


SP = "--tokenizer-type SentencePieceTokenizer --tokenizer-model"
HF = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
RIGHT = {
    "sp": f"{SP} sp.model",
    "sp under another name": f"{SP} copy.model",
    "sp as Llama2Tokenizer": "--tokenizer-type Llama2Tokenizer --tokenizer-model sp.model",
    "hf": f"{HF} hf_tokenizer",
    "hf where it came from": f"{HF} bpe",
    "hf as GPT2BPETokenizer": "--tokenizer-type GPT2BPETokenizer --vocab-file bpe-vocab.json",
    "whole": f"{SP} sp.model",
}
WRONG = {
    "sp": f"{SP} other.model",
    "sp with hf": f"{HF} hf_tokenizer",
    "sp with none": "--tokenizer-type NullTokenizer",
    "sp with no model": "--tokenizer-type SentencePieceTokenizer",
    "hf": f"{HF} other_bpe",
    "hf with sp": f"{SP} sp.model",
    "hf with GPT2BPETokenizer": "--tokenizer-type GPT2BPETokenizer --vocab-file other_bpe-vocab.json",
    "whole": f"{SP} other.model",
}
ENCODED = {
    "sp": "SentencePieceTokenizer sp.model",
    "hf": "HuggingFaceTokenizer hf_tokenizer",
    "whole": "SentencePieceTokenizer sp.model",
}


def check(data: Path, name: str, tokenizer: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(data)
    paths = f"--train-data-path {name}_train_text_document --valid-data-path {name}_valid_text_document"
    check_datasets(megatron_arguments(f"{tokenizer} {'--data-path whole_text_document' if name == 'whole' else paths}"))


@pytest.mark.parametrize("case", RIGHT)
def test_the_tokenizer_of_the_data_passes(case: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(data / "sp.model", data / "copy.model")
    check(data, case.split()[0], RIGHT[case], monkeypatch)


@pytest.mark.parametrize("case", WRONG)
def test_another_tokenizer_is_refused_by_name(case: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = case.split()[0]
    with pytest.raises(ConfigError) as refused:
        check(data, name, WRONG[case], monkeypatch)
    message = str(refused.value)
    assert f"encoded with {ENCODED[name]}, but {WRONG[case]} is another tokenizer" in message
    assert "\n" not in message


@pytest.mark.parametrize("model", ["gone.model", "gone_tokenizer"])
def test_a_missing_tokenizer_is_one_line(model: str, data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = f"{SP if model.endswith('.model') else HF} ./{model}"
    with pytest.raises(ConfigError) as refused:
        check(data, "sp", flags, monkeypatch)
    assert str(refused.value).startswith(f"{flags}: ") and "\n" not in str(refused.value)


@pytest.mark.parametrize("change", ["no meta file", "an old one", "a strange one", "of other files"])
def test_data_of_unknown_tokenizer_is_not_checked(
    change: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = Path(shutil.copytree(data, tmp_path / "data"))
    path = copy / "sp_meta.json"
    meta = json.loads(path.read_text())
    if change == "no meta file":
        path.unlink()
    elif change == "an old one":
        del meta["tokenizer_hash"]
        path.write_text(json.dumps(meta))
    elif change == "a strange one":
        path.write_text("[1]")
    else:
        for name in ("train", "valid"):
            with (copy / f"sp_{name}_text_document.bin").open("ab") as file:
                file.write(b"more")
    check(copy, "sp", f"{SP} other.model", monkeypatch)


def test_the_wheels_own_index_builder_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Megatron would call make, whose makefile the wheel lacks, and end the process."""
    monkeypatch.setattr(utils, "compile_helpers", compile_helpers := lambda: None)
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "megatron.core.datasets.helpers_cpp", None)
        datasets.use_built_helpers()
    assert utils.compile_helpers is compile_helpers, "an installation without one compiles it"
    monkeypatch.setattr(utils, "compile_helpers", lambda: pytest.fail("make was called"))
    datasets.use_built_helpers()
    utils.compile_helpers()
