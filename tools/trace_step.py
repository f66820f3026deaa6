"""Trace one step of compressed reductions beside a backward pass: what waits for what.

    python tools/trace_step.py [--layers 6] [--width 512] [--rank 64] [--output docs/bench/trace]

Two processes over gloo on a CPU reduce the gradients of a stage of a GPT in three units, with the formats of
`balanced`. Products of matrices stand for the backward pass between the units. Writes what torch's profiler saw on
process 0 as a trace (OUTPUT.json, for chrome://tracing or ui.perfetto.dev), a picture of it (OUTPUT.png) and a page
(OUTPUT.md).
"""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.profiler import ProfilerActivity, profile, record_function

from edgc.comm.collectives import Communicator
from edgc.comm.overlap import Overlap
from edgc.compress.reducer import GradientReducer
from edgc.config import EDGCConfig
from edgc.hosts.units import cut
from edgc.specs import Parameter
from tools.benchmarks.common import BALANCED, versions
from tools.shared.command import command_parser
from tools.shared.files import with_ending, write
from tools.shared.machine import device_name
from tools.shared.pictures import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY_BLUE, VERMILION, panels, tidy, to_png

WARM_STEPS = 3
CPU = torch.device("cpu")
BACKWARD = "backward pass"  # as the trace names it
COLORS = (GREY, VERMILION, BLUE, GREEN, PURPLE, ORANGE, SKY_BLUE)
Event = dict[str, Any]


def main(argv: list[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--output", type=Path, default=Path("docs/bench/trace"), help="of all files, without ending")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "trace.json"
        spawn(  # type: ignore[no-untyped-call]
            _process, (options.layers, options.width, options.rank, whole), nprocs=2
        )
        events = [event for event in json.loads(whole.read_text())["traceEvents"] if _kind(event)]
    begin = min(event["ts"] for event in events)
    for event in events:
        event["ts"] = round(event["ts"] - begin, 1)
    kept = [{key: event[key] for key in ("name", "cat", "ph", "ts", "dur", "pid", "tid")} for event in events]
    write(with_ending(options.output, ".json"), (json.dumps({"traceEvents": kept}) + "\n").encode())
    write(with_ending(options.output, ".png"), draw(kept))
    told = ", ".join((device_name(on_gpu=False), *(f"{name} {number}" for name, number in versions().items())))
    name = options.output.name
    page = [
        "# What waits for what in a compressed step",
        "",
        f"Made by `tools/trace_step.py` ({told}); the trace is [{name}.json]({name}.json).",
        f"Process 0 of two, over gloo on a CPU: a stage of {options.layers} layers of width {options.width} in three",
        f"units, in the formats of `balanced` at rank {options.rank}. Products of matrices stand for the backward pass",
        "that makes the gradients of each unit. A message is under way from its start until its bytes have come. Over",
        "loopback that is short. While one is under way, the process goes on with the backward pass or another unit.",
        "",
        f"![Phases and messages over time]({name}.png)",
        "",
    ]
    write(with_ending(options.output, ".md"), "\n".join(page).encode())


def _process(rank: int, layers: int, width: int, low_rank: int, output: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{output.parent}/meeting", rank=rank, world_size=2)
    shapes = {"fc2": (width, 4 * width), "fc1": (4 * width, width), "proj": (width, width), "qkv": (3 * width, width)}
    parameters = [Parameter(f"{layer}.{kind}", shape) for layer in range(layers) for kind, shape in shapes.items()]
    config = EDGCConfig.of(**{**BALANCED, "basis_cycle": 1}, static_rank=low_rank, iteration_sampling_rate=0.01)
    assert dist.group.WORLD is not None
    communicator = Communicator.uncounted(dist.group.WORLD)
    units = cut(((parameter, 4 * parameter.elements) for parameter in parameters), least=1)
    reducers = [GradientReducer.of(unit, config, communicator, CPU) for unit in units]
    for reducer in reducers:
        reducer.set_rank(low_rank)
    gradients = {parameter.name: torch.randn(parameter.shape) for parameter in parameters}
    activations, weights = torch.randn(256, width), torch.randn(width, 4 * width)

    def step(iteration: int) -> None:
        overlap, handles = Overlap(CPU), []
        for unit, reducer in zip(units, reducers, strict=True):
            with record_function(BACKWARD):
                for _ in unit:
                    torch.mm(activations, weights)
            own = {parameter.name: gradients[parameter.name] for parameter in unit}
            handles.append(overlap.start(reducer.reduce(own, iteration)))
        for handle in handles:
            handle.wait()

    for iteration in range(WARM_STEPS):
        step(iteration)
    dist.barrier()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(WARM_STEPS)
    if rank == 0:
        profiler.export_chrome_trace(str(output))
    dist.destroy_process_group()


def _kind(event: Event) -> str:
    """What an event of the trace is to us: a phase, a message, or nothing."""
    if event.get("ph") != "X" or event.get("cat") != "user_annotation":
        return ""
    name = event["name"]
    if name.startswith("gloo:"):
        return "message"
    return "phase" if name == BACKWARD or name.startswith("edgc/") else ""


def draw(events: Sequence[Event]) -> bytes:
    """The picture as PNG: phases of the process above, its messages below, over time."""
    figure, (axes,) = panels(1, 1, width=10, height=2.6)
    names = [event["name"] for event in events if _kind(event) == "phase"]
    for name, color in zip(dict.fromkeys(names), COLORS, strict=False):
        spans = [(event["ts"] / 1e3, event["dur"] / 1e3) for event in events if event["name"] == name]
        axes.broken_barh(spans, (1, 0.8), facecolors=[color], label=name.removeprefix("edgc/"))
    ends: list[float] = []  # of the last message in each line
    for event in sorted((event for event in events if _kind(event) == "message"), key=lambda event: event["ts"]):
        line = next((line for line, end in enumerate(ends) if end <= event["ts"]), len(ends))
        ends[line : line + 1] = [event["ts"] + event["dur"]]
        span = (event["ts"] / 1e3, event["dur"] / 1e3)
        axes.broken_barh([span], (0.5 - 0.4 * line, 0.3), facecolors=["black"])
    axes.set_yticks([1.4, 0.85 - 0.2 * len(ends)], ["process", "messages"])
    axes.set_xlabel("ms")
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncol=len(COLORS), fontsize=8, frameon=False)
    tidy(axes)
    axes.set_axisbelow(True)
    return to_png(figure, dpi=90)


if __name__ == "__main__":
    main(sys.argv[1:])
