"""Sequence lengths as text: a line of percentiles and a histogram of bars, for `odc workloads NAME`."""

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from odc_sim.length_stats import LengthStats

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console
    from rich.table import Table

    from odc_sim.workload import Workload

EIGHTHS = " ▏▎▍▌▋▊▉█"
MOST_LINES = 15


def lengths_table(stats: LengthStats) -> "Table":
    """Mean, standard deviation, extremes and percentiles, in tokens."""
    from rich.table import Table

    cells = {name: f"{getattr(stats, name):,.0f}" for name in ("mean", "sd", "min", "p10", "p50", "p90", "p99", "max")}
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in cells:
        table.add_column(name, justify="right", no_wrap=True)
    table.add_row(*cells.values())
    return table


def workloads_table(workloads: "Sequence[tuple[Workload, LengthStats]]") -> "Table":
    """One line for each workload: kind, lengths in tokens, what it is."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in ("workload", "kind"):
        table.add_column(name, no_wrap=True)
    for name in ("mean", "p50", "p90", "max"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what")
    for workload, stats in workloads:
        lengths = (f"{value:,.0f}" for value in (stats.mean, stats.p50, stats.p90, workload.max_tokens))
        table.add_row(workload.name, workload.kind, *lengths, workload.description)
    return table


def histogram_lines(stats: LengthStats, width: int = 80, symbols: bool = True) -> list[str]:
    """One line for each range of lengths: its tokens, its share of the samples, and a bar that keeps to `width`.

    Bins are joined until there are at most 15. `symbols`: whether block characters can be shown; else bars are of "#".
    """
    edges, counts = stats.histogram_edges, stats.histogram_counts
    step = -(-counts.size // MOST_LINES)
    sums = np.add.reduceat(counts, np.arange(0, counts.size, step))
    bounds = [*edges[:-1:step].tolist(), float(edges[-1])]
    names = [f"{low:,.0f} - {high:,.0f}" for low, high in pairwise(bounds)]
    column = max(map(len, names))
    room = max(width - column - 9, 8)
    most = max(int(sums.max(initial=0)), 1)
    lines = []
    for name, count in zip(names, sums.tolist(), strict=True):
        bar = _bar(room * count / most, symbols)
        lines.append(f"{name:>{column}} {100 * count / stats.num_samples:5.1f} % {bar}".rstrip())
    return lines


def print_lengths(stats: LengthStats, console: "Console", name: str = "", drawn: bool = False) -> None:
    """Name, percentiles and histogram of lengths, `drawn` or all there are; plain text when piped."""
    symbols = console.encoding.lower().startswith("utf")
    start = f"{name}: " if name else ""
    text = f"{start}{stats.num_samples:,} samples{' drawn' * drawn}, {stats.total_tokens:,} tokens"
    if stats.group_correlation is not None:
        text += f", correlation of one prompt's rollouts {stats.group_correlation:.2f}"
    console.print(text, style="bold", markup=False, highlight=False)
    console.print(lengths_table(stats))
    console.print()
    console.print("tokens, share of samples", markup=False, highlight=False)
    for line in histogram_lines(stats, console.width - 1, symbols):
        console.print(line, markup=False, highlight=False, no_wrap=True)


def _bar(length: float, symbols: bool) -> str:
    """A bar of `length` characters, to an eighth where symbols can be shown; something above zero always shows."""
    if not symbols:
        return "#" * (max(round(length), 1) if length > 0 else 0)
    eighths = max(round(length * 8), 1) if length > 0 else 0
    return EIGHTHS[8] * (eighths // 8) + EIGHTHS[eighths % 8].strip()
