"""A Hugging Face GPT-2 from the tensors and the arguments of a Megatron checkpoint."""

import re
from argparse import Namespace
from typing import Any

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerBase

from tools.export.checkpoint import LAYER, Checkpoint, ExportError

# What every GPT-2 has: an argument of Megatron's, its value there, and the flag that changes it ({} is the value).
GPT2_ARGUMENTS: dict[str, tuple[Any, str]] = {
    "swiglu": (False, "--swiglu"),
    "squared_relu": (False, "--squared-relu"),
    "quick_geglu": (False, "--quick-geglu"),
    "activation_func_clamp_value": (None, "--activation-func-clamp-value {}"),
    "normalization": ("LayerNorm", "--normalization {}"),
    "layernorm_zero_centered_gamma": (False, "--apply-layernorm-1p"),
    "apply_residual_connection_post_layernorm": (False, "--apply-residual-connection-post-layernorm"),
    "position_embedding_type": ("learned_absolute", "--position-embedding-type {}"),
    "add_position_embedding": (True, "--no-position-embedding"),
    "add_bias_linear": (True, "--disable-bias-linear"),
    "multi_latent_attention": (False, "--multi-latent-attention"),
    "qk_layernorm": (False, "--qk-layernorm"),
    "qk_l2_norm": (False, "--qk-l2-norm"),
    "attention_output_gate": (False, "--attention-output-gate"),
    "softmax_type": ("vanilla", "--softmax-type {}"),
    "softmax_scale": (None, "--softmax-scale {}"),
    "window_size": (None, "--window-size {}"),
    "linear_attention_freq": (None, "--linear-attention-freq {}"),
    "experimental_attention_variant": (None, "--experimental-attention-variant {}"),
    "num_experts": (None, "--num-experts {}"),
    "mtp_num_layers": (None, "--mtp-num-layers {}"),
    "hybrid_layer_pattern": (None, "--hybrid-layer-pattern {}"),
    "heterogeneous_layers_config_encoded_json": (None, "--heterogeneous-layers-config-path"),
    "spec": (None, "--spec {}"),
    "use_mup": (False, "--use-mup"),
}

# Megatron's names, local layers' and Transformer Engine's, in GPT-2's. Of linear layers the weight is transposed.
LAYER_NAMES = {
    "input_layernorm.": "ln_1.",
    "self_attention.linear_qkv.layer_norm_": "ln_1.",
    "self_attention.linear_qkv.": "attn.c_attn.",
    "self_attention.linear_proj.": "attn.c_proj.",
    "pre_mlp_layernorm.": "ln_2.",
    "mlp.linear_fc1.layer_norm_": "ln_2.",
    "mlp.linear_fc1.": "mlp.c_fc.",
    "mlp.linear_fc2.": "mlp.c_proj.",
}
OTHER_NAMES = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "decoder.final_layernorm.weight": "transformer.ln_f.weight",
    "decoder.final_layernorm.bias": "transformer.ln_f.bias",
    "output_layer.weight": "lm_head.weight",
}


def check_arguments(args: Namespace) -> None:
    """Raise ``ExportError`` that names the flags of all that GPT-2 cannot express."""
    flags = [
        flag.format(getattr(args, name))
        for name, (wanted, flag) in GPT2_ARGUMENTS.items()
        if (getattr(args, name, wanted) or None) != (wanted or None)
    ]
    if args.num_query_groups not in (None, args.num_attention_heads) and args.group_query_attention:
        flags.append(f"--group-query-attention --num-query-groups {args.num_query_groups}")
    if args.kv_channels * args.num_attention_heads != args.hidden_size:
        flags.append(f"--kv-channels {args.kv_channels}")
    if flags:
        raise ExportError(f"GPT-2 has no {', '.join(flags)}")


def activation(args: Namespace) -> str:
    """Megatron's fused and Transformer Engine's GELU are the tanh approximation, its plain one is exact."""
    tanh = ("bias_gelu_fusion", "use_te_activation_func", "use_transformer_engine_op_fuser")
    return "gelu_new" if any(getattr(args, name, False) for name in tanh) else "gelu"


def gpt2_config(args: Namespace, tokens: int, end: int) -> GPT2Config:
    """``tokens``: how many the tokenizer has; ``end``: the one that ends a document, and so begins the next.

    Positions beyond the trained sequence length are left out."""
    return GPT2Config(
        vocab_size=tokens,
        n_positions=args.seq_length,
        n_embd=args.hidden_size,
        n_layer=args.num_layers,
        n_head=args.num_attention_heads,
        n_inner=args.ffn_hidden_size,
        activation_function=activation(args),
        resid_pdrop=args.hidden_dropout,
        embd_pdrop=args.hidden_dropout,
        attn_pdrop=args.attention_dropout,
        layer_norm_epsilon=args.layernorm_epsilon,
        tie_word_embeddings=not args.untie_embeddings_and_output_weights,
        bos_token_id=end,
        eos_token_id=end,
        dtype="float32",
    )


def gpt2_weights(checkpoint: Checkpoint, tokens: int) -> dict[str, Tensor]:
    """GPT-2's state from Megatron's tensors, in fp32; rows of ``checkpoint.tensors`` beyond ``tokens`` are left out."""
    args, state = checkpoint.args, {}
    for name, tensor in checkpoint.tensors.items():
        if layer := LAYER.fullmatch(name):
            prefix = next((start for start in LAYER_NAMES if re.fullmatch(f"{start}(weight|bias)", layer[2])), None)
            if prefix is None:
                raise ExportError(f"GPT-2 has no {name}")
            target = f"transformer.h.{layer[1]}.{LAYER_NAMES[prefix]}{layer[2].removeprefix(prefix)}"
        elif name in OTHER_NAMES:
            target = OTHER_NAMES[name]
        else:
            raise ExportError(f"GPT-2 has no {name}")
        tensor = tensor.float()
        if target in ("transformer.wte.weight", "lm_head.weight"):
            tensor = tensor[:tokens]
        elif target == "transformer.wpe.weight":
            tensor = tensor[: args.seq_length]
        elif ".attn.c_attn." in target:
            tensor = blocks(tensor, args.num_attention_heads)
        if layer and tensor.dim() == 2:
            tensor = tensor.t()
        state[target] = tensor.contiguous()
    if not args.untie_embeddings_and_output_weights:
        # the last of several pipeline stages has a copy of the embedding
        state["lm_head.weight"] = state["transformer.wte.weight"]
    return state


def blocks(qkv: Tensor, heads: int) -> Tensor:
    """Rows (head, q k v, channel) as Megatron has them, in the order (q k v, head, channel) of GPT-2."""
    return qkv.reshape(heads, 3, -1, *qkv.shape[1:]).transpose(0, 1).flatten(0, 2)


def gpt2(checkpoint: Checkpoint, tokenizer: PreTrainedTokenizerBase) -> GPT2LMHeadModel:
    """The model, made around the checkpoint's tensors; raises ``ExportError`` where any is missing or of another
    shape, or where the tokenizer has more tokens than the embedding rows."""
    check_arguments(checkpoint.args)
    rows = len(checkpoint.tensors.get("embedding.word_embeddings.weight", ()))
    if len(tokenizer) > rows:
        raise ExportError(
            f"the tokenizer has {len(tokenizer)} tokens, the model {rows} with padding: it is another tokenizer"
        )
    config = gpt2_config(checkpoint.args, len(tokenizer), tokenizer.eos_token_id)
    with torch.device("meta"):  # its own random weights are never made
        model = GPT2LMHeadModel(config)
    try:
        model.load_state_dict(gpt2_weights(checkpoint, len(tokenizer)), assign=True)
    except RuntimeError as error:
        first, *more = [line.strip(" \t.") for line in str(error).splitlines()[1:]]
        others = f" and {len(more)} more" if more else ""
        raise ExportError(f"{checkpoint.folder}: is not the GPT of its arguments: {first}{others}") from None
    model.tie_weights()
    return model


def padding_doubt(checkpoint: Checkpoint, tokens: int) -> str | None:
    """A warning where padding alone does not explain the number of rows: the tokenizer's file may have changed."""
    args = checkpoint.args
    rows = len(checkpoint.tensors["embedding.word_embeddings.weight"])
    multiple = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
    if rows == tokens or rows == -(-tokens // multiple) * multiple:
        return None
    return f"the tokenizer has {tokens} tokens and the model {rows} rows: is it the one of the training run?"
