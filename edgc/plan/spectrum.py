"""Spectra of gradients as far as a low-rank engine has measured them, continued by a power law."""

import bisect
import math
from collections.abc import Sequence


def extended(energies: Sequence[float], length: int) -> list[float]:
    """Squared singular values, the largest first, continued to ``length`` by the law through their last three quarters.

    At least one energy must be given.
    """
    known = len(energies)
    first = max(known // 4, 1)
    slope = 1.0
    if known > first and energies[known - 1] > 0:
        slope = math.log(energies[first - 1] / energies[known - 1]) / math.log(known / first)
    tail = [energies[-1] * (known / index) ** slope for index in range(known + 1, length + 1)]
    return [*energies[:length], *tail]


def dropped(spectra: Sequence[Sequence[float]], rank: int) -> float:
    """The energy that ``rank`` in every matrix leaves out: of whole spectra, the largest values first."""
    return sum(sum(spectrum[rank:]) for spectrum in spectra)


def rank_for_dropped(spectra: Sequence[Sequence[float]], energy: float) -> int:
    """The smallest rank, alike in every matrix, that leaves out no more than ``energy``."""
    longest = max((len(spectrum) for spectrum in spectra), default=0)
    return bisect.bisect_left(range(longest), True, key=lambda rank: dropped(spectra, rank) <= energy)
