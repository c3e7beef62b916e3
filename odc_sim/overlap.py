"""How a transfer and a computation that run at once slow each other down.

Both engines take durations as given; this is where concurrency has been priced in. Each layer's compute runs beside
what FSDP has on other streams at that time: one copy-in and one gather in forward, the same and one reduction with its
`+=` in backward. A collective is in flight from when the first rank has reached it, and costs compute also while it
waits for the others.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

MOST_LOST = 0.95
"""Of the other work's time; a rate of compute beside it cannot express more."""


def beside(alone_s: Array, others: Sequence[tuple[Array, float]]) -> Array:
    """How long work of `alone_s` [...] takes when other work, of these seconds [...] one after another, begins with it.

    While both run it progresses as many times slower (>= 1) as comes with each, afterwards at full speed.
    """
    left_s, lost_s = alone_s, np.zeros_like(alone_s)
    for other_s, slowdown in others:
        both_s = np.minimum(other_s, left_s * slowdown)
        left_s = left_s - both_s / slowdown
        lost_s = lost_s + (1.0 - 1.0 / slowdown) * both_s
    return alone_s + lost_s


def waiting(alone_s: Array, slowdown: float, lockstep: NDArray[np.bool_]) -> Array:
    """What compute of `alone_s` [B, D] takes on ranks that are ahead of others, where ranks run in `lockstep` [B, D].

    A collective's kernel that waits for a slower rank holds multiprocessors all that time, so that the faster ranks'
    compute progresses `slowdown` (>= 1) times slower; but a rank that is slowed down to the slowest one's speed waits
    no longer. Measured: reports/validation-h200.
    """
    slowest_s = np.where(lockstep, alone_s, 0.0).max(axis=-1, keepdims=True)
    result: Array = np.where(lockstep, np.maximum(alone_s, np.minimum(alone_s * slowdown, slowest_s)), alone_s)
    return result


def stretch(alone_s: float, compute_s: Array, slowdown: float) -> Array:
    """How many times longer a transfer of `alone_s` takes beside `compute_s` [...]; 1 for a transfer of no length."""
    if alone_s <= 0.0:
        return np.ones_like(compute_s)
    result: Array = beside(np.full_like(compute_s, alone_s), [(compute_s, slowdown)]) / alone_s
    return result


def slowdown(lost_s: float, other_s: float, step_s: float) -> float:
    """How many times slower a step that takes `step_s` beside other work progresses while that lasts, at least 1."""
    both_s = min(other_s, step_s)
    return both_s / (both_s - min(max(lost_s, 0.0), MOST_LOST * both_s))
