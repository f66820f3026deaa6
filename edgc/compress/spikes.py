"""Spikes: the error that a far too large gradient leaves is scaled down.

The host's clipping after the reduction bounds what the optimizer applies of a spike. It does not bound what error
feedback keeps: of a gradient 100 times too large, most of which a low-rank step does not send, the rest is sent in the
steps that follow, each time clipped to the allowed norm, and the true gradients drown in it. So where the norm of a
gradient is x times a limit times its running norm, x > 1, the error after that step is divided by x: error feedback
keeps no more than of a gradient at the limit. The spike itself is sent like any other gradient. Below the limit nothing
changes, not even a bit. This is the one exception to "result + errors = sum"; it is counted and logged. A running norm
for each tensor is the idea of AdaGC (Wang et al. 2025, arXiv 2502.11034), which clips the gradient itself.

The running norm begins with the first gradient that is compressed: a spike in that very step is not seen. There are no
collectives here.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgc.comm.packed import Packed
from edgc.comm.wire import FP32

# Of a running norm, per step: it is the mean of about the last 20 norms, so that it follows training. Not tuned.
RUNNING_NORM_DECAY = 0.95


def excess(norms: Tensor, running: Tensor, limit: float) -> Tensor:
    """Norms over ``limit`` times their running norms, at least 1; 1 where no running norm is known. All of one shape.

    It is infinite where a norm overflows, also without a running norm: no error of such a gradient is kept. With an
    infinite ``limit`` it is 1.
    """
    most = limit * running
    found = torch.where((running > 0) & (norms > most), norms / most, 1.0)
    return torch.where(norms == math.inf, norms, found) if math.isfinite(limit) else found


def moved(norms: Tensor, running: Tensor, finite: Tensor, limit: float) -> Tensor:
    """The running norms after a step with these norms, if it was ``finite``, a boolean on the device.

    A spike counts as ``limit`` times the running norm: a gradient that stays large is no spike any more after a few
    steps (of 100 times the norm, with a limit of 5, after 17). A gradient of zeros says nothing of its size.
    """
    after = torch.lerp(torch.minimum(norms, limit * running), running, RUNNING_NORM_DECAY)
    after = torch.where(running > 0, after, norms)
    return torch.where(finite & (norms > 0) & (after < math.inf), after, running)


@dataclass(frozen=True)
class Spikes:
    """The norms of one reduction's gradients and the ``excess`` of each, both (parameters,)."""

    names: Sequence[str]
    norms: Tensor
    excess: Tensor

    def by_name(self) -> dict[str, Tensor]:
        """The excess of each gradient, 0-dimensional."""
        return dict(zip(self.names, self.excess.unbind(), strict=True))


class RunningNorms:
    """The running norm of each gradient on this process, by parameter name; 0 until a gradient has been seen.

    ``limit``: a gradient above so many times its running norm is a spike.
    """

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self._running: dict[str, Tensor] = {}  # 0-dimensional, fp32; replaced, never changed

    def spikes(self, gradients: Mapping[str, Tensor], loss_scale: Tensor | None = None) -> Spikes:
        """Compare gradients (fp32, any shape), which hold ``loss_scale`` times themselves, with their running norms."""
        norms = torch.stack(torch._foreach_norm(list(gradients.values())))
        if loss_scale is not None:
            norms = norms / loss_scale
        return Spikes(list(gradients), norms, excess(norms, self._stacked(gradients, norms), self.limit))

    def update(self, spikes: Spikes, finite: Tensor) -> None:
        """Take in the norms of a step if it was ``finite``, a boolean on the device."""
        running = moved(spikes.norms, self._stacked(spikes.names, spikes.norms), finite, self.limit)
        self._running.update(zip(spikes.names, running.unbind(), strict=True))

    def _stacked(self, names: Sequence[str] | Mapping[str, Tensor], like: Tensor) -> Tensor:
        known: Mapping[str, Tensor] = self._running
        if not known.keys() >= set(names):
            known = {**dict.fromkeys(names, like.new_zeros(())), **known}
        return torch.stack([known[name] for name in names])

    def keep(self, names: Collection[str]) -> None:
        """Forget the others: what they have seen is old by the time they are compressed again."""
        if self._running.keys() - names:
            self._running = {name: running for name, running in self._running.items() if name in names}

    def values(self) -> Tensor | None:
        """All running norms (parameters,), in the order of their names; None while there are none."""
        return torch.stack([self._running[name] for name in sorted(self._running)]) if self._running else None

    def set_values(self, norms: Tensor) -> None:
        """Go on with these in the place of ``values()``."""
        self._running = dict(zip(sorted(self._running), norms.unbind(), strict=True))

    def state_dict(self) -> dict[str, Packed]:
        """The running norms by parameter name. Tensors are replaced, never changed, so these are no copies."""
        return {f"{name}:norm": Packed(running, FP32) for name, running in self._running.items()}

    def load_state_dict(self, state: Mapping[str, Packed]) -> None:
        """Go on where ``state_dict`` was taken."""
        self._running = {key.rpartition(":")[0]: packed.values() for key, packed in state.items()}
