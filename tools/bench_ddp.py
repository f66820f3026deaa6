"""EDGC beside torch's own PowerSGD hook on the same model and data, in DistributedDataParallel.

    python tools/bench_ddp.py [--processes 2] [--iterations 300] [--seeds 3] [--ranks 4 16] [--output docs/bench/ddp]

Trains the model of examples/ddp.py once for each seed and way of averaging gradients, on gloo and the CPU. Writes one
JSON object a training into OUTPUT.json and their table into OUTPUT.md. Bytes are counted in the same way for all: what
one process sends under bandwidth-optimal collectives, without the probe and checks. Nothing is timed.
"""

import argparse
import json
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

import edgc
from edgc.comm.collectives import Traffic, all_reduce_bytes
from examples.ddp import Model, text
from tools._root import REPOSITORY
from tools.shared.checkout import commit
from tools.shared.files import with_ending, write, write_json

WARM_UP = 10  # steps that both PowerSGDs average dense
TAIL = 50  # steps over which the last loss is a mean

Run = Callable[[DistributedDataParallel, int], Callable[[], float]]  # installs a hook; afterwards, what was sent


def dense(model: DistributedDataParallel, iterations: int) -> Callable[[], float]:
    size = sum(parameter.nbytes for parameter in model.parameters()) * iterations
    return lambda: all_reduce_bytes(size, dist.get_world_size())


def torch_hook(rank: int) -> Run:
    def install(model: DistributedDataParallel, iterations: int) -> Callable[[], float]:
        traffic, own = Traffic(), dist.all_reduce

        def counted(tensor: torch.Tensor, *args: Any, **options: Any) -> Any:
            traffic.count_all_reduce(tensor, dist.get_world_size())
            return own(tensor, *args, **options)

        def sent() -> float:
            dist.all_reduce = own
            return traffic.bytes

        dist.all_reduce = counted
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=WARM_UP)
        model.register_comm_hook(state, powerSGD_hook)
        return sent

    return install


def edgc_hook(**settings: Any) -> Run:
    def install(model: DistributedDataParallel, iterations: int) -> Callable[[], float]:
        given: dict[str, Any] = {"link_gbps": 1.0, "window": iterations // 5, **settings}
        if "static_rank" in settings:
            given["warmup_fraction"] = WARM_UP / iterations
        config = edgc.EDGCConfig.from_preset(**given)
        state = edgc.attach(model, config, iterations=iterations)
        return lambda: float(state.report.bytes.gradients.sent if state.report else 0.0)

    return install


def ways(ranks: list[int]) -> dict[str, Run]:
    found: dict[str, Run] = {"dense": dense}
    for rank in ranks:
        found[f"torch's powerSGD_hook, rank {rank}"] = torch_hook(rank)
        found[f"edgc, paper, rank {rank} always"] = edgc_hook(preset="paper", static_rank=rank)
    return found | {f"edgc, {preset}": edgc_hook(preset=preset) for preset in ("safe", "balanced", "fast")}


def train(install: Run, seed: int, iterations: int) -> dict[str, Any]:
    """Mean loss of the last steps over all processes, and bytes a step."""
    torch.manual_seed(seed)
    # One bucket: torch's hook starts collectives in callbacks, whose order among buckets gloo does not keep.
    model = DistributedDataParallel(Model(), bucket_cap_mb=100)
    sent = install(model, iterations)
    optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
    losses = []
    for step in range(iterations):
        words = text(seed * 1_000_000 + step, dist.get_rank())
        loss = nn.functional.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.detach())
    total = sent()
    last = torch.stack(losses[-TAIL:]).mean()
    dist.all_reduce(last)
    return {
        "loss": float(last) / dist.get_world_size(),
        "bytes_per_step": total / iterations,
    }


def work(process: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, rank=process, world_size=options.processes)
    rows = []
    for seed in range(options.seeds):
        for name, install in ways(options.ranks).items():
            rows.append({"averages": name, "seed": seed, **train(install, seed, options.iterations)})
    if process == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]]) -> list[str]:
    """A Markdown table with one line for each way of averaging."""
    by_name: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_name.setdefault(row["averages"], []).append(row)
    whole = fmean(row["bytes_per_step"] for row in by_name["dense"])
    lines = [
        "| averages | loss | kB a step | fewer than fp32 | fewer than bf16 |",
        "|---|---|---|---|---|",
    ]
    for name, seen in by_name.items():
        losses = [row["loss"] for row in seen]
        spread = f" ± {stdev(losses):.4f}" if len(losses) > 1 else ""
        sent = fmean(row["bytes_per_step"] for row in seen)
        lines.append(
            f"| {name} | {fmean(losses):.4f}{spread} | {sent / 1e3:.0f} | {whole / sent:.1f}x "
            f"| {whole / 2 / sent:.1f}x |"
        )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--output", type=Path, help="without a suffix (default: only print)")
    options = parser.parse_args()
    if options.iterations < 10:
        parser.error(f"--iterations {options.iterations}: must be at least 10, because a window is a fifth of them")
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (options, folder), nprocs=options.processes)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(folder, "rows.json").read_text())
    lines = table(rows)
    print("\n".join(lines))
    if options.output is not None:
        raw = {"processes": options.processes, "iterations": options.iterations, "torch": torch.__version__}
        raw |= {"commit": commit(REPOSITORY)}
        raw |= {"machine": f"{os.cpu_count()} cores, {platform.machine()}", "rows": rows}
        write_json(with_ending(options.output, ".json"), raw, indent=1)
        head = [
            "# EDGC and torch's PowerSGD hook in DistributedDataParallel",
            "",
            "With this page you can compare the loss and the bytes of EDGC's presets with those of torch's own hook.",
            "",
            f"`python tools/bench_ddp.py` trains the model of `examples/ddp.py` for {options.iterations} steps on "
            f"{options.processes} processes, {options.seeds} seeds each. The loss is the mean of the last {TAIL} "
            "steps, ± one standard deviation over seeds. Both PowerSGDs average the first "
            f"{WARM_UP} steps dense. Bytes are what one process sends. Raw lines: `ddp.json`.",
            "",
        ]
        write(with_ending(options.output, ".md"), ("\n".join([*head, *lines]) + "\n").encode())


if __name__ == "__main__":
    main()
