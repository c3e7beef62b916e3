"""Rates, speedups and their intervals, from what an engine measured. One definition each.

Rates are ratios of sums over minibatches (never means of ratios), so that a long minibatch counts as long as it takes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import CAUSES
from odc_sim.execution import Executed

Array = NDArray[np.float64]
BOOTSTRAP_RESAMPLES = 2000


def rate(part: Array, whole: Array) -> float:
    """Sum of `part` over sum of `whole`; 0 when there is nothing to divide by."""
    total = float(whole.sum())
    return float(part.sum()) / total if total > 0.0 else 0.0


def idle_rate(run: Executed, world_size: int) -> float:
    """1 - busy rank-seconds / (world_size * makespan): the share of GPU time that is not uncontended compute."""
    return rate(world_size * run.makespan_s - run.busy_s, world_size * run.makespan_s)


def idle_causes(run: Executed, world_size: int) -> dict[str, float]:
    """`idle_rate` split into its exclusive causes; they sum to it."""
    total = world_size * run.makespan_s
    return {cause: rate(run.idle_s[:, i], total) for i, cause in enumerate(CAUSES)}


def bubble_rate(run: Executed, world_size: int) -> float:
    """The paper's bubble rate: idle_rate with transfers, optimizer, host and per-microbatch fixed cost free.

    Source: arXiv 2601.19362, table 6, where it is estimated from the balancing algorithm's costs.
    """
    total = world_size * run.bubble_makespan_s
    return rate(total - run.bubble_busy_s, total)


def mfu(model_flops: float, makespan_s: Array, world_size: int, peak_flops: float) -> float:
    """Model FLOPs (no recompute) over what the devices could have done in that time, a fraction (PaLM, appendix B)."""
    capacity = float(makespan_s.sum()) * world_size * peak_flops
    return model_flops / capacity if capacity > 0.0 else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """Baseline time over own time on the same minibatches, with a 95 % bootstrap interval over minibatches."""

    value: float
    low: float
    high: float


def speedup(baseline_s: Array, own_s: Array, block: int, rng: np.random.Generator) -> Speedup:
    """Compare makespans [B] of two runs over the same samples.

    `block` consecutive minibatches are resampled together: more than 1 when a policy moves samples between them.
    """
    value = float(baseline_s.sum() / own_s.sum())
    starts = np.arange(0, baseline_s.shape[0], block)
    base, own = np.add.reduceat(baseline_s, starts), np.add.reduceat(own_s, starts)
    picks = rng.integers(0, len(starts), (BOOTSTRAP_RESAMPLES, len(starts)))
    ratios = base[picks].sum(axis=1) / own[picks].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return Speedup(value=value, low=float(low), high=float(high))


def gpu_hours_saved(baseline_s: Array, own_s: Array, world_size: int, steps: int = 1000) -> float:
    """GPU-hours that `steps` optimizer steps take less than under the baseline; negative when they take more."""
    return float(baseline_s.mean() - own_s.mean()) * steps * world_size / 3600.0
