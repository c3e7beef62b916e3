"""What a run measured, in the simulator's terms."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import CAUSES
from odc_sim.measured import compute_spans
from odc_sim.measured_idle import attribute
from odc_sim.run_files import Run
from odc_sim.timeline import Timeline
from odc_sim.validate_predict import UNITS, run_rows

Floats = NDArray[np.float64]
MOST_HELD_BACK = 1.5
"""Upper over lower quartile of what the host took; more if the device's queue was often full."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Measured:
    """A run's finished minibatches [B]; seconds as executed, ranks summed. Rows that the timeline lacks are NaN."""

    makespan_s: Floats
    """[B] of steps.csv"""
    between_s: float | None
    """Mean time between minibatches, which is in no makespan; None where it was not recorded."""
    timeline_s: Floats
    """[B] from 0 to the last end of a span"""
    compute_s: Floats
    """[B] rank-seconds of compute spans"""
    gaps_s: Floats
    """[B, causes] rank-seconds between them; `compute_slowdown` and launch-bound units lie inside the spans"""
    unit_s: Floats
    """[B, UNITS] over ranks and microbatches, a layer being the mean of all layers"""
    host_forward_s: float | None
    """What the slowest rank's host took to enqueue a layer's forward: the median over the first quarter of the layers
    in all first microbatches. None where the timeline has no host, or the device's queue was often full."""
    peak_memory_bytes: int | None

    @property
    def covered(self) -> NDArray[np.bool_]:
        """[B] whether the timeline has the minibatch."""
        return ~np.isnan(self.timeline_s)


def measure(run: Run, layers: int) -> Measured:
    """A run's own numbers.

    Raises:
        InputError: its timeline is not one that `odc train` records (see `measured_idle.attribute`).
    """
    numbers = run_rows(run)
    between_s = run.steps["between_s"].dropna()
    timeline_s, compute_s = np.full((2, numbers.size), np.nan)
    gaps_s, unit_s = np.full((numbers.size, len(CAUSES)), np.nan), np.full((numbers.size, len(UNITS)), np.nan)
    host_forward_s = None
    if run.timeline is not None and len(run.timeline):
        timeline = attribute(run.timeline, run.config.schedule, one_stream=run.config.device == "cpu")
        seconds = timeline.end_s - timeline.start_s
        place = np.searchsorted(numbers, timeline.minibatch)
        there = np.isin(numbers, timeline.minibatch)

        def total(rows: NDArray[np.bool_]) -> Floats:
            return np.bincount(place[rows], seconds[rows], numbers.size).astype(np.float64)

        timeline_s[there] = 0.0
        on_device = timeline.stream != "host"
        np.maximum.at(timeline_s, place[on_device], timeline.end_s[on_device])
        compute_s[there] = total(compute_spans(timeline))[there]
        idle = timeline.stream == "compute"
        gaps = np.stack([total(idle & (timeline.cause == cause)) for cause in CAUSES], axis=1)
        gaps_s[there] = gaps[there]
        unit_s[there] = np.stack([total(rows) for rows in _units(timeline)], axis=1)[there]
        unit_s[:, :2] /= layers
        enqueued = (timeline.stream == "host") & (timeline.kind == "forward") & (timeline.unit > 0)
        # later it may be held back, once the device's queue is full
        enqueued &= (timeline.microbatch == 0) & (timeline.unit <= max(1, layers // 4))
        host_forward_s = _host_s([seconds[enqueued & (timeline.rank == rank)] for rank in range(run.config.world_size)])
    return Measured(
        makespan_s=run.steps["makespan_s"].to_numpy(dtype=np.float64),
        between_s=float(between_s.mean()) if between_s.size else None,
        timeline_s=timeline_s,
        compute_s=compute_s,
        gaps_s=gaps_s,
        unit_s=unit_s,
        host_forward_s=host_forward_s,
        peak_memory_bytes=int(run.steps["peak_memory_bytes"].max()) or None,
    )


def _host_s(ranks: Sequence[Floats]) -> float | None:
    """The slowest rank's median [n]; None where a rank has none, or was often held back even so."""
    if not all(seconds.size for seconds in ranks):
        return None
    quartiles = np.array([np.quantile(seconds, (0.25, 0.5, 0.75)) for seconds in ranks])  # [ranks, 3]
    steady = (quartiles[:, 0] > 0.0) & (quartiles[:, 2] <= MOST_HELD_BACK * quartiles[:, 0])
    return float(quartiles[:, 1].max()) if steady.all() else None


def _units(timeline: Timeline) -> tuple[NDArray[np.bool_], ...]:
    """Which rows [n] are compute of each of UNITS."""
    computes, root = compute_spans(timeline), timeline.unit == 0
    forward = computes & (timeline.kind == "forward")
    backward = computes & np.isin(timeline.kind, ["backward", "recompute"])
    # Of the root's backward the last part is the embedding's, what comes before it the head's.
    rows = np.flatnonzero(backward & root)
    keys: list[NDArray[np.int32]] = [timeline.minibatch[rows], timeline.rank[rows], timeline.microbatch[rows]]
    order = np.lexsort((timeline.start_s[rows], keys[2], keys[1], keys[0]))
    last = np.ones(rows.size, dtype=np.bool_)
    last[:-1] = np.any([key[order][1:] != key[order][:-1] for key in keys], axis=0)
    embedding = np.zeros(len(timeline), dtype=np.bool_)
    embedding[rows[order[last]]] = True
    head = (computes & (timeline.kind == "head_loss")) | (backward & root & ~embedding)
    return forward & ~root, backward & ~root, head, (forward & root) | embedding
