"""Files of `odc sharding`: sharding.csv, sharding.json, and a picture of speedup, memory and traffic."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_sim.header import rows_as_csv, write_bytes, write_json
from odc_sim.plots_style import FAINT, INK, SCHEDULE_COLOURS, SMALL, legend, new_figure, save_png, tidy
from odc_sim.sharding import SHOWN
from odc_sim.sharding_study import ShardingResults
from odc_sim.table_sharding import title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

APART = {"collective": -0.13, "collective-deferred": 0.0, "odc": 0.13}
"""Of a line, so that equal values do not hide each other."""
NAMES = {"collective": "with collectives", "collective-deferred": "deferred", "odc": "on demand"}


def write_sharding(out: Path, results: ShardingResults, data: Mapping[str, Any]) -> list[Path]:
    """All three, `data` as the JSON file; their paths."""
    rows = [asdict(row) for row in results.rows]
    for row in rows:
        row["speedup_ci95_low"], row["speedup_ci95_high"] = row.pop("speedup_ci95")
    paths = [out / f"sharding.{kind}" for kind in ("csv", "json", "png")]
    write_bytes(paths[0], rows_as_csv(rows).encode())
    write_json(paths[1], dict(data))
    save_png(sharding_figure(results), paths[2])
    return paths


def sharding_figure(results: ShardingResults) -> "Figure":
    """A line for each strategy: its speedup, memory and traffic in both transports."""
    from matplotlib.lines import Line2D

    names = list(dict.fromkeys(row.strategy for row in results.rows))
    figure = new_figure(1.5 + 0.27 * len(names))
    speed, memory, network = figure.subplots(1, 3, sharey=True, width_ratios=[1.3, 1.0, 1.0])
    limit_gb = results.inputs.machine.cluster.device.memory_bytes / 1e9
    for row in results.rows:
        y, colour = names.index(row.strategy) + APART[row.transport], SCHEDULE_COLOURS[row.transport]
        look = {"s": 42, "color": colour, "alpha": 1.0 if row.fits else 0.3, "linewidth": 0, "zorder": 3}
        speed.scatter([row.speedup], [y], **look)
        memory.scatter([row.peak_bytes / 1e9], [y], **look)
        network.scatter([row.network_bytes / 1e9], [y], **look)
    for y, name in enumerate(names):
        ends = [row.speedup for row in results.rows if row.strategy == name]
        speed.plot([min(ends), max(ends)], [y, y], color="#D0D0D0", linewidth=1.0, zorder=2)
    speed.axvline(1.0, color=FAINT, linewidth=1.0, linestyle="--")
    memory.axvline(limit_gb, color=FAINT, linewidth=1.0, linestyle="--")
    memory.text(limit_gb, -0.75, f" {limit_gb:.0f} GB", fontsize=SMALL, color=FAINT, va="center")
    labels = [f"{SHOWN[name].split(',')[0]}   {name}" if name in SHOWN else name for name in names]
    speed.set_yticks(range(len(names)), labels)
    speed.set_ylim(len(names) - 0.4, -1.1)
    for axes, text in (
        (speed, "speedup over GGG with collectives"),
        (memory, "peak memory, estimate (GB)"),
        (network, "a node to others, a minibatch (GB)"),
    ):
        axes.set_xlabel(text, color=INK, fontsize=SMALL + 0.5)
        tidy(axes, grid="x")
        axes.tick_params(axis="y", length=0)
        if axes is not speed:
            axes.set_xlim(left=0)
    handles = [
        Line2D([], [], marker="o", linestyle="", color=SCHEDULE_COLOURS[key], label=label)
        for key, label in NAMES.items()
    ]
    handles.append(Line2D([], [], marker="o", linestyle="", color=FAINT, alpha=0.4, label="pale: does not fit"))
    legend(figure, handles, 4)
    figure.supxlabel(title(results), x=0.01, ha="left", fontsize=SMALL, color=FAINT)
    return figure
