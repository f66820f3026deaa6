"""A training script of one's own on Megatron-core, with EDGC in three lines, marked 1 to 3: BERT's masked words.

    torchrun --nproc-per-node 2 examples/pretrain_bert.py

Without further flags it trains a small model on the CPU, on sequences that it makes, in under a minute. It takes
Megatron's own flags and EDGC's; with CUDA=1 in the environment it trains on GPUs.
"""

import os
import sys
from functools import partial

from megatron.edgc.recipes import cpu

ON_CPU = os.environ.get("CUDA") != "1"
if ON_CPU:
    cpu.redirect()  # before anything of Megatron is imported

import torch  # noqa: E402
from megatron.core import parallel_state, tensor_parallel  # noqa: E402
from megatron.core.enums import ModelType  # noqa: E402
from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec  # noqa: E402
from megatron.core.models.bert.bert_model import BertModel  # noqa: E402
from megatron.training import get_args, pretrain  # noqa: E402
from megatron.training.argument_utils import (  # noqa: E402
    core_transformer_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args  # noqa: E402

import megatron.edgc  # noqa: E402  # 1
from megatron.edgc.recipes.datasets import use_built_helpers  # noqa: E402

SMALL = """
--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
--micro-batch-size 8 --global-batch-size 32 --train-iters 60 --lr 3e-3 --lr-decay-style constant
--tokenizer-type NullTokenizer --vocab-size 127 --mock-data --split 90,5,5 --eval-iters 1 --eval-interval 1000
--log-interval 10 --edgc --edgc-static-rank 8 --edgc-window 20
"""
WORDS = 16
KEYS = "text", "labels", "loss_mask"


class MaskedSequences(torch.utils.data.Dataset):
    """Sequences that count up over a few words. One word in seven is hidden, and its neighbours tell it."""

    def __init__(self, samples, length, words):
        self.samples, self.length, self.words = samples, length, words

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        start = torch.randint(self.words, (1,), generator=generator)
        labels = (start + torch.arange(self.length)) % self.words + 1
        hidden = torch.rand(self.length, generator=generator) < 1 / 7
        return {"text": labels.masked_fill(hidden, 0), "labels": labels, "loss_mask": hidden.long()}


def datasets(samples, vp_stage=None):
    args = get_args()
    return [MaskedSequences(number or 0, args.seq_length, WORDS) for number in samples]


datasets.is_distributed = True


def bert(pre_process=True, post_process=True, config=None, pg_collection=None, vp_stage=None):
    args = get_args()
    return BertModel(
        config=config or core_transformer_config_from_args(args),
        num_tokentypes=0,
        transformer_layer_spec=bert_layer_local_spec,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        add_binary_head=False,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_of(mask, output):
    losses, _ = output
    loss, words = (losses.float() * mask).sum(), mask.sum().int()
    return loss, words, {"lm loss": torch.stack([loss.detach(), words.float()])}


def forward_step(data, model):
    batch = dict.fromkeys(KEYS)
    ends = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    if any(ends):
        read = next(data) if data is not None else None  # by the first rank of a tensor-parallel group
        batch = tensor_parallel.broadcast_data(KEYS, read, torch.int64)
    text = batch["text"]
    output = model(text, None if text is None else torch.ones_like(text), lm_labels=batch["labels"])
    return output, partial(loss_of, batch["loss_mask"])


def flags(parser):
    if ON_CPU:
        parser.set_defaults(**cpu.ARGUMENT_DEFAULTS)
    return megatron.edgc.add_arguments(parser)


def main():
    sys.argv[1:] = sys.argv[1:] or SMALL.split()
    args = parse_and_validate_args(flags)  # 2
    use_built_helpers()  # Megatron would ask make for what its wheel has, and end
    with megatron.edgc.compressing(args):  # 3
        pretrain(
            pretrain_cfg_container_from_args(args),
            datasets,
            ModelType.encoder_or_decoder,
            forward_step,
            model_provider=bert,
        )
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
