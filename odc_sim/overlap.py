"""How a transfer and a computation that run at once slow each other down.

Both engines take durations as given; this is where concurrency has been priced in. Each layer's compute runs beside
the transfers that FSDP has in flight at that time: one gather in forward, one gather and one reduction in backward.
A collective is in flight from when the first rank has reached it, and costs compute also while it waits for the others.
"""

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def beside(alone_s: Array, other_s: Array, slowdown: float) -> Array:
    """How long work of `alone_s` [...] takes when other work occupies the first `other_s` [...] of it.

    While both run it progresses `slowdown` (>= 1) times slower, afterwards at full speed. Never more than slowdown *
    alone_s.
    """
    both_s = np.minimum(other_s, alone_s * slowdown)
    result: Array = alone_s + (1.0 - 1.0 / slowdown) * both_s
    return result


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
    result: Array = beside(np.full_like(compute_s, alone_s), compute_s, slowdown) / alone_s
    return result
