"""Costs as they might truly be: the ones a study uses, each part off by a random factor.

A calibration, a fit or a formula is wrong by some percent, and in each of its parts by another. A perturbation is one
draw of how wrong: plans are still made with the costs that are believed, and executed with the perturbed ones, as a
real job would.
"""

from dataclasses import dataclass, replace

import numpy as np

from odc_sim.costs import ComputeCosts, UnitCost
from odc_sim.transfers import TransferCosts

COPIES = ("copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")
UNITS = tuple(f"{unit}_{way}" for unit in ("embedding", "layer", "head") for way in ("forward", "backward"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Perturbation:
    """Factors on the parts of all costs; 1 is as believed. Host time, overlap and memory stay as they are."""

    linear: float = 1.0
    """Compute per token."""
    quadratic: float = 1.0
    """Compute per squared token."""
    fixed: float = 1.0
    """Compute per microbatch."""
    all_gather: float = 1.0
    reduce_scatter: float = 1.0
    gather: float = 1.0
    """One-sided: measured on its own, so wrong on its own."""
    scatter_accumulate: float = 1.0
    copies: float = 1.0
    optimizer: float = 1.0
    """The step and publishing."""

    @classmethod
    def draw(cls, error: float, rng: np.random.Generator) -> "Perturbation":
        """Independent lognormal factors of median 1; `error` is the standard deviation of their logarithms."""
        names = cls.__dataclass_fields__
        factors = np.exp(error * rng.standard_normal(len(names)))
        return cls(**dict(zip(names, factors.tolist(), strict=True)))

    def compute(self, costs: ComputeCosts) -> ComputeCosts:
        """`costs` with its three parts scaled, the same in every unit and direction; residuals, relative, stay."""
        units: dict[str, UnitCost] = {name: self._unit(getattr(costs, name)) for name in UNITS}
        return replace(costs, **units)  # type: ignore[arg-type]

    def _unit(self, unit: UnitCost) -> UnitCost:
        return replace(
            unit,
            c0_s=self.fixed * unit.c0_s,
            c1_s_per_token=self.linear * unit.c1_s_per_token,
            c2_s_per_token2=self.quadratic * unit.c2_s_per_token2,
        )

    def transfers(self, costs: TransferCosts, *, one_sided: bool) -> TransferCosts:
        """`costs` with its transfers, copies and optimizer scaled."""
        gather = self.gather if one_sided else self.all_gather
        reduce = self.scatter_accumulate if one_sided else self.reduce_scatter
        traffic = costs.traffic
        return replace(
            costs,
            gather_s=gather * costs.gather_s,
            reduce_s=reduce * costs.reduce_s,
            optimizer_s=self.optimizer * costs.optimizer_s,
            publish_s=self.optimizer * costs.publish_s,
            traffic=replace(
                traffic,
                gather_inside_s=gather * traffic.gather_inside_s,
                gather_network_s=gather * traffic.gather_network_s,
                reduce_inside_s=reduce * traffic.reduce_inside_s,
                reduce_network_s=reduce * traffic.reduce_network_s,
            ),
            **{name: self.copies * getattr(costs, name) for name in COPIES},
        )
