"""Spectra against sums and power laws done by hand."""

import pytest

from edgc.plan.spectrum import dropped, extended, rank_for_dropped


def test_a_power_law_is_continued_exactly() -> None:
    law = [place**-1.5 for place in range(1, 33)]
    assert extended(law[:16], 32) == pytest.approx(law)


def test_a_longer_spectrum_is_cut_and_zeros_stay_zeros() -> None:
    assert extended([3.0, 2.0, 1.0], 2) == [3.0, 2.0]
    assert extended([1.0, 0.0], 4) == [1.0, 0.0, 0.0, 0.0]


def test_dropped_energy_and_its_inverse() -> None:
    spectra = [[8.0, 4.0, 2.0, 1.0], [4.0, 1.0]]
    assert [dropped(spectra, rank) for rank in range(5)] == [20.0, 8.0, 3.0, 1.0, 0.0]
    assert [rank_for_dropped(spectra, energy) for energy in (25.0, 8.0, 7.9, 1.0, 0.5, 0.0)] == [0, 1, 2, 3, 4, 4]
    assert rank_for_dropped([], 1.0) == 0
