"""What layers take in training beside what FSDP has in flight, from runs of `odc train` whose microbatches are equal.

    collective-deferred   a minibatch's later forwards and earlier backwards: nothing in flight
    collective            an unshard beside each forward; a reduction and an unshard beside each backward, and `+=` too
                          from a minibatch's second one on
    odc                   the same, one-sided

What transfers cost a layer depends on which of its kernels they meet: a product that finds a few multiprocessors taken
takes twice as long. In layers that `odc calibrate` plays by themselves, with transfers at about the right places, a
backward beside collectives lost 0.38 ms where training lost 0.49 (reports/validation-h200).
"""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.run_files import Run

Array = NDArray[np.float64]
State = Literal[
    "forward",
    "first backward",
    "later backward",
    "unshard",
    "reduce",
    "copy out",
    "hold",
    "host",
    "late",
]

ALONE = "collective-deferred"
SCHEDULES = (ALONE, "collective", "odc")
ROUNDS = 3
"""Parts of a run that are compared with each other."""
LEAST_MINIBATCHES = 13
"""Four in each part, and the first, which does not count."""
BEFORE, BEHIND = 1, 1
"""Layers that do not count: of the first one the gather is not hidden, and behind the head, whose products clock the
device down, a layer is slower."""
HOST_PART = 4
"""Of a minibatch's first forwards, those of so much of the layers tell the host's time: later the device's queue may be
full, and the host wait for it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained:
    """Median seconds of a layer, of a transfer of its size, and of the host for a layer's forward, by schedule and
    state: [ranks, rounds].

    "late" is no time, but the part of the layers that the device was at before the host had enqueued them.
    """

    seconds: dict[str, dict[State, Array]]

    def of(self, schedule: str, state: State) -> Array:
        """[ranks, rounds]"""
        return self.seconds[schedule][state]


def read_trained(runs: Sequence[Run]) -> Trained:
    """From one run under each of SCHEDULES.

    Raises:
        InputError: these are not such runs; the line says which, and what was expected.
    """
    by_schedule: dict[str, Run] = {run.config.schedule: run for run in runs}
    if sorted(run.config.schedule for run in runs) != sorted(SCHEDULES):
        got = ", ".join(run.config.schedule for run in runs)
        raise InputError(f"got runs under {got or 'nothing'}, expected one each under {', '.join(SCHEDULES)}")
    first = by_schedule[ALONE]
    for run in by_schedule.values():
        _check(run, first)
    return Trained(seconds={schedule: _rounds(by_schedule[schedule]) for schedule in SCHEDULES})


def _check(run: Run, first: Run) -> None:
    config = run.config
    if config.device != "cuda" or config.compute != "real":
        raise InputError(f"{run.folder}: was not computed on GPUs, where transfers run beside compute")
    recorded = 0 if run.timeline is None else np.unique(run.timeline.minibatch).size
    if min(recorded, len(run.steps)) < LEAST_MINIBATCHES:
        raise InputError(f"{run.folder}: has no timeline of at least {LEAST_MINIBATCHES} minibatches; train longer")
    if run.plan.model != config.model:
        raise InputError(f"{run.folder}: config.toml says model {config.model!r}, the plan {run.plan.model!r}")
    if (config.gather_dtype, config.reduce_dtype) != ("bf16", "fp32"):
        got = f"gathers {config.gather_dtype} and reduces {config.reduce_dtype}"
        raise InputError(f"{run.folder}: {got}, expected bf16 and fp32, as odc calibrate times layers")
    for name in ("model", "world_size", "recompute", "chunked_loss_tokens"):
        mine, theirs = getattr(config, name), getattr(first.config, name)
        if mine != theirs:
            raise InputError(f"{run.folder}: got {name} {mine}, expected {theirs} as in {first.folder}")
    sizes = {(int(t), int(s)) for t, s in zip(run.plan.tokens(), run.plan.squares(), strict=True)}
    sizes |= {(int(t), int(s)) for t, s in zip(first.plan.tokens(), first.plan.squares(), strict=True)}
    if len(sizes) > 1:
        tokens = sorted(tokens for tokens, _ in sizes)
        raise InputError(
            f"{run.folder}: got microbatches of {tokens[0]:,} to {tokens[-1]:,} tokens, expected equal ones in all "
            "runs: plan with lengths that are all the same"
        )
    if int(run.plan.counts().min()) < 2:
        raise InputError(f"{run.folder}: got minibatches of one microbatch, expected at least two on every rank")


def _rounds(run: Run) -> dict[State, Array]:
    """[ranks, rounds] of every state, without the first minibatch, in which the device is not yet warm."""
    timeline = run.timeline
    assert timeline is not None
    parts: dict[tuple[int, int], list[Span]] = {}
    columns = [getattr(timeline, name).tolist() for name in ("minibatch", *Span._fields)]
    for number, *fields in zip(*columns, strict=True):
        span = Span(*fields)
        if not span.cause:
            parts.setdefault((span.rank, number), []).append(span)
    layers = int(timeline.unit.max())
    later = np.unique(timeline.minibatch)[1:].tolist()
    for rank, number in itertools.product(range(run.config.world_size), later):
        if not any(span.kind == "forward" for span in parts.get((rank, number), ())):
            raise InputError(f"{run.folder}: its timeline lacks the forwards of rank {rank} in minibatch {number}")
    found = [
        [
            medians([_states(parts[rank, number], layers, run) for number in part.tolist()])
            for part in np.array_split(np.array(later), ROUNDS)
        ]
        for rank in range(run.config.world_size)
    ]
    seconds = {state: np.array([[each[state] for each in of_rank] for of_rank in found]) for state in found[0][0]}
    missing = [state for state, values in seconds.items() if np.isnan(values).any()]
    if missing:
        raise InputError(f"{run.folder}: its timeline lacks spans of {', '.join(missing)}")
    return seconds


def _states(rows: Sequence[Span], layers: int, run: Run) -> dict[State, list[float]]:
    try:
        return states(rows, layers)
    except KeyError as error:
        raise InputError(f"{run.folder}: its timeline lacks a span of {error.args[0]}") from None


def medians(minibatches: Iterable[dict[State, list[float]]]) -> dict[State, float]:
    """Over layers and minibatches; of "late" the mean."""
    each = list(minibatches)
    found: dict[State, float] = {}
    for state in each[0]:
        values = [value for minibatch in each for value in minibatch[state]]
        middle = statistics.fmean if state == "late" else statistics.median
        found[state] = middle(values) if values else float("nan")
    return found


def states(rows: Sequence[Span], layers: int) -> dict[State, list[float]]:
    """Of one minibatch of a rank: the seconds of its layers by what is in flight beside them, and of transfers."""
    counted = range(1 + BEFORE, 1 + layers - BEHIND)
    of_compute = {(row.kind, row.unit, row.microbatch): row for row in rows if row.stream == "compute"}
    of_host = {(row.kind, row.unit, row.microbatch): row for row in rows if row.stream == "host"}
    of_reduce = {(row.unit, row.microbatch): row for row in rows if row.stream == "reduce"}
    found: dict[State, list[float]] = {
        "forward": [],
        "first backward": [],
        "later backward": [],
        "unshard": [row.end_s - row.start_s for row in rows if row.stream == "unshard" and row.unit in counted],
        "reduce": [row.end_s - row.start_s for row in rows if row.stream == "reduce" and row.unit in counted],
        "copy out": [],
        "hold": [],
        "host": [],
        "late": [],
    }
    for unit in counted:
        for microbatch in range(1 + max(row.microbatch for row in rows)):
            forward, backward = (of_compute[kind, unit, microbatch] for kind in ("forward", "backward"))
            host = of_host["forward", unit, microbatch]
            if microbatch == 0 and unit <= max(2, layers // HOST_PART):
                found["host"].append(host.end_s - host.start_s)
            if microbatch > 0:
                found["forward"].append(forward.end_s - forward.start_s)
                found["late"].append(float(host.end_s > forward.start_s))
            found["later backward" if microbatch else "first backward"].append(backward.end_s - backward.start_s)
            # up to the next backward; of unreduced gradients only their cast, since nothing is copied out then
            if microbatch == 0:
                found["hold"].append(of_compute["backward", unit - 1, microbatch].start_s - backward.end_s)
            # between the reduction of the unit before, which begins when its gradients are packed, and this backward
            reduce = of_reduce.get((unit + 1, microbatch))
            if reduce is not None:
                found["copy out"].append(backward.start_s - reduce.start_s)
    return found
