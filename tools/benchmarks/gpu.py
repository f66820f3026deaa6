"""Times, traffic, memory and exactness of the contenders on one stage."""

import itertools
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from edgc.comm.collectives import all_reduce_bytes, run_to_end
from edgc.compress.fused import triton_kernels
from edgc.config import EDGCConfig
from edgc.plan.selection import Selection
from tools.benchmarks.common import make_reducer
from tools.benchmarks.contenders import CONTENDERS, WARM_UP, Step, contender
from tools.benchmarks.operations import TensorMemory, counted
from tools.benchmarks.stage import Stage

LEAST_PASSES = 3 + 2
BEYOND_CACHE = 2**28  # bytes
KERNEL_PASSES = 4, 3  # which torch's operations do not show; tests/unit/test_fused.py counts them


def measure(stage: Stage, rank: int, repetitions: int, device: torch.device) -> list[dict[str, Any]]:
    """One row a contender."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(stage.elements, generator=generator, device=device)
    inputs = [torch.empty_like(source) for _ in range(1 + BEYOND_CACHE // source.nbytes)]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Step] = {}
    for name in ("hook", *CONTENDERS):
        steps[name], rows[name] = counts(name, stage, rank, source, inputs[0])
    steps["copy"] = torch.empty_like(source).copy_
    times = step_seconds(steps, source, inputs, repetitions)
    floor = LEAST_PASSES / 2 * times["copy"]  # a copy is one read and one write
    for name, row in rows.items():
        row.update(seconds=times[name], floor_seconds=floor, floor_share=floor / times[name])
    return list(rows.values())


def counts(name: str, stage: Stage, rank: int, source: Tensor, scratch: Tensor) -> tuple[Step, dict[str, Any]]:
    """A contender's step after its warm-up, and what it keeps, moves and launches.

    The hook's later parts run in other threads, where torch shows nothing.
    """
    device, on_gpu, hook = source.device, source.is_cuda, name == "hook"
    memory = TensorMemory()
    before = 0
    if on_gpu:
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad(), memory:
        step = contender(name, stage, rank, device)
        for _ in range(WARM_UP):
            step(scratch.copy_(source))
    peak, kept = memory.peak, memory.now
    if on_gpu:
        peak, kept = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
    scratch.copy_(source)
    passes = counted(partial(step, scratch), min(m.elements for m in stage.matrices))
    reads, writes = passes.read / source.nbytes, passes.written / source.nbytes
    if name.startswith("fused") and triton_kernels(device) is not None:
        reads, writes = reads + KERNEL_PASSES[0], writes + KERNEL_PASSES[1]
    return step, {
        "rank": rank,
        "contender": name,
        "reads": None if hook else reads,
        "writes": None if hook else writes,
        "kept_bytes_per_parameter": None if hook and not on_gpu else kept / stage.elements,
        "peak_bytes_per_parameter": None if hook and not on_gpu else peak / stage.elements,
        "launches": launches(partial(step, scratch), device),
        "operations": None if hook else passes.operations,
    }


def step_seconds(
    steps: dict[str, Step], source: Tensor, inputs: Sequence[Tensor], repetitions: int
) -> dict[str, float]:
    """The median time of each step; the steps take turns, and so do the inputs, into which the source is copied."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    turns = itertools.cycle(inputs)
    for repetition in range(repetitions):
        for name in list(steps) if repetition % 2 else list(reversed(steps)):
            flat = next(turns).copy_(source)
            with torch.no_grad():
                times[name].append(seconds(partial(steps[name], flat), source.device))
    return {name: median(values) for name, values in times.items()}


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """How long work takes: by events on a GPU, by the clock on a CPU."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def launches(work: Callable[[], object], device: torch.device) -> int | None:
    """Kernels of a step; None where there is no GPU."""
    if device.type != "cuda":
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler, torch.no_grad():
        work()
        torch.cuda.synchronize(device)
    return sum(int(event.count) for event in profiler.key_averages() if event.device_type.name == "CUDA")


def exactness(stage: Stage, rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    """By contender: relative distance of a first step's results from float64's, of result + error from the input."""
    distances = {}
    for name in ("fused", "plain"):
        some = tuple({(m.rows, m.cols): m for m in stage.matrices}.values())
        reducer = make_reducer(Selection(some), EDGCConfig.of(**CONTENDERS[name]), device)
        reducer.set_rank(rank, {matrix.name: rank for matrix in some})
        worst = {"result": 0.0, "result_and_error": 0.0}
        for matrix in some:
            given = torch.randn(matrix.rows, matrix.cols, generator=torch.Generator().manual_seed(1)).to(device)
            engine: Any = reducer.router.engine
            start = engine.basis(matrix, rank, 1).values().double()
            tall = given.double().T if engine.transposes(matrix, 1) else given.double()
            basis = torch.linalg.qr(tall @ start).Q
            expected = basis @ (basis.T @ tall)
            expected = expected.T if engine.transposes(matrix, 1) else expected
            found = given.clone()
            run_to_end(reducer.reduce({matrix.name: found}, 1))
            error = reducer.state.feedback.packed[matrix.name].values().double().view_as(given)
            result = found.double()
            worst["result"] = max(worst["result"], float((result - expected).norm() / expected.norm()))
            both = float((result + error - given.double()).norm() / given.double().norm())
            worst["result_and_error"] = max(worst["result_and_error"], both)
        distances[name] = worst
    return distances


def sampling(stage: Stage, repetitions: int, device: torch.device) -> dict[str, float]:
    """Seconds of an iteration in which entropy is measured, and on average at the default rate."""
    config = EDGCConfig()
    reducer = make_reducer(Selection(stage.matrices), config, device)
    flat = torch.randn(stage.elements, device=device)
    views, measured = stage.views(flat), next(i for i in range(1000) if reducer.observer.sampler.measures(i))
    with torch.no_grad():
        times = [seconds(lambda: reducer.observer.measure(views, measured), device) for _ in range(repetitions + 1)]
    usual = median(times[1:])  # the first call allocates
    return {"measured_seconds": usual, "mean_seconds": usual * config.ranks.iteration_sampling_rate}


def break_even_gbps(stage: Stage, row: dict[str, Any]) -> float:
    """Gbit/s of a link on which compressing takes as long as the bytes that it saves, both in fp32."""
    saved = all_reduce_bytes(4 * (stage.elements - stage.factor_elements(row["rank"])), stage.data_parallel)
    return 8e-9 * saved / float(row["seconds"])
