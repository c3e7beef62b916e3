"""Bar charts of a study: speedups, idle time by cause, and the lengths it drew."""

from collections.abc import Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from odc_sim.durations import CAUSES
from odc_sim.plots_style import (
    CAUSE_COLOURS,
    FAINT,
    INK,
    SCHEDULE_COLOURS,
    SMALL,
    TIMES,
    halo,
    legend,
    new_figure,
    tidy,
)
from odc_sim.results import Results, Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_SHARE = 0.001
"""A cause that nowhere takes this share of the GPU time is left out of the idle figure."""
HATCH = "/////"
BARS_WITH_LEVEL_NUMBERS = 20
"""With more bars than these, the numbers above them stand upright."""
MARKS = ("p50", "mean", "p90", "p99", "max")


def speedup_figure(results: Results) -> "Figure":
    """Speedups of every policy, one bar a schedule, with their 95 % intervals.

    Open hatched bars do not fit the device's memory; rows with a verdict show its first word instead of a bar. A line
    at 1 is the baseline, a dashed one `bounds["speedup"]`, which no policy beats.
    """
    from matplotlib.patches import Patch

    policies, schedules = _policies(results), _schedules(results)
    rows = {(row.schedule, row.policy): row for row in results.rows}
    figure = new_figure(4.3)
    axes = figure.add_subplot()
    bound = results.bounds.get("speedup")
    top = max([row.speedup_ci95[1] for row in results.rows if row.speedup_ci95], default=1.0)
    top = max(top, 1.0, bound or 0.0) * 1.1
    width = 0.84 / len(schedules)
    narrow = len(schedules) * len(policies) > BARS_WITH_LEVEL_NUMBERS
    for number, schedule in enumerate(schedules):
        colour = SCHEDULE_COLOURS.get(schedule, FAINT)
        places = {p: i + (number - (len(schedules) - 1) / 2) * width for i, p in enumerate(policies)}
        found = [(places[p], rows[schedule, p]) for p in policies if (schedule, p) in rows]
        running = [(x, row) for x, row in found if row.runs]
        bars = axes.bar(
            [x for x, _ in running],
            [row.speedup or 0.0 for _, row in running],
            width * 0.9,
            color=[colour if row.fits else "white" for _, row in running],
            edgecolor=colour,
            linewidth=0.8,
            label=schedule,
        )
        for bar, (x, row) in zip(bars, running, strict=True):
            bar.set_hatch("" if row.fits else HATCH)
            low, high = row.speedup_ci95 or (row.speedup or 0.0, row.speedup or 0.0)
            axes.vlines(x, low, high, color=INK, linewidth=1.1)
            text = axes.text(x, high + 0.012 * top, f"{row.speedup:.2f}", ha="center", va="bottom", fontsize=SMALL)
            text.set(color=INK, rotation=90 if narrow else 0, path_effects=halo())
        for x, row in found:
            if not row.runs:
                axes.text(
                    x, 0.015 * top, _word(row), rotation=90, ha="center", va="bottom", fontsize=SMALL, color=colour
                )
    right = len(policies) - 0.5
    _level(
        axes,
        right,
        1.0,
        "\n".join(("baseline", *results.baseline.split("/"))),
        "-",
        above=bound is not None and bound < 1.0,
    )
    if bound is not None:
        _level(axes, right, bound, f"no policy\nbeats {bound:.2f}{TIMES}", (0, (4, 3)), above=bound >= 1.0)
    axes.set_xlim(-0.5, right)
    axes.set_ylim(0.0, top * 1.05)
    axes.set_xticks(range(len(policies)), policies)
    axes.set_ylabel(f"speedup ({TIMES})", color=INK)
    axes.set_xlabel(_setting(results), color=INK, fontsize=9)
    tidy(axes, grid="y")
    axes.tick_params(axis="x", length=0, labelsize=9.5)
    handles = [Patch(facecolor=SCHEDULE_COLOURS.get(s, FAINT), edgecolor="none", label=s) for s in schedules]
    if any(row.runs and not row.fits for row in results.rows):
        handles.append(Patch(facecolor="white", edgecolor=FAINT, hatch=HATCH, label="does not fit in memory"))
    legend(figure, handles, 5)
    return figure


def idle_figure(results: Results) -> "Figure":
    """Where GPU time goes that is not compute, in percent: bars of stacked causes, one panel a schedule."""
    from matplotlib.patches import Patch

    policies, schedules = _policies(results), _schedules(results)
    causes = [c for c in CAUSES if any(row.idle_causes.get(c, 0.0) >= LEAST_SHARE for row in results.rows)]
    columns = min(2, len(schedules))
    lines = -(-len(schedules) // columns)
    figure = new_figure(0.75 + lines * (0.6 + 0.235 * len(policies)))
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    most = max((sum(row.idle_causes.values()) for row in results.rows), default=0.0) * 100.0 or 1.0
    for axes, schedule in zip(panels, schedules, strict=False):
        for y, policy in enumerate(policies):
            row = next((r for r in results.rows if (r.schedule, r.policy) == (schedule, policy)), None)
            if row is None:
                continue
            if not row.runs:
                axes.text(0.006 * most, y, _word(row), va="center", fontsize=SMALL, color=FAINT)
                continue
            left = 0.0
            for cause in causes:
                share = 100.0 * row.idle_causes.get(cause, 0.0)
                if share > 0.0:
                    axes.barh(y, share, 0.76, left=left, color=CAUSE_COLOURS[cause], linewidth=0)
                left += share
            total = 100.0 * sum(row.idle_causes.values())
            axes.text(left + 0.012 * most, y, f"{total:.0f} %", va="center", fontsize=SMALL, color=INK)
        axes.set_title(schedule, loc="left", fontsize=10.5, fontweight="bold", color=INK)
        axes.set_yticks(range(len(policies)), policies)
        tidy(axes, grid="x")
        axes.tick_params(axis="y", length=0, labelsize=9)
    for number, axes in enumerate(panels):
        axes.set_visible(number < len(schedules))
        if number >= len(schedules) - columns:
            axes.set_xlabel("idle, % of GPU time", color=INK)
            axes.tick_params(labelbottom=True)
    panels[0].set_ylim(len(policies) - 0.5, -0.5)
    panels[0].set_xlim(0.0, most * 1.12)
    figure.supxlabel(_setting(results), color=INK, fontsize=9)
    legend(figure, [Patch(facecolor=CAUSE_COLOURS[c], label=c.replace("_", " ")) for c in causes], 5)
    return figure


def lengths_figure(stats: Mapping[str, Any]) -> "Figure":
    """The histogram of drawn lengths on a log axis, with mean, percentiles and the microbatch's token cap marked.

    `stats`: `LengthStats.as_dict()`; `name` and `max_tokens` are used where present.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    edges, counts = stats["histogram_edges"], stats["histogram_counts"]
    figure = new_figure(3.3)
    axes = figure.add_subplot()
    axes.bar(
        edges[:-1],
        counts,
        [high - low for low, high in pairwise(edges)],
        align="edge",
        color=SCHEDULE_COLOURS["collective-deferred"],
        edgecolor="white",
        linewidth=0.6,
    )
    axes.set_xscale("log", base=2)
    high = max([*counts, 1])
    cap = stats.get("max_tokens")
    # Neighbours among the marks can be close, so that their labels are on three lines.
    for number, mark in enumerate(sorted(MARKS, key=lambda name: float(stats[name]))):
        value = float(stats[mark])
        _mark(axes, value, f"{mark} {value:,.0f}", high * (1.34 - 0.1 * (number % 3)), high, INK)
    if cap is not None and cap > stats["max"] * 1.02:
        _mark(axes, float(cap), f"max_tokens {cap:,}", high * 1.04, high, SCHEDULE_COLOURS["odc"])
    axes.set_ylim(0.0, high * 1.42)
    axes.xaxis.set_major_locator(LogLocator(base=2.0, numticks=20))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: _thousands(tokens)))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("sample length (tokens, log scale)", color=INK)
    axes.set_ylabel("samples", color=INK)
    tidy(axes, grid="y")
    name = f"{stats['name']}: " if stats.get("name") else ""
    axes.set_title(f"{name}{stats['num_samples']:,} samples", loc="left", fontsize=10.5, color=INK)
    return figure


def _setting(results: Results) -> str:
    """What was simulated, for a line under a figure that may travel without its table."""
    if not results.rows:
        return ""
    row = results.rows[0]
    return (
        f"{row.workload}, {row.model}, {row.devices} devices of {row.hardware}, "
        f"minibatch {row.minibatch_size} a device, max_tokens {row.max_tokens:,}"
    )


def _policies(results: Results) -> list[str]:
    return list(dict.fromkeys(row.policy for row in results.rows))


def _schedules(results: Results) -> list[str]:
    """In the fixed order of the palette, so that figures of different studies look alike."""
    found = dict.fromkeys(row.schedule for row in results.rows)
    return [s for s in SCHEDULE_COLOURS if s in found] + [s for s in found if s not in SCHEDULE_COLOURS]


def _word(row: Row) -> str:
    return (row.verdict or "no result").split(":")[0]


def _level(axes: "Axes", right: float, y: float, text: str, style: Any, *, above: bool) -> None:
    """A line across the axes at `y`, its text to the right of them, above or below the line's end."""
    axes.axhline(y, color=INK, linewidth=1.0, linestyle=style, zorder=0.9)
    axes.annotate(
        text,
        (right, y),
        xytext=(6, 2 if above else -2),
        textcoords="offset points",
        va="bottom" if above else "top",
        fontsize=SMALL,
        color=INK,
        annotation_clip=False,
    )


def _mark(axes: "Axes", x: float, text: str, y: float, high: float, colour: str) -> None:
    axes.vlines(x, 0.0, y, color=colour, linewidth=1.0, linestyle=(0, (2, 2)))
    axes.annotate(text, (x, y), xytext=(3, 0), textcoords="offset points", va="center", fontsize=9, color=colour)


def _thousands(tokens: float) -> str:
    """1,536 -> 1.5K, with K = 1,024 as in context lengths."""
    if tokens < 1000:
        return f"{tokens:.0f}"
    return f"{tokens / 1024:.1f}".removesuffix(".0") + "K"
