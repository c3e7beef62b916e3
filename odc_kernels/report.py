"""Tables and plots of a benchmark run, from its rows.csv and nothing else.

    python -m odc_kernels.report reports/kernels-h200
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

COLLECTIVE = {"gather": "all_gather", "scatter_accumulate": "reduce_scatter"}
"""The collective that each one-sided transfer replaces."""


def write(folder: Path) -> None:
    """tables.md, bandwidth.png and, where transfers were timed beside compute, overlap.png."""
    rows = read(folder / "rows.csv")
    (folder / "tables.md").write_text(tables(rows), encoding="utf-8")
    _plot_bandwidth(rows, folder / "bandwidth.png")
    if any(row["slowdown_transfer"] for row in rows):
        _plot_overlap(rows, folder / "overlap.png")


def read(path: Path) -> list[dict[str, Any]]:
    """Rows with numbers where the file has numbers, None where it has nothing."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def line(row: Mapping[str, Any]) -> str:
    """One row for people, while it is measured."""
    text = f"{row['op']:18} {row['backend']:26} {size(row['bytes']):>8} {row['p50_s'] * 1e6:10.1f} us "
    text += f"{row['bytes_per_s'] / 1e9:7.1f} GB/s"
    if row["slowdown_transfer"] is not None:
        text += f"   beside: {row['transfer_beside_s'] * 1e6:9.1f} us x{row['slowdown_transfer']:.3f}, "
        text += f"product x{row['slowdown_compute']:.3f}" + (" flagged" if row["flagged"] else "")
    return text


def tables(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: bandwidth by size, small sizes in microseconds, and beside compute."""
    sizes = sorted({row["bytes"] for row in rows})
    parts = ["GB/s received per rank, alone:\n\n" + _by_size(rows, sizes, lambda row: f"{row['bytes_per_s'] / 1e9:.1f}")]
    small = [num_bytes for num_bytes in sizes if num_bytes < 1 << 20]
    if small:
        parts.append("Microseconds a call, alone:\n\n" + _by_size(rows, small, lambda row: f"{row['p50_s'] * 1e6:.1f}"))
    beside = [row for row in rows if row["slowdown_transfer"] is not None]
    if beside:
        lines = ["| transfer | shard | alone | beside | transfer slowed | product slowed | against the collective beside |"]
        lines.append("|---|---|---|---|---|---|---|")
        for row in beside:
            faster = _against(row, beside, "transfer_beside_s")
            lines.append(
                f"| {row['op']} {row['backend']} | {size(row['bytes'])} | {row['transfer_alone_s'] * 1e6:.0f} us "
                f"| {row['transfer_beside_s'] * 1e6:.0f} us | x{row['slowdown_transfer']:.3f} "
                f"| x{row['slowdown_compute']:.3f}{' (flagged)' if row['flagged'] else ''} | {faster} |"
            )
        parts.append("Beside matrix products (flagged: a slowdown below 1, a measuring error):\n\n" + "\n".join(lines))
    return "\n\n".join(parts) + "\n"


def size(num_bytes: int) -> str:
    """64 KiB."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:g} {unit}"
    return f"{num_bytes} B"


def _by_size(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], show: Any) -> str:
    lines = ["| transfer | " + " | ".join(size(num_bytes) for num_bytes in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        cells = {row["bytes"]: show(row) for row in rows if (row["op"], row["backend"]) == (op, backend)}
        lines.append(f"| {op} {backend} | " + " | ".join(cells.get(num_bytes, "") for num_bytes in sizes) + " |")
    return "\n".join(lines)


def _against(row: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], field: str) -> str:
    """How many times faster than the plain collective of the same size."""
    for other in rows:
        same = (other["op"], other["bytes"]) == (COLLECTIVE.get(row["op"]), row["bytes"])
        if same and "-" not in other["backend"]:
            return f"{other[field] / row[field]:.2f}x"
    return ""


def _value(name: str, text: str) -> Any:
    if text == "":
        return None
    if name in ("op", "backend", "dtype"):
        return text
    if name == "flagged":
        return text == "True"
    return int(text) if name in ("world_size", "bytes", "samples") else float(text)


def _plot_bandwidth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, ops in zip(figure.subplots(1, 2, sharey=True), COLLECTIVE.items(), strict=True):
        for op, backend in dict.fromkeys((r["op"], r["backend"]) for r in rows if r["op"] in ops and "@" not in r["backend"]):
            points = sorted((r["bytes"], r["bytes_per_s"] / 1e9) for r in rows if (r["op"], r["backend"]) == (op, backend))
            dashed = "--" if op in COLLECTIVE.values() else "-"
            axes.plot(*zip(*points, strict=True), dashed, marker="o", markersize=3, label=f"{op} {backend}")
        axes.set_xscale("log", base=2)
        ticks = sorted({row["bytes"] for row in rows})
        axes.set_xticks(ticks, [size(num_bytes) for num_bytes in ticks], fontsize=7)
        axes.set_xlabel("shard per rank")
        axes.set_title(" and ".join(ops))
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    figure.axes[0].set_ylabel("GB/s received per rank (median)")
    figure.savefig(path, dpi=110)


def _plot_overlap(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    beside = [row for row in rows if row["slowdown_transfer"] is not None]
    sizes = {row["bytes"] for row in beside}
    largest = 64 << 20 if 64 << 20 in sizes else max(sizes)  # where the target is
    shown = [row for row in beside if row["bytes"] == largest]
    figure = Figure(figsize=(11, 0.9 + 0.3 * len(shown)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [f"{row['op']} {row['backend']}" for row in shown]
    left.barh(names, [row["transfer_beside_s"] * 1e3 for row in shown], color="#9ecae1", label="beside products")
    left.barh(names, [row["transfer_alone_s"] * 1e3 for row in shown], height=0.4, color="#08519c", label="alone")
    left.set_xlabel(f"ms a transfer of {size(largest)} shards")
    left.invert_yaxis()
    left.legend(fontsize=7)
    right.barh(names, [(row["slowdown_compute"] - 1) * 100 for row in shown], color="#fdae6b")
    right.set_xlabel("matrix product slowed by %")
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
