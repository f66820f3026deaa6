"""What the reductions of one set of gradients have shown since somebody last asked."""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from edgc.observe.fidelity import Fidelity
from edgc.observe.moments import GradientStatistics


@dataclass
class Measurements:
    """What a reducer saw in a window so far: one entry a measured iteration, of ``losses`` one a step.

    0-dimensional tensors stay on the device until somebody asks, so that no step waits for them.
    """

    entropy: list[float | Tensor] = field(default_factory=list)  # not finite where a loss scale was too large
    residual: list[float | Tensor] = field(default_factory=list)
    energies: list[dict[str, Tensor]] = field(default_factory=list)  # squared column norms of Q by matrix
    statistics: list[dict[str, GradientStatistics]] = field(default_factory=list)  # by parameter, if asked for
    fidelity: list[dict[str, Tensor]] = field(default_factory=list)  # values of a ``Fidelity`` by name, if asked for
    row_shares: list[dict[str, Tensor]] = field(default_factory=list)  # of warm-ups, if asked for: ``row_shares``
    losses: list[float | Tensor] = field(default_factory=list)  # of training: a process's first reducer has them
    spikes: float | Tensor = 0.0  # gradients of which the error was scaled down
    largest_spike: float | Tensor = 0.0  # times its running norm
    windows: int = 0  # before this one

    def copy(self) -> "Measurements":
        """The measurements of now, whatever is added later."""
        return Measurements(**{name: copy(value) for name, value in vars(self).items()})

    def state_dict(self) -> dict[str, Any]:
        """The entries as plain values and CPU tensors, without ``windows``, which no checkpoint holds."""
        return {name: _plain(value) for name, value in vars(self).items() if name != "windows"}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Measurements":
        """What ``state_dict`` was made from. Raises TypeError for entries of another release."""
        statistics = [{name: GradientStatistics(**one) for name, one in step.items()} for step in state["statistics"]]
        return cls(**{**state, "statistics": statistics})

    def add_spikes(self, excess: Tensor, limit: float, finite: Tensor) -> None:
        """Count the gradients of a reduction, if it was ``finite``, with a norm above ``limit`` times its running norm.

        ``excess``: how many times above, 1 for all others.
        """
        spikes = (excess > 1) & finite
        self.spikes = self.spikes + spikes.sum()
        largest, before = torch.where(spikes, excess * limit, 0.0).max(), self.largest_spike
        # a number, as after a window: no copy of it to the device, for which the CPU would wait
        self.largest_spike = largest.clamp_min(before) if isinstance(before, float) else torch.maximum(largest, before)

    def mean_energies(self) -> dict[str, list[float]]:
        """Mean over the measured iterations that were finite; of a matrix whose rank changed, over the last rank."""
        return _means(self.energies)

    def mean_row_shares(self) -> dict[str, list[float]]:
        """Mean over the measured iterations that were finite."""
        return _means(self.row_shares)

    def total_fidelity(self) -> dict[str, Fidelity]:
        """The fidelity of each parameter over the measured iterations whose sums were finite."""
        steps = [(list(one), torch.stack(list(one.values())).tolist()) for one in self.fidelity if one]
        seen: dict[str, list[Fidelity]] = {}
        for names, rows in steps:
            for name, numbers in zip(names, rows, strict=True):
                if all(map(math.isfinite, numbers)):
                    seen.setdefault(name, []).append(Fidelity.of(numbers))
        return {name: Fidelity.total(several) for name, several in seen.items()}


def _plain(value: Any) -> Any:
    """The value without classes and without tensors on a device; a 0-dimensional one becomes a number."""
    if isinstance(value, list):
        return [_plain(one) for one in value]
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if isinstance(value, GradientStatistics):
        return vars(value)
    if isinstance(value, Tensor):
        return value.cpu() if value.ndim else float(value)
    return value


def _means(several: Sequence[Mapping[str, Tensor]]) -> dict[str, list[float]]:
    means = {}
    for name, last in several[-1].items() if several else ():
        # those of before a resume lie on the CPU
        seen = [one[name].cpu() for one in several if name in one and len(one[name]) == len(last)]
        # where a loss scale was too large, or a spike's squares overflow, a step has shown nothing
        finite = [one for one in seen if torch.isfinite(one).all()]
        if finite:
            means[name] = torch.stack(finite).mean(dim=0).tolist()
    return means


def row_shares(squares: Tensor, parts: Sequence[float]) -> Tensor:
    """Which share of a gradient these parts of all rows hold, the largest ones, and how even rows are: (parts + 1,).

    ``squares``: squared norms of the rows (rows,). A row counts by its norm, not by its energy: where a row's gradient
    comes rarely, as that of a rare token, a step of Adam along it is longer. Rows are as even as a uniform choice among
    this share of them.
    """
    norms = squares.sqrt()
    whole = norms.sum()
    held = norms.sort(descending=True).values.cumsum(0) / whole
    even = whole.square() / (len(norms) * squares.sum())
    return torch.stack([*(held[math.ceil(part * len(norms)) - 1] for part in parts), even])
