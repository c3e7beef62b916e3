"""Splitting integer costs into parts of nearly equal total: Karmarkar-Karp differencing, refined by exchanges."""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# Sums of costs are int64; this leaves a factor of two for differences of sums.
_LARGEST_TOTAL = 2**62


def integer_costs(costs_s: npt.ArrayLike) -> IntArray:
    """Seconds [n] as whole nanoseconds [n], at least 1, so that sums are exact and ties are ties on every platform.

    Costs that are no times (tokens squared, FLOPs) may be so large that their sum in billionths overflows; they are
    then scaled by the next smaller power of ten that does not.

    Raises:
        InputError: a cost is negative, infinite or not a number.
    """
    costs = np.asarray(costs_s, dtype=np.float64)
    if costs.size == 0:
        return np.zeros(costs.shape, np.int64)
    bad = np.flatnonzero(~(np.isfinite(costs) & (costs >= 0)))
    if bad.size:
        raise InputError(
            f"balancing cost of sample {bad[0]} is {costs[bad[0]]}: expected a finite number of seconds >= 0"
        )
    scale = 1e9
    while float(costs.max()) * costs.size * scale > _LARGEST_TOTAL:
        scale /= 10
    return np.maximum(np.rint(costs * scale).astype(np.int64), 1)


def costliest_first(costs: IntArray, lengths: IntArray | None = None) -> IntArray:
    """The order [n] of decreasing cost; equal costs by decreasing length, then by increasing index."""
    if lengths is None:
        return np.argsort(-costs, kind="stable")
    return np.lexsort((-lengths, -costs))


def karmarkar_karp(costs: IntArray, k: int, *, equal: bool = False) -> IntArray:
    """Plain largest differencing (Karmarkar and Karp 1982) into k parts: the part of each sample [n].

    Args:
        costs: positive integers [n].
        k: number of parts; without `equal` some are empty when k > n.
        equal: every part gets n / k samples (splits of k samples consecutive in cost are combined, as verl and
            sail-sg/odc do).

    Raises:
        InputError: k < 1, a cost is not positive, or `equal` and k does not divide n.
    """
    from odc_sim import partition_kernels as kernels

    costs = _checked(costs, k, equal)
    order = costliest_first(costs)
    part = np.empty(costs.size, np.int64)
    if costs.size:
        part[order] = kernels.differencing(costs[order], k, equal)
    return part


def balance(costs: IntArray, k: int, *, equal: bool = False) -> IntArray:
    """Karmarkar-Karp refined by exchanges of samples between parts: the part of each sample [n].

    Never worse (in the heaviest part) than `karmarkar_karp`. Without `equal`, the better of the free split and, where
    k divides n, the equal one. Depends on the costs only: the same samples in another order give parts of the same
    costs, whichever machine computes them. Arguments and errors as `karmarkar_karp`.
    """
    from odc_sim import partition_kernels as kernels

    costs = _checked(costs, k, equal)
    order = costliest_first(costs)
    part = np.empty(costs.size, np.int64)
    part[order] = kernels.balance(costs[order], k, equal)
    return part


def loads(costs: IntArray, part: IntArray, k: int) -> IntArray:
    """Total cost of each part [k]."""
    total = np.zeros(k, np.int64)
    np.add.at(total, part, costs)
    return total


def bounds(costs_per_minibatch: Iterable[npt.ArrayLike], world_size: int) -> tuple[float, float]:
    """Two times that no policy beats, summed over minibatches: (balanced_share_s, largest_sample_s).

    A minibatch takes at least its total cost / world_size, and at least its costliest sample, which one rank must run
    whole. Where the second dominates, only splitting a sample over ranks (context parallelism) helps.
    """
    share = largest = 0.0
    for costs in costs_per_minibatch:
        values = np.asarray(costs, dtype=np.float64)
        if values.size:
            share += float(values.sum()) / world_size
            largest += float(values.max())
    return share, largest


def _checked(costs: IntArray, k: int, equal: bool) -> IntArray:
    costs = np.ascontiguousarray(costs, dtype=np.int64)
    if k < 1:
        raise InputError(f"cannot split into {k} parts: expected at least 1")
    if costs.size and costs.min() <= 0:
        raise InputError(f"cost {costs.min()} of sample {costs.argmin()}: expected a positive integer")
    if equal and costs.size % k:
        raise InputError(f"{costs.size} samples cannot be divided equally over {k} parts: {costs.size % k} left over")
    return costs
