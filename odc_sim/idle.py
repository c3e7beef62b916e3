"""Why was a rank not computing? Splits every gap of a compute stream into exclusive causes.

A gap that ends with a transfer is explained in this order, each part at most what is left of it:

1. imbalance: the time in which the transfer's communicator stood still because a peer had not arrived although this
rank had; 2. host: the time before this rank's host had issued the transfer;
3. port_contention: what sharing ports added to the transfer;
4. exposed_unshard or exposed_reduce: the rest.

Copies on the compute stream (copy-out, pack, hold) are part of the transfer they belong to, so they count as exposed
too.
"""

from collections.abc import Iterator
from typing import NamedTuple

from odc_sim.program import Op

EXPOSED = {
    "copy_out": "exposed_unshard",
    "pack": "exposed_reduce",
    "hold": "exposed_reduce",
    "finalize": "exposed_reduce",
}


class Span(NamedTuple):
    """One row of a timeline; seconds from the minibatch's first start."""

    rank: int
    stream: str
    kind: str
    cause: str
    """Empty for compute and for transfers on their own streams; an idle cause for everything else."""
    unit: int
    microbatch: int
    start_s: float
    end_s: float


def _explain(
    op: Op, gap_start_s: float, collectives: dict[str, list[Op]], places: dict[Op, int]
) -> Iterator[tuple[str, float]]:
    """(cause, seconds) parts of the gap before `op`; they sum to the gap. `places`: of each collective in its list."""
    gap_s = op.start_s - gap_start_s
    if op.awaited is None:  # nothing but the host, or a barrier that ranks reach late
        wait_s = op.start_s - max(op.ready_s, gap_start_s) if op.kind == "meet" else 0.0
        yield op.cause, wait_s
        yield "host", gap_s - wait_s
        return
    left_s = gap_s
    chain = collectives.get(op.awaited.communicator, [])
    position = places[op.awaited] if op.awaited.communicator else -1
    while position >= 0 and chain[position].start_s > gap_start_s:
        y = chain[position]
        free_s = chain[position - 1].end_s if position else 0.0
        part_s = min(op.start_s, y.start_s) - max(gap_start_s, y.ready_s, free_s)
        if part_s > 0.0:
            yield y.cause, part_s
            left_s -= part_s
        position -= 1
    part_s = min(max(op.awaited.issue_s - gap_start_s, 0.0), left_s)
    yield "host", part_s
    left_s -= part_s
    actual_s = op.awaited.end_s - op.awaited.start_s
    part_s = min(max(actual_s - op.awaited.seconds, 0.0), left_s)
    yield "port_contention", part_s
    left_s -= part_s
    yield EXPOSED[op.kind], left_s


def account(rank: int, ops: list[Op]) -> Iterator[Span]:
    """Every span of one rank's streams: waits with their cause, copies, compute, transfers."""
    collectives: dict[str, list[Op]] = {}
    places: dict[Op, int] = {}
    for op in ops:
        if op.communicator:
            chain = collectives.setdefault(op.communicator, [])
            places[op] = len(chain)
            chain.append(op)
    free_s = 0.0
    for op in ops:
        if op.stream != "compute":
            if op.kind in ("unshard", "reduce") and op.end_s > op.start_s:
                yield Span(rank, op.stream, op.kind, "", op.unit, op.microbatch, op.start_s, op.end_s)
            continue
        if op.start_s > free_s:
            clock_s = free_s
            for cause, seconds in _explain(op, free_s, collectives, places):
                if seconds > 0.0:
                    yield Span(rank, "compute", "wait", cause, op.unit, op.microbatch, clock_s, clock_s + seconds)
                    clock_s += seconds
        free_s = op.end_s
        if op.end_s > op.start_s:
            kind = {"copy_out": "unshard", "pack": "reduce", "hold": "reduce"}.get(op.kind, op.kind)
            yield Span(rank, "compute", kind, EXPOSED.get(op.kind, ""), op.unit, op.microbatch, op.start_s, op.end_s)
