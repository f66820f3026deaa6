"""What runs on limited links have shown: a point for steps that were timed, a curve for the loss of a whole run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tools.network.setups import WHOLE, flags, is_old, older_preset

EVEN, UNEVEN = "even", "one at a third"
FALLING, RISING = "a third from the middle on", "a third until the middle"
LIMITED, FREED = "limited from the middle on", "limited until the middle"
CHANGING = (FALLING, RISING, LIMITED, FREED)
LINKS = (EVEN, UNEVEN, *CHANGING)  # how the links of a run differ from the rate of its point


def before_and_after(links: str, mbit: float) -> tuple[float | None, float | None]:
    """The rates of ``CHANGING`` links, in Mbit/s; None: no limit."""
    rates: dict[str, tuple[float | None, float | None]] = {
        FALLING: (mbit, mbit / 3),
        RISING: (mbit / 3, mbit),
        LIMITED: (None, mbit),
        FREED: (mbit, None),
    }
    return rates[links]


def changes_after(windows: int) -> int:
    """Of so many measured windows those before links that change."""
    return windows // 2


@dataclass(frozen=True)
class Point:
    """What one run showed. Seconds are medians of steps; bytes are means over processes, of one step.

    ``communication_seconds``: of the reductions alone. ``message_bytes``, ``weight_bytes``: of ``counted_bytes`` those
    of messages between stages and of updated weights; None in older points. ``interface_bytes``: what the links
    counted, with all headers.
    ``start_bytes``: what a process sent before the measured steps, with start-up, probing and warm-up. ``ranks``: those
    of the last window, None for a stage that was not compressed. ``links``: of ``LINKS``. ``window_seconds``: of a step
    in each measured window. ``mean_seconds``: all measured time over all its steps, with the exchanges at the ends of
    windows; 0 in older points. ``changes``: how many of ``tools.shared.changes.CHANGES`` its code had. ``flags``: see
    ``flags``. ``machine``: what it ran on. ``preset_settings``: see ``meaning``; None in older points. ``in_heap``:
    whether tensors stayed in the heap, as they do today (``tools.shared.processes``).
    """

    mbit: float | None
    mode: str
    contender: str
    repetition: int
    step_seconds: float
    communication_seconds: float
    counted_bytes: float
    interface_bytes: float
    start_bytes: float
    steps: int
    ranks: tuple[int | None, ...]
    commit: str
    started: int
    links: str = EVEN
    window_seconds: tuple[float, ...] = ()
    mean_seconds: float = 0.0
    changes: int = 0
    flags: str = ""
    machine: str = ""
    preset_settings: Mapping[str, Any] | None = None
    in_heap: bool = False
    message_bytes: float | None = None
    weight_bytes: float | None = None

    @property
    def session(self) -> tuple[str, str, int, int]:
        """What it has in common with the runs that it can be set against: code, machine, windows, repetition."""
        return self.commit, self.machine, len(self.window_seconds), self.repetition

    @property
    def old(self) -> bool:
        """Whether today's code compresses otherwise with the same preset, or times it with other flags."""
        return self.flags != flags(self.mode, self.contender) or is_old(self.mode, self.contender, self.changes)

    @property
    def older_preset(self) -> str:
        """What its preset stood for and does not stand for today; empty if nothing."""
        return older_preset(self.mode, self.contender, self.preset_settings)


@dataclass(frozen=True)
class Curve:
    """The loss of one run to its end.

    ``seconds``: from the first step to the end of each window, without start-up and evaluation; without ``by_clock``
    the median step of each window times its steps, as older runs kept it. ``losses``: the mean
    training loss of that window. ``val_loss``: after the last step. ``counted_bytes``: of a process in the whole run.
    ``changes``, ``machine``, ``preset_settings`` and ``in_heap``: as of a ``Point``.
    """

    mbit: float | None
    mode: str
    contender: str
    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    val_loss: float
    counted_bytes: float
    commit: str
    started: int
    changes: int = 0
    machine: str = ""
    by_clock: bool = False
    preset_settings: Mapping[str, Any] | None = None
    in_heap: bool = False

    @property
    def old(self) -> bool:
        """Whether today's code compresses otherwise with the same preset."""
        return is_old(self.mode, self.contender, self.changes, WHOLE)

    @property
    def older_preset(self) -> str:
        """As of a ``Point``."""
        return older_preset(self.mode, self.contender, self.preset_settings)
