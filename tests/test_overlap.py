"""Compute beside collectives that wait: slower on ranks that are ahead, and never slower than the slowest rank."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_sim.execution import _in_step
from odc_sim.overlap import beside, slowdown, waiting


@pytest.mark.parametrize(
    ("others", "expected"),
    [
        ([(2.0, 2.0)], 11.0),  # half of two seconds is lost
        ([(2.0, 2.0), (4.0, 4.0)], 14.0),  # and three quarters of four
        ([(2.0, 2.0), (0.0, 9.0)], 11.0),
        ([(99.0, 2.0)], 20.0),  # beside it all the time
        ([(12.0, 3.0), (99.0, 2.0)], 24.0),  # 4 done in 12, then 6 in another 12
        ([(99.0, 2.0), (5.0, 9.0)], 20.0),  # the second one begins when nothing is left
    ],
)
def test_work_beside_others_by_hand(others, expected):
    found = beside(np.array([10.0, 0.0]), [(np.full(2, seconds), slowdown) for seconds, slowdown in others])
    assert found == pytest.approx([expected, 0.0])


ALL = np.ones((1, 2), dtype=bool)


@pytest.mark.parametrize(
    ("alone", "slowdown", "expected"),
    [
        ([4.0, 2.0], 1.5, [4.0, 3.0]),  # ahead all the time
        ([4.0, 3.5], 1.5, [4.0, 4.0]),  # slowed down to the other's speed, it waits no longer
        ([4.0, 4.0], 1.5, [4.0, 4.0]),
        ([4.0, 2.0], 1.0, [4.0, 2.0]),
    ],
)
def test_two_ranks_by_hand(alone, slowdown, expected):
    assert waiting(np.array([alone]), slowdown, ALL).tolist() == [expected]


def test_ranks_that_do_not_take_part_neither_wait_nor_are_waited_for():
    alone, lockstep = np.array([[9.0, 2.0, 1.0]]), np.array([[False, True, True]])
    assert waiting(alone, 1.5, lockstep).tolist() == [[9.0, 2.0, 1.5]]


def test_last_microbatches_meet_whatever_their_number():
    """collective-deferred: rank 0 runs two microbatches, rank 1 one; they meet in their last ones."""
    seconds = np.array([[[8.0, 2.0], [4.0, 0.0]]])
    last = np.array([[[False, True], [True, False]]])
    assert _in_step(seconds, 1.5, last).tolist() == [[[8.0, 3.0], [4.0, 0.0]]]


@given(st.lists(st.floats(0.0, 1e3), min_size=1, max_size=8), st.floats(1.0, 3.0), st.lists(st.booleans(), min_size=8))
def test_nobody_becomes_slower_than_the_slowest(alone, slowdown, meets):
    seconds, lockstep = np.array([alone]), np.array([meets[: len(alone)]])
    result = waiting(seconds, slowdown, lockstep)
    assert (result >= seconds).all()
    assert (result <= seconds * slowdown + 1e-9).all()
    assert result.max() == seconds.max()
    assert (result[~lockstep] == seconds[~lockstep]).all()


@pytest.mark.parametrize(
    ("lost_s", "other_s", "step_s", "expected"),
    [
        (1.5, 2.0, 11.5, 4.0),  # of 2 s beside each other, compute came as far as in half a second
        (-0.2, 2.0, 9.8, 1.0),
        (89.0, 2.0, 99.0, 20.0),
        (1.0, 9.0, 2.0, 2.0),  # the other outlasts the step, which goes at half speed all the time
    ],
)
def test_slowdown_by_hand(lost_s, other_s, step_s, expected):
    assert slowdown(lost_s, other_s, step_s) == pytest.approx(expected)
