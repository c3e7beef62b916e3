"""What came of a sweep, and how to look at it along one factor."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from odc_sim.results import Results, Row
from odc_sim.sweep import Factor, Point, Sweep


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A point and what came of it: results, or a verdict that says why there are none."""

    point: Point
    key: str
    results: Results | None
    verdict: str = ""

    @property
    def rows(self) -> tuple[Row, ...]:
        """The rows of the results, or one row with the verdict."""
        return self.results.rows if self.results else (self.point.failed_row(self.verdict),)

    @property
    def ran(self) -> dict[str, Row]:
        """The rows that ran, by schedule/policy."""
        return {row.label: row for row in self.rows if row.runs}

    @property
    def best(self) -> Row | None:
        """The fastest row that ran, fits the device's memory, and does not run by luck only."""
        return max((row for row in self.ran.values() if row.usable), key=lambda row: row.speedup or 0.0, default=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepResults:
    """All points of a sweep, in its order."""

    sweep: Sweep
    outcomes: tuple[Outcome, ...]
    reused: int
    """Points an earlier run had finished."""
    notes: tuple[str, ...]
    """Damaged point files that were computed again."""

    def at(self, settings: Mapping[str, Any]) -> Outcome | None:
        """The outcome of the point with these factor values, if the sweep has it."""
        return next((found for found in self.outcomes if found.point.settings == settings), None)

    @property
    def baseline(self) -> str:
        """schedule/policy that speedups are relative to."""
        return str(self.sweep.base_value("baseline"))

    def along(self, factor: Factor) -> list[Outcome | None]:
        """The outcomes at each value of `factor`, the other factors at their reference; None: not a point of this."""
        return [self.at(settings) for settings in self.sweep.along(factor)]

    def line(self, factor: Factor, label: str) -> list[Row | None]:
        """The row of schedule/policy `label` at each value of `factor`; None where it did not run."""
        return [outcome.ran.get(label) if outcome else None for outcome in self.along(factor)]

    def labels(self, factor: Factor, most: int = 6) -> list[str]:
        """schedule/policy of what ran along `factor`; at most `most`: the baseline, of stock FSDP2 what gains most and
        does not run by luck, and of all those that gain most."""
        best: dict[str, float] = {}
        lucky: set[str] = set()
        for outcome in self.along(factor):
            for label, row in outcome.ran.items() if outcome else ():
                best[label] = max(best.get(label, 0.0), row.speedup or 0.0)
                lucky |= {label} if row.verdict else set()
        others = [label for label in best if label != self.baseline]
        stock = [label for label in others if not label.startswith("odc") and label not in lucky]
        first = sorted(stock, key=lambda label: -best[label])[:1]
        kept = [self.baseline, *first, *sorted(others, key=lambda label: (label in first, -best[label]))][:most]
        return [label for label in best if label in kept]
