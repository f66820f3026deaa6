"""The all-gather of updated weights, as differences in few bits (SDP4Bit, Jia et al. 2024, arXiv 2410.15526)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange, cut_joined
from edgc.comm.wire import GROUP, TOGETHER, Wire, in_groups


def gather_differences(
    shards: Sequence[Tensor], parts: Sequence[Sequence[int]], before: Tensor, wire: Wire, communicator: Communicator
) -> Exchange[None]:
    """Bring every process's update of its own shard to all processes, in place.

    ``shards``: all (n,) shards of a buffer, in the order of processes, alike on every process but for its own, which it
    has updated; ``before``: that one as it was, and as the others still have it. ``parts``: the lengths of the pieces
    of parameters in each shard. No group of rounded values reaches across two of them, so what a parameter becomes does
    not depend on its neighbours: its replicas elsewhere stay alike. What rounding leaves out is in the next difference
    again, as long as the process updates its shard from unrounded weights, as a mixed-precision optimizer does.
    """
    own = communicator.process
    difference = shards[own].float() - before.float()
    pieces = [in_groups(piece) for piece in torch.split(difference, list(parts[own]))]
    length = max(sum(length + -length % GROUP for length in lengths) for lengths in parts)
    values = torch.cat(pieces)
    values = torch.nn.functional.pad(values, (0, length - len(values))).view(1, -1)
    received = yield from communicator.all_gather(wire.encode(values, aligned=True)[0])
    # the others cannot know the owner's unrounded weights
    known = [before if process == own else shard for process, shard in enumerate(shards)]
    sizes = [[torch.Size([length]) for length in lengths] for lengths in parts]
    at_once = max(TOGETHER // max(length, 1), 1)  # shards, so that launches do not grow with the processes
    for first in range(0, len(shards), at_once):
        some = slice(first, first + at_once)
        decoded = zip(wire.decode(received[some]), sizes[some], strict=True)
        pieces = [piece for row, own_sizes in decoded for piece in cut_joined(row, own_sizes, GROUP)]
        updated = torch.cat(known[some]).float().add_(torch.cat(pieces))
        torch._foreach_copy_(list(shards[some]), torch.split(updated, [len(shard) for shard in shards[some]]))
