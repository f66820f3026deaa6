"""The reduction of one group of gradients: sample, hand each to the engine that the plan says, feed errors back."""

import math
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, replace
from types import ModuleType

import torch
from torch import Tensor
from torch.profiler import record_function

from edgc.comm.collectives import Communicator, Steps, Traffic, run, together
from edgc.comm.replicas import KINDS, check, digest
from edgc.comm.wire import Packed, wire
from edgc.compress.clipping import SpikeClipping, Spikes
from edgc.compress.engines import ENGINES, Elementwise, LowRank, Reduced, Rounding
from edgc.compress.engines.base import Cuts, all_finite
from edgc.compress.equaliser import Equaliser, mean_squares
from edgc.compress.error_feedback import ErrorFeedback
from edgc.compress.lowrank import Product, mean_squares_of
from edgc.compress.matrices import Matrices, Owed, Scaled, triton_kernels
from edgc.config import EDGCConfig
from edgc.observe.entropy import ESTIMATORS, GradientSampler
from edgc.observe.moments import GradientStatistics
from edgc.plan.allocation import Allocation, uniform_ranks
from edgc.seeding import stable_seed


@dataclass
class Measurements:
    """What a reducer saw since the last ``take``: one entry a measured iteration.

    0-dimensional tensors stay on the device until somebody asks, so that no step waits for them.
    """

    entropy: list[float | Tensor] = field(default_factory=list)  # not finite where a loss scale was too large
    residual: list[float | Tensor] = field(default_factory=list)
    energies: list[dict[str, Tensor]] = field(default_factory=list)  # squared column norms of Q by matrix
    statistics: list[dict[str, GradientStatistics]] = field(default_factory=list)  # by parameter, if asked for
    spikes: float | Tensor = 0.0  # gradients that were clipped
    largest_spike: float | Tensor = 0.0  # times its running norm
    windows: int = 0  # how often ``take`` was called

    def take(self) -> "Measurements":
        """The entries so far; start anew."""
        taken = replace(self)
        self.__init__(windows=self.windows + 1)  # type: ignore[misc]
        return taken

    def copy(self) -> "Measurements":
        """As they are now, whatever is added later."""
        return Measurements(**{name: copy(value) for name, value in vars(self).items()})

    def add_spikes(self, spikes: Spikes, finite: Tensor) -> None:
        """Count what a reduction has clipped, if it was ``finite``."""
        clipped = (spikes.factors > 1) & finite
        self.spikes = self.spikes + clipped.sum()
        largest, before = torch.where(clipped, spikes.factors, 0.0).max(), self.largest_spike
        # a number, as after a window: no copy of it to the device, for which the host would wait
        self.largest_spike = largest.clamp_min(before) if isinstance(before, float) else torch.maximum(largest, before)

    def mean_energies(self) -> dict[str, list[float]]:
        """Mean over the measured iterations; of a matrix whose rank changed in between, over the last rank."""
        if not self.energies:
            return {}
        means = {}
        for name, last in self.energies[-1].items():
            # those of before a resume lie on the CPU
            alike = [seen[name].cpu() for seen in self.energies if name in seen and len(seen[name]) == len(last)]
            mean = torch.stack(alike).mean(dim=0).tolist()
            if all(map(math.isfinite, mean)):  # squares of a spike in the very first step may overflow
                means[name] = mean
        return means


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
        self.device = device
        self.sampler = GradientSampler(
            iteration_rate=config.iteration_sampling_rate,
            gradient_rate=config.gradient_sampling_rate,
            seed=config.seed,
        )
        self.estimate = ESTIMATORS[config.entropy_estimator]
        error_wire = wire(config.error_dtype, stochastic=config.error_dtype != "fp32")
        self.feedback = ErrorFeedback(error_wire, config.error_decay, config.error_average)
        self._generator = torch.Generator(device)  # of the errors' rounding
        self.clipping = SpikeClipping()
        self.equaliser = Equaliser()
        self.measurements = Measurements()
        self.ranks: dict[str, int] = {}
        self.compressed = False  # whether its stage is, also where nothing here has a rank
        self.repeatable = repeatable
        self.finite: Tensor | None = None  # whether this iteration's reduction was, on the device; None without one
        self.verify = False  # whether reductions leave digests for ``compare_replicas``
        self._digests: dict[str, Tensor] = {}  # of sums, by name
        self._iteration: int | None = None
        self._before: dict[str, dict[str, Packed]] | None = None
        self._measured = self.measurements  # before the iteration
        self._skipped: int | None = None  # an iteration whose measurements a window has already taken
        self.specs = {matrix.name: matrix for matrix in allocation.matrices}
        self.specs.update((parameter.name, parameter.spec) for parameter, _ in allocation.rest)
        everything = list(self.specs.values())
        # The dense engine has nothing to compress, but its entropy is still wanted.
        self.engine = ENGINES[config.engine](allocation.matrices, config, device) if config.engine in ENGINES else None
        self.rest = Rounding(everything, config, device, wire(config.rest_wire))
        self.dense = Rounding(everything, config, device, wire(config.dense_wire))
        self._kernels = triton_kernels(device) if config.kernels == "fused" else None
        self.remainder: Rounding | None = None  # of what a low-rank engine leaves
        if config.residual_wire is not None:
            self.remainder = Rounding(everything, config, device, wire(config.residual_wire))

    def set_rank(self, rank: int | None, matrix_ranks: Mapping[str, int] | None = None) -> None:
        """Use this rank from the next reduction on, any for an engine that has none; None: do not compress.

        ``matrix_ranks`` may hold the rank of each matrix of the stage. Raises ValueError for a low rank below 1.
        """
        lowest = min([] if rank is None else [rank, *(matrix_ranks or {}).values()], default=1)
        if self.config.low_rank and lowest < 1:
            raise ValueError(f"rank {lowest}: the rank of a matrix must be at least 1")
        self.compressed = rank is not None and self.engine is not None
        if rank is None or self.engine is None:
            self.ranks = {}
        elif matrix_ranks is not None:
            self.ranks = {name: matrix_ranks[name] for name in self.engine.matrices if name in matrix_ranks}
        elif self.config.low_rank:
            self.ranks = uniform_ranks(self.allocation.matrices, rank, self.config.min_saving)
        else:
            self.ranks = dict.fromkeys(self.engine.matrices, rank)

    def measure(self, gradients: Mapping[str, Tensor], iteration: int, loss_scale: Tensor | None = None) -> None:
        """On a measured iteration, estimate the entropy of the local, accumulated, uncompressed gradient (GDS).

        ``gradients`` hold ``loss_scale`` times the gradient.
        """
        if not self._measures(iteration):
            return

        def sample(name: str) -> Tensor:
            entries = self.sampler.sample(name, gradients[name], iteration)
            return entries if loss_scale is None else entries / loss_scale

        if self.config.statistics:
            samples = {name: sample(name) for name in gradients}
            self.measurements.statistics.append(
                {name: GradientStatistics.of(part) for name, part in samples.items() if len(part) > 1}
            )
        if not self.allocation.matrices:
            return
        everything = torch.cat([sample(matrix.name) for matrix in self.allocation.matrices])
        self.measurements.entropy.append(self.estimate(everything))

    def _measures(self, iteration: int) -> bool:
        return self.sampler.measures(iteration) and iteration != self._skipped

    def begin(self, iteration: int) -> None:
        """Before ``plain`` is asked. With ``repeatable``, an iteration that was already reduced starts anew."""
        self.finite = None
        if self.plain:
            self.clipping.keep(())  # norms that the next reduction finds would be old
        if self.repeatable:
            self.roll_back(iteration)
            if iteration != self._iteration:
                self._measured = self.measurements.copy()
            self._iteration, self._before = iteration, self.state_dict()

    @property
    def plain(self) -> bool:
        """Whether the next reduction is a plain sum in fp32 with no error to feed back: the host's own will do."""
        return not self.ranks and self._rounding.wire.exact and not self.feedback.packed

    @property
    def _rounding(self) -> Rounding:
        """What takes everything that has no rank."""
        return self.rest if self.compressed else self.dense

    def reduce(
        self,
        gradients: Mapping[str, Tensor],
        iteration: int,
        loss_scale: Tensor | None = None,
        shards: Mapping[str, Cuts] | None = None,
    ) -> Steps[None]:
        """Replace every local gradient by the sum over the group, in place.

        ``gradients``: contiguous views, one for each parameter of the allocation, already scaled for the sum. They hold
        ``loss_scale`` times the gradient (default: once); errors do not, so that the scale may change. Where this
        ``iteration`` is a measured one, what was left unsent is recorded. If any gradient is not finite on any rank,
        all become NaN on all ranks, and no state changes: the host can skip the step, and nothing is lost. With the
        cuts of ``shards`` a rank needs only its own part of each sum, NaN or not; the rest is left as anything.

        A spike (``clipping``) in a gradient with error feedback is scaled down first: what is taken off it is
        neither in the sum nor in an error.
        """
        gradients = {name: gradient for name, gradient in gradients.items() if gradient.numel()}
        if not gradients:
            return
        # view, not reshape: the result has to be written back into the bucket
        matrices = {name: gradient.view(self.specs[name].rows, -1).float() for name, gradient in gradients.items()}
        measured = self._measures(iteration) and bool(self.ranks)
        kernels = None if measured else self._kernels_for(gradients)
        # A sum in fp32 leaves no error: there the host's own clipping is enough.
        fed_back = {n: matrix for n, matrix in matrices.items() if n in self.ranks or not self._rounding.wire.exact}
        spikes = self.clipping.spikes(fed_back, loss_scale) if fed_back else None
        divisors = {} if spikes is None else spikes.divisors(loss_scale)
        for name, matrix in matrices.items():
            if kernels is None or name not in self.ranks:
                self.feedback.add_to(name, matrix, divisors.get(name, loss_scale))
        to_send = sum((matrix.square().sum() for matrix in matrices.values()), torch.zeros(())) if measured else None

        if shards is None or any(gradient.dtype != torch.float32 for gradient in gradients.values()):
            shards = {}  # what other types cut off is fed back, and known only of sums that all ranks have
        taken = {name: matrix for name, matrix in matrices.items() if name in self.ranks}
        left = {name: matrix for name, matrix in matrices.items() if name not in self.ranks}
        reductions = []
        if left:
            reductions.append(self._reduce(self._rounding, left, iteration, shards))
        if taken and isinstance(self.engine, LowRank):
            reductions.append(self._factorise(self.engine, taken, iteration, shards, kernels, divisors))
        elif taken and isinstance(self.engine, Elementwise):
            reductions.append(self._reduce(self.engine, taken, iteration, shards))
        reduced = Reduced.of_all((yield from together(reductions)))
        errors, products, shares, sharded = reduced.errors, reduced.products, reduced.shares, reduced.sharded
        factors = dict(products) if self.verify else {}
        # Decided on the device: the host does not wait for it, so that the next bucket's steps can be queued.
        finite = reduced.finite
        squares = {}
        if self.config.equalise:
            squares = mean_squares_of(products)
            for name, matrix in matrices.items():
                if name not in products and matrix.shape[0] > 1:
                    squares[name] = mean_squares(matrix, self._own_part(name, shards) if name in sharded else None)
        if sharded:
            finite, whole = yield from self._agree(finite, {name: squares[name] for name in squares if name in sharded})
            squares.update(whole)
        scale = torch.ones_like(finite, dtype=torch.float32) if loss_scale is None else loss_scale
        sums = {}  # as the buffers hold them, where that is not in fp32
        for name, gradient in gradients.items():
            if gradient.dtype != torch.float32:
                if name in products:
                    errors[name] = shares[name].taken_from(matrices[name])
                    products.pop(name).write(matrices[name], slice(None))
                sums[name] = (matrices[name] * scale).to(gradient.dtype)
        if sums:
            finite = finite & all_finite(list(sums.values()))
        poison = torch.where(finite, 0.0, math.nan)
        gain = scale + poison
        reduced.advance(finite)
        self.equaliser.update(squares, finite)
        if spikes is not None:
            self.clipping.keep(fed_back)
            self.clipping.update(spikes, finite)
            if iteration != self._skipped:
                self.measurements.add_spikes(spikes, finite)
        self.finite = finite
        seed = self._seed_rounding("error", iteration)
        for name, matrix in matrices.items():
            if name in products and kernels is not None:
                own_rows = self._own_rows(name, shards)
                with record_function("edgc/write back"):
                    self.feedback.write_back(
                        kernels, name, matrix, shares[name], products[name], finite, own_rows, loss_scale, seed
                    )
                continue
            error = errors.pop(name, None)
            if name in products:
                with record_function("edgc/residual"):
                    error = shares[name].taken_from(matrix)
            if error is not None:
                if name in sums:  # all ranks know alike what the buffer's type has cut off
                    error += (matrix - sums[name].float() / scale) / self.communicator.ranks
                self.feedback.store(name, error, finite, self._generator)
            elif name in self.feedback.packed and bool(finite):  # once, when compression ends
                self.feedback.clear(name)
            if name in sums:
                gradients[name].view_as(matrix).copy_(sums[name] + poison)
            elif name in products:
                with record_function("edgc/reconstruct"):
                    products[name].times(gain).write(matrix, self._own_rows(name, shards))
            else:
                matrix.mul_(gain)
        if self.verify:
            self._digests = {
                **{name: digest(share.left) + 3 * digest(share.right) for name, share in factors.items()},
                **{
                    name: digest(gradient)
                    for name, gradient in gradients.items()
                    if name not in factors and name not in sharded
                },
            }
        if to_send is not None:
            self.measurements.residual.append((self.feedback.squared_norm() / to_send).sqrt() + poison)
            if isinstance(self.engine, LowRank):
                self.measurements.energies.append(
                    {name: self.engine.strengths[name].square() for name in self.ranks if name in self.engine.strengths}
                )

    def _own_part(self, name: str, shards: Mapping[str, Cuts]) -> tuple[int, int]:
        """Where the part of a flattened sum that this rank needs begins and ends."""
        rank = self.communicator.rank
        return shards[name][rank], shards[name][rank + 1]

    def _own_rows(self, name: str, shards: Mapping[str, Cuts]) -> slice:
        """The rows of a sum in which this rank needs anything."""
        if name not in shards:
            return slice(None)
        (start, stop), cols = self._own_part(name, shards), self.specs[name].cols
        return slice(start // cols, -(-stop // cols))

    def _agree(
        self, finite: Tensor, squares: Mapping[str, tuple[Tensor, Tensor]]
    ) -> Steps[tuple[Tensor, dict[str, tuple[Tensor, Tensor]]]]:
        """Where each rank has its own parts of sums: whether all are finite, and the mean squares of the whole."""
        sides = [side for pair in squares.values() for side in pair]
        message = torch.cat([(~finite).float().view(1), *sides])
        yield self.communicator.all_reduce(message)
        totals = iter(torch.split(message[1:], [len(side) for side in sides]))
        return message[0] == 0, {name: (next(totals), next(totals)) for name in squares}

    def state_dict(self) -> dict[str, dict[str, Packed]]:
        """All that the next reduction depends on beside its rank; tensors that are replaced, never changed."""
        return {
            "error": dict(self.feedback.packed),
            "engine": self.engine.state_dict() if self.engine is not None else {},
            "equaliser": self.equaliser.state_dict(),
            "clipping": self.clipping.state_dict(),
        }

    def state_bytes(self) -> int:
        """Memory that the state takes between two reductions."""
        states = [self.state_dict(), self._before or {}]
        messages = {id(p.message): p.message for state in states for part in state.values() for p in part.values()}
        return sum(message.nbytes for message in messages.values())

    def load_state_dict(self, state: Mapping[str, Mapping[str, Packed]]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.feedback.packed = dict(state["error"])
        self.equaliser.load_state_dict(state["equaliser"])
        self.clipping.load_state_dict(state["clipping"])
        if self.engine is not None:
            self.engine.load_state_dict(state["engine"])

    def roll_back(self, iteration: int) -> None:
        """Undo what this iteration has done to the state and to the measurements. Needs ``repeatable``."""
        if iteration == self._iteration and self._before is not None:
            self.load_state_dict(self._before)
            if self.measurements.windows == self._measured.windows:
                self.measurements = self._measured.copy()
            else:
                self._skipped = iteration

    def measured_before(self, iteration: int) -> Measurements:
        """The measurements without those of this iteration, also where a window has taken them since."""
        return self._measured if self.repeatable and iteration == self._iteration else self.measurements

    def compare_replicas(self, iteration: int) -> None:
        """Compare ranks, factors, scales and the last sums with the other processes of the group; the host waits.

        Every process of the group must call this after a reduction with ``verify`` set. Raises ``ReplicaMismatch``.
        """
        names = sorted(self.specs)
        if not names:
            return
        digests = torch.zeros(len(names), len(KINDS), dtype=torch.int64, device=self.device)
        places = {name: place for place, name in enumerate(names)}
        state = self.state_dict()
        for name, rank in self.ranks.items():
            digests[places[name], 0] = rank
        for kind, part in ((1, "engine"), (2, "equaliser")):
            for turn, (key, packed) in enumerate(sorted(state[part].items())):
                digests[places[key.rpartition(":")[0]], kind] += (2 * turn + 1) * digest(packed.message)
        for name, of_sum in self._digests.items():
            digests[places[name], 3] = of_sum
        uncounted = Communicator(self.communicator.group, Traffic())  # a check is no gradient traffic
        gathered = run(uncounted.all_gather(digests.view(-1)))
        check(names, gathered.view(-1, *digests.shape), self.communicator.processes, iteration)

    def settle_errors(self, iteration: int) -> Iterator[tuple[str, Tensor]]:
        """The sum of each error over the group, fp32, by name; each rank goes on with an equal part of it.

        Only the sum matters to training, so it is what a checkpoint holds, whatever the number of ranks. Every rank of
        the group must run this to its end.
        """
        self._seed_rounding("settle", iteration)
        uncounted = Communicator(self.communicator.group, Traffic())  # a checkpoint is no training traffic
        norms = self.clipping.norms()
        if norms is not None:  # each process has seen its own gradients: all continue with the mean of those seen
            both = torch.stack([norms, (norms > 0).float()])
            uncounted.all_reduce(both).wait()
            self.clipping.set_norms(both[0] / both[1].clamp_min(1))
        for name in sorted(self.feedback.packed):
            total = self.feedback.packed[name].values().clone()
            uncounted.all_reduce(total).wait()
            self._take_part(name, total)
            yield name, total

    def share_errors(self, totals: Mapping[str, Tensor], iteration: int) -> None:
        """Take this rank's part of sums, on any device, that ``settle_errors`` gave at this iteration."""
        self._seed_rounding("settle", iteration)
        for name in sorted(totals):
            self._take_part(name, totals[name])

    def _take_part(self, name: str, total: Tensor) -> None:
        part = total.to(self._generator.device) / self.communicator.ranks
        self.feedback.packed[name] = Packed(part, self.feedback.wire, self._generator)

    def _seed_rounding(self, *occasion: object) -> int:
        """Seed the errors' rounding, if there is one; returns the seed."""
        if not self.feedback.wire.stochastic:
            return 0
        seed = stable_seed(self.config.seed, *occasion, self.communicator.rank, *self.specs)
        self._generator.manual_seed(seed)
        return seed

    def _reduce(
        self, engine: Elementwise, matrices: Mapping[str, Tensor], iteration: int, shards: Mapping[str, Cuts]
    ) -> Steps[Reduced]:
        """The engine's reduction, of matrices divided by their scales if asked for."""
        if not self.config.equalise or (isinstance(engine, Rounding) and engine.wire.exact):
            return (yield from engine.reduce(matrices, self.feedback.packed, iteration, self.communicator, shards))
        scales = self.equaliser.scales(matrices)
        for name, matrix in matrices.items():
            rows, cols = scales[name]
            matrix.div_(rows).div_(cols)
        reduced = yield from engine.reduce(matrices, {}, iteration, self.communicator, shards)
        for restored in (matrices, reduced.errors):
            for name, matrix in restored.items():
                rows, cols = scales[name]
                matrix.mul_(rows).mul_(cols)
        return reduced

    def _kernels_for(self, gradients: Mapping[str, Tensor]) -> ModuleType | None:
        """Triton's kernels if they can take the low-rank part of this reduction."""
        kernels = self._kernels
        if not isinstance(self.engine, LowRank) or self.remainder is not None or not self.feedback.kernels_take:
            return None
        fit = all(gradient.dtype == torch.float32 for gradient in gradients.values())
        fit = fit and kernels is not None and max(self.ranks.values(), default=0) <= kernels.LARGEST_RANK
        return kernels if fit else None

    def _factorise(
        self,
        engine: LowRank,
        gradients: Mapping[str, Tensor],
        iteration: int,
        shards: Mapping[str, Cuts],
        kernels: ModuleType | None,
        divisors: Mapping[str, Tensor],
    ) -> Steps[Reduced]:
        """The engine's reduction; with ``residual_wire`` what it leaves is summed as well, in few bits."""
        scales = self.equaliser.scales(gradients) if self.config.equalise else {}
        scaled = {name: Scaled(matrix, scales.get(name)) for name, matrix in gradients.items()}
        turned = {name: engine.turned(self.specs[name], iteration) for name in gradients}
        oriented = {name: one.T if turned[name] else one for name, one in scaled.items()}
        if kernels is None:
            matrices = Matrices(oriented)
        else:
            packed = self.feedback.packed
            kept = {name: packed[name].stored().view_as(gradients[name]) for name in gradients if name in packed}
            errors = {name: error.T if turned[name] else error for name, error in kept.items()}
            matrices = Owed(kernels, oriented, errors, divisors)
        reduced = yield from engine.reduce(matrices, self.ranks, iteration, self.communicator)

        def restored(products: Mapping[str, Product]) -> dict[str, Product]:
            return {
                name: scaled[name].restored(product.T if turned[name] else product)
                for name, product in products.items()
            }

        products, shares = restored(reduced.products), restored(reduced.shares)
        if self.remainder is None:
            return replace(reduced, products=products, shares=shares)
        for name, share in shares.items():
            gradients[name].copy_(share.taken_from(gradients[name]))
        rest = yield from self._reduce(self.remainder, gradients, iteration, shards)
        for name, product in products.items():
            gradients[name].addmm_(product.left, product.right)
        return replace(rest, finite=reduced.finite & rest.finite, advance=reduced.advance)
