"""Compile the fused kernels for GPUs that need not be there, and write what the compiler made of them.

    python tools/compile_kernels.py [--output docs/bench/compiled]

Writes OUTPUT.json and OUTPUT.md. Fails if a kernel spills registers. Nothing runs: times are not known.
"""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

if __name__ == "__main__":
    import _root  # noqa: F401

from tools.benchmarks.common import versions
from tools.shared.command import command_parser, say_error
from tools.shared.files import with_ending, write
from tools.shared.markdown import header, row


def main(argv: list[str] | None = None) -> int:
    """Compile; returns the exit status."""
    parser = command_parser(__doc__)
    parser.add_argument(
        "--output", type=Path, default=Path("docs/bench/compiled"), help="of both files, without ending"
    )
    output = parser.parse_args(argv).output
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # as Triton itself does, with a warning
    import triton  # type: ignore[import-untyped]

    from tools.benchmarks.compiled import GPUS, RANKS, compile_kernels

    made = [one for capability in GPUS for rank in RANKS for one in compile_kernels(capability, rank)]
    used = {**versions(), "triton": triton.__version__}
    result = {"versions": used, "rows": [asdict(one) for one in made]}
    write(with_ending(output, ".json"), (json.dumps(result, indent=1) + "\n").encode())
    table = header(["GPU", "kernel", "rank", "registers", "spilled", "shared memory", "load", "store", "product"])
    table += [
        row(
            [
                f"{GPUS[one.capability]} (sm_{one.capability})",
                one.kernel,
                one.rank,
                one.registers,
                f"{one.spilled_bytes} B",
                f"{one.shared_bytes / 1024:g} KiB",
                f"{one.load_bytes} B",
                f"{one.store_bytes} B",
                f"`{one.product.partition('.')[0]}`",
            ]
        )
        for one in made
    ]
    told = ", ".join(f"{name} {number}" for name, number in used.items())
    page = [
        "# What the compiler makes of the fused kernels",
        "",
        f"Made by `tools/compile_kernels.py` ({told}); raw figures in [{output.name}.json]({output.name}.json).",
        "Triton compiles both kernels of `--edgc-study kernels=fused` for these GPUs. None was there, so nothing",
        "ran; [times](kernel_blocks.md) stand elsewhere. Registers and spilled bytes are those of a thread (255",
        "registers are the most there are), shared memory is that of a block. Load and store: the most bytes that",
        "one instruction moves for a thread, of 16 that it can. Product: what the tensor cores are asked with.",
        "Matrices are row-major, errors in bf16, and gradients have a loss scale.",
        "",
        *table,
        "",
    ]
    write(with_ending(output, ".md"), "\n".join(page).encode())
    spilling = [f"{one.kernel} at rank {one.rank} for sm_{one.capability}" for one in made if one.spilled_bytes]
    if spilling:
        say_error("compile_kernels", ValueError(f"registers are spilled: {', '.join(spilling)}"))
        return 1
    print(f"written: {output}.json, {output}.md")
    return 0


if __name__ == "__main__":
    sys.exit(main())
