"""How far to trust the simulator: runs of `odc train` beside what it says of the very same minibatches.

    found = validate([Path("runs/collective"), Path("runs/odc")])
    found.failures     # what misses the tolerances, in words

First everything in which a run differs from its plan and from the calibration, then errors. An error is measured minus
predicted: in percent of the predicted time, in points of GPU time for shares, in points (hundredths) for speedups.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import CAUSE_WORDS
from odc_sim.errors import InputError
from odc_sim.metrics import Speedup, speedup
from odc_sim.plans import Plan
from odc_sim.run_files import read_run
from odc_sim.validate_differences import Difference, between_runs, differences
from odc_sim.validate_measure import measure
from odc_sim.validate_predict import load_run_machine, predict, run_rows
from odc_sim.validate_run import RunValidation

BASELINE = "collective/lb-micro"
DEFAULT_TOLERANCE_PERCENT = 3.0
SPEEDUP_TOLERANCE_POINTS = 2.0
CAUSE_AIM_POINTS, MEMORY_AIM_PERCENT = 3.0, 5.0
"""What is aimed at for each idle cause and for peak memory; missing it is said, but is no failure."""
SHARED = ("world_size", "device", "compute", "time_scale")
"""Of RunConfig: where these differ, times say nothing about each other."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedupValidation:
    """A run against the first that has the same samples in the same minibatches."""

    run: str
    baseline: str
    minibatches: int
    """In both."""
    predicted: float
    measured: Speedup

    @property
    def points(self) -> float:
        """The error in hundredths."""
        return 100.0 * (self.measured.value - self.predicted)

    @property
    def gain_share(self) -> float | None:
        """The measured gain as a share of the predicted one; None where none of a point or more is predicted."""
        gain = self.predicted - 1.0
        return (self.measured.value - 1.0) / gain if gain >= 0.01 else None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "run": self.run,
            "baseline": self.baseline,
            "minibatches": self.minibatches,
            "predicted": self.predicted,
            "measured": self.measured.value,
            "measured_ci95": [self.measured.low, self.measured.high],
            "error_points": self.points,
            "gain_share": self.gain_share,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """Two runs over the same samples: which is faster by how much, baseline time over own time."""

    faster: str
    """As predicted."""
    slower: str
    predicted: float
    measured: Speedup

    @property
    def kept(self) -> bool | None:
        """Whether the measurement agrees; None where its interval holds both answers."""
        if self.measured.low <= 1.0 <= self.measured.high:
            return None
        return self.measured.value > 1.0

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "faster": self.faster,
            "slower": self.slower,
            "predicted": self.predicted,
            "measured": self.measured.value,
            "measured_ci95": [self.measured.low, self.measured.high],
            "kept": self.kept,
        }


ON_A_CPU = "ranks on a CPU: whatever else ran on it is in these numbers; they show how it goes, not how far to trust it"


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """All runs, and runs against each other."""

    runs: tuple[RunValidation, ...]
    between: Mapping[str, tuple[Difference, ...]]
    """By run: in what it differs from the baseline it is compared with, or from the first run."""
    speedups: tuple[SpeedupValidation, ...]
    orders: tuple[Order, ...]
    notes: tuple[str, ...]
    tolerance_percent: float

    @property
    def failures(self) -> tuple[str, ...]:
        """What misses the tolerances, in words."""
        found = []
        for each in self.runs:
            percent = each.step.percent
            if percent is not None and abs(percent) > self.tolerance_percent:
                found.append(
                    f"step time of {each.run.name} is {percent:+.1f} % off (tolerance {self.tolerance_percent:g} %)"
                )
        for faster in self.speedups:
            if abs(faster.points) > SPEEDUP_TOLERANCE_POINTS:
                found.append(
                    f"speedup of {faster.run} over {faster.baseline} is {faster.points:+.1f} points off "
                    f"(tolerance {SPEEDUP_TOLERANCE_POINTS:g})"
                )
        return tuple(found)

    @property
    def misses(self) -> tuple[str, ...]:
        """Idle causes and memory that are further off than is aimed at, in words."""
        found = []
        for each in self.runs:
            for cause, pair in each.idle_causes.items():
                if pair.points is not None and abs(pair.points) > CAUSE_AIM_POINTS:
                    found.append(f"{CAUSE_WORDS[cause]} of {each.run.name} is {pair.points:+.1f} points off")
            percent = each.memory.percent if each.memory else None
            if percent is not None and abs(percent) > MEMORY_AIM_PERCENT:
                found.append(f"peak memory of {each.run.name} is {percent:+.1f} % off")
        return tuple(found)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {
            "tolerance_percent": self.tolerance_percent,
            "speedup_tolerance_points": SPEEDUP_TOLERANCE_POINTS,
            "failures": list(self.failures),
            "misses": list(self.misses),
            "runs": [each.as_dict() for each in self.runs],
            "between_runs": {name: [asdict(d) for d in found] for name, found in self.between.items()},
            "speedups": [each.as_dict() for each in self.speedups],
            "orders": [each.as_dict() for each in self.orders],
            "notes": list(self.notes),
        }


def _silent(what: str, done: int, total: int) -> None:
    """The default progress: none."""


def validate(
    folders: Sequence[Path],
    *,
    hardware: str | Path | None = None,
    tolerance_percent: float = DEFAULT_TOLERANCE_PERCENT,
    engine: str = "fast",
    progress: Callable[[str, int, int], None] = _silent,
) -> Validation:
    """Compare runs with their prediction, and with each other.

    Args:
        folders: of runs, each as `odc train` left it.
        hardware: a calibration.json, a cluster TOML or built-in hardware to predict with; None: each run's own
            calibration.
        tolerance_percent: of step times, see `Validation.failures`.
        engine: fast or event.
        progress: called with what is being done.

    Raises:
        InputError: no run, one named twice, a run or a calibration that cannot be read or predicted, a tolerance below
            0, an unknown engine.
    """
    if not folders:
        raise InputError("validate: got no run, expected the folders that odc train wrote")
    if not 0.0 <= tolerance_percent < np.inf:
        raise InputError(f"--tolerance: got {tolerance_percent:g}, expected percent, 0 or more")
    if engine not in ("fast", "event"):
        raise InputError(f"--engine: got {engine!r}, expected fast or event")
    runs = [read_run(folder) for folder in folders]
    names = [run.name for run in runs]
    for run in runs:
        if names.count(run.name) > 1:
            raise InputError(f"{run.folder}: two runs are called {run.name!r}, expected folders of different names")
    found = []
    for number, run in enumerate(runs):
        progress(f"simulating {run.name}", number, len(runs))
        predicted = predict(run, load_run_machine(run, hardware), engine)
        measured = measure(run, predicted.model.layers)
        found.append(
            RunValidation(
                run=run,
                prediction=predicted,
                measured=measured,
                differences=differences(run, predicted, measured),
            )
        )
    return _compared(found, tolerance_percent)


def _compared(runs: Sequence[RunValidation], tolerance_percent: float) -> Validation:
    baselines: list[RunValidation] = []
    speedups, orders = [], []
    notes = [ON_A_CPU] if any((r.run.config.device, r.run.config.compute) == ("cpu", "real") for r in runs) else []
    between: dict[str, tuple[Difference, ...]] = {}
    # the usual baseline comes first, then runs as they were named
    for each in sorted(runs, key=lambda each: each.run.label != BASELINE):
        base = next((b for b in baselines if _common(b, each).size), None)
        if base is None:
            if baselines:
                notes.append(f"{each.run.name} shares no minibatch with another run before it: no speedup")
            baselines.append(each)
            continue
        between[each.run.name] = between_runs(each.run, base.run)
        predicted, measured = _ratio(base, each)
        speedups.append(
            SpeedupValidation(
                run=each.run.name,
                baseline=base.run.name,
                minibatches=int(_common(base, each).size),
                predicted=predicted,
                measured=measured,
            )
        )
    for one, other in combinations(runs, 2):
        if _common(one, other).size:
            slow, fast = (one, other) if _ratio(one, other)[0] >= 1.0 else (other, one)
            predicted, measured = _ratio(slow, fast)
            orders.append(Order(faster=fast.run.name, slower=slow.run.name, predicted=predicted, measured=measured))
    return Validation(
        runs=tuple(runs),
        between=between,
        speedups=tuple(speedups),
        orders=tuple(orders),
        notes=tuple(notes),
        tolerance_percent=tolerance_percent,
    )


def _common(one: RunValidation, other: RunValidation) -> NDArray[np.int64]:
    """Numbers of the minibatches that both finished, with the same samples, ranks, model and kind of machine."""
    configs = one.run.config, other.run.config
    alike = all(getattr(configs[0], name) == getattr(configs[1], name) for name in SHARED)
    if not alike or not one.prediction.model.same_shape(other.prediction.model):
        return np.empty(0, dtype=np.int64)
    both = np.intersect1d(run_rows(one.run), run_rows(other.run)).tolist()
    same = [b for b in both if np.array_equal(_lengths(one.run.plan, b), _lengths(other.run.plan, b))]
    return np.array(same, dtype=np.int64)


def _lengths(plan: Plan, minibatch: int) -> NDArray[np.int64]:
    """The lengths of a minibatch, ascending."""
    start, end = plan.microbatch_start[plan.rank_start[[m * plan.world_size for m in (minibatch, minibatch + 1)]]]
    return np.sort(plan.lengths[plan.sample_ids[start:end]])


def _ratio(slow: RunValidation, fast: RunValidation) -> tuple[float, Speedup]:
    """How many times faster `fast` is over the minibatches of both: predicted, and measured with its interval."""
    common = _common(slow, fast)
    places = [np.searchsorted(run_rows(each.run), common) for each in (slow, fast)]
    predicted_s = [each.prediction.makespan_s[rows] for each, rows in zip((slow, fast), places, strict=True)]
    measured_s = [each.measured.makespan_s[rows] for each, rows in zip((slow, fast), places, strict=True)]
    rng = np.random.default_rng(0)
    return float(predicted_s[0].sum() / predicted_s[1].sum()), speedup(measured_s[0], measured_s[1], 1, rng)
