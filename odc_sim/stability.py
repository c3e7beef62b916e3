"""Does the best schedule and policy stay best? A study repeated with other seeds and with costs that are off.

Each repeat draws other samples and one `Perturbation` of the study's calibration error. Only schedules and policies of
rows that can still win are repeated: those that fit and are at most 15 % slower than the fastest.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from odc_sim.advice import EFFORT, advised_row
from odc_sim.errors import InputError
from odc_sim.perturbation import Perturbation
from odc_sim.progress import Progress
from odc_sim.results import Results, Row
from odc_sim.study import Study

CAN_WIN = 0.15
"""Rows that are further behind are not repeated."""
CLOSE = 0.01
"""Within this of the fastest is as good as the fastest."""
TIE = 1e-9
STABILITY_STREAM = 4
"""The random stream of perturbations; `odc_sim.inputs` lists the others of a seed."""

Repeat = Callable[[Study, Perturbation], Results]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """One repeat: the speedup of every row that can be recommended, by (schedule, policy)."""

    speedups: dict[tuple[str, str], float]

    @property
    def fastest(self) -> tuple[str, str]:
        """Of equals the one that takes least effort to set up."""
        best = max(self.speedups.values())
        equals = [key for key, value in self.speedups.items() if value >= best * (1.0 - TIE)]
        return min(equals, key=lambda key: EFFORT.index(key[0]))

    def behind(self, key: tuple[str, str]) -> float | None:
        """How much more throughput the fastest has, a fraction; None where the row does not run or fit."""
        own = self.speedups.get(key)
        return None if own is None else max(self.speedups.values()) / own - 1.0


def with_stability(results: Results, study: Study, repeat: Repeat, progress: Progress) -> Results:
    """`results` with `best_share` in its rows and `stability` filled in, from `study.stability` repeats.

    `repeat` runs one study with perturbed costs. A repeat that raises `InputError` (its samples cannot be run) is
    counted and left out.
    """
    contenders = can_win(results.rows)
    if not contenders:
        text = "stability: nothing that fits can be counted on, so nothing was repeated"
        return replace(results, stability={"repeats": 0, "text": text})
    variant = {
        "stability": 0,
        "policy": tuple(dict.fromkeys(row.policy for row in contenders)),
        "schedule": tuple(dict.fromkeys(row.schedule for row in contenders)),
    }
    first = int(results.study.get("seed", study.seed))
    outcomes: list[Outcome] = []
    seen: set[tuple[str, str]] = set()
    failed: list[str] = []
    for number in range(study.stability):
        progress("repeating", number, study.stability)
        seed = first + 1 + number
        drawn = Perturbation.draw(study.calibration_error, np.random.default_rng([seed, STABILITY_STREAM]))
        try:
            found = repeat(study.model_copy(update={**variant, "seed": seed}), drawn)
        except InputError as error:
            failed.append(str(error))
            continue
        seen |= {(row.schedule, row.policy) for row in found.rows}
        fitting = {(row.schedule, row.policy): row.speedup for row in found.rows if row.speedup and row.usable}
        if fitting:
            outcomes.append(Outcome(speedups=fitting))
        else:
            failed.append("nothing that fits can be counted on")
    wins = Counter(outcome.fastest for outcome in outcomes)
    rows = tuple(
        replace(row, best_share=wins[row.schedule, row.policy] / len(outcomes))
        if outcomes and row.runs and (row.schedule, row.policy) in seen
        else row
        for row in results.rows
    )
    baseline = results.baseline_row
    advised = advised_row(results.rows, baseline)
    assert advised is not None
    skipped = sum(row.runs and row.best_share is None for row in rows)
    return replace(results, rows=rows, stability=_summary(advised, outcomes, wins, failed, study, first, skipped))


def can_win(rows: tuple[Row, ...]) -> list[Row]:
    """Those that can be recommended and are at most `CAN_WIN` slower than the fastest of them."""
    fitting = [row for row in rows if row.speedup is not None and row.usable]
    best = max((row.speedup or 0.0 for row in fitting), default=0.0)
    return [row for row in fitting if (row.speedup or 0.0) >= (1.0 - CAN_WIN) * best]


def _summary(
    advised: Row,
    outcomes: list[Outcome],
    wins: Counter[tuple[str, str]],
    failed: list[str],
    study: Study,
    first_seed: int,
    skipped: int,
) -> dict[str, Any]:
    """What results.json says, with one line of text for the table."""
    own = (advised.schedule, advised.policy)
    behind = [outcome.behind(own) for outcome in outcomes]
    known = [value for value in behind if value is not None]
    summary: dict[str, Any] = {
        "repeats": len(outcomes),
        "failed": len(failed),
        "first_seed": first_seed + 1,
        "calibration_error": study.calibration_error,
        "not_repeated": skipped,
        "advised": {
            "schedule": advised.schedule,
            "policy": advised.policy,
            "fastest": wins[own],
            "within_1_percent": sum(value <= CLOSE for value in known),
            "does_not_fit": len(behind) - len(known),
            "most_behind": max(known, default=None),
        },
    }
    summary["text"] = _text(summary, wins, failed)
    return summary


def _text(summary: dict[str, Any], wins: Counter[tuple[str, str]], failed: list[str]) -> str:
    advised, repeats = summary["advised"], summary["repeats"]
    parts = []
    if repeats:
        error = f"{100.0 * summary['calibration_error']:g} % calibration error"
        name = f"{advised['schedule']} + {advised['policy']}"
        parts.append(f"{name} is fastest in {advised['fastest']} of {repeats} repeats (other seeds, {error})")
        if advised["fastest"] < repeats:
            parts[0] += f", within 1 % of the fastest in {advised['within_1_percent']}"
            if advised["most_behind"] is not None:
                parts.append(f"never more than {100.0 * advised['most_behind']:.1f} % behind")
            (key, most), *_ = wins.most_common(1)
            if key != (advised["schedule"], advised["policy"]):
                parts.append(f"most often fastest: {key[0]} + {key[1]} ({most})")
        if advised["does_not_fit"]:
            parts.append(f"cannot run or does not fit in {advised['does_not_fit']}")
    if failed:
        parts.append(f"{_count(len(failed), 'repeat')} could not run ({failed[0]})")
    if summary["not_repeated"]:
        parts.append(f"not repeated: {_count(summary['not_repeated'], 'row')} too far behind to win")
    return "; ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
