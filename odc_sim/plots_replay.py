"""The picture of a replay: how long a minibatch takes as recorded, at each kind of barrier, and perfectly balanced."""

from typing import TYPE_CHECKING

import numpy as np

from odc_sim.plots_style import CAUSE_COLOURS, FAINT, INK, SMALL, TIMES, legend, new_figure, tidy
from odc_sim.replay import Floats, Replay
from odc_sim.schedules import BARRIERS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PARTS = {
    "compute": ("compute, mean of ranks", CAUSE_COLOURS["imbalance_minibatch"]),
    "tail": ("optimizer, publish", CAUSE_COLOURS["optimizer"]),
    "wait": ("waits for slower ranks", "#E3E3E3"),
    "rest": ("waits, transfers and everything else", FAINT),
}
BAR = 0.7


def replay_figure(replay: Replay) -> "Figure":
    """Bars of seconds a minibatch, each split into compute and what ranks do instead; with the speedup over the
    recording."""
    from matplotlib.patches import Patch

    bars: list[tuple[str, Floats | None]] = [("as recorded", replay.recorded_s)]
    bars += [(f"ranks meet at every {barrier}", replay.makespan_s(barrier)) for barrier in BARRIERS]
    bars.append(("the same, perfectly balanced", replay.balanced_s))
    figure = new_figure(2.6)
    axes = figure.add_subplot()
    longest_s = max(float(makespan_s.mean()) for _, makespan_s in bars if makespan_s is not None)
    scale, unit = (1.0, "s") if longest_s >= 1.0 else (1e3, "ms")
    compute_s, tail_s = float(replay.busy_s.mean()) / replay.ranks, float(replay.tail_s.mean())
    for y, (_, makespan_s) in enumerate(bars):
        if makespan_s is None:
            axes.text(0.01 * longest_s * scale, y, "hangs: microbatch counts differ", va="center", fontsize=SMALL)
            continue
        total_s = float(np.mean(makespan_s))
        left = 0.0
        widths = {"compute": compute_s, "tail": tail_s, "rest" if y == 0 else "wait": total_s - compute_s - tail_s}
        for part, seconds in widths.items():
            axes.barh(y, max(seconds, 0.0) * scale, BAR, left=left * scale, color=PARTS[part][1], linewidth=0)
            left += max(seconds, 0.0)
        over = float(replay.recorded_s.sum() / makespan_s.sum())
        text = f"{total_s * scale:.3g} {unit}" + (f"   {TIMES} {over:.2f}" if y else "")
        axes.text(left * scale + 0.01 * longest_s * scale, y, text, va="center", fontsize=SMALL, color=INK)
    axes.set_yticks(range(len(bars)), [name for name, _ in bars])
    axes.set_ylim(len(bars) - 0.5, -0.5)
    axes.set_xlim(0.0, longest_s * scale * 1.16)
    axes.set_xlabel(f"a minibatch, mean ({unit})", color=INK)
    tidy(axes, grid="x")
    axes.tick_params(axis="y", length=0, labelsize=9.5)
    legend(figure, [Patch(facecolor=colour, edgecolor="none", label=label) for label, colour in PARTS.values()], 4)
    return figure
