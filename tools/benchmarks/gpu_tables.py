"""The figures of the contenders as Markdown."""

from typing import Any

from tools.shared.markdown import header, row

COLUMNS = (
    *("rank", "contender", "ms", "against the hook", "of the roofline", "GB/s", "reads", "writes"),
    *("kept, bytes a parameter", "peak"),
)


def tables(result: dict[str, Any]) -> str:
    """As Markdown; times in milliseconds."""
    on_gpu = result["device_type"] == "cuda"
    launches = "launches" if on_gpu else "operations"
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
            *header([*COLUMNS, launches, "wins below, Gbit/s"]),
        ]
        hook = {figures["rank"]: figures["seconds"] for figures in stage["rows"] if figures["contender"] == "hook"}
        for figures in stage["rows"]:
            seconds, reads, writes = figures["seconds"], figures["reads"], figures["writes"]
            bandwidth = None if reads is None else 4e-9 * stage["elements"] * (reads + writes) / seconds
            cells = [
                figures["rank"],
                figures["contender"],
                f"{1e3 * seconds:.1f}",
                f"{hook[figures['rank']] / seconds:.2f}x",
                f"{figures['floor_share']:.0%}",
                _or_none(bandwidth, ".1f"),
                _or_none(reads, ".1f"),
                _or_none(writes, ".1f"),
                _or_none(figures["kept_bytes_per_parameter"], ".2f"),
                _or_none(figures["peak_bytes_per_parameter"], ".2f"),
                _or_none(figures[launches], "d"),
                "" if "balanced" in figures["contender"] else f"{figures['break_even_gbps']:.3g}",
            ]
            lines.append(row(cells))
        entropy = stage["sampling"]
        lines += [
            "",
            f"Entropy of a measured iteration: {1e3 * entropy['measured_seconds']:.1f} ms; at the default rate "
            f"{1e3 * entropy['mean_seconds']:.2f} ms a step.",
            "",
            *header(["rank", "contender", "result against float64", "result + error against the input"]),
        ]
        for rank, by_name in stage["exactness"].items():
            for name, worst in by_name.items():
                lines.append(row([rank, name, f"{worst['result']:.1e}", f"{worst['result_and_error']:.1e}"]))
    return "\n".join(lines)


def _or_none(value: float | None, form: str) -> str:
    return "not counted" if value is None else format(value, form)
