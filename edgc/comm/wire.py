"""Wire formats: how fp32 values are written into the bytes of a message. Pure functions of tensors.

All formats but fp32 and bf16 work on groups of 128 values that share a scale in bf16. fp16 and fp8 (e4m3, Micikevicius
et al. 2022, arXiv 2209.05433): the largest magnitude becomes the largest number that the format has. Codes of 4 bits
and more: the largest magnitude of the group divided by the largest code, rounding to nearest, as in ZeRO++ (arXiv
2306.10209) and SDP4Bit (arXiv 2410.15526). 3 bits and fewer: levels at odd multiples of half a step, the step that is
best for normal values (Max 1960, "Quantizing for minimum distortion", table II), because the largest of 128 values
would stretch so few levels too far. Codes are packed without padding bits.

A group with an entry that is not finite comes out not finite. In codes of less than 8 bits other groups of its row may
then come out with any values.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from edgc.arithmetic import on_cpu
from edgc.comm.bit_packing import pack, unpack
from edgc.seeding import stable_seed

GROUP = 128
ALIGNMENT = 16  # bytes, fewer than a group takes
TOGETHER = 2**24  # values of several tensors that are rounded in one operation, at most: 64 MB in fp32
# Step in units of the root mean square that loses least of normal values, by bits.
_NORMAL_STEP = {1: 1.5958, 2: 0.9957, 3: 0.5860}
_FLOATS = {16: torch.float16, 8: torch.float8_e4m3fn}
_EXPONENT = 0x7F800000  # where fp32 has it
_LAST_BIT_IS_ONE = 1.5 * 2**23  # added to a small number in fp32, it leaves the nearest integer in the last bits
_TINY = torch.finfo(torch.bfloat16).tiny


@dataclass(frozen=True)
class Wire:
    """A wire format. ``bits`` a value: 32 (fp32), 16 (bf16), or 1 to 8 with one scale for each 128 values.

    ``stochastic`` rounding is unbiased: up or down with the probability that makes the mean right (4 to 16 bits).
    ``hadamard`` rotates every group, which spreads outliers over it. ``floating``: what each group shares a scale for
    are fp16 or fp8 numbers, which are not rotated.
    """

    bits: int
    stochastic: bool = False
    hadamard: bool = False
    floating: bool = False

    @property
    def exact(self) -> bool:
        return self.bits == 32

    @property
    def scaled(self) -> bool:
        """Whether values come in groups of 128 with a scale."""
        return self.bits <= 8 or self.floating

    def message_bytes(self, values: int) -> int:
        """Bytes that ``values`` values, a multiple of 128, take."""
        return values * self.bits // 8 + (values // GROUP * 2 if self.scaled else 0)

    def tensor_bytes(self, values: int) -> int:
        """Bytes that a tensor of so many values takes as a ``Packed``."""
        return self.message_bytes(values + -values % GROUP if self.scaled else values)

    def bytes_per_value(self) -> float:
        return self.message_bytes(GROUP) / GROUP

    def encode(
        self,
        values: Tensor,
        generator: "torch.Generator | RowDraws | None" = None,
        overwrite: bool = False,
        aligned: bool = False,
    ) -> Tensor:
        """fp32 (rows, n), n a multiple of 128 -> uint8 (rows, ``message_bytes(n)``).

        ``generator`` draws the stochastic rounding. ``overwrite``: whether the values are not needed any more.
        ``aligned``: on a GPU rows end at multiples of 16 bytes. NCCL copies others byte by byte.
        """
        if self.bits == 32:
            return values.contiguous().view(torch.uint8)
        if not self.scaled:
            return (_to_bf16(values, generator) if self.stochastic else values.to(torch.bfloat16)).view(torch.uint8)
        return self._message(*self._rounded(values, generator, overwrite), aligned)

    def decode(self, message: Tensor) -> Tensor:
        """uint8 (rows, bytes) -> fp32 (rows, n): the inverse of ``encode`` up to rounding."""
        if self.bits == 32:
            return message.view(torch.float32)
        if not self.scaled:
            return message.view(torch.bfloat16).float()
        return self._values(*self._parts(message))

    def encode_all(self, several: Sequence[Tensor]) -> list[Tensor]:
        """``encode`` of each, without stochastic rounding: small ones at once but for packing."""
        if not self.scaled or sum(values.numel() for values in several) > TOGETHER:
            return [self.encode(values) for values in several]
        lengths = [values.numel() // GROUP for values in several]
        joined = torch.cat([values.reshape(1, -1) for values in several], dim=1)
        numbers, scale = self._rounded(joined, overwrite=True)
        parts = zip(*(torch.split(one, lengths, dim=1) for one in (numbers, scale)), strict=True)
        return [
            self._message(*(one.view(len(values), -1, one.shape[-1]) for one in part))
            for values, part in zip(several, parts, strict=True)
        ]

    def decode_all(self, several: Sequence[Tensor]) -> list[Tensor]:
        """``decode`` of each: small ones at once but for unpacking."""
        if not self.scaled or 8 * sum(message.numel() for message in several) > self.bits * TOGETHER:
            return [self.decode(message) for message in several]
        parts = [self._parts(message) for message in several]
        numbers, scale = (
            torch.cat([one.reshape(-1, one.shape[-1]) for one in side]) for side in zip(*parts, strict=True)
        )
        lengths = [len(own) * own.shape[1] * GROUP for own, _ in parts]
        values = torch.split(self._values(numbers.unsqueeze(0), scale.unsqueeze(0))[0], lengths)
        return [one.view(len(message), -1) for one, message in zip(values, several, strict=True)]

    def _rounded(
        self, values: Tensor, generator: "torch.Generator | RowDraws | None" = None, overwrite: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(rows, n) -> codes or numbers (rows, groups, 128) and bf16 scales (rows, groups, 1)."""
        rotated = self.rotated(values)
        groups = rotated.view(len(values), -1, GROUP)
        scale = self._scale(groups)
        # that of a group of zeros may be 0; its codes do not matter
        divisor = scale.clamp_min(_TINY) if self.bits in _NORMAL_STEP else scale
        scaled = groups.div_(divisor) if overwrite or rotated is not values else groups / divisor
        return (self._numbers if self.floating else self._codes)(scaled, generator), scale

    def _message(self, numbers: Tensor, scale: Tensor, aligned: bool = False) -> Tensor:
        """What ``_rounded`` has given, as bytes (rows, bytes)."""
        rows = len(numbers)
        flat = numbers.view(rows, -1)
        packed = flat.view(torch.uint8) if self.floating else pack(flat, self.bits)
        parts = [packed, scale.view(rows, -1).view(torch.uint8)]
        if aligned and not on_cpu(packed):
            missing = -sum(part.shape[1] for part in parts) % ALIGNMENT
            parts.append(packed[:, :missing])  # any bytes will do
        return torch.cat(parts, dim=1)

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        """The inverse of ``_message``."""
        rows, groups = len(message), message.shape[1] // self.message_bytes(GROUP)
        sizes = groups * GROUP * self.bits // 8, 2 * groups
        packed, scale, _ = torch.split(message, [*sizes, message.shape[1] - sum(sizes)], dim=1)
        numbers = packed.contiguous().view(_FLOATS[self.bits]) if self.floating else unpack(packed, self.bits)
        return numbers.view(rows, groups, GROUP), scale.contiguous().view(torch.bfloat16).unsqueeze(-1)

    def _values(self, numbers: Tensor, scale: Tensor) -> Tensor:
        """The inverse of ``_rounded``, up to rounding."""
        values = numbers.float() if self.floating else _less(numbers, self._centre)
        return self.restored(values.mul_(scale).view(len(numbers), -1))

    @property
    def unrotated(self) -> "Wire":
        """The format of what ``rotated`` gives. Sums of rotated values are rotated sums, so they are added up in it."""
        return replace(self, hadamard=False)

    def rotated(self, values: Tensor) -> Tensor:
        """(rows, n) values as they are rounded: with ``hadamard`` each group is rotated."""
        return self._turned(values, 0)

    def restored(self, values: Tensor) -> Tensor:
        """The inverse of ``rotated``."""
        return self._turned(values, 1)

    def _turned(self, values: Tensor, way: int) -> Tensor:
        if not self.hadamard or not self.scaled or self.floating:
            return values
        if on_cpu(values):
            return _turned_by_parts(values, self.bits in _NORMAL_STEP, way)
        turned: Tensor = values.view(-1, GROUP) @ _rotation(self.bits in _NORMAL_STEP, values.device)[way]
        return turned.view(values.shape)

    @property
    def _centre(self) -> float:
        """The code that stands for 0: a whole one from 4 bits on, below between two codes."""
        return float(2 ** (self.bits - 1)) - (1 if self.bits >= 4 else 0.5)

    def _scale(self, groups: Tensor) -> Tensor:
        """(rows, groups, 128) -> bf16 (rows, groups, 1): what the code, or number, 1 stands for."""
        if self.bits in _NORMAL_STEP:
            return (_norms(groups) * (_NORMAL_STEP[self.bits] / math.sqrt(GROUP))).to(torch.bfloat16)
        # 0.4 % more, so that rounding to bf16 never pushes the largest value past the last code
        largest = _largest(groups)
        last = torch.finfo(_FLOATS[self.bits]).max if self.floating else self._centre
        least = _tiny(groups.device)  # above 0, and lost beside a scale of anything that counts
        return torch.add(least, largest, alpha=1.004 / last, out=torch.empty_like(largest, dtype=torch.bfloat16))

    def _codes(self, scaled: Tensor, generator: "torch.Generator | RowDraws | None") -> Tensor:
        """fp32 -> uint8 of the same shape, in the place of what is given."""
        shift = _LAST_BIT_IS_ONE
        if self.stochastic and self.bits >= 4:
            scaled.add_(self._centre).add_(_drawn(_UNIFORM, scaled, generator)).floor_()
        elif self.bits in _NORMAL_STEP:  # only there do values lie beyond the last code
            scaled.add_(self._centre).clamp_(0, 2**self.bits - 1)
        else:
            shift += self._centre
        # This rounds to the nearest, and of two to the even one. Of values that are not finite it makes any number:
        # such a group has no finite scale, and the bytes that it shares with other groups are wrong.
        return scaled.add_(shift).view(torch.int32).to(torch.uint8)

    def _numbers(self, scaled: Tensor, generator: "torch.Generator | RowDraws | None") -> Tensor:
        """fp32 -> fp16 or fp8 of the same shape."""
        if self.stochastic:
            # Numbers of one exponent lie alike far apart, those below the smallest normal one as far as there.
            numbers = torch.finfo(_FLOATS[self.bits])
            magnitude = scaled.abs().clamp_min(numbers.smallest_normal)
            step = (magnitude.view(torch.int32) & _EXPONENT).view(torch.float32) * numbers.eps
            scaled = torch.floor(scaled / step + _drawn(_UNIFORM, scaled, generator)) * step
        return scaled.to(_FLOATS[self.bits])


@functools.cache
def _tiny(device: torch.device) -> Tensor:
    """0-dimensional."""
    return torch.tensor(_TINY, dtype=torch.float32, device="cpu").to(device)


def _largest(groups: Tensor) -> Tensor:
    """(..., 128) -> the largest magnitudes (..., 1): a CPU is faster in several operations, a GPU in one."""
    if on_cpu(groups):
        least, most = (bound(groups, dim=-1, keepdim=True) for bound in (torch.amin, torch.amax))
        return torch.maximum(most, -least)
    norms: Tensor = torch.linalg.vector_norm(groups, math.inf, dim=-1, keepdim=True)
    return norms


def _norms(groups: Tensor) -> Tensor:
    """(..., 128) -> Euclidean norms (..., 1), finite where all values are: the squares of large ones overflow fp32.

    On a CPU float64 takes longer, so it is for such groups alone.
    """
    if on_cpu(groups):
        norms: Tensor = torch.linalg.vector_norm(groups, dim=-1, keepdim=True)
        if torch.isfinite(norms).all():
            return norms
        return torch.where(norms.isinf(), torch.linalg.vector_norm(groups.double(), dim=-1, keepdim=True), norms)
    wide: Tensor = torch.linalg.vector_norm(groups, dim=-1, keepdim=True, dtype=torch.float64)
    return wide


def _less(codes: Tensor, centre: float) -> Tensor:
    """Integers minus a number, in fp32: a CPU is faster in two operations, a GPU in one."""
    if on_cpu(codes):
        return codes.to(torch.float32).sub_(centre)
    return torch.sub(codes, centre, out=torch.empty(codes.shape, dtype=torch.float32, device=codes.device))


# whatever the script's default type is: in 16 bits draws would be biased
_UNIFORM = functools.partial(torch.rand, dtype=torch.float32)


@dataclass(frozen=True)
class RowDraws:
    """A generator that is seeded anew for each row: what a row becomes does not depend on its neighbours."""

    generator: torch.Generator
    seeds: Sequence[int]


def _drawn(draw: Callable[..., Tensor], like: Tensor, generator: torch.Generator | RowDraws | None) -> Tensor:
    """Random values of the shape of (rows, ...), on its device. The generator of training stays as it is."""
    if generator is None:
        raise ValueError("stochastic rounding needs a generator")
    if not isinstance(generator, RowDraws):
        return draw(like.shape, generator=generator, device=like.device)
    rows = []
    for seed in generator.seeds:
        generator.generator.manual_seed(seed)
        rows.append(draw(like.shape[1:], generator=generator.generator, device=like.device))
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


FP32 = Wire(32)
WIRES = {
    "fp32": FP32,
    "bf16": Wire(16),
    "fp16": Wire(16, floating=True),
    "fp8": Wire(8, floating=True),
    **{f"int{bits}": Wire(bits) for bits in (8, 6, 5, 4, 3, 2, 1)},
}


def wire(name: str, *, stochastic: bool = False, hadamard: bool = False) -> Wire:
    """The format of a name in ``WIRES``."""
    return replace(WIRES[name], stochastic=stochastic, hadamard=hadamard)


def in_groups(values: Tensor) -> Tensor:
    """(..., n) values, with zeros up to a whole group."""
    missing = -values.shape[-1] % GROUP
    return torch.nn.functional.pad(values, (0, missing)) if missing else values


def _to_bf16(values: Tensor, generator: torch.Generator | RowDraws | None) -> Tensor:
    """Rounded to bf16 up or down at random: a random number below the weight of its last bit is added, then cut off."""
    bits = values.contiguous().view(torch.int32)
    noise = _drawn(functools.partial(torch.randint, 1 << 16, dtype=torch.int32), bits, generator)
    rounded = noise.add_(bits).bitwise_and_(-(1 << 16)).view(torch.float32)
    # adding to the bits of infinity would make it NaN, which is not finite either, but of NaN perhaps a number
    finite = (bits & _EXPONENT) != _EXPONENT
    return torch.where(finite, rounded, values).to(torch.bfloat16)


def _hadamard(size: int) -> Tensor:
    """Sylvester's construction of Hadamard's matrix, not normalised."""
    matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
    while len(matrix) < size:
        matrix = torch.cat([torch.cat([matrix, matrix], dim=1), torch.cat([matrix, -matrix], dim=1)])
    return matrix


def _signs() -> Tensor:
    """(128,) Random signs, the same everywhere.

    Hadamard's matrix makes one large value of a constant group. The signs prevent that. They are there below 4 bits
    alone, where the largest value does not set the scale.
    """
    generator = torch.Generator().manual_seed(stable_seed("signs"))
    return 1 - 2 * torch.randint(2, (GROUP,), generator=generator, dtype=torch.float32, device="cpu")


@functools.cache
def _rotation(signed: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """An orthonormal matrix of 128 x 128, Hadamard's, perhaps with random signs, and its inverse."""
    matrix = _hadamard(GROUP) / math.sqrt(GROUP)
    if signed:
        matrix = _signs().unsqueeze(1) * matrix
    return matrix.to(device), matrix.T.contiguous().to(device)


def _turned_by_parts(values: Tensor, signed: bool, way: int) -> Tensor:
    """Values times one of the matrices of ``_rotation``: on a CPU this takes a third of the time.

    A small matrix turns 16 values at a time. Sums and differences of neighbours then double the number, up to 128.
    """
    matrix, signs = _small_rotation()
    groups = values.view(-1, GROUP)
    if signed and way == 0:
        groups = groups * signs
    turned = groups.view(-1, len(matrix)) @ matrix
    size = len(matrix)
    while size < GROUP:
        left, right = turned.view(-1, 2, size).unbind(1)
        left.add_(right)
        torch.sub(left, right, alpha=2, out=right)  # the left one holds the sum already
        size *= 2
    turned = turned.view(-1, GROUP)
    return (turned.mul_(signs) if signed and way == 1 else turned).view(values.shape)


@functools.cache
def _small_rotation() -> tuple[Tensor, Tensor]:
    """Hadamard's matrix of 16 x 16, normalised for 128 values, and the signs of ``_rotation``."""
    return _hadamard(16) / math.sqrt(GROUP), _signs()
