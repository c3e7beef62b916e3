import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.errors import InputError
from odc_sim.fits import Line, columns, fit_line, spread, steady

SHAPES = [[1000], [2000], [4000], [8000], [500] * 4, [1000] * 8]


def line(c0=1e-3, c1=1e-6, c2=1e-10, floor=0.0):
    return Line(c0_s=c0, c1_s_per_token=c1, c2_s_per_token2=c2, floor_s=floor)


def test_columns_by_hand():
    assert columns([[3], [1, 2]]).tolist() == [[1, 3, 9], [1, 3, 5]]


def test_a_line_by_hand():
    assert line()([[1000], [2000, 1000]]) == pytest.approx([1e-3 + 1e-3 + 1e-4, 1e-3 + 3e-3 + 5e-4])
    assert line(floor=5e-3)([[1000], [10_000]]) == pytest.approx([5e-3, 1e-3 + 1e-2 + 1e-2])
    assert line().rel_errors([[1000]], [4.2e-3]) == pytest.approx([-0.5])


coefficient = st.one_of(st.just(0.0), st.floats(0.1, 10))


@given(coefficient, st.floats(0.1, 10), coefficient)
@settings(max_examples=200, deadline=None)
def test_exact_times_give_their_coefficients_back(c0, c1, c2):
    true = line(c0 * 1e-4, c1 * 1e-7, c2 * 1e-11)
    found = fit_line(SHAPES, true(SHAPES))
    assert found.c0_s == pytest.approx(true.c0_s, rel=1e-6, abs=1e-12)
    assert found.c1_s_per_token == pytest.approx(true.c1_s_per_token, rel=1e-6, abs=1e-15)
    assert found.c2_s_per_token2 == pytest.approx(true.c2_s_per_token2, rel=1e-6, abs=1e-19)


@given(st.lists(st.floats(1e-5, 10), min_size=len(SHAPES), max_size=len(SHAPES)), st.booleans())
@settings(max_examples=200, deadline=None)
def test_never_negative_and_no_worse_than_a_constant(seconds, quadratic):
    found = fit_line(SHAPES, seconds, quadratic=quadratic)
    assert min(found.c0_s, found.c1_s_per_token, found.c2_s_per_token2) >= 0
    assert quadratic or found.c2_s_per_token2 == 0
    assert found.floor_s == min(seconds)


def test_falling_times_give_a_constant():
    # the least squared relative error of a constant c against t: c = sum(1/t) / sum(1/t^2)
    seconds = [4.0, 3.0]
    found = fit_line([[1], [2]], seconds, quadratic=False)
    assert found.c1_s_per_token == 0
    assert found.c0_s == pytest.approx((1 / 4 + 1 / 3) / (1 / 16 + 1 / 9))


def test_relative_errors_count_equally():
    # 1 % too long at 1,000 tokens and at 60,000 weigh the same, so a line through 0 lies between them
    found = fit_line([[1000], [60_000]], [1.02e-3, 60e-3], quadratic=False)
    errors = found.rel_errors([[1000], [60_000]], [1.02e-3, 60e-3])
    assert np.abs(errors).max() < 0.011


def test_what_took_the_floor_is_left_out_of_the_line():
    true = line(c0=0.0, c1=1e-6, c2=1e-11, floor=3e-3)
    shapes = [[100], [500], [1000], *SHAPES[2:], [16_000]]
    found = fit_line(shapes, true(shapes))
    assert found.floor_s == 3e-3
    assert found.c1_s_per_token == pytest.approx(1e-6)
    assert found.rel_errors(shapes, true(shapes)) == pytest.approx(0, abs=1e-9)


def test_too_few_microbatches():
    with pytest.raises(InputError, match="at least 3 different microbatches with steady times, got 2; stop other"):
        fit_line([[1000], [2000], [1000]], [1e-3, 2e-3, 1e-3])
    with pytest.raises(InputError, match="got 0"):
        fit_line([], [])


def test_spread_of_two_lines():
    assert spread(line(), line(), SHAPES) == 0
    assert spread(line(1.0, 0, 0), line(1.02, 0, 0), SHAPES) == pytest.approx(0.02)


def test_steady():
    quiet = [1.0, 1.0, 1.01, 0.99]
    assert steady(quiet, quiet, spread=1.05, drift=0.03)
    assert not steady(quiet, [t * 1.04 for t in quiet], spread=1.5, drift=0.03)  # warmer the second time
    assert not steady([1, 1, 1.5, 1, 1.5], [1, 1.5, 1, 1, 1.5], spread=1.05, drift=0.03)  # another program
    tiny = [3e-6, 4e-6, 5e-6]
    assert not steady(tiny, tiny, spread=1.05, drift=0.03)
    assert steady(tiny, tiny, spread=1.05, drift=0.03, resolution_s=2.1e-6)  # no clock tells them apart
