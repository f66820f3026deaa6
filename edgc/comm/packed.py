"""Tensors kept in a wire format, several at once."""

from collections.abc import Sequence

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu
from edgc.comm.wire import RowDraws, Wire, in_groups
from edgc.stacking import by_shape, map_stacked, stacked


class Packed:
    """A tensor kept in a wire format. In fp32 the tensor itself is kept, not a copy."""

    def __init__(self, values: Tensor, wire: Wire):
        self.shape = values.shape
        self.wire = wire
        row = values.reshape(1, -1)
        self.message = wire.encode(in_groups(row) if wire.scaled else row)

    @classmethod
    def restored(cls, message: Tensor, shape: torch.Size, wire: Wire) -> "Packed":
        """What an earlier one held."""
        packed = cls.__new__(cls)
        packed.message, packed.shape, packed.wire = message, shape, wire
        return packed

    def stored(self) -> Tensor:
        """fp32 or bf16 values as they are kept, without a copy."""
        return self.message.view(torch.float32 if self.wire.exact else torch.bfloat16).view(self.shape)

    def values(self) -> Tensor:
        """fp32, of the tensor's shape."""
        return self.wire.decode(self.message)[0, : self.shape.numel()].view(self.shape)


def pack_all(
    tensors: Sequence[Tensor],
    wire: Wire,
    generator: torch.Generator | None = None,
    seeds: Sequence[int] = (),
) -> list[Packed]:
    """Each tensor packed, those of equal shape at once. They share memory: it goes when all of them have gone.

    ``generator`` draws the stochastic rounding of each tensor from its own one of the ``seeds``.
    """
    groups = by_shape(tensors)
    rows = [stacked([tensors[index] for index in indices]).flatten(1) for indices in groups]
    rows = [in_groups(one) if wire.scaled else one for one in rows]
    if generator is None:
        encoded = wire.encode_all(rows)
    else:
        draws = [RowDraws(generator, [seeds[index] for index in indices]) for indices in groups]
        encoded = [wire.encode(one, own) for one, own in zip(rows, draws, strict=True)]
    packed: dict[int, Packed] = {}
    for indices, messages in zip(groups, encoded, strict=True):
        for index, message in zip(indices, messages.unbind(), strict=True):
            packed[index] = Packed.restored(message.unsqueeze(0), tensors[index].shape, wire)
    return [packed[index] for index in range(len(tensors))]


def unpack_all(several: Sequence[Packed]) -> list[Tensor]:
    """The values of each, those of equal shape and format at once."""
    values: dict[int, Tensor] = {}
    for wire in dict.fromkeys(packed.wire for packed in several):
        indices = [index for index, packed in enumerate(several) if packed.wire == wire]
        messages = [several[index].message[0] for index in indices]
        # of fp32 there is nothing to decode, and so nothing to bring together
        groups = [[place] for place in range(len(messages))] if wire.exact else by_shape(messages)
        decoded = wire.decode_all([stacked([messages[place] for place in places]) for places in groups])
        for places, rows in zip(groups, decoded, strict=True):
            for place, row in zip(places, rows.unbind(), strict=True):
                shape = several[indices[place]].shape
                values[indices[place]] = row[: shape.numel()].view(shape)
    return [values[index] for index in range(len(several))]


def choose_all(conditions: Sequence[Tensor], these: Sequence[Packed], others: Sequence[Packed]) -> list[Packed]:
    """The first of each pair where its boolean condition holds, else the second, which has the same shape and wire."""
    if all(on_cpu(condition) for condition in conditions):  # then nothing is copied
        return [this if condition else other for condition, this, other in zip(conditions, these, others, strict=True)]
    messages = map_stacked(
        _chosen,
        [condition.view(1, 1) for condition in conditions],
        [packed.message for packed in these],
        [packed.message for packed in others],
    )
    return [
        Packed.restored(message, packed.shape, packed.wire) for message, packed in zip(messages, these, strict=True)
    ]


def _chosen(condition: Tensor, this: Tensor, other: Tensor) -> Tensor:
    """``choose_all`` of messages (count, 1, bytes), by conditions (count, 1, 1)."""
    word = torch.int16 if this.shape[-1] % 4 else torch.int32  # faster than bytes
    return torch.where(condition, this.view(word), other.view(word)).view(torch.uint8)
