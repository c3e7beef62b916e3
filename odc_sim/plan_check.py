"""What makes a plan runnable, checked where plans enter: from files and from lists."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError
from odc_sim.header import show
from odc_sim.overlong import LARGEST_LENGTH_TOKENS
from odc_sim.partition import IntArray

if TYPE_CHECKING:
    from odc_sim.plans import BoolArray, Plan

LARGEST_SIZE = 1_000_000
"""Ranks, and samples of a rank in a minibatch."""


def validate(plan: "Plan", where: str = "plan") -> None:
    """Refuse a plan that cannot be run.

    Args:
        plan: what to check.
        where: begins each message; the name of the file, say.

    Raises:
        InputError: sizes below 1 or absurd; lengths below 1 or above 2^31; a sample in no place or in two; a microbatch
            above the cap; an empty microbatch that is not marked as padding, or a full one that is. The message names
            the first such place.
    """
    sizes = (
        ("world_size", LARGEST_SIZE, "1,000,000"),
        ("minibatch_size", LARGEST_SIZE, "1,000,000"),
        ("max_tokens", LARGEST_LENGTH_TOKENS, "2^31"),
    )
    for name, most, words in sizes:
        value = getattr(plan, name)
        if value < 1:
            raise InputError(f"{where}: field {name!r} is {show(value)}: expected at least 1")
        if value > most:
            raise InputError(f"{where}: field {name!r} is {show(value)}: expected at most {words}")
    short = np.flatnonzero(plan.lengths < 1)
    if short.size:
        raise InputError(
            f"{where}: field 'lengths': sample {short[0]} has {plan.lengths[short[0]]} tokens: expected at least 1"
        )
    long = np.flatnonzero(plan.lengths > LARGEST_LENGTH_TOKENS)
    if long.size:
        raise InputError(
            f"{where}: field 'lengths': sample {long[0]} has {plan.lengths[long[0]]} tokens: expected at most 2^31"
        )
    if plan.groups is not None and plan.groups.shape != plan.lengths.shape:
        raise InputError(
            f"{where}: field 'groups' has {plan.groups.size} entries, "
            f"expected one for each of {plan.lengths.size} lengths"
        )
    _check_columns(plan, where)
    if plan.num_minibatches < 1:
        raise InputError(f"{where}: field 'minibatches' is empty: expected at least one minibatch")
    _check_samples(plan, where)
    _check_microbatches(plan, where)


def check_ranks(minibatches: Sequence[Sequence[object]], world_size: int, where: str = "plan") -> None:
    """Refuse a minibatch that has not one list for each rank."""
    for i, ranks in enumerate(minibatches):
        if len(ranks) != world_size:
            raise InputError(f"{where}: minibatch {i} has {len(ranks)} ranks, expected world_size = {show(world_size)}")


def padding_flags(
    padding: Iterable[tuple[int, int, int]], rank_start: IntArray, world_size: int, where: str = "plan"
) -> "BoolArray":
    """Flags [num_microbatches] for places (minibatch, rank, microbatch).

    Raises:
        InputError: there is no such place.
    """
    flags = np.zeros(int(rank_start[-1]), np.bool_)
    num_ranks = rank_start.size - 1
    for minibatch, rank, microbatch in padding:
        i = minibatch * world_size + rank
        known = minibatch >= 0 and 0 <= rank < world_size and i < num_ranks
        if not known or not 0 <= microbatch < rank_start[i + 1] - rank_start[i]:
            raise InputError(
                f"{where}: field 'padding': there is no minibatch {minibatch}, rank {rank}, microbatch {microbatch}"
            )
        flags[rank_start[i] + microbatch] = True
    return flags


def padding_places(plan: "Plan") -> list[list[int]]:
    """The (minibatch, rank, microbatch) of each microbatch that is padding; the inverse of `padding_flags`."""
    microbatch = np.flatnonzero(plan.padding)
    rank = plan.ranks()[microbatch]
    places: list[list[int]] = np.stack(
        [rank // plan.world_size, rank % plan.world_size, microbatch - plan.rank_start[rank]], axis=1
    ).tolist()
    return places


def place(plan: "Plan", microbatch: int) -> str:
    """Words for a microbatch given by its number in the whole plan."""
    # side="right" steps over ranks without microbatches, which start where the next one does.
    rank = int(np.searchsorted(plan.rank_start, microbatch, side="right")) - 1
    return (
        f"minibatch {rank // plan.world_size}, rank {rank % plan.world_size}, "
        f"microbatch {microbatch - int(plan.rank_start[rank])}"
    )


def _check_columns(plan: "Plan", where: str) -> None:
    """The columns fit together. Only code can get this wrong, not a file; but then it should not pass silently."""
    for name, start, end in (
        ("microbatch_start", plan.microbatch_start, plan.sample_ids.size),
        ("rank_start", plan.rank_start, plan.microbatch_start.size - 1),
    ):
        if start.size < 1 or start[0] != 0 or start[-1] != end or np.any(np.diff(start) < 0):
            raise InputError(f"{where}: {name} is no list of starts: expected to rise from 0 to {end}")
    if (plan.rank_start.size - 1) % plan.world_size:
        raise InputError(
            f"{where}: rank_start has {plan.rank_start.size - 1} ranks, expected a multiple of world_size "
            f"= {plan.world_size}"
        )
    if plan.padding.size != plan.num_microbatches:
        raise InputError(f"{where}: padding has {plan.padding.size} flags for {plan.num_microbatches} microbatches")


def _check_samples(plan: "Plan", where: str) -> None:
    ids, num_samples = plan.sample_ids, plan.lengths.size
    unknown = np.flatnonzero((ids < 0) | (ids >= num_samples))
    if unknown.size:
        raise InputError(
            f"{where}: {_place_of(plan, unknown[0])} has sample {ids[unknown[0]]}, "
            f"but there are lengths for 0 to {num_samples - 1} only"
        )
    uses = np.bincount(ids, minlength=num_samples)
    if np.any(uses > 1):
        sample = int(np.argmax(uses > 1))
        first, second = np.flatnonzero(ids == sample)[:2]
        raise InputError(
            f"{where}: sample {sample} is in two places: {_place_of(plan, first)} and {_place_of(plan, second)}"
        )
    if np.any(uses == 0):
        raise InputError(f"{where}: sample {int(np.argmin(uses))} is in no minibatch: expected each sample once")


def _check_microbatches(plan: "Plan", where: str) -> None:
    tokens = plan.tokens()
    over = np.flatnonzero(tokens > plan.max_tokens)
    if over.size:
        raise InputError(
            f"{where}: {place(plan, int(over[0]))} has {tokens[over[0]]} tokens, "
            f"more than field 'max_tokens' = {plan.max_tokens}"
        )
    empty: npt.NDArray[np.bool_] = plan.samples() == 0
    wrong = np.flatnonzero(empty & ~plan.padding)
    if wrong.size:
        raise InputError(
            f"{where}: {place(plan, int(wrong[0]))} is empty but not listed in field 'padding': "
            "expected samples, or a microbatch marked as padding"
        )
    wrong = np.flatnonzero(~empty & plan.padding)
    if wrong.size:
        raise InputError(f"{where}: {place(plan, int(wrong[0]))} is listed in field 'padding' but holds samples")


def _place_of(plan: "Plan", at: int) -> str:
    """Words for the microbatch that holds the sample at a place in sample_ids."""
    return place(plan, int(np.searchsorted(plan.microbatch_start, at, side="right")) - 1)
