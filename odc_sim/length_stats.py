"""Statistics of sequence lengths, and how much the rollouts of one prompt resemble each other."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LengthStats:
    """Lengths in tokens, summarised.

    Percentiles are numpy's (linear interpolation). histogram_edges: float64 [bins + 1], equal ratios from the
    shortest to the longest; histogram_counts: int64 [bins]. group_correlation: see that function, None without groups.
    """

    num_samples: int
    total_tokens: int
    mean: float
    sd: float
    min: int
    p10: float
    p50: float
    p90: float
    p99: float
    max: int
    histogram_edges: npt.NDArray[np.float64]
    histogram_counts: npt.NDArray[np.int64]
    group_correlation: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able, arrays as lists."""
        names = ("num_samples", "total_tokens", "mean", "sd", "min", "p10", "p50", "p90", "p99", "max")
        return {name: getattr(self, name) for name in names} | {
            "histogram_edges": self.histogram_edges.tolist(),
            "histogram_counts": self.histogram_counts.tolist(),
            "group_correlation": self.group_correlation,
        }


def length_stats(
    lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64] | None = None, *, bins: int = 30
) -> LengthStats:
    """Summarise lengths [n] > 0 in tokens, n >= 1; `groups` [n] is the prompt of each sample."""
    p10, p50, p90, p99 = (float(p) for p in np.percentile(lengths, [10, 50, 90, 99]))
    low, high = int(lengths.min()), int(lengths.max())
    if low == high:  # a ratio of one has no bins
        edges = np.linspace(low - 0.5, high + 0.5, bins + 1)
    else:
        edges = np.geomspace(low, high, bins + 1)
        edges[0], edges[-1] = low, high  # geomspace rounds, and would leave the extremes outside
    counts, _ = np.histogram(lengths, bins=edges)
    return LengthStats(
        num_samples=int(lengths.size),
        total_tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        sd=float(lengths.std()),
        min=low,
        p10=p10,
        p50=p50,
        p90=p90,
        p99=p99,
        max=high,
        histogram_edges=edges,
        histogram_counts=counts.astype(np.int64),
        group_correlation=None if groups is None else group_correlation(lengths, groups),
    )


def group_correlation(lengths: npt.NDArray[np.int64], groups: npt.NDArray[np.int64]) -> float | None:
    """Intraclass correlation of ln(length): the share of its variance that siblings have in common.

    The one-way analysis-of-variance estimator, ICC(1) of Shrout and Fleiss (1979), with Donner's average group size for
    unequal groups: 0 for independent lengths, 1 if siblings are equally long, slightly negative by chance.
    None if there are fewer than two groups, no siblings, or all lengths are the same.
    """
    _, index, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    n, k = lengths.size, sizes.size
    if k < 2 or n == k:
        return None
    logs = np.log(lengths.astype(np.float64))
    means = np.bincount(index, weights=logs) / sizes
    between = float((sizes * (means - logs.mean()) ** 2).sum()) / (k - 1)
    within = float(((logs - means[index]) ** 2).sum()) / (n - k)
    average_size = (n - float((sizes.astype(np.float64) ** 2).sum()) / n) / (k - 1)
    spread = between + (average_size - 1) * within
    return (between - within) / spread if spread > 1e-12 else None
