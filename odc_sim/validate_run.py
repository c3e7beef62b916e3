"""One run of `odc train` beside what the simulator says of the very same minibatches.

An error is measured minus predicted: in percent of the predicted time, in points of GPU time for shares.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import CAUSES
from odc_sim.metrics import rate, speedup
from odc_sim.run_files import Run
from odc_sim.validate_differences import Difference
from odc_sim.validate_measure import Measured
from odc_sim.validate_predict import UNITS, Prediction, run_rows

Floats = NDArray[np.float64]
IN_EXPOSED = "port_contention"
"""A measurement cannot tell it from exposed transfers."""
DERIVED = ("compute_slowdown", "host")
"""Causes that lie, or partly lie, inside compute spans: derived with the calibration."""

HOST_UNIT = "host, layer forward"
"""Among the units."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """One number as predicted and as measured; None where it was not measured."""

    predicted: float
    measured: float | None

    @property
    def percent(self) -> float | None:
        """The error in percent of the prediction; None where there is nothing to compare."""
        if self.measured is None or self.predicted == 0.0:
            return None
        return 100.0 * (self.measured / self.predicted - 1.0)

    @property
    def points(self) -> float | None:
        """The error in hundredths."""
        return None if self.measured is None else 100.0 * (self.measured - self.predicted)

    def as_dict(self, error: str) -> dict[str, float | None]:
        """JSON-able, with the error in `error`: percent or points."""
        return {"predicted": self.predicted, "measured": self.measured, f"error_{error}": getattr(self, error)}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunValidation:
    """One run. B finished minibatches; seconds as executed."""

    run: Run
    prediction: Prediction
    measured: Measured
    differences: tuple[Difference, ...]

    @property
    def step(self) -> Pair:
        """Mean seconds a minibatch."""
        return Pair(predicted=float(self.prediction.makespan_s.mean()), measured=float(self.measured.makespan_s.mean()))

    @property
    def step_ci95_percent(self) -> tuple[float, float]:
        """The interval of its error, by bootstrap over minibatches."""
        found = speedup(self.measured.makespan_s, self.prediction.makespan_s, 1, np.random.default_rng(0))
        return 100.0 * (found.low - 1.0), 100.0 * (found.high - 1.0)

    @property
    def minibatch_percent(self) -> Floats:
        """[B] the error of each minibatch"""
        return 100.0 * (self.measured.makespan_s / self.prediction.makespan_s - 1.0)

    @property
    def gaps(self) -> Pair:
        """The share of GPU time between compute spans: what a measurement knows without any calibration."""
        rows, predicted = self._rows, self.prediction
        total_s = self._world * predicted.makespan_s[rows]
        measured = self.measured
        return Pair(
            predicted=rate(total_s - predicted.compute_s[rows], total_s),
            measured=rate(measured.gaps_s[rows].sum(axis=1), self._world * measured.timeline_s[rows])
            if measured.covered.any()
            else None,
        )

    @property
    def idle(self) -> Pair:
        """The idle rate; measured, with the derived causes."""
        causes = self.idle_causes
        known = [pair.measured for pair in causes.values() if pair.measured is not None]
        return Pair(
            predicted=sum(pair.predicted for pair in causes.values()),
            measured=sum(known) if self.measured.covered.any() else None,
        )

    @property
    def idle_causes(self) -> dict[str, Pair]:
        """Shares of GPU time by cause, over the minibatches that the timeline has.

        A compute span holds the slowdown by transfers beside it and, where the host does not keep ahead, the time until
        the next kernel is launched; a measurement cannot tell these from compute. So that causes can be compared, what
        compute spans take beyond the calibration's uncontended compute counts as `host` up to the predicted floors, and
        as `compute_slowdown` beyond. An error of the compute costs shows there too, and in the times of units.
        """
        rows, predicted, measured = self._rows, self.prediction, self.measured
        total_s = self._world * predicted.makespan_s[rows]
        shares = [rate(predicted.idle_s[rows, i], total_s) for i in range(len(CAUSES))]
        if not measured.covered.any():
            return {c: Pair(predicted=share, measured=None) for c, share in zip(CAUSES, shares, strict=True)}
        found_s = dict(zip(CAUSES, measured.gaps_s[rows].sum(axis=0).tolist(), strict=True))
        excess_s = max(float(measured.compute_s[rows].sum() - predicted.busy_s[rows].sum()), 0.0)
        host_s = min(excess_s, float(predicted.floor_s[rows].sum()))
        found_s["host"] += host_s
        found_s["compute_slowdown"] += excess_s - host_s
        available_s = self._world * float(measured.timeline_s[rows].sum())
        return {
            c: Pair(predicted=share, measured=None if c == IN_EXPOSED else found_s[c] / available_s)
            for c, share in zip(CAUSES, shares, strict=True)
        }

    @property
    def exposed(self) -> Pair:
        """Exposed transfers and port contention together."""
        parts = [self.idle_causes[c] for c in ("exposed_unshard", "exposed_reduce", IN_EXPOSED)]
        known = [part.measured for part in parts if part.measured is not None]
        return Pair(predicted=sum(part.predicted for part in parts), measured=sum(known) if known else None)

    @property
    def compute(self) -> Pair:
        """Mean rank-seconds of compute spans a minibatch: predicted busy, slowdown and floors."""
        rows, measured = self._rows, self.measured
        return Pair(
            predicted=float(self.prediction.compute_s[rows].mean()),
            measured=float(measured.compute_s[rows].mean()) if measured.covered.any() else None,
        )

    @property
    def units(self) -> dict[str, Pair]:
        """Mean seconds of each unit, a rank and microbatch; and of the host for a layer, where both know it.

        The host's backward is not among them: there it may have to wait for the device.
        """
        rows, counts = self._rows, float(self.prediction.microbatches[self._rows].sum())
        predicted_s = self.prediction.unit_s[rows].sum(axis=0) / counts
        measured_s = self.measured.unit_s[rows].sum(axis=0) / counts
        known = self.measured.covered.any()
        found = {
            name: Pair(predicted=float(predicted_s[i]), measured=float(measured_s[i]) if known else None)
            for i, name in enumerate(UNITS)
        }
        host_s = self.prediction.host_forward_s
        if host_s > 0.0 and self.measured.host_forward_s is not None:
            found[HOST_UNIT] = Pair(predicted=host_s, measured=self.measured.host_forward_s)
        return found

    @property
    def memory(self) -> Pair | None:
        """Peak bytes of a rank, what the CUDA context and libraries take included; None where compute was emulated."""
        if self.prediction.memory is None:
            return None
        peak = self.measured.peak_memory_bytes
        return Pair(predicted=float(self.prediction.memory.total_bytes), measured=None if peak is None else float(peak))

    @property
    def _rows(self) -> NDArray[np.bool_]:
        """[B] the minibatches that idle time and units are compared in: those with a timeline, else all."""
        covered = self.measured.covered
        return covered if covered.any() else np.ones_like(covered)

    @property
    def _world(self) -> int:
        return self.run.config.world_size

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        low, high = self.step_ci95_percent
        percent = self.minibatch_percent
        return {
            "run": str(self.run.folder),
            "schedule": self.run.config.schedule,
            "policy": self.run.config.policy,
            "model": self.prediction.model.name,
            "world_size": self._world,
            "hardware": self.prediction.machine.name,
            "provenance": self.prediction.provenance,
            "differences": [asdict(difference) for difference in self.differences],
            "step_s": self.step.as_dict("percent") | {"error_percent_ci95": [low, high]},
            "minibatches": [
                {"minibatch": number, "predicted_s": one, "measured_s": other, "error_percent": error}
                for number, one, other, error in zip(
                    run_rows(self.run).tolist(),
                    self.prediction.makespan_s.tolist(),
                    self.measured.makespan_s.tolist(),
                    percent.tolist(),
                    strict=True,
                )
            ],
            "between_minibatches_s": self.measured.between_s,
            "idle_rate": self.idle.as_dict("points"),
            "idle_causes": {
                cause: pair.as_dict("points") | {"derived": cause in DERIVED}
                for cause, pair in self.idle_causes.items()
            },
            "exposed_and_ports": self.exposed.as_dict("points"),
            "gaps": self.gaps.as_dict("points"),
            "compute_spans_s": self.compute.as_dict("percent"),
            "units_s": {name: pair.as_dict("percent") for name, pair in self.units.items()},
            "peak_memory_bytes": None if self.memory is None else self.memory.as_dict("percent"),
        }
