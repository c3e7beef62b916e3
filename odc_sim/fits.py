"""From unit times measured on packed microbatches to seconds = c0 + c1 * tokens + c2 * sum of squared lengths.

Relative errors are squared and summed, so that a microbatch of 5,000 tokens counts as much as one of 60,000; shorter
ones count less and less, because a line cannot follow them (kernels do not fill the device) and the host's floor hides
them. Coefficients are never negative, so that no prediction is either, however far from what was measured. Below a
floor no unit gets, however few its tokens: microbatches that took about the floor are left out of the line where that
explains all of them better.
"""

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc_sim.errors import InputError

Array = NDArray[np.float64]
Shapes = Sequence[Sequence[int]]
"""Sample lengths of each microbatch."""

KNEE_TOKENS = 4096
"""From so many tokens on, or from a quarter of the most measured, a microbatch counts in full."""
ON_THE_FLOOR = 1.3
"""A microbatch that took less than this times the shortest one may be on the floor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """seconds = max(floor_s, c0_s + c1_s_per_token * tokens + c2_s_per_token2 * squares)."""

    c0_s: float
    c1_s_per_token: float
    c2_s_per_token2: float
    floor_s: float = 0.0

    def __call__(self, shapes: Shapes) -> Array:
        """Seconds [shapes]."""
        coefficients = np.array([self.c0_s, self.c1_s_per_token, self.c2_s_per_token2])
        seconds: Array = np.maximum(self.floor_s, columns(shapes) @ coefficients)
        return seconds

    def rel_errors(self, shapes: Shapes, seconds: ArrayLike) -> Array:
        """(predicted - measured) / measured [shapes]."""
        measured = np.asarray(seconds, dtype=np.float64)
        return self(shapes) / measured - 1.0


def columns(shapes: Shapes) -> Array:
    """[shapes, 3]: 1, tokens, and the sum of squared lengths, of each microbatch."""
    rows = [[1.0, sum(lengths), sum(s * s for s in lengths)] for lengths in shapes]
    return np.array(rows, dtype=np.float64).reshape(len(rows), 3)


def fit_line(shapes: Shapes, seconds: Sequence[float], *, quadratic: bool = True) -> Line:
    """The line with the least weighted squared relative error, and its floor: the shortest time there is.

    Args:
        shapes: sample lengths of each microbatch.
        seconds: measured, one for each of them.
        quadratic: whether the unit has attention, whose time grows with squared lengths.

    Raises:
        InputError: fewer different microbatches than coefficients.
    """
    features = columns(shapes)[:, : 2 + quadratic]
    measured = np.asarray(seconds, dtype=np.float64)
    different, wanted = len(np.unique(features, axis=0)), features.shape[1]
    if different < wanted:
        raise InputError(
            f"a fit needs at least {wanted} different microbatches with steady times, got {different}; "
            "stop other programs on this machine and calibrate again"
        )
    floor_s = float(measured.min())
    weights = _weights(features[:, 1])
    lines = [_line(features, measured, weights, floor_s)]
    above = measured > ON_THE_FLOOR * floor_s
    if np.linalg.matrix_rank(_scaled(features[above])[0]) == wanted:
        lines.append(_line(features[above], measured[above], weights[above], floor_s))
    return min(lines, key=lambda line: float(np.sum((weights * line.rel_errors(shapes, measured)) ** 2)))


def _weights(tokens: Array) -> Array:
    knee = min(KNEE_TOKENS, float(tokens.max()) / 4)
    weights: Array = np.minimum(1.0, tokens / knee) ** 2
    return weights


def _line(features: Array, measured: Array, weights: Array, floor_s: float) -> Line:
    found = _least_squares(features * (weights / measured)[:, None], weights)
    c0_s, c1_s_per_token, c2_s_per_token2 = (float(c) for c in [*found, 0.0][:3])
    return Line(c0_s=c0_s, c1_s_per_token=c1_s_per_token, c2_s_per_token2=c2_s_per_token2, floor_s=floor_s)


def spread(a: Line, b: Line, shapes: Shapes) -> float:
    """The largest relative difference between two lines over some microbatches."""
    first, second = a(shapes), b(shapes)
    return float(np.max(np.abs(first - second) / np.minimum(first, second), initial=0.0))


def steady(a: Sequence[float], b: Sequence[float], *, spread: float, drift: float, resolution_s: float = 0.0) -> bool:
    """Whether two series of one measurement are quiet and agree.

    Quiet: the 80th percentile of all is at most `spread` times the 20th. Agreeing: their medians differ by at most
    `drift`, a fraction. Differences of at most `resolution_s` seconds count as none.
    """
    first, second = statistics.median(a), statistics.median(b)
    low, high = np.quantile([*a, *b], [0.2, 0.8])
    return bool(
        high <= max(spread * low, low + resolution_s)
        and abs(first - second) <= max(drift * min(first, second), resolution_s)
    )


def _least_squares(features: Array, target: Array) -> Array:
    """The c >= 0 that makes `features` [n, k] @ c closest to `target` [n]: the best over which coefficients are 0."""
    scaled, scale = _scaled(features)
    best, best_error = np.zeros(features.shape[1]), np.inf
    for size in range(1, features.shape[1] + 1):
        for chosen in itertools.combinations(range(features.shape[1]), size):
            part, *_ = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)
            error = float(np.sum((scaled[:, chosen] @ part - target) ** 2))
            if (part >= 0).all() and error < best_error:
                best_error = error
                best = np.zeros(features.shape[1])
                best[list(chosen)] = part
    solution: Array = best / scale
    return solution


def _scaled(features: Array) -> tuple[Array, Array]:
    """Columns of length 1, for the sake of rounding, and what they were divided by."""
    scale = np.sqrt(np.sum(features**2, axis=0))
    scale[scale == 0] = 1.0
    return features / scale, scale
