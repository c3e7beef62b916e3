"""The load-balancing policies by name, and the one function that plans minibatches with any of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from odc_sim import dealing
from odc_sim.dealing import Batch, Dealt
from odc_sim.errors import InputError, unknown_name
from odc_sim.packing import overlong
from odc_sim.partition import FloatArray, IntArray, integer_costs

__all__ = ["POLICIES", "Layout", "Policy", "lay_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """One way to deal samples to ranks and microbatches."""

    name: str
    summary: str
    equal_counts: bool
    """All ranks of a minibatch run equally many microbatches, so collectives can run it."""
    equal_samples: bool
    """All ranks of a minibatch get equally many samples, so world_size must divide the minibatch."""
    whole_batch: bool
    """It sees a whole batch of several minibatches at once, and moves samples between them."""
    deal: Callable[[Batch], Dealt]


def _policy(
    name: str,
    deal: Callable[[Batch], Dealt],
    summary: str,
    *,
    equal_counts: bool = True,
    equal_samples: bool = True,
    whole_batch: bool = False,
) -> Policy:
    return Policy(
        name=name,
        deal=deal,
        summary=summary,
        equal_counts=equal_counts,
        equal_samples=equal_samples,
        whole_batch=whole_batch,
    )


POLICIES: Mapping[str, Policy] = MappingProxyType(
    {
        policy.name: policy
        for policy in (
            _policy("none", dealing.strided, "strided deal, one sample a microbatch"),
            _policy("local-sort", dealing.local_sort, "strided deal, each rank sorts its own, one sample a microbatch"),
            _policy("global-sort", dealing.global_sort, "samples of similar length run together, one a microbatch"),
            _policy("ffd", dealing.packed_first_fit, "first-fit decreasing packing, no balance", equal_samples=False),
            _policy("bfd", dealing.packed_best_fit, "best-fit decreasing packing, no balance", equal_samples=False),
            _policy("lpt", dealing.longest_first, "costliest sample first onto the least loaded rank, then packing"),
            _policy("lb-micro", dealing.lb_micro, "Karmarkar-Karp over ranks, then microbatches; as many on each rank"),
            _policy(
                "lb-mini",
                dealing.lb_mini,
                "Karmarkar-Karp on total cost; each rank packs into its fewest microbatches",
                equal_counts=False,
                equal_samples=False,
            ),
            _policy(
                "verl-native",
                dealing.verl_native,
                "Karmarkar-Karp over the whole PPO batch, shuffled, then cut into minibatches",
                whole_batch=True,
            ),
            _policy(
                "cost-rows",
                dealing.cost_rows,
                "packed rows sorted by cost, alike ones run together",
                equal_samples=False,
            ),
        )
    }
)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Layout:
    """Planned minibatches in columns: the arrays of a `Plan`."""

    sample_ids: IntArray
    """Samples in order of running [total]."""
    microbatch_start: IntArray
    """First sample of each microbatch, and the end [num_microbatches + 1]."""
    rank_start: IntArray
    """First microbatch of each (minibatch, rank), and the end [num_minibatches * world_size + 1]."""


def lay_out(
    policy_name: str,
    minibatches: Sequence[IntArray],
    lengths: IntArray,
    world_size: int,
    max_tokens: int,
    sample_cost_s: Callable[[IntArray], FloatArray],
    rng: np.random.Generator,
    batch_minibatches: int = 4,
) -> Layout:
    """Deal minibatches to ranks and microbatches.

    Args:
        policy_name: a key of `POLICIES`.
        minibatches: indices into `lengths` [n] of each minibatch; no sample twice.
        lengths: tokens of each sample [num_samples].
        world_size: number of ranks.
        max_tokens: cap of a microbatch.
        sample_cost_s: the cost of samples of given lengths [n] -> [n]; only ratios matter.
        rng: for policies that shuffle (verl-native).
        batch_minibatches: consecutive minibatches that a whole-batch policy sees at once; others see one.

    Raises:
        InputError: unknown policy; a sample longer than max_tokens; a minibatch that the policy cannot divide.
    """
    if policy_name not in POLICIES:
        raise unknown_name("policy", policy_name, POLICIES)
    policy = POLICIES[policy_name]
    for name, value in (
        ("world_size", world_size),
        ("max_tokens", max_tokens),
        ("batch_minibatches", batch_minibatches),
    ):
        if value < 1:
            raise InputError(f"{name} is {value}: expected at least 1")
    ids, sizes = _checked_ids(minibatches, len(lengths))
    own = np.asarray(lengths, np.int64)[ids]
    _check_lengths(own, ids, max_tokens)
    costs = integer_costs(sample_cost_s(own))
    step = batch_minibatches if policy.whole_batch else 1
    dealt: list[Dealt] = []
    items: list[IntArray] = []
    at = 0
    for first in range(0, len(sizes), step):
        mine = tuple(sizes[first : first + step])
        end = at + sum(mine)
        batch = Batch(
            lengths=own[at:end],
            costs=costs[at:end],
            minibatch_sizes=mine,
            world_size=world_size,
            max_tokens=max_tokens,
            rng=rng,
        )
        try:
            dealt.append(policy.deal(batch))
        except InputError as error:
            raise InputError(f"policy {policy_name}, minibatch {first}: {error}") from None
        items.append(ids[at:end][dealt[-1].items])
        at = end
    return Layout(
        sample_ids=np.concatenate(items),
        microbatch_start=_starts([one.sizes for one in dealt]),
        rank_start=_starts([one.counts for one in dealt]),
    )


def _starts(sizes: Sequence[npt.NDArray[np.int64]]) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(sizes))])


def _checked_ids(minibatches: Sequence[IntArray], num_samples: int) -> tuple[IntArray, list[int]]:
    if len(minibatches) == 0:
        raise InputError("got no minibatches: expected at least one")
    arrays = [np.asarray(one, np.int64) for one in minibatches]
    for i, one in enumerate(arrays):
        if one.size == 0:
            raise InputError(f"minibatch {i} has no samples: expected at least one")
    ids = np.concatenate(arrays)
    if ids.min() < 0 or ids.max() >= num_samples:
        wrong = ids.min() if ids.min() < 0 else ids.max()
        raise InputError(f"sample {wrong} is out of range: there are {num_samples} lengths")
    uses = np.bincount(ids, minlength=num_samples)
    if uses.max() > 1:
        raise InputError(f"sample {uses.argmax()} is in the minibatches {uses.max()} times: expected once")
    return ids, [one.size for one in arrays]


def _check_lengths(own: IntArray, ids: IntArray, max_tokens: int) -> None:
    wrong = np.flatnonzero(own < 1)
    if wrong.size:
        raise InputError(f"sample {ids[wrong[0]]} has {own[wrong[0]]} tokens: expected at least 1")
    wrong = np.flatnonzero(own > max_tokens)
    if wrong.size:
        raise overlong(int(ids[wrong[0]]), int(own[wrong[0]]), max_tokens, int(wrong.size))
