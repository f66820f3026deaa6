"""The page of a study: what it shows, its table, and where its figures come from.

A study is a list of runs with the key ``study``; docs/frontier/lists.md says what each shows.
"""

from collections.abc import Mapping, Sequence

from tools.experiments.entries import Line, old, setting
from tools.experiments.page import not_shown, provenance
from tools.experiments.store import links
from tools.experiments.studies import STUDIES
from tools.shared.pictures import to_png

# What a reader can do with a page, and what its columns mean.
_BY_SEED = "Numbers are means over the seeds of a run, ± half the 95 % confidence interval where there are several."
_OVER_A_RUN = (
    "With this page you can see how the entropy of gradients changes over a run, by pipeline stage and",
    "kind of layer. Entropies are in nats: the mean of a window. *Lowest* is the window with the least",
    "entropy, and the iteration until which it went, by seed. *Rise* is from there to the last window.",
    "*Correlation with the iteration* is positive where entropy rises.",
    _BY_SEED,
)
_AGREEMENT = (
    "*Correlation* and *largest difference* compare the entropies of both runs at all times. *Ranks,",
    "mean* is the mean rank after the warm-up, of the first and of the second run.",
)
ABOUT: Mapping[str, tuple[str, ...]] = {
    "entropy": _OVER_A_RUN,
    "fidelity": (
        "With this page you can see which measured signal puts methods in the order of their loss. A row is a",
        "method. The last rows of the table give the rank correlation of each signal with the gap in loss.",
    ),
    "losses": (
        "With this page you can see when in a run the loss departs from that of the dense run, and how much",
        "of the gradient the optimizer got then. *Validation* is the gap in validation loss at the end.",
    ),
    "ranks": (
        "With this page you can see what a fixed rank costs in loss and saves in bytes. *Gap* is the",
        "validation loss against the dense run of the same seed, ± half the 95 % confidence interval of the",
        "mean. All other numbers are means over the seeds.",
    ),
    "replay": (
        "With this page you can see which ranks other windows and fewer measurements would have led to. The",
        "entropies of dense runs were given to the paper's algorithm. *Mean rank* is that of the row,",
        "*reference* that of the row with which it is compared.",
        _BY_SEED,
    ),
    "sampling": (
        "With this page you can see how close the entropy of sampled gradients comes to that of whole ones.",
        *_AGREEMENT,
    ),
    "statistics": (
        "With this page you can see whether gradients are normal, by pipeline stage and kind of layer. The",
        "last column is the entropy by the Gaussian formula minus that of a histogram.",
        _BY_SEED,
    ),
    "topology": (
        "With this page you can compare the paper's algorithm in pure data parallelism with that in a",
        "pipeline, with stages aligned and not. *Gap* is the validation loss against the dense run.",
    ),
    "windows": (
        "With this page you can see whether windows of different length see the same entropy.",
        *_AGREEMENT,
    ),
}


def has_lines(study: str, lines: Sequence[Line]) -> bool:
    """Whether any of these lines holds what the study shows: older ones lack training losses."""
    return any(("losses" if study == "losses" else "windows") in line for line in lines)


def page(
    name: str, title: str, study: str, lines: Sequence[Line], missing: Sequence[str] = (), picture: str = ""
) -> tuple[str, bytes]:
    """The study's page and its plot as PNG.

    ``missing``: runs that were not made. ``picture``: the plot's name, where it is not that of the list.
    """
    hidden = [line for line in lines if "defect" in line]
    unseen = sorted({f"{line['name']}, seed {line['seed']}" for line in lines if "windows" not in line})
    lines = [line for line in lines if "defect" not in line and "windows" in line]
    figure, table = STUDIES[study](lines)
    text = [
        *(f"# {title}", ""),
        f"Made by `python tools/frontier.py --config configs/frontier/{name}.yaml`. Raw lines: {links(lines)}.",
        "",
        *ABOUT[study],
        "",
        f"![{title}]({picture or name}.png)",
        "",
        *table,
        "",
        *_old(lines),
        *([f"Run without what this page shows: {'; '.join(unseen)}.", ""] if unseen else []),
        *not_shown(hidden, missing),
        *provenance(lines),
        "",
    ]
    return "\n".join(text), to_png(figure, dpi=90)


def _old(lines: Sequence[Line]) -> list[str]:
    """Which runs would not be the same today, and why."""
    found = [f"- {line['name']}, {setting(line)}: {old(line)}" for line in lines if old(line)]
    return ["Old runs, which would not be the same today:", "", *found, ""] if found else []
