"""Causes of measured gaps: by hand, against the engine's own accounting, and that they sum to the idle time."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from builders import random_durations
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded import recorded

from odc_sim.durations import CAUSES
from odc_sim.engine_event import run_event
from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.measured import compute_spans
from odc_sim.measured_idle import attribute
from odc_sim.schedules import SCHEDULES, make_schedule
from odc_sim.timeline import Timeline, idle_by_cause

NAMES = [schedule.name for schedule in SCHEDULES]


def compute(rank, kind, unit, start_s, end_s, m=0):
    return Span(rank, "compute", kind, "", unit, m, start_s, end_s)


def transfer(rank, kind, unit, start_s, end_s, m=0):
    return Span(rank, kind, kind, "", unit, m, start_s, end_s)


def host(rank, kind, unit, start_s, end_s, m=0):
    return Span(rank, "host", kind, "", unit, m, start_s, end_s)


def waits(schedule, spans, rank):
    """(cause, start, end) of a rank's idle rows."""
    found = attribute(Timeline.from_spans([(0, spans)]), schedule).spans(0)
    return [(s.cause, s.start_s, s.end_s) for s in found if s.rank == rank and s.stream == "compute" and s.cause]


# One layer, two ranks; gathers take 1 s, reductions 2 s, copy-outs 0.5 s, packs 0.25 s. Rank 1's layer takes 3 s longer
# forward.
COLLECTIVE = [
    # both ranks: the root is gathered from 0 to 1, copied out to 1.5, embedded to 2; the layer is gathered from 1 to 2
    *(transfer(rank, "unshard", 0, 0.0, 1.0) for rank in range(2)),
    *(compute(rank, "forward", 0, 1.5, 2.0) for rank in range(2)),
    *(transfer(rank, "unshard", 1, 1.0, 2.0) for rank in range(2)),
    compute(0, "forward", 1, 2.5, 4.5),
    compute(1, "forward", 1, 2.5, 7.5),
    compute(0, "head_loss", 0, 4.5, 5.0),
    compute(1, "head_loss", 0, 7.5, 8.0),
    compute(0, "backward", 0, 5.0, 6.0),
    compute(1, "backward", 0, 8.0, 9.0),
    # the backward's gather: rank 0 gets there at 4, rank 1 at 7
    transfer(0, "unshard", 1, 4.0, 8.0),
    transfer(1, "unshard", 1, 7.0, 8.0),
    compute(0, "backward", 1, 8.5, 10.5),
    compute(1, "backward", 1, 9.5, 11.5),
    # packed in 0.25 s; the layer is reduced from 11.75 on, when rank 1 has arrived
    transfer(0, "reduce", 1, 10.75, 13.75),
    transfer(1, "reduce", 1, 11.75, 13.75),
    compute(0, "backward", 0, 10.75, 11.0),
    compute(1, "backward", 0, 11.75, 12.0),
    # the root: packed when the layer's reduction is done (edge 8)
    transfer(0, "reduce", 0, 14.0, 16.5),
    transfer(1, "reduce", 0, 14.5, 16.5),
    compute(0, "optimizer", -1, 17.0, 18.0, -1),
    compute(1, "optimizer", -1, 17.0, 18.25, -1),
]


class TestByHand:
    def test_collective_leading_rank(self):
        assert waits("collective", COLLECTIVE, 0) == [
            ("exposed_unshard", 0.0, 1.5),
            ("exposed_unshard", 2.0, 2.5),
            ("imbalance_layer", 6.0, 7.0),  # the gather of the layer cannot begin: rank 1 is not there
            ("exposed_unshard", 7.0, 8.5),
            ("exposed_reduce", 10.5, 10.75),
            ("imbalance_layer", 11.0, 11.75),  # the layer's reduction, which the root's pack awaits
            ("exposed_reduce", 11.75, 14.0),
            ("imbalance_microbatch", 14.0, 14.5),
            ("exposed_reduce", 14.5, 16.5),
            ("host", 16.5, 17.0),
            ("optimizer", 17.0, 18.0),
            ("imbalance_minibatch", 18.0, 18.25),
        ]

    def test_collective_last_rank(self):
        assert waits("collective", COLLECTIVE, 1) == [
            ("exposed_unshard", 0.0, 1.5),
            ("exposed_unshard", 2.0, 2.5),
            ("exposed_unshard", 9.0, 9.5),
            ("exposed_reduce", 11.5, 11.75),
            ("exposed_reduce", 12.0, 16.5),
            ("host", 16.5, 17.0),
            ("optimizer", 17.0, 18.25),
        ]

    def test_the_same_deferred_is_named_otherwise(self):
        causes = {(start_s, cause) for cause, start_s, _ in waits("collective-deferred", COLLECTIVE, 0)}
        assert {(6.0, "imbalance_layer"), (11.0, "imbalance_minibatch"), (14.0, "imbalance_minibatch")} <= causes

    def test_one_sided(self):
        spans = [
            *(
                span
                for rank, late_s in ((0, 0.0), (1, 5.0))
                for span in (
                    transfer(rank, "unshard", 0, 0.0, 1.0),
                    compute(rank, "forward", 0, 1.0, 2.0),
                    compute(rank, "backward", 0, 2.0, 3.0 + late_s),
                    transfer(rank, "reduce", 0, 3.5 + late_s, 4.0 + late_s),
                    compute(rank, "optimizer", -1, 9.25, 10.0, -1),
                    compute(rank, "publish", -1, 10.0, 10.5, -1),
                )
            )
        ]
        assert waits("odc", spans, 0) == [
            ("exposed_unshard", 0.0, 1.0),
            ("exposed_reduce", 3.0, 4.0),
            ("imbalance_minibatch", 4.0, 9.0),
            ("host", 9.0, 9.25),  # everyone is there: what the ranks take to learn of it
            ("optimizer", 9.25, 10.0),
            ("publish", 10.0, 10.5),
        ]
        assert ("imbalance_minibatch", 8.0, 9.0) not in waits("odc", spans, 1)

    def test_a_rank_without_microbatches_waits_for_the_others(self):
        spans = [
            compute(0, "forward", 0, 0.0, 2.0),
            compute(0, "optimizer", -1, 2.0, 3.0, -1),
            compute(1, "optimizer", -1, 2.0, 3.0, -1),
        ]
        assert waits("odc", spans, 1) == [("imbalance_minibatch", 0.0, 2.0), ("optimizer", 2.0, 3.0)]

    def test_host(self):
        spans = [
            host(0, "forward", 0, 0.0, 1.0),
            compute(0, "forward", 0, 1.0, 2.0),
            host(0, "forward", 1, 3.0, 4.5),
            transfer(0, "unshard", 1, 3.25, 3.5),
            compute(0, "forward", 1, 4.25, 5.0),  # the host was still at it: launch-bound
            host(0, "forward", 2, 4.5, 5.0),
            transfer(0, "unshard", 2, 5.0, 6.5),
            compute(0, "forward", 2, 7.0, 8.0),  # the host was done long before
        ]
        assert waits("odc", spans, 0) == [
            ("host", 0.0, 1.0),
            ("host", 2.0, 3.0),
            ("exposed_unshard", 3.0, 3.5),
            ("host", 3.5, 4.25),
            ("exposed_unshard", 5.0, 7.0),
        ]

    def test_unreduced_gradients_are_held(self):
        spans = [
            compute(0, "backward", 1, 0.0, 1.0),
            compute(0, "backward", 0, 1.5, 2.0),
        ]
        assert waits("collective-deferred", spans, 0) == [("exposed_reduce", 1.0, 1.5)]

    @pytest.mark.parametrize(("host_end_s", "cause"), [(1.25, "exposed_unshard"), (1.75, "host")])
    def test_one_rank_copies_parameters_where_they_are_used(self, host_end_s, cause):
        spans = [
            compute(0, "forward", 0, 0.0, 1.0),
            host(0, "forward", 1, 0.5, host_end_s),
            compute(0, "forward", 1, 1.5, 2.5),
        ]
        assert waits("collective", spans, 0) == [(cause, 1.0, 1.5)]
        beside = compute(1, "forward", 0, 0.0, 2.5)  # of two ranks that gathered nothing, there was nothing to copy
        assert waits("collective", [*spans, beside], 0) == [("host", 1.0, 1.5)]

    def test_old_waits_are_replaced(self):
        once = attribute(Timeline.from_spans([(3, COLLECTIVE)]), "collective")
        assert attribute(once, "collective").spans(3) == once.spans(3)
        assert set(once.minibatch.tolist()) == {3}


class TestRefused:
    def test_ranks_in_different_collectives(self):
        lacking = [s for s in COLLECTIVE if (s.rank, s.kind, s.start_s) != (1, "unshard", 7.0)]
        with pytest.raises(InputError, match="rank 1 has fewer than 2 spans of the unshard of unit 1, rank 0 has so"):
            attribute(Timeline.from_spans([(0, lacking)]), "collective")
        more = [*COLLECTIVE, transfer(1, "reduce", 2, 17.0, 18.0)]
        with pytest.raises(InputError, match="rank 0 has fewer than 1 spans of the reduce of unit 2, rank 1 has so"):
            attribute(Timeline.from_spans([(0, more)]), "collective")

    def test_copies_on_the_compute_stream(self):
        with pytest.raises(InputError, match="rank 0: a span of kind unshard on the stream compute, expected forward"):
            attribute(Timeline.from_spans([(0, [compute(0, "unshard", 1, 0.0, 1.0)])]), "odc")

    def test_unknown_schedule(self):
        with pytest.raises(InputError, match="ocd"):
            attribute(Timeline.from_spans([(0, COLLECTIVE)]), "ocd")


def test_where_host_and_device_are_one_a_gap_is_what_happens_in_it():
    """As on a CPU: the backward's gather of the unit below is in front of a backward, the reduction after it."""
    spans = [
        *(transfer(rank, "unshard", 1, 1.0 + rank, 3.0) for rank in range(2)),  # rank 1 comes 1 s later
        *(compute(rank, "forward", 1, 3.5, 5.0) for rank in range(2)),
        *(transfer(rank, "reduce", 1, 6.0, 7.0) for rank in range(2)),
        *(transfer(rank, "unshard", 0, 7.5, 8.0) for rank in range(2)),
        *(compute(rank, "backward", 0, 8.5, 9.0) for rank in range(2)),
        Span(0, "compute", "optimizer", "", -1, -1, 9.5, 10.0),
    ]

    def parts(schedule, rank):
        timeline = attribute(Timeline.from_spans([(0, spans)]), schedule, one_stream=True)
        return [(s.cause, s.start_s, s.end_s) for s in timeline.spans(0) if (s.rank, s.kind) == (rank, "wait")]

    reduced = [("exposed_reduce", 5.0, 7.0), ("exposed_unshard", 7.0, 8.5)]
    assert parts("collective", 0) == [
        ("exposed_unshard", 0.0, 1.0),
        ("imbalance_layer", 1.0, 2.0),
        ("exposed_unshard", 2.0, 3.5),
        *reduced,
        ("host", 9.0, 9.5),
    ]
    # one-sided, rank 1 has nothing to wait for but rank 0's optimizer
    assert parts("odc", 1) == [("exposed_unshard", 0.0, 3.5), *reduced, ("host", 9.0, 10.0)]
    spans.append(compute(0, "backward", 1, 9.0, 9.25))
    assert parts("odc", 1)[-2:] == [("imbalance_minibatch", 9.0, 9.25), ("host", 9.25, 10.0)]


def case(seed, name, *, ranks=3, microbatches=3, host=False, zeros=False):
    rng = np.random.default_rng(seed)
    equal = name == "collective"
    return random_durations(
        rng, equal_counts=equal, ranks=ranks, layers=3, microbatches=microbatches, host=host, zeros=zeros
    )


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 4), microbatches=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_as_the_engine_accounts_for_itself(name, seed, ranks, microbatches):
    """Without what a measurement cannot tell apart (additions after a reduction, held gradients) exactly."""
    durations = case(seed, name, ranks=ranks, microbatches=microbatches)
    durations = replace(durations, add_s=0.0 * durations.add_s, hold_s=0.0 * durations.hold_s)
    if name == "odc-local-sum":  # there, what is held; then copies are not told apart
        durations = replace(durations, copy_out_s=0.0 * durations.copy_out_s)
    schedule = make_schedule(name, port_contention=False)
    timeline, _ = recorded(durations, schedule)
    found = idle_by_cause(attribute(timeline, name))
    expected = dict(zip(CAUSES, run_event(durations, schedule).idle_s.sum(axis=(0, 1)), strict=True))
    assert found == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", NAMES)
@given(seed=st.integers(0, 2**32), host=st.booleans(), zeros=st.booleans(), noise=st.sampled_from([0.0, 0.05, 2.0]))
@settings(max_examples=15, deadline=None)
def test_causes_sum_to_the_idle_time(name, seed, host, zeros, noise):
    """Also where transfers are recorded a little off, or wildly."""
    timeline, makespans_s = recorded(case(seed, name, host=host, zeros=zeros), make_schedule(name))
    rng = np.random.default_rng(seed)
    moved = np.isin(timeline.stream, ["unshard", "reduce", "host"])
    start_s = np.where(moved, np.maximum(timeline.start_s + noise * rng.standard_normal(len(timeline)), 0.0), 0.0)
    if noise:
        timeline = apart(replace(timeline, start_s=np.where(moved, start_s, timeline.start_s)))
    found = attribute(timeline, name)
    busy_s = float((timeline.end_s - timeline.start_s)[compute_spans(timeline)].sum())
    end_s = max(timeline.end_s[timeline.stream != "host"].max(), makespans_s[0])
    assert sum(idle_by_cause(found).values()) == pytest.approx(3 * end_s - busy_s, abs=1e-9)
    for rank in range(3):
        rows = (found.rank == rank) & (found.stream == "compute")
        order = np.argsort(found.start_s[rows], kind="stable")
        starts_s, ends_s = found.start_s[rows][order], found.end_s[rows][order]
        assert starts_s[0] == 0.0
        np.testing.assert_allclose(starts_s[1:], ends_s[:-1], atol=1e-12)


def apart(timeline):
    """Spans of a stream, in order of their starts, cut so that none overlaps the next."""
    end_s = np.maximum(timeline.end_s, timeline.start_s)
    order = np.lexsort((end_s, timeline.start_s, timeline.stream, timeline.rank))
    for a, b in pairwise(order):
        if (timeline.stream[a], timeline.rank[a]) == (timeline.stream[b], timeline.rank[b]):
            end_s[a] = min(end_s[a], timeline.start_s[b])
    return replace(timeline, end_s=end_s)
