"""The plans and campaign.toml that `python -m odc_kernels.campaign` executes, and what the simulator says of each run.

Made where there is time, because machines with GPUs are lent by the minute.
"""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from odc_sim.api import plan, simulate
from odc_sim.errors import InputError
from odc_sim.plans import write_plan
from odc_sim.study import make_study

START_S = 8.0
"""Of a run: building the model, and a minibatch to warm up; as on two H200s with 1.5B."""
COLUMNS = (
    "study",
    "schedule",
    "policy",
    "makespan_s",
    "speedup",
    "speedup_low",
    "speedup_high",
    "idle_rate",
    "memory_gb",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Studies:
    """Runs to compare: every pair on every study."""

    studies: Mapping[str, Mapping[str, Any]]
    """Name -> fields of a study, in the order in which they are run."""
    pairs: Sequence[str]
    """schedule/policy; the first one is what speedups are relative to."""
    common: Mapping[str, Any]
    """Fields of all studies; `devices` among them."""
    calibration: str | None = None
    """TOML lines of the section [calibration]; None: none."""


def write_campaign(folder: Path, studies: Studies, command: str) -> list[dict[str, Any]]:
    """Write plans/, campaign.toml and prediction.csv into `folder`; what was predicted, a row a run.

    Raises:
        InputError: a study that cannot be.
    """
    if "devices" not in studies.common:
        raise InputError("write_campaign: common has no 'devices', expected the number of ranks of all runs")
    (folder / "plans").mkdir(parents=True, exist_ok=True)
    lines = [f"# {command}", "# estimate_s is the simulator's.", f"world_size = {studies.common['devices']}", ""]
    if studies.calibration is not None:
        lines += ["[calibration]", studies.calibration, ""]
    split = [pair.split("/") for pair in studies.pairs]
    rows: list[dict[str, Any]] = []
    for name, fields in studies.studies.items():
        study = make_study(
            {
                **studies.common,
                **fields,
                "schedule": tuple(dict.fromkeys(schedule for schedule, _ in split)),
                "policy": tuple(dict.fromkeys(policy for _, policy in split)),
                "baseline": studies.pairs[0],
            }
        )
        for policy in study.policy:
            write_plan(plan(study, policy), folder / "plans" / f"{name}-{policy}.json", command)
        found = simulate(study)
        for schedule, policy in split:
            row = found.row(schedule, policy)
            if row.makespan_s is None or row.speedup_ci95 is None or row.peak_memory_bytes is None:
                raise InputError(f"{name}, {schedule}/{policy}: {row.verdict}")
            seconds = row.makespan_s["mean"] * study.minibatches
            numbers = (row.makespan_s["mean"], row.speedup, *row.speedup_ci95, row.idle_rate)
            memory_gb = f"{row.peak_memory_bytes['total'] / 1e9:.1f}"
            values = (name, schedule, policy, *(f"{number:.4f}" for number in numbers), memory_gb)
            rows.append(dict(zip(COLUMNS, values, strict=True)))
            lines += [
                "[[runs]]",
                f'name = "{name}-{schedule}-{policy}"',
                f'plan = "plans/{name}-{policy}.json"',
                f'schedule = "{schedule}"',
                f"estimate_s = {seconds + START_S:.0f}",
                "",
            ]
    (folder / "campaign.toml").write_text("\n".join(lines), encoding="utf-8")
    with (folder / "prediction.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)
    return rows
