"""The result of a trial, and what it says of today's code; docs/frontier/lists.md has the fields."""

import math
import shlex
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from edgc.observe.window import layer_kind
from tools.experiments.lists import Trial
from tools.experiments.series import weighted
from tools.experiments.store import IDENTITY, identity
from tools.shared.changes import changed, other_preset, respelled
from tools.shared.runs import Run


def result(trial: Trial, measured: Run, record: Mapping[str, Any], studies: Collection[str]) -> dict[str, Any]:
    """A trial's line of results, with what each window saw for ``studies``, and training losses for that of losses.

    docs/frontier/lists.md has the fields.
    """
    config = measured.start["config"]
    line = {
        "model": trial.model,
        "name": trial.name,
        "engine": config["engine"].partition(":")[0],
        "preset": config.get("preset"),
        "preset_settings": record["preset"],
        "flags": shlex.join(trial.flags),
        "seed": trial.seed,
        "iterations": trial.iterations,
        "data_parallel": trial.data_parallel,
        "pipeline_parallel": trial.pipeline_parallel,
        "val_loss": measured.val_loss,
        "dp_bytes": measured.dp_bytes,
        "dp_bytes_dense": float(measured.windows[-1]["dp_bytes_dense"]),
        **({"param_bytes": measured.param_bytes} if measured.param_bytes else {}),
        **({"pp_bytes": measured.pp_bytes[0], "pp_bytes_dense": measured.pp_bytes[1]} if measured.pp_bytes[1] else {}),
        **({} if measured.state_per_parameter is None else {"state_per_parameter": measured.state_per_parameter}),
        "step_seconds": measured.step_seconds,
        "ranks": [window["ranks"] for window in measured.windows],
        "settings": shlex.join(trial.settings),
        "commit": record["commit"],
        "changes": record.get("changes", 0),
        "versions": measured.start["versions"],
        "machine": record["machine"],
        **({"gpu": True} if trial.gpu else {}),
        **({"corpus": record["corpus"]} if record.get("corpus") else {}),
    }
    if studies:
        line["windows"] = [_window(event) for event in measured.windows]
        if signals := fidelity(measured):
            line["fidelity"] = signals
    if "replay" in studies:
        line["iteration_sampling_rate"] = config["iteration_sampling_rate"]
        line["matrices"] = [[[rows, cols] for _, rows, cols in stage["matrices"]] for stage in measured.start["stages"]]
    if "losses" in studies:
        line["losses"], line["cosines"] = mean_losses(measured), mean_cosines(measured)
    return line


def mean_losses(measured: Run) -> list[list[float]]:
    """The last iteration of each window, and the mean training loss of its iterations."""
    return [[end, _rounded(mean)] for end, mean in _by_window(measured.loss, measured).items()]


def _by_window(pairs: Sequence[tuple[int, float]], measured: Run) -> dict[int, float]:
    """The mean value of these (iteration, value) pairs in each window that has one, by its last iteration."""
    values: dict[int, list[float]] = {window["iteration"]: [] for window in measured.windows}
    ends = sorted(values)
    for iteration, value in pairs:
        if iteration <= ends[-1]:
            values[ends[bisect_left(ends, iteration)]].append(value)
    return {end: fmean(own) for end, own in values.items() if own}


def mean_cosines(measured: Run) -> list[float | None]:
    """Of each window the mean cosine over the parameters, by their elements; None where nothing was measured."""
    sizes = _elements(measured)
    found: list[float | None] = []
    for window in measured.windows:
        signals = [one for stage in window["stages"] for one in (stage.get("fidelity") or {}).items()]
        cosines = [(sizes[name], own["cosine"]) for name, own in signals if own.get("cosine") is not None]
        pairs = [(size, cosine) for size, cosine in cosines if math.isfinite(cosine)]
        found.append(_rounded(weighted(pairs)) if pairs else None)
    return found


def _elements(measured: Run) -> dict[str, int]:
    """The number of elements of each parameter."""
    sizes: dict[str, int] = {}
    for stage in measured.start["stages"]:
        sizes.update({name: rows * cols for name, rows, cols in stage["matrices"]})
        sizes.update({name: elements for name, elements, _ in stage["rest"]})
    return sizes


def fidelity(measured: Run) -> dict[str, dict[str, float]]:
    """By kind of parameter its elements, and the mean of each signal over parameters, by their
    elements, and windows. A signal that is not finite in a window counts in no mean.

    ``noise_by_rate`` is the mean noise in the unit of the descent, where parameters count by elements times the energy
    of an entry, and windows by their mean learning rate.
    """
    sizes, rates = _elements(measured), _by_window(measured.rates, measured)
    seen: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for window in measured.windows:
        rate = rates.get(window["iteration"])
        for stage in window["stages"]:
            for name, signals in (stage.get("fidelity") or {}).items():
                of_kind = seen.setdefault(layer_kind(name), {})
                for signal, value in signals.items():
                    if value is not None and math.isfinite(value):
                        of_kind.setdefault(signal, []).append((sizes[name], value))
                cosine, energy = signals.get("cosine_of_descent"), signals.get("energy_of_descent")
                if cosine and energy and rate:
                    noise = sizes[name] * energy * rate, 1 / cosine**2 - 1
                    of_kind.setdefault("noise_by_rate", []).append(noise)
    elements = {one: sum(size for name, size in sizes.items() if layer_kind(name) == one) for one in seen}
    return {
        one: {"elements": elements[one], **{name: _rounded(weighted(pairs)) for name, pairs in signals.items()}}
        for one, signals in seen.items()
    }


def _window(event: Mapping[str, Any]) -> dict[str, Any]:
    """A window of the event log without the plan; numbers to six digits, to keep the file small."""
    stages = [_rounded(stage) for stage in event["stages"]]
    return {
        "iteration": event["iteration"],
        "ranks": event["ranks"],
        "dp_bytes": event["dp_bytes"],
        "stages": [_name(stage["stage"]) for stage in stages],
        **{key: [stage[key] for stage in stages] for key in ("entropy", "residual", "reduce_seconds", "statistics")},
    }


def _name(stage: str | int) -> str:
    """A stage's name; older logs only have its number."""
    return stage if isinstance(stage, str) else f"stage {stage + 1}"


def _rounded(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _rounded(part) for key, part in value.items()}
    return float(f"{value:.6g}") if isinstance(value, float) else value


def page_lines(trials: Sequence[Trial], kept: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all runs of these trials' entries, also of other seeds.

    A line that today's code would not give again has ``other``, what its flags and preset said then, or ``before``,
    the changes that its code lacked.
    """
    entry = IDENTITY[:-1]
    known = {tuple(getattr(trial, key) for key in entry): trial for trial in trials}
    return [
        {
            **line,
            "other": other_settings(line, known[place]),
            "before": changed(
                line["engine"],
                line["pipeline_parallel"],
                shlex.split(f"{line['settings']} {line['flags']}"),
                line.get("changes", 0),
            ),
        }
        for line in kept
        if (place := tuple(line[key] for key in entry)) in known
    ]


def other_settings(line: Mapping[str, Any], trial: Trial) -> str:
    """What the flags and the preset of a line said that this entry does not say today; empty if nothing."""
    then = _by_flag(shlex.split(respelled(f"{line['settings']} {line['flags']}")))
    now = _by_flag([*trial.settings, *trial.flags])
    found = [" ".join(then[flag]) for flag in then if then[flag] != now.get(flag)]
    found += [f"no {flag}" for flag in now if flag not in then]
    return ", ".join([*found, *other_preset(line["preset_settings"], trial.arguments())])


def _by_flag(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Each flag with its values, the last one if it is given several times."""
    found: dict[str, list[str]] = {}
    for word in arguments:
        if word.startswith("--"):
            flag = word
            found[flag] = []
        found[flag].append(word)
    return found


def not_run(trials: Sequence[Trial], lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The trials that have no line at all, by entry."""
    done = {identity(line) for line in lines}
    seeds: dict[str, list[str]] = {}
    for trial in trials:
        if identity(vars(trial)) not in done:
            seeds.setdefault(f"{trial.name} of {trial.setting}", []).append(str(trial.seed))
    return [f"{entry}, seed {', '.join(missing)}" for entry, missing in seeds.items()]
