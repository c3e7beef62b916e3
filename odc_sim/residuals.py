"""How far measured times are from their line c0 + c1 * tokens + c2 * squares, between the shapes that were measured.

Matrix products and attention are more or less efficient depending on shape, which no line has: on H200s the forward of
one sample of 8,192 tokens takes 0.9 to 3.7 % longer than it (of four models), that of eight of 1,021 from 3.2 % less to
4.7 % longer. The relative differences at the measured shapes are interpolated by kriging, which is Gaussian process
regression of mean 0 (Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006, chapter 2, equation 2.25):
near a measured shape the estimate is what was measured there, far from all of them it is 0, which is the line.

A shape's place is [log of tokens, log of squares / tokens], natural logarithms: how much there is, and how long the
samples are (what a token attends to, on average and up to a factor of 2).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from odc_sim.fits import KNEE_TOKENS, Line, Shapes, columns

Array = NDArray[np.float64]

LENGTH_SCALE = 1.2
"""Over which differences change, in natural logarithms: a factor of 3.3 in tokens or in sample length. Calibrations
measure about two shapes in it. Of 0.3 to 2, this one predicts shapes that were left out best."""
AMPLITUDE = 0.03
"""How far from the line, relatively, times of one shape usually are (a standard deviation)."""
NOISE = 0.01
"""By how much, relatively, repeats of one shape differ: so much of a difference is no property of the shape."""
LARGEST = 0.5
"""No correction is larger than this. Those of real calibrations are far below; so no time is ever negative."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Residuals:
    """Relative corrections of one unit's line in one direction."""

    points: tuple[tuple[float, float], ...]
    """[n, 2] places of the measured shapes."""
    weights: tuple[float, ...]
    """[n] of each point's kernel in the sum that is the correction."""

    def __call__(self, tokens: ArrayLike, squares: ArrayLike) -> Array:
        """(measured - line) / line [...] as estimated for `tokens` [...] and sums of squared lengths `squares` [...].

        Microbatches without tokens count as one token.
        """
        size, length = _place(tokens, squares)
        found: Array = np.zeros(np.broadcast_shapes(size.shape, length.shape))
        term = np.empty_like(found)
        other = np.empty_like(found)
        # Point by point and in place: arrays of a whole run are too large for [..., n].
        for (point_size, point_length), weight in zip(self.points, self.weights, strict=True):
            np.subtract(size, point_size, out=term)
            np.square(term, out=term)
            np.subtract(length, point_length, out=other)
            np.square(other, out=other)
            term += other
            term *= -0.5 / LENGTH_SCALE**2
            np.exp(term, out=term)
            term *= weight
            found += term
        np.clip(found, -LARGEST, LARGEST, out=found)
        return found


def fit_residuals(shapes: Shapes, seconds: ArrayLike, line: Line) -> Residuals:
    """What `line`, without its floor, leaves of measured times.

    Args:
        shapes: sample lengths of each microbatch [n]; the same ones may be there twice.
        seconds: measured, one for each of them [n]. Those further than `LARGEST` from the line contradict it, so that
            it cannot have been fitted to them, and are left out.
        line: fitted to them.
    """
    features = columns(shapes)
    expected = features @ np.array([line.c0_s, line.c1_s_per_token, line.c2_s_per_token2])
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        differences = np.asarray(seconds, dtype=np.float64) / expected - 1.0
    told = np.abs(differences) <= LARGEST
    features, differences = features[told], differences[told]
    points = np.stack(_place(features[:, 1], features[:, 2]), axis=1)
    distances = np.sum((points[:, None] - points[None]) ** 2, axis=2)
    kernel = AMPLITUDE**2 * np.exp(-0.5 * distances / LENGTH_SCALE**2)
    # Short microbatches are far off, as launches and the floor rule them: as the fit does, let them count for less and
    # less below its knee, or what they are off would spread to long ones.
    knee = min(KNEE_TOKENS, float(features[:, 1].max(initial=0.0)) / 4)
    noise = NOISE * np.maximum(1.0, knee / features[:, 1])
    weights = AMPLITUDE**2 * np.linalg.solve(kernel + np.diag(noise**2), differences)
    return Residuals(points=tuple((float(x), float(z)) for x, z in points), weights=tuple(weights.tolist()))


def _place(tokens: ArrayLike, squares: ArrayLike) -> tuple[Array, Array]:
    """[...] and [...]: logs of tokens and of squares / tokens, each at least log(1)."""
    some = np.maximum(np.asarray(tokens, dtype=np.float64), 1.0)
    length = np.maximum(np.asarray(squares, dtype=np.float64) / some, 1.0)
    return np.log(some), np.log(length)
