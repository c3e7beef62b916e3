"""What computing one unit on one microbatch costs: c0 + c1 * tokens + c2 * squares seconds.

A unit is the embedding, one decoder layer, or the head with the loss. `tokens` is the sum of the microbatch's sample
lengths, `squares` the sum of their squares, since packed samples attend only to themselves.

| provenance | from | function |
|---|---|---|
| measured | a calibration file | `costs_measured.calibrated_costs` |
| fitted | the A100 fits in the paper's reference code | `costs_formula.fitted_costs` |
| analytic | FLOPs over peak times efficiency | `costs_formula.analytic_costs` |

`choose_costs` takes the first of them that exists; this module exports all.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from odc_sim.costs_formula import (
    A100_DEVICE,
    A100_FITS,
    A100_PEAK_FLOPS,
    ImpliedEfficiency,
    WholeModelFit,
    analytic_costs,
    fitted_costs,
    has_fit,
    implied_efficiency,
)
from odc_sim.costs_measured import calibrated_costs, measured_models
from odc_sim.costs_types import ComputeCosts, Provenance, UnitCost, extrapolated, provenance_between
from odc_sim.models import ModelSpec

if TYPE_CHECKING:
    from odc_sim.calibration import Calibration
    from odc_sim.hardware import Cluster

__all__ = [
    "A100_DEVICE",
    "A100_FITS",
    "A100_PEAK_FLOPS",
    "ComputeCosts",
    "ImpliedEfficiency",
    "Provenance",
    "UnitCost",
    "WholeModelFit",
    "analytic_costs",
    "calibrated_costs",
    "choose_costs",
    "extrapolated",
    "fitted_costs",
    "has_fit",
    "implied_efficiency",
    "measured_models",
    "provenance_between",
]


def choose_costs(
    model: ModelSpec, cluster: "Cluster", calibration: "Calibration | None" = None, recompute: bool = True
) -> ComputeCosts:
    """The best-founded costs there are: measured if the calibration knows the model, else fitted, else analytic.

    `recompute`: every layer is activation-checkpointed, so that its backward holds one more forward. The fits are of
    that case; without it they are scaled by FLOPs and labelled analytic. Raises `InputError` where the calibration
    knows the model but lacks a direction that is needed.
    """
    if calibration is not None and measured_models(model, calibration):
        return calibrated_costs(model, calibration, recompute)
    if has_fit(model, cluster.device.name):
        return fitted_costs(model, cluster.device.name, recompute)
    found = analytic_costs(model, cluster, recompute)
    if calibration is None:
        return found
    known = ", ".join(sorted({fit.model for fit in calibration.fits})) or "no model"
    return replace(found, source=f"{found.source}, as the calibration knows {known} only (odc calibrate --model)")
