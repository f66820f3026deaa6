"""A finished run: its event log and the losses that Megatron wrote for TensorBoard."""

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from edgc.observe.events import EventLog, read_events


class RunError(Exception):
    """A run that has failed or not finished; the message is one line."""


@dataclass(frozen=True)
class Run:
    """A finished run. ``start``: the event of its last begin or resume. ``loss`` holds (iteration, training
    loss) pairs; ``windows`` the window events in order. ``rates``: (iteration, learning rate) pairs.
    """

    name: str
    start: dict[str, Any]
    windows: list[dict[str, Any]]
    loss: list[tuple[int, float]]
    val_loss: float
    rates: list[tuple[int, float]] = field(default_factory=list)

    @property
    def dp_bytes(self) -> float:
        """Bytes sent for gradients in the whole run, the mean over all processes."""
        return float(self.windows[-1]["dp_bytes"])

    @property
    def param_bytes(self) -> float:
        """The same for the weights that the distributed optimizer gathers; 0 without it."""
        return float(self.windows[-1].get("param_bytes", 0))

    @property
    def pp_bytes(self) -> tuple[float, float]:
        """The same for messages between pipeline stages, and without compression; 0 without a pipeline."""
        last = self.windows[-1]
        return float(last.get("pp_bytes", 0)), float(last.get("pp_bytes_dense", 0))

    @property
    def total_bytes(self) -> float:
        """Gradients, gathered weights and messages together."""
        return self.dp_bytes + self.param_bytes + self.pp_bytes[0]

    @property
    def state_per_parameter(self) -> float | None:
        """Bytes a parameter that EDGC keeps from step to step, of the stage with most; None in older logs."""
        stages = self.windows[-1]["stages"]
        if any("state_bytes" not in stage for stage in stages):
            return None
        sizes = [
            sum(rows * cols for _, rows, cols in stage["matrices"]) + sum(elements for _, elements, _ in stage["rest"])
            for stage in self.start["stages"]
        ]
        return max(float(stage["state_bytes"]) / float(size) for stage, size in zip(stages, sizes, strict=True))

    @property
    def step_seconds(self) -> float:
        """Median over windows of the median step time; the first window, which warms up, is left out."""
        return median(float(window["step_seconds"]) for window in (self.windows[1:] or self.windows))

    @property
    def stages(self) -> list[str]:
        """The names of the stages of the plan."""
        return [stage["name"] for stage in self.start["stages"]]


def load_run(folder: Path) -> Run:
    """Read a finished run. Raises ``RunError`` where the log is missing, unfinished or without validation loss."""
    if not (folder / EventLog.FILE).is_file():
        raise RunError(f"{folder}: there is no {EventLog.FILE}: was the run started with --edgc-log-dir?")
    events = read_events(folder)
    start = next((event for event in reversed(events) if event["event"] == "start"), None)
    windows: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "window":  # a run that was stopped has done again what came after its last checkpoint
            windows = [one for one in windows if one["iteration"] < event["iteration"]] + [event]
    if start is None or not windows or not windows[-1]["last"]:
        raise RunError(f"{folder}: the run has not finished")
    if (done := windows[-1]["iteration"]) < start["iterations"]:  # Megatron ended it, as after a time limit
        raise RunError(f"{folder}: the run has not finished: {done} of {start['iterations']} iterations")
    loss, validation, rates = _scalars(folder / "tensorboard", "lm loss", "lm loss validation", "learning-rate")
    if not validation:
        raise RunError(f"{folder}: no validation loss in its TensorBoard files")
    final = validation[-1][0]
    # After the last step Megatron writes the validation loss and then, under the same name, the test loss.
    loss, rates = (sorted(dict(one).items()) for one in (loss, rates))  # so of losses as well
    return Run(folder.name, start, windows, loss, next(value for step, value in validation if step == final), rates)


def _scalars(folder: Path, *tags: str) -> list[list[tuple[int, float]]]:
    """The (iteration, value) pairs of each tag; empty where there are none."""
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={SCALARS: 0})
    accumulator.Reload()

    def scalars(tag: str) -> list[tuple[int, float]]:
        known = tag in accumulator.Tags()[SCALARS]
        return [(event.step, event.value) for event in accumulator.Scalars(tag)] if known else []

    return [scalars(tag) for tag in tags]


def times_fewer(dense: float, sent: float) -> float:
    """How many times fewer bytes were sent; 1 where nothing was, as by one process alone."""
    return dense / sent if sent else 1.0
