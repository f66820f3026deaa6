"""What compressing the gradients of one pipeline stage costs: fused kernels, plain torch, PyTorch's hook, a copy.

    python tools/bench_gpu.py [--models gpt2_12.1b gpt2_2.5b] [--ranks 16 32 64 128] [--layers N] [--repetitions 20]
        [--write docs/gpu.md]

One process, so that no message is waited for: what is timed is compressing and decompressing alone. On a GPU by
events, on a CPU by its clock, as the page says: such times are no GPU's. Contenders take turns within each repetition,
and inputs rotate through more memory than a cache has; times are medians.

- copy: a copy within the device of as many bytes as low rank with error feedback moves at the least, which are 3 reads
  and 2 writes of the gradient. Its share of a time is the share of the roofline.
- fused, plain: this project's, in fp32 as PyTorch's hook is, and in the formats of ``balanced``; all matrices have one
  rank, which makes more of them equal than the presets' ranks by matrix do.
- hook: torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook on the same tensors.
- The bytes that are saved over the time give the link below which compressing takes less time than it saves, without
  latency and overlap.

With ``--write`` the tables take the place of those between two comments in that file, and the figures go to a JSON file
of its name.
"""

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from edgc.comm.collectives import (  # noqa: E402
    Communicator,
    Traffic,
    all_reduce_bytes,
    run,  # noqa: E402
)
from edgc.compress.batch import triton_kernels  # noqa: E402
from edgc.compress.reducer import GradientReducer  # noqa: E402
from edgc.config import PRESETS, EDGCConfig  # noqa: E402
from edgc.plan.allocation import Allocation  # noqa: E402
from edgc.specs import MatrixSpec  # noqa: E402
from tools.documents import replace_tables  # noqa: E402
from tools.launch import CLUSTERS, MODELS, Cluster, Model, read  # noqa: E402
from tools.operations import TensorMemory, counted  # noqa: E402
from tools.report import processor  # noqa: E402

START = "<!-- tools/bench_gpu.py -->"
LEAST_PASSES = 3 + 2
BEYOND_CACHE = 2**28  # bytes
KERNEL_PASSES = 4, 3  # which torch's operations do not show; tests/unit/test_fused.py counts them
FP32: dict[str, Any] = {"iteration_sampling_rate": 1e-6, "min_saving": 1.0}
BALANCED = {key: value for key, value in PRESETS["balanced"].items() if key not in ("rank_model", "rank_share")}
CONTENDERS: dict[str, dict[str, Any]] = {
    "fused": {**FP32, "kernels": "fused"},
    "plain": FP32,
    "fused, balanced": {**FP32, **BALANCED, "kernels": "fused"},
    "plain, balanced": {**FP32, **BALANCED},
}


@dataclass(frozen=True)
class Stage:
    """The matrices of one pipeline stage without embeddings, on one tensor-parallel rank."""

    title: str
    matrices: tuple[MatrixSpec, ...]
    data_parallel: int

    @property
    def elements(self) -> int:
        return sum(matrix.rows * matrix.cols for matrix in self.matrices)

    @classmethod
    def of(cls, name: str, layers: int | None) -> "Stage":
        """From a file in configs/models/; ``layers``: at most so many."""
        model = read(Model, MODELS, name)
        cluster = read(Cluster, CLUSTERS, model.cluster)
        parser = argparse.ArgumentParser()
        for flag in ("--num-layers", "--hidden-size"):
            parser.add_argument(flag, type=int, required=True)
        for flag in ("--tensor-model-parallel-size", "--pipeline-model-parallel-size"):
            parser.add_argument(flag, type=int, default=1)
        flags, _ = parser.parse_known_args(shlex.split(model.flags))
        width, across = flags.hidden_size, flags.tensor_model_parallel_size
        stages = flags.pipeline_model_parallel_size
        shapes = {
            "qkv": (3 * width // across, width),
            "proj": (width, width // across),
            "fc1": (4 * width // across, width),
            "fc2": (width, 4 * width // across),
        }
        count = min(flags.num_layers // stages, layers or flags.num_layers)
        matrices = [MatrixSpec(f"{layer}.{name}", *shape) for layer in range(count) for name, shape in shapes.items()]
        processes = cluster.nodes * cluster.gpus_per_node
        return cls(f"{model.title}, {count} layers of a stage", tuple(matrices), processes // (across * stages))

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        sizes = [matrix.rows * matrix.cols for matrix in self.matrices]
        parts = torch.split(flat, sizes)
        return {m.name: part.view(m.rows, m.cols) for m, part in zip(self.matrices, parts, strict=True)}

    def factor_elements(self, rank: int) -> int:
        return sum(rank * (matrix.rows + matrix.cols) for matrix in self.matrices)


class Bucket:
    """What PyTorch's hook asks of a ``GradBucket``, which only DDP can make."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor]):
        self._flat, self._views = flat, list(views)

    def buffer(self) -> Tensor:
        return self._flat

    def gradients(self) -> list[Tensor]:
        return self._views

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True


WARM_UP = 9  # steps: the hook's first two are no low rank, and ``balanced`` has a basis for each of eight


def contender(name: str, stage: Stage, rank: int, device: torch.device) -> Callable[[Tensor], object]:
    """A step: what it is given is compressed, and replaced by what comes out."""
    assert dist.group.WORLD is not None
    if name == "hook":
        state = PowerSGDState(
            dist.group.WORLD,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=2,  # the least it takes
            min_compression_rate=1,
            batch_tensors_with_same_shape=True,
        )

        def hook(flat: Tensor) -> object:
            bucket: Any = Bucket(flat, list(stage.views(flat).values()))
            return powerSGD_hook(state, bucket).wait()

        return hook
    config = EDGCConfig(**CONTENDERS[name])
    communicator = Communicator(dist.group.WORLD, Traffic())
    reducer = GradientReducer(Allocation(stage.matrices, ()), config, communicator, device)
    reducer.set_rank(rank, {matrix.name: rank for matrix in stage.matrices})
    iteration = iter(range(1, 10**9))
    return lambda flat: run(reducer.reduce(stage.views(flat), next(iteration)))


def measure(stage: Stage, rank: int, repetitions: int, device: torch.device) -> list[dict[str, Any]]:
    """One row a contender."""
    generator = torch.Generator(device).manual_seed(0)
    source = torch.randn(stage.elements, generator=generator, device=device)
    inputs = [torch.empty_like(source) for _ in range(1 + BEYOND_CACHE // source.nbytes)]
    names = ["hook", *CONTENDERS]
    rows: dict[str, dict[str, Any]] = {}
    steps: dict[str, Callable[[Tensor], object]] = {}
    for name in names:
        flat = inputs[0]
        memory = TensorMemory()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
        with torch.no_grad(), memory:
            steps[name] = contender(name, stage, rank, device)
            for _ in range(WARM_UP):
                steps[name](flat.copy_(source))
        if device.type == "cuda":
            peak, kept = torch.cuda.max_memory_allocated(device) - before, torch.cuda.memory_allocated(device) - before
        elif name != "hook":
            peak, kept = memory.peak, memory.now
        else:  # whose later parts run in threads of their own, where torch shows us nothing
            peak = kept = None
        flat.copy_(source)
        seen = counted(lambda step=steps[name], flat=flat: step(flat), min(m.rows * m.cols for m in stage.matrices))
        reads, writes = seen.read / source.nbytes, seen.written / source.nbytes
        if name.startswith("fused") and triton_kernels(device) is not None:
            reads, writes = reads + KERNEL_PASSES[0], writes + KERNEL_PASSES[1]
        rows[name] = {
            "rank": rank,
            "contender": name,
            "reads": None if name == "hook" else reads,
            "writes": None if name == "hook" else writes,
            "kept_bytes_per_parameter": None if kept is None else kept / stage.elements,
            "peak_bytes_per_parameter": None if peak is None else peak / stage.elements,
            "launches": launches(lambda step=steps[name], flat=flat: step(flat), device),
            "operations": None if name == "hook" else seen.operations,
        }
    other = torch.empty_like(source)
    steps["copy"] = other.copy_
    times: dict[str, list[float]] = {name: [] for name in steps}
    turn = 0
    for repetition in range(repetitions):
        order = list(steps) if repetition % 2 else list(reversed(steps))
        for name in order:
            flat = inputs[turn % len(inputs)]
            turn += 1
            flat.copy_(source)
            with torch.no_grad():
                times[name].append(seconds(lambda step=steps[name], flat=flat: step(flat), device))
    least = LEAST_PASSES / 2 * median(times.pop("copy"))  # a copy is one read and one write
    for name, taken in times.items():
        rows[name].update(seconds=median(taken), floor_seconds=least, floor_share=least / median(taken))
    return list(rows.values())


def seconds(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000
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
    return sum(event.count for event in profiler.key_averages() if event.device_type.name == "CUDA")


def exactness(stage: Stage, rank: int, device: torch.device) -> dict[str, dict[str, float]]:
    """By contender: relative distance of a first step's results from float64's, of result + error from the input."""
    distances = {}
    for name in ("fused", "plain"):
        config = EDGCConfig(**CONTENDERS[name])
        assert dist.group.WORLD is not None
        some = tuple({(m.rows, m.cols): m for m in stage.matrices}.values())
        reducer = GradientReducer(Allocation(some, ()), config, Communicator(dist.group.WORLD, Traffic()), device)
        reducer.set_rank(rank, {matrix.name: rank for matrix in some})
        worst = {"result": 0.0, "result_and_error": 0.0}
        for matrix in some:
            given = torch.randn(matrix.rows, matrix.cols, generator=torch.Generator().manual_seed(1))
            engine: Any = reducer.engine
            start = engine.basis(matrix, rank, 1).values().double().cpu()
            tall = given.double().T if engine.turned(matrix, 1) else given.double()
            basis = torch.linalg.qr(tall @ start).Q
            expected = basis @ (basis.T @ tall)
            expected = expected.T if engine.turned(matrix, 1) else expected
            found = given.to(device, copy=True)
            run(reducer.reduce({matrix.name: found}, 1))
            error = reducer.state.feedback.packed[matrix.name].values().double().cpu().view_as(given)
            result = found.double().cpu()
            worst["result"] = max(worst["result"], float((result - expected).norm() / expected.norm()))
            both = float((result + error - given.double()).norm() / given.double().norm())
            worst["result_and_error"] = max(worst["result_and_error"], both)
        distances[name] = worst
    return distances


def sampling(stage: Stage, repetitions: int, device: torch.device) -> dict[str, float]:
    """Seconds of an iteration in which entropy is measured, and on average at the default rate."""
    assert dist.group.WORLD is not None
    config = EDGCConfig()
    reducer = GradientReducer(Allocation(stage.matrices, ()), config, Communicator(dist.group.WORLD, Traffic()), device)
    flat = torch.randn(stage.elements, device=device)
    views, measured = stage.views(flat), next(i for i in range(1000) if reducer.sampler.measures(i))
    with torch.no_grad():
        taken = [seconds(lambda: reducer.measure(views, measured), device) for _ in range(repetitions + 1)][1:]
    return {"measured_seconds": median(taken), "mean_seconds": median(taken) * config.iteration_sampling_rate}


def break_even_gbps(stage: Stage, row: dict[str, Any]) -> float:
    """Gbit/s of a link on which compressing takes as long as the bytes that it saves, both in fp32."""
    saved = all_reduce_bytes(4 * (stage.elements - stage.factor_elements(row["rank"])), stage.data_parallel)
    return 8e-9 * saved / float(row["seconds"])


def tables(result: dict[str, Any]) -> str:
    """As Markdown; times in milliseconds."""
    on_gpu = result["device_type"] == "cuda"
    versions = ", ".join(f"{name} {number}" for name, number in result["versions"].items())
    warning = "" if on_gpu else " **These are times of a CPU: they say nothing of a GPU.**"
    lines = [
        f"Made by `{result['command']}`: {result['device']}, {result['device_type']}; {versions};",
        f"medians of {result['repetitions']} repetitions.{warning}",
    ]
    for stage in result["stages"]:
        lines += [
            "",
            f"**{stage['title']}** ({stage['elements'] / 1e6:.0f} million parameters on one GPU).",
            "",
            "| rank | contender | ms | against the hook | of the roofline | GB/s | reads | writes | kept, bytes a "
            f"parameter | peak | {'launches' if on_gpu else 'operations'} | wins below, Gbit/s |",
            "|---" * 12 + "|",
        ]
        hook = {row["rank"]: row["seconds"] for row in stage["rows"] if row["contender"] == "hook"}
        for row in stage["rows"]:
            moved = None if row["reads"] is None else 4e-9 * stage["elements"] * (row["reads"] + row["writes"])
            bandwidth = None if moved is None else moved / row["seconds"]
            kept, peak = row["kept_bytes_per_parameter"], row["peak_bytes_per_parameter"]
            launched = row["launches"] if on_gpu else row["operations"]
            wins = "" if "balanced" in row["contender"] else f"{row['break_even_gbps']:.3g}"
            lines.append(
                f"| {row['rank']} | {row['contender']} | {1e3 * row['seconds']:.1f} | "
                f"{hook[row['rank']] / row['seconds']:.2f}x | {row['floor_share']:.0%} | "
                f"{_or_none(bandwidth, '.1f')} | {_or_none(row['reads'], '.1f')} | {_or_none(row['writes'], '.1f')} | "
                f"{_or_none(kept, '.2f')} | {_or_none(peak, '.2f')} | {_or_none(launched, 'd')} | {wins} |"
            )
        entropy = stage["sampling"]
        lines += [
            "",
            f"Entropy of a measured iteration: {1e3 * entropy['measured_seconds']:.1f} ms; at the default rate "
            f"{1e3 * entropy['mean_seconds']:.2f} ms a step.",
            "",
            "| rank | contender | result against float64 | result + error against the input |",
            "|---|---|---|---|",
        ]
        for rank, by_name in stage["exactness"].items():
            for name, worst in by_name.items():
                lines.append(f"| {rank} | {name} | {worst['result']:.1e} | {worst['result_and_error']:.1e} |")
    return "\n".join(lines)


def _or_none(value: float | None, form: str) -> str:
    return "not counted" if value is None else format(value, form)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["gpt2_12.1b", "gpt2_2.5b"], help="names in configs/models/")
    parser.add_argument("--ranks", type=int, nargs="+", default=[16, 32, 64, 128])
    parser.add_argument("--layers", type=int, help="at most so many of a stage (default: all)")
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--write", type=Path, metavar="FILE", help="put the tables between this file's two comments")
    arguments = sys.argv[1:] if argv is None else argv
    options = parser.parse_args(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages = []
    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(os.path.join(folder, "store"), 1)
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=store, rank=0, world_size=1)
        for name in options.models:
            stage = Stage.of(name, options.layers)
            rows = [row for rank in options.ranks for row in measure(stage, rank, options.repetitions, device)]
            for row in rows:
                row["break_even_gbps"] = break_even_gbps(stage, row)
            stages.append(
                {
                    "title": stage.title,
                    "elements": stage.elements,
                    "data_parallel": stage.data_parallel,
                    "rows": rows,
                    "sampling": sampling(stage, options.repetitions, device),
                    "exactness": {rank: exactness(stage, rank, device) for rank in options.ranks},
                }
            )
        dist.destroy_process_group()
    on_gpu = device.type == "cuda"
    result = {
        "command": " ".join(["python tools/bench_gpu.py", *arguments]),
        "device_type": device.type,
        "device": torch.cuda.get_device_name() if on_gpu else f"{processor()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version(), "torch": version("torch"), "edgc": version("edgc")},
        "repetitions": options.repetitions,
        "stages": stages,
    }
    text = tables(result)
    print(text)
    if options.write is not None:
        replace_tables(options.write, START, text)
        options.write.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
