"""A parameter, the ways to send it, and the noise that each is predicted to make."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgc.plan.noise import LARGEST_NOISE, EnergySpectrum, RoundingNoise
from edgc.plan.ranks import RANK_MULTIPLE, nearest_rank
from edgc.specs import MatrixSpec

CHANGE = 1.25  # a change of the way costs a window, in which what the way before has left unsent is sent
# What a plan chooses from: numbers of bits, and shares of the rows. Not tuned.
FORMATS = "int8", "int6", "int5", "int4", "int3", "int2"
ROW_SHARES = 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.14, 0.2, 0.3, 0.4
# Ranks are multiples of 4. From the first number on they are multiples of the second, and a sixth to an eleventh apart.
# Matrices of one shape and rank are handled at once, and of more large ranks fewer would be equal by chance. Not tuned.
LARGE_RANK, LARGE_RANK_MULTIPLE = 96, 16
# Of the shorter side, the rank that takes what the rows leave: of an embedding the softmax gives all rows a gradient of
# few directions. Not tuned.
RANK_BESIDE_ROWS = 1 / 16
# A parameter that is too small for low rank always travels in the second: it is a small part of the bytes, and noise in
# it costs much. Where all are rounded, the others travel in the first.
ROUNDED, ROUNDED_FINE = "int4", "int8"
Choice = int | str  # a rank, "rows:SHARE" with ``rank_beside_rows``, or the format in which every value travels


@dataclass(frozen=True)
class PartialSend:
    """A way to send a part of a parameter in each step: some directions, by low rank, or some rows.

    ``spectrum``: of the energies of all directions, or rows. ``bytes_each``: of one of them. ``bytes_besides``: however
    many are sent. ``format_name``: in which they travel, where that counts.
    """

    spectrum: EnergySpectrum
    bytes_each: float
    bytes_besides: float = 0.0
    format_name: str = "fp32"


@dataclass(frozen=True)
class Candidate:
    """A parameter, and what it costs to send it.

    ``directions``, ``rows``: None where that way is no choice. ``price``: of its bytes. ``energy``: of an entry of its
    gradient, over that of the mean entry of all. ``way``: in which it travels now; empty where nothing has begun.
    ``even``: how alike its rows are, as far as the guess of ``directions`` knows.
    """

    matrix: MatrixSpec
    directions: PartialSend | None = None
    rows: PartialSend | None = None
    price: float = 1.0
    rounding: RoundingNoise = RoundingNoise()
    energy: float = 1.0
    way: str = ""
    even: float = 1.0

    @property
    def rank_beside_rows(self) -> int:
        """Of what the rows leave."""
        return nearest_rank(RANK_BESIDE_ROWS * min(self.matrix.rows, self.matrix.cols))

    @property
    def weight(self) -> float:
        """Of its noise."""
        return self.energy * self.elements

    @property
    def elements(self) -> int:
        return self.matrix.rows * self.matrix.cols

    @property
    def rounded(self) -> Choice:
        """Its choice where all parameters are rounded."""
        return rounded_format(low_rank=self.directions is not None)

    def choices(self, formats: Collection[str], same_way: bool = False) -> list[Choice]:
        """All ways to send it, with these formats.

        ``same_way``: only those of its present way. Rounding is one way, whatever the format.
        """
        if self.directions is None:
            return [ROUNDED_FINE]
        found: list[Choice] = [*formats, *ranks_to_try(self.directions.spectrum.parts)]
        if self.rows is not None:
            found += [f"rows:{share:g}" for share in ROW_SHARES]
        if same_way:
            return [choice for choice in found if _kind(way_of(choice)) == _kind(self.way)]
        return found

    def size(self, choice: Choice, bytes_per_value: Mapping[str, float]) -> float:
        """Bytes of a message, times the price."""
        if choice in bytes_per_value:
            return self.price * self.elements * bytes_per_value[str(choice)]
        parts, sent = self._parts(choice)
        size = parts.bytes_besides + sent * parts.bytes_each
        if not isinstance(choice, int) and self.directions is not None:
            size += self.rank_beside_rows * self.directions.bytes_each
        return self.price * size

    def noise(self, choice: Choice) -> float:
        """The noise under this choice, predicted; ``CHANGE`` times it of a way that is known but not in use."""
        if isinstance(choice, str) and not is_rows(choice):
            noise, known = self.rounding.noise(choice), self.rounding.measurements
        else:
            parts, sent = self._parts(choice)
            noise = parts.spectrum.noise(sent) + self.rounding.noise(parts.format_name)
            known = parts.spectrum.measurements
        return CHANGE * noise if known and self.way not in ("", way_of(choice)) else noise

    def fitted(self, choice: Choice, noise: float) -> "Candidate":
        """The same with the noise that was measured under ``choice``."""
        if not noise > 0:
            return self
        noise = min(noise, LARGEST_NOISE)
        if isinstance(choice, str) and not is_rows(choice):
            return replace(self, rounding=self.rounding.fitted(choice, noise))
        parts, sent = self._parts(choice)
        noise = max(noise - self.rounding.noise(parts.format_name), 0.01 * noise)
        fitted = replace(parts, spectrum=parts.spectrum.fitted(sent, noise))
        if isinstance(choice, int):
            return replace(self, directions=fitted, rows=_grown(self.rows, parts, fitted, sent))
        return replace(self, rows=fitted, directions=_grown(self.directions, parts, fitted, sent))

    def with_rows(self, shares: Sequence[float]) -> "Candidate":
        """The same where the largest rows are known to hold these shares of a gradient, at each of ``ROW_SHARES``.

        The last number says how even rows are: 1 if they are alike, a tenth if a tenth of them has all. What low rank
        leaves out spreads over all rows, so where few rows have a gradient it is much beside that of the others.
        """
        if self.rows is None or len(shares) != len(ROW_SHARES) + 1 or not all(0 < share <= 1.001 for share in shares):
            return self
        *parts, even = shares
        counts = (math.ceil(part * self.matrix.rows) for part in ROW_SHARES)
        held = {count: min(share, 1.0) for count, share in zip(counts, parts, strict=True)}
        known = replace(self, rows=replace(self.rows, spectrum=replace(self.rows.spectrum, held=tuple(held.items()))))
        if self.directions is None or self.directions.spectrum.measurements:
            return known
        harder = self.directions.spectrum.harder(self.even / even)  # what an earlier window showed is taken back
        return replace(known, directions=replace(self.directions, spectrum=harder), even=even)

    def weighed(self, energy: float) -> "Candidate":
        """The same with this energy of an entry, if it is known."""
        return replace(self, energy=energy) if 0 < energy < math.inf else self

    @property
    def shape(self) -> list[Any]:
        """What must be as it was for a choice of then to make sense now."""
        return [self.matrix.rows, self.matrix.cols, self.directions is not None]

    def learned(self) -> list[Any]:
        """What measurements have shown, as plain numbers and lists."""
        spectra = [None if way is None else way.spectrum for way in (self.directions, self.rows)]
        return [None if one is None else [one.steepness, one.factor, one.measurements, one.held] for one in spectra] + [
            [self.rounding.factor, self.rounding.measurements],
            self.energy,
            self.even,
        ]

    def with_learned(self, directions: Any, rows: Any, rounding: Any, energy: float, even: float) -> "Candidate":
        """The same with what ``learned`` gave."""
        return replace(
            self,
            directions=_with_spectrum(self.directions, directions),
            rows=_with_spectrum(self.rows, rows),
            rounding=RoundingNoise(*rounding),
            energy=energy,
            even=even,
        )

    def _parts(self, choice: Choice) -> tuple[PartialSend, int]:
        if isinstance(choice, int):
            assert self.directions is not None
            return self.directions, choice
        assert self.rows is not None
        return self.rows, math.ceil(float(choice.partition(":")[2]) * self.matrix.rows)


def _with_spectrum(parts: PartialSend | None, learned: Any) -> PartialSend | None:
    if parts is None:
        return None
    steepness, factor, measurements, held = learned
    pairs = tuple((count, share) for count, share in held)
    return replace(parts, spectrum=EnergySpectrum(parts.spectrum.parts, steepness, factor, measurements, pairs))


def _grown(other: PartialSend | None, before: PartialSend, after: PartialSend, sent: int) -> PartialSend | None:
    """What is known of the other parts once these are measured again: gradients that spread wider do so in both.

    Else the other way would look ever better as the noise grows, only because nothing measures it.
    """
    known, now = before.spectrum.noise(sent), after.spectrum.noise(sent)
    if other is None or not before.spectrum.measurements or not known > 0:
        return other
    return replace(other, spectrum=other.spectrum.harder(now / known))


def rounded_format(low_rank: bool) -> str:
    """In which a parameter travels where all are rounded; ``low_rank``: low rank could take it."""
    return ROUNDED if low_rank else ROUNDED_FINE


def bits_of(name: str) -> int:
    """Of a value in a wire format, without its share of a scale: 4 of int4."""
    return int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))


def way_of(choice: Choice) -> str:
    """In which a parameter travels: in low rank, in rows, or in a format."""
    return "rank" if isinstance(choice, int) else "rows" if is_rows(choice) else choice


def _kind(way: str) -> str:
    return way if way in ("rank", "rows") else "rounding"


def is_rows(choice: str) -> bool:
    return choice.startswith("rows:")


def ranks_to_try(directions: int) -> list[int]:
    """Those that a plan chooses from, up to half of full rank, which is ``directions``."""
    ranks, rank = [], RANK_MULTIPLE
    while rank <= directions // 2:
        ranks.append(rank)
        rank += RANK_MULTIPLE if rank < LARGE_RANK else LARGE_RANK_MULTIPLE * (rank // LARGE_RANK)
    return ranks
