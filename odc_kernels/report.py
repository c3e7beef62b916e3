"""Tables and plots of a benchmark run, from its rows.csv and beside.csv and nothing else.

python -m odc_kernels.report reports/kernels-h200
"""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TARGET_BYTES = 64 << 20
"""The size that the plot of transfers beside products shows."""
COLLECTIVE = {"gather": "all_gather", "scatter_accumulate": "reduce_scatter"}
"""The collective that each one-sided transfer replaces."""


def write(folder: Path) -> None:
    """tables.md, bandwidth.png and, where transfers were timed beside compute, beside.png."""
    rows = read(folder / "rows.csv")
    beside = read(folder / "beside.csv") if (folder / "beside.csv").exists() else []
    (folder / "tables.md").write_text(tables(rows, beside), encoding="utf-8")
    _plot_bandwidth(rows, folder / "bandwidth.png")
    if beside:
        _plot_beside(beside, folder / "beside.png")


def read(path: Path) -> list[dict[str, Any]]:
    """Rows, with numbers where the file has numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def line(row: Mapping[str, Any]) -> str:
    """One row for people, while it is measured."""
    name = f"{row['op']} {row['backend']}"
    return f"{name:42} {size(row['bytes']):>8} {row['p50_s'] * 1e6:9.1f} us {row['bytes_per_s'] / 1e9:7.1f} GB/s"


def beside_line(row: Mapping[str, Any]) -> str:
    """The same for a row of beside.csv."""
    return (
        f"{'':42} beside {row['gemm_size']}: {row['transfer_beside_s'] * 1e6:8.1f} us x{row['slowdown_transfer']:.3f}, "
        f"product {row['gemm_beside_s'] * 1e6:8.1f} us x{row['slowdown_compute']:.3f}, "
        f"lost {row['compute_lost_s'] * 1e6:.1f} us{_flag(row)}"
    )


def tables(rows: Sequence[Mapping[str, Any]], beside: Sequence[Mapping[str, Any]]) -> str:
    """Markdown: bandwidth by size, small sizes in microseconds, and beside products."""
    sizes = sorted({row["bytes"] for row in rows})
    parts = [
        "GB/s received per rank, alone:\n\n" + _by_size(rows, sizes, lambda row: f"{row['bytes_per_s'] / 1e9:.1f}")
    ]
    small = [num_bytes for num_bytes in sizes if num_bytes <= 1 << 20]
    if small:
        parts.append("Microseconds a call, alone:\n\n" + _by_size(rows, small, lambda row: f"{row['p50_s'] * 1e6:.1f}"))
    for gemm_size in sorted({row["gemm_size"] for row in beside}, reverse=True):
        shown = [row for row in beside if row["gemm_size"] == gemm_size]
        sizes = sorted({row["bytes"] for row in shown})
        parts.append(
            f"Beside products of {gemm_size} x {gemm_size} bf16 matrices: microseconds a transfer, how much longer a "
            "product takes, and microseconds of compute that one transfer costs (* flagged: a slowdown below 1, a "
            "measuring error):\n\n"
            + _by_size(
                shown,
                sizes,
                lambda row: (
                    f"{row['transfer_beside_s'] * 1e6:.0f}, {row['slowdown_compute'] - 1:+.1%}, "
                    f"{row['compute_lost_s'] * 1e6:.0f}{_flag(row)}"
                ),
            )
        )
    return "\n\n".join(parts) + "\n"


def _flag(row: Mapping[str, Any]) -> str:
    return " *" if row["flagged"] else ""


def size(num_bytes: int) -> str:
    """64 KiB."""
    for unit, scale in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:g} {unit}"
    return f"{num_bytes} B"


def _by_size(rows: Sequence[Mapping[str, Any]], sizes: Sequence[int], show: Any) -> str:
    lines = [
        "| transfer | " + " | ".join(size(num_bytes) for num_bytes in sizes) + " |",
        "|---" * (len(sizes) + 1) + "|",
    ]
    for op, backend in dict.fromkeys((row["op"], row["backend"]) for row in rows):
        cells = {row["bytes"]: show(row) for row in rows if (row["op"], row["backend"]) == (op, backend)}
        lines.append(f"| {op} {backend} | " + " | ".join(cells.get(num_bytes, "") for num_bytes in sizes) + " |")
    return "\n".join(lines)


def _value(name: str, text: str) -> Any:
    if name in ("op", "backend", "dtype"):
        return text
    if name == "flagged":
        return text == "True"
    return int(text) if name in ("world_size", "bytes", "samples", "gemm_size") else float(text)


def _plot_bandwidth(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    for axes, ops in zip(figure.subplots(1, 2, sharey=True), COLLECTIVE.items(), strict=True):
        for op, backend in dict.fromkeys((r["op"], r["backend"]) for r in rows if r["op"] in ops):
            if "@" in backend:
                continue
            points = sorted(
                (r["bytes"], r["bytes_per_s"] / 1e9) for r in rows if (r["op"], r["backend"]) == (op, backend)
            )
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


def _plot_beside(beside: Sequence[Mapping[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    sizes = {row["bytes"] for row in beside}
    num_bytes = TARGET_BYTES if TARGET_BYTES in sizes else max(sizes)
    shown = [row for row in beside if row["bytes"] == num_bytes and "@" not in row["backend"]]
    names = list(dict.fromkeys(f"{row['op']} {row['backend']}" for row in shown))
    gemm_sizes = sorted({row["gemm_size"] for row in shown})
    figure = Figure(figsize=(11, 1.2 + 0.28 * len(names)), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    for i, gemm_size in enumerate(gemm_sizes):
        rows = [row for row in shown if row["gemm_size"] == gemm_size]
        at = [names.index(f"{row['op']} {row['backend']}") + (i - 0.5) * 0.36 for row in rows]
        label = f"beside products of {gemm_size}"
        left.barh(at, [row["transfer_beside_s"] * 1e3 for row in rows], height=0.34, label=label)
        right.barh(at, [(row["slowdown_compute"] - 1) * 100 for row in rows], height=0.34)
    alone = {f"{row['op']} {row['backend']}": row["transfer_alone_s"] * 1e3 for row in shown}
    left.plot(alone.values(), [names.index(name) for name in alone], "k|", markersize=11, label="alone")
    left.set_yticks(range(len(names)), names)
    left.set_xlabel(f"ms a transfer, shards of {size(num_bytes)}")
    right.set_xlabel("product takes longer by %")
    left.invert_yaxis()
    figure.legend(*left.get_legend_handles_labels(), fontsize=7, loc="outside upper center", ncols=3)
    for axes in (left, right):
        axes.tick_params(labelsize=7)
        axes.grid(axis="x", alpha=0.3)
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
