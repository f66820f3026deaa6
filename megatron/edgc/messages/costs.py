"""What a message from a pipeline stage to the one before takes: timed before training, or computed from a bandwidth."""

import time
from argparse import Namespace

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from edgc.comm.wire import Wire, wire
from edgc.compress.message_sender import MessageFormat, MessageSender
from edgc.compress.probe import REPETITIONS
from edgc.config import EDGCConfig
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.times.comm_cost import LinearCost, StageCost


def message_shape(args: Namespace) -> tuple[int, int]:
    """Rows and columns of a message: tokens of a micro-batch on this process, and the model's width."""
    tokens = args.seq_length * args.micro_batch_size // args.context_parallel_size
    if args.sequence_parallel:
        tokens //= args.tensor_model_parallel_size
    return tokens, args.hidden_size


def message_wire(config: EDGCConfig, dtype: torch.dtype) -> Wire:
    """The format of the factors of a message of this type, or of its rounded values."""
    messages = config.pipeline.messages
    if messages.engine != "powersgd":
        return wire(messages.engine)
    name = messages.wire or ("fp32" if dtype == torch.float32 else "bf16")
    return wire(name, hadamard=name not in ("fp32", "bf16"))


def message_form(config: EDGCConfig, args: Namespace, rank: int | None) -> MessageFormat:
    """A message of this run at a rank; None: uncompressed."""
    dtype = torch.float32 if args.fp32_residual_connection else args.params_dtype  # as Megatron's ``pipeline_dtype``
    return MessageFormat(*message_shape(args), rank, message_wire(config, dtype), dtype)


def largest_message_rank(config: EDGCConfig, args: Namespace, saving: float) -> int:
    """The largest rank at which a message takes less than 1/``saving`` of its values; 0 if none does."""
    dense = message_form(config, args, None).dense_bytes
    ranks = range(min(message_shape(args)), 0, -1)
    return next((rank for rank in ranks if message_form(config, args, rank).bytes * saving < dense), 0)


def message_costs(config: EDGCConfig, args: Namespace, device: torch.device) -> dict[int, StageCost]:
    """The cost of a message by the stage that sends it, counted from 0: those that this process receives, timed.

    All processes must call this.
    """
    in_low_rank = config.pipeline.messages.engine == "powersgd"
    limit = largest_message_rank(config, args, config.study.min_saving) if in_low_rank else 0
    ranks = sorted({max(1, limit // 4), max(1, limit // 2), limit}) if limit > 1 else []
    levels: list[int | None] = [*ranks] or [None if in_low_rank else NO_RANK]
    forms = [message_form(config, args, rank) for rank in (None, *levels)]
    costs = {}
    for sender in range(1, parallel_state.get_pipeline_model_parallel_world_size()):
        timed = [_seconds(form, sender, config, device) for form in forms]
        seconds = [one for one in timed if one is not None]
        if seconds:  # this process has received them
            dense, *compressed = seconds
            cost = LinearCost.fit(ranks, compressed) if ranks else LinearCost(compressed[0], 0.0)
            costs[sender] = StageCost(cost, dense, dense)
    return costs


def _seconds(form: MessageFormat, sender: int, config: EDGCConfig, device: torch.device) -> float | None:
    """Seconds from asking for a message to having its values, the fewest of a few times; None but on its receiver."""
    if config.ranks.link_gbps is not None:
        return form.bytes / (config.ranks.link_gbps * 1e9 / 8)
    stage = parallel_state.get_pipeline_model_parallel_rank()
    if stage not in (sender - 1, sender):
        return None
    group = parallel_state.get_pipeline_model_parallel_group()
    peers = dist.get_process_group_ranks(group)
    ask = torch.zeros(1, device=device)
    if stage == sender:
        source = MessageSender(True, config.seed, spike_limit=config.study.spike_limit)
        generator = torch.Generator().manual_seed(config.seed)
        values = torch.randn(form.rows, form.cols, generator=generator, device="cpu").to(device, form.dtype)
        for step in range(1 + REPETITIONS):
            dist.recv(ask, peers[sender - 1], group=group)
            dist.send(source.encode(values, form, form.header(step, sender, False, 0)), peers[sender - 1], group=group)
        return None
    fastest = float("inf")
    message = torch.empty(form.bytes, dtype=torch.uint8, device=device)
    for _ in range(1 + REPETITIONS):
        start = time.perf_counter()
        dist.send(ask, peers[sender], group=group)
        dist.recv(message, peers[sender], group=group)
        form.decode(message)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        fastest = min(fastest, time.perf_counter() - start)
    return fastest
