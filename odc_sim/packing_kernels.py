"""Compiled kernels of `packing` and `dealing` that call no other kernel. Import inside functions only."""

import heapq

import numpy as np

from odc_sim.compiled import compiled
from odc_sim.partition import IntArray


@compiled
def least_loaded(costs: IntArray, k: int, limit: int) -> IntArray:
    """Longest processing time first (Graham 1969): each sample to the least loaded part with fewer than `limit`."""
    part = np.empty(costs.size, np.int64)
    held = np.zeros(k, np.int64)
    heap = [(np.int64(0), np.int64(p)) for p in range(k)]
    for i in range(costs.size):
        load, p = heapq.heappop(heap)
        part[i] = p
        held[p] += 1
        if held[p] < limit:
            heapq.heappush(heap, (load + costs[i], p))
    return part


@compiled
def first_fit(lengths: IntArray, max_tokens: int, best: bool) -> IntArray:
    """The bin of each sample [n], in the order given: the first open bin with room, or with `best` the fullest one."""
    part = np.empty(lengths.size, np.int64)
    room = np.empty(lengths.size, np.int64)
    bins = 0
    for i in range(lengths.size):
        chosen = -1
        for p in range(bins):
            if room[p] >= lengths[i] and (chosen < 0 or room[p] < room[chosen]):
                chosen = p
                if not best or room[p] == lengths[i]:
                    break
        if chosen < 0:
            chosen = bins
            room[chosen] = max_tokens
            bins += 1
        part[i] = chosen
        room[chosen] -= lengths[i]
    return part
