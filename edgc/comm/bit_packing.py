"""Codes of a few bits as bytes without padding bits, and back. Pure functions of tensors.

So many codes fill so many whole bytes: 8 codes of 5 bits fill 5. A row of n codes is taken as 8 parts of n/8 codes. Each
of the first 5 parts gives the low bits of n/8 bytes. The other 3 parts give 15 bits in a word, of which each of these
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
    low, rest = torch.split(codes.view(len(codes), count, -1), [length, count - length], dim=1)
    word = rest
    if count - length > 1:
        shifts = _multiples(bits, count - length, torch.int16, codes.device)
        word = (rest.to(torch.int16) << shifts).sum(1, True, dtype=torch.int16)
    if length > 1:
        word = word >> _multiples(8 - bits, length, word.dtype, codes.device)
    # what lies above the bits that a byte takes does not outlast the multiplication
    return torch.add(low, word.to(torch.uint8), alpha=2**bits).view(len(codes), -1)


def unpack(packed: Tensor, bits: int) -> Tensor:
    """The inverse of ``pack``."""
    if bits == 8:
        return packed
    count, length = _codes_and_bytes(bits)
    parts = packed.reshape(len(packed), length, -1)
    low, word = parts & (2**bits - 1), parts >> bits
    wide = torch.int16 if count - length > 1 else torch.uint8
    if length > 1:
        word = (word.to(wide) << _multiples(8 - bits, length, wide, packed.device)).sum(1, True, dtype=wide)
    if count - length > 1:
        word = (word >> _multiples(bits, count - length, wide, packed.device)).bitwise_and_(2**bits - 1).to(torch.uint8)
    return torch.cat([low, word], dim=1).view(len(packed), -1)


def _codes_and_bytes(bits: int) -> tuple[int, int]:
    """So many codes fill so many whole bytes."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8


@functools.cache
def _multiples(step: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(count, 1): 0, step, 2 step and so on."""
    return (torch.arange(count, dtype=dtype, device="cpu") * step).unsqueeze(1).to(device)
