"""A comparison as text: inputs that differ, answers side by side, the advice of both."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from odc_sim.compare import Comparison, RowDifference
from odc_sim.durations import CAUSE_WORDS

if TYPE_CHECKING:
    from rich.console import Console

HEADING = ("policy", "schedule", "speedup A", "B", "beyond", "samples/s B/A", "idle % A", "B", "most changed")
RIGHT = ("speedup A", "B", "samples/s B/A", "idle % A")


def print_comparison(found: Comparison, console: "Console") -> None:
    """Inputs first, then what they may have caused. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    line(f"A: {found.a.path}")
    line(f"B: {found.b.path}")
    line()
    line("inputs that differ, A -> B" if found.inputs else "inputs: nothing differs", "bold")
    for difference in found.inputs:
        line(f"  {difference.line}")
    if found.same_samples:
        line("both ran the same samples: times and throughputs can be compared")
    for text in found.warnings:
        line(f"warning: {text}")
    line()
    if found.rows and not any(row.differs for row in found.rows):
        line(f"answers: the same in all {len(found.rows)} rows that both have", "bold")
    else:
        line("answers", "bold")
        for text in table_lines(found.rows, "±" if console.encoding.lower().startswith("utf") else "+-"):
            line(text)
    changes: dict[str, list[str]] = {}
    for row in found.rows:
        for change in row.changes:
            changes.setdefault(change, []).append(f"{row.schedule}/{row.policy}")
    running = sum(row.samples_ratio is not None for row in found.rows)
    for change, labels in changes.items():
        line(f"{change} (in all rows)" if len(labels) == running > 1 else f"{change} ({_grouped(labels)})")
    for name, only in (("A", found.only_a), ("B", found.only_b)):
        if only:
            line(f"only in {name}: {_grouped(only)}")
    line()
    one, other = found.a.results.advice, found.b.results.advice
    if one == other:
        line(f"advice of both: {one}", "bold")
    else:
        line(f"advice of A: {one}", "bold")
        line(f"advice of B: {other}", "bold")


def table_lines(rows: Sequence[RowDifference], plus_minus: str = "±") -> list[str]:
    """The rows that run in both, heading first; then what the column `beyond` means."""
    cells = [HEADING, *(_cells(row, plus_minus) for row in rows if row.samples_ratio is not None)]
    if len(cells) == 1:
        return ["no schedule and policy ran in both"]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    right = [name in RIGHT for name in HEADING]
    lines = [
        " ".join(
            text.rjust(width) if aligned else text.ljust(width)
            for text, width, aligned in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in cells
    ]
    return [*lines, "beyond: speedups differ by more than their 95 % intervals explain; idle and causes in GPU time"]


def _cells(row: RowDifference, plus_minus: str) -> tuple[str, ...]:
    def times(value: float | None, interval: tuple[float, float] | None) -> str:
        if value is None:
            return ""
        half = (interval[1] - interval[0]) / 2.0 if interval else 0.0
        return f"{value:.2f}x " + (
            plus_minus + f"{half:.2f}".removeprefix("0") if half else " " * (3 + len(plus_minus))
        )

    def percent(value: float | None) -> str:
        return "" if value is None else f"{100.0 * value:.1f}"

    cause = f"{CAUSE_WORDS.get(row.cause, row.cause)} {100.0 * row.cause_change:+.1f} points" if row.cause else ""
    return (
        row.policy,
        row.schedule,
        times(row.speedup_a, row.ci95_a),
        times(row.speedup_b, row.ci95_b),
        {True: "yes", False: "no", None: ""}[row.beyond_intervals],
        f"{row.samples_ratio:.3f}",
        percent(row.idle_a),
        percent(row.idle_b),
        cause,
    )


def _grouped(labels: Sequence[str]) -> str:
    """schedule/policy labels, policies with the same schedules together."""
    schedules: dict[str, list[str]] = {}
    for label in labels:
        schedule, policy = label.split("/")
        schedules.setdefault(policy, []).append(schedule)
    policies: dict[tuple[str, ...], list[str]] = {}
    for policy, names in schedules.items():
        policies.setdefault(tuple(names), []).append(policy)
    return "; ".join(f"{', '.join(found)} under {', '.join(names)}" for names, found in policies.items())
