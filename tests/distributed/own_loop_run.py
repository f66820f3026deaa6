"""A training loop that calls Megatron's parts itself, not ``pretrain``: EDGC by ``megatron.edgc.attach``.

    own_loop_run.py MEGATRON'S AND EDGC'S FLAGS

Trains the model of ``examples/pretrain_bert.py``. Process 0 prints one JSON object.
"""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
import pretrain_bert  # noqa: E402  # redirects to the CPU
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed.finalize_model_grads import finalize_model_grads  # noqa: E402
from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: E402
from megatron.core.utils import get_model_config  # noqa: E402
from megatron.training import checkpointing, training  # noqa: E402
from megatron.training.arguments import parse_and_validate_args  # noqa: E402
from megatron.training.initialize import initialize_megatron  # noqa: E402
from torch.utils.data import default_collate  # noqa: E402

import megatron.edgc  # noqa: E402


def batches(args):
    data, process = pretrain_bert.MaskedSequences(10_000, args.seq_length, 16), parallel_state.get_data_parallel_rank()
    size, place = args.micro_batch_size, process
    while True:
        yield default_collate([data[place * size + index] for index in range(size)])
        place += parallel_state.get_data_parallel_world_size()


def main():
    args = parse_and_validate_args(pretrain_bert.flags)
    initialize_megatron()
    before = dict(vars(training))
    chunks = training.get_model(pretrain_bert.bert)
    config = get_model_config(chunks[0])
    # mistakes that must not go unseen: after EDGC was attached; and called by the loop, too
    late, twice = "LATE" in os.environ, "TWICE" in os.environ
    if not (late or twice):
        config.finalize_model_grads_func = finalize_model_grads
    session = megatron.edgc.attach(chunks) if args.edgc else None
    if late:
        config.finalize_model_grads_func = finalize_model_grads
    optimizer = training.get_megatron_optimizer(training.get_megatron_optimizer_config(args)[0], chunks)
    forward_backward, data, losses = get_forward_backward_func(), batches(args), []
    for iteration in range(args.train_iters):
        args.curr_iteration = iteration
        for chunk in chunks:
            chunk.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = forward_backward(
            forward_step_func=pretrain_bert.forward_step,
            data_iterator=data,
            model=chunks,
            num_microbatches=2,
            seq_length=args.seq_length,
            micro_batch_size=args.micro_batch_size,
            forward_only=False,
        )
        if twice:
            finalize_model_grads(chunks)
        assert optimizer.step()[0]
        loss = torch.stack([one["lm loss"] for one in reduced]).sum(dim=0)
        dist.all_reduce(loss)
        losses.append(float(loss[0] / loss[1]))
        if session is not None:
            session.note_loss(losses[-1])
        if args.save and iteration == 12:  # a checkpoint that is named by the step, as if that were still to come
            checkpointing.save_checkpoint(iteration, chunks, optimizer, None, 0)
    if args.save:
        checkpointing.save_checkpoint(args.train_iters, chunks, optimizer, None, 0)
    sent = noted = None
    if session is not None:
        noted = session.report.loss
        sent = session.stages[0].gradient_bytes.sent, session.stages[0].gradient_bytes.host
        session.close()
    replaced = [name for name, value in before.items() if vars(training)[name] is not value]
    if dist.get_rank() == 0:
        finalize = config.finalize_model_grads_func is finalize_model_grads
        seen = {"losses": losses, "sent": sent, "noted": noted, "replaced": replaced, "finalize": finalize}
        print("RESULT", json.dumps(seen))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
