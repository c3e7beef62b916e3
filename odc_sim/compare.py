"""Two results side by side: what differs in what was asked, then what differs in the answers.

Inputs come first because answers of different questions say nothing about each other: a difference in one of them is
the first suspect for every difference in a number.
"""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from odc_sim.compare_inputs import NAMES, InputDifference, Loaded, input_differences, same_samples
from odc_sim.results import Row

LEAST_POINTS = 5e-4
"""Idle causes that moved less than 0.05 points are not named."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowDifference:
    """One schedule and policy in both results. Numbers are None where a row did not run."""

    schedule: str
    policy: str
    speedup_a: float | None
    speedup_b: float | None
    ci95_a: tuple[float, float] | None
    ci95_b: tuple[float, float] | None
    samples_ratio: float | None
    """Samples per second and device, B / A."""
    idle_a: float | None
    idle_b: float | None
    cause: str | None
    """The idle cause that changed most."""
    cause_change: float
    """By how much of GPU time, B - A."""
    beyond_intervals: bool | None
    """Whether speedups differ by more than their 95 % intervals explain."""
    changes: tuple[str, ...]
    """Verdicts, memory and provenance that are not the same."""

    @property
    def differs(self) -> bool:
        """Whether anything in it is not the same."""
        numbers = ((self.speedup_a, self.speedup_b), (self.samples_ratio or 1.0, 1.0), (self.idle_a, self.idle_b))
        return bool(self.changes) or any(not _close(one, other) for one, other in numbers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What differs between A and B."""

    a: Loaded
    b: Loaded
    inputs: tuple[InputDifference, ...]
    same_samples: bool
    """Both ran the same minibatches, so that their times can be compared."""
    warnings: tuple[str, ...]
    rows: tuple[RowDifference, ...]
    only_a: tuple[str, ...]
    """schedule/policy of rows that B does not have."""
    only_b: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "a": self.a.path,
            "b": self.b.path,
            "inputs": [asdict(difference) for difference in self.inputs],
            "same_samples": self.same_samples,
            "warnings": list(self.warnings),
            "rows": [asdict(row) for row in self.rows],
            "only_a": list(self.only_a),
            "only_b": list(self.only_b),
            "advice": {"a": self.a.results.advice, "b": self.b.results.advice},
        }


def compare(a: Loaded, b: Loaded) -> Comparison:
    """Everything that differs between `a` and `b`."""
    rows_a = {(row.schedule, row.policy): row for row in a.results.rows}
    rows_b = {(row.schedule, row.policy): row for row in b.results.rows}
    inputs = input_differences(a, b)
    same = same_samples(a.results, b.results)
    warnings = []
    if not same:
        warnings.append("the two ran different samples: throughputs and speedups are of different minibatches")
    if a.results.baseline != b.results.baseline:
        warnings.append(f"speedups are relative to {a.results.baseline} in A, to {b.results.baseline} in B")
    for name in (*NAMES, "lengths", "plan"):
        one, other = (str(x.results.study.get(name) or "") for x in (a, b))
        if one == other and Path(one).suffix:
            if name in NAMES and Path(one).suffix not in (".toml", ".json"):
                continue  # a dot in a built-in name
            warnings.append(f"{name}: both name the file {one}; whether its content was the same is not recorded")
    rows = tuple(_row(rows_a[key], rows_b[key]) for key in rows_a if key in rows_b)
    if same and not inputs and any(row.differs for row in rows):
        warnings.append("the same was asked and other answers came: the two were written by different code")
    return Comparison(
        a=a,
        b=b,
        inputs=tuple(inputs),
        same_samples=same,
        warnings=tuple(warnings),
        rows=rows,
        only_a=tuple(row.label for key, row in rows_a.items() if key not in rows_b),
        only_b=tuple(row.label for key, row in rows_b.items() if key not in rows_a),
    )


def _close(one: float | None, other: float | None) -> bool:
    return one == other if one is None or other is None else math.isclose(one, other, rel_tol=1e-6, abs_tol=1e-9)


def _row(a: Row, b: Row) -> RowDifference:
    cause, change = _cause(a, b)
    return RowDifference(
        schedule=a.schedule,
        policy=a.policy,
        speedup_a=a.speedup,
        speedup_b=b.speedup,
        ci95_a=a.speedup_ci95,
        ci95_b=b.speedup_ci95,
        samples_ratio=b.samples_per_s_per_device / a.samples_per_s_per_device
        if a.samples_per_s_per_device and b.samples_per_s_per_device
        else None,
        idle_a=a.idle_rate,
        idle_b=b.idle_rate,
        cause=cause,
        cause_change=change,
        beyond_intervals=_beyond(a, b),
        changes=_changes(a, b),
    )


def _cause(a: Row, b: Row) -> tuple[str | None, float]:
    if not (a.runs and b.runs):
        return None, 0.0
    change = {
        cause: b.idle_causes.get(cause, 0.0) - a.idle_causes.get(cause, 0.0)
        for cause in (*a.idle_causes, *b.idle_causes)
    }
    cause = max(change, key=lambda name: abs(change[name]), default=None)
    return (cause, change[cause]) if cause and abs(change[cause]) >= LEAST_POINTS else (None, 0.0)


def _beyond(a: Row, b: Row) -> bool | None:
    """The difference against both intervals' sides that face each other, added as independent errors add."""
    if a.speedup is None or b.speedup is None or a.speedup_ci95 is None or b.speedup_ci95 is None:
        return None
    low, high = ((a.speedup, a.speedup_ci95), (b.speedup, b.speedup_ci95))
    if low[0] > high[0]:
        low, high = high, low
    noise = math.hypot(low[1][1] - low[0], high[0] - high[1][0])
    return high[0] - low[0] > max(noise, 1e-9)


def _changes(a: Row, b: Row) -> tuple[str, ...]:
    found = []
    kinds = [(row.verdict or "").split(":")[0] for row in (a, b)]  # not who hangs whom where
    if a.runs != b.runs or kinds[0] != kinds[1]:
        found.append(f"verdict: {a.verdict or 'runs'} -> {b.verdict or 'runs'}")
    if a.runs and b.runs:
        if a.fits != b.fits:
            words = {True: "fits", False: "does not fit"}
            gigabytes = [f"{row.peak_memory_bytes.get('total', 0) / 1e9:.1f} GB" for row in (a, b)]
            found.append(f"memory: {words[a.fits]} ({gigabytes[0]}) -> {words[b.fits]} ({gigabytes[1]})")
        for part in dict.fromkeys((*a.provenance, *b.provenance)):
            one, other = a.provenance.get(part, "(none)"), b.provenance.get(part, "(none)")
            if one != other:
                found.append(f"{part}: {one} -> {other}")
    return tuple(found)
