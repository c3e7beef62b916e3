"""Partitions: hand-made cases, a plain differencing to compare with, and what refinement may and may not do."""

import heapq
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.errors import InputError
from odc_sim.packing import best_fit_decreasing, equalize, first_fit_decreasing, pack_fewest
from odc_sim.partition import balance, bounds, integer_costs, karmarkar_karp, loads

COSTS = st.lists(st.integers(1, 60), min_size=1, max_size=24)
PARTS = st.integers(1, 6)


def ints(*values):
    return np.array(values, np.int64)


def sorted_loads(costs, part, k):
    return sorted(loads(costs, part, k).tolist(), reverse=True)


def plain_differencing(costs, k, equal):
    """Textbook k-way differencing with every empty part written out; sample names are places in falling cost."""
    costs = sorted(costs, reverse=True)

    def heaviest_first(parts):
        return sorted(parts, key=lambda part: (-part[0], part[1]))

    width = k if equal else 1
    heap = []
    for first in range(0, len(costs), width):
        parts = [(costs[i], (i,)) for i in range(first, first + width)]
        parts += [(0, ())] * (k - width)
        heap.append((parts[-1][0] - parts[0][0], first, heaviest_first(parts[:width]) + parts[width:]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, mine = heapq.heappop(heap)
        _, other_first, others = heapq.heappop(heap)
        merged = [(a + b, tuple(sorted(x + y))) for (a, x), (b, y) in zip(mine, reversed(others), strict=True)]
        merged = heaviest_first([part for part in merged if part[1]]) + [part for part in merged if not part[1]]
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], min(first, other_first), merged))
    return [part[0] for part in heap[0][2]]


def test_two_parts_by_hand():
    # 8-7, 6-5 leave 1, 1, 4; 4-1 = 3; 3-1 = 2: differencing ends at 16 and 14, though 15 and 15 exists.
    costs = ints(8, 7, 6, 5, 4)
    assert sorted_loads(costs, karmarkar_karp(costs, 2), 2) == [16, 14]


def test_refinement_finds_what_differencing_misses():
    costs = ints(8, 7, 6, 5, 4)
    assert sorted_loads(costs, balance(costs, 2), 2) == [15, 15]


def test_three_parts_by_hand():
    # (9,8,7) and (3,2,1) with equal sizes: heaviest meets lightest, 9+1, 8+2, 7+3.
    part = karmarkar_karp(ints(9, 3, 8, 2, 7, 1), 3, equal=True)
    assert sorted_loads(ints(9, 3, 8, 2, 7, 1), part, 3) == [10, 10, 10]
    assert part[0] == part[5]
    assert part[2] == part[3]
    assert part[4] == part[1]


@given(COSTS, PARTS)
@settings(max_examples=300, deadline=None)
def test_sparse_differencing_is_the_textbook_one(costs, k):
    got = sorted_loads(np.array(costs), karmarkar_karp(np.array(costs), k), k)
    assert got == sorted(plain_differencing(costs, k, equal=False), reverse=True)


@given(st.integers(1, 6), st.integers(1, 5), st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_equal_differencing_is_the_textbook_one(k, each, random):
    costs = [random.randint(1, 60) for _ in range(k * each)]
    part = karmarkar_karp(np.array(costs), k, equal=True)
    assert np.bincount(part, minlength=k).tolist() == [each] * k
    assert sorted_loads(np.array(costs), part, k) == sorted(plain_differencing(costs, k, equal=True), reverse=True)


def test_differencing_survives_many_reallocations():
    costs = np.random.default_rng(0).integers(1, 10**6, 700)
    for k in (3, 100, 128, 699, 700, 701):
        got = sorted_loads(costs, karmarkar_karp(costs, k), k)
        assert got == sorted(plain_differencing(costs.tolist(), k, equal=False), reverse=True)


@given(COSTS, PARTS, st.booleans())
@settings(max_examples=300, deadline=None)
def test_balance_is_never_worse_than_differencing(costs, k, equal):
    if equal:
        costs = costs * k
    costs = np.array(costs)
    part = balance(costs, k, equal=equal)
    assert part.shape == costs.shape
    assert part.min() >= 0
    assert part.max() < k
    heaviest = loads(costs, part, k).max()
    assert heaviest <= loads(costs, karmarkar_karp(costs, k, equal=equal), k).max()
    if equal:
        assert np.bincount(part, minlength=k).tolist() == [costs.size // k] * k
    elif costs.size >= k:
        assert np.bincount(part, minlength=k).min() >= 1


@given(COSTS, PARTS, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_order_of_samples_does_not_matter(costs, k, random):
    shuffled = costs.copy()
    random.shuffle(shuffled)

    def contents(values):
        part = balance(np.array(values), k)
        return sorted(sorted(v for v, p in zip(values, part, strict=True) if p == q) for q in range(k))

    assert contents(costs) == contents(shuffled)


def test_equal_costs_go_by_index():
    # Pairs (0,1) and (2,3): the smallest index leads each, and the first of one meets the last of the other.
    assert karmarkar_karp(ints(5, 5, 5, 5), 2, equal=True).tolist() == [0, 1, 1, 0]
    assert balance(ints(5, 5, 5, 5, 5), 5).tolist() == [0, 1, 2, 3, 4]


def test_float_noise_is_no_difference():
    # 0.1 + 0.2 and 0.3 differ in the last bit; as nanoseconds they tie, and ties go by index.
    noisy = integer_costs([0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2])
    assert noisy.tolist() == [300_000_000] * 4
    assert balance(noisy, 2, equal=True).tolist() == balance(integer_costs([0.3] * 4), 2, equal=True).tolist()


@given(st.lists(st.integers(1, 30), min_size=2, max_size=9), st.integers(2, 3))
@settings(max_examples=60, deadline=None)
def test_within_the_known_ratio_of_the_optimum(costs, k):
    best = min(
        loads(np.array(costs), np.array(choice), k).max() for choice in itertools.product(range(k), repeat=len(costs))
    )
    # Differencing is within 4/3 - 1/(3k) of the optimum makespan (Michiels et al. 2003).
    assert best <= loads(np.array(costs), balance(np.array(costs), k), k).max() <= best * (4 / 3 - 1 / (3 * k)) + 1e-9


def test_more_parts_than_samples_leaves_parts_empty():
    assert sorted_loads(ints(4, 2), karmarkar_karp(ints(4, 2), 3), 3) == [4, 2, 0]
    assert balance(np.zeros(0, np.int64), 3).size == 0


def test_refined_swaps_keep_equal_sizes():
    # 12+6+6 = 9+8+7. Differencing combines (12, 9), (8, 7), (6, 6) into 25 and 23; no single sample may move.
    costs = ints(12, 9, 8, 7, 6, 6)
    assert sorted_loads(costs, karmarkar_karp(costs, 2, equal=True), 2) == [25, 23]
    assert sorted_loads(costs, balance(costs, 2, equal=True), 2) == [24, 24]


@pytest.mark.parametrize(
    ("costs", "k", "equal", "message"),
    [
        (ints(1, 2, 3), 2, True, "3 samples cannot be divided equally over 2 parts: 1 left over"),
        (ints(1, 0), 2, False, "cost 0 of sample 1: expected a positive integer"),
        (ints(1, 2), 0, False, "cannot split into 0 parts: expected at least 1"),
    ],
)
def test_bad_partitions_are_refused(costs, k, equal, message):
    with pytest.raises(InputError) as error:
        balance(costs, k, equal=equal)
    assert str(error.value) == message


def test_integer_costs_are_nanoseconds_and_positive():
    assert integer_costs([1.5, 0.0, 2e-9]).tolist() == [1_500_000_000, 1, 2]
    assert integer_costs([]).size == 0
    with pytest.raises(InputError, match=r"balancing cost of sample 1 is nan: expected a finite number"):
        integer_costs([1.0, float("nan")])
    with pytest.raises(InputError, match="balancing cost of sample 0 is -1"):
        integer_costs([-1.0])


def test_integer_costs_scale_down_rather_than_overflow():
    squares = np.full(10_000, 65_536.0**2)
    costs = integer_costs(squares)
    assert np.all(costs == costs[0])
    assert costs.sum() == int(costs[0]) * 10_000
    assert integer_costs(np.append(squares, 65_536.0))[-1] * 65_536 == integer_costs(np.append(squares, 65_536.0))[0]


def test_bounds_add_up_over_minibatches():
    assert bounds([[1.0, 2.0, 5.0], [4.0, 4.0]], 4) == (2.0 + 2.0, 5.0 + 4.0)


def rows(arrays):
    return [array.tolist() for array in arrays]


def test_first_fit_by_hand():
    # Falling order 6 4 4 3 2 (samples 3 0 4 1 2) under 10: 6+4, then 4+3+2.
    assert rows(first_fit_decreasing(ints(4, 3, 2, 6, 4), 10)) == [[3, 0], [4, 1, 2]]
    assert first_fit_decreasing(ints(), 10) == []


def test_best_fit_prefers_the_fullest_bin():
    # 7 | 5+4 | then the 1: first fit adds it to the 7, best fit to the 9.
    lengths = ints(7, 5, 4, 1)
    assert rows(first_fit_decreasing(lengths, 10)) == [[0, 3], [1, 2]]
    assert rows(best_fit_decreasing(lengths, 10)) == [[0], [1, 2, 3]]


def test_eight_sevens_under_a_cap_of_eight_need_eight_microbatches():
    sevens = np.full(8, 7)
    assert -(-sevens.sum() // 8) == 7
    packed = pack_fewest(sevens, sevens, 8)
    assert rows(packed) == [[i] for i in range(8)]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(1, 1000)), min_size=1, max_size=30), st.integers(50, 120))
@settings(max_examples=200, deadline=None)
def test_packings_keep_the_cap_and_every_sample(samples, cap):
    lengths, costs = np.array(samples).T
    for packed in (
        first_fit_decreasing(lengths, cap),
        best_fit_decreasing(lengths, cap),
        pack_fewest(lengths, costs, cap),
        pack_fewest(lengths, costs, cap, k_min=3),
    ):
        assert sorted(np.concatenate(packed).tolist()) == list(range(len(samples)))
        assert all(row.size and lengths[row].sum() <= cap for row in packed)
    weights = [costs[row].sum() for row in pack_fewest(lengths, costs, cap)]
    assert weights == sorted(weights, reverse=True)
    assert len(pack_fewest(lengths, costs, cap, k_min=3)) >= min(3, len(samples))


def test_samples_above_the_cap_are_named():
    with pytest.raises(InputError) as error:
        pack_fewest(ints(3, 9, 10), ints(1, 1, 1), 8)
    assert str(error.value) == (
        "sample 1 has 9 tokens (and 1 more), more than the 8 a microbatch may hold: "
        "raise --max-tokens, or use --overlong drop|clip|scale"
    )


def test_equalize_splits_the_costliest_row_that_can_be_split():
    costs = ints(9, 1, 2, 3, 4)
    # Row 0 costs most but holds one sample; [2, 3, 4] costs 9 and splits into 5 = 2+3 and 4.
    assert rows(equalize([ints(0), ints(2, 3, 4), ints(1)], costs, 4)) == [[0], [2, 3], [1], [4]]
    assert rows(equalize([ints(0), ints(1)], costs, 2)) == [[0], [1]]


def test_equalize_says_when_there_are_too_few_samples():
    with pytest.raises(InputError, match="3 samples cannot be packed into a multiple of 4 non-empty microbatches"):
        equalize([ints(0, 1), ints(2)], ints(1, 1, 1), 4)
