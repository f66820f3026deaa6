"""matplotlib without a screen, and what all pictures have in common. It is imported by the first picture: what prints
tables alone works without it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, which colour-blind readers can tell apart
VERMILION, ORANGE, YELLOW = "#D55E00", "#E69F00", "#F0E442"
BLUE, SKY_BLUE, GREEN, PURPLE = "#0072B2", "#56B4E9", "#009E73", "#CC79A7"
GREY = "#555555"  # of the dense run


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot

    return matplotlib.pyplot


def panels(rows: int, columns: int, width: float, height: float) -> tuple[Figure, list[Axes]]:
    """A figure of ``rows`` x ``columns`` panels, each of this size in inches; the panels row by row."""
    figure, axes = _pyplot().subplots(
        rows, columns, figsize=(width * columns, height * rows), layout="constrained", squeeze=False
    )
    return figure, list(axes.flat)


def tidy(axes: Axes, *, minor_grid: bool = False) -> None:
    """A light grid, and no frame above and to the right."""
    axes.grid(alpha=0.3, which="both" if minor_grid else "major")
    axes.spines[["top", "right"]].set_visible(False)


def to_png(figure: Figure, dpi: int) -> bytes:
    """The figure as PNG, without the version of what drew it; closes it."""
    picture = io.BytesIO()
    figure.savefig(picture, dpi=dpi, metadata={"Software": None})
    _pyplot().close(figure)
    return picture.getvalue()
