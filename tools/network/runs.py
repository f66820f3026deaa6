"""Real Megatron runs between limited links: step times and bytes of a few windows, or the loss of a whole run."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from edgc.observe.events import EventLog, read_events
from tools._root import REPOSITORY
from tools.network.links import INTERFACE, Links
from tools.network.setups import MODES, WHOLE, WINDOW, Mode, arguments, flags, meaning
from tools.shared.machine import device_name
from tools.shared.processes import CPU_TRAINING, end, under_way
from tools.shared.runs import load_run


class RunFailed(Exception):
    """A run has ended with an error; the message has the end of its output."""


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
            sent, size = [_sent(links, mode)], 0
            while under_way(processes):
                # the log is read only when it has grown: reading takes time of the cores that train
                if (grown := _log_size(folder)) > size:
                    size = grown
                    for _ in _windows(folder)[len(sent) - 1 :]:
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
            "in_heap": True,
        }


def measured(closed: Sequence[Mapping[str, Any]], sent: Sequence[float], windows: int) -> dict[str, Any]:
    """Fields of a ``Point``, without what was not seen.

    ``closed``: events of windows. The first one ends the warm-up, which may be shorter than a window; so many after it
    are measured. ``sent``: bytes of a process at the start and at each event.
    """
    first, own = closed[0], closed[1 : 1 + windows]
    steps = int(own[-1]["iteration"]) - int(first["iteration"])

    def counted(name: str) -> float:
        return (float(own[-1].get(name, 0.0)) - float(first.get(name, 0.0))) / steps

    return {
        "step_seconds": median(float(window["step_seconds"]) for window in own),
        "communication_seconds": median(
            max(float(stage["reduce_seconds"] or 0) for stage in window["stages"]) for window in own
        ),
        "counted_bytes": counted("total_bytes"),
        "message_bytes": counted("pp_bytes"),
        "weight_bytes": counted("param_bytes"),
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
        "in_heap": True,
    }


def seconds_of_training(windows: Sequence[Mapping[str, Any]]) -> tuple[float, ...]:
    """Of window events: the time until the end of each one, with all steps and what lies between them.

    Only of the first window it is the median step times their number: start-up cannot be told from its first step.
    """
    begin = float(windows[0]["time"]) - int(windows[0]["iteration"]) * float(windows[0]["step_seconds"])
    return tuple(float(window["time"]) - begin for window in windows)


@contextmanager
def started(
    links: Links, commands: Sequence[tuple[int, Sequence[str]]], folder: Path, without: Collection[str] = ()
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """One Python process for each (namespace, arguments of Python), with a log in the folder; those that run at
    the end are ended. ``without``: names of environment variables that they do not get.
    """
    processes = []
    try:
        for number, (place, command) in enumerate(commands):
            variables = {**os.environ, **environment(links, number, len(commands))}
            with (folder / f"{number}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        links.command(place, [sys.executable, *command]),
                        cwd=REPOSITORY,
                        env={name: value for name, value in variables.items() if name not in without},
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        yield processes
    finally:
        end(processes)


def training(
    links: Links, mode: Mode, given: Sequence[str], folder: Path, without: Collection[str] = ()
) -> AbstractContextManager[list[subprocess.Popen[bytes]]]:
    """The processes of a run, each in its namespace, as of ``started``."""
    command = ["pretrain_gpt.py", *given]
    return started(links, [(number // mode.sharing, command) for number in range(mode.processes)], folder, without)


def failed(what: str, folder: Path) -> RunFailed:
    """With the ends of all logs."""
    ends = [log.read_text()[-1500:] for log in sorted(folder.glob("*.log"))]
    return RunFailed(f"{what}: " + "\n".join(ends))


def environment(links: Links, process: int, processes: int) -> dict[str, str]:
    """Of one of so many processes that meet in the first namespace."""
    return {
        **{"RANK": str(process), "WORLD_SIZE": str(processes), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
        **{"MASTER_ADDR": links.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": INTERFACE},
        **{**CPU_TRAINING, "CUDA_VISIBLE_DEVICES": ""},
    }


def _log_size(folder: Path) -> int:
    file = folder / EventLog.FILE
    return file.stat().st_size if file.is_file() else 0


def _windows(folder: Path) -> list[dict[str, Any]]:
    if not (folder / EventLog.FILE).is_file():
        return []
    return [event for event in read_events(folder) if event["event"] == "window"]


def _sent(links: Links, mode: Mode) -> float:
    return sum(links.sent(place) for place in range(mode.links)) / mode.processes
