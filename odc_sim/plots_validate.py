"""The picture of a validation: step times measured against predicted, and idle time by cause side by side."""

from typing import TYPE_CHECKING

import numpy as np

from odc_sim.durations import CAUSES
from odc_sim.plots_style import CAUSE_COLOURS, FAINT, INK, SCHEDULE_COLOURS, SMALL, legend, new_figure, tidy
from odc_sim.validate import Validation
from odc_sim.validate_run import RunValidation

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEAST_SHARE = 0.001
MARKERS = "osD^vPX*"
BAR = 0.38


def validation_figure(found: Validation) -> "Figure":
    """Left, a point a minibatch, on the line where the prediction is right; right, two bars a run."""
    figure = new_figure(1.6 + max(2.9, 0.62 * len(found.runs)))
    left, right = figure.subplots(1, 2, width_ratios=[1.0, 1.15])
    _steps(left, found)
    _idle(right, found)
    return figure


def _steps(axes: "Axes", found: Validation) -> None:
    longest_s = max(float(max(r.prediction.makespan_s.max(), r.measured.makespan_s.max())) for r in found.runs)
    scale, unit = (1.0, "s") if longest_s >= 1.0 else (1e3, "ms")
    end = 1.05 * longest_s * scale
    axes.plot([0.0, end], [0.0, end], color=FAINT, linewidth=1.0, zorder=0.9)
    off = found.tolerance_percent / 100.0
    axes.fill_between([0.0, end], [0.0, end * (1 - off)], [0.0, end * (1 + off)], color="#EBEBEB", zorder=0.8)
    for number, each in enumerate(found.runs):
        axes.scatter(
            each.prediction.makespan_s * scale,
            each.measured.makespan_s * scale,
            s=17,
            marker=MARKERS[number % len(MARKERS)],
            color=SCHEDULE_COLOURS.get(each.run.config.schedule, FAINT),
            edgecolor="white",
            linewidth=0.4,
            label=f"{each.run.name}  {each.step.percent:+.1f} %",
        )
    axes.set_xlim(0.0, end)
    axes.set_ylim(0.0, end)
    axes.set_xlabel(f"a minibatch, predicted ({unit})", color=INK)
    axes.set_ylabel(f"measured ({unit})", color=INK)
    axes.legend(loc="upper left", frameon=False, fontsize=SMALL, labelcolor=INK, handletextpad=0.2)
    tidy(axes, grid="y")


def _idle(axes: "Axes", found: Validation) -> None:
    from matplotlib.patches import Patch

    shares = {each.run.name: each.idle_causes for each in found.runs}
    causes = [
        cause
        for cause in CAUSES
        if any(max(s[cause].predicted, s[cause].measured or 0.0) >= LEAST_SHARE for s in shares.values())
    ]
    most = max(1e-3, *(max(_totals(each)) for each in found.runs)) * 100.0
    for place, each in enumerate(found.runs):
        for side, name in ((-1, "predicted"), (1, "measured")):
            y, start = place + side * BAR / 2, 0.0
            if name == "measured" and not each.measured.covered.any():
                axes.text(0.01 * most, y, "no timeline", va="center", fontsize=SMALL, color=FAINT)
                continue
            for cause in causes:
                share = 100.0 * (getattr(shares[each.run.name][cause], name) or 0.0)
                axes.barh(y, share, BAR * 0.92, left=start, color=CAUSE_COLOURS[cause], linewidth=0)
                start += share
            total = 100.0 * _totals(each)[side > 0]
            axes.text(total + 0.012 * most, y, f"{name} {total:.1f}", va="center", fontsize=SMALL, color=INK)
    axes.set_yticks(np.arange(len(found.runs)), [each.run.name for each in found.runs])
    axes.set_ylim(len(found.runs) - 0.5, -0.5)
    axes.set_xlim(0.0, most * 1.32)
    axes.set_xlabel("idle, % of GPU time", color=INK)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0, labelsize=9)
    handles = [Patch(facecolor=CAUSE_COLOURS[c], edgecolor="none", label=c.replace("_", " ")) for c in causes]
    figure = axes.get_figure(root=True)
    assert figure is not None
    legend(figure, handles, 5)


def _totals(each: RunValidation) -> tuple[float, float]:
    return each.idle.predicted, each.idle.measured or 0.0
