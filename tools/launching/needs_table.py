"""What a model needs, as Markdown."""

from __future__ import annotations

from statistics import fmean

from tools.launching.needs import Needs, StageNeeds
from tools.shared.markdown import header, row

TOLERANCE = 0.01  # between a model's size and its name
GIB = 2**30
COLUMNS = (
    *("stage", "layers", "parameters", "weights", "gradients", "optimizer", "activations", "EDGC", "sum"),
    "dense",  # gradients as Megatron sends them
)


def table(found: Needs) -> str:
    """The needs of one model as Markdown."""
    ranks = [rank for rank in found.stages[0].sent if rank != "dense"]
    parallel = " x ".join(f"{name} {size}" for name, size in found.parallel.items())
    size = f"{found.parameters / 1e9:.3f} billion parameters as stored"
    if found.billions is not None:
        size += f" ({found.parameters / 1e9 / found.billions - 1:+.1%} of {found.billions:g})"
    lines = [
        f"### {found.title} on {found.processes} x {found.gpu}",
        "",
        f"{size}; {parallel}; {found.micro_batches} micro-batches a step. Memory of a GPU in GiB; MB that it sends in "
        "a step: for gradients (with a tied embedding's sum between stages; in brackets: how many times fewer than "
        "dense, and than all that a dense step sends) and for weights and messages.",
        "",
        *header([*COLUMNS, *(f"rank {rank}" for rank in ranks), "weights, messages"]),
    ]
    for number, stage in enumerate(found.stages, start=1):
        memory = (stage.weights, stage.gradients, stage.optimizer, stage.activations, stage.edgc, stage.memory)
        dense, whole = stage.sent["dense"], stage.sent["dense"] + stage.gathered + stage.messages
        others = stage.gathered_by_edgc + stage.messages
        cells = [number, stage.layers, f"{stage.parameters / 1e6:,.0f} M", *(f"{part / GIB:.1f}" for part in memory)]
        cells.append(f"{dense / 1e6:,.0f}")
        cells += [
            f"{stage.sent[rank] / 1e6:,.0f} ({dense / max(stage.sent[rank], 1):.1f}x, in all "
            f"{whole / max(stage.sent[rank] + others, 1):.1f}x)"
            for rank in ranks
        ]
        lines.append(row([*cells, f"{_weights(stage)}, {stage.messages / 1e6:,.0f}"]))
    most = max(stage.memory for stage in found.stages) / GIB
    room = f" of {found.memory_gib:g} GiB ({most / found.memory_gib:.0%})" if found.memory_gib else ""
    lines += ["", f"Most of a GPU's memory: {most:.1f} GiB{room}."]
    if found.parallel["pipeline"] > 1:
        lines[-1] += f" Messages to each neighbouring stage: {found.message_bytes / 1e6:,.0f} MB a step and direction."
    mean = {key: sum(stage.sent[key] for stage in found.stages) / len(found.stages) for key in ("dense", ranks[0])}
    by_megatron = fmean(stage.gathered + stage.messages for stage in found.stages)
    by_edgc = fmean(stage.gathered_by_edgc + stage.messages for stage in found.stages)
    fewer = mean["dense"] / max(mean[ranks[0]], 1)
    in_all = (mean["dense"] + by_megatron) / max(mean[ranks[0]] + by_edgc, 1)
    lines[-1] += (
        f" Mean of all GPUs at rank {ranks[0]}: {fewer:.1f}x fewer bytes of gradients "
        f"({fewer * 2 / found.gradient_bytes:.1f}x than bf16 ones), {in_all:.1f}x in all."
    )
    if found.link_gbps:
        dense, low = (max(stage.sent[key] for stage in found.stages) for key in ("dense", ranks[0]))
        seconds = [8 * sent / (found.link_gbps * 1e9) for sent in (dense, low)]
        lines[-1] += (
            f" At {found.link_gbps:g} Gbit/s, without latency and overlap, gradients take {seconds[0]:.3f} s dense and "
            f"{seconds[1]:.3f} s at rank {ranks[0]}."
        )
    return "\n".join(lines)


def _weights(stage: StageNeeds) -> str:
    """MB of updated weights: as Megatron gathers them and, where EDGC rounds them, as it does."""
    whole, rounded = (f"{size / 1e6:,.0f}" for size in (stage.gathered, stage.gathered_by_edgc))
    return whole if stage.gathered == stage.gathered_by_edgc else f"{whole} or {rounded}"


def misnamed(found: Needs) -> str | None:
    """What is wrong with a model's name, if it is further from its size than 1 %."""
    if found.billions is None or abs(found.parameters / 1e9 / found.billions - 1) <= TOLERANCE:
        return None
    return f"{found.model}: {found.parameters / 1e9:.3f} billion parameters are more than 1 % from {found.billions:g}"
