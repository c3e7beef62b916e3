"""The compiled recurrences and the played stream programs are two ways to the same times."""

from itertools import pairwise

import numpy as np
import pytest
from builders import make_durations, random_durations
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.durations import CAUSES
from odc_sim.engine_event import play, run_event
from odc_sim.engine_fast import run_fast
from odc_sim.schedules import SCHEDULES, make_schedule

OPTIONS = st.fixed_dictionaries(
    {
        "barrier": st.sampled_from(["layer", "microbatch", "minibatch"]),
        "forward_prefetch": st.integers(1, 3),
        "backward_prefetch": st.integers(0, 3),
        "separate_reduce": st.booleans(),
    }
)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    name=st.sampled_from([s.name for s in SCHEDULES]),
    options=OPTIONS,
    ranks=st.integers(1, 4),
    layers=st.integers(0, 5),
    microbatches=st.integers(1, 4),
    host=st.booleans(),
    zeros=st.booleans(),
)
def test_engines_agree_and_idle_time_is_fully_explained(seed, name, options, ranks, layers, microbatches, host, zeros):
    schedule = make_schedule(name, port_contention=False, **options)
    durations = random_durations(
        np.random.default_rng(seed),
        equal_counts=schedule.needs_equal_counts,
        ranks=ranks,
        layers=layers,
        microbatches=microbatches,
        host=host,
        zeros=zeros,
    )
    fast, event = run_fast(durations, schedule), run_event(durations, schedule)
    scale = event.makespan_s[0]
    assert fast.makespan_s[0] == pytest.approx(scale, rel=1e-9)
    np.testing.assert_allclose(fast.idle_s, event.idle_s, rtol=0, atol=1e-9 * scale)
    for outcome in (fast, event):
        assert (outcome.idle_s >= -1e-9 * scale).all()
        total = durations.busy_s + outcome.idle_s.sum(axis=2)
        np.testing.assert_allclose(total, np.broadcast_to(outcome.makespan_s[:, None], total.shape), rtol=1e-9)
    assert fast.makespan_s[0] >= durations.busy_s.max() - 1e-9 * scale


@pytest.mark.parametrize("name", ["odc", "odc-local-sum"])
def test_shared_ports_only_ever_cost_time_and_stay_close_to_the_event_engine(name):
    """The fast engine takes peers to behave as the rank itself; here transfers take as long as compute."""
    ratios = []
    for seed in range(120):
        durations = random_durations(
            np.random.default_rng(seed),
            equal_counts=False,
            ranks=2 + seed % 3,
            layers=5,
            microbatches=3,
            host=False,
            zeros=False,
        )
        free = run_fast(durations, make_schedule(name, port_contention=False))
        fast, event = (run(durations, make_schedule(name)) for run in (run_fast, run_event))
        assert event.makespan_s[0] >= free.makespan_s[0] * (1 - 1e-9)
        assert fast.makespan_s[0] >= free.makespan_s[0] * (1 - 1e-9)
        ratios.append(fast.makespan_s[0] / event.makespan_s[0] - 1)
        for outcome in (fast, event):
            total = durations.busy_s + outcome.idle_s.sum(axis=2)
            np.testing.assert_allclose(total, np.broadcast_to(outcome.makespan_s[:, None], total.shape), rtol=1e-9)
    assert np.median(np.abs(ratios)) < 0.03
    assert np.max(np.abs(ratios)) < 0.13


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("collective", {"separate_reduce": True, "backward_prefetch": 0}),
        ("collective", {"separate_reduce": True}),
        ("odc", {"backward_prefetch": 0}),
        ("odc", {}),
    ],
)
def test_equal_ranks_share_ports_alike_in_both_engines(name, options):
    """Nothing is approximate where all ranks do the same: the peers do behave as the rank itself."""
    for gather_s, reduce_s in ((1.9, 1.9), (0.2, [5, *[0.2] * 4]), (1.5, 0.4), (0.05, 0.1)):
        for microbatches in (1, 3):
            work = np.full((microbatches, 6, 2), 0.7)
            case = make_durations(work, 2 * work, gather_s=gather_s, reduce_s=reduce_s)
            schedule = make_schedule(name, **options)
            fast, event = (run(case, schedule).makespan_s[0] for run in (run_fast, run_event))
            assert fast == pytest.approx(event, rel=1e-9), (gather_s, reduce_s, microbatches)


@pytest.mark.parametrize("name", [s.name for s in SCHEDULES])
def test_nothing_to_do_takes_no_time(name):
    nothing = make_durations(np.zeros((1, 4, 3)), np.zeros((1, 4, 3)))
    for run in (run_fast, run_event):
        outcome = run(nothing, make_schedule(name))
        assert outcome.makespan_s[0] == 0.0
        assert not outcome.idle_s.any()


@pytest.mark.parametrize("name", ["odc", "odc-local-sum"])
def test_a_rank_without_microbatches_only_waits(name):
    ragged = make_durations(np.ones((1, 4, 2)), np.ones((1, 4, 2)), counts=[1, 0], gather_s=0.1, reduce_s=0.1)
    for run in (run_fast, run_event):
        outcome = run(ragged, make_schedule(name))
        waited = outcome.idle_s[0, 1, CAUSES.index("imbalance_minibatch")]
        rest = outcome.makespan_s[0] - waited
        assert waited > 8.0
        assert rest == pytest.approx(outcome.idle_s[0, 1].sum() - waited)


def test_threads_do_not_change_the_answer():
    rng = np.random.default_rng(0)
    durations = random_durations(rng, equal_counts=True, ranks=4, layers=3, microbatches=2, host=False, zeros=False)
    schedule = make_schedule("collective")
    assert (
        run_fast(durations, schedule, threads=1).makespan_s[0] == run_fast(durations, schedule, threads=3).makespan_s[0]
    )


def test_spans_of_a_stream_never_overlap():
    rng = np.random.default_rng(1)
    for schedule in (make_schedule(s.name) for s in SCHEDULES):
        durations = random_durations(rng, equal_counts=True, ranks=3, layers=4, microbatches=3, host=True, zeros=False)
        _, spans = play(durations, schedule, 0)
        for rank in range(3):
            for stream in ("compute", "unshard", "reduce"):
                mine = sorted((s.start_s, s.end_s) for s in spans if (s.rank, s.stream) == (rank, stream))
                assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(mine))
