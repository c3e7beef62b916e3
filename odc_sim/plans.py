"""A plan: which rank runs which samples in which microbatch of which minibatch. Simulator and trainer run the same one.

Held in columns, so that millions of samples cost a few numbers each. Files are read and written by `plan_file`,
checked by `plan_check`; all of it can be had from here.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from odc_sim.partition import IntArray

BoolArray = npt.NDArray[np.bool_]
Number = TypeVar("Number", np.int64, np.float64, np.bool_)
Nested = list[list[list[list[int]]]]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Plan:
    """Minibatches dealt out to ranks and microbatches. Nothing is checked here: see `validate`."""

    workload: Mapping[str, Any]
    """What the lengths are; anything that JSON can hold."""
    model: str
    world_size: int
    minibatch_size: int
    """Samples per rank and minibatch, on average."""
    max_tokens: int
    """Cap of a microbatch."""
    policy: str
    balancing_cost: Mapping[str, str]
    """name and source of the cost that the policy balanced."""
    lengths: IntArray
    """Tokens of each sample [num_samples]."""
    groups: IntArray | None = None
    """RL prompt of each sample [num_samples]."""
    seed: int | None = None
    sample_ids: IntArray
    """Samples in order of minibatch, rank, microbatch [total]."""
    microbatch_start: IntArray
    """First place in sample_ids of each microbatch, and the end [num_microbatches + 1]."""
    rank_start: IntArray
    """First microbatch of each (minibatch, rank), and the end [num_minibatches * world_size + 1]."""
    padding: BoolArray
    """Whether a microbatch is empty on purpose, to make counts equal [num_microbatches]."""

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps."""
        return (self.rank_start.size - 1) // self.world_size

    @property
    def num_microbatches(self) -> int:
        """Over all minibatches and ranks, padding included."""
        return self.microbatch_start.size - 1

    def counts(self) -> IntArray:
        """Microbatches of each rank [num_minibatches, world_size], padding included."""
        return np.diff(self.rank_start).reshape(-1, self.world_size)

    def tokens(self) -> IntArray:
        """Tokens of each microbatch [num_microbatches]: the sum of its lengths."""
        return self._sums(self.lengths[self.sample_ids])

    def squares(self) -> IntArray:
        """Sum of the squared lengths of each microbatch [num_microbatches], tokens^2."""
        return self._sums(self.lengths[self.sample_ids] ** 2)

    def samples(self) -> IntArray:
        """Samples of each microbatch [num_microbatches]."""
        return np.diff(self.microbatch_start)

    def ranks(self) -> IntArray:
        """Place of each microbatch [num_microbatches] as minibatch * world_size + rank."""
        return np.repeat(np.arange(self.rank_start.size - 1), np.diff(self.rank_start))

    def padded(self, values: npt.NDArray[Number]) -> npt.NDArray[Number]:
        """Values of microbatches [num_microbatches] as [num_minibatches, most microbatches of a rank, world_size].

        Zero where a rank has no such microbatch.
        """
        counts = self.counts()
        deepest = int(counts.max(initial=0))
        place = self.ranks()
        microbatch = np.arange(self.num_microbatches) - self.rank_start[:-1][place]
        out = np.zeros((self.num_minibatches, deepest, self.world_size), dtype=values.dtype)
        out[place // self.world_size, microbatch, place % self.world_size] = values
        return out

    def nested(self) -> Nested:
        """Lists of minibatches, of ranks, of microbatches, of sample ids."""
        return nest(self.sample_ids, self.microbatch_start, self.rank_start, self.world_size)

    @classmethod
    def from_nested(
        cls,
        minibatches: Sequence[Sequence[Sequence[Sequence[int]]]],
        *,
        workload: Mapping[str, Any],
        model: str,
        world_size: int,
        minibatch_size: int,
        max_tokens: int,
        policy: str,
        balancing_cost: Mapping[str, str],
        lengths: npt.ArrayLike,
        groups: npt.ArrayLike | None = None,
        seed: int | None = None,
        padding: Iterable[tuple[int, int, int]] = (),
        where: str = "plan",
    ) -> "Plan":
        """A plan from lists of minibatches, of ranks, of microbatches, of sample ids.

        Args:
            minibatches: each with world_size ranks.
            padding: (minibatch, rank, microbatch) of the microbatches that are empty on purpose.
            where: begins the message of an error; the name of a file, say.
            workload, model, world_size, minibatch_size, max_tokens, policy, balancing_cost, lengths, groups, seed:
                the fields of the plan.

        Raises:
            InputError: the result is no valid plan (see `validate`).
        """
        from odc_sim.plan_check import check_ranks, padding_flags, validate

        check_ranks(minibatches, world_size, where)
        ranks = list(chain.from_iterable(minibatches))
        microbatches = list(chain.from_iterable(ranks))
        rank_start = _starts([len(rank) for rank in ranks])
        plan = cls(
            workload=workload,
            model=model,
            world_size=world_size,
            minibatch_size=minibatch_size,
            max_tokens=max_tokens,
            policy=policy,
            balancing_cost=balancing_cost,
            lengths=np.asarray(lengths, np.int64),
            groups=None if groups is None else np.asarray(groups, np.int64),
            seed=seed,
            sample_ids=np.array(list(chain.from_iterable(microbatches)), np.int64),
            microbatch_start=_starts([len(microbatch) for microbatch in microbatches]),
            rank_start=rank_start,
            padding=padding_flags(padding, rank_start, world_size, where),
        )
        validate(plan, where)
        return plan

    def _sums(self, values: IntArray) -> IntArray:
        # Where the running total overflows, int64 wraps around and the differences are still exact.
        return np.diff(np.concatenate([np.zeros(1, np.int64), np.cumsum(values)])[self.microbatch_start])


def nest(sample_ids: IntArray, microbatch_start: IntArray, rank_start: IntArray, world_size: int) -> Nested:
    """The columns of a plan as lists of minibatches, of ranks, of microbatches, of sample ids."""
    ranks = _runs(_runs(sample_ids.tolist(), microbatch_start), rank_start)
    return [ranks[i : i + world_size] for i in range(0, len(ranks), world_size)]


def pad_microbatches(plan: Plan) -> Plan:
    """The same plan with empty microbatches at the end of each rank, so that all ranks of a minibatch run equally many.

    What verl does so that FSDP's collectives do not hang (`--pad-microbatches`): the added ones cost time, not samples.
    """
    counts = plan.counts()
    missing = (counts.max(axis=1, keepdims=True) - counts).ravel()
    if not missing.any():
        return plan
    # An empty microbatch starts where the next one starts: insert it before the first microbatch of the next rank.
    before = np.repeat(plan.rank_start[1:], missing)
    return replace(
        plan,
        microbatch_start=np.insert(plan.microbatch_start, before, plan.microbatch_start[before]),
        rank_start=plan.rank_start + np.concatenate([np.zeros(1, np.int64), np.cumsum(missing)]),
        padding=np.insert(plan.padding, before, True),
    )


class UnequalCounts(NamedTuple):
    """Two ranks of one minibatch that run different numbers of microbatches, so collectives hang."""

    minibatch: int
    rank_a: int
    count_a: int
    """The most of any rank."""
    rank_b: int
    count_b: int
    """The fewest of any rank."""


def unequal_counts(plan: Plan) -> UnequalCounts | None:
    """The first minibatch whose ranks run different numbers of microbatches, with its extremes; None if there is none.

    Under collectives such a minibatch deadlocks: the rank with more waits for peers that have finished.
    """
    counts = plan.counts()
    uneven = np.flatnonzero(counts.max(axis=1) != counts.min(axis=1))
    if uneven.size == 0:
        return None
    minibatch = int(uneven[0])
    row = counts[minibatch]
    most, fewest = int(row.argmax()), int(row.argmin())
    return UnequalCounts(minibatch, most, int(row[most]), fewest, int(row[fewest]))


def validate(plan: Plan, where: str = "plan") -> None:
    """Refuse a plan that cannot be run. See `plan_check.validate`."""
    from odc_sim.plan_check import validate as check

    check(plan, where)


def read_plan(path: str | Path) -> Plan:
    """A checked plan from plan.json. See `plan_file.read_plan`."""
    from odc_sim.plan_file import read_plan as read

    return read(path)


def write_plan(plan: Plan, path: str | Path, command: str) -> None:
    """Write plan.json. See `plan_file.write_plan`."""
    from odc_sim.plan_file import write_plan as write

    write(plan, path, command)


def _starts(sizes: Sequence[int]) -> IntArray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.array(sizes, np.int64))])


Item = TypeVar("Item")


def _runs(items: list[Item], start: IntArray) -> list[list[Item]]:
    edges = start.tolist()
    return [items[a:b] for a, b in pairwise(edges)]
