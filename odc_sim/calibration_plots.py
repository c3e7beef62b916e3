"""The figures of a calibration's report."""

from typing import TYPE_CHECKING

import numpy as np

from odc_sim.calibration import Calibration
from odc_sim.calibration_tables import rate, simulated_s, size
from odc_sim.costs_measured import line_of, samples_of
from odc_sim.plots_style import FAINT, INK, SCHEDULE_COLOURS, SMALL, new_figure, tidy

if TYPE_CHECKING:
    from matplotlib.figure import Figure

OP_COLOURS = {
    "all_gather": SCHEDULE_COLOURS["collective"],
    "reduce_scatter": SCHEDULE_COLOURS["collective-deferred"],
    "gather": SCHEDULE_COLOURS["odc"],
    "scatter_accumulate": SCHEDULE_COLOURS["odc-local-sum"],
}
DIRECTION_COLOURS = {"forward": "#0072B2", "backward": "#E69F00", "backward_recompute": "#D55E00"}
ROW_INCHES = 2.7


def bandwidth_figure(calibration: Calibration) -> "Figure":
    """GB/s received per rank by size of the shard."""
    figure = new_figure(3.8)
    axes = figure.subplots()
    for op, backend in dict.fromkeys((row.op, row.backend) for row in calibration.transfers):
        rows = [row for row in calibration.transfers if (row.op, row.backend) == (op, backend)]
        points = sorted({(row.bytes, rate(row) / 1e9) for row in rows})
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=OP_COLOURS[op], label=f"{op} ({backend})")
    sizes = sorted({row.bytes for row in calibration.transfers})
    ticks = sizes[:: max(1, len(sizes) // 10)]
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [size(num_bytes) for num_bytes in ticks], fontsize=SMALL)
    axes.set_xlabel("shard of each rank", color=INK)
    axes.set_ylabel("GB/s received per rank, alone", color=INK)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=SMALL, labelcolor=INK)
    tidy(axes, grid="y")
    return figure


def cost_figure(calibration: Calibration) -> "Figure":
    """For every model: a layer's measured times by tokens, how far from each the simulator and (faint) the line is."""
    models = list(dict.fromkeys(fit.model for fit in calibration.fits))
    figure = new_figure(ROW_INCHES * len(models) + 0.4)
    rows = figure.subplots(len(models), 2, squeeze=False)
    for model, (left, right) in zip(models, rows, strict=True):
        for fit in calibration.fits:
            if fit.model != model or fit.unit != "layer":
                continue
            colour = DIRECTION_COLOURS[fit.direction]
            samples = [s for s in samples_of(calibration, fit) if not s.flagged]
            for held_out, marker in ((False, "o"), (True, "x")):
                shown = [s for s in samples if s.heldout == held_out]
                tokens = [s.tokens for s in shown]
                times = [s.p50_s for s in shown]
                shapes = [s.lengths for s in shown]
                line, simulated = line_of(fit)(shapes), simulated_s(calibration, fit, shapes)
                label = f"{fit.direction}{', held out' if held_out else ''}"
                style = {"color": colour, "marker": marker, "s": 18, "linewidths": 1}
                left.scatter(tokens, [s.p50_s * 1e3 for s in shown], label=label, **style)
                for seconds, alpha in ((line, 0.3), (simulated, 1.0)):
                    right.scatter(tokens, 100 * (seconds / np.array(times) - 1.0), alpha=alpha, **style)
        left.set_ylabel(f"{model}\nms a layer", color=INK)
        left.set_yscale("log")
        right.set_ylabel("simulated (faint: line)\nminus measured, %", color=INK)
        right.axhline(0, color=FAINT, linewidth=0.8)
        for axes in (left, right):
            axes.set_xscale("log", base=2)
            tidy(axes, grid="y")
    rows[0][0].legend(frameon=False, fontsize=7, labelcolor=INK)
    for axes in rows[-1]:
        axes.set_xlabel("tokens of the microbatch", color=INK)
    return figure
