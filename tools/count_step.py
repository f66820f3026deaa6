"""Count what a step of one pipeline stage asks of a GPU and a network, and compute what that would take on one.

    python tools/count_step.py [--models gpt2_12.1b gpt2_2.5b] [--output docs/bench/steps]

Writes OUTPUT.json and OUTPUT.md: kernel launches, bytes, floating-point operations, messages and memory, once with a
reduction for each matrix and once in units. No GPU is needed. Times are those of a model, whose assumptions the page
names.
"""

import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.benchmarks import gpu_model
from tools.benchmarks.common import BALANCED, versions
from tools.benchmarks.step_costs import Count, all_ways
from tools.launching.configs import LaunchError
from tools.shared.command import command_parser, say_error
from tools.shared.files import with_ending, write, write_json
from tools.shared.markdown import header, row


def main(argv: list[str] | None = None) -> int:
    """Count, and write both files; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2_12.1b", "gpt2_2.5b"], help="names in configs/models/")
    parser.add_argument("--output", type=Path, default=Path("docs/bench/steps"), help="of both files, without ending")
    options = parser.parse_args(argv)
    try:
        counts = [one for name in options.models for one in all_ways(name)]
    except LaunchError as error:
        say_error("count_step", error)
        return 2
    figures = {"versions": versions(), "rows": [asdict(one) for one in counts]}
    write_json(with_ending(options.output, ".json"), figures, indent=1)
    write(with_ending(options.output, ".md"), page(counts, options.output.name).encode())
    print(f"written: {options.output}.json, {options.output}.md")
    return 0


def page(counts: Sequence[Count], raw: str) -> str:
    """The page of these rows."""
    told = ", ".join(f"{name} {number}" for name, number in versions().items())
    lines = [
        "# A step on a GPU, counted",
        "",
        f"Made by `tools/count_step.py` ({told}); raw figures in [{raw}.json]({raw}.json).",
        "One step of one pipeline stage of the paper's models, without embeddings, in which nothing is measured.",
        "Launches, bytes and messages are counted from what torch is asked to do, on a device without values and with",
        "a process group that sends nothing. The CPU waits for nothing: asking for a value would be an error there.",
        "*By matrix*: a reduction for each matrix and the vectors after it, as Megatron's buckets of these models are.",
        "*Units*: [three for each stage](../algorithm.md). With `paper` a matrix that would send more than half of its",
        "bytes travels whole, in fp32. Its ranks are the largest of each shape, and the next ones. The largest rank of",
        "`balanced` is the one that its volume allows. *Equalised*: as `safe`, `balanced` and `fast` round their",
        "gradients, in the warm-up or throughout; the equaliser costs more passes. In a row with several",
        "ranks, layer 1 has the first of them, layer 2 the second, and so on. After the last one the first follows",
        "again. EDGC handles matrices of one shape and rank together, so such a step has more launches than one with",
        "one rank. *Memory* is the most that a step needs at",
        "any moment beside the gradients, errors and factors, divided by the size of the gradients. At that moment",
        "EDGC reduces two units at the same time.",
        "",
        f"**Times are computed, not measured.** CPU: each launch takes {gpu_model.HOST_SECONDS * 1e6:g} µs,",
        "as on a virtual machine with an H100 ([measured](../gpu.md#a-small-stage)).",
        "GPU: each operator takes as long as its bytes at",
        f"{gpu_model.MEMORY_SHARE:.0%} of the data sheet's memory speed, or its arithmetic at",
        f"{gpu_model.FLOPS_SHARE:.0%} of the peak in fp32 or float64, whichever is longer, and at least",
        f"{gpu_model.LEAST_SECONDS * 1e6:g} µs; a factorisation at least {gpu_model.COLUMN_SECONDS * 1e6:g} µs",
        "a column. Both overlap, so the longer one counts.",
        f"Messages: {gpu_model.MESSAGE_SECONDS * 1e6:g} µs each and their bytes over the link. Dense: the bytes",
        "of an all-reduce in fp32 over the link. Nothing is hidden behind the backward pass in any column.",
        "",
    ]
    for title in dict.fromkeys(one.model for one in counts):
        own = [one for one in counts if one.model == title]
        first = own[0]
        assert first.warm_up_transient_bytes is not None
        lines += [
            f"## {title}",
            "",
            f"{first.gradient_bytes / 2**30:.2f} GiB of gradients in fp32, {first.gpu}, {first.link_gbps:g} Gbit/s a "
            f"process; dense {1e3 * first.dense_seconds:.0f} ms. The warm-up of `balanced`, in",
            f"{BALANCED['dense_wire']}, takes {first.warm_up_transient_bytes / first.gradient_bytes:.2f} of the "
            "gradients' memory for its time.",
            "",
            *header(
                ["method", "ranks", "reductions", "launches", "messages", "passes over the gradient", "Tflop", "memory"]
                + ["CPU, ms", "GPU, ms", "messages, ms", "in all, ms"]
            ),
            *(row(_cells(one)) for one in own),
            "",
        ]
    return "\n".join(lines)


def _cells(one: Count) -> list[Any]:
    messages = one.latency_seconds + one.wire_seconds
    seconds = (one.host_seconds, one.device_seconds, messages, max(one.host_seconds, one.device_seconds) + messages)
    return [
        f"`{one.method}`",
        ", ".join(map(str, one.ranks)) if any(one.ranks) else "",
        "units" if one.units else "by matrix",
        f"{one.launches:,}",
        one.collectives,
        f"{one.moved_bytes / one.gradient_bytes:.1f}",
        f"{one.flops / 1e12:.2f}",
        "" if one.transient_bytes is None else f"{one.transient_bytes / one.gradient_bytes:.2f}",
        *(f"{1e3 * value:.0f}" for value in seconds),
    ]


if __name__ == "__main__":
    sys.exit(main())
