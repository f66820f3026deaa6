"""Codes of a few bits as bytes without padding bits, and back. Pure functions of tensors.

So many codes fill so many whole bytes: 8 codes of 5 bits fill 5. A row of n codes is taken as 8 parts of n/8 codes. Of
these, 5 parts give the low bits of n/8 bytes each. The other 3 give 15 bits in a word, of which each of these 5
bytes takes 3 as its high bits. So every operation goes over long runs of memory, and none needs wide words.
"""

import functools
import math

import torch
from torch import Tensor


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 (rows, n) below 2^bits -> uint8 (rows, n * bits / 8), n a multiple of 8."""
    if bits == 8:
        return codes
    count, length = _codes_and_bytes(bits)
    low, word = torch.split(codes.view(len(codes), count, -1), [length, count - length], dim=1)
    if count - length > 1:
        word = (word << _multiples(bits, count - length, torch.int16, codes.device)).sum(1, True, dtype=torch.int16)
    if length > 1:
        word = word >> _multiples(8 - bits, length, word.dtype, codes.device)
    packed = torch.empty_like(low, memory_format=torch.contiguous_format)
    # what of a word lies above the bits that a byte takes is lost on the way into the byte
    return torch.add(low, word, alpha=2**bits, out=packed).view(len(codes), -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed
    count, length = _codes_and_bytes(bits)
    mask = 2**bits - 1
    parts = packed.reshape(len(packed), length, -1)
    if length == 1:  # the high bits are a word already
        codes = (parts >> _multiples(bits, count, torch.uint8, packed.device)).bitwise_and_(mask)
        return codes.view(len(packed), -1)
    codes = parts.new_empty(len(packed), count, parts.shape[-1])
    low, rest = torch.split(codes, [length, count - length], dim=1)
    torch.bitwise_and(parts, mask, out=low)
    wide = torch.int16 if count - length > 1 else torch.uint8
    pieces = (parts >> bits) << _multiples(8 - bits, length, wide, packed.device)
    if count - length == 1:
        torch.sum(pieces, 1, keepdim=True, dtype=wide, out=rest)
    else:
        word = pieces.sum(1, True, dtype=wide) >> _multiples(bits, count - length, wide, packed.device)
        torch.bitwise_and(word, mask, out=rest)
    return codes.view(len(packed), -1)


def _codes_and_bytes(bits: int) -> tuple[int, int]:
    """So many codes fill so many whole bytes."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8


@functools.cache
def _multiples(step: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count, 1): 0, step, 2 step and so on."""
    return (torch.arange(count, dtype=dtype, device="cpu") * step).unsqueeze(1).to(device)
