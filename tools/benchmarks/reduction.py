"""One matrix's reduction, phase by phase: measured by several processes, and as a page."""

import argparse
import itertools
import json
import platform
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from edgc.comm.collectives import all_reduce_bytes, run_to_end
from edgc.compress.probe import synchronise
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.plan.selection import select
from edgc.specs import Parameter
from tools.benchmarks.common import BALANCED, make_reducer
from tools.shared.markdown import header, row

PHASES = ("project", "round", "orthonormalise", "next basis", "reconstruct", "residual")
KINDS: dict[str, dict[str, Any]] = {"fp32": {}, "balanced": BALANCED}


def measure(
    reducer: GradientReducer, shape: tuple[int, int], rank: int, repetitions: int, device: torch.device
) -> dict[str, Any]:
    """Times and bytes of one matrix, in this process."""
    communicator = reducer.communicator
    generator = torch.Generator().manual_seed(communicator.process)
    gradient = torch.randn(shape, generator=generator).to(device)
    scratch = gradient.clone()

    def dense() -> None:
        run_to_end(communicator.all_reduce(scratch.view(-1)))

    iteration = 0

    def compressed() -> None:
        nonlocal iteration
        run_to_end(reducer.reduce({"matrix": scratch}, iteration))
        iteration += 1

    def timed(work: Callable[[], None]) -> float:
        scratch.copy_(gradient)
        dist.barrier()
        synchronise(device)
        start = time.perf_counter()
        work()
        synchronise(device)
        return time.perf_counter() - start

    reducer.set_rank(rank)
    for work in (dense, compressed):
        timed(work)  # first calls allocate
    communicator.traffic.by_collective.clear()
    timed(compressed)
    sent = communicator.traffic.bytes
    times: dict[str, list[float]] = {"dense": [], "compressed": []}
    for place in range(repetitions):
        order = [("dense", dense), ("compressed", compressed)]
        for name, work in order if place % 2 else reversed(order):
            times[name].append(timed(work))
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    with profile(activities=activities) as profiler:
        for _ in range(repetitions):
            timed(compressed)
    spent = {event.key: event for event in profiler.key_averages()}
    unit = 1e-6 / repetitions
    on_device = "device_time_total" if device.type == "cuda" else "cpu_time_total"
    return {
        "dense_seconds": median(times["dense"]),
        "compressed_seconds": median(times["compressed"]),
        "compressed_bytes": sent,
        **{
            phase: getattr(spent[f"edgc/{phase}"], on_device) * unit if f"edgc/{phase}" in spent else 0.0
            for phase in PHASES
        },
    }


def process(number: int, options: argparse.Namespace, folder: str) -> None:
    """One of the processes, numbered from 0; the first one writes the rows."""
    on_gpu = torch.cuda.device_count() >= options.processes
    device = torch.device("cuda", number) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # processes share the cores
    backend, meeting = "nccl" if on_gpu else "gloo", f"file://{folder}/meeting"
    dist.init_process_group(backend, meeting, rank=number, world_size=options.processes)
    results = []
    for rows, cols in options.shapes:
        for rank, (kind, settings) in itertools.product(options.ranks, KINDS.items()):
            config = EDGCConfig.of(**settings, static_rank=rank, min_saving=1.0)
            selection = select([Parameter("matrix", (rows, cols))], config)
            if not selection.matrices:
                continue
            reducer = make_reducer(selection, config, device)
            mine = measure(reducer, (rows, cols), rank, options.repetitions, device)
            everyone: list[Any] = [None] * options.processes
            dist.all_gather_object(everyone, mine)
            results.append(
                {
                    "shape": [rows, cols],
                    "rank": rank,
                    "format": kind,
                    "dense_bytes": all_reduce_bytes(4 * rows * cols, options.processes),
                    **{key: max(one[key] for one in everyone) for key in mine},
                }
            )
    if number == 0:
        name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
        Path(folder, "rows.json").write_text(json.dumps({"device": name, "rows": results}))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown; times in milliseconds. What is left of a reduction is messages and waiting."""
    lines = header(["matrix", "rank", "format", "fewer bytes", "dense", "compressed", *PHASES, "messages"])
    for result in rows:
        phases = [result[phase] for phase in PHASES]
        messages = max(0.0, result["compressed_seconds"] - sum(phases))
        times = [result["dense_seconds"], result["compressed_seconds"], *phases, messages]
        fewer = result["dense_bytes"] / result["compressed_bytes"]
        cells = [" x ".join(map(str, result["shape"])), result["rank"], result["format"], f"{fewer:.1f}x"]
        lines.append(row([*cells, *(f"{1e3 * seconds:.2f}" for seconds in times)]))
    return "\n".join(lines)


def page(result: dict[str, Any], raw: str) -> str:
    """The table with what it needs to be read."""
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    lines = [
        "# One matrix's reduction, phase by phase",
        "",
        f"Made by `tools/bench_reduce.py`; raw figures in [{raw}]({raw}). {result['processes']} processes, one machine",
        f"({result['machine']}; {versions}), medians of {result['repetitions']} repetitions, milliseconds.",
        "*fp32*: factors as they are; *balanced*: in the formats of that preset. Phases are from a second pass under",
        "the profiler; what is left of the time is messages and waiting. Over loopback there is no network to save.",
        "",
        table(result["rows"]),
        "",
    ]
    return "\n".join(lines)
