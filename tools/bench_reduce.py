"""Time and bytes of one matrix's reduction, dense against low rank, phase by phase.

    python tools/bench_reduce.py [--processes 2] [--repetitions 10] [--shapes 1024x4096 ...] [--ranks 32 ...]
        [--output docs/bench/reduce.json]

Uses NCCL and one GPU a process where there are as many, else gloo on the CPU. Dense and compressed reductions
alternate; times are medians over the repetitions, of the process for which each was longest. Phases are those that a
profiler shows under the names ``edgc/...`` in training, too; on a GPU they are times of kernels.
"""

import argparse
import json
import os
import platform
import socket
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from edgc.comm.collectives import Communicator, Traffic, run
from edgc.compress.reducer import GradientReducer
from edgc.config import PRESETS, EDGCConfig
from edgc.plan.allocation import allocate
from edgc.specs import Parameter

PHASES = ("project", "round", "orthonormalise", "next basis", "reconstruct", "residual")
SHAPES = ("512x512", "512x2048", "1024x1024", "1024x4096")
RANKS = (16, 32, 64, 160)
KINDS = {"fp32": {}, "balanced": PRESETS["balanced"]}


def measure(reducer: GradientReducer, shape: tuple[int, int], rank: int, repetitions: int) -> dict[str, Any]:
    """One row, on this process."""
    device, communicator = reducer.engine.device, reducer.communicator
    generator = torch.Generator().manual_seed(communicator.rank)
    gradient = torch.randn(shape, generator=generator).to(device)
    scratch = gradient.clone()

    def dense() -> None:
        communicator.all_reduce(scratch).wait()

    iteration = 0

    def compressed() -> None:
        nonlocal iteration
        run(reducer.reduce({"matrix": scratch}, iteration))
        iteration += 1

    def timed(work: Any) -> float:
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


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def process(rank: int, options: argparse.Namespace, port: int, folder: str) -> None:
    """One of the processes; the first one writes the rows."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    on_gpu = torch.cuda.device_count() >= options.processes
    device = torch.device("cuda", rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # processes share the cores
    dist.init_process_group("nccl" if on_gpu else "gloo", rank=rank, world_size=options.processes)
    rows = []
    for text in options.shapes:
        rows_, cols = (int(side) for side in text.split("x"))
        for matrix_rank in options.ranks:
            for kind, preset in KINDS.items():
                settings = {k: v for k, v in preset.items() if k not in ("rank_model", "rank_share")}
                config = EDGCConfig(**settings, static_rank=matrix_rank, min_saving=1.0)
                allocation = allocate([Parameter("matrix", (rows_, cols))], config, matrix_rank)
                if not allocation.matrices:
                    continue
                assert dist.group.WORLD is not None
                reducer = GradientReducer(allocation, config, Communicator(dist.group.WORLD, Traffic()), device)
                mine = measure(reducer, (rows_, cols), matrix_rank, options.repetitions)
                everyone: list[Any] = [None] * options.processes
                dist.all_gather_object(everyone, mine)
                row = {key: max(one[key] for one in everyone) for key in mine}
                share = 2 * (options.processes - 1) / options.processes
                rows.append(
                    {
                        "shape": [rows_, cols],
                        "rank": matrix_rank,
                        "format": kind,
                        "dense_bytes": 4 * rows_ * cols * share,
                        **row,
                    }
                )
    if rank == 0:
        name = torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine()
        Path(folder, "rows.json").write_text(json.dumps({"device": name, "rows": rows}))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> str:
    """As Markdown; times in milliseconds. What is left of a reduction is messages and waiting."""
    lines = [
        f"| matrix | rank | format | fewer bytes | dense | compressed | {' | '.join(PHASES)} | messages |",
        "|---" * (7 + len(PHASES)) + "|",
    ]
    for row in rows:
        spent = [row[phase] for phase in PHASES]
        lines.append(
            f"| {row['shape'][0]} x {row['shape'][1]} | {row['rank']} | {row['format']} | "
            f"{row['dense_bytes'] / row['compressed_bytes']:.1f}x | {1e3 * row['dense_seconds']:.2f} | "
            f"{1e3 * row['compressed_seconds']:.2f} | "
            + " | ".join(f"{1e3 * seconds:.2f}" for seconds in spent)
            + f" | {1e3 * max(0.0, row['compressed_seconds'] - sum(spent)):.2f} |"
        )
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="ROWSxCOLUMNS")
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument(
        "--output", type=Path, help="JSON file for the raw result; a page with the table comes beside it"
    )
    options = parser.parse_args()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(process, (options, port, folder), options.processes)
        result = json.loads(Path(folder, "rows.json").read_text())
    result.update(
        processes=options.processes,
        repetitions=options.repetitions,
        machine=f"{os.cpu_count()} cores, {result.pop('device')}",
        versions={"python": platform.python_version(), "torch": version("torch"), "edgc": version("edgc")},
    )
    print(table(result["rows"]))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")
        options.output.with_suffix(".md").write_text(page(result, options.output.name))


if __name__ == "__main__":
    main()
