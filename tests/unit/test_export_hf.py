"""Megatron's weights under GPT-2's names: layout, padding, tokenizer, and what is refused."""

import errno
import random
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core.fusions.fused_bias_gelu import bias_gelu
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from torch import Tensor
from torch.nn.functional import gelu
from transformers import AutoTokenizer, GPT2LMHeadModel, GPT2Tokenizer
from transformers.activations import ACT2FN

from tools import export_hf, preprocess_data
from tools._root import REPOSITORY
from tools.export import tokenizer as export_tokenizer
from tools.export.checkpoint import Checkpoint, ExportError, _chunks, iteration_folder, read
from tools.export.gpt2 import (
    GPT2_ARGUMENTS,
    activation,
    blocks,
    check_arguments,
    gpt2,
    gpt2_weights,
    padding_doubt,
)


def test_chunks_of_a_virtual_pipeline_come_in_their_order() -> None:
    state = {f"model{chunk}": {f"decoder.layers.{chunk}.weight": torch.zeros(1)} for chunk in (10, 2, 0, 1, 11)}
    assert [next(iter(chunk)) for chunk in _chunks(state)] == [
        f"decoder.layers.{chunk}.weight" for chunk in (0, 1, 2, 10, 11)
    ]


HIDDEN, HEADS, LAYERS, ROWS, PIECES = 16, 4, 3, 512, 400


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SentencePiece model of the kind that this repository trains."""
    prefix = tmp_path_factory.mktemp("tokenizer") / "text"
    source = ["--input", str(REPOSITORY / "README.md"), str(Path(export_hf.__file__))]
    assert preprocess_data.main([*source, "--train-sentencepiece", str(PIECES), "--output-prefix", str(prefix)]) == 0
    return Path(f"{prefix}.model")


def arguments(model: Path | str = "", **changes: Any) -> Namespace:
    """Those that Megatron saves, as far as they are read."""
    plain: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "ffn_hidden_size": 24,
        "num_attention_heads": HEADS,
        "kv_channels": HIDDEN // HEADS,
        "group_query_attention": False,
        "num_query_groups": HEADS,
        "seq_length": 8,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "layernorm_epsilon": 1e-5,
        "untie_embeddings_and_output_weights": False,
        "bias_gelu_fusion": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "make_vocab_size_divisible_by": 128,
        "tokenizer_type": "SentencePieceTokenizer",
        "tokenizer_model": str(model),
        "tokenizer_sentencepiece_legacy": False,
        "tokenizer_sentencepiece_ignore_extra_whitespaces": True,
        "vocab_file": None,
        "merge_file": None,
        **{name: wanted for name, (wanted, _) in GPT2_ARGUMENTS.items()},
    }
    return Namespace(**plain | changes)


def weights(args: Namespace) -> dict[str, Tensor]:
    """Random ones, by the names of Megatron's local layers."""
    torch.manual_seed(1)
    h, f = args.hidden_size, args.ffn_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (ROWS, h),
        "embedding.position_embeddings.weight": (args.seq_length + 2, h),
        "decoder.final_layernorm.weight": (h,),
        "decoder.final_layernorm.bias": (h,),
    }
    for layer in range(args.num_layers):
        for name, shape in {
            **dict.fromkeys(("input_layernorm.weight", "input_layernorm.bias"), (h,)),
            **dict.fromkeys(("pre_mlp_layernorm.weight", "pre_mlp_layernorm.bias"), (h,)),
            **{"self_attention.linear_qkv.weight": (3 * h, h), "self_attention.linear_qkv.bias": (3 * h,)},
            **{"self_attention.linear_proj.weight": (h, h), "self_attention.linear_proj.bias": (h,)},
            **{"mlp.linear_fc1.weight": (f, h), "mlp.linear_fc1.bias": (f,)},
            **{"mlp.linear_fc2.weight": (h, f), "mlp.linear_fc2.bias": (h,)},
        }.items():
            shapes[f"decoder.layers.{layer}.{name}"] = shape
    if args.untie_embeddings_and_output_weights:
        shapes["output_layer.weight"] = (ROWS, h)
    return {name: torch.randn(shape) for name, shape in shapes.items()}


def checkpoint(**changes: Any) -> Checkpoint:
    args = arguments(**changes)
    return Checkpoint(Path("iter_0000003"), "torch", args, weights(args))


def save(folder: Path, args: Namespace, ranks: dict[str, dict[str, dict[str, Tensor]]]) -> Path:
    """A checkpoint in the format ``torch``: by rank, the state of each model chunk."""
    for rank, chunks in ranks.items():
        (folder / "iter_0000003" / rank).mkdir(parents=True)
        torch.save({"args": args, **chunks}, folder / "iter_0000003" / rank / "model_optim_rng.pt")
    (folder / "latest_checkpointed_iteration.txt").write_text("3")
    return folder


# Weights


def test_queries_keys_and_values_are_those_of_megatrons_heads() -> None:
    torch.manual_seed(1)
    weight, bias, x = torch.randn(3 * HIDDEN, HIDDEN), torch.randn(3 * HIDDEN), torch.randn(5, HIDDEN)
    # Megatron splits each head's part of the projection
    theirs = (x @ weight.t() + bias).view(5, HEADS, 3 * HIDDEN // HEADS).split(HIDDEN // HEADS, dim=2)
    # GPT-2 splits the projection, then each part into heads
    ours = (x @ blocks(weight, HEADS).t() + blocks(bias, HEADS)).split(HIDDEN, dim=1)
    for part, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(part.view(5, HEADS, -1), expected)


def test_every_parameter_of_gpt2_is_set_and_linear_weights_are_transposed(model: Path) -> None:
    made = checkpoint()
    tokenizer = export_tokenizer.from_sentencepiece(model)
    gpt = gpt2(made, tokenizer)
    assert not any(parameter.is_meta for parameter in gpt.parameters())
    first = made.tensors["decoder.layers.1.mlp.linear_fc1.weight"]
    assert torch.equal(gpt.transformer.h[1].mlp.c_fc.weight, first.t())
    assert gpt.lm_head.weight is gpt.transformer.wte.weight
    assert gpt.transformer.wpe.weight.shape == (8, HIDDEN)


def test_fused_and_local_layer_norms_are_the_same() -> None:
    local = checkpoint()
    fused = {
        name.replace("input_layernorm.", "self_attention.linear_qkv.layer_norm_").replace(
            "pre_mlp_layernorm.", "mlp.linear_fc1.layer_norm_"
        ): tensor
        for name, tensor in local.tensors.items()
    }
    assert fused.keys() != local.tensors.keys()
    ours = gpt2_weights(Checkpoint(local.folder, "torch_dist", local.args, fused), PIECES)
    for name, tensor in gpt2_weights(local, PIECES).items():
        assert torch.equal(ours[name], tensor), name


@pytest.mark.parametrize("untie", [False, True])
def test_rows_of_padding_are_left_out(untie: bool, model: Path) -> None:
    made = checkpoint(untie_embeddings_and_output_weights=untie)
    state = gpt2(made, export_tokenizer.from_sentencepiece(model)).state_dict()
    output = "output_layer.weight" if untie else "embedding.word_embeddings.weight"
    assert torch.equal(state["transformer.wte.weight"], made.tensors["embedding.word_embeddings.weight"][:PIECES])
    assert torch.equal(state["lm_head.weight"], made.tensors[output][:PIECES])


def test_half_precision_becomes_fp32(model: Path) -> None:
    made = checkpoint()
    half = {name: tensor.bfloat16() for name, tensor in made.tensors.items()}
    state = gpt2_weights(Checkpoint(made.folder, "torch", made.args, half), PIECES)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}


def test_a_tokenizer_that_does_not_fit_is_noticed(model: Path) -> None:
    made = checkpoint()
    made.tensors["embedding.word_embeddings.weight"] = torch.randn(256, HIDDEN)
    with pytest.raises(ExportError, match="tokenizer has 400 tokens, the model 256"):
        gpt2(made, export_tokenizer.from_sentencepiece(model))
    assert padding_doubt(checkpoint(), 400) is None
    assert padding_doubt(checkpoint(), 512) is None
    assert "400 tokens and the model 512 rows" in str(padding_doubt(checkpoint(make_vocab_size_divisible_by=8), 400))


def test_the_activation_is_megatrons() -> None:
    x = torch.linspace(-4, 4, 101)
    assert activation(arguments()) == "gelu"
    torch.testing.assert_close(ACT2FN["gelu"](x), gelu(x), atol=1e-6, rtol=0)
    assert activation(arguments(bias_gelu_fusion=True)) == "gelu_new"
    torch.testing.assert_close(ACT2FN["gelu_new"](x), bias_gelu(torch.zeros(101), x), atol=1e-6, rtol=0)
    assert (ACT2FN["gelu"](x) - ACT2FN["gelu_new"](x)).abs().max() > 1e-4
    assert activation(arguments(use_te_activation_func=True)) == "gelu_new"


# Refusals


@pytest.mark.parametrize(
    ("changes", "flags"),
    [
        ({"swiglu": True}, "--swiglu"),
        ({"position_embedding_type": "rope", "normalization": "RMSNorm"}, "RMSNorm, --position-embedding-type rope"),
        ({"group_query_attention": True, "num_query_groups": 2}, "--num-query-groups 2"),
        ({"num_experts": 4}, "--num-experts 4"),
        ({"add_bias_linear": False}, "--disable-bias-linear"),
        ({"add_position_embedding": False}, "--no-position-embedding"),
        ({"kv_channels": 8}, "--kv-channels 8"),
        ({"window_size": (4, 0)}, "--window-size"),
        ({"layernorm_zero_centered_gamma": True}, "--apply-layernorm-1p"),
    ],
)
def test_what_gpt2_lacks_is_refused_by_flag(changes: dict[str, Any], flags: str) -> None:
    check_arguments(arguments())
    with pytest.raises(ExportError) as refused:
        check_arguments(arguments(**changes))
    assert flags in str(refused.value) and "\n" not in str(refused.value)


def test_weights_of_another_model_are_refused(model: Path) -> None:
    tokenizer = export_tokenizer.from_sentencepiece(model)
    more, less = checkpoint(), checkpoint()
    more.tensors["decoder.layers.0.self_attention.q_layernorm.weight"] = torch.ones(4)
    with pytest.raises(ExportError, match=r"GPT-2 has no decoder.layers.0.self_attention.q_layernorm.weight"):
        gpt2(more, tokenizer)
    del less.tensors["decoder.layers.2.mlp.linear_fc2.bias"]
    with pytest.raises(ExportError, match=r"Missing key.*transformer.h.2.mlp.c_proj.bias"):
        gpt2(less, tokenizer)


# Checkpoints in the format torch; torch_dist is in tests/distributed/test_export.py


def test_uneven_pipeline_stages_and_wrapped_names_are_joined_in_order(tmp_path: Path) -> None:
    args = arguments(pipeline_model_parallel_size=2)
    whole = weights(args)
    first = {name: tensor for name, tensor in whole.items() if ".layers.0." in name or name.startswith("embedding")}
    last = {name: tensor for name, tensor in whole.items() if name not in first}
    for number in (1, 2):
        last = {name.replace(f".layers.{number}.", f".layers.{number - 1}."): part for name, part in last.items()}
    wrapped = {f"module.{name}": tensor for name, tensor in last.items()}
    extra = {"decoder.layers.0.mlp.linear_fc1._extra_state": torch.zeros(3)}
    ranks = {"mp_rank_00_000": {"model": first | extra}, "mp_rank_00_001": {"model": wrapped}}
    found = read(iteration_folder(save(tmp_path, args, ranks), None))
    assert found.format == "torch" and found.tensors.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found.tensors[name], tensor), name


def saved(folder: Path, args: Namespace | None = None) -> Path:
    args = args or arguments()
    return save(folder / "run", args, {"mp_rank_00": {"model": weights(args)}})


def damaged(folder: Path, how: str) -> Path:
    run = saved(folder)
    file = run / "iter_0000003" / "mp_rank_00" / "model_optim_rng.pt"
    if how == "no tracker":
        (run / "latest_checkpointed_iteration.txt").unlink()
    elif how == "torn tracker":
        (run / "latest_checkpointed_iteration.txt").write_text("")
    elif how == "no iteration":
        shutil.rmtree(run / "iter_0000003")
    elif how == "no rank":
        file.unlink()
    elif how == "cut short":
        file.write_bytes(file.read_bytes()[:2000])
    elif how == "no arguments":
        torch.save({"model": {}}, file)
    elif how == "code":
        torch.save({"args": arguments(), "model": {}, "optimizer": Trap()}, file)
    elif how == "layers":
        torch.save({"args": arguments(num_layers=4), "model": weights(arguments())}, file)
    elif how == "another format":
        (run / "iter_0000003" / "metadata.json").write_text('{"sharded_backend": "zarr"}')
    elif how == "torch_dist cut short":
        (run / "iter_0000003" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return run


class Trap:
    """Would run code where it is unpickled."""

    def __reduce__(self) -> Any:
        return (print, ("unpickled",))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("no tracker", "no latest_checkpointed_iteration.txt"),
        ("torn tracker", "names no iteration"),
        ("no iteration", "there is no such checkpoint"),
        ("no rank", "model_optim_rng.pt: is missing"),
        ("cut short", "is damaged or cut short"),
        ("no arguments", "holds no Megatron arguments"),
        ("code", "is damaged or cut short: UnpicklingError"),
        ("layers", "holds 3 layers, its arguments say 4"),
        ("another format", "zarr: not a format that can be exported"),
        ("torch_dist cut short", "is damaged or incomplete"),
    ],
)
def test_a_damaged_checkpoint_is_refused_in_one_line(
    how: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "hf"
    assert export_hf.main(["--load", str(damaged(tmp_path, how)), "--output", str(output)]) == 1
    shown = capfd.readouterr()
    (line,) = [line for line in shown.err.splitlines() if line.startswith("export_hf")]
    assert line.startswith("export_hf: error: ") and message in line
    assert "unpickled" not in shown.out and not output.exists()


def test_an_export_is_replaced_only_when_asked_and_nothing_else_ever(
    tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = saved(tmp_path, arguments("elsewhere.model"))
    command = ["--load", str(run), "--output", str(tmp_path / "hf"), "--tokenizer-model", str(model)]
    assert export_hf.main(command[:-2]) == 1
    assert "no file elsewhere.model; see --tokenizer-model" in capfd.readouterr().err
    assert export_hf.main(command) == 0
    assert GPT2LMHeadModel.from_pretrained(tmp_path / "hf").config.vocab_size == PIECES
    assert AutoTokenizer.from_pretrained(tmp_path / "hf").model_max_length == 8
    assert export_hf.main(command) == 1
    assert export_hf.main([*command, "--overwrite"]) == 0
    assert export_hf.main(["--load", str(run), "--output", str(run), "--overwrite"]) == 1
    assert "is no export of this tool" in capfd.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hf", "run"]


# Tokenizers


def test_sentencepiece_ids_are_kept_through_saving_and_loading(model: Path, tmp_path: Path) -> None:
    processor = SentencePieceProcessor(model_file=str(model))
    export_tokenizer.from_sentencepiece(model).save_pretrained(tmp_path)
    fast = AutoTokenizer.from_pretrained(tmp_path)
    assert fast.bos_token_id == fast.eos_token_id == processor.eos_id()
    parts = [" ", "  ", "    ", "\n", "\t", "\r\n", "e", "th", "self", ".", "=", "--", "\u00e9", "\u6f22", "\U0001f916"]
    pick = random.Random(1)
    texts = ["".join(pick.choices(parts, k=30)) for _ in range(300)]
    texts += [*export_tokenizer.SAMPLES, Path(__file__).read_text()]
    for text in texts:
        ids = processor.encode(text)
        assert fast(text)["input_ids"] == ids, text
        assert fast.decode(ids) == processor.decode(ids), text


def train_sentencepiece(prefix: Path, kind: str) -> Path:
    """Normalisation, a space put in front and extra spaces taken away are SentencePiece's defaults."""
    lines = iter((REPOSITORY / "README.md").read_text().splitlines())
    SentencePieceTrainer.train(
        sentence_iterator=lines, model_prefix=str(prefix), model_type=kind, vocab_size=400, minloglevel=2
    )
    return Path(f"{prefix}.model")


def test_a_sentencepiece_model_of_default_settings_keeps_its_ids(tmp_path: Path) -> None:
    path = train_sentencepiece(tmp_path / "default", "bpe")
    processor, fast = SentencePieceProcessor(model_file=str(path)), export_tokenizer.from_sentencepiece(path)
    for line in (REPOSITORY / "README.md").read_text().splitlines():
        assert fast(line)["input_ids"] == processor.encode(line)


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="not a BPE model"):
        export_tokenizer.from_sentencepiece(train_sentencepiece(tmp_path / "unigram", "unigram"))


def test_a_tokenizer_that_gives_other_ids_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merges = export_tokenizer._merges
    monkeypatch.setattr(export_tokenizer, "_merges", lambda proto: merges(proto)[::-1])
    with pytest.raises(ExportError, match="gives other ids, so it is not exported"):
        export_tokenizer.from_sentencepiece(model)


@pytest.mark.parametrize("content", [b"", b"no model", b"\x08\x96\x01"])
def test_a_file_that_is_no_sentencepiece_model_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "no.model").write_bytes(content)
    with pytest.raises(ExportError, match="not a SentencePiece model"):
        export_tokenizer.from_sentencepiece(tmp_path / "no.model")


@pytest.fixture
def gpt2_files(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "vocab.json").write_text('{"a": 0, "b": 1, "ab": 2, "\u0120": 3, "<|endoftext|>": 4}')
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b\n")
    return {"vocab_file": str(tmp_path / "vocab.json"), "merge_file": str(tmp_path / "merges.txt")}


def test_gpt2s_own_tokenizer_comes_from_its_two_files(gpt2_files: dict[str, str]) -> None:
    tokenizer = export_tokenizer.build_tokenizer(arguments(tokenizer_type="GPT2BPETokenizer", **gpt2_files), None)
    assert tokenizer("ab b<|endoftext|>")["input_ids"] == [2, 3, 1, 4]
    assert len(tokenizer) == 5 and tokenizer.eos_token_id == 4


def test_so_it_does_where_transformers_names_the_files_otherwise(
    gpt2_files: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def before_5(vocab_file: str, merges_file: str) -> GPT2Tokenizer:
        return GPT2Tokenizer(vocab=vocab_file, merges=merges_file)

    monkeypatch.setattr("transformers.GPT2Tokenizer", before_5)
    tokenizer = export_tokenizer.build_tokenizer(arguments(tokenizer_type="GPT2BPETokenizer", **gpt2_files), None)
    assert tokenizer("ab b")["input_ids"] == [2, 3, 1]


def test_a_hugging_face_tokenizer_is_saved_as_it_is(gpt2_files: dict[str, str], tmp_path: Path) -> None:
    source = GPT2Tokenizer(vocab=gpt2_files["vocab_file"], merges=gpt2_files["merge_file"])
    source.save_pretrained(tmp_path / "moved")
    used = arguments(tmp_path / "gone", tokenizer_type="HuggingFaceTokenizer")
    export_tokenizer.build_tokenizer(used, tmp_path / "moved").save_pretrained(tmp_path / "export")
    exported = AutoTokenizer.from_pretrained(tmp_path / "export")
    for text in ("ab b", "a" * 7 + " bb<|endoftext|>", " ab"):
        assert exported(text)["input_ids"] == source(text)["input_ids"]
    with pytest.raises(ExportError, match="gone: .*see --tokenizer-model"):
        export_tokenizer.build_tokenizer(used, None)


def test_tokenizers_without_text_are_refused() -> None:
    with pytest.raises(ExportError, match="--tokenizer-type NullTokenizer"):
        export_tokenizer.build_tokenizer(arguments(tokenizer_type="NullTokenizer"), None)


def test_a_full_disk_is_told_without_a_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_: Namespace) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(export_hf, "export", full)
    assert export_hf.main(["--load", "here", "--output", "there"]) == 1
    assert capsys.readouterr().err == "export_hf: error: [Errno 28] No space left on device\n"
