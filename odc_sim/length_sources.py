"""Where lengths come from: a mixture of lognormals, or a list of recorded lengths. Both only know how to draw.

A source draws independent lengths from its marginal distribution; how the rollouts of one prompt resemble each other
is added on top in `odc_sim.workload`.
"""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError
from odc_sim.overlong import LARGEST_LENGTH_TOKENS, scale_lengths

Lengths = npt.NDArray[np.int64]

# Limits that keep a smaller share of the candidates are refused. While drawing, half of it: a workload that passed the
# check when it was built must never fail by chance.
_LEAST_ACCEPTED = 1e-3
_LARGEST_BATCH = 1 << 21


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """One lognormal: `weight` of the mixture, median in tokens, sigma of the natural logarithm."""

    weight: float
    median_tokens: float
    sigma: float

    def probability(self, low: float, high: float) -> float:
        """Probability of a length between `low` and `high` tokens."""
        below = [
            0.5 * math.erfc(-math.log(edge / self.median_tokens) / (self.sigma * math.sqrt(2))) for edge in (low, high)
        ]
        return below[1] - below[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The range of lengths in tokens, both ends included; values outside are drawn again ("reject") or cut ("clip")."""

    min_tokens: int
    max_tokens: int
    how: Literal["reject", "clip"]

    def __post_init__(self) -> None:
        """Raise InputError unless 1 <= min_tokens <= max_tokens <= 2^31."""
        if not 1 <= self.min_tokens <= self.max_tokens <= LARGEST_LENGTH_TOKENS:
            raise InputError(
                f"lengths.limits: min_tokens {self.min_tokens} and max_tokens {self.max_tokens}: "
                f"expected 1 <= min_tokens <= max_tokens <= 2^31"
            )

    def as_dict(self) -> dict[str, Any]:
        """The table of the workload file."""
        return {"min_tokens": self.min_tokens, "max_tokens": self.max_tokens, "how": self.how}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixture:
    """Lognormals inside limits. A lognormal has no longest sample, so the limits are part of it."""

    components: tuple[Component, ...]
    limits: Limits

    def __post_init__(self) -> None:
        """Raise InputError if the weights do not sum to 1 or the limits reject nearly everything."""
        total = math.fsum(c.weight for c in self.components)
        if abs(total - 1) > 1e-3:
            raise InputError(f"lengths.component: the weights sum to {total:.6g}, expected 1")
        if self.limits.how == "reject":
            for index, component in enumerate(self.components):
                accepted = component.probability(self.limits.min_tokens - 0.5, self.limits.max_tokens + 0.5)
                if accepted < _LEAST_ACCEPTED:
                    raise InputError(
                        f"lengths.limits reject {1 - accepted:.2%} of lengths.component[{index}]: widen min_tokens "
                        f'{self.limits.min_tokens} .. max_tokens {self.limits.max_tokens} or use how = "clip"'
                    )

    @property
    def max_tokens(self) -> int:
        """The longest length it can produce."""
        return self.limits.max_tokens

    @property
    def log_sigma(self) -> float:
        """Standard deviation of ln(length) before the limits: spread within the components plus between them."""
        weights = np.array([c.weight for c in self.components])
        logs = np.log([c.median_tokens for c in self.components])
        sigmas = np.array([c.sigma for c in self.components])
        mean = np.average(logs, weights=weights)
        return float(np.sqrt(np.average(sigmas**2 + (logs - mean) ** 2, weights=weights)))

    def draw(self, n: int, rng: np.random.Generator, *, scale: float, drop_above: int | None) -> Lengths:
        """int64 [n] independent lengths, times `scale`.

        A length outside the limits is drawn again from the same component, so that the weights stay what they are.
        One above `drop_above` (after scaling) is replaced by a new sample of the whole mixture, as if the long samples
        had been taken out of the data set.
        """

        def candidates(count: int) -> Lengths:
            tokens = scale_lengths(self._draw_once(count, rng), scale)
            return tokens if drop_above is None else tokens[tokens <= drop_above]

        return _fill(n, candidates, f"at most {drop_above} tokens")

    def _draw_once(self, n: int, rng: np.random.Generator) -> Lengths:
        cumulative = np.cumsum([c.weight for c in self.components])
        which = np.searchsorted(cumulative[:-1], rng.random(n) * cumulative[-1], side="right")
        low, high, how = self.limits.min_tokens, self.limits.max_tokens, self.limits.how
        lengths = np.empty(n, dtype=np.int64)
        for k, component in enumerate(self.components):

            def candidates(count: int, component: Component = component) -> Lengths:
                exponent = math.log(component.median_tokens) + component.sigma * rng.standard_normal(count)
                tokens = np.rint(np.exp(np.minimum(exponent, 40.0))).astype(np.int64)  # e^40 is past any limit
                return np.clip(tokens, low, high) if how == "clip" else tokens[(tokens >= low) & (tokens <= high)]

            mine = which == k
            lengths[mine] = _fill(int(mine.sum()), candidates, f"from {low} to {high} tokens")
        return lengths

    def as_dict(self) -> dict[str, Any]:
        """The `[lengths]` table of the workload file."""
        components = [{"weight": c.weight, "median_tokens": c.median_tokens, "sigma": c.sigma} for c in self.components]
        return {"distribution": "mixture", "component": components, "limits": self.limits.as_dict()}


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Recorded:
    """A list of lengths, int64 [m], after limits.

    order: "resample" draws with replacement (a trace stands for the population it was taken from); "permute" uses every
    sample once before any comes back, in a new random order each time round, as an epoch of training does;
    "in_order" keeps the file's order and starts over at its end.
    """

    lengths: Lengths
    order: Literal["resample", "permute", "in_order"]
    file: str | None = None
    limits: Limits | None = None

    @property
    def max_tokens(self) -> int:
        """The longest of them."""
        return int(self.lengths.max())

    @property
    def log_sigma(self) -> float:
        """Standard deviation of ln(length)."""
        return float(np.log(self.lengths).std())

    def draw(self, n: int, rng: np.random.Generator, *, scale: float, drop_above: int | None) -> Lengths:
        """int64 [n] lengths, times `scale`; those above `drop_above` (after scaling) are not in the list drawn from."""
        pool = scale_lengths(self.lengths, scale)
        if drop_above is not None:
            kept = pool[pool <= drop_above]
            if kept.size == 0:
                raise _nothing_left(f"at most {drop_above} tokens (the shortest has {pool.min()})")
            pool = kept
        if self.order == "resample":
            return pool[rng.integers(pool.size, size=n)]
        if self.order == "in_order":
            return np.resize(pool, n)
        epochs = [pool[rng.permutation(pool.size)] for _ in range(math.ceil(n / pool.size))]
        return np.concatenate(epochs)[:n] if epochs else pool[:0]

    def as_dict(self) -> dict[str, Any]:
        """What identifies the list: its file, size, order and a SHA-256 of the lengths as little-endian int64."""
        digest = hashlib.sha256(self.lengths.astype("<i8").tobytes()).hexdigest()
        return {
            "distribution": "trace" if self.order == "resample" else "file",
            "trace": self.file,
            "order": self.order,
            "num_samples": self.lengths.size,
            "sha256": digest,
            "limits": self.limits.as_dict() if self.limits else None,
        }


def within_limits(lengths: Lengths, limits: Limits) -> Lengths:
    """`lengths` [m] with those outside the limits left out or cut; InputError if none is left."""
    if limits.how == "clip":
        return np.clip(lengths, limits.min_tokens, limits.max_tokens)
    kept = lengths[(lengths >= limits.min_tokens) & (lengths <= limits.max_tokens)]
    if kept.size == 0:
        raise _nothing_left(f"from {limits.min_tokens} to {limits.max_tokens} tokens")
    return kept


def _nothing_left(wanted: str) -> InputError:
    return InputError(f"no sample has {wanted}: widen the limits, raise --max-tokens or choose --overlong clip|scale")


def _fill(n: int, candidates: Callable[[int], Lengths], wanted: str) -> Lengths:
    """Batches of accepted candidates until there are `n`: the vectorised form of "draw again until it fits"."""
    parts: list[Lengths] = []
    have = tried = 0
    rate = 1.0
    while have < n:
        size = min(int((n - have) / rate * 1.05) + 64, _LARGEST_BATCH)
        parts.append(candidates(size))
        tried += size
        have += parts[-1].size
        rate = max(have / tried, _LEAST_ACCEPTED)
        if tried > 1 << 16 and have < tried * _LEAST_ACCEPTED / 2:
            raise InputError(
                f"almost none of the samples ({have} of {tried}) has {wanted}: "
                f"raise --max-tokens or choose --overlong clip|scale"
            )
    return np.concatenate(parts)[:n] if parts else np.empty(0, dtype=np.int64)
