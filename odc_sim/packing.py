"""Packing samples into microbatches of at most max_tokens, and splitting rows until their number suits the ranks."""

import heapq
from collections.abc import Sequence

import numpy as np

from odc_sim.errors import InputError
from odc_sim.partition import IntArray, balance, costliest_first


def first_fit_decreasing(lengths: IntArray, max_tokens: int) -> list[IntArray]:
    """Longest first, each into the first bin with room: the samples of each bin, in the order the bins were opened.

    Raises:
        InputError: a sample is longer than max_tokens.
    """
    return _fit(lengths, max_tokens, best=False)


def best_fit_decreasing(lengths: IntArray, max_tokens: int) -> list[IntArray]:
    """Longest first, each into the fullest bin with room (the first of these); otherwise as `first_fit_decreasing`."""
    return _fit(lengths, max_tokens, best=True)


def pack_fewest(lengths: IntArray, costs: IntArray, max_tokens: int, k_min: int | None = None) -> list[IntArray]:
    """Balance costs over the fewest microbatches whose tokens keep the cap: the samples of each, heaviest first.

    Starts at ceil(tokens / max_tokens), or k_min if that is more, and adds one microbatch until all fit: the start is
    only a lower bound (eight samples of 7 tokens under a cap of 8 need eight, not seven: verl#7553). Never more
    microbatches than samples.

    Args:
        lengths: tokens of each sample [n].
        costs: positive integers [n].

    Raises:
        InputError: a sample is longer than max_tokens.
    """
    from odc_sim import partition_kernels as kernels

    check_cap(lengths, max_tokens)
    if len(lengths) == 0:
        return []
    order = costliest_first(costs, lengths)
    start = np.array([0, len(lengths)], np.int64)
    within, sizes, _ = kernels.pack_ranks(lengths[order], costs[order], start, max_tokens, k_min or 1, False)
    return np.split(order[within], np.cumsum(sizes)[:-1])


def equalize(rows: Sequence[IntArray], costs: IntArray, multiple: int) -> list[IntArray]:
    """Split the costliest rows that hold several samples in two until the number of rows is a multiple.

    The heavier half stays in place and the other one goes to the end. Splitting (as torchtitan#3938 does) rather than
    adding empty rows keeps every rank busy.

    Args:
        rows: indices into `costs`, one array a row.
        costs: positive integers [n].

    Raises:
        InputError: there are too few samples; each row needs at least one.
    """
    result = list(rows)
    heap = [(-int(costs[row].sum()), at) for at, row in enumerate(result) if row.size > 1]
    heapq.heapify(heap)
    while len(result) % multiple or not result:
        if not heap:
            samples = sum(row.size for row in rows)
            raise InputError(
                f"{samples} samples cannot be packed into a multiple of {multiple} non-empty microbatches: "
                "use a larger --minibatch-size, fewer ranks, or lb-mini under odc"
            )
        _, at = heapq.heappop(heap)
        row = result[at]
        half = balance(costs[row], 2)
        result[at] = row[half == half[costs[row].argmax()]]
        result.append(row[half != half[costs[row].argmax()]])
        if costs[result[at]].sum() < costs[result[-1]].sum():
            result[at], result[-1] = result[-1], result[at]
        for new in (at, len(result) - 1):
            if result[new].size > 1:
                heapq.heappush(heap, (-int(costs[result[new]].sum()), new))
    return result


def check_cap(lengths: IntArray, max_tokens: int) -> None:
    """Refuse samples that fit into no microbatch.

    Raises:
        InputError: names the first sample that is longer than max_tokens.
    """
    too_long = np.flatnonzero(lengths > max_tokens)
    if too_long.size:
        raise overlong(int(too_long[0]), int(lengths[too_long[0]]), max_tokens, int(too_long.size))


def overlong(sample: int, length: int, max_tokens: int, count: int) -> InputError:
    """The error for a sample above the cap: one of `count`."""
    others = f" (and {count - 1} more)" if count > 1 else ""
    return InputError(
        f"sample {sample} has {length} tokens{others}, more than the {max_tokens} a microbatch may hold: "
        "raise --max-tokens, or use --overlong drop|clip|scale"
    )


def _fit(lengths: IntArray, max_tokens: int, *, best: bool) -> list[IntArray]:
    from odc_sim import packing_kernels as kernels

    check_cap(lengths, max_tokens)
    if len(lengths) == 0:
        return []
    order = np.argsort(-lengths, kind="stable")
    part = kernels.first_fit(lengths[order], max_tokens, best)
    by_bin = np.argsort(part, kind="stable")
    return np.split(order[by_bin], np.cumsum(np.bincount(part))[:-1])
