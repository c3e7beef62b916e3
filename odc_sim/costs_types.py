"""The cost of one unit, and of a whole model's units, as plain data."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError
from odc_sim.residuals import Residuals

Provenance = Literal["measured", "fitted", "analytic"]
GRID = 256
"""Sizes, and lengths, at which `ComputeCosts.least_of_added` looks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class UnitCost:
    """One unit in one direction: c0_s + c1_s_per_token * tokens + c2_s_per_token2 * squares seconds a microbatch.

    That line is multiplied by 1 + `residuals` where there are any.
    """

    c0_s: float = 0.0
    """Per microbatch, whatever its size."""
    c1_s_per_token: float = 0.0
    c2_s_per_token2: float = 0.0
    floor_s: float = 0.0
    """The host's launch time, below which the unit does not get. Not applied here: the engine knows what hides it."""
    residuals: Residuals | None = None
    """By how much measured times differ from the line, depending on shape; relative, so it goes with any scale."""

    def __call__(self, tokens: npt.ArrayLike, squares: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """Seconds [...] for microbatches of `tokens` [...] and sums of squared sample lengths `squares` [...]."""
        linear = self.c1_s_per_token * np.asarray(tokens, dtype=np.float64)
        quadratic = self.c2_s_per_token2 * np.asarray(squares, dtype=np.float64)
        seconds: npt.NDArray[np.float64] = np.asarray(self.c0_s + linear + quadratic, dtype=np.float64)
        if self.residuals is not None:
            seconds = np.asarray(seconds * (1.0 + self.residuals(tokens, squares)))
        return seconds

    def scaled(self, factor: float) -> "UnitCost":
        """The cost of `factor` times the work; the floor stays, as the host launches the unit once either way."""
        return replace(
            self,
            c0_s=factor * self.c0_s,
            c1_s_per_token=factor * self.c1_s_per_token,
            c2_s_per_token2=factor * self.c2_s_per_token2,
        )

    def without_fixed(self) -> "UnitCost":
        """The slopes of the line alone: c0_s and floor_s are zero, and there are no residuals.

        What this is for needs costs that add up over samples, whatever the microbatch: the bubble rate by its
        definition, balancing by what each sample adds. Residuals belong to a whole microbatch, with its fixed part.
        """
        return replace(self, c0_s=0.0, floor_s=0.0, residuals=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeCosts:
    """The compute costs of one model on one device. A layer's backward includes its recompute where there is one."""

    layers: int
    """How many times the layer's cost is paid in each microbatch and direction."""
    embedding_forward: UnitCost
    embedding_backward: UnitCost
    layer_forward: UnitCost
    layer_backward: UnitCost
    head_forward: UnitCost
    head_backward: UnitCost
    provenance: Provenance
    valid_tokens: tuple[int, int] | None
    """The microbatch sizes the numbers were measured for; None where nothing was measured."""
    source: str
    """Where the numbers come from, in words."""

    def total(self) -> UnitCost:
        """The line of a whole microbatch, forward and backward; floors and residuals do not add up and are left out."""
        parts = self._parts()
        return UnitCost(
            c0_s=sum(n * unit.c0_s for n, unit in parts),
            c1_s_per_token=sum(n * unit.c1_s_per_token for n, unit in parts),
            c2_s_per_token2=sum(n * unit.c2_s_per_token2 for n, unit in parts),
        )

    def least_of_added(self, tokens: tuple[int, int]) -> float:
        """The least that a microbatch costs relative to what its samples add up to (`sample_cost_s`), at most 1.

        Over a grid of all microbatches of so many tokens, of samples as short and as long as that. Below 1 only where
        there are residuals, and they are negative.
        """
        low, high = (max(1, n) for n in tokens)
        sizes = np.geomspace(low, max(low, high), GRID)[:, None]
        lengths = np.minimum(np.geomspace(low, max(low, high), GRID)[None, :], sizes)
        size, squares = np.broadcast_arrays(sizes, sizes * lengths)
        whole_s = sum(n * unit(size, squares) for n, unit in self._parts())
        added_s = self.total().without_fixed()(size, squares)
        return float(np.min(whole_s / added_s, initial=1.0, where=added_s > 0.0))

    def sample_cost_s(self, lengths: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What each sample adds to its microbatch [n], in seconds, for `lengths` [n] in tokens.

        All units, forward and backward, without what a microbatch costs whatever is in it: the `calibrated` balancing
        cost.
        """
        tokens = np.asarray(lengths, dtype=np.float64)
        return self.total().without_fixed()(tokens, np.square(tokens))

    def _parts(self) -> list[tuple[int, UnitCost]]:
        """What a microbatch pays, and how many times."""
        once = (self.embedding_forward, self.embedding_backward, self.head_forward, self.head_backward)
        return [*((1, unit) for unit in once), (self.layers, self.layer_forward), (self.layers, self.layer_backward)]

    def without_fixed(self) -> "ComputeCosts":
        """The slopes of the lines alone, which is what bubble_rate is defined with: see `UnitCost.without_fixed`."""
        return replace(
            self,
            embedding_forward=self.embedding_forward.without_fixed(),
            embedding_backward=self.embedding_backward.without_fixed(),
            layer_forward=self.layer_forward.without_fixed(),
            layer_backward=self.layer_backward.without_fixed(),
            head_forward=self.head_forward.without_fixed(),
            head_backward=self.head_backward.without_fixed(),
        )


def extrapolated(costs: ComputeCosts, longest_microbatch_tokens: int) -> bool:
    """Whether `costs` are asked outside `valid_tokens`. Analytic costs have no such range, so never."""
    if longest_microbatch_tokens < 0:
        raise InputError(f"longest_microbatch_tokens: got {longest_microbatch_tokens}, expected at least 0")
    if costs.valid_tokens is None:
        return False
    low, high = costs.valid_tokens
    return not low <= longest_microbatch_tokens <= high


def provenance_between(costs: ComputeCosts, low: int, high: int) -> str:
    """Where the times of microbatches of `low` to `high` tokens come from: "extrapolated" where one is outside."""
    return "extrapolated" if extrapolated(costs, low) or extrapolated(costs, high) else costs.provenance
