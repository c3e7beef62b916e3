"""Draws the figures and prints most tables of docs/when-odc-loses.md from the sweeps' CSV files beside this script.

    python reports/when-odc-loses/figures.py

Where a sweep has just run, its sweep.json is read too, for bounds.csv: the CSV of a sweep has no bounds.
"""

import csv
import json
from collections.abc import Callable, Iterable
from math import exp, log, nan
from pathlib import Path
from statistics import median
from typing import Any

from odc_sim.hardware import load_cluster
from odc_sim.plots_style import INK, legend, new_figure, save_png, tidy

HERE = Path(__file__).parent
BASE = "collective/lb-micro"
MINI, MICRO = "odc/lb-mini", "odc/lb-micro"
DEFERRED = "collective-deferred/lb-micro"
COLOURS = {"100": "#000000", "400": "#CC79A7", "800": "#0072B2", "3200": "#009E73"}
LENGTHS = ["1", "2", "4", "8", "16", "32", "64"]
CLUSTERS = {
    "A100 100G": "cloud-100g",
    "A100 400G": HERE / "a100-400g.toml",
    "A100 800G": "a100-nvswitch-roce",
    "A100 3200G": HERE / "a100-3200g.toml",
    "H100 100G": HERE / "h100-100g.toml",
    "H100 400G": HERE / "h100-400g.toml",
    "H100 800G": HERE / "h100-800g.toml",
    "H100 3200G": HERE / "h100-3200g.toml",
}

Point = dict[str, dict[str, str]]


def read(sweep: str, *columns: str) -> dict[tuple[str, ...], Point]:
    """The rows of a sweep that ran, by the values of its factors and then by schedule/policy."""
    points: dict[tuple[str, ...], Point] = {}
    with (HERE / sweep / "sweep.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            if row["speedup"]:
                label = f"{row['schedule']}/{row['policy']}"
                points.setdefault(tuple(row[c] for c in columns), {})[label] = row
    return points


def gain(point: Point, label: str) -> float:
    """Speedup over the baseline; nan where it did not run."""
    return float(point[label]["speedup"]) if label in point else nan


def best(point: Point, odc: bool) -> str:
    """The fastest that fits, with ODC or without; the baseline where nothing fits."""
    fitting = [k for k, row in point.items() if row["fits"] == "True" and k.startswith("odc") == odc]
    return max(fitting or [BASE], key=lambda k: gain(point, k))


def over_stock(point: Point) -> float:
    """Best ODC row over best row of stock FSDP2, both fitting."""
    return gain(point, best(point, odc=True)) / gain(point, best(point, odc=False))


def per_1000_s(row: dict[str, str]) -> str:
    """Samples per 1,000 s and device."""
    return f"{1e3 * float(row['samples_per_s_per_device']):.0f}"


def caps(bound: dict[str, str]) -> tuple[float, float, float]:
    """Largest sample over balanced share; the most any policy gains; the same if the largest sample were in 4 parts."""
    share, largest, lower, speedup = (
        float(bound[k]) for k in ("balanced_share", "largest_sample", "lower_bound", "speedup")
    )
    return largest / share, speedup, speedup * lower / max(share, largest / 4.0)


def crossing(points: dict[tuple[str, ...], Point], value: Callable[[Point], float], *where: str) -> str:
    """The longest sample at which `value` comes to exceed 1 for good, interpolated over the logarithm of length."""
    at = [(float(k), value(points[*where, k])) for k in LENGTHS if (*where, k) in points]
    below = [i for i, (_, y) in enumerate(at) if y < 1.0]
    if not below:
        return f"below {at[0][0]:.0f}K"
    if below[-1] == len(at) - 1:
        return "above 64K"
    (x0, y0), (x1, y1) = at[below[-1]], at[below[-1] + 1]
    return f"{exp(log(x0) + (1.0 - y0) / (y1 - y0) * log(x1 / x0)):.0f}K"


def hidden_tokens(node: str, nodes: int) -> float:
    """G (1 - 1 / N) F / B: tokens a microbatch whose linear work takes as long as its transfers."""
    cluster = load_cluster(CLUSTERS[node])
    assert cluster.inter is not None
    flops = cluster.efficiency.linear * cluster.device.peak_flops
    return cluster.devices_per_node * (1.0 - 1.0 / nodes) * flops / cluster.inter.node_bytes_per_s


def table(title: str, head: Iterable[Any], rows: Iterable[Iterable[Any]]) -> None:
    """Print a Markdown table."""
    head = list(head)
    print(f"\n{title}\n\n| {' | '.join(map(str, head))} |\n|{'---|' * len(head)}")
    for row in rows:
        print("| " + " | ".join(f"{x:.2f}" if isinstance(x, float) else str(x) for x in row) + " |")


def write_bounds() -> None:
    """bounds.csv: the bounds of the points of the minibatch sweep."""
    path = HERE / "minibatch" / "sweep.json"
    if not path.is_file():
        return
    rows = [
        {**point["settings"], **point["bounds"]} for point in json.loads(path.read_text(encoding="utf-8"))["points"]
    ]
    with (HERE / "minibatch" / "bounds.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def tables() -> None:
    """Print what the page quotes."""
    length, labels = read("length", "nodes", "longest_sample"), (MINI, MICRO)
    table(
        "break-even length",
        ["nodes", "G (1 - 1/N) F / B", "mini / base", "micro / base", "best odc / best stock"],
        [
            [
                node,
                f"{hidden_tokens(node, 2) / 1e3:.0f}K",
                *(crossing(length, lambda p, k=k: gain(p, k), node) for k in labels),
                crossing(length, over_stock, node),
            ]
            for node in CLUSTERS
        ],
    )
    networks, counts = ("100", "400", "800", "3200"), ("1", "2", "4", "8")
    nodes = read("nodes", "network", "nodes", "longest_sample")
    models = read("models", "network", "model", "longest_sample")
    for name, points, middles in (("nodes", nodes, counts), ("models", models, ("1.5B", "7B", "14B", "32B"))):
        for longest in ("8", "64"):
            table(
                f"{name}, {longest}K: odc + lb-mini over base (over best stock)",
                ["", *networks],
                [
                    [
                        middle,
                        *(
                            f"{gain(p, MINI):.2f} ({over_stock(p):.2f}, {best(p, odc=False)}, "
                            f"{'fits' if p[MINI]['fits'] == 'True' else 'does not fit'})"
                            for p in (points[network, middle, longest] for network in networks)
                        ),
                    ]
                    for middle in middles
                ],
            )
    equal = read("equal", "network", "every_sample")
    table(
        "equal lengths: odc / collective-deferred",
        ["every sample", *networks],
        [
            [k, *(f"{gain(equal[n, k], MICRO):.2f} / {gain(equal[n, k], DEFERRED):.2f}" for n in networks)]
            for k in ("1", "4", "16", "64")
        ],
    )
    minibatch = read("minibatch", "workload", "minibatch_size")
    with (HERE / "minibatch" / "bounds.csv").open(encoding="utf-8") as file:
        bounds = {(row["workload"], row["minibatch_size"]): row for row in csv.DictReader(file)}
    table(
        "minibatch size",
        [
            "workload",
            "size",
            "odc + lb-mini",
            "odc + lb-micro",
            "best stock",
            "",
            "largest / share",
            "cap",
            "cap, split in 4",
        ],
        [
            [
                *key,
                gain(p, MINI),
                gain(p, MICRO),
                gain(p, best(p, odc=False)),
                best(p, odc=False),
                *caps(bounds[key]),
            ]
            for key, p in minibatch.items()
        ],
    )
    packing = read("packing", "nodes", "minibatch_size", "cap")
    table(
        "samples per 1,000 s and device, by cap",
        ["nodes", "size", "cap", "collective + lb-micro", "odc + lb-mini", "best stock", ""],
        [
            [*key, *(per_1000_s(p[k]) for k in (BASE, MINI, best(p, odc=False))), best(p, odc=False)]
            for key, p in packing.items()
        ],
    )
    engines = read("engines", "engine", "nodes", "longest_sample")
    both = ("fast", "event")
    apart: dict[str, list[float]] = {}  # |event / fast - 1| of the speedup of every odc row, by nodes
    for (engine, node, k), p in engines.items():
        if engine == "fast":
            event = engines["event", node, k]
            apart.setdefault(node, []).extend(abs(gain(event, x) / gain(p, x) - 1.0) for x in (MINI, MICRO))
    table(
        "odc + lb-mini in both engines, and where it crosses 1",
        ["nodes", *(f"{k}K fast, event" for k in LENGTHS[2:]), *both, *(f"micro {e}" for e in both), "odc apart by"],
        [
            [
                node,
                *(", ".join(f"{gain(engines[e, node, k], MINI):.2f}" for e in both) for k in LENGTHS[2:]),
                *(crossing(engines, lambda p, k=k: gain(p, k), e, node) for k in (MINI, MICRO) for e in both),
                f"{max(apart[node]):.1%}",
            ]
            for node in apart
        ],
    )
    print(f"\nin the median {median(x for xs in apart.values() for x in xs):.1%} apart")
    one = read("engines-one-node", "engine", "workload", "longest_sample")
    table(
        "one node in both engines",
        ["workload", "longest", *(f"{k} {e}" for k in (MINI, MICRO, DEFERRED) for e in both)],
        [
            [*key, *(gain(one[e, *key], k) for k in (MINI, MICRO, DEFERRED) for e in both)]
            for key in dict.fromkeys(k[1:] for k in one)
        ],
    )


def breakeven() -> None:
    """Speedup against length: A100 left, H100 right, a line a network; dots are the event engine."""
    length = read("length", "nodes", "longest_sample")
    engines = read("engines", "engine", "nodes", "longest_sample")
    figure = new_figure(3.6)
    for axes, device in zip(figure.subplots(1, 2, sharey=True), ("A100", "H100"), strict=True):
        for network, colour in COLOURS.items():
            at = [length[f"{device} {network}G", k] for k in LENGTHS]
            xs = [float(k) for k in LENGTHS]
            axes.plot(xs, [gain(p, MINI) for p in at], color=colour, linewidth=1.7)
            axes.plot(xs, [over_stock(p) for p in at], color=colour, linewidth=1.2, linestyle=(0, (4, 1.6)))
            event = [k for k in LENGTHS if ("event", f"{device} {network}G", k) in engines]
            ys = [gain(engines["event", f"{device} {network}G", k], MINI) for k in event]
            axes.scatter([float(k) for k in event], ys, s=16, color=colour, zorder=3)
        _length_axis(axes, f"{device}: longest sample (K tokens)")
    figure.axes[0].set_ylabel("speedup of odc", color=INK)
    solid, dashed = ({"color": INK, "linestyle": s} for s in ("-", (0, (4, 1.6))))
    handles = [line(color=c, label=f"{n} Gbps a node") for n, c in COLOURS.items()]
    handles.append(line(label="odc + lb-mini over collective + lb-micro", **solid))
    handles.append(line(label="best odc over best stock FSDP2 that fits", **dashed))
    handles.append(line(label="the solid line in the event engine", color=INK, marker="o", markersize=4, linewidth=0))
    legend(figure, handles, 3)
    save_png(figure, HERE / "breakeven.png")


def by_nodes() -> None:
    """Speedup against nodes, 8K left, 64K right, a line a network."""
    nodes = read("nodes", "network", "nodes", "longest_sample")
    figure = new_figure(3.2)
    for axes, longest in zip(figure.subplots(1, 2, sharey=True), ("8", "64"), strict=True):
        for network, colour in COLOURS.items():
            counts = [1, 2, 4, 8]
            axes.plot(
                counts,
                [gain(nodes[network, str(n), longest], MINI) for n in counts],
                color=colour,
                linewidth=1.7,
                marker="o",
                markersize=4,
            )
        axes.axhline(1.0, color=INK, linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.set_xticks(counts, [str(n) for n in counts])
        axes.set_xlabel(f"nodes; longest sample {longest}K", color=INK)
        tidy(axes, grid="y")
    figure.axes[0].set_ylabel("speedup of odc + lb-mini", color=INK)
    figure.axes[0].set_ylim(bottom=0.0)
    legend(figure, [line(color=c, label=f"{n} Gbps a node") for n, c in COLOURS.items()], 4)
    save_png(figure, HERE / "nodes.png")


def line(**style: Any) -> Any:
    """An entry of a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **style)


def _length_axis(axes: Any, title: str) -> None:
    axes.axhline(1.0, color=INK, linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks([float(k) for k in LENGTHS], LENGTHS)
    axes.set_xlabel(title, color=INK)
    axes.set_ylim(bottom=0.0)
    tidy(axes, grid="y")


if __name__ == "__main__":
    write_bounds()
    tables()
    breakeven()
    by_nodes()
