"""Why was a rank not computing? Splits every gap of a *measured* compute stream into the causes of `odc_sim.idle`.

A measurement knows when spans began and ended, not what they waited for. What a gap between two compute spans X and Y
awaits follows from the program of `fully_shard` (docs/physics.md); a gap has up to four parts, in this order:

| part | until | awaits | what is left of it is |
|---|---|---|---|
| pack of X's gradients | the reduction of X starts | the reduction before it (edge 8) | exposed_reduce |
| end of the microbatch, where the compute stream waits (edge 12) | the last reduction ends | it | exposed_reduce |
| end of the minibatch, one-sided | the last rank has arrived | the ranks | imbalance_minibatch |
| copy-out of Y | Y starts | Y's gather (edge 4) | exposed_unshard |

Inside a part, in this order: while a collective that it awaits stood still because a peer had not arrived although this
rank had, imbalance; before the host had issued it, or while the host was enqueuing Y still when Y began, `host`; the
rest as in the table. A gap that awaits nothing is `host`. Copies are part of the gaps, so they count as exposed; of a
rank alone, which gathers nothing, the copy-outs do.

Not in a measurement: `port_contention` (part of exposed here) and `compute_slowdown` (inside compute spans).
"""

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.measured import DIRECTIONS
from odc_sim.measured_one_stream import parts_on_one_stream
from odc_sim.measured_rank import Late, RankSpans
from odc_sim.schedules import Schedule, make_schedule
from odc_sim.timeline import Timeline

STEPS = ("optimizer", "publish")
"""Kinds of spans on the compute stream that are idle for a cause of the same name."""


class _Part(NamedTuple):
    """A part of a gap up to `end_s`, and the transfer it awaits."""

    end_s: float
    cause: str
    """What is left of it."""
    awaited: Span | None = None
    host: tuple[tuple[float, float], ...] = ()
    """From when to when the host was not ready."""


def attribute(timeline: Timeline, schedule: str, *, one_stream: bool = False) -> Timeline:
    """A measured timeline with a `wait` row and its cause for every moment in which a compute stream did not compute.

    `optimizer` and `publish` rows get the cause of their name. After that, each rank's compute rows follow each other
    without a gap from 0 to the end of the minibatch. Waits that were there already are replaced.

    Args:
        timeline: rows as `odc train` records them: compute spans with unit and microbatch, transfers on the streams
            `unshard` and `reduce` from when the stream reached them, `host` rows where the host was timed.
        schedule: the name of the schedule it ran.
        one_stream: nothing ran beside anything, as on a CPU: a gap is what happened in it, whatever the program awaits.

    Raises:
        InputError: an unknown schedule, a compute span of another kind, or ranks that took part in different
            collectives.
    """
    rules = make_schedule(schedule)
    ranks = np.unique(timeline.rank).tolist()
    minibatches: list[tuple[int, list[Span]]] = []
    for number in np.unique(timeline.minibatch).tolist():
        spans = timeline.spans(number)
        _check(spans, number)
        end_s = max((span.end_s for span in spans if span.stream != "host"), default=0.0)
        by_rank = {rank: RankSpans.of(span for span in spans if span.rank == rank) for rank in ranks}
        if not rules.one_sided:
            _find_late(by_rank, rules, number)
        arrived_s = max((rank.arrival_s for rank in by_rank.values()), default=0.0)
        found: list[Span] = []
        for number_of_rank, rank in by_rank.items():
            gaps = _Gaps(rank, rules, arrived_s, one_stream, alone=len(ranks) == 1)
            found += _filled(number_of_rank, rank, gaps, end_s)
            found += (span for span in spans if span.rank == number_of_rank and span.stream != "compute")
        minibatches.append((number, found))
    return Timeline.from_spans(minibatches)


def _check(spans: Sequence[Span], minibatch: int) -> None:
    allowed = {"compute": (*DIRECTIONS, *STEPS, "wait"), "unshard": ("unshard",), "reduce": ("reduce",)}
    for span in spans:
        if span.kind not in allowed.get(span.stream, (span.kind,)):
            raise InputError(
                f"timeline: minibatch {minibatch}, rank {span.rank}: a span of kind {span.kind} on the stream "
                f"{span.stream}, expected {', '.join(allowed[span.stream])} as odc train records them"
            )


def _find_late(ranks: Mapping[int, RankSpans], rules: Schedule, minibatch: int) -> None:
    """For each rank, when it stood at a collective that a peer had not reached.

    The collectives of a communicator run one at a time, so a rank is kept waiting by the peers only from when the
    collective before has ended.
    """
    names = {rank: list(_named(own)) for rank, own in ranks.items()}
    one = next(iter(names))
    known = {name for name, _ in names[one]}
    for rank, own in names.items():
        other = {name for name, _ in own}
        for has, lacks, missing in ((one, rank, known - other), (rank, one, other - known)):
            if missing:
                kind, unit, number = min(missing)
                raise InputError(
                    f"timeline: minibatch {minibatch}: rank {lacks} has fewer than {number + 1} spans of the {kind} of "
                    f"unit {unit}, rank {has} has so many; expected the same collectives on every rank"
                )
    last_s: dict[tuple[str, int, int], float] = {}
    for own in names.values():
        for name, span in own:
            last_s[name] = max(last_s.get(name, -math.inf), span.start_s)
    for rank, own in names.items():
        free_s = -math.inf
        for name, span in sorted(own, key=lambda item: item[1].end_s):
            start_s, end_s = max(span.start_s, free_s), min(last_s[name], span.end_s)
            if end_s > start_s:
                ranks[rank].late.append(Late(start_s, end_s, _lateness(span, rules)))
            free_s = span.end_s


def _named(rank: RankSpans) -> Iterator[tuple[tuple[str, int, int], Span]]:
    """Each transfer with a name that is the same on every rank: kind, unit, and how many of these came before."""
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for span in (*rank.unshards, *rank.reduces):
        yield (span.kind, span.unit, counts[span.kind, span.unit]), span
        counts[span.kind, span.unit] += 1


def _lateness(span: Span, rules: Schedule) -> str:
    if rules.deferred and span.kind == "reduce":
        return "imbalance_minibatch"
    return "imbalance_microbatch" if span.kind == "reduce" and span.unit == 0 else "imbalance_layer"


def _filled(number: int, rank: RankSpans, gaps: "_Gaps", end_s: float) -> Iterator[Span]:
    """The compute stream of rank `number` from 0 to `end_s`, waits included."""
    before: Span | None = None
    clock_s = 0.0
    for span in (*rank.computes, None):
        start_s = end_s if span is None else span.start_s
        if start_s > clock_s:
            unit, microbatch = (-1, -1) if span is None else (span.unit, span.microbatch)
            for cause, piece_start_s, piece_end_s in _pieces(
                rank.late, clock_s, gaps.parts(before, span, clock_s, start_s)
            ):
                yield Span(number, "compute", "wait", cause, unit, microbatch, piece_start_s, piece_end_s)
        if span is not None:
            yield span._replace(cause=span.kind if span.kind in STEPS else "")
            before, clock_s = span, max(clock_s, span.end_s)


class _Gaps:
    """What the gaps of one rank's compute stream consist of."""

    def __init__(
        self, rank: RankSpans, rules: Schedule, arrived_s: float, one_stream: bool, *, alone: bool = False
    ) -> None:
        self.rank, self.rules, self.arrived_s, self.one_stream, self.alone = rank, rules, arrived_s, one_stream, alone
        self.works = rank.works
        self.transfers = sorted((*rank.unshards, *rank.reduces), key=lambda span: span.start_s)

    def parts(self, before: Span | None, after: Span | None, start_s: float, end_s: float) -> Iterator[_Part]:
        """The parts of the gap from `start_s` to `end_s`, between `before` and `after` (None: nothing); some are
        empty."""
        if before is not None and before.kind in STEPS:  # at the very end, others' steps take longer
            yield _Part(end_s, "imbalance_minibatch" if after is None else "host")
            return
        closes = before is not None and self.rank.closing.get((before.unit, before.microbatch)) is before
        reduction = self.rank.reduction.get((before.unit, before.microbatch)) if before is not None and closes else None
        last = not self.works or before is self.works[-1]
        if self.one_stream:
            arrived_s = self.arrived_s if self.rules.one_sided and last else None
            for part in parts_on_one_stream(self.transfers, after, start_s, end_s, arrived_s):
                yield _Part(*part)
            return
        if before is not None and reduction is not None:
            yield self._pack(before, reduction, end_s)
            if before.unit == 0 and (last or not self.rules.overlap_tail):
                mine = [span for span in self.rank.reduces if 0 <= span.microbatch <= before.microbatch]
                slowest = max(mine, key=lambda span: span.end_s)
                yield _Part(min(end_s, slowest.end_s), "exposed_reduce", slowest)
        if self.rules.one_sided and last:
            yield _Part(min(end_s, self.arrived_s), "imbalance_minibatch")
            pulls_s = [span.end_s for span in self.rank.reduces if span.microbatch < 0]
            yield _Part(min(end_s, max(pulls_s, default=0.0)), "exposed_reduce")
        yield self._unshard(before, closes and reduction is None, after, end_s)

    def _pack(self, before: Span, reduction: Span, end_s: float) -> _Part:
        """Until the reduction of `before` could start; it awaits the reduction ahead of it."""
        place = bisect_left(self.rank.reduces, reduction.start_s, key=lambda span: span.start_s)
        ahead = self.rank.reduces[place - 1] if place else None
        host = self.rank.host_of(before)
        return _Part(
            min(end_s, reduction.start_s),
            "exposed_reduce",
            ahead,
            () if host is None else ((-math.inf, host.end_s),),
        )

    def _unshard(self, before: Span | None, holds: bool, after: Span | None, end_s: float) -> _Part:
        """Until `after` starts. `holds`: the gradients of `before` were added to an unreduced sum first."""
        if after is None or after.kind not in DIRECTIONS:
            return _Part(end_s, "host")
        gather, host = self.rank.gather_of(after), self.rank.host_of(after)
        bound = host is not None and host.end_s >= end_s  # the host was still at it when it began
        if gather is None:  # of one rank parameters are copied where they are used, and gathered never
            cause = "exposed_reduce" if holds else "exposed_unshard" if self.alone else "host"
            return _Part(end_s, "host" if bound else cause)
        late = [] if before is not None else [(-math.inf, self.rank.start_s)]
        if host is not None:
            above = self.rank.hosts.get(("backward", after.unit + 1, after.microbatch))
            # forward, a unit's own hook issues its gather; backward, that of the unit above
            issuing = above[0] if above and after.kind != "forward" else host
            late += [(-math.inf, issuing.start_s), (gather.end_s, math.inf if bound else host.start_s)]
        held = holds and before is not None and gather.end_s <= before.end_s
        return _Part(end_s, "exposed_reduce" if held else "exposed_unshard", gather, tuple(late))


def _pieces(late: Sequence[Late], start_s: float, parts: Iterable[_Part]) -> Iterator[tuple[str, float, float]]:
    """(cause, start, end) of the pieces of a gap that begins at `start_s`, neighbours of one cause as one."""
    cause, since_s, clock_s = "", start_s, start_s
    for part in parts:
        if part.end_s <= clock_s:
            continue
        until_s = part.end_s if part.awaited is None else min(part.end_s, part.awaited.end_s)
        stood = [x for x in late if part.awaited is not None and x.start_s < until_s and x.end_s > clock_s]
        edges = {part.end_s, *(min(x.end_s, until_s) for x in stood), *(x.start_s for x in stood)}
        edges |= {edge_s for interval in part.host for edge_s in interval}
        for edge_s in sorted(edge_s for edge_s in edges if clock_s < edge_s <= part.end_s):
            found = part.cause
            if any(begin_s <= clock_s and edge_s <= end_s for begin_s, end_s in part.host):
                found = "host"
            for x in stood:
                if x.start_s <= clock_s and edge_s <= min(x.end_s, until_s):
                    found = x.cause
            if found != cause:
                if clock_s > since_s:
                    yield cause, since_s, clock_s
                cause, since_s = found, clock_s
            clock_s = edge_s
    if clock_s > since_s:
        yield cause, since_s, clock_s
