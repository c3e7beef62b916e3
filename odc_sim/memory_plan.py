"""The peak of a plan: its largest microbatch need not be where a microbatch takes most."""

from collections.abc import Callable
from typing import get_args

import numpy as np

from odc_sim.memory import MemoryEstimate
from odc_sim.memory_moments import Place
from odc_sim.plans import BoolArray, Plan


def plan_peak(
    plan: Plan, peak: Callable[[int, Place], MemoryEstimate], included: BoolArray | None = None
) -> MemoryEstimate:
    """The largest estimate of a plan's microbatches.

    Args:
        plan: padded, where the schedule pads.
        peak: the estimate of a microbatch of so many tokens in a place; it must not fall with tokens.
        included: the microbatches that count [num_microbatches]; None: all. Places are those in the whole minibatch.
    """
    tokens = plan.tokens()
    place = places(plan)
    counted = np.ones(plan.num_microbatches, dtype=bool) if included is None else included
    names: tuple[Place, ...] = get_args(Place)
    found = [
        peak(int(tokens[chosen].max()), name)
        for number, name in enumerate(names)
        if (chosen := counted & (place == number)).any()
    ]
    return max(found, key=lambda each: each.total_bytes) if found else peak(0, "only")


def places(plan: Plan) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """The `Place` of each microbatch [num_microbatches] as its position in the Literal."""
    counts = np.diff(plan.rank_start)
    several = np.repeat(counts, counts) > 1
    number = np.arange(plan.num_microbatches) - np.repeat(plan.rank_start[:-1], counts)
    last = number == np.repeat(counts, counts) - 1
    only_first_middle_last = np.select([~several, number == 0, ~last], [0, 1, 2], default=3)
    return only_first_middle_last.astype(np.int64)
