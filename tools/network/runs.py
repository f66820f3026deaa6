"""Real Megatron runs between limited links: step times and bytes of a few windows, or the loss of a whole run."""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edgc.config import EDGCConfig
from edgc.observe.events import EventLog, read_events
from tools._root import REPOSITORY
from tools.network.links import INTERFACE, Links
from tools.shared.changes import changed, other_preset, preset
from tools.shared.machine import device_name
from tools.shared.processes import end, under_way
from tools.shared.runs import load_run

CORPUS = REPOSITORY / "runs" / "data" / "network"
WINDOW = 7  # iterations; the first one is the warm-up of most contenders and is not measured
PLANNED = 40 * WINDOW  # of the run that is begun: the warm-up of ``balanced`` is one window of it
# The learning rate stays, so that the steps that are measured have the mean budget of a run.
MEGATRON = shlex.split(
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 8 --lr 1e-3 --lr-decay-style constant --attention-dropout 0 --hidden-dropout 0 --eval-iters 1 "
    f"--eval-interval 100000 --log-interval 1000 --seed 1 --train-iters {PLANNED}"
)
MODEL = [*MEGATRON, *shlex.split(f"--edgc --edgc-cpu --edgc-window {WINDOW} --edgc-iteration-sampling-rate 0.2")]
# Of a run to its end: a learning rate that ends at 0, so that its last loss can be compared.
WHOLE = shlex.split("--lr-decay-style cosine --lr-warmup-iters 20 --min-lr 0 --eval-iters 20")
SEQUENCES = 32  # of a data-parallel process and step: 4,096 tokens


@dataclass(frozen=True)
class Mode:
    """How a model is trained.

    ``pipeline``: stages, each of ``replicas`` processes. ``sharing``: so many processes share a namespace, and so a
    link to the others.
    """

    flags: str
    replicas: int = 2
    pipeline: int = 1
    sharing: int = 1

    @property
    def processes(self) -> int:
        return self.replicas * self.pipeline

    @property
    def links(self) -> int:
        return self.processes // self.sharing


MODES = {
    "plain": Mode(""),
    "overlapped": Mode("--overlap-grad-reduce"),
    "distributed optimizer": Mode("--use-distributed-optimizer"),
    "distributed optimizer, overlapped": Mode("--use-distributed-optimizer --overlap-grad-reduce"),
    "distributed optimizer, weights in bf16": Mode("--use-distributed-optimizer --bf16"),
    "pipeline": Mode("--pipeline-model-parallel-size 2", pipeline=2),
    "four workers": Mode("", replicas=4),
    "two racks of two workers": Mode("", replicas=4, sharing=2),
    # where low rank computes long: short sequences, so that the passes do not
    "width 2048": Mode(
        "--num-layers 1 --hidden-size 2048 --num-attention-heads 16 --seq-length 16 --max-position-embeddings 16"
    ),
}
_BEGUN = "--edgc-warmup-fraction 0.025 --edgc-study entropy_stability=9 --edgc-rmax 64 --edgc-rank-step 128"
_EIGHT_BITS = "--edgc-basis-wire int8 --edgc-wire int8 --edgc-rest-wire int8 --edgc-dense-wire int8"
CONTENDERS = {
    "dense": "--edgc-engine dense",
    "dense-bf16-sums": "--edgc-engine dense --grad-reduce-in-bf16",  # Megatron's own, of models in bf16 alone
    "bf16": "--edgc-engine bf16 --edgc-warmup-fraction 0.025",
    "int8": "--edgc-engine int8 --edgc-dense-wire int8 --edgc-warmup-fraction 0.025",
    "int4": "--edgc-engine int4 --edgc-dense-wire int8 --edgc-warmup-fraction 0.025",
    "powersgd": "--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025",  # in fp32, as torch's hook
    "powersgd-int8": f"--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025 {_EIGHT_BITS}",
    "optimus": "--edgc-preset optimus --edgc-static-rank 64 --edgc-warmup-fraction 0.025",
    "paper": "--edgc-preset paper",
    # begins to compress after two windows, at a given rank, which may move by more than the paper's 8 a window
    "paper-begun": f"--edgc-preset paper {_BEGUN}",
    "paper-not-aligned": f"--edgc-preset paper {_BEGUN} --edgc-no-align",
    "safe": "--edgc-preset safe",
    "balanced": "--edgc-preset balanced",
    "balanced-low-rank": "--edgc-preset balanced --edgc-rmax 1024",  # whatever the probe says
    "balanced-whole-weights": "--edgc-preset balanced --edgc-param-wire off",  # gathered as Megatron does
    "balanced-int4-weights": "--edgc-preset balanced --edgc-param-wire int4",
    "fast": "--edgc-preset fast",
}


# What presets with a volume said in all runs that did not keep what their preset stood for.
UNRECORDED = "no error waits, and small parameters travel in 5 or 6 bits, within the same volume"


class RunFailed(Exception):
    """A run has ended with an error; the message has the end of its output."""


EVEN, UNEVEN = "even", "one at a third"
FALLING, RISING = "a third from the middle on", "a third until the middle"
CHANGING = (FALLING, RISING)
LINKS = (EVEN, UNEVEN, *CHANGING)  # how the links of a run differ from the rate of its point


def changes_after(windows: int) -> int:
    """Of so many measured windows those before links that change."""
    return windows // 2


@dataclass(frozen=True)
class Point:
    """What one run showed. Seconds are medians of steps; bytes are means over processes, of one step.

    ``communication_seconds``: of the reductions alone. ``interface_bytes``: what the links counted, with all headers.
    ``start_bytes``: what a process sent before the measured steps, with start-up, probing and warm-up. ``ranks``: those
    of the last window, None for a stage that was not compressed. ``links``: of ``LINKS``. ``window_seconds``: of a step
    in each measured window. ``mean_seconds``: all measured time over all its steps, with the exchanges at the ends of
    windows; 0 in older points. ``changes``: how many of ``tools.shared.changes.CHANGES`` its code had. ``flags``: see
    ``flags``. ``machine``: what it ran on. ``preset_settings``: see ``meaning``; None in older points.
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

    @property
    def session(self) -> tuple[str, str, int, int]:
        """What it has in common with the runs that it can be set against: code, machine, windows, repetition."""
        return self.commit, self.machine, len(self.window_seconds), self.repetition

    @property
    def old(self) -> bool:
        """Whether today's code compresses otherwise with the same preset, or times it with other flags."""
        return self.flags != flags(self.mode, self.contender) or _old(self.mode, self.contender, self.changes)

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
    ``changes``, ``machine`` and ``preset_settings``: as of a ``Point``.
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

    @property
    def old(self) -> bool:
        """Whether today's code compresses otherwise with the same preset."""
        return _old(self.mode, self.contender, self.changes)

    @property
    def older_preset(self) -> str:
        """As of a ``Point``."""
        return older_preset(self.mode, self.contender, self.preset_settings)


def _old(mode: str, contender: str, changes: int) -> bool:
    given = shlex.split(CONTENDERS[contender])
    engine = dict(pairwise(given)).get("--edgc-engine", EDGCConfig.engine)
    return bool(changed(engine, MODES[mode].pipeline, given, changes))


def flags(mode: str, contender: str) -> str:
    """The flags of a run that is timed, without paths and the length of what is measured."""
    return shlex.join([*MODEL, *shlex.split(MODES[mode].flags), *shlex.split(CONTENDERS[contender])])


def meaning(mode: str, contender: str) -> dict[str, Any]:
    """What the preset of a contender stands for today."""
    return preset(shlex.split(flags(mode, contender)))


def older_preset(mode: str, contender: str, then: Mapping[str, Any] | None) -> str:
    """What the preset of a run stood for and does not stand for today; empty if nothing.

    ``then``: ``meaning`` when the run began; None: the run is from before that was kept.
    """
    if then is None:
        return UNRECORDED if has_volume(mode, contender) else ""
    return ", ".join(other_preset(then, shlex.split(flags(mode, contender))))


def has_volume(mode: str, contender: str) -> bool:
    """Whether a volume of its preset bounds the bytes of a contender."""
    return "volume" in meaning(mode, contender)


def arguments(mode: Mode, contender: str, folder: Path, data: Sequence[str], more: Sequence[str]) -> list[str]:
    """Everything after ``pretrain_gpt.py``."""
    return [
        *MODEL,
        *data,
        *("--global-batch-size", str(SEQUENCES * mode.replicas), "--edgc-log-dir", str(folder)),
        *shlex.split(mode.flags),
        *shlex.split(CONTENDERS[contender]),
        *more,
    ]


def measure(
    links: Links,
    mode_name: str,
    contender: str,
    data: Sequence[str],
    windows: int,
    during: Callable[[int], None] = lambda window: None,
) -> dict[str, Any]:
    """Train for one window and so many more, which are measured; fields of a ``Point``.

    ``during`` is called when a window has ended, with its number from 1. Raises ``RunFailed``.
    """
    mode = MODES[mode_name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = arguments(mode, contender, folder, data, ["--exit-interval", str((1 + windows) * WINDOW)])
        with training(links, mode, given, folder) as processes:
            sent = [_sent(links, mode)]
            while under_way(processes):
                closed = _windows(folder)
                while len(sent) <= len(closed):
                    sent.append(_sent(links, mode))
                    during(len(sent) - 1)
                time.sleep(0.02)
        if any(process.poll() for process in processes) or len(sent) < 2 + windows:
            raise failed(f"{mode_name}, {contender}", folder)
        return {
            **measured(_windows(folder), sent, windows),
            "flags": flags(mode_name, contender),
            "machine": device_name(on_gpu=False),
            "preset_settings": meaning(mode_name, contender),
        }


def measured(closed: Sequence[Mapping[str, Any]], sent: Sequence[float], windows: int) -> dict[str, Any]:
    """Fields of a ``Point``, without what was not seen.

    ``closed``: events of windows. The first one ends the warm-up, which may be shorter than a window; so many after it
    are measured. ``sent``: bytes of a process at the start and at each event.
    """
    first, own = closed[0], closed[1 : 1 + windows]
    steps = int(own[-1]["iteration"]) - int(first["iteration"])
    return {
        "step_seconds": median(float(window["step_seconds"]) for window in own),
        "communication_seconds": median(
            max(float(stage["reduce_seconds"] or 0) for stage in window["stages"]) for window in own
        ),
        "counted_bytes": (float(own[-1]["total_bytes"]) - float(first["total_bytes"])) / steps,
        "interface_bytes": (sent[1 + windows] - sent[1]) / steps,
        "start_bytes": sent[1] - sent[0],
        "steps": steps,
        "ranks": tuple(own[-1]["ranks"]),
        "window_seconds": tuple(float(window["step_seconds"]) for window in own),
        "mean_seconds": (float(own[-1]["time"]) - float(first["time"])) / steps,
    }


def to_the_end(links: Links, mode_name: str, contender: str, data: Sequence[str]) -> dict[str, Any]:
    """Train for all steps; fields of a ``Curve``. Raises ``RunFailed``."""
    mode = MODES[mode_name]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = arguments(mode, contender, folder, data, [*WHOLE, "--tensorboard-dir", str(folder / "tensorboard")])
        with training(links, mode, given, folder) as processes:
            while under_way(processes):
                time.sleep(0.2)
        if any(process.poll() for process in processes):
            raise failed(f"{mode_name}, {contender}", folder)
        run = load_run(folder)
    ends = [0, *(int(window["iteration"]) for window in run.windows)]
    return {
        "seconds": seconds_of_training(run.windows),
        "by_clock": True,
        "losses": tuple(
            fmean(loss for iteration, loss in run.loss if begin < iteration <= end) for begin, end in pairwise(ends)
        ),
        "val_loss": run.val_loss,
        "counted_bytes": run.total_bytes,
        "machine": device_name(on_gpu=False),
        "preset_settings": meaning(mode_name, contender),
    }


def seconds_of_training(windows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Of window events: the time until the end of each one, with all steps and what lies between them.

    Only of the first window it is the median step times their number: start-up cannot be told from its first step.
    """
    begin = float(windows[0]["time"]) - int(windows[0]["iteration"]) * float(windows[0]["step_seconds"])
    return tuple(float(window["time"]) - begin for window in windows)


@contextmanager
def started(
    links: Links, commands: Sequence[tuple[int, Sequence[str]]], folder: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One Python process for each (namespace, arguments of Python), with a log in the folder; those that run at
    the end are ended.
    """
    processes = []
    try:
        for number, (place, command) in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        links.command(place, [sys.executable, *command]),
                        cwd=REPOSITORY,
                        env={**os.environ, **environment(links, number, len(commands))},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        end(processes)


def training(
    links: Links, mode: Mode, given: Sequence[str], folder: Path
) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """The processes of a run, each in its namespace."""
    command = ["pretrain_gpt.py", *given]
    return started(links, [(number // mode.sharing, command) for number in range(mode.processes)], folder)


def failed(what: str, folder: Path) -> RunFailed:
    """With the ends of all logs."""
    ends = [log.read_text()[-1500:] for log in sorted(folder.glob("*.log"))]
    return RunFailed(f"{what}: " + "\n".join(ends))


def environment(links: Links, process: int, processes: int) -> dict[str, str]:
    """Of one of so many processes that meet in the first namespace."""
    return {
        **{"RANK": str(process), "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
        **{"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "CUDA_VISIBLE_DEVICES": ""},
    }


def _windows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / EventLog.FILE).is_file():
        return []
    return [event for event in read_events(folder) if event["event"] == "window"]


def _sent(links: Links, mode: Mode) -> float:
    return sum(links.sent(place) for place in range(mode.links)) / mode.processes
