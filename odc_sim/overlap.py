"""How a transfer and a computation that run at once slow each other down.

Both engines take durations as given; this is where concurrency has been priced in. Each layer's compute runs beside
the transfers that FSDP has in flight at that time: one gather in forward, one gather and one reduction in backward.
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


def stretch(alone_s: float, compute_s: Array, slowdown: float) -> Array:
    """How many times longer a transfer of `alone_s` takes beside `compute_s` [...]; 1 for a transfer of no length."""
    if alone_s <= 0.0:
        return np.ones_like(compute_s)
    result: Array = beside(np.full_like(compute_s, alone_s), compute_s, slowdown) / alone_s
    return result
