"""The reduction of one group of gradients: take their routes, run these, agree, commit."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from edgc.comm.collectives import Communicator, Exchange, interleave
from edgc.comm.replicas import compare, digest, digests_by_parameter
from edgc.compress.measuring import Measuring
from edgc.compress.router import Router
from edgc.compress.routes.base import ReductionContext, agree
from edgc.compress.state import CompressionState
from edgc.config import EDGCConfig
from edgc.observe.observer import GradientObserver
from edgc.plan.run import Run
from edgc.plan.selection import Selection, select
from edgc.specs import Parameter, ShardBounds
from edgc.stacking import all_finite


class GradientReducer:
    """Sums named gradients over a process group under a stage rank that a controller sets.

    Args:
        selection: which parameters the engine takes.
        config: the run's settings.
        communicator: the data-parallel process group.
        device: where the gradients live.
        repeatable: whether a reduction may be repeated or rolled back; a second copy of the state is kept for it.
        whole_error_iterations: iterations, from the start of the run, in which the whole error feedback is added.
    """

    def __init__(
        self,
        selection: Selection,
        config: EDGCConfig,
        communicator: Communicator,
        device: torch.device,
        repeatable: bool = False,
        whole_error_iterations: int = 0,
    ):
        self.communicator = communicator
        self.router = Router(selection, config, device)
        sparse = [name for name, spec in self.router.specs.items() if spec.sparse_rows]
        self.state = CompressionState(config, self.router.engine, device, communicator.process, sparse)
        self.observer = GradientObserver(selection.matrices, config)
        self.repeatable, self.whole_error_iterations = repeatable, whole_error_iterations
        self.finite: Tensor | None = None  # whether this iteration's reduction was, on the device; None without one
        self.verify = False  # whether reductions leave digests for ``compare_replicas``
        self._digests: dict[str, Tensor] = {}  # of sums, by name

    @classmethod
    def of(
        cls,
        parameters: Iterable[Parameter],
        config: EDGCConfig,
        communicator: Communicator,
        device: torch.device,
        run: Run | None = None,
    ) -> "GradientReducer":
        """A reducer of these parameters, of which the engine takes what pays at the smallest rank of the settings.

        ``run``: the training run that it is for; None where what is reduced is of no run.
        """
        selection = select(parameters, config)
        if run is None:
            return cls(selection, config, communicator, device)
        whole_error_iterations = config.whole_error_iterations(run.iterations)
        return cls(selection, config, communicator, device, run.repeatable, whole_error_iterations)

    def set_rank(
        self,
        rank: int | None,
        matrix_ranks: Mapping[str, int] | None = None,
        formats: Mapping[str, str] | None = None,
        unrounded: bool = False,
    ) -> None:
        """Follow this plan from the next reduction on: see ``Router.set_rank``."""
        self.router.set_rank(rank, matrix_ranks, formats, unrounded)

    def begin(self, iteration: int) -> None:
        """Begin an iteration, before ``plain`` is asked. With ``repeatable``, a repeated one starts anew."""
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

    def error_gain(self, iteration: int) -> float:
        """The share of an error that this iteration's reduction adds to a gradient."""
        return 1.0 if iteration < self.whole_error_iterations else self.router.config.study.error_gain

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        iteration: int,
        loss_scale: Tensor | None = None,
        shards: Mapping[str, ShardBounds] | None = None,
    ) -> Exchange[None]:
        """Replace every local gradient by the sum over the group, in place.

        ``gradients``: contiguous views, one for each parameter of the selection, already scaled for the sum. They hold
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
        state, config = self.state, self.router.config
        scales = None
        if config.equalise:
            scales = {} if self.router.exact else state.equaliser.scales(gradients)
        context = ReductionContext(
            iteration,
            loss_scale,
            shards or {},
            self.communicator,
            state.feedback,
            scales,
            self.error_gain(iteration),
        )
        measuring = Measuring(self.router, state, self.observer, context)
        routes = self.router.route(gradients, context, measuring.of_compression)
        excess = measuring.before(gradients, routes)
        for route in routes:
            route.prepare(excess)
        yield from interleave([*(route.exchange() for route in routes), *measuring.exchanges()])
        # Decided on the device: the CPU does not wait for it, so that the next unit's steps can be queued.
        self.finite, squared_norms = yield from agree(routes, self.communicator)
        for route in routes:
            route.commit(self.finite)
        state.equaliser.update({name: squared_norms[name] for name in gradients if name in squared_norms}, self.finite)
        if self.verify:
            self._digests = {name: one for route in routes for name, one in route.digests().items()}
        yield from measuring.after(self.finite)

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
            sorted(self.router.specs),
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
