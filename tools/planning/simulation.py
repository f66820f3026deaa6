"""A discrete-event model of one training step: passes, messages between stages, reductions, weight gathers.

What it assumes:

- A stage's passes run one after another. A message leaves when its pass has ended, and takes ``latency`` and its bytes
  over the link. One link carries a process's messages one after another, those of reductions as well. Messages
  between stages go first: a message of a reduction stands still while one of them is on the link.
- A unit of reduction goes through its phases in turn: compute, message, compute, message, compute. Of two units one
  computes while the other's message is under way. The next unit starts when one of the two has ended.
- With ``overlapped`` reductions a unit is ready when its share of the last backward pass of its chunk is done, else
  when all passes are. Chunks have equal shares of the units. ``beside``: whether compressing runs beside the backward
  pass (a GPU's other stream) or takes its place (a CPU).
- The step ends when the last stage has gathered its weights.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tools.planning.schedule import Work, one_forward_one_backward

UNDER_WAY = 2  # units


@dataclass(frozen=True)
class Link:
    """``gbps``: Gbit/s of one process to the others; ``latency``: seconds of a message; ``headers``: bytes on the wire
    over those of messages.
    """

    gbps: float
    latency: float = 0.0
    headers: float = 1.0

    def seconds(self, nbytes: float) -> float:
        return self.latency + nbytes * self.headers * 8 / (self.gbps * 1e9)


@dataclass(frozen=True)
class Unit:
    """What is reduced together: seconds of computing before, between and after its messages, whose bytes follow.

    ``over``: by which of a stage's links each message goes; by default, ``ring``.
    """

    computing: tuple[float, ...]
    messages: tuple[float, ...]
    over: tuple[str, ...] = ()

    @classmethod
    def of(cls, computing: float, nbytes: float, messages: int, over: Sequence[str] = ()) -> "Unit":
        """Both spread evenly; messages take turns in the links that they go ``over``."""
        in_turn = tuple(over[place % len(over)] for place in range(messages)) if over else ()
        return cls((computing / (messages + 1),) * (messages + 1), (nbytes / messages,) * messages, in_turn)


@dataclass(frozen=True)
class StageTimes:
    """Seconds of a pass of one micro-batch through a chunk; bytes and seconds of what it sends to its neighbours.

    ``units``: reductions, in the order in which backward passes complete them. ``gathered``: bytes of updated weights
    that come back, and ``rounding_weights`` seconds of computing for it. ``late``: bytes of a message with gradients
    that the stage before waits for idle, and seconds of compressing it, if they are others (one chunk a stage).
    ``link``: its own; ``before``: that to the stage before; of reductions ``ring``, ``once`` and ``direct``
    (``tools.planning.placement.StageLinks``), if they are others.
    """

    forward: float
    backward: float
    link: Link
    activations: float = 0.0
    gradients: float = 0.0
    late: tuple[float, float] | None = None
    units: tuple[Unit, ...] = ()
    gathered: float = 0.0
    rounding_weights: float = 0.0
    optimizer: float = 0.0
    before: Link | None = None
    ring: Link | None = None
    once: Link | None = None
    direct: Link | None = None

    def over(self, name: str) -> Link:
        """The link of this name, of reductions."""
        link: Link | None = getattr(self, name)
        return link or self.ring or self.link

    def seconds(self, unit: Unit) -> list[float]:
        """What each message of a unit takes alone."""
        over = unit.over or ("ring",) * len(unit.messages)
        return [self.over(name).seconds(nbytes) for name, nbytes in zip(over, unit.messages, strict=True)]


@dataclass(frozen=True)
class Span:
    """What a stage does, or its link carries, from one second to another."""

    stage: int
    kind: str  # forward, backward, compress, message, reduce, optimizer, gather
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass
class Step:
    """The spans of a step."""

    spans: list[Span] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return max(span.end for span in self.spans)

    def exposed(self) -> float:
        """Seconds of reducing and gathering after the last backward pass, of the stage that takes longest."""
        found = []
        for stage in {span.stage for span in self.spans}:
            own = [span for span in self.spans if span.stage == stage]
            backward = max(span.end for span in own if span.kind == "backward")
            optimizer = sum(span.seconds for span in own if span.kind == "optimizer")
            found.append(max(span.end for span in own) - backward - optimizer)
        return max(found)


def simulate(
    stages: Sequence[StageTimes],
    micro_batches: int,
    chunks: int = 1,
    overlapped: bool = False,
    beside: bool = True,
) -> Step:
    """One step of a pipeline of these stages."""
    step = Step()
    count = len(stages)
    orders = [one_forward_one_backward(place, count, micro_batches, chunks) for place in range(count)]
    arrived: dict[tuple[int, Work], float] = {}  # when what a pass needs from its neighbour is there
    ended: dict[tuple[int, Work], float] = {}
    free, link_free, done = [0.0] * count, [0.0] * count, [0] * count

    def needs(stage: int, work: Work) -> float | None:
        """When a pass may begin; None: not known yet."""
        virtual = work.chunk * count + stage
        if not work.backward:
            return 0.0 if virtual == 0 else arrived.get((stage, work))
        own = ended.get((stage, Work(False, work.chunk, work.micro_batch)))
        if virtual == count * chunks - 1 or own is None:
            return own
        came = arrived.get((stage, work))
        return None if came is None else max(own, came)

    while any(place < len(order) for place, order in zip(done, orders, strict=True)):
        ready = [
            (max(begin, free[stage]), stage)
            for stage in range(count)
            if done[stage] < len(orders[stage]) and (begin := needs(stage, orders[stage][done[stage]])) is not None
        ]
        start, stage = min(ready)
        times, work = stages[stage], orders[stage][done[stage]]
        late = times.late if work.backward and work.micro_batch >= micro_batches - (count - stage) else None
        end = start + (times.backward if work.backward else times.forward) + (late[1] if late else 0.0)
        step.spans.append(Span(stage, "backward" if work.backward else "forward", start, end))
        ended[stage, work] = end
        virtual = work.chunk * count + stage + (-1 if work.backward else 1)
        if 0 <= virtual < count * chunks:
            gradients = late[0] if late else times.gradients
            nbytes = gradients if work.backward else times.activations
            if count > 1:
                leaves = max(end, link_free[stage])
                link = (times.before or times.link) if work.backward else times.link
                comes = link_free[stage] = leaves + link.seconds(nbytes)
                step.spans.append(Span(stage, "message", leaves, comes))
            else:
                comes = end
            chunk, receiver = divmod(virtual, count)
            arrived[receiver, Work(work.backward, chunk, work.micro_batch)] = comes
        free[stage] = end
        done[stage] += 1
    for stage, times in enumerate(stages):
        last = [ended[stage, Work(True, chunk, micro_batches - 1)] for chunk in reversed(range(chunks))]
        end = _reduced(step, stage, times, last if overlapped else [], free[stage], beside)
        step.spans.append(Span(stage, "optimizer", end, end + times.optimizer))
        if times.gathered:
            begin = end + times.optimizer + times.rounding_weights
            if times.rounding_weights:
                step.spans.append(Span(stage, "compress", begin - times.rounding_weights, begin))
            step.spans.append(Span(stage, "gather", begin, begin + times.over("once").seconds(times.gathered)))
    return step


def _reduced(
    step: Step,
    stage: int,
    times: StageTimes,
    chunk_ends: Sequence[float],
    backward_end: float,
    beside: bool,
) -> float:
    """Adds the spans of a stage's reductions; when all have ended.

    ``chunk_ends``: the end of the last backward pass of each chunk, in the order of the units; empty where reductions
    wait for all.
    """
    units = times.units
    if not units:
        return backward_end
    ready = [backward_end] * len(units)
    if chunk_ends:
        for place in range(len(units)):
            chunk, part = divmod((place + 1) * len(chunk_ends), len(units))
            chunk, done = (chunk, part / len(units)) if part else (chunk - 1, 1.0)
            ready[place] = chunk_ends[chunk] - times.backward * (1 - done)
    busy = [(span.start, span.end) for span in step.spans if (span.stage, span.kind) == (stage, "message")]
    computer, link = (0.0 if beside else backward_end), 0.0
    waiting = [(moment, place) for place, moment in enumerate(ready)]
    under_way: list[tuple[float, int, int]] = []  # when its next phase may begin, unit, phase
    ended = 0.0  # of the last unit that has
    while waiting or under_way:
        while waiting and len(under_way) < UNDER_WAY:
            moment, place = waiting.pop(0)
            heapq.heappush(under_way, (max(moment, ended), place, 0))
        moment, place, phase = heapq.heappop(under_way)
        unit = units[place]
        begin = max(moment, computer)
        computer = begin + unit.computing[phase]
        if unit.computing[phase]:
            step.spans.append(Span(stage, "compress", begin, computer))
        if phase == len(unit.messages):
            ended = computer
            continue
        for leaves, comes in _parts(max(computer, link), times.seconds(unit)[phase], busy):
            step.spans.append(Span(stage, "reduce", leaves, comes))
            link = comes
        heapq.heappush(under_way, (link, place, phase + 1))
    return max(backward_end, ended)


def _parts(begin: float, seconds: float, busy: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """When a link carries a message that is there at ``begin``: between what keeps it busy, which comes in order."""
    for start, end in busy:
        if end <= begin:
            continue
        if begin + seconds <= start:
            break
        if begin < start:
            yield begin, start
            seconds -= start - begin
        begin = end
    yield begin, begin + seconds
