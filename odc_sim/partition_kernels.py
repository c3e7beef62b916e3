"""Compiled kernels of `partition` and `packing`. Import inside functions only: numba takes 0.3 s to load.

Every kernel takes integer costs in descending order, and calls a sample by its place in that order. So results depend
on the costs and on nothing else: not on the order of the input, the platform, or the number of threads.
Kernels that call each other share this file: numba's cache on disk does not notice changes of a callee's file.
"""

import heapq

import numpy as np

from odc_sim.compiled import compiled
from odc_sim.partition import IntArray

# Balance better than this fraction of the mean load is not sought: no cost model is that exact.
TOLERANCE_INVERSE = 100_000
# Bound of the local search: pairs looked at per sample. Typical searches end by themselves at a tenth of it.
PAIRS_PER_SAMPLE = 2000


@compiled
def _heavier(load: IntArray, a: int, b: int) -> bool:
    """Whether part a comes before part b: the larger load first, then the smaller first sample."""
    return load[a] > load[b] or (load[a] == load[b] and a < b)


@compiled
def sort_heaviest_first(parts: IntArray, load: IntArray) -> None:
    """In place. By insertion: most inputs are nearly in order, and numba's own stable sort takes 4 s to compile."""
    for i in range(1, parts.size):
        part = parts[i]
        j = i
        while j > 0 and _heavier(load, part, parts[j - 1]):
            parts[j] = parts[j - 1]
            j -= 1
        parts[j] = part


@compiled
def _minus_spread(parts: IntArray, load: IntArray, k: int) -> int:
    """The lightest less the heaviest load of a split into k parts, of which `parts` are not empty."""
    spread: int = load[parts[0]] - (load[parts[-1]] if parts.size == k else 0)
    return -spread


@compiled
def differencing(costs: IntArray, k: int, equal: bool) -> IntArray:
    """The largest differencing method of Karmarkar and Karp (1982) for k parts: the part of each sample [n].

    It keeps a heap of tentative k-way splits and repeatedly combines the two with the largest spread, putting the
    heaviest part of one with the lightest of the other. `equal` starts from n / k splits of k samples each
    (consecutive in cost, as verl and sail-sg/odc do), which makes all parts equally large; otherwise each sample
    starts alone. Parts that hold nothing are not stored, so small splits cost little however large k is.
    Ties: the split, or part, that holds the costliest sample (the smallest index of it) comes first.
    """
    n = costs.size
    # A part is named after its first sample; its samples are a linked list.
    load = costs.copy()
    following = np.full(n, -1, np.int64)
    last = np.arange(n)
    # A split is the array of its non-empty parts, heaviest first.
    width = k if equal else 1
    splits = [np.arange(first, first + width) for first in range(0, n, width)]
    heap = [(_minus_spread(splits[t], load, k), splits[t][0], np.int64(t)) for t in range(len(splits))]
    heapq.heapify(heap)
    while len(heap) > 1:
        _, first, at = heapq.heappop(heap)
        _, other_first, other_at = heapq.heappop(heap)
        a, b = splits[at], splits[other_at]
        if a.size < b.size:
            a, b = b, a
        overlap = max(0, a.size + b.size - k)
        kept = a.size - overlap
        # b's heaviest parts meet a's empty ones; the rest meet a's lightest, heaviest with lightest.
        fresh = b.copy()
        for i in range(overlap):
            x, y = a[kept + i], b[b.size - 1 - i]
            if y < x:
                x, y = y, x
            following[last[x]] = y
            last[x] = last[y]
            load[x] += load[y]
            fresh[b.size - 1 - i] = x
        if overlap > 0:
            sort_heaviest_first(fresh, load)
        # Merged from the back, so that what stays in place is copied at once: mostly, b is a single light sample.
        merged = np.empty(kept + fresh.size, np.int64)
        i, j = kept - 1, fresh.size - 1
        while j >= 0:
            if i >= 0 and _heavier(load, fresh[j], a[i]):
                merged[i + j + 1] = a[i]
                i -= 1
            else:
                merged[i + j + 1] = fresh[j]
                j -= 1
        merged[: i + 1] = a[: i + 1]
        splits[at], splits[other_at] = merged, merged[:0]
        heapq.heappush(heap, (_minus_spread(merged, load, k), min(first, other_first), at))
    part = np.empty(n, np.int64)
    final = splits[heap[0][2]]
    for p in range(final.size):
        i = final[p]
        while i >= 0:
            part[i] = p
            i = following[i]
    return part


@compiled
def part_loads(costs: IntArray, part: IntArray, k: int) -> IntArray:
    """Total cost of each part [k]."""
    load = np.zeros(k, np.int64)
    for i in range(costs.size):
        load[part[i]] += costs[i]
    return load


@compiled
def _best_exchange(
    costs: IntArray, head: IntArray, following: IntArray, heavy: int, light: int, gap: int, moves: bool, budget: int
) -> tuple[int, int, int, int]:
    """The swap (or move) from `heavy` to `light` that leaves their loads closest.

    Returns the gap left (`gap` when nothing helps), the sample that leaves, the one that comes back (-1: none), and how
    many pairs were looked at.
    """
    best, out, back, seen = gap, -1, -1, 0
    i = head[heavy]
    # A gap of 0 or 1 cannot be made smaller.
    while i >= 0 and best > 1 and seen < budget:
        if moves and abs(gap - 2 * costs[i]) < best:
            best, out, back = abs(gap - 2 * costs[i]), i, -1
        j = head[light]
        while j >= 0:
            left = abs(gap - 2 * (costs[i] - costs[j]))
            if left < best:
                best, out, back = left, i, j
            seen += 1
            j = following[j]
        i = following[i]
    return best, out, back, seen


@compiled
def _unlink(head: IntArray, following: IntArray, part: int, sample: int) -> None:
    if head[part] == sample:
        head[part] = following[sample]
        return
    i = head[part]
    while following[i] != sample:
        i = following[i]
    following[i] = following[sample]


@compiled
def _settle(order: IntArray, load: IntArray, part: int) -> None:
    """Put one part whose load has changed back in its place in `order` (lightest first)."""
    at = 0
    while order[at] != part:
        at += 1
    while at > 0 and load[order[at - 1]] > load[part]:
        order[at] = order[at - 1]
        at -= 1
    while at + 1 < order.size and load[order[at + 1]] < load[part]:
        order[at] = order[at + 1]
        at += 1
    order[at] = part


@compiled
def refine(costs: IntArray, part: IntArray, k: int, moves: bool) -> None:
    """Local search, in place: exchange one sample of the heaviest part for a cheaper one of another part (or, with
    `moves`, for nothing) while that lowers the heaviest; where it does not, raise the lightest part the same way.

    Each exchange brings two loads closer, so the heaviest never gets heavier. Ends when nothing helps, at the bound
    max(mean load, costliest sample), or after `PAIRS_PER_SAMPLE` * n pairs.
    """
    n = costs.size
    load = part_loads(costs, part, k)
    head = np.full(k, -1, np.int64)
    following = np.full(n, -1, np.int64)
    for i in range(n - 1, -1, -1):
        following[i] = head[part[i]]
        head[part[i]] = i
    order = np.arange(k)
    sort_heaviest_first(order, load)
    order = order[::-1].copy()
    total = load.sum()
    bound = max(-(-total // k), costs[0]) + total // (k * TOLERANCE_INVERSE)
    budget = PAIRS_PER_SAMPLE * n
    while load[order[k - 1]] > bound and budget > 0:
        heavy, light, out, back = -1, -1, -1, -1
        # First from the heaviest to the others, lightest first; then from the others, heaviest first, to the lightest.
        for lowering in (True, False):
            best = -1
            for t in range(k - 1):
                h, j = (order[k - 1], order[t]) if lowering else (order[k - 1 - t], order[0])
                gap = load[h] - load[j]
                # What the fixed part would come down, or go up, by at best: half the gap.
                if gap <= best or gap < 2 or budget <= 0:
                    break
                left, i, m, seen = _best_exchange(costs, head, following, h, j, gap, moves, budget)
                budget -= seen
                if i >= 0 and gap - left > best:
                    best, heavy, light, out, back = gap - left, h, j, i, m
            if out >= 0:
                break
        if out < 0:
            return
        _unlink(head, following, heavy, out)
        following[out] = head[light]
        head[light] = out
        part[out] = light
        shift = costs[out]
        if back >= 0:
            _unlink(head, following, light, back)
            following[back] = head[heavy]
            head[heavy] = back
            part[back] = heavy
            shift -= costs[back]
        load[heavy] -= shift
        load[light] += shift
        _settle(order, load, heavy)
        _settle(order, load, light)


@compiled
def balance(costs: IntArray, k: int, equal: bool) -> IntArray:
    """Refined differencing, the part of each sample [n]; with `equal` false the better of free and equal sizes."""
    n = costs.size
    if k == 1 or n == 0:
        return np.zeros(n, np.int64)
    if n <= k:
        return np.arange(n)
    chosen = np.zeros(n, np.int64)
    heaviest = lightest = np.int64(0)
    # One place of call for each kernel: numba inlines them, and that is most of the compile time.
    for attempt in range(2):
        equal_start = equal or attempt == 1
        if attempt == 1 and (equal or n % k):
            break
        part = differencing(costs, k, equal_start)
        refine(costs, part, k, not equal)
        load = part_loads(costs, part, k)
        if attempt == 0 or load.max() < heaviest or (load.max() == heaviest and load.min() > lightest):
            chosen, heaviest, lightest = part, load.max(), load.min()
    return chosen


@compiled
def pack_ranks(
    lengths: IntArray, costs: IntArray, rank_start: IntArray, max_tokens: int, at_least: int, same: bool
) -> tuple[IntArray, IntArray, IntArray]:
    """Balance each rank's samples over its fewest microbatches that keep the cap; with `same`, over one number for all.

    The samples of rank r are rank_start[r]:rank_start[r+1], costliest first, each no longer than the cap (so that one
    sample a microbatch fits in the end). Returns the order of the samples [n] that puts the microbatches of each rank
    one after the other, heaviest first, then the samples in each microbatch, and the microbatches of each rank [W].
    """
    ranks = rank_start.size - 1
    counts = np.zeros(ranks, np.int64)
    for r in range(ranks):
        held = rank_start[r + 1] - rank_start[r]
        tokens = lengths[rank_start[r] : rank_start[r + 1]].sum()
        counts[r] = min(held, max(at_least, -(-tokens // max_tokens)))
    if same:
        counts[:] = counts.max()
    part = np.empty(lengths.size, np.int64)
    r = 0
    while r < ranks:
        a, b = rank_start[r], rank_start[r + 1]
        if a < b:
            part[a:b] = balance(costs[a:b], counts[r], False)
            if part_loads(lengths[a:b], part[a:b], counts[r]).max() > max_tokens:
                if same:
                    # A split that fitted into fewer microbatches may not fit into more: look at every rank again.
                    counts += 1
                    r = 0
                else:
                    counts[r] += 1
                continue
        r += 1
    order = np.empty(lengths.size, np.int64)
    sizes = np.zeros(counts.sum(), np.int64)
    row = 0
    at = 0
    for r in range(ranks):
        a, b = rank_start[r], rank_start[r + 1]
        load = part_loads(costs[a:b], part[a:b], counts[r])
        heaviest_first = np.arange(counts[r])
        sort_heaviest_first(heaviest_first, load)
        for p in heaviest_first:
            for i in range(a, b):
                if part[i] == p:
                    order[at] = i
                    at += 1
                    sizes[row] += 1
            row += 1
    return order, sizes, counts
