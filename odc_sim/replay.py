"""Replay a timeline of a real job with its barriers moved: what ranks that meet once a minibatch could save.

Every rank's compute keeps the seconds it was recorded with; only where ranks wait for each other changes:

| barrier | ranks meet | stands for |
|---|---|---|
| layer | before every unit's forward, every layer's backward, and at the end of a microbatch | FSDP's collectives |
| microbatch | at the end of every microbatch | a barrier that collectives always have |
| minibatch | once, at its end | ODC |

The head belongs to the root, which stays gathered from the forward to the end of the backward. So ranks do not meet
between its forward and its backward, nor before the embedding's backward, and `head_loss` spans need no telling apart:
all of a microbatch's run between its last layer's forward and that layer's backward. Units are matched across ranks by
(microbatch, direction, unit); `recompute` is part of the backward. FSDP's prefetch lets a rank lead by a unit or two,
so that a job can be faster than its replay with layer barriers; where ranks differ in the same way in every layer, as
they do when their tokens differ, it is not. The idea is that of ByteDance's replay (What-if
Analysis of Stragglers, OSDI 2025), with barriers moved instead of durations idealised.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.errors import InputError
from odc_sim.measured import DIRECTIONS, check_replayable, compute_spans, running_spans
from odc_sim.metrics import Speedup, rate, speedup
from odc_sim.schedules import BARRIERS, Barrier
from odc_sim.timeline import Timeline, idle_by_cause

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NOTABLE = 0.01
"""A replay that takes this much longer than the recording is remarked on."""
ASSUMPTIONS = (
    "durations stay as recorded when barriers move, with the slowdowns by transfers beside them that are inside them",
    "transfers, copies and host time are free; optimizer and publish take what they took",
    "samples stay on their ranks and in their microbatches",
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replayed:
    """All minibatches with ranks meeting at one kind of barrier."""

    makespan_s: Floats
    """[B]"""
    waits_s: dict[str, Floats]
    """[B] rank-seconds of waiting, by cause (imbalance_layer, imbalance_microbatch, imbalance_minibatch)."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Replay:
    """A recorded job and what moving its barriers makes of it. B minibatches."""

    ranks: int
    layers: int
    recorded_s: Floats
    """[B] from the first start to the last end of any span"""
    busy_s: Floats
    """[B] rank-seconds of compute spans"""
    tail_s: Floats
    """[B] optimizer and publish of the slowest rank, which follow the end of the minibatch in every replay"""
    recorded_waits_s: dict[str, float]
    """Rank-seconds by cause, over all minibatches, where the timeline says why a rank did not compute."""
    barriers: Mapping[Barrier, Replayed | str]
    """By barrier; a text says why there is none."""
    notes: tuple[str, ...]

    @property
    def balanced_s(self) -> Floats:
        """[B] with the same compute shared out evenly: what no placement of samples can beat."""
        return self.busy_s / self.ranks + self.tail_s

    def makespan_s(self, barrier: Barrier) -> Floats | None:
        """[B], or None where ranks would hang at that barrier."""
        found = self.barriers[barrier]
        return None if isinstance(found, str) else found.makespan_s

    def idle_rate(self, makespan_s: Floats) -> float:
        """The share of rank time that is not compute, were minibatches to take `makespan_s` [B]."""
        return rate(self.ranks * makespan_s - self.busy_s, self.ranks * makespan_s)

    def ceilings(self) -> dict[str, Speedup]:
        """What ODC can give at most, as speedups with bootstrap intervals over minibatches.

        `placement` and `balanced`: over layer barriers, with samples where they were and with perfect balance (absent
        where layer barriers hang); `placement_recorded` and `balanced_recorded`: over the job as recorded, whose
        transfers count as saved too.
        """
        bases = {"": self.makespan_s("layer"), "_recorded": self.recorded_s}
        odc_s = self.makespan_s("minibatch")
        assert odc_s is not None
        return {
            f"{name}{suffix}": speedup(base_s, own_s, 1, np.random.default_rng(0))
            for suffix, base_s in bases.items()
            if base_s is not None
            for name, own_s in (("placement", odc_s), ("balanced", self.balanced_s))
        }

    def as_dict(self) -> dict[str, Any]:
        """JSON-able: seconds a minibatch on average, idle rates, ceilings, and what the replay assumes."""
        total_s = self.ranks * float(self.recorded_s.sum())

        def entry(makespan_s: Floats) -> dict[str, Any]:
            return {
                "makespan_s": float(makespan_s.mean()),
                "over_recorded": rate(self.recorded_s, makespan_s),
                "idle_rate": self.idle_rate(makespan_s),
            }

        def replayed(found: Replayed | str) -> dict[str, Any]:
            if isinstance(found, str):
                return {"verdict": found}
            total = self.ranks * found.makespan_s
            causes = {cause: rate(waits_s, total) for cause, waits_s in found.waits_s.items()}
            return {**entry(found.makespan_s), "idle_causes": causes, "verdict": None}

        return {
            "ranks": self.ranks,
            "layers": self.layers,
            "minibatches": int(self.recorded_s.size),
            "recorded": {
                **entry(self.recorded_s),
                "idle_causes": {cause: waits_s / total_s for cause, waits_s in self.recorded_waits_s.items()},
            },
            "barriers": {barrier: replayed(found) for barrier, found in self.barriers.items()},
            "balanced": entry(self.balanced_s),
            "optimizer_and_publish_s": float(self.tail_s.mean()),
            "ceilings": {
                name: {"speedup": found.value, "speedup_ci95": [found.low, found.high]}
                for name, found in self.ceilings().items()
            },
            "assumptions": list(ASSUMPTIONS),
            "notes": list(self.notes),
        }


def replay(timeline: Timeline, where: str = "timeline") -> Replay:
    """Replay every minibatch of `timeline` with ranks meeting at every layer, microbatch, and minibatch.

    Raises:
        InputError: what cannot be replayed: no compute spans, spans without unit or microbatch, ranks with different
            units or without any span in a minibatch, gaps in the numbering; `where` starts the message.
    """
    ranks = np.unique(timeline.rank)
    layers = check_replayable(timeline, where)
    computes = compute_spans(timeline)
    columns: dict[Barrier, list[tuple[float, dict[str, float]]]] = {barrier: [] for barrier in BARRIERS}
    recorded: list[tuple[float, float, float]] = []
    uneven: list[str] = []
    absent = expected = 0
    for number, counts, table, present, makespan_s, tail_s in _minibatches(timeline, ranks, layers, where):
        if counts.min() != counts.max():
            a, b = int(counts.argmax()), int(counts.argmin())
            uneven.append(
                f"rank {ranks[a]} runs {counts[a]} microbatches, rank {ranks[b]} runs {counts[b]} in minibatch {number}"
            )
        wanted = present.any(axis=(0, 2), keepdims=True) & present.any(axis=1, keepdims=True)
        absent, expected = absent + int((wanted & ~present).sum()), expected + int(wanted.sum())
        for barrier in BARRIERS:
            columns[barrier].append(_meet(table, barrier, tail_s))
        recorded.append((makespan_s, float(table.sum()), tail_s))
    barriers: dict[Barrier, Replayed | str] = {barrier: _replayed(columns[barrier]) for barrier in BARRIERS}
    if uneven:
        barriers["layer"] = f"hangs: {uneven[0]} (counts differ in {len(uneven)} of {len(recorded)} minibatches)"
    notes = [f"{absent} of {expected} units in microbatches have no span: taken as 0 s"] if absent else []
    recorded_s, busy_s, tails_s = (np.array(part, dtype=np.float64) for part in zip(*recorded, strict=True))
    slow = barriers["layer"]
    if not isinstance(slow, str):
        longer = float(slow.makespan_s.sum() / recorded_s.sum()) - 1.0
        if longer > NOTABLE:
            notes.append(
                f"layer barriers would take {100.0 * longer:.0f} % longer than the job did, "
                "so it was not held at each: trust the ceilings over the recording"
            )
    idle = [int(rank) for rank in ranks if not (computes & (timeline.rank == rank)).any()]
    if idle:
        notes.append(f"rank {', '.join(map(str, idle))} computes nothing in the whole timeline")
    return Replay(
        ranks=int(ranks.size),
        layers=layers,
        recorded_s=recorded_s,
        busy_s=busy_s,
        tail_s=tails_s,
        recorded_waits_s={cause: s for cause, s in idle_by_cause(timeline).items() if s > 0.0},
        barriers=barriers,
        notes=tuple(notes),
    )


def _meet(table: Floats, barrier: Barrier, tail_s: float) -> tuple[float, dict[str, float]]:
    """Makespan and waits of one minibatch: `table` [M, segments, D] holds the seconds between two layer barriers."""
    parts = {
        "layer": table,
        "microbatch": table.sum(axis=1, keepdims=True),
        "minibatch": table.sum(axis=(0, 1), keepdims=True),
    }[barrier]
    slowest = parts.max(axis=2, keepdims=True)
    gaps = (slowest - parts).sum(axis=2)  # [M, segments]: what ranks wait at the end of each
    last = "imbalance_minibatch" if barrier == "minibatch" else "imbalance_microbatch"
    waits = {last: float(gaps[:, -1].sum())}
    if barrier == "layer":
        waits = {"imbalance_layer": float(gaps[:, :-1].sum())} | waits
    return float(slowest.sum()) + tail_s, waits


def _replayed(column: list[tuple[float, dict[str, float]]]) -> Replayed:
    return Replayed(
        makespan_s=np.array([makespan_s for makespan_s, _ in column]),
        waits_s={cause: np.array([waits[cause] for _, waits in column]) for cause in column[0][1]},
    )


def _minibatches(
    timeline: Timeline, ranks: NDArray[np.int32], layers: int, where: str
) -> Iterator[tuple[int, Ints, Floats, NDArray[np.bool_], float, float]]:
    """For each: its number, microbatch counts [D], seconds and presence [M, segments, D], recorded makespan, and
    optimizer and publish.

    Segments lie between layer barriers: 0..L the forward of each unit (the last with the head), then the backward of
    layers L..1 (the last with the embedding).
    """
    computes, runs = compute_spans(timeline), running_spans(timeline)
    order = np.argsort(timeline.minibatch, kind="stable")
    numbers, starts = np.unique(timeline.minibatch[order], return_index=True)
    seconds = timeline.end_s - timeline.start_s
    unit = timeline.unit.astype(np.int64)
    direction = np.array([DIRECTIONS.get(kind, 0) for kind in timeline.kind.tolist()])
    segment = np.select([direction == 0, direction == 1], [unit, layers], 2 * layers + 1 - np.maximum(unit, 1))
    segment = np.minimum(segment, 2 * layers)  # without layers all is one segment
    column = np.searchsorted(ranks, timeline.rank)
    ends = (timeline.stream == "compute") & np.isin(timeline.kind, ["optimizer", "publish"])
    for number, rows in zip(numbers.tolist(), np.split(order, starts[1:]), strict=True):
        gone = np.setdiff1d(ranks, timeline.rank[rows])
        if gone.size:
            raise InputError(f"{where}: rank {gone[0]} has no spans in minibatch {number}, expected every rank in each")
        mine = rows[computes[rows]]
        microbatch = timeline.microbatch[mine].astype(np.int64)
        counts = np.zeros(ranks.size, dtype=np.int64)
        np.maximum.at(counts, column[rows[runs[rows]]], timeline.microbatch[rows[runs[rows]]] + 1)
        shape = (int(counts.max()), 2 * layers + 1, int(ranks.size))
        table, present = np.zeros(shape), np.zeros(shape, dtype=np.bool_)
        at = (microbatch, segment[mine], column[mine])
        np.add.at(table, at, seconds[mine])
        present[at] = True
        tails_s = np.bincount(column[rows[ends[rows]]], seconds[rows[ends[rows]]], ranks.size)
        makespan_s = float(timeline.end_s[rows].max() - timeline.start_s[rows].min())
        yield number, counts, table, present, makespan_s, float(tails_s.max(initial=0.0))
