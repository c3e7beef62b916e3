"""What `odc refine` changed, for people."""

from rich.console import Console
from rich.table import Table

from odc_sim.calibration import Calibration, CopySample, TransferSample
from odc_sim.in_training import SCHEDULES
from odc_sim.machine import host_of
from odc_sim.schedules import make_schedule

Change = dict[str, str | float | None]


def changes(before: Calibration, after: Calibration) -> list[Change]:
    """What differs: microseconds that a layer loses beside transfers and copies, copies' own, and the host's."""
    rows: list[Change] = []
    beside = [row.beside_layer for row in after.transfers] + [row.beside_layer for row in after.copies]
    models = [model for model in beside if model]
    for model in dict.fromkeys(models):
        for op in ("all_gather", "reduce_scatter", "gather", "scatter_accumulate", "copy_in", "add"):
            rows.append(_row(f"layer of {model} beside {op}", *(_lost_s(each, op, model) for each in (before, after))))
    held = {copy.elements: copy.p50_s for copy in before.copies if copy.op == "hold"}
    for copy in after.copies:
        if copy.op == "hold":
            rows.append(_row(f"hold of {copy.elements:,} elements", held.get(copy.elements), copy.p50_s))
    for schedule in SCHEDULES:
        rows.append(
            _row(f"host, a layer's forward under {schedule}", *(_host_s(each, schedule) for each in (before, after)))
        )
    return [row for row in rows if row["before_us"] != row["after_us"]]


def print_changes(rows: list[Change], console: Console) -> None:
    """A table."""
    table = Table(box=None, pad_edge=False)
    for name in ("microseconds", "before", "refined"):
        table.add_column(name, justify="left" if name == "microseconds" else "right")
    for row in rows:
        table.add_row(
            str(row["what"]), *("-" if row[n] is None else f"{row[n]:,.0f}" for n in ("before_us", "after_us"))
        )
    console.print(table)


def _row(what: str, before_s: float | None, after_s: float | None) -> Change:
    before_us, after_us = (None if seconds is None else 1e6 * seconds for seconds in (before_s, after_s))
    return {"what": what, "before_us": before_us, "after_us": after_us}


def _lost_s(calibration: Calibration, op: str, model: str) -> float | None:
    rows: list[TransferSample | CopySample] = [*calibration.transfers, *calibration.copies]
    found = (row for row in rows if (row.op, row.beside_layer) == (op, model) and not row.flagged)
    return next((row.lost_s for row in found), None)


def _host_s(calibration: Calibration, schedule: str) -> float | None:
    if calibration.host is None:
        return None
    rules = make_schedule(schedule)
    return host_of(calibration.host, "").forward_s(one_sided=rules.one_sided, deferred=rules.deferred)
