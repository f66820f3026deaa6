"""A parameter: what it costs to send it in each way, and the noise that each is predicted to make."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgc.plan.by_volume.choices import (
    ROUNDED_FINE,
    ROW_SHARES,
    Choice,
    SendLowRank,
    SendRounded,
    SendRows,
    ranks_to_try,
    rounded_format,
    rows_that_travel,
)
from edgc.plan.by_volume.noise import LARGEST_NOISE, EnergySpectrum, RoundingNoise
from edgc.plan.ranks import nearest_rank
from edgc.specs import MatrixSpec

# Times the noise of an encoding that is not in use: to change to it costs a window, in which what the one before has
# left unsent is sent. Not tuned.
NOISE_OF_CHANGE = 1.25
# Of the shorter side, the rank that takes what the rows leave: of an embedding the softmax gives all rows a gradient of
# few directions. Not tuned.
RANK_BESIDE_ROWS = 1 / 16


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

    def size(self, sent: int) -> float:
        """Bytes where so many are sent."""
        return self.bytes_besides + sent * self.bytes_each


@dataclass(frozen=True)
class PlannedParameter:
    """A parameter, and what it costs to send it.

    ``directions``, ``rows``: None where that way is no choice. ``price``: of its bytes; ``rounded_price``: times it
    where they are rounded. ``energy``: of an entry of its gradient, over that of the mean entry of all. ``current``:
    how it travels now; None before compression has begun. ``row_evenness``: how alike its rows are (1: all alike), as
    far as the guess of ``directions`` knows.
    """

    matrix: MatrixSpec
    directions: PartialSend | None = None
    rows: PartialSend | None = None
    price: float = 1.0
    rounded_price: float = 1.0
    rounding: RoundingNoise = RoundingNoise()
    energy: float = 1.0
    current: Choice | None = None
    row_evenness: float = 1.0

    @property
    def rank_beside_rows(self) -> int:
        """The rank that takes what the rows leave."""
        return nearest_rank(RANK_BESIDE_ROWS * min(self.matrix.rows, self.matrix.cols))

    @property
    def weight(self) -> float:
        """Weight of its noise among those of all parameters."""
        return self.energy * self.elements

    @property
    def elements(self) -> int:
        return self.matrix.elements

    @property
    def rounded(self) -> SendRounded:
        """Its choice where all parameters are rounded."""
        return SendRounded(rounded_format(low_rank=self.directions is not None))

    def choices(self, formats: Collection[str], same_method: bool = False) -> list[Choice]:
        """All ways to send it, with these formats. ``same_method``: only those of its present method."""
        if self.directions is None:
            return [SendRounded(ROUNDED_FINE)]
        found: list[Choice] = [SendRounded(name) for name in formats]
        found += [SendLowRank(rank) for rank in ranks_to_try(self.directions.spectrum.parts)]
        if self.rows is not None:
            found += [SendRows(share, self.rank_beside_rows) for share in ROW_SHARES]
        if same_method and self.current is not None:
            return [choice for choice in found if choice.method == self.current.method]
        return found

    def size(self, choice: Choice, bytes_per_value: Mapping[str, float]) -> float:
        """Bytes of a message, times the price."""
        if isinstance(choice, SendRounded):
            return self.price * self.rounded_price * self.elements * bytes_per_value[choice.format]
        size = self._partial_send(choice).size(choice.parts(self.matrix))
        if isinstance(choice, SendRows) and self.directions is not None:
            size += self.directions.size(choice.rank)
        return self.price * size

    def noise(self, choice: Choice) -> float:
        """The noise under this choice, predicted; ``NOISE_OF_CHANGE`` times it where its method has been measured and
        its encoding is not in use.
        """
        if isinstance(choice, SendRounded):
            noise, known = self.rounding.noise(choice.format), self.rounding.measurements
        else:
            send = self._partial_send(choice)
            noise = send.spectrum.noise(choice.parts(self.matrix)) + self.rounding.noise(send.format_name)
            known = send.spectrum.measurements
        changes = self.current is not None and self.current.encoding != choice.encoding
        return NOISE_OF_CHANGE * noise if known and changes else noise

    def fitted(self, choice: Choice, noise: float) -> "PlannedParameter":
        """The same with the noise that was measured under ``choice``."""
        if not noise > 0:
            return self
        noise = min(noise, LARGEST_NOISE)
        if isinstance(choice, SendRounded):
            return replace(self, rounding=self.rounding.fitted(choice.format, noise))
        before, sent = self._partial_send(choice), choice.parts(self.matrix)
        noise = max(noise - self.rounding.noise(before.format_name), 0.01 * noise)
        after = replace(before, spectrum=before.spectrum.fitted(sent, noise))
        if isinstance(choice, SendLowRank):
            return replace(self, directions=after, rows=_noisier_as_well(self.rows, before, after, sent))
        return replace(self, rows=after, directions=_noisier_as_well(self.directions, before, after, sent))

    def with_rows(self, shares: Sequence[float]) -> "PlannedParameter":
        """The same where the largest rows are known to hold these shares of a gradient, at each of ``ROW_SHARES``.

        The last number says how even rows are: 1 if they are alike, a tenth if a tenth of them has all. What low rank
        leaves out spreads over all rows, so where few rows have a gradient it is much beside that of the others.
        """
        if self.rows is None or len(shares) != len(ROW_SHARES) + 1 or not all(0 < share <= 1.001 for share in shares):
            return self
        *parts, evenness = shares
        counts = (rows_that_travel(part, self.matrix.rows) for part in ROW_SHARES)
        measured = {count: min(share, 1.0) for count, share in zip(counts, parts, strict=True)}
        of_rows = replace(self.rows.spectrum, measured_shares=tuple(measured.items()))
        known = replace(self, rows=replace(self.rows, spectrum=of_rows))
        if self.directions is None or self.directions.spectrum.measurements:
            return known
        # the factor of an earlier window is taken back
        of_directions = self.directions.spectrum.with_noise_scaled(self.row_evenness / evenness)
        return replace(known, directions=replace(self.directions, spectrum=of_directions), row_evenness=evenness)

    def with_energy(self, energy: float) -> "PlannedParameter":
        """The same with this energy of an entry, if it is known."""
        return replace(self, energy=energy) if 0 < energy < math.inf else self

    @property
    def shape(self) -> list[Any]:
        """Rows, columns, and whether low rank is allowed: a saved choice is valid only where these are the same."""
        return [self.matrix.rows, self.matrix.cols, self.directions is not None]

    def learned(self) -> list[Any]:
        """What measurements have shown, as plain numbers and lists."""
        spectra = [
            None
            if send is None
            else [
                send.spectrum.steepness,
                send.spectrum.factor,
                send.spectrum.measurements,
                send.spectrum.measured_shares,
            ]
            for send in (self.directions, self.rows)
        ]
        return [*spectra, [self.rounding.factor, self.rounding.measurements], self.energy, self.row_evenness]

    def with_learned(
        self, directions: Any, rows: Any, rounding: Any, energy: float, row_evenness: float
    ) -> "PlannedParameter":
        """The same with what ``learned`` gave."""
        return replace(
            self,
            directions=_with_spectrum(self.directions, directions),
            rows=_with_spectrum(self.rows, rows),
            rounding=RoundingNoise(*rounding),
            energy=energy,
            row_evenness=row_evenness,
        )

    def _partial_send(self, choice: SendLowRank | SendRows) -> PartialSend:
        send = self.directions if isinstance(choice, SendLowRank) else self.rows
        assert send is not None
        return send


def _with_spectrum(send: PartialSend | None, learned: Any) -> PartialSend | None:
    if send is None:
        return None
    steepness, factor, measurements, measured_shares = learned
    pairs = tuple((count, share) for count, share in measured_shares)
    return replace(send, spectrum=EnergySpectrum(send.spectrum.parts, steepness, factor, measurements, pairs))


def _noisier_as_well(
    other: PartialSend | None, before: PartialSend, after: PartialSend, sent: int
) -> PartialSend | None:
    """What is known of the other parts once these are measured again: gradients that spread wider do so in both.

    Else the other way would look ever better as the noise grows, only because nothing measures it.
    """
    known, now = before.spectrum.noise(sent), after.spectrum.noise(sent)
    if other is None or not before.spectrum.measurements or not known > 0:
        return other
    return replace(other, spectrum=other.spectrum.with_noise_scaled(now / known))
