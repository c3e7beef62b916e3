"""What a sweep leaves behind and prints: sweep.csv, sweep.json, one plot a factor, and a table a factor."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from odc_sim.header import header, rows_as_csv, write_bytes, write_json
from odc_sim.results import Row, flat
from odc_sim.sweep import Factor, value_text
from odc_sim.sweep_results import SweepResults

if TYPE_CHECKING:
    from rich.console import Console

OTHER_WORK = frozenset(
    {
        *("workload", "lengths", "column", "scale", "overlong", "max_tokens", "seed", "plan", "model"),
        *("hardware", "device_speed"),
    }
)
"""Fields whose values make samples something else, or the machine. `max_tokens` may clip, drop or scale them."""


def csv_text(results: SweepResults) -> str:
    """Every row of every point, flat, the factors first (as shown in tables), the key of the point last."""
    rows: list[dict[str, Any]] = []
    for outcome in results.outcomes:
        settings = outcome.point.settings
        first = {f.column: f.show(settings[f.field]) for f in results.sweep.factors}
        rows += [{**flat(row), **first, "point": outcome.key} for row in outcome.rows]
    names = dict.fromkeys(name for row in rows for name in row)
    order = [f.column for f in results.sweep.factors]
    order += [name for name in names if name not in order and name != "point"]
    return rows_as_csv(rows, [*order, "point"])


def as_dict(results: SweepResults, command: str) -> dict[str, Any]:
    """The content of sweep.json."""
    sweep = results.sweep
    return {
        **header(command, int(sweep.base_value("seed"))),
        "sweep": {"name": sweep.name, "description": sweep.description, "evidence": sweep.evidence, "mode": sweep.mode},
        "study": {name: _plain(value) for name, value in sweep.base.items()},
        "baseline": results.baseline,
        "factors": [
            {**asdict(factor), "values": [_plain(value) for value in factor.values]} for factor in sweep.factors
        ],
        "notes": list(results.notes),
        "points": [
            {
                "point": outcome.key,
                "settings": {name: _plain(value) for name, value in outcome.point.settings.items()},
                "verdict": outcome.verdict or None,
                "bounds": outcome.results.bounds if outcome.results else {},
                "rows": [asdict(row) for row in outcome.rows],
            }
            for outcome in results.outcomes
        ],
    }


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def write_sweep(folder: str | Path, results: SweepResults, command: str) -> list[Path]:
    """Write sweep.csv, sweep.json and sweep-FACTOR.png into `folder`; plots of factors no longer swept are removed.

    Raises:
        InputError: a file cannot be written.
    """
    from odc_sim.plots_style import save_png
    from odc_sim.plots_sweep import factor_figure

    out = Path(folder)
    written = [out / "sweep.csv", out / "sweep.json"]
    write_bytes(written[0], csv_text(results).encode())
    write_json(written[1], as_dict(results, command))
    for factor in results.sweep.factors:
        written.append(out / f"sweep-{factor.column}.png")
        save_png(factor_figure(results, factor), written[-1])
    for stale in set(out.glob("sweep-*.png")) - set(written):
        stale.unlink()
    return written


def print_sweep(results: SweepResults, console: "Console") -> None:
    """A table a factor, then what could not run and the largest gain."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    symbols = console.encoding.lower().startswith("utf")
    sweep = results.sweep
    line(f"{sweep.name}: {sweep.description or f'{len(results.outcomes)} points'}", "bold")
    line(f"speedup over {results.baseline} on the same samples, with half of its 95 % interval; * fastest that fits")
    for factor in sweep.factors:
        held = ", ".join(
            f"{f.title} {value_text(f.show(sweep.reference(f)))}" for f in sweep.factors if f is not factor
        )
        line()
        line(factor.title + (f"; others at {held}" if held else ""), "bold")
        console.print(_table(results, factor, symbols))
    line()
    for verdict, where in _verdicts(results).items():
        line(f"cannot run: {_example(where)}: {verdict}")
    for label, where in _lucky(results).items():
        schedule, policy = label.split("/")
        line(
            f"{schedule} with {policy}, {_example(where)}: microbatch counts happened to be equal; "
            "where they differ it hangs, so it is never the fastest here"
        )
    line(sources(results))
    for note in (*results.notes, *untried(results)):
        line(f"note: {note}")
    line(largest_gain(results), "bold")
    throughput = highest_throughput(results)
    if throughput:
        line(throughput)


def sources(results: SweepResults) -> str:
    """Where the numbers come from, in one line."""
    words: dict[str, dict[str, None]] = {}
    for row in (row for outcome in results.outcomes for row in outcome.ran.values()):
        for part, word in row.provenance.items():
            words.setdefault(part, {})[word] = None
    differ = any(len(each) > 1 for each in words.values())
    text = ", ".join(f"{part} {' or '.join(each)}" for part, each in words.items())
    return f"sources: {text or 'not stated'}{' (of each row: sweep.csv)' if differ else ''}"


def untried(results: SweepResults) -> list[str]:
    """What `odc simulate` compares ODC with and a sweep does not, where ODC is fastest somewhere."""
    if results.sweep.base.get("plan") or "plan" in {factor.field for factor in results.sweep.factors}:
        return []
    if not any(outcome.best and outcome.best.schedule.startswith("odc") for outcome in results.outcomes):
        return []
    return [
        "odc is fastest among these rows; odc simulate of one point also says what larger microbatches, and ZeRO-1, "
        "reach without it"
    ]


def highest_throughput(results: SweepResults) -> str | None:
    """The row that gets most done, in one line: speedups are over each point's own baseline. None where points have
    different samples, models or machines."""
    if {factor.field for factor in results.sweep.factors} & OTHER_WORK:
        return None
    found = [(outcome.best, outcome) for outcome in results.outcomes if outcome.best]
    if not found:
        return None
    row, outcome = max(found, key=lambda pair: pair[0].samples_per_s_per_device or 0.0)
    return (
        f"highest throughput: {1000 * (row.samples_per_s_per_device or 0.0):,.1f} samples per 1,000 s and device, "
        f"{row.schedule} + {row.policy} at {_where(results, outcome.point.settings)}"
    )


def largest_gain(results: SweepResults) -> str:
    """The row with the highest speedup that fits, in one line."""
    found = [(outcome.best, outcome) for outcome in results.outcomes if outcome.best]
    if not found:
        return "no row ran within the device's memory"
    row, outcome = max(found, key=lambda pair: pair[0].speedup or 0.0)
    return (
        f"largest gain: {row.speedup:.2f}x, {row.schedule} + {row.policy} at {_where(results, outcome.point.settings)}"
    )


def _table(results: SweepResults, factor: Factor, symbols: bool) -> Any:
    from rich.table import Table
    from rich.text import Text

    base = results.baseline
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    table.add_column("", justify="right", no_wrap=True)
    table.add_column(Text("idle\nbase"), justify="right", no_wrap=True)
    shown = [label for label in results.labels(factor) if label != base]
    for label in shown:
        table.add_column(Text(label.replace("/", "\n")), justify="right", no_wrap=True)
    table.add_column(Text("idle\nbest"), justify="right", no_wrap=True)
    for value, outcome in zip(factor.values, results.along(factor), strict=True):
        ran, best = (outcome.ran, outcome.best) if outcome else ({}, None)
        cells = [_speedup(ran.get(label), best, symbols) for label in shown]
        table.add_row(value_text(factor.show(value)), _percent(ran.get(base)), *cells, _percent(best))
    return table


def _speedup(row: Row | None, best: Row | None, symbols: bool) -> str:
    if row is None:
        return "- "
    low, high = row.speedup_ci95 or (0.0, 0.0)
    half = f"{(high - low) / 2:.2f}".removeprefix("0")
    mark = "*" if row is best else " " if row.fits else "✗" if symbols else "!"
    return f"{row.speedup:.2f}x {'±' if symbols else '+-'}{half}{mark}"


def _percent(row: Row | None) -> str:
    return "-" if row is None or row.idle_rate is None else f"{100 * row.idle_rate:.1f} %"


def _verdicts(results: SweepResults) -> dict[str, list[str]]:
    """Where each verdict of a whole point was met."""
    found: dict[str, list[str]] = {}
    for outcome in results.outcomes:
        if outcome.results is None:
            found.setdefault(outcome.verdict, []).append(_where(results, outcome.point.settings))
    return found


def _lucky(results: SweepResults) -> dict[str, list[str]]:
    """Of rows that ran although nothing promises it, by label, where."""
    found: dict[str, list[str]] = {}
    for outcome in results.outcomes:
        for label, row in outcome.ran.items():
            if row.verdict:
                found.setdefault(label, []).append(_where(results, outcome.point.settings))
    return found


def _example(where: list[str]) -> str:
    return where[0] if len(where) == 1 else f"{len(where)} points, such as {where[0]}"


def _where(results: SweepResults, settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{f.title} {value_text(f.show(settings[f.field]))}" for f in results.sweep.factors)
