"""What all figures share: colours that colour-blind readers can tell apart, sizes, and how a figure becomes a PNG."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from odc_sim.durations import CAUSES
from odc_sim.header import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Palette of Okabe and Ito (2008), "Color Universal Design": blues for collectives, reds for one-sided transfers.
SCHEDULE_COLOURS = {
    "collective": "#0072B2",
    "collective-deferred": "#56B4E9",
    "odc": "#D55E00",
    "odc-local-sum": "#E69F00",
}
# The same palette; what belongs together differs in lightness only.
CAUSE_COLOURS = dict(
    zip(
        CAUSES,
        (
            *("#0072B2", "#B5DDF4", "#56B4E9"),  # imbalance
            "#CC79A7",
            *("#E69F00", "#D55E00"),  # exposed transfers
            "#F0E442",
            "#595959",
            *("#009E73", "#8FD4BD"),  # optimizer and publish
        ),
        strict=True,
    )
)
TIMES = "\N{MULTIPLICATION SIGN}"
INK = "#333333"
FAINT = "#8A8A8A"
WIDTH_INCHES = 9.2
DPI = 110
SMALL = 8.5
"""Points; at README width no text is smaller than about 11 pixels."""


def new_figure(height_inches: float) -> "Figure":
    """An empty figure of the width all figures have, with a canvas of its own (no pyplot, no global state)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH_INCHES, height_inches), dpi=DPI, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def tidy(axes: "Axes", *, grid: str = "") -> None:
    """Leave the lower and left spine only; light grid lines across `grid` ("x" or "y")."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(FAINT)
    axes.tick_params(colors=INK, length=3, color=FAINT)
    axes.set_axisbelow(True)
    if grid == "x":
        axes.xaxis.grid(True, color="#E6E6E6", linewidth=0.8)
    elif grid == "y":
        axes.yaxis.grid(True, color="#E6E6E6", linewidth=0.8)


def halo() -> Any:
    """Path effects that keep a text readable on lines and bars."""
    from matplotlib.patheffects import withStroke

    return [withStroke(linewidth=2.2, foreground="white", alpha=0.85)]


def legend(figure: "Figure", handles: Iterable[Any], columns: int) -> None:
    """A frameless legend above the axes."""
    figure.legend(
        handles=list(handles),
        loc="outside upper left",
        ncols=columns,
        frameon=False,
        fontsize=9,
        labelcolor=INK,
        handlelength=1.4,
        columnspacing=1.6,
    )


def save_png(figure: "Figure", path: str | Path) -> None:
    """Write a figure as a PNG about 1,000 pixels wide, whole or not at all.

    Raises:
        InputError: the path is a directory, or cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from PIL import Image

    # drawn into memory rather than saved and read back, which takes as long as drawing
    figure.set_dpi(DPI)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()  # type: ignore[no-untyped-call]
    pixels = np.asarray(canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    image = Image.fromarray(pixels[:, :, :3])
    small = io.BytesIO()
    # flat colours: 128 of them look the same and take a third of the bytes
    reduced = image.quantize(128, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    reduced.save(small, format="png", compress_level=7)
    write_bytes(path, small.getvalue())
