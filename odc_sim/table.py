"""Results as text: one table that fits the terminal, then what a reader must know, then the advice."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from odc_sim.durations import CAUSE_WORDS
from odc_sim.results import Results, Row
from odc_sim.schedules import SCHEDULES

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

FULL_WIDTH = 120
PROVENANCE_LETTERS = {"measured": "m", "fitted": "f", "analytic": "a", "extrapolated": "x"}
EXPLAINED = ("microbatches", "provenance")
"""Columns that the legend tells about."""
LEAST_CAUSE = 0.005
"""A cause below this share of GPU time would be printed as 0 %."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """A column of the table: its heading (lines) and the text of a row's cell."""

    name: str
    heading: str
    cell: Callable[[Row], str]
    right: bool = True

    def width(self, rows: Sequence[Row]) -> int:
        """Characters the heading and the widest cell take."""
        return max(len(text) for text in (*self.heading.split("\n"), *map(self.cell, rows)))

    def align(self, text: str, rows: Sequence[Row]) -> str:
        """Padded on the left; rich would strip the blanks that stand for an absent mark on the right."""
        return text.rjust(self.width(rows)) if self.right else text


def columns_for(results: Results, width: int, symbols: bool = True) -> list[Column]:
    """The columns that fit `width` characters.

    Dropped until they do: provenance, microbatches, samples/s, the second cause, MFU (which goes with samples/s),
    bubble, the other cause.
    """
    rows, best = _running(results), best_row(results)
    factor, unit = _throughput_unit(rows)
    cross, more = (" ✗", "±") if symbols else (" !", "+-")

    def speedup(row: Row) -> str:
        low, high = row.speedup_ci95 or (0.0, 0.0)
        half = f"{(high - low) / 2:.2f}"
        text = f"{row.speedup:.2f}x " + ("base" if row.label == results.baseline else more + half.removeprefix("0"))
        return text + ("*" if row is best else " ")

    def causes(most: int) -> Callable[[Row], str]:
        return lambda row: ", ".join(f"{CAUSE_WORDS.get(c, c)} {100 * s:.0f} %" for c, s in top_causes(row, most))

    found = [
        Column(name="policy", heading="policy", cell=lambda row: row.policy, right=False),
        Column(name="schedule", heading="schedule", cell=lambda row: row.schedule, right=False),
        Column(
            name="samples",
            heading=f"samples\n{unit}",
            cell=lambda row: _number(row.samples_per_s_per_device, factor, 3 if factor == 1.0 else 1),
        ),
        Column(name="speedup", heading="speedup ", cell=speedup),
        Column(
            name="best",
            heading="best in\n%",
            cell=lambda row: "" if row.best_share is None else f"{100.0 * row.best_share:.0f}",
        ),
        Column(name="bubble", heading="bubble\n%", cell=lambda row: _number(row.bubble_rate, 100.0)),
        Column(name="idle", heading="idle\n%", cell=lambda row: _number(row.idle_rate, 100.0)),
        Column(name="causes", heading="mostly\nlost to", cell=causes(2), right=False),
        Column(name="mfu", heading="MFU\n%", cell=lambda row: _number(row.mfu, 100.0)),
        Column(name="microbatches", heading="micro-\nbatches", cell=_microbatches),
        Column(
            name="memory",
            heading="peak  \nGB  ",
            cell=lambda row: _number(row.peak_memory_bytes.get("total"), 1e-9) + ("  " if row.fits else cross),
        ),
        Column(name="provenance", heading="from", cell=provenance_letters, right=False),
    ]
    if all(row.best_share is None for row in rows):
        found = [column for column in found if column.name != "best"]
    for name in ("provenance", "microbatches", "samples", "second cause", "mfu", "bubble", "causes"):
        if sum(column.width(rows) + 1 for column in found) - 1 <= width:
            break
        if name == "second cause":
            shorter = Column(name="causes", heading="mostly\nlost to", cell=causes(1), right=False)
            found = [shorter if column.name == "causes" else column for column in found]
        else:
            found = [column for column in found if column.name != name]
    return found


def results_table(results: Results, *, width: int = FULL_WIDTH, symbols: bool = True) -> "Table":
    """The rows that ran, by policy in the order given, then by schedule; the fastest that fits is bold and has a star.

    `symbols`: whether the terminal can show characters like the cross of rows that do not fit.
    """
    from rich.table import Table
    from rich.text import Text

    rows, best = _running(results), best_row(results)
    columns = columns_for(results, width, symbols)
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    for column in columns:
        heading = "\n".join(column.align(line, rows) for line in column.heading.split("\n"))
        table.add_column(Text(heading), no_wrap=True, vertical="bottom")
    for row in rows:
        style = "bold" if row is best else "" if row.fits else "dim"
        table.add_row(*(Text(column.align(column.cell(row), rows)) for column in columns), style=style)
    return table


def print_results(results: Results, console: "Console") -> None:
    """The table, what cannot run, sources, notes and bounds, and the advice last. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    symbols = console.encoding.lower().startswith("utf")
    line(title(results), "bold")
    line()
    rows = _running(results)
    if rows:
        console.print(results_table(results, width=console.width, symbols=symbols))
        line()
    shown = {column.name for column in columns_for(results, console.width, symbols)}
    for text in legend_lines(results, symbols, shown):
        line(text, "dim")
    for text in (*_verdict_lines(results), *provenance_lines(results), *(f"note: {note}" for note in results.notes)):
        line(text)
    for text in bound_lines(results):
        line(text)
    if results.stability:
        line(str(results.stability.get("text", "")))
    line()
    line(results.advice, "bold")


def title(results: Results) -> str:
    """What was simulated, in one line."""
    if not results.rows:
        return "no rows"
    row = results.rows[0]
    return (
        f"{row.workload}, {row.model} on {row.devices} devices of {row.hardware}, {row.sharding}, {row.gather_dtype}"
        f" gathers: {row.minibatches} minibatches of {row.minibatch_size} samples a device, "
        f"max_tokens {row.max_tokens:,}, seed {row.seed}"
    )


def best_row(results: Results) -> Row | None:
    """The fastest row that runs and fits."""
    return max((row for row in results.rows if row.usable), key=lambda row: row.speedup or 0.0, default=None)


def top_causes(row: Row, most: int) -> list[tuple[str, float]]:
    """The largest idle causes with their share of GPU time, at most `most`, none that would be printed as 0 %."""
    found = [(cause, share) for cause, share in row.idle_causes.items() if share >= LEAST_CAUSE]
    return sorted(found, key=lambda item: -item[1])[:most]


def provenance_letters(row: Row) -> str:
    """One letter each for compute, transfers, optimizer, memory: m measured, f fitted, a analytic, x extrapolated."""
    return "".join(PROVENANCE_LETTERS.get(word, word) for word in row.provenance.values())


def provenance_lines(results: Results) -> list[str]:
    """Where the numbers come from, in words: one line if all rows agree, else one for each kind of row."""
    kinds: dict[str, list[Row]] = {}
    for row in _running(results):
        words = ", ".join(f"{part} {word}" for part, word in row.provenance.items())
        kinds.setdefault(words, []).append(row)
    lines = []
    for words, rows in kinds.items():
        where = "" if len(kinds) == 1 else f" ({provenance_letters(rows[0])}; {_cells(rows)})"
        lines.append(f"sources: {words or 'not stated'}{where}")
    return lines


def legend_lines(results: Results, symbols: bool = True, shown: Collection[str] = EXPLAINED) -> list[str]:
    """What the marks in the table mean; only those that occur, in the columns that are `shown`."""
    rows = _running(results)
    parts = []
    if best_row(results) is not None:
        parts.append("* fastest that fits")
    if any(row.best_share is not None for row in rows):
        parts.append("best in: how often it is that in repeats of the study")
    if any(not row.fits for row in rows):
        parts.append(f"{'✗' if symbols else '!'} does not fit the device's memory")
    if any(row.label == results.baseline for row in rows):
        parts.append("base: what speedups are relative to")
        parts.append(f"{'±' if symbols else '+-'}: 95 % of draws of minibatches, not how far off costs may be")
    lines = ["; ".join(parts)] if parts else []
    if rows:
        lines.append("lost to " + "; ".join(f"{names}: {meaning}" for names, meaning in _meanings(rows)))
        meanings = {
            "microbatches": "batches: a rank's microbatches, mean/most",
            "provenance": "from: see sources (f fitted, a analytic, m measured, x extrapolated)",
        }
        lines.append("; ".join(meaning for name, meaning in meanings.items() if name in shown))
    return [line for line in lines if line]


def _meanings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The causes that the table names, in its words, with what they mean."""
    named = {cause for row in rows for cause, _ in top_causes(row, 2)}
    meanings = (
        (
            ("imbalance_layer", "imbalance_microbatch", "imbalance_minibatch"),
            "waiting for slower ranks at that barrier",
        ),
        (("exposed_unshard", "exposed_reduce"), "transfers in the open"),
        (("port_contention",), "transfers sharing ports"),
        (("compute_slowdown",), "compute slowed by transfers beside it"),
        (("host",), "waiting for the launch"),
        (("optimizer", "publish"), "the step itself"),
    )
    found = ((tuple(c for c in causes if c in named), meaning) for causes, meaning in meanings)
    return [(", ".join(CAUSE_WORDS[c] for c in causes), meaning) for causes, meaning in found if causes]


def bound_lines(results: Results) -> list[str]:
    """What no policy can beat, and why."""
    bounds = results.bounds
    if "speedup" not in bounds:
        return _memory_lines(results)
    text = f"nothing that keeps samples in their minibatch can beat {bounds['speedup']:.2f}x"
    if {"lower_bound", "balanced_share", "largest_sample"} <= bounds.keys():
        share, sample = _seconds(bounds["balanced_share"]), _seconds(bounds["largest_sample"])
        text += (
            f": a minibatch needs {_seconds(bounds['lower_bound'])} at least, the longer of an even share of its work "
            f"({share} on average) and its longest sample ({sample})"
        )
    return [text, *_memory_lines(results)]


def _memory_lines(results: Results) -> list[str]:
    """The largest max_tokens that memory holds, by schedule: what does not fit could, and what fits could be packed
    more."""
    limits = {row.schedule: row.largest_max_tokens for row in _running(results)}
    texts = [f"{schedule} {tokens:,}" if tokens else f"{schedule} none" for schedule, tokens in limits.items()]
    return [f"memory holds any plan with max_tokens up to: {', '.join(texts)}"] if texts else []


def _verdict_lines(results: Results) -> list[str]:
    """Rows that cannot run, one line for each schedule and reason; then verdicts of rows that do run."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        if not row.runs:
            groups.setdefault((row.schedule, (row.verdict or "no result").split(":")[0]), []).append(row)
    lines = []
    for (schedule, _), rows in groups.items():
        policies = ", ".join(row.policy for row in rows)
        example = f"{rows[0].policy}: " if len(rows) > 1 else ""
        lines.append(f"cannot run: {schedule} with {policies} ({example}{rows[0].verdict or 'no result'})")
    lines += [f"{row.schedule} with {row.policy}: {row.verdict}" for row in _running(results) if row.verdict]
    return lines


def _running(results: Results) -> list[Row]:
    """Sorted by policy as first named, then by schedule in the toolkit's order."""
    policies = list(dict.fromkeys(row.policy for row in results.rows))
    known = [schedule.name for schedule in SCHEDULES]
    names = known + [row.schedule for row in results.rows if row.schedule not in known]
    rows = [row for row in results.rows if row.runs]
    return sorted(rows, key=lambda row: (policies.index(row.policy), names.index(row.schedule)))


def _cells(rows: Sequence[Row]) -> str:
    """What `rows` have in common, for a reader: their schedules, or the rows themselves where they are few."""
    if len(rows) <= 2:
        return ", ".join(f"{row.schedule} with {row.policy}" for row in rows)
    return ", ".join(dict.fromkeys(row.schedule for row in rows))


def _throughput_unit(rows: Sequence[Row]) -> tuple[float, str]:
    """Per second a device, or per 1,000 s where that would be small numbers only."""
    fastest = max((row.samples_per_s_per_device or 0.0 for row in rows), default=0.0)
    return (1.0, "/s/device") if fastest >= 1.0 else (1000.0, "/ks/device")


def _number(value: float | None, factor: float = 1.0, digits: int = 1) -> str:
    return "" if value is None else f"{value * factor:,.{digits}f}"


def _microbatches(row: Row) -> str:
    if not row.microbatches:
        return ""
    return f"{row.microbatches.get('mean', 0.0):.1f}/{row.microbatches.get('max', 0.0):.0f}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1.0 else f"{value * 1e3:.3g} ms"
