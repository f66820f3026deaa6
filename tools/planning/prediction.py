"""The step of a contender on a cluster: what its reductions, messages and gathers cost goes into the simulation."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from edgc.comm.collectives import all_reduce_bytes
from edgc.hosts.units import MAX_UNITS as UNITS
from edgc.plan.by_volume.choices import ROUNDED
from edgc.plan.rank_plan import NO_RANK
from edgc.plan.ranks import RANK_MULTIPLE, rank_below
from edgc.plan.times.comm_cost import LEAST_GAIN
from edgc.plan.times.gather_times import GatherTimes
from edgc.plan.times.link_times import MAX_TIME_RATIO, LinkTimes, ReductionTime, may_replace_low_rank
from tools.planning.compressing import Compressing
from tools.planning.contenders import FP32_FACTORS, Contender
from tools.planning.placement import StageLinks
from tools.planning.simulation import Link, StageTimes, Step, Unit, simulate
from tools.planning.training import OPTIMIZER_BYTES, Training
from tools.shared.methods import equalised
from tools.shared.paper_ranks import LEAST_SAVING


@dataclass(frozen=True)
class Prediction:
    """A step of one contender. ``gbps``: of the slowest reductions; ``rank``: None for what is sent whole; ``warm_up``:
    a step of it, None: there is none.
    """

    contender: Contender
    gbps: float
    rank: int | None
    step: Step
    gradient_bytes: float  # of a process and step, the layers of a stage, the mean of all
    warm_up: Step | None = None

    @property
    def compresses(self) -> bool:
        return self.rank is not None

    @property
    def seconds(self) -> float:
        return self.step.seconds

    @property
    def run_seconds(self) -> float:
        """The mean step of the whole run, its warm-up included."""
        if self.warm_up is None:
            return self.seconds
        share = self.contender.warm_up_share
        return share * self.warm_up.seconds + (1 - share) * self.seconds

    @property
    def exposed(self) -> float:
        return self.step.exposed()


def predict(
    training: Training, contender: Contender, methods: Mapping[str, Compressing], links: Sequence[StageLinks]
) -> Prediction:
    """One step on these links. ``methods``: what each method takes; one that is not known reduces dense."""
    if contender.message_rank is not None and training.chunks > 1:  # EDGC refuses that
        contender = replace(contender, flags=f"{contender.flags} --edgc-pp off", messages="", message_rank=None)
    if contender.fuses and not training.tied:  # and that
        contender = replace(contender, flags=f"{contender.flags} --edgc-no-fuse-embedding-sync")
    reductions = _Reductions(training, links, factors_in_fp32=contender.method == FP32_FACTORS)
    sent = reductions.dense_bytes * contender.bits / 32
    units, rank, warm_up = [reductions.dense(sent)] * len(links), None, None
    if contender.method in methods and training.replicas > 1:
        compressing, rank = _chosen(reductions, contender, methods)
        if rank is not None:
            if contender.warm_up_share:
                of_warm_up = [_warm_up(reductions, contender, methods)] * len(links)
                warm_up = _step(training, contender, methods, links, of_warm_up, None)
            compressed = math.ceil(contender.stage_share * len(links))  # stages: the first ones
            units[:compressed] = [reductions.units(compressing, rank)] * compressed
            sent += compressed / len(links) * (reductions.sent(compressing, rank) - sent)
    message_rank = _message_rank(training, contender, methods, links, rank)
    step = _step(training, contender, methods, links, units, message_rank)
    slowest = max((own.ring for own in links), key=lambda ring: ring.seconds(training.dense_bytes))
    return Prediction(contender, slowest.gbps, rank, step, sent, warm_up)


def _step(
    training: Training,
    contender: Contender,
    methods: Mapping[str, Compressing],
    links: Sequence[StageLinks],
    units: Sequence[tuple[Unit, ...]],
    message_rank: int | None,
) -> Step:
    """One step, with these reductions of each stage. ``message_rank``: see ``_message_rank``."""
    forward = training.forward_seconds()
    rounds = None if contender.messages == FP32_FACTORS else methods.get(contender.messages)
    sends = [_message(training, rounds, own.before) for own in links]
    late: list[tuple[float, float] | None] = [None] * len(links)  # of the first stage: it sends none
    if message_rank is not None:
        late[1:] = [_late_message(training, methods[contender.messages], message_rank)] * (len(links) - 1)
    gathers = [_gather(training, methods.get(contender.weights), own.once) for own in links]
    of_first = 1 - 1 / training.chunks  # the first stage sends no gradients of its first chunk
    stages = [
        StageTimes(
            forward=forward + (sums := training.tensor_seconds(own.tensor) + training.expert_seconds(own.tokens)),
            backward=2 * forward + sums + (rounding if place else of_first * rounding),
            link=own.next,
            before=own.before,
            ring=own.ring,
            once=own.once,
            direct=own.direct,
            activations=training.message_bytes,
            gradients=gradients,
            late=late[place],
            units=units[place],
            gathered=gathered,
            rounding_weights=rounding_weights,
            optimizer=OPTIMIZER_BYTES * training.updated_elements / training.gpu.memory,
        )
        for place, (own, (gradients, rounding), (gathered, rounding_weights)) in enumerate(
            zip(links, sends, gathers, strict=True)
        )
    ]
    return simulate(stages, training.micro_batches, training.chunks, training.overlapped)


@dataclass(frozen=True)
class _Reductions:
    """Sums of a stage's gradients.

    ``links``: of all stages. ``factors_in_fp32``: whether factors are summed by all-reduces in fp32; else sums travel
    in few bits.
    """

    training: Training
    links: Sequence[StageLinks]
    factors_in_fp32: bool

    @property
    def half(self) -> float:
        """What a sum that goes to the process that needs it sends, of one that goes to all."""
        return 0.5 if self.training.scatters else 1.0

    @property
    def dense_bytes(self) -> float:
        """That a GPU sends in the host's own sum, in fp32."""
        return self.training.dense_bytes * self.half

    def dense(self, sent: float) -> tuple[Unit, ...]:
        """The host's own sum, of so many bytes."""
        return (Unit((0.0, 0.0), (sent / UNITS,), ("once" if self.training.scatters else "ring",)),) * UNITS

    def share(self, way: Compressing) -> float:
        """Elements of a stage, of those that were counted."""
        return self.training.reduced_elements / way.elements

    def rank_of(self, way: Compressing, sent: float) -> int:
        """The largest rank at which a GPU sends no more bytes."""
        return way.rank_of(sent / self.share(way) / all_reduce_bytes(1.0, self.training.replicas))

    def sent(self, way: Compressing, rank: int) -> float:
        """Bytes of a GPU. A rounded sum goes to the process that needs it, one of factors to all."""
        whole = all_reduce_bytes(1.0, self.training.replicas) * self.share(way) * way.bytes_at(rank)
        return whole * (self.half if rank == NO_RANK else 1.0)

    def units(self, way: Compressing, rank: int) -> tuple[Unit, ...]:
        messages = way.messages // UNITS
        if rank == NO_RANK:
            messages = int(messages * self.half)
        # sums in few bits are an all-to-all and an all-gather each, or the former alone where the host scatters
        over: tuple[str, ...] = ("ring",) if self.factors_in_fp32 else ("direct", "once")
        if rank == NO_RANK and self.training.scatters:
            over = ("direct",)
        computing = self.share(way) * way.at(rank) / UNITS
        return (Unit.of(computing, self.sent(way, rank) / UNITS, max(messages, 1), over),) * UNITS

    def alone(self, units: Sequence[Unit]) -> float:
        """Seconds of the slowest stage, with nothing beside them."""
        stages = [StageTimes(0.0, 0.0, own.ring, once=own.once, direct=own.direct) for own in self.links]
        return max(sum(sum(one.computing) + sum(own.seconds(one)) for one in units) for own in stages)


def _warm_up(reductions: _Reductions, contender: Contender, methods: Mapping[str, Compressing]) -> tuple[Unit, ...]:
    """The reductions of a step of its warm-up, which is dense where nothing rounds it."""
    rounding = methods.get(contender.warm_up)
    if rounding is None:
        return reductions.dense(reductions.dense_bytes)
    return replace(reductions, factors_in_fp32=False).units(rounding, NO_RANK)


def _chosen(
    reductions: _Reductions, contender: Contender, methods: Mapping[str, Compressing]
) -> tuple[Compressing, int | None]:
    """How EDGC would reduce, and at which rank; None: as the host does."""
    compressing = methods[contender.method]
    if contender.rank is not None:
        return compressing, contender.rank

    def low_rank(rank: int) -> float:
        return reductions.alone(reductions.units(compressing, rank))

    host = reductions.alone(reductions.dense(reductions.dense_bytes))
    if contender.volume is None:
        largest = _rank_worth_its_time(reductions.training.paper_rank, low_rank, host)
        return compressing, None if largest is None else rank_below(contender.rank_share * largest)
    whole = reductions.training.dense_bytes
    most = reductions.rank_of(compressing, whole / contender.volume)
    rank = _rank_worth_its_time(most, low_rank, MAX_TIME_RATIO * host)
    if (rounding := methods.get(equalised(ROUNDED))) is not None:
        times = LinkTimes(
            ReductionTime(host, reductions.half),
            ReductionTime(
                reductions.alone(reductions.units(rounding, NO_RANK)), reductions.sent(rounding, NO_RANK) / whole
            ),
            ReductionTime(low_rank(rank or RANK_MULTIPLE), 1 / contender.volume),
            may_replace_low_rank(contender.volume, reductions.half),
        )
        if times.rounding_pays:
            return rounding, NO_RANK
    return compressing, rank


def _rank_worth_its_time(rank: int, seconds: Callable[[int], float], most: float) -> int | None:
    """The largest rank up to this one at which reductions take at most so many seconds; None: there is none."""
    while rank >= RANK_MULTIPLE and seconds(rank) > most:
        rank = min(rank - RANK_MULTIPLE, int(rank * 0.95) // RANK_MULTIPLE * RANK_MULTIPLE)
    return rank if rank >= RANK_MULTIPLE else None


def _message(training: Training, rounding: Compressing | None, link: Link) -> tuple[float, float]:
    """Bytes of a message with gradients to the stage before, and seconds of rounding it, if that is worth it."""
    plain = training.message_bytes
    if rounding is None or training.pipeline == 1:
        return plain, 0.0
    values = plain / 2 / rounding.elements
    sent, seconds = plain / 2 * rounding.per_value, values * rounding.at(NO_RANK)
    if LEAST_GAIN * (seconds + link.seconds(sent)) > link.seconds(plain):
        return plain, 0.0
    return sent, seconds


def _message_rank(
    training: Training,
    contender: Contender,
    methods: Mapping[str, Compressing],
    links: Sequence[StageLinks],
    rank: int | None,
) -> int | None:
    """The rank of gradients that a stage waits for idle, the same between all stages; None: they travel whole.

    ``rank``: of the reductions; None: they are not in low rank. A rank that the contender does not give halves the
    messages, and makes none of them take longer.
    """
    low_rank = methods.get(contender.messages)
    if contender.messages != FP32_FACTORS or low_rank is None or training.pipeline == 1 or training.chunks > 1:
        return None
    if contender.message_rank is not None:
        return contender.message_rank
    if rank is None and training.replicas > 1:  # no rank is worth its time
        return None
    plain = training.message_bytes
    most = int(plain / LEAST_SAVING / _late_message(training, low_rank, 1)[0])

    def longer(rank: int) -> float:
        sent, seconds = _late_message(training, low_rank, rank)
        return max(seconds + own.before.seconds(sent) - own.before.seconds(plain) for own in links[1:])

    most = rank_below(contender.rank_share * most) if rank is None else min(rank, most)
    return _rank_worth_its_time(most, longer, 0.0)


def _late_message(training: Training, low_rank: Compressing, rank: int) -> tuple[float, float]:
    """Bytes of a message with gradients in low rank, and seconds of compressing it. Factors have 16 bits a value."""
    cols = training.layer.width
    rows = training.message_bytes / 2 / cols
    return 2 * rank * (rows + cols), rows * cols / low_rank.elements * low_rank.at(rank)


def _gather(training: Training, rounding: Compressing | None, link: Link) -> tuple[float, float]:
    """Bytes of updated weights that come back, and seconds of rounding them, if that is worth it."""
    if not training.scatters:
        return 0.0, 0.0
    plain = training.dense_bytes / 4  # once, in 16 bits
    if rounding is None:
        return plain, 0.0
    # of a sum in so few bits, which encodes and decodes more
    sent, seconds = plain / 2 * rounding.per_value, training.reduced_elements / rounding.elements * rounding.at(NO_RANK)
    if not GatherTimes(link.seconds(plain), seconds + link.seconds(sent)).rounding_pays:
        return plain, 0.0
    return sent, seconds
