"""What Megatron asks of a GPT training script: datasets, one forward step, and the loss.

The command line and the data format are those of Megatron-LM's own ``pretrain_gpt.py``.
"""

from argparse import Namespace
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from edgc.config import ConfigError

SPIKE = 10.0  # times Megatron's estimate of the largest loss: where --check-for-spiky-loss doubts a result
BATCH_KEYS = ("tokens", "labels", "loss_mask", "position_ids", "attention_mask")


def _needs_batch(vp_stage: int | None) -> bool:
    """Only the first and the last pipeline stage look at the data, of a virtual pipeline the first and last chunk, and
    where layers predict further words.
    """
    where = {"ignore_virtual": False, "vp_stage": vp_stage}
    ends = parallel_state.is_pipeline_first_stage(**where) or parallel_state.is_pipeline_last_stage(**where)
    return bool(ends or _predicts_further(vp_stage))


def _predicts_further(vp_stage: int | None) -> bool:
    """Whether layers of multi-token prediction are here."""
    args = get_args()
    layers, layout = args.mtp_num_layers, args.pipeline_model_parallel_layout
    if not layers:
        return False
    if layout is not None:  # as it was typed
        layout = PipelineParallelLayerLayout(layout, args.pipeline_model_parallel_size)
    return bool(mtp_on_this_rank(layout, mtp_num_layers=layers, ignore_virtual=False, vp_stage=vp_stage))


# Flags of Megatron-LM's script that this one does not implement.
_NOT_IMPLEMENTED = {
    "--sft": "sft",
    "--fim-data": "fim_data",
    "--hybrid-context-parallel": "hybrid_context_parallel",
    "--dataloader-inter-document-masking": "dataloader_inter_document_masking",
    "--per-dataset-sequences-path": "per_dataset_sequences_path",
    "--overlap-moe-expert-parallel-comm": "overlap_moe_expert_parallel_comm",
    "--inprocess-restart": "inprocess_restart",
    "--log-straggler": "log_straggler",
    "--logits-load-dir": "logits_load_dir",
}


def check_script_options(args: Namespace) -> None:
    """Raise ``ConfigError`` for a flag that asks for more than plain GPT pretraining."""
    refused = [flag for flag, name in _NOT_IMPLEMENTED.items() if getattr(args, name, None)]
    # Megatron sums the copies of the embedding on the first and the last stage, and this script adds no other
    if args.mtp_num_layers and _predicts_before_the_end(args):
        refused.append("--mtp-num-layers on another stage than the last (--pipeline-model-parallel-layout)")
    # tensor-parallel ranks expect batches of the size of training
    if args.tensor_model_parallel_size > 1 and args.eval_micro_batch_size != args.micro_batch_size:
        refused.append("--eval-micro-batch-size with --tensor-model-parallel-size")
    if refused:
        raise ConfigError(f"pretrain_gpt.py does not implement {', '.join(refused)}")


def _predicts_before_the_end(args: Namespace) -> bool:
    """Whether a layer of multi-token prediction is on a pipeline stage before the last."""
    if not args.pipeline_model_parallel_layout:
        return False
    stages = args.pipeline_model_parallel_size
    layout = PipelineParallelLayerLayout(args.pipeline_model_parallel_layout, stages).layout
    return any(LayerType.mtp in chunk for stage in layout[:-1] for chunk in stage)


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Megatron's dataset configuration from its own flags."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        fast_cache_load=args.dataloader_fast_cache_load,
        defer_npy_index_mmap=args.dataloader_defer_npy_index_mmap,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=args.create_attention_mask_in_dataloader,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        object_storage_cache_path=args.object_storage_cache_path,
    )


def train_valid_test_datasets(num_samples: list[int | None], vp_stage: int | None = None) -> tuple[Any, Any, Any]:
    """Build the three datasets; ``num_samples`` holds the samples wanted of each."""
    args = get_args()
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(
        dataset_class,
        num_samples,
        lambda: _needs_batch(vp_stage) and parallel_state.get_tensor_model_parallel_rank() == 0,
        dataset_config(args),
    )
    datasets: tuple[Any, Any, Any] = builder.build()
    return datasets


# Every process calls it, not tensor-parallel process 0 alone: the builder itself meets at barriers of all processes.
train_valid_test_datasets.is_distributed = True  # type: ignore[attr-defined]


def get_batch(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, vp_stage: int | None = None
) -> dict[str, torch.Tensor | None]:
    """The micro-batch of this process: read by tensor-parallel process 0, broadcast to its group, cut for context
    parallelism.

    Returns tensors of shape (micro batch, sequence), or None for what this pipeline stage does not need.
    """
    args = get_args()
    if not _needs_batch(vp_stage):
        return dict.fromkeys(BATCH_KEYS)
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    batch: dict[str, Any] = dict.fromkeys(BATCH_KEYS)
    if tp_rank == 0:
        if data_iterator is None:
            raise RuntimeError("this process has to read data but was given no data iterator")
        read = next(data_iterator)
        batch.update({key: read[key].cuda(non_blocking=True) for key in BATCH_KEYS if key in read})
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tp_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=_predicts_further(vp_stage),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        is_pipeline_last_stage=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
    )
    batch = {key: batch[key] for key in BATCH_KEYS}
    cp_group = parallel_state.get_context_parallel_group()
    own: dict[str, torch.Tensor | None] = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=cp_group)
    return own


def loss_func(
    loss_mask: torch.Tensor, output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Summed loss, number of tokens, and both together for the log (Megatron divides them over all processes)."""
    mask = loss_mask.reshape(-1).float()
    loss = torch.sum(output.reshape(-1).float() * mask)
    tokens = mask.sum().to(torch.int)
    _validate(loss.detach().clone())  # Megatron divides the loss in place later
    return loss, tokens, {"lm loss": torch.stack([loss.detach(), tokens.to(loss.dtype)])}


def _validate(loss: torch.Tensor) -> None:
    """Report the loss to Megatron's re-run machine, which may run the step again or end the run."""
    args, machine = get_args(), get_rerun_state_machine()

    def spike(result: torch.Tensor) -> bool:
        return bool(machine.is_unexpectedly_large(result, threshold=SPIKE, context="loss"))

    if args.check_for_nan_in_loss_and_grad:
        for wrong, message in ((torch.isnan, "the loss is NaN"), (torch.isinf, "the loss is infinite")):
            machine.validate_result(loss, rejection_func=wrong, message=message)
    if args.check_for_spiky_loss:
        machine.validate_result(loss, rejection_func=spike, message="the loss is a spike", fatal=False)


def forward_step(
    data_iterator: Iterator[dict[str, torch.Tensor]] | None, model: torch.nn.Module
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """One micro-batch forward; returns the stage's output and the function that turns it into the loss."""
    batch = get_batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"],
        batch["position_ids"],
        batch["attention_mask"],
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],  # of the words after the next
    )
    # only the last stage, which has read it, asks for the loss
    return output, partial(loss_func, batch["loss_mask"])  # type: ignore[arg-type]
