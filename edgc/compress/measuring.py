"""What is measured of one reduction, beside its sums."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from edgc.comm.collectives import Exchange
from edgc.compress.engines.base import LowRank
from edgc.compress.router import Router
from edgc.compress.routes.base import ReductionContext, Route
from edgc.compress.sampled_entries import SampledEntries
from edgc.compress.spikes import Spikes
from edgc.compress.state import CompressionState
from edgc.config import RankPolicy
from edgc.observe.observer import GradientObserver


class Measuring:
    """Takes part in the phases of a reduction, as routes do, and hands to the observer what it has found.

    Every reduction looks for spikes. In measured iterations, that of a compressed stage also measures the energy that
    was left unsent, the strengths of what travels in low rank, and sampled entries (``edgc.observe.fidelity``). That of
    a warm-up sums the squared norms of rows where a budget has to know them.

    Args:
        router: who takes which gradient.
        state: of the reducer.
        observer: who gets what is measured.
        context: what all routes share.
    """

    def __init__(self, router: Router, state: CompressionState, observer: GradientObserver, context: ReductionContext):
        self.router = router
        self.state = state
        self.observer = observer
        self.context = context
        due = observer.measures(context.iteration)
        self.of_compression = due and router.compressed
        by_volume = router.config.rank_policy is RankPolicy.VOLUME
        self._of_rows = due and by_volume and not router.compressed and not router.unrounded
        self._gradients: Mapping[str, Tensor] = {}
        self._route_of: dict[str, Route] = {}
        self._fed_back: dict[str, Tensor] = {}  # what may leave errors
        self._spikes: Spikes | None = None
        self._rows: dict[str, Tensor] = {}  # squared norms of rows
        self._samples: SampledEntries | None = None
        self._energy: Tensor | None = None  # of what is to be sent

    def before(self, gradients: Mapping[str, Tensor], routes: Sequence[Route]) -> Mapping[str, Tensor]:
        """Measure before errors are added. Returns what to divide each new error by: see ``Route.prepare``."""
        self._gradients = gradients
        self._route_of = {name: route for route in routes for name in route.matrices}
        # A sum in fp32 leaves no error: there the host's clipping is enough.
        self._fed_back = {name: matrix for route in routes if route.fed_back for name, matrix in route.matrices.items()}
        if self._fed_back:
            self._spikes = self.state.norms.spikes(self._fed_back, self.context.loss_scale)
        if self._of_rows:
            self._rows = {
                matrix.name: _squared_rows(gradients[matrix.name], matrix.rows)
                for matrix in self.router.selection.matrices
                if matrix.name in gradients
            }
        if self.state.fidelity is not None and self.of_compression and self._fed_back:
            self._samples = SampledEntries(self.state.fidelity, self._fed_back, self.context)
        return {} if self._spikes is None else self._spikes.by_name()

    def exchanges(self) -> list[Exchange[None]]:
        """The exchanges beside those of the routes, which have added errors by now."""
        if self.of_compression:
            self._energy = sum(
                (self._owed(name).square().sum() for name in self._gradients),
                torch.zeros((), dtype=torch.float32, device="cpu"),
            )
        exchanges = []
        if self._rows:
            exchanges.append(self._sum_rows())
        if self._samples is not None:
            self._samples.prepare(self._owed)
            exchanges.append(self._samples.exchange())
        return exchanges

    def after(self, finite: Tensor) -> Exchange[None]:
        """Measure after the routes have committed. ``finite``: whether all sums were, a boolean on the device."""
        norms = self.state.norms
        if self._spikes is not None:
            norms.keep(self._fed_back)
            norms.update(self._spikes, finite)
            self.observer.add_spikes(self.context.iteration, self._spikes.excess, norms.limit, finite)
        if self._energy is not None:
            engine, ranks = self.router.engine, self.router.ranks
            strengths = engine.strengths if isinstance(engine, LowRank) else None
            energies = strengths and {name: strengths[name].square() for name in ranks if name in strengths}
            self.observer.add_unsent((self.state.feedback.squared_norm() / self._energy).sqrt(), energies, finite)
        if self._samples is not None:
            self.observer.add_fidelity((yield from self._samples.compare(self._gradients, finite)))

    def _owed(self, name: str) -> Tensor:
        return self._route_of[name].owed(name)

    def _sum_rows(self) -> Exchange[None]:
        """Over the group, for the plan that follows the warm-up. Each process has seen other tokens."""
        total = yield from self.context.communicator.all_reduce(torch.cat(list(self._rows.values())))
        parts = torch.split(total, [len(own) for own in self._rows.values()])
        self.observer.add_row_shares(dict(zip(self._rows, parts, strict=True)))


def _squared_rows(gradient: Tensor, rows: int) -> Tensor:
    """Squared norms (rows,) in fp32."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(gradient.view(rows, -1), dim=1, dtype=wide)
    return norms.float().square()
