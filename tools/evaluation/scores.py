"""Scores from lm_eval's results: values, standard errors, and the difference of two models."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any


def metrics(result: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, float | None]]:
    """Value and standard error by task and metric; the metric's filter is named where it is not the plain one."""
    found: dict[tuple[str, str], dict[str, float | None]] = {}
    for task, entries in result["results"].items():
        for key, value in entries.items():
            metric, comma, chosen = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            error = entries.get(f"{metric}_stderr,{chosen}")
            name = metric if chosen == "none" else key
            found[task, name] = {"value": value, "stderr": error if isinstance(error, int | float) else None}
    return found


def difference(first: Mapping[str, Any], second: Mapping[str, Any], task: str, name: str) -> dict[str, float | None]:
    """Second minus first. Both answered the same documents, so the standard error is that of the differences document
    by document; None where the metric is no mean over documents."""
    metric, _, chosen = name.partition(",")
    gap = metrics(second)[task, name]["value"] - metrics(first)[task, name]["value"]  # type: ignore[operator]

    def answers(result: Mapping[str, Any]) -> dict[Any, Any]:
        samples = result.get("samples", {}).get(task, [])
        return {s["doc_id"]: s.get(metric) for s in samples if s.get("filter", "none") == (chosen or "none")}

    ours, theirs = answers(first), answers(second)
    if metric == "bits_per_byte" and ours and ours.keys() == theirs.keys():
        return {"value": gap, "stderr": _error_of_bits(gap, [(ours[one], theirs[one]) for one in ours])}
    numbers = all(isinstance(value, int | float) for value in [*ours.values(), *theirs.values()])
    if len(ours) < 2 or ours.keys() != theirs.keys() or not numbers:
        return {"value": gap, "stderr": None}
    gaps = [float(theirs[document]) - float(ours[document]) for document in ours]
    if not math.isclose(fmean(gaps), gap, abs_tol=1e-9):
        return {"value": gap, "stderr": None}
    return {"value": gap, "stderr": stdev(gaps) / math.sqrt(len(gaps))}


def _error_of_bits(gap: float, pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float | None:
    """The standard error of a difference of bits per byte, a ratio of sums over documents. Each document of a pair has
    its log-likelihood, in nats, and its bytes, which are the same for both models.
    """
    if len(pairs) < 2:
        return None
    mean_bytes = fmean(size for (_, size), _ in pairs)
    beside = [((one - other) / math.log(2) - gap * size) / mean_bytes for (one, size), (other, _) in pairs]
    return stdev(beside) / math.sqrt(len(pairs))


def summarise(results: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row for each task and metric, with every model's value and, of two models, the second's minus the first's."""
    by_model = {name: metrics(result) for name, result in results.items()}
    first, *others = results
    rows = []
    for task, metric in by_model[first]:
        counts = results[first].get("n-samples", {}).get(task, {})
        row: dict[str, Any] = {
            "task": task,
            "version": results[first].get("versions", {}).get(task),
            "documents": counts.get("effective"),
            "metric": metric,
            "higher_is_better": results[first].get("higher_is_better", {}).get(task, {}).get(metric.partition(",")[0]),
            "models": {name: found[task, metric] for name, found in by_model.items()},
        }
        if len(others) == 1:
            row["difference"] = difference(results[first], results[others[0]], task, metric)
        rows.append(row)
    return rows
