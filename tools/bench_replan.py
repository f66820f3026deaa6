"""What a change of plan costs: the steps after it, beside the same steps under the plan before.

    python tools/bench_replan.py [--iterations 300] [--window 20] [--seeds 10] [--output docs/bench/replan]

Trains the model of examples/ddp.py with presets, on gloo and the CPU. Before the last step of each window, model,
optimizer and EDGC's state are copied. The copy keeps its plan for one more window, and the run gets a new one. Both
train on the same data. Each step also averages the gradients dense, which counts as no bytes. The table has the mean
cosine between what the optimizer gets and the dense average, by steps since the change. Windows that keep their plan do
not count. Where a change has a transient, the difference between the plans is lower in the first steps than in the last
ones. Writes one JSON object for each window into OUTPUT.json and the table into OUTPUT.md.
"""

import argparse
import copy
import json
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

import edgc
from edgc.plan.rank_plan import RankPlan
from examples.ddp import Model, text
from tools.shared.files import with_ending, write, write_json

PRESETS = ("balanced", "fast")


class Training:
    """A model, its optimizer and EDGC, on one process."""

    def __init__(self, model: nn.Module, preset: str, iterations: int, window: int):
        self.model, self.preset, self.iterations, self.window = model, preset, iterations, window
        self.optimizer = torch.optim.AdamW(model.parameters(), 2e-3)
        # Within one machine no compression pays. EDGC compresses as it would on a link of 1 Gbit/s.
        config = edgc.EDGCConfig.from_preset(preset, link_gbps=1.0, window=window)
        self.state = edgc.EDGCState(model, config, iterations=iterations)

    def twin(self) -> "Training":
        """A copy whose plan stays, since its window does not end."""
        twin = Training(copy.deepcopy(self.model), self.preset, self.iterations, self.window)
        twin.optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))
        twin.state.load_state_dict(copy.deepcopy(self.state.state_dict()))
        twin.state.driver.window = self.iterations + 1
        return twin

    @property
    def plan(self) -> RankPlan:
        return self.state.driver.plan

    def step(self, words: Tensor) -> float:
        """Train on a batch. Returns the mean of the parameters' cosines, weighted by their elements."""
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        loss.backward()  # type: ignore[no-untyped-call]
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        sums = [gradient.clone() for gradient in gradients]  # a cosine does not see that they are not divided
        for one in sums:
            dist.all_reduce(one)
        self.state.step()
        self.optimizer.step()
        pairs = zip(gradients, sums, strict=True)
        cosines = [float(nn.functional.cosine_similarity(got.flatten(), true.flatten(), 0)) for got, true in pairs]
        elements = [gradient.numel() for gradient in gradients]
        return sum(n * cosine for n, cosine in zip(elements, cosines, strict=True)) / sum(elements)


def moved(old: RankPlan, new: RankPlan) -> tuple[int, int]:
    """How many matrices have another rank in the new plan, and how many parameters another format."""
    counts = [0, 0]
    for place, column in enumerate(("matrix_ranks", "formats")):
        for before, after in zip(getattr(old, column), getattr(new, column), strict=True):
            before, after = before or {}, after or {}
            counts[place] += sum(before.get(name) != after.get(name) for name in before.keys() | after.keys())
    return counts[0], counts[1]


def changed(row: dict[str, Any]) -> bool:
    return bool(row["ranks moved"] or row["formats moved"])


def windows(preset: str, seed: int, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """For each window of a run but the first: cosines of its steps under the new plan and under the one before it."""
    torch.manual_seed(seed)
    data = (text(seed * 1_000_000 + step, dist.get_rank()) for step in range(options.iterations))
    run = Training(Model(), preset, options.iterations, options.window)
    for _ in range(options.window - 1):
        run.step(next(data))
    for window in range(1, options.iterations // options.window - 1):
        twin, old = run.twin(), run.plan
        words = next(data)
        row = {"preset": preset, "seed": seed, "at": window * options.window}
        run.step(words)  # closes the window: the plan is a new one
        twin.step(words)
        row["ranks moved"], row["formats moved"] = moved(old, run.plan)
        sent = [one.state.stage.traffic.bytes for one in (run, twin)]
        pairs = []
        for _ in range(options.window - 1):
            words = next(data)
            pairs.append((run.step(words), twin.step(words)))
        row["new plan"], row["old plan"] = map(list, zip(*pairs, strict=True))
        traffic = [one.state.stage.traffic.bytes - before for one, before in zip((run, twin), sent, strict=True)]
        row["bytes a step"] = [count / len(pairs) for count in traffic]
        twin.state.close()
        yield row


def work(process: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meeting", rank=process, world_size=options.processes)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere):  # each copy would announce itself
        seeds = range(1, options.seeds + 1)
        rows = [row for preset in PRESETS for seed in seeds for row in windows(preset, seed, options)]
    if process == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def table(rows: list[dict[str, Any]], window: int) -> list[str]:
    """A Markdown table with one line for each number of steps since the change."""
    shown = [step for step in (1, 2, 3, 5, 10, 15) if step < window - 1] + [window - 1]
    head = " | ".join(f"`{preset}`: new plan | old plan | difference" for preset in PRESETS)
    lines = [f"| steps since the change | {head} |", "|---" * (1 + 3 * len(PRESETS)) + "|"]
    for step in shown:
        cells = []
        for preset in PRESETS:
            pairs = [(row["new plan"][step - 1], row["old plan"][step - 1]) for row in rows if row["preset"] == preset]
            new, old = map(fmean, zip(*pairs, strict=True))
            differences = [after - before for after, before in pairs]
            error = stdev(differences) / len(differences) ** 0.5
            cells.append(f"{new:.3f} | {old:.3f} | {fmean(differences):+.4f} ± {error:.4f}")
        lines.append(f"| {step} | {' | '.join(cells)} |")
    return lines


def page(rows: list[dict[str, Any]], options: argparse.Namespace) -> list[str]:
    """What stands above the table."""
    lines = [
        "# What a change of plan costs",
        "",
        f"`python tools/bench_replan.py` trains the model of `examples/ddp.py` for {options.iterations} steps on "
        f"{options.processes} processes, {options.seeds} seeds for each preset, in windows of {options.window} steps. "
        "At the end of each window the run gets a new plan, and a copy of it keeps the old one. Both train on the same "
        "data. The table has the mean over changes of the cosine between what the optimizer gets and the dense "
        "average, ± the standard error of the difference. Raw lines: `replan.json`.",
        "",
    ]
    for preset in PRESETS:
        every = [row for row in rows if row["preset"] == preset]
        seen = [row for row in every if changed(row)]
        ranks, formats = (fmean(row[name] for row in seen) for name in ("ranks moved", "formats moved"))
        more = fmean(row["bytes a step"][0] / row["bytes a step"][1] - 1 for row in seen)
        lines.append(
            f"- `{preset}`: in {len(seen)} of {len(every)} windows the plan changed. A change moved {ranks:.1f} ranks "
            f"and {formats:.1f} formats in the mean, and then a step sent {100 * more:+.1f} % bytes."
        )
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--window", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--output", type=Path, help="without a suffix (default: only print)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        spawn(work, (options, folder), nprocs=options.processes)  # type: ignore[no-untyped-call]
        rows = json.loads(Path(folder, "rows.json").read_text())
    seen = Counter(row["preset"] for row in rows if changed(row))
    if few := [preset for preset in PRESETS if seen[preset] < 2]:
        parser.exit(1, f"{few[0]}: {seen[few[0]]} changes of plan are too few; give more --seeds or --iterations\n")
    lines = table([row for row in rows if changed(row)], options.window)
    print("\n".join(lines))
    if options.output is not None:
        raw = {"processes": options.processes, "iterations": options.iterations, "window": options.window}
        raw |= {"torch": torch.__version__, "machine": f"{os.cpu_count()} cores, {platform.machine()}", "rows": rows}
        write_json(with_ending(options.output, ".json"), raw, indent=1)
        write(with_ending(options.output, ".md"), ("\n".join([*page(rows, options), *lines]) + "\n").encode())


if __name__ == "__main__":
    main()
