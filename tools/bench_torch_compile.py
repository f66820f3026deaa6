"""Time rounding and unpacking of a message as it is and under ``torch.compile``, and how long compiling takes.

    python tools/bench_torch_compile.py [--values 65536 1048576] [--output docs/bench/torch_compile]

Writes OUTPUT.json and OUTPUT.md. One thread on the CPU; both ways alternate. Every size is a shape of its own, which is
compiled anew, as every new rank would be in training.
"""

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch import Tensor

if __name__ == "__main__":
    import _root  # noqa: F401

from edgc.comm.wire import wire
from tools._root import REPOSITORY
from tools.benchmarks.common import versions
from tools.shared.checkout import commit
from tools.shared.command import command_parser
from tools.shared.files import with_ending, write, write_json
from tools.shared.machine import device_name
from tools.shared.markdown import header, row

FORMATS = "int8", "int5", "int4"
REPETITIONS = 50


@dataclass(frozen=True)
class Row:
    """A format and a number of values; medians in milliseconds. ``same``: whether both ways give the same bits."""

    format: str
    values: int
    plain_ms: float
    compiled_ms: float
    compile_seconds: float
    same: bool


def main(argv: list[str] | None = None) -> None:
    parser = command_parser(__doc__)
    parser.add_argument("--values", type=int, nargs="+", default=[65536, 1048576], help="multiples of 128")
    parser.add_argument("--repetitions", type=int, default=REPETITIONS)
    parser.add_argument("--output", type=Path, default=Path("docs/bench/torch_compile"), help="without ending")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    torch._inductor.config.force_disable_caches = True  # else a second run finds what the first has compiled
    rows = [timed(name, values, options.repetitions) for name in FORMATS for values in options.values]
    machine, at = device_name(on_gpu=False), commit(REPOSITORY)
    made = {"commit": at, "machine": machine, "versions": versions(), "rows": [asdict(one) for one in rows]}
    write_json(with_ending(options.output, ".json"), made, indent=1)
    write(with_ending(options.output, ".md"), page(rows, options.output.name, machine, at).encode())
    print(f"written: {options.output}.json, {options.output}.md")


def timed(name: str, values: int, repetitions: int) -> Row:
    """Normal values to a message and back."""
    form = wire(name)

    def there_and_back(tensor: Tensor) -> Tensor:
        return form.decode(form.encode(tensor))

    sample = torch.randn(1, values, generator=torch.Generator().manual_seed(1))
    torch.compiler.reset()
    compiled = torch.compile(there_and_back, dynamic=False, fullgraph=True)
    begin = time.perf_counter()
    first = compiled(sample)
    compile_seconds = time.perf_counter() - begin
    plain_ms, compiled_ms = [], []
    for _ in range(repetitions):
        plain_ms.append(_milliseconds(there_and_back, sample))
        compiled_ms.append(_milliseconds(compiled, sample))
    same = torch.equal(first, there_and_back(sample))
    return Row(name, values, median(plain_ms), median(compiled_ms), compile_seconds, same)


def _milliseconds(step: Callable[[Tensor], Tensor], sample: Tensor) -> float:
    begin = time.perf_counter()
    step(sample)
    return 1000 * (time.perf_counter() - begin)


def page(rows: list[Row], name: str, machine: str, at: str) -> str:
    """The page in Markdown."""
    about = ", ".join(f"{what} {number}" for what, number in versions().items())
    lines = [
        "# Rounding under `torch.compile`",
        "",
        f"Made by `tools/bench_torch_compile.py` ({machine}, one thread; {about}; commit {at});",
        f"every row is in [{name}.json]({name}.json). A message is rounded, packed, unpacked and scaled again.",
        "EDGC does not use `torch.compile`: a plan gives new ranks at the ends of windows, each new rank is a new",
        "shape, and each shape is compiled anew. On a GPU this was not measured.",
        "",
        *header(["format", "values", "plain, ms", "compiled, ms", "of plain", "compiling, s", "same bits"]),
    ]
    lines += [
        row(
            [
                one.format,
                f"{one.values:,}",
                f"{one.plain_ms:.2f}",
                f"{one.compiled_ms:.2f}",
                f"{one.compiled_ms / one.plain_ms:.0%}",
                f"{one.compile_seconds:.1f}",
                "yes" if one.same else "no",
            ]
        )
        for one in rows
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
