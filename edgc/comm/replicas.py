"""Whether the processes of a group hold the same bits of what they must share.

Every process of a data-parallel group orthonormalises the same factors and must get the same basis, bit for bit: a
difference of 1e-7 in one of them makes parameters drift apart step by step. Other GPUs or library versions in one job
are enough for that. So the processes compare hashes now and then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, run_to_end
from edgc.comm.packed import Packed
from edgc.errors import ReplicaMismatch

KINDS = "rank", "factors", "scales", "sum"  # of a parameter: what is compared
HASHED_BYTES = 2**22  # of one tensor: hashing takes several times the memory of what is hashed. Not tuned.
_MULTIPLIER = -7046029254386353131  # 2^64 / golden ratio as int64: neighbouring places get unlike weights


def digest(tensor: Tensor) -> Tensor:
    """A hash of the first ``HASHED_BYTES`` bytes, 0-dimensional int64 on the tensor's device.

    It is a sum of 32-bit words times odd weights, modulo 2^64: a change of one word always changes it.
    """
    octets = tensor.detach().reshape(-1)[: HASHED_BYTES // tensor.itemsize].contiguous().view(torch.uint8)
    octets = torch.nn.functional.pad(octets, (0, -len(octets) % 4))
    words = octets.view(torch.int32).long()
    weights = (torch.arange(1, len(words) + 1, device=words.device) * _MULTIPLIER) | 1
    total: Tensor = (words * weights).sum()
    return total


def digests_by_parameter(state: Mapping[str, Packed]) -> dict[str, Tensor]:
    """One hash for all parts of a parameter's state, whose keys are its name, a colon and the part."""
    found: dict[str, Tensor] = {}
    for index, (key, packed) in enumerate(sorted(state.items())):
        name, own = key.rpartition(":")[0], (2 * index + 1) * digest(packed.message)
        found[name] = found[name] + own if name in found else own
    return found


def compare(
    names: Sequence[str],
    kinds: Mapping[str, Mapping[str, int] | Mapping[str, Tensor]],
    communicator: Communicator,
    device: torch.device,
    iteration: int,
) -> None:
    """Compare ranks or digests, by kind and parameter, with the other processes of the group; the CPU waits.

    ``kinds``: those of ``KINDS``; a name may be missing. All processes must call this. Raises ``ReplicaMismatch``.
    """
    if not names:
        return
    digests = torch.zeros(len(names), len(KINDS), dtype=torch.int64, device=device)
    indices = {name: index for index, name in enumerate(names)}
    for column, kind in enumerate(KINDS):
        for name, own in kinds[kind].items():
            digests[indices[name], column] = own
    uncounted = Communicator.uncounted(communicator.group)
    gathered = run_to_end(uncounted.all_gather(digests.view(-1)))
    check(names, gathered.view(-1, *digests.shape), communicator.members, iteration)


def check(names: Sequence[str], digests: Tensor, processes: Sequence[int], iteration: int) -> None:
    """Compare digests (processes, parameters, kinds). Raises ``ReplicaMismatch`` for the first that differ.

    ``processes``: their numbers in the whole run. Those that differ from what most have are named; of two, both.
    """
    seen = digests.cpu()
    for index, kind in (seen != seen[0]).any(dim=0).nonzero().tolist():
        values = seen[:, index, kind].tolist()
        usual, count = Counter(values).most_common(1)[0]
        others = [process for process, value in zip(processes, values, strict=True) if value != usual]
        if 2 * count <= len(values):
            who = f"processes {', '.join(map(str, processes))} of one data-parallel group hold different bits"
        else:
            who = f"process {', '.join(map(str, others))} holds other bits than most of its data-parallel group"
        raise ReplicaMismatch(
            f"iteration {iteration + 1}: {who} in the {KINDS[kind]} of {names[index]}. All must compute the same bits: "
            "use one type of GPU and one version of each library for the whole job, and resume from a checkpoint that "
            "was written before the window of this iteration"
        )
