"""What no policy beats that keeps samples in their minibatch."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from odc_sim.inputs import Inputs

CAP_SHARE = 1.05
"""The longest sample is said to bind when it makes the lower bound this much larger than the balanced share."""


def longest_sample_binds(bounds: Mapping[str, float]) -> bool:
    """Whether the longest sample of a minibatch sets what no policy beats."""
    return bounds["lower_bound"] > CAP_SHARE * bounds["balanced_share"]


def bounds_of(inputs: Inputs, baseline_s: NDArray[np.float64]) -> dict[str, float]:
    """Seconds a minibatch that no policy beats that keeps samples in their minibatch: what samples add, without what
    microbatches cost whatever is in them, times the least that any microbatch costs relative to that."""
    speed = np.array(inputs.study.device_speed or [1.0] * inputs.study.devices)
    shortest = int(inputs.lengths.min(initial=inputs.max_tokens))
    least = inputs.compute.least_of_added((shortest, inputs.max_tokens))
    costs = [least * inputs.compute.sample_cost_s(inputs.lengths[ids]) for ids in inputs.minibatches]
    shares = np.array([cost.sum() / speed.sum() for cost in costs])
    largest = np.array([cost.max(initial=0.0) / speed.max() for cost in costs])
    lower = np.maximum(shares, largest)
    bound = {}
    if lower.sum() > 0.0 and not inputs.study.jitter:  # jitter is in the makespans, but not in these seconds
        bound = {"speedup": float(baseline_s.sum() / lower.sum())}
    return {
        "balanced_share": float(shares.mean()),
        "largest_sample": float(largest.mean()),
        "lower_bound": float(lower.mean()),
        **bound,
    }
