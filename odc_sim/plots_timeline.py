"""The picture of one minibatch: what each rank's compute stream does when, one panel a schedule, one time axis."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from odc_sim.idle import Span
from odc_sim.plots_style import DPI, FAINT, INK, SMALL, TIMES, WIDTH_INCHES, halo, legend, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Panel = tuple[str, float, Sequence[Span]]
"""Title, makespan in seconds, spans of one minibatch."""


class Look(NamedTuple):
    """How one class of spans is drawn; compute has two shades, by turns, so that microbatches can be told apart."""

    label: str
    shades: tuple[str, str]
    hatch: str = ""


# Okabe and Ito's blue and orange for compute, their lighter relatives for every other microbatch.
LOOKS = {
    "forward": Look("forward", ("#56B4E9", "#8CCBF0")),
    "head": Look("head and loss", ("#0072B2", "#3F93C5")),
    "backward": Look("backward", ("#E69F00", "#F2C14E")),
    "imbalance": Look("waits for slower ranks", ("#EDEDED", "#EDEDED"), "////"),
    "transfer": Look("waits for a transfer", ("#CC79A7", "#CC79A7")),
    "optimizer": Look("optimizer, publish", ("#009E73", "#009E73")),
    "other": Look("host, other", ("#595959", "#595959")),
}
COMPUTE = {"forward": "forward", "backward": "backward", "recompute": "backward", "head_loss": "head"}
"""Kinds of span in which a compute stream computes, and the look of each."""
ROW_HEIGHT = 0.8
HATCH_PIXELS = 3.0
"""Narrower bars stay plain: their hatching could not be seen, and takes longer to draw than all the rest."""
LABEL_WIDTH_INCHES = 0.16
"""A microbatch is numbered where its bar is at least this wide."""


def timeline_figure(panels: Sequence[Panel], ranks: Sequence[int] | None = None) -> "Figure":
    """One panel for each (title, makespan_s, spans), top to bottom; rows are `ranks` (default: the first eight).

    Percentages are the part of the time, over all ranks, in which a compute stream does not compute. Each panel's end
    is marked and, from the second on, compared with the first one's. Neighbours merge, so many spans are fine.
    """
    from matplotlib.patches import Patch

    assert panels
    shown = sorted({s.rank for _, _, spans in panels for s in spans})[:8] if ranks is None else list(ranks)
    longest_s = max(makespan_s for _, makespan_s, _ in panels)
    scale, unit = (1.0, "s") if longest_s >= 1.0 else (1e3, "ms")
    figure = new_figure(1.0 + len(panels) * (0.45 + 0.27 * len(shown)))
    column = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0].tolist()
    used: set[str] = set()
    for axes, (title, makespan_s, spans) in zip(column, panels, strict=True):
        used |= _draw(axes, spans, shown, scale, longest_s)
        axes.set_title(title, loc="left", fontsize=10.5, fontweight="bold", color=INK)
        axes.set_title(
            f"{_not_computing(spans, makespan_s):.0%} of GPU time not computing".replace("%", " %", 1),
            loc="right",
            fontsize=9.5,
            color=INK,
        )
        axes.set_yticks(range(len(shown)), [f"rank {rank}" for rank in shown])
        axes.set_ylim(len(shown) - 0.5, -0.5)
        tidy(axes)
        axes.tick_params(axis="y", length=0, labelsize=9)
        axes.spines["left"].set_visible(False)
        _mark_end(axes, makespan_s * scale, panels[0][1] * scale, len(shown))
    ranks_in_all = len({s.rank for _, _, spans in panels for s in spans})
    some = f"; ranks {shown[0]} to {shown[-1]} of {ranks_in_all}" if len(shown) < ranks_in_all else ""
    column[-1].set_xlabel(f"time ({unit}); numbers count a rank's microbatches{some}", color=INK)
    column[-1].set_xlim(0.0, longest_s * scale * 1.01)
    looks = [(name, look) for name, look in LOOKS.items() if name in used]
    legend(
        figure,
        [Patch(facecolor=k.shades[0], hatch=k.hatch, edgecolor=FAINT, linewidth=0.0, label=k.label) for _, k in looks],
        len(LOOKS),
    )
    return figure


def _class(span: Span) -> str:
    """Which of LOOKS a compute-stream span is drawn as."""
    if span.kind in COMPUTE:
        return COMPUTE[span.kind]
    if span.cause.startswith("imbalance"):
        return "imbalance"
    if span.cause in ("exposed_unshard", "exposed_reduce", "port_contention"):
        return "transfer"
    return "optimizer" if span.cause in ("optimizer", "publish") else "other"


def _merged(spans: Iterable[Span], tolerance_s: float) -> Iterator[tuple[str, int, float, float]]:
    """(class, microbatch, start_s, end_s) of one rank's compute stream, touching spans of the same class in one."""
    name, microbatch, start_s, end_s = "", -1, 0.0, 0.0
    for span in sorted((s for s in spans if s.stream == "compute"), key=lambda s: s.start_s):
        found = _class(span)
        if found == name and span.microbatch == microbatch and span.start_s - end_s <= tolerance_s:
            end_s = span.end_s
            continue
        if name:
            yield name, microbatch, start_s, end_s
        name, microbatch, start_s, end_s = found, span.microbatch, span.start_s, span.end_s
    if name:
        yield name, microbatch, start_s, end_s


def _draw(axes: "Axes", spans: Sequence[Span], shown: Sequence[int], scale: float, longest_s: float) -> set[str]:
    """Draw the shown ranks; returns the classes of which at least half a pixel can be seen in one place."""
    from matplotlib.collections import PolyCollection

    by_rank: dict[int, list[Span]] = defaultdict(list)
    for span in spans:
        by_rank[span.rank].append(span)
    inches_per_unit = WIDTH_INCHES * 0.9 / (longest_s * scale)
    boxes: dict[tuple[str, int, bool], list[list[tuple[float, float]]]] = defaultdict(list)
    extents: dict[tuple[int, int, str], tuple[float, float]] = {}
    for y, rank in enumerate(shown):
        low, high = y - ROW_HEIGHT / 2, y + ROW_HEIGHT / 2
        for name, microbatch, start_s, end_s in _merged(by_rank[rank], 1e-9 * longest_s):
            a, b = start_s * scale, end_s * scale
            hatched = LOOKS[name].hatch != "" and (b - a) * inches_per_unit * DPI >= HATCH_PIXELS
            boxes[name, microbatch % 2, hatched].append([(a, low), (b, low), (b, high), (a, high)])
            if name in ("forward", "backward") and microbatch >= 0:
                first, last = extents.get((y, microbatch, name), (a, b))
                extents[y, microbatch, name] = (min(a, first), max(b, last))
    for (name, turn, hatched), polygons in boxes.items():
        look = LOOKS[name]
        axes.add_collection(
            PolyCollection(
                polygons,
                facecolors=look.shades[turn],
                edgecolors="#BDBDBD" if hatched else "none",
                linewidths=0.0,
                hatch=look.hatch if hatched else None,
                label=name,
            )
        )
    for (y, microbatch, _), (a, b) in extents.items():
        if (b - a) * inches_per_unit >= LABEL_WIDTH_INCHES:
            text = axes.text((a + b) / 2, y, f"{microbatch}", ha="center", va="center", fontsize=SMALL, color=INK)
            text.set_path_effects(halo())
    widest = {key: max(corners[1][0] - corners[0][0] for corners in polygons) for key, polygons in boxes.items()}
    return {name for (name, *_), width in widest.items() if width * inches_per_unit * DPI >= 0.5}


def _not_computing(spans: Sequence[Span], makespan_s: float) -> float:
    ranks = {span.rank for span in spans}
    computing_s = sum(s.end_s - s.start_s for s in spans if s.stream == "compute" and s.kind in COMPUTE)
    total_s = len(ranks) * makespan_s
    return 1.0 - computing_s / total_s if total_s > 0.0 else 0.0


def _mark_end(axes: "Axes", end: float, first_end: float, rows: int) -> None:
    """A dashed line at the end; an arrow from the first panel's end, with the ratio, where they differ."""
    axes.axvline(end, color=INK, linewidth=1.1, linestyle=(0, (4, 3)))
    if abs(end - first_end) <= 0.01 * first_end:
        return
    middle = (rows - 1) / 2
    near = abs(end - first_end) < 0.1 * max(end, first_end)  # centred, the text would stick out on the right
    axes.axvline(first_end, color=FAINT, linewidth=0.9, linestyle=(0, (1, 2)))
    arrow = {"arrowstyle": "->", "color": INK, "linewidth": 1.2}
    axes.annotate("", (end, middle), (first_end, middle), arrowprops=arrow)
    axes.annotate(
        f"{TIMES} {first_end / end:.2f}",
        (max(end, first_end) if near else (end + first_end) / 2, middle),
        xytext=(0, 5),
        textcoords="offset points",
        ha="right" if near else "center",
        va="bottom",
        fontsize=10.5,
        fontweight="bold",
        color=INK,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0, "alpha": 0.85},
    )
