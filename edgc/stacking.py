"""Many tensors handled at once: on a GPU many small ones cost more in launches than in arithmetic."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu

SMALL_TENSOR = 2**18  # values of which a copy costs less than a launch or two: a megabyte
BATCH_ELEMENTS = 2**22  # values of small tensors that are handled at once
LIKE_RANKS = 64  # columns of zeros that cost a GPU less than further launches


def stacked_view(tensors: Sequence[Tensor]) -> Tensor | None:
    """Tensors of equal shape as one (count, ...) view, without a copy; None unless they lie equally far apart.

    So lie the gradients of equal layers in a bucket, and the parts of what was once a stacked tensor.
    """
    first, *others = tensors
    if not others:
        return first.unsqueeze(0)
    storage, distance = first.untyped_storage().data_ptr(), others[0].storage_offset() - first.storage_offset()
    for index, tensor in enumerate(others, 1):
        if (tensor.shape, tensor.stride(), tensor.dtype) != (first.shape, first.stride(), first.dtype) or (
            tensor.untyped_storage().data_ptr(),
            tensor.storage_offset(),
        ) != (storage, first.storage_offset() + index * distance):
            return None
    if distance <= 0:  # a view cannot run backwards
        return None
    return first.as_strided((len(tensors), *first.shape), (distance, *first.stride()))


def stacked(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of equal shape as one (count, ...): a view where they lie equally far apart, else a copy."""
    view = stacked_view(tensors)
    return torch.stack(list(tensors)) if view is None else view


def by_shape(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Places at which the tensors of all lists have equal shapes.

    They stay in their order, wherever they lie: what a tensor becomes may depend on its place among others in the last
    bit, and after a resume it must be the same.
    """
    groups: dict[Any, list[int]] = defaultdict(list)
    for index, tensors in enumerate(zip(*lists, strict=True)):
        groups[tuple(tensor.shape for tensor in tensors)].append(index)
    return list(groups.values())


def batches(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Places of tensors to be handled at once, few enough for the memory: small ones together, each large one alone."""
    found = [[index] for index, tensor in enumerate(tensors) if tensor.numel() > SMALL_TENSOR]
    room = 0
    for index, tensor in enumerate(tensors):
        if tensor.numel() > SMALL_TENSOR:
            continue
        if tensor.numel() > room:
            found.append([])
            room = max(BATCH_ELEMENTS, tensor.numel())
        found[-1].append(index)
        room -= tensor.numel()
    return found


def map_stacked(function: Callable[..., Any], *lists: Sequence[Tensor]) -> list[Any]:
    """What ``function`` gives for the tensors at each place of the lists, called once for all of equal shapes.

    It takes (count, ...) tensors and returns such a one or a tuple of them.
    """
    return _mapped(function, by_shape(*lists), stacked, lists)


def map_padded(function: Callable[..., Any], *lists: Sequence[Tensor]) -> list[Any]:
    """``map_stacked`` of (n x rank) factors that is called once for all of a group of ``by_like_rank``.

    Tensors get columns of zeros up to the most in their list. The caller must cut off what these columns have added.
    """
    return _mapped(function, by_like_rank(*lists), padded, lists)


def _mapped(
    function: Callable[..., Any],
    groups: Sequence[Sequence[int]],
    joined: Callable[[Sequence[Tensor]], Tensor],
    lists: Sequence[Sequence[Tensor]],
) -> list[Any]:
    """What the function gives for each place of the lists, called once for the places of each group."""
    results: list[Any] = [None] * len(lists[0])
    for indices in groups:
        outcome = function(*(joined([tensors[index] for index in indices]) for tensors in lists))
        parts = (
            outcome.unbind(0)
            if isinstance(outcome, Tensor)
            else zip(*(part.unbind(0) for part in outcome), strict=True)
        )
        for index, part in zip(indices, parts, strict=True):
            results[index] = part
    return results


def map_columns(
    function: Callable[[Tensor, Tensor], Tensor], factors: Sequence[Tensor], others: Sequence[Tensor]
) -> list[Tensor]:
    """What an elementwise function gives for each (n x rank) factor and its (n x 1) or (1 x 1) tensor."""
    results = list(factors)
    for places in alike(factors):
        own = padded([factors[place] for place in places], zeros=False)
        outcome = function(own.mT, stacked([others[place] for place in places]).mT).mT
        for place, part in zip(places, outcome.unbind(), strict=True):
            results[place] = part[:, : factors[place].shape[1]]
    return results


def padded(tensors: Sequence[Tensor], zeros: bool = True) -> Tensor:
    """(n x columns) tensors as one (count, n, most columns), with zeros in the columns that they do not have.

    Without ``zeros`` these may hold anything: where the tensors are cut from one such tensor, nothing is copied.
    """
    columns = [tensor.shape[1] for tensor in tensors]
    # copies lie by columns, as factors do: then they are one operation, and later sums have the same order
    if min(columns) == max(columns):
        return stacked([tensor.T for tensor in tensors]).mT
    if not zeros and (view := _uncut(tensors, max(columns))) is not None:
        return view
    padded = tensors[0].new_zeros(len(tensors), max(columns), tensors[0].shape[0])
    own = [place[:count] for place, count in zip(padded.unbind(0), columns, strict=True)]
    torch._foreach_copy_(own, [tensor.T for tensor in tensors])
    return padded.mT


def _uncut(tensors: Sequence[Tensor], columns: int) -> Tensor | None:
    """(n x ...) tensors as one (count, n, columns) view, if they are the first columns of parts of one tensor."""
    view = stacked_view([tensor[:, :1] for tensor in tensors])
    first = tensors[0]
    if view is None or any(tensor.stride() != first.stride() for tensor in tensors):
        return None
    shape, strides = (len(tensors), len(first), columns), (view.stride(0), *first.stride())
    last = view.storage_offset() + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    whole = first.untyped_storage().nbytes() // first.itemsize
    return None if last >= whole else first.as_strided(shape, strides)


def alike(factors: Sequence[Tensor], *others: Sequence[Tensor]) -> list[list[int]]:
    """Places of (n x rank) factors to handle at once: those of equal shapes, on a GPU also those of like ranks."""
    return (by_shape if all(on_cpu(factor) for factor in factors) else by_like_rank)(factors, *others)


def by_like_rank(*lists: Sequence[Tensor]) -> list[list[int]]:
    """Places at which the tensors of all lists have equal lengths, and those of the first list like numbers of columns.

    In a group these are at most twice as many as the fewest, and at most ``LIKE_RANKS`` more. Each group is in order,
    as of ``by_shape``.
    """
    by_lengths: dict[Any, list[int]] = defaultdict(list)
    for index, tensors in enumerate(zip(*lists, strict=True)):
        by_lengths[tuple(tensor.shape[0] for tensor in tensors)].append(index)
    groups: list[list[int]] = []
    for indices in by_lengths.values():
        ranks = {index: lists[0][index].shape[1] for index in indices}
        most = 0
        for index in sorted(indices, key=lambda place: -ranks[place]):
            if not most or most - ranks[index] > min(ranks[index], LIKE_RANKS):
                most = ranks[index]
                groups.append([])
            groups[-1].append(index)
    return [sorted(group) for group in groups]


def subtract_all(tensors: Sequence[Tensor], others: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """tensor - other of each pair, into ``out``."""
    for indices in batches(tensors):
        if len(indices) == 1:  # in one pass over what may be large
            torch.sub(tensors[indices[0]], others[indices[0]], out=out[indices[0]])
        else:
            torch._foreach_copy_([out[index] for index in indices], [tensors[index] for index in indices])
            torch._foreach_sub_([out[index] for index in indices], [others[index] for index in indices])


def all_finite(tensors: Sequence[Tensor]) -> Tensor:
    """Whether every entry is finite, 0-dimensional. Of tensors that all processes share, all get the same answer."""
    if all(on_cpu(tensor) for tensor in tensors):  # a CPU is slow to find such a norm
        groups = [[tensors[index] for index in indices] for indices in by_shape(tensors)]
        views = [(group, stacked_view(group)) for group in groups]
        parts = [part for group, view in views for part in (group if view is None else [view])]
        return torch.stack([bound for part in parts for bound in torch.aminmax(part)]).isfinite().all()
    largest = torch.stack(torch._foreach_norm(list(tensors), math.inf))
    return (largest < math.inf).all()  # NaN is not
