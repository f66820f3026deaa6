"""Sparsification with error feedback: few values travel, unrounded."""

from collections.abc import Mapping

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Steps
from edgc.comm.wire import FP32, Packed
from edgc.compress.engines.base import Cuts, Elementwise, Reduced, all_finite
from edgc.seeding import stable_seed

LARGEST_INDEX = 2**31 - 1  # in int32


class TopK(Elementwise):
    """Each rank's largest entries of each gradient: Aji and Heafield 2017; Lin et al. 2018 (arXiv 1712.01887).

    An all-gather of k values in fp32 and k indices for each parameter, k = density * elements, at least 1. Indices are
    in int32, and in int64 where a gradient has more than 2^31 elements.
    """

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        small = all(gradient.numel() - 1 <= LARGEST_INDEX for gradient in gradients.values())
        index_type = torch.int32 if small else torch.int64
        chosen, values = [], []
        for gradient in gradients.values():
            flat = gradient.reshape(-1)
            indices = flat.abs().topk(_kept(flat.numel(), self.config.density), sorted=False).indices
            chosen.append(indices.to(index_type))
            values.append(flat[indices])
        sizes = [len(part) for part in values]
        message = torch.cat([torch.cat(values).view(torch.int32), torch.cat(chosen).view(torch.int32)])
        gathered = yield from communicator.all_gather(message)
        of_values, of_indices = gathered.tensor_split([sum(sizes)], dim=1)
        all_values = torch.split(of_values, sizes, dim=1)
        all_indices = torch.split(of_indices.contiguous().view(index_type), sizes, dim=1)
        errors = {}
        for (name, gradient), indices, received, places in zip(
            gradients.items(), chosen, all_values, all_indices, strict=True
        ):
            error = gradient.clone()
            error.view(-1)[indices.long()] = 0
            errors[name] = error
            total = gradient.new_zeros(gradient.numel())
            for value, place in zip(received, places, strict=True):  # one rank after another: the same bits everywhere
                total.index_add_(0, place.long(), value.view(torch.float32))
            gradient.copy_(total.view_as(gradient))
        finite = all_finite([part.view(torch.float32) for part in all_values])
        return Reduced(finite, errors, lambda finite: None)


class RandomK(Elementwise):
    """The same random entries of each gradient on all ranks: the indices follow from a seed and don't travel.

    An all-reduce of about k values, k = density * elements, at least 1: an entry drawn twice travels once. Source:
    Stich et al. 2018 (arXiv 1809.07599).
    """

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        older: Mapping[str, Packed],
        iteration: int,
        communicator: Communicator,
        shards: Mapping[str, Cuts],
    ) -> Steps[Reduced]:
        # drawn on the CPU so that every device gets the same
        generator = torch.Generator().manual_seed(stable_seed(self.config.seed, "random-k", iteration))
        chosen = [
            _draw(gradient.numel(), self.config.density, generator).to(self.device) for gradient in gradients.values()
        ]
        local = [gradient.view(-1)[indices] for gradient, indices in zip(gradients.values(), chosen, strict=True)]
        # what is not chosen must not hide what is not finite
        healthy = torch.stack([torch.isfinite(gradient).all() for gradient in gradients.values()]).all()
        flag = torch.where(healthy, 0.0, torch.nan).view(1)
        (flag, *sums), _ = yield from communicator.sum([flag, *local], FP32)
        errors = {}
        for (name, gradient), indices, total in zip(gradients.items(), chosen, sums, strict=True):
            error = gradient.clone()
            error.view(-1)[indices] = 0
            errors[name] = error
            gradient.zero_()
            gradient.view(-1)[indices] = total
        return Reduced(all_finite([flag]), errors, lambda finite: None)


def _kept(elements: int, density: float) -> int:
    return max(1, round(density * elements))


def _draw(elements: int, density: float, generator: torch.Generator) -> Tensor:
    indices: Tensor = torch.unique(torch.randint(elements, (_kept(elements, density),), generator=generator))
    return indices
