"""Sparsification: few values travel, unrounded."""

from abc import ABC
from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange
from edgc.comm.wire import FP32
from edgc.compress.engines.base import Sums, Thinning
from edgc.config import EDGCConfig
from edgc.seeding import stable_seed
from edgc.specs import MatrixSpec
from edgc.stacking import all_finite

LARGEST_INDEX = 2**31 - 1  # in int32


class Sparse(Thinning, ABC):
    """An engine that sends a share of the entries."""

    def __init__(self, matrices: Sequence[MatrixSpec], config: EDGCConfig, device: torch.device, share: str):
        super().__init__(matrices, config, device)
        self.share = float(share)

    def kept(self, elements: int) -> int:
        """How many entries of so many travel."""
        return max(1, round(self.share * elements))


class TopK(Sparse):
    """Each process's largest entries of each gradient: Aji and Heafield 2017; Lin et al. 2018 (arXiv 1712.01887).

    An all-gather of k values in fp32 and k indices for each parameter, k = share * elements, at least 1. Indices are
    in int32, and in int64 where a gradient has more than 2^31 elements.
    """

    def sum(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[Sums]:
        small = all(tensor.numel() - 1 <= LARGEST_INDEX for tensor in tensors)
        index_type = torch.int32 if small else torch.int64
        chosen, values = [], []
        for tensor in tensors:
            flat = tensor.reshape(-1)
            indices = flat.abs().topk(self.kept(flat.numel()), sorted=False).indices
            chosen.append(indices.to(index_type))
            values.append(flat[indices])
        sizes = [len(part) for part in values]
        message = torch.cat([torch.cat(values).view(torch.int32), torch.cat(chosen).view(torch.int32)])
        gathered = yield from communicator.all_gather(message)
        of_values, of_indices = gathered.tensor_split([sum(sizes)], dim=1)
        all_values = torch.split(of_values.contiguous().view(torch.float32), sizes, dim=1)
        all_indices = torch.split(of_indices.contiguous().view(index_type), sizes, dim=1)
        sums, shares = [], []
        for tensor, indices, own, received, entries in zip(
            tensors, chosen, values, all_values, all_indices, strict=True
        ):
            shares.append(_spread(tensor, indices.long(), own))
            total = tensor.new_zeros(tensor.numel())
            # in the same order on every process: the same bits
            for value, places in zip(received, entries, strict=True):
                total.index_add_(0, places.long(), value)
            sums.append(total.view_as(tensor))
        return Sums(sums, shares, all_finite([*all_values, *sums]))


class RandomK(Sparse):
    """The same random entries of each gradient on all processes: indices follow from a seed and do not travel.

    An all-reduce of about k values, k = share * elements, at least 1: an entry drawn twice travels once. Source:
    Stich et al. 2018 (arXiv 1809.07599).
    """

    def begin(self, names: Sequence[str], iteration: int, process: int) -> None:
        # on the CPU, so that every device gets the same
        self._generator = torch.Generator().manual_seed(stable_seed(self.config.seed, "random-k", iteration))

    def sum(self, tensors: Sequence[Tensor], communicator: Communicator) -> Exchange[Sums]:
        chosen = [self._draw(tensor.numel()).to(self.device) for tensor in tensors]
        local = [tensor.view(-1)[indices] for tensor, indices in zip(tensors, chosen, strict=True)]
        # what is not chosen must not hide what is not finite
        healthy = torch.stack([torch.isfinite(tensor).all() for tensor in tensors]).all()
        flag = torch.where(healthy, 0.0, torch.nan).view(1).float()
        (flag, *totals), (_, *own) = yield from communicator.sum([flag, *local], FP32)

        def spread(parts: Sequence[Tensor]) -> list[Tensor]:
            return [_spread(*one) for one in zip(tensors, chosen, parts, strict=True)]

        return Sums(spread(totals), spread(own), all_finite([flag, *totals]))

    def _draw(self, elements: int) -> Tensor:
        indices: Tensor = torch.unique(
            torch.randint(elements, (self.kept(elements),), generator=self._generator, device="cpu")
        )
        return indices


def _spread(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Zeros, with these values at these places of the flattened tensor."""
    flat = like.new_zeros(like.numel())
    flat[indices] = values
    return flat.view_as(like)
