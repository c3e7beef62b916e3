"""How each policy deals one minibatch out: ranks, then microbatches, then samples. `policies` names and calls these."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from odc_sim.errors import InputError
from odc_sim.packing import best_fit_decreasing, equalize, first_fit_decreasing
from odc_sim.partition import IntArray, balance, costliest_first


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """What a policy sees: one minibatch, or several consecutive ones where it plans them together."""

    lengths: IntArray
    """Tokens of each sample [n], each at most max_tokens."""
    costs: IntArray
    """Positive integer cost of each sample [n]."""
    minibatch_sizes: tuple[int, ...]
    """Samples of each minibatch; they sum to n."""
    world_size: int
    max_tokens: int
    rng: np.random.Generator


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dealt:
    """A batch dealt out, as nested runs: minibatch by minibatch, in it rank by rank, in it microbatch by microbatch."""

    items: IntArray
    """Samples of the batch in order of running [n]."""
    sizes: IntArray
    """Samples in each microbatch [microbatches]."""
    counts: IntArray
    """Microbatches of each (minibatch, rank) [minibatches * world_size]."""


def strided(batch: Batch) -> Dealt:
    """Sample i goes to rank i mod world_size; one sample a microbatch, in the order given (sail-sg/odc "None")."""
    return _one_sample_each(_equal_columns(batch, np.arange(batch.lengths.size)))


def local_sort(batch: Batch) -> Dealt:
    """As `strided`, then each rank runs its own samples shortest first (LocalSort, ODC paper section 5)."""
    columns = _equal_columns(batch, np.arange(batch.lengths.size))
    by_length = np.argsort(batch.lengths[columns], axis=1, kind="stable")
    return _one_sample_each(np.take_along_axis(columns, by_length, axis=1))


def global_sort(batch: Batch) -> Dealt:
    """Sort by length; world_size neighbours run together, one sample a microbatch (length-grouped sampling)."""
    return _one_sample_each(_equal_columns(batch, np.argsort(batch.lengths, kind="stable")))


def packed_first_fit(batch: Batch) -> Dealt:
    """First-fit decreasing over the whole minibatch, rows dealt to the ranks in the order they were opened."""
    return _rows(batch, _equalized(batch, first_fit_decreasing(batch.lengths, batch.max_tokens)))


def packed_best_fit(batch: Batch) -> Dealt:
    """Best-fit decreasing over the whole minibatch, rows dealt to the ranks in the order they were opened."""
    return _rows(batch, _equalized(batch, best_fit_decreasing(batch.lengths, batch.max_tokens)))


def cost_rows(batch: Batch) -> Dealt:
    """First-fit decreasing, then rows by falling cost, so that those that run together cost alike (torchtitan#3938)."""
    rows = _equalized(batch, first_fit_decreasing(batch.lengths, batch.max_tokens))
    cost = np.array([batch.costs[row].sum() for row in rows])
    return _rows(batch, [rows[i] for i in np.argsort(-cost, kind="stable")])


def longest_first(batch: Batch) -> Dealt:
    """Costliest sample first onto the least loaded rank with room for another (TRL#6092); then as `lb_micro`."""
    from odc_sim import packing_kernels as kernels

    _require_divisible(batch)
    order = costliest_first(batch.costs, batch.lengths)
    limit = order.size // batch.world_size
    part = kernels.least_loaded(batch.costs[order], batch.world_size, limit)
    return _packed(batch, order, part, same=True)


def lb_micro(batch: Batch) -> Dealt:
    """Karmarkar-Karp over ranks with equal sample counts, then over k microbatches a rank; the same k for all.

    LB-Micro of the ODC paper (section 5, `DynamicSameMicro` in sail-sg/odc): k grows for all until every microbatch
    fits; each rank runs its heaviest microbatch first, so that those that meet cost alike.
    """
    _require_divisible(batch)
    order = costliest_first(batch.costs, batch.lengths)
    return _packed(batch, order, balance(batch.costs[order], batch.world_size, equal=True), same=True)


def lb_mini(batch: Batch) -> Dealt:
    """Karmarkar-Karp over ranks with free counts; each rank alone packs into its fewest microbatches.

    LB-Mini of the ODC paper (section 5, `DynamicDiffMicro` in sail-sg/odc). A rank may get no sample at all.
    """
    order = costliest_first(batch.costs, batch.lengths)
    return _packed(batch, order, balance(batch.costs[order], batch.world_size), same=False)


def verl_native(batch: Batch) -> Dealt:
    """Karmarkar-Karp over the whole PPO batch, each rank's share shuffled, then cut into minibatches.

    Native of the ODC paper (section 5): the batch is balanced, its minibatches are not. Samples change their minibatch.
    """
    world_size = batch.world_size
    for size in batch.minibatch_sizes:
        _require_divisible(batch, size)
    order = costliest_first(batch.costs, batch.lengths)
    part = balance(batch.costs[order], world_size, equal=True)
    shares = np.sort(order[np.argsort(part, kind="stable")].reshape(world_size, -1), axis=1)
    shares = batch.rng.permuted(shares, axis=1)
    dealt, done = [], 0
    for size in batch.minibatch_sizes:
        each = size // world_size
        mine = shares[:, done : done + each]
        done += each
        by_cost = costliest_first(batch.costs[mine.ravel()], batch.lengths[mine.ravel()])
        ranks = np.repeat(np.arange(world_size), each)
        dealt.append(_packed(batch, mine.ravel()[by_cost], ranks[by_cost], same=True))
    return Dealt(
        items=np.concatenate([one.items for one in dealt]),
        sizes=np.concatenate([one.sizes for one in dealt]),
        counts=np.concatenate([one.counts for one in dealt]),
    )


def _packed(batch: Batch, order: IntArray, rank: IntArray, *, same: bool) -> Dealt:
    """Pack each rank's samples: `order` [n] has the samples costliest first, `rank` [n] the rank of each of them."""
    from odc_sim import partition_kernels as kernels

    by_rank = order[np.argsort(rank, kind="stable")]
    start = np.concatenate([[0], np.cumsum(np.bincount(rank, minlength=batch.world_size))])
    within, sizes, counts = kernels.pack_ranks(
        batch.lengths[by_rank], batch.costs[by_rank], start, batch.max_tokens, 1, same
    )
    return Dealt(items=by_rank[within], sizes=sizes, counts=counts)


def _rows(batch: Batch, rows: Sequence[IntArray]) -> Dealt:
    """Row i is microbatch i // world_size of rank i mod world_size."""
    mine = [row for rank in range(batch.world_size) for row in rows[rank :: batch.world_size]]
    return Dealt(
        items=np.concatenate(mine),
        sizes=np.array([row.size for row in mine], np.int64),
        counts=np.full(batch.world_size, len(rows) // batch.world_size, np.int64),
    )


def _one_sample_each(columns: IntArray) -> Dealt:
    """One microbatch for each sample of `columns` [world_size, each]."""
    world_size, each = columns.shape
    return Dealt(
        items=columns.ravel(), sizes=np.ones(columns.size, np.int64), counts=np.full(world_size, each, np.int64)
    )


def _equal_columns(batch: Batch, order: IntArray) -> IntArray:
    """`order` [n] dealt round-robin: the samples of each rank [world_size, n / world_size]."""
    _require_divisible(batch)
    return np.ascontiguousarray(order.reshape(-1, batch.world_size).T)


def _equalized(batch: Batch, rows: list[IntArray]) -> list[IntArray]:
    _require_one_each(batch, batch.lengths.size)
    return equalize(rows, batch.costs, batch.world_size)


def _require_divisible(batch: Batch, samples: int | None = None) -> None:
    samples = batch.lengths.size if samples is None else samples
    _require_one_each(batch, samples)
    if samples % batch.world_size:
        raise InputError(
            f"{samples} samples cannot be divided over {batch.world_size} ranks: this policy needs as many on each; "
            f"choose another --minibatch-size, use lb-mini under odc, or drop {samples % batch.world_size}"
        )


def _require_one_each(batch: Batch, samples: int) -> None:
    if samples < batch.world_size:
        raise InputError(
            f"{samples} samples for {batch.world_size} ranks: this policy needs at least one for each; "
            "choose a larger --minibatch-size, fewer ranks, or lb-mini under odc"
        )
