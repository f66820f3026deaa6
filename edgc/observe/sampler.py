"""GDS, the gradient data sampler: which entries of which iterations are looked at. Source: arXiv 2511.10333."""

from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from edgc.config import EDGCConfig
from edgc.seeding import stable_seed

_MAX_DENOMINATOR = 10**6  # sampling rates are fractions of at most this denominator


@dataclass(frozen=True)
class GradientSampler:
    """GDS's two sampling rates: which iterations are measured, and which entries of a gradient then are.

    ``iteration_rate`` (alpha) and ``gradient_rate`` (beta) are fractions in [1e-6, 1]; ``seed`` decides
    where the samples of each name begin. All decisions are integer arithmetic on (seed, name, iteration),
    so every process, run and resumed run makes the same ones. Raises ValueError for a rate outside [1e-6, 1].
    """

    iteration_rate: float = 0.1
    gradient_rate: float = 0.25
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("iteration_rate", "gradient_rate"):
            if not 1 / _MAX_DENOMINATOR <= getattr(self, field) <= 1:
                raise ValueError(f"{field} = {getattr(self, field)}: must be at least 1e-6 and at most 1")

    @classmethod
    def of(cls, config: EDGCConfig) -> "GradientSampler":
        """The sampler of a run with these settings."""
        ranks = config.ranks
        return cls(ranks.iteration_sampling_rate, ranks.gradient_sampling_rate, config.seed)

    def measures(self, iteration: int) -> bool:
        """Whether this iteration is measured: from 0 on, evenly spread, a fraction alpha in the long run."""
        return self._measurement(iteration) != self._measurement(iteration - 1)

    def sample(self, name: str, grad: Tensor, iteration: int) -> Tensor:
        """Every (1/beta)-th entry of ``grad`` (any shape), as a 1-D tensor.

        For an integer 1/beta a strided view, no copy unless ``grad`` itself has to be copied to be
        flattened; for another beta a gather at evenly spread positions whose density is exactly beta.

        The first position depends on seed and name and moves on by one entry with every measured iteration,
        so any ceil(1/beta) consecutive measurements see every entry. One sample alone need not: where
        1/beta divides the width of a matrix it sees the same columns in every row, and the other columns
        come in the next samples. A gradient of fewer than 1/beta entries can give an empty sample.
        """
        flat = grad.detach().reshape(-1)
        taken, period = _as_ratio(self.gradient_rate)
        # Positions are (k * period + phase) // taken; adding `taken` to the phase moves them by one entry.
        phase = (stable_seed(self.seed, name) + self._measurement(iteration) * taken) % period
        if taken == 1:
            return flat[phase::period]
        multiples = torch.arange(phase, max(phase, flat.numel() * taken), period, device=flat.device)
        return flat[multiples // taken]

    def _measurement(self, iteration: int) -> int:
        """Index of the latest measured iteration up to this one."""
        taken, period = _as_ratio(self.iteration_rate)
        return iteration * taken // period


def _as_ratio(rate: float) -> tuple[int, int]:
    """The fraction in lowest terms that the user meant by a decimal rate: 0.1 is (1, 10), 0.3 is (3, 10)."""
    return Fraction(rate).limit_denominator(_MAX_DENOMINATOR).as_integer_ratio()
