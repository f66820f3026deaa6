"""Codes of a few bits as bytes without padding bits, and back. Pure functions of tensors."""

import functools
import math

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu

_FEW_CODES = 2**15  # codes for which starting an operation costs more than going over them
_MANY_BYTES = 2**26  # of words, of which each code takes one for a while


def pack(codes: Tensor, bits: int) -> Tensor:
    """Integers (rows, n) below 2^bits -> uint8 (rows, n * bits / 8), n a multiple of 8."""
    if bits == 8:
        return codes.to(torch.uint8)
    rows, (count, length, word) = codes.shape[0], _word(bits)
    if _folds(codes):
        words = codes.to(torch.uint8)
        for joined, step in _joints(bits):
            words = words.view(joined)
            mask, half = 2**step - 1, 4 * joined.itemsize
            words = (words >> (half - step)).bitwise_and_(mask << step).bitwise_or_(words & mask)
    elif bits == 4:  # one operation
        words = torch.add(codes[:, ::2], codes[:, 1::2], alpha=2**bits).to(torch.uint8)
    elif codes.numel() > (most := _MANY_BYTES // word.itemsize):
        parts = torch.split(codes, max(most // rows // count, 1) * count, dim=1)
        return torch.cat([pack(part, bits) for part in parts], dim=1)
    else:
        words = (codes.view(rows, -1, count).to(word) << _shifts(bits, count, codes.device)).sum(dim=-1, dtype=word)
    return words.view(torch.uint8).view(rows, -1, words.itemsize)[..., :length].reshape(rows, -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack``, as integers of any type."""
    if bits == 8:
        return packed
    rows, (count, length, word) = packed.shape[0], _word(bits)
    if not _folds(packed) and packed.numel() > (most := _MANY_BYTES // word.itemsize // count * length):
        parts = torch.split(packed, max(most // rows // length, 1) * length, dim=1)
        return torch.cat([unpack(part, bits).to(torch.uint8) for part in parts], dim=1)
    size = _joints(bits)[-1][0].itemsize if _folds(packed) else word.itemsize
    whole = packed.reshape(rows, -1, length)
    if length < size:
        whole = torch.nn.functional.pad(whole, (0, size - length))
    if not _folds(packed):
        words = whole.view(word)
        return (words >> _shifts(bits, count, packed.device)).bitwise_and_(2**bits - 1).view(rows, -1)
    words = whole
    for joined, step in reversed(_joints(bits)):
        words = words.view(joined)
        mask, half = 2**step - 1, 4 * joined.itemsize
        words = (words << (half - step)).bitwise_and_(mask << half).bitwise_or_(words & mask)
    return words.view(torch.uint8).view(rows, -1)


def _folds(tensor: Tensor) -> bool:
    """Whether codes are joined in pairs, then pairs of pairs, until they fill whole bytes: a CPU goes over many of them
    faster so than in one operation on words of eight bytes each. On a GPU each operation costs a launch.
    """
    return on_cpu(tensor) and tensor.numel() > _FEW_CODES


@functools.cache
def _shifts(bits: int, count: int, device: torch.device) -> Tensor:
    """The bit positions of the codes in a word."""
    return (torch.arange(count, device="cpu") * bits).to(_word(bits)[2]).to(device)


def _word(bits: int) -> tuple[int, int, torch.dtype]:
    """So many codes fill so many whole bytes of an integer of this type."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8, {8: torch.uint8, 24: torch.int32, 40: torch.int64, 56: torch.int64}[whole]


def _joints(bits: int) -> list[tuple[torch.dtype, int]]:
    """The words in which codes are joined until they fill whole bytes, and the bits that each half of a word holds."""
    steps = zip((torch.int16, torch.int32, torch.int64), (bits, 2 * bits, 4 * bits), strict=True)
    return [(word, step) for word, step in steps if step < math.lcm(bits, 8)]
