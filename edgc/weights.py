"""The all-gather of updated weights, as differences in few bits (SDP4Bit, Jia et al. 2024, arXiv 2410.15526)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.collectives import Communicator, Steps
from edgc.wire import Wire, in_groups


def gather_differences(shards: Sequence[Tensor], before: Tensor, wire: Wire, communicator: Communicator) -> Steps[None]:
    """Bring every rank's update of its own shard to all ranks, in place.

    ``shards``: all (n,) shards of a buffer, in the order of ranks, alike on every rank but for the rank's own, which it
    has updated; ``before``: that one as it was, and as the others still have it. What rounding leaves out is in the
    next difference again, as long as the rank updates its shard from unrounded weights of its own, as a
    mixed-precision optimizer does.
    """
    own = shards[communicator.rank]
    difference = in_groups((own.float() - before.float()).view(1, -1))
    received = yield from communicator.all_gather(wire.encode(difference)[0])
    for rank, (shard, message) in enumerate(zip(shards, torch.split(received, 1), strict=True)):
        known = before if rank == communicator.rank else shard  # the others cannot know the owner's unrounded weights
        shard.copy_(known.float() + wire.decode(message)[0, : shard.numel()])
