"""The figure of one factor of a sweep: speedup and idle time against its values, a line a schedule and policy."""

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from odc_sim.plots_style import FAINT, INK, SCHEDULE_COLOURS, TIMES, legend, new_figure, tidy
from odc_sim.sweep import Factor, value_text
from odc_sim.sweep_results import SweepResults

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHES: tuple[Any, ...] = ("-", (0, (4, 1.6)), (0, (1, 1.4)), (0, (6, 1.5, 1, 1.5)))
"""Policies, in the order they occur; the last stands for all further ones."""
MARKERS = "osD^"
LEAST_SPAN = 4.0
"""Positive values are put on a log axis when the largest is at least this many times the smallest."""


def factor_figure(results: SweepResults, factor: Factor) -> "Figure":
    """Left, larger: speedup over the baseline with 95 % bands. Right: the share of GPU time that is idle.

    Colours are schedules, dashes and markers policies. Lines break where a point did not run; open markers do not fit
    the device's memory. Other factors stay at their reference.
    """
    from matplotlib.lines import Line2D

    shown = [factor.show(value) for value in factor.values]
    xs, log = positions(shown)
    labels, base = results.labels(factor), results.baseline
    policies = list(dict.fromkeys(label.split("/")[1] for label in labels))
    figure = new_figure(3.9)
    gain, idle = figure.subplots(1, 2, width_ratios=(3, 2))
    handles = []
    for label in sorted(labels, key=lambda name: name != base):
        schedule, policy = label.split("/")
        colour, number = SCHEDULE_COLOURS.get(schedule, FAINT), min(policies.index(policy), len(DASHES) - 1)
        style: dict[str, Any] = {"color": colour, "linestyle": DASHES[number], "linewidth": 1.7}
        rows = results.line(factor, label)
        none = float("nan")
        ends = [(none, none) if row is None or row.speedup_ci95 is None else row.speedup_ci95 for row in rows]
        fill = ["none" if row is None else colour if row.fits else "white" for row in rows]
        idle_percent = [none if row is None or row.idle_rate is None else 100.0 * row.idle_rate for row in rows]
        speedups = [none if row is None or row.speedup is None else row.speedup for row in rows]
        if label != base:
            gain.fill_between(xs, [e[0] for e in ends], [e[1] for e in ends], color=colour, alpha=0.15, linewidth=0)
        for axes, values in ((gain, speedups), (idle, idle_percent)):
            axes.plot(xs, values, **style)
            axes.scatter(xs, values, s=26, marker=MARKERS[number], c=fill, edgecolors=colour, linewidths=1.2, zorder=3)
        name = f"{schedule} + {policy}" + (" (baseline)" if label == base else "")
        handles.append(Line2D([], [], marker=MARKERS[number], markersize=5, label=name, **style))
    for axes, title in ((gain, f"speedup ({TIMES})"), (idle, "idle, % of GPU time")):
        _ticks(axes, factor, xs, log)
        axes.set_ylabel(title, color=INK)
        tidy(axes, grid="y")
    idle.set_ylim(bottom=0.0)
    legend(figure, handles, 3)
    return figure


def positions(shown: Sequence[Any]) -> tuple[list[float], bool]:
    """Where values lie on the x axis, and whether that is a log axis: numbers by value, anything else side by side.

    Positive numbers that grow and span a factor of LEAST_SPAN or more, by nearly equal ratios, are on a log axis.
    """
    numbers = [v for v in shown if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(shown):
        return [float(i) for i in range(len(shown))], False
    xs = [float(v) for v in numbers]
    if min(xs) <= 0.0 or max(xs) < LEAST_SPAN * min(xs):
        return xs, False
    ratios = [max(a, b) / min(a, b) for a, b in pairwise(sorted(xs))]
    return xs, max(ratios) <= 2.0 * min(ratios)


def _ticks(axes: "Axes", factor: Factor, xs: list[float], log: bool) -> None:
    from matplotlib.ticker import NullLocator

    if log:
        axes.set_xscale("log", base=2)
    axes.set_xticks(xs, [value_text(factor.show(value)) for value in factor.values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(factor.title, color=INK)
