"""The pages of points and whole runs on limited links."""

from collections.abc import Sequence

from tools.network.pictures import SMOOTH
from tools.network.points import CHANGING, EVEN, LINKS, Curve, Point
from tools.network.setups import MODES, PLANNED, SEQUENCES, UNRECORDED, WINDOW
from tools.network.tables import by_link, changing_table, curve_table, newest, repeated, speed_table, table

GLOO = (
    "Over gloo a reduce-scatter sends as many bytes as an all-reduce, so the interface of the dense run counts more",
    "than EDGC does. With NCCL dense gradients would take about half as long here, and the gain would be smaller.",
)


def markdown(points: Sequence[Point], machine: str, curves: Sequence[Curve] = ()) -> str:
    """The whole page."""
    start = [point.start_bytes for point in points]
    shown, _ = newest(points)
    lines = [
        "# Time on limited links",
        "",
        "With this page you can see how long training steps take on limited links, dense and compressed.",
        "A *contender* is a way to reduce gradients: a preset or an engine. *Trial* and *probe* are [words of the",
        "README](../../README.md#words).",
        "",
        "Made by `bash scripts/bench_network.sh`; every run is in [points.json](points.json). These are real Megatron",
        "runs over gloo. Each process has its own network namespace, and `tc tbf` limits the namespace's link in both",
        f"directions. The model is a GPT of 4 layers, width 256, {128 * SEQUENCES:,} tokens a process and step, on a",
        f"CPU ({machine}). [Targets, and what was reached](targets.md).",
        "",
        f"- A run is the beginning of one of {PLANNED} iterations, so that EDGC plans for that many. It has a window",
        f"  of warm-up, and then two windows or more of {WINDOW} steps. EDGC takes the median step of each window. A",
        "  step's time in the tables is the median of these values. Steps of trials count.",
        "- *Mean* is the time of all these steps, with the exchanges at the ends of windows, over their number. Older",
        "  runs did not keep it.",
        "- *Communication* is the time of the reductions, of the process in which they are shortest. The brackets give",
        "  its share of the step.",
        "- Links have a rate and no added delay.",
        "- *MB a step* are those of a process. The first column is what EDGC counts, with gathered weights. The",
        "  second is what the interface sent, with headers and with EDGC's exchange at the end of a window. Where",
        "  processes share a link, it is their mean.",
        "- Before its first measured step a process sent "
        f"{min(start) / 1e6:.0f} to {max(start) / 1e6:.0f} MB: start-up, probing, and the window of warm-up",
        "  (`start_bytes` of each run).",
        "- `bf16` is EDGC's engine of that name: it rounds, sums in fp32, and keeps errors. Megatron itself sums in",
        "  bf16 only where the model is in bf16 (`dense-bf16-sums`).",
        "- Until commit 14804e0 large messages of `bf16`, `int8`, `int4` and `safe` went out whole. Gloo seems",
        "  to send and receive such a message one after the other. Reductions of `bf16` took 1.8 times as long as",
        "  their bytes need. Today these messages travel in pieces ([algorithm](../algorithm.md#sums-in-few-bits)).",
        "- `powersgd` is low rank in fp32 (`--edgc-preset paper --edgc-static-rank 32 --edgc-warmup-fraction 0.025`).",
        "- `paper` is dense until entropy is stable. In rows without its ranks that warm-up had not ended.",
        "  `paper-begun` begins after two windows, and its ranks may move by 128 a window. `paper-not-aligned` is the",
        "  same without alignment of the stages. [When each stage ends](stage_ends.md) was measured apart.",
        "- EDGC's probe, and later its trials in training, decide whether to compress, and whether to round all",
        "  gradients instead of low rank. *Ranks* are those of the last window, with a volume the largest of",
        "  each stage's matrices.",
        "- `balanced-low-rank` is `balanced` with `--edgc-rmax 1024`. It has neither that choice nor trials, and the",
        "  link does not bound its ranks.",
        "- Where weights are in bf16, `balanced` gathers them as differences in 8 bits if that is clearly faster,",
        "  `balanced-int4-weights` in 4 bits in any case, and `balanced-whole-weights` not at all.",
        "- *Width 2048* is another model: one layer, sequences of 16 tokens, 512 tokens a process and step.",
        "- Repetitions may be hours apart. This machine is shared, and its speed changes between them. So *against",
        "  dense* compares with the dense run of the same repetition, the nearest one above.",
        "- The picture shows the repetition whose step is the median. Each mode shows the commit that was timed at the",
        "  largest number of rates.",
        *marks([*shown, *curves]),
        "- Each contender is there with the newest code that ran it. [Older runs](older.md) have a page of their own.",
        "",
        "![Step time against the rate of the links](step.png)",
        "",
    ]
    if summary := repeated(points):
        lines += ["## Repeated", ""]
        lines += [
            "Changes against dense over the repetitions of the newest code that has three: the median, with the least",
            "and the most, and the mean ± half its 95 % confidence interval.",
            *("", *summary, ""),
        ]
    if rates := by_link(points, "balanced"):
        lines += [
            "## `balanced` by link",
            "",
            "The same of all plain runs of `balanced`, those of older code included. Intervals take the runs to be",
            "independent. Dense steps of *mapped* runs are longer, which flatters `balanced`.",
            *("", *rates, ""),
        ]
    if speeds := speed_table(points):
        lines += [
            "## Which link keeps the speed",
            "",
            "The reference is a step of the same run without its reductions. Reductions include the time to compress.",
            "The table shows the slowest link on which a contender still reaches a share of that speed. All runs are",
            "plain ones, those of a contender of one sweep. Between two rates that were timed, the share is taken to",
            "be linear in 1/rate.",
            *("", *speeds, ""),
        ]
    if curves:
        lines += [
            "## Loss over time",
            "",
            "These are whole runs of 280 iterations with seed 1, one of each contender. The learning rate falls to 0.",
            "Seconds are those from the first step on, without evaluation. A point of a line is the mean training loss",
            f"of {SMOOTH} windows. A star marks older runs, whose seconds are the median step of each window times its",
            "steps: what happens once in a window, such as EDGC's exchange, is not in them.",
            *("", *curve_table(curves), "", "![Training loss over time](loss.png)", ""),
        ]
    lines += tables(shown)
    if any(point.links in CHANGING for point in points):
        lines += ["![Step time over the windows of a run whose links change](changing.png)", ""]
    return "\n".join(lines)


def older_markdown(points: Sequence[Point]) -> str:
    """The page of what ``markdown`` leaves out of its tables."""
    _, older = newest(points)
    lines = [
        "# Older times on limited links",
        "",
        "Newer code has run these contenders in the same mode and on the same links. [Time on limited",
        "links](README.md) has those runs, and says what the columns mean. The machine is shared, and it was slower or",
        "faster on other days. So compare only what one commit has in one repetition.",
        "",
        *marks(older),
        "",
        *tables(older),
    ]
    return "\n".join(lines)


def marks(runs: Sequence[Point | Curve]) -> list[str]:
    """What the words beside a commit mean, of those that are in the rows of these runs."""
    lines = []
    if any(run.old for run in runs):
        lines += [
            "- Rows are *old* where today's code [compresses otherwise](../frontier/lists.md#old-rows) with the same",
            "  preset, or where runs had other flags.",
        ]
    presets = sorted({run.older_preset for run in runs if run.older_preset}, key=lambda one: (one == UNRECORDED, one))
    if presets:
        lines.append("- Rows are of an *older preset* where the preset had other settings than today:")
    for one in presets:
        where = _where([run for run in runs if run.older_preset == one])
        lines.append(f"    - {one}, in all others." if one == UNRECORDED else f"    - `{one}` in {where};")
    if not all(run.in_heap for run in runs):
        lines += [
            "- In rows that are *mapped*, glibc could allocate each large tensor by a new `mmap`. Dense steps then",
            "  take longer, because of [page faults](overhead.md). Runs that have probed the link hardly do, because",
            "  the probe frees large buffers. So these rows overstate what `safe`, `balanced` and `fast` save. Today",
            "  tensors stay in the heap in all runs.",
        ]
    return lines


def _where(runs: Sequence[Point | Curve]) -> str:
    """The contenders of these runs, with the commits of each."""
    commits: dict[str, set[str]] = {}
    for run in runs:
        commits.setdefault(run.contender, set()).add(run.commit)
    return ", ".join(f"`{name}` ({', '.join(sorted(own))})" for name, own in sorted(commits.items()))


def tables(points: Sequence[Point]) -> list[str]:
    """A section for each kind of links and mode."""
    lines = []
    for kind in LINKS:
        for mode in MODES:
            own = [point for point in points if (point.mode, point.links) == (mode, kind)]
            if own:
                title = mode.capitalize() if kind == EVEN else f"{mode.capitalize()}, {kind}"
                lines += [f"## {title}", "", *(changing_table(own) if kind in CHANGING else table(own)), ""]
                lines += [*GLOO, ""] if "distributed" in mode else []
    return lines
