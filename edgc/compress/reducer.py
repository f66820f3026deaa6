"""The reduction of one group of gradients: take their routes, run these, agree, commit."""

from collections.abc import Mapping

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange, interleave
from edgc.comm.replicas import compare, digest, digests_by_parameter
from edgc.compress.engines.base import LowRank, all_finite
from edgc.compress.router import Router
from edgc.compress.routes import ReductionContext, agree
from edgc.compress.sampled_entries import SampledEntries
from edgc.compress.state import CompressionState
from edgc.config import EDGCConfig
from edgc.observe.observer import GradientObserver
from edgc.plan.allocation import Allocation
from edgc.specs import ShardBounds


class GradientReducer:
    """Sums named gradients over a process group under a stage rank that a controller sets.

    Args:
        allocation: which parameters the engine takes.
        config: the run's settings.
        communicator: the data-parallel process group.
        device: where the gradients live.
        repeatable: whether a reduction may be repeated or rolled back; a second copy of the state is kept for it.
    """

    def __init__(
        self,
        allocation: Allocation,
        config: EDGCConfig,
        communicator: Communicator,
        device: torch.device,
        repeatable: bool = False,
    ):
        self.allocation = allocation
        self.config = config
        self.communicator = communicator
        self.router = Router(allocation, config, device)
        self.specs = self.router.specs
        sparse = [name for name, spec in self.specs.items() if spec.sparse_rows]
        self.state = CompressionState(config, self.router.engine, device, communicator.process, sparse)
        self.observer = GradientObserver(allocation.matrices, config, repeatable)
        self.repeatable = repeatable
        self.finite: Tensor | None = None  # whether this iteration's reduction was, on the device; None without one
        self.verify = False  # whether reductions leave digests for ``compare_replicas``
        self._digests: dict[str, Tensor] = {}  # of sums, by name

    def set_rank(
        self,
        rank: int | None,
        matrix_ranks: Mapping[str, int] | None = None,
        formats: Mapping[str, str] | None = None,
        by_host: bool = False,
    ) -> None:
        """Follow this plan from the next reduction on: see ``Router.set_rank``."""
        self.router.set_rank(rank, matrix_ranks, formats, by_host)

    def begin(self, iteration: int) -> None:
        """Before ``plain`` is asked. With ``repeatable``, an iteration that was already reduced starts anew."""
        self.finite = None
        if self.plain:
            self.state.norms.keep(())  # norms that the next reduction finds would be old
        if self.repeatable:
            self.roll_back(iteration)
            self.state.keep(iteration)
        self.observer.begin(iteration)

    @property
    def plain(self) -> bool:
        """Whether the next reduction is a plain sum with no error to feed back: the host's own will do."""
        return self.router.exact and not self.state.feedback.packed

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        iteration: int,
        loss_scale: Tensor | None = None,
        shards: Mapping[str, ShardBounds] | None = None,
    ) -> Exchange[None]:
        """Replace every local gradient by the sum over the group, in place.

        ``gradients``: contiguous views, one for each parameter of the allocation, already scaled for the sum. They hold
        ``loss_scale`` times the gradient (default: once); errors do not, so that the scale may change. Where this
        ``iteration`` is a measured one, what was left unsent is recorded. If any gradient is not finite on any process,
        all become NaN on all processes, and no state changes: the host can skip the step, and nothing is lost. (In a
        plain sum of 16-bit gradients, as in the host's own, only the values concerned are not finite.) With the bounds
        of ``shards`` a process needs only its own part of each sum; the rest is left as anything.

        The error that a spike (``edgc.compress.spikes``) leaves is scaled down: what is taken off it is neither in the
        sum nor in an error.
        """
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
        if not gradients:
            return
        if any(gradient.dtype != torch.float32 for gradient in gradients.values()):
            if self.plain:
                yield from self._sum_as_the_host(gradients)
                return
            shards = None  # what 16 bits cut off is fed back, and known only of sums that all processes have
        state, measured = self.state, self.observer.measures(iteration) and self.router.compressed
        equaliser = state.equaliser if self.config.equalise else None
        context = ReductionContext(
            iteration,
            loss_scale,
            shards or {},
            self.communicator,
            state.feedback,
            equaliser,
            self.config.study.error_gain,
        )
        routes = self.router.route(gradients, context, measured)

        # Norms are taken before errors are added. A sum in fp32 leaves no error: there the host's clipping is enough.
        fed_back = {name: matrix for route in routes if route.fed_back for name, matrix in route.matrices.items()}
        spikes = state.norms.spikes(fed_back, loss_scale) if fed_back else None
        excess = {} if spikes is None else spikes.by_name()
        samples, rows = None, {}
        warm_up = not self.router.compressed and not self.router.by_host
        if self.config.ranks.volume is not None and self.observer.measures(iteration) and warm_up:
            rows = {m.name: gradients[m.name] for m in self.allocation.matrices if m.name in gradients}
            rows = {name: _squared_rows(gradient, self.specs[name].rows) for name, gradient in rows.items()}
        if state.fidelity is not None and measured and fed_back:
            samples = SampledEntries(state.fidelity, fed_back, context)
        for route in routes:
            route.prepare(excess)
        route_of = {name: route for route in routes for name in route.matrices}

        def owed(name: str) -> Tensor:
            return route_of[name].owed(name)

        energy = sum((owed(name).square().sum() for name in gradients), torch.zeros(())) if measured else None
        exchanges = [route.exchange() for route in routes]
        if rows:
            exchanges.append(self._sum_rows(rows))
        if samples is not None:
            samples.prepare(owed)
            exchanges.append(samples.exchange())

        yield from interleave(exchanges)
        # Decided on the device: the CPU does not wait for it, so that the next unit's steps can be queued.
        finite, squared_norms = yield from agree(routes, self.communicator)
        for route in routes:
            route.commit(finite)
        state.equaliser.update(squared_norms, finite)
        if spikes is not None:
            state.norms.keep(fed_back)
            state.norms.update(spikes, finite)
            self.observer.add_spikes(iteration, spikes.excess, state.norms.limit, finite)
        self.finite = finite
        if self.verify:
            self._digests = {name: one for route in routes for name, one in route.digests().items()}
        if energy is not None:
            engine, ranks = self.router.engine, self.router.ranks
            strengths = engine.strengths if isinstance(engine, LowRank) else None
            energies = strengths and {name: strengths[name].square() for name in ranks if name in strengths}
            self.observer.add_unsent((state.feedback.squared_norm() / energy).sqrt(), energies, finite)
        if samples is not None:
            self.observer.add_fidelity((yield from samples.compare(gradients, finite)))

    def _sum_as_the_host(self, gradients: Mapping[str, Tensor]) -> Exchange[None]:
        """A plain sum whose values travel in the gradients' own types."""
        for dtype in dict.fromkeys(gradient.dtype for gradient in gradients.values()):
            own = [gradient for gradient in gradients.values() if gradient.dtype == dtype]
            total = yield from self.communicator.all_reduce(torch.cat([gradient.view(-1) for gradient in own]))
            parts = torch.split(total, [gradient.numel() for gradient in own])
            torch._foreach_copy_([gradient.view(-1) for gradient in own], list(parts))
        self.finite = all_finite(list(gradients.values()))
        if self.verify:
            self._digests = {name: digest(gradient) for name, gradient in gradients.items()}

    def _sum_rows(self, squares: Mapping[str, Tensor]) -> Exchange[None]:
        """Over the group, for the plan that follows the warm-up. Each process has seen other tokens."""
        total = yield from self.communicator.all_reduce(torch.cat(list(squares.values())))
        parts = torch.split(total, [len(own) for own in squares.values()])
        self.observer.add_row_shares(dict(zip(squares, parts, strict=True)))

    def roll_back(self, iteration: int) -> None:
        """Undo what this iteration has done to the state and to the measurements. Needs ``repeatable``."""
        self.state.roll_back(iteration)
        self.observer.roll_back(iteration)

    def compare_replicas(self, iteration: int) -> None:
        """Compare ranks, factors, scales and the last sums with the other processes of the group; the CPU waits.

        Every process of the group must call this after a reduction with ``verify`` set. Raises ``ReplicaMismatch``.
        """
        state = self.state.state_dict()
        compare(
            sorted(self.specs),
            {
                "rank": self.router.ranks,
                "factors": digests_by_parameter(state["engine"]),
                "scales": digests_by_parameter(state["equaliser"]),
                "sum": self._digests,
            },
            self.communicator,
            self.router.device,
            iteration,
        )


def _squared_rows(gradient: Tensor, rows: int) -> Tensor:
    """Squared norms (rows,) in fp32."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(gradient.view(rows, -1), dim=1, dtype=wide)
    return norms.float().square()
