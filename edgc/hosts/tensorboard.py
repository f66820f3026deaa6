"""A window for TensorBoard."""

import math
from collections.abc import Iterator

from edgc.observe.window import WindowReport


def scalars(report: WindowReport) -> Iterator[tuple[str, float]]:
    """Tag and value of all that was measured. A rank of 0 is dense, or compression without a rank."""
    plan = report.plan
    for index, seen in enumerate(report.stages):
        values: dict[str, float | None] = {
            "entropy": seen.entropy,
            "rank": float(report.ranks[index] or 0),
            "residual": seen.residual,
            "cosine": seen.cosine,
            "dp-bytes": seen.bytes.sent,
            "reduce-seconds": seen.reduce_seconds,
            # as entropy alone asks for it, and before the step limit
            "rank-proposed": plan.proposed[index] if plan.proposed else None,
            "rank-target": float(plan.targets[index] or 0) if plan.targets else None,
        }
        yield from _measured(values, str(seen.stage))
    for message, rank in zip(report.messages, report.message_ranks, strict=True):
        values = {"pp-bytes": message.bytes.sent, "pp-rank": float(rank or 0), "pp-entropy": message.entropy}
        yield from _measured(values, str(message.boundary))


def _measured(values: dict[str, float | None], stage: str) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if value is not None and math.isfinite(value):
            yield f"edgc/{name}/{stage.replace(' ', '-')}", value
