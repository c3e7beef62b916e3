"""Costs from formulas: the published whole-model fits, and FLOPs over peak times efficiency.

One model behind both: the backward of a layer or the head is twice its forward, and one forward more where it is
recomputed. FLOPs of one forward, per layer: 2 * parameters a token, 2 * heads * head_dim * s^2 a sample (causal); of
the head: 2 * hidden * vocab a token. The embedding is a table look-up and costs 0: what little it takes is inside the
fits, and so inside the efficiencies drawn from them.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from odc_sim.costs_types import ComputeCosts, Provenance, UnitCost
from odc_sim.errors import InputError
from odc_sim.models import BUILT_IN, ModelSpec

if TYPE_CHECKING:
    from odc_sim.hardware import Cluster

A100_DEVICE = "A100-SXM4-80GB"
"""Name of the device the fits were made on, as hardware files spell it."""
A100_PEAK_FLOPS = 312e12
"""Dense bf16 (NVIDIA A100 80GB datasheet)."""
FIT_UNIT_TOKENS = 32_000
"""The x of the fits is tokens / 32,000."""
FIT_VALID_TOKENS = (1, 65_536)
"""The range of the fits is not published. Assumed: up to the longest sample of the data sets they were used for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeModelFit:
    """Forward and backward of a whole model with checkpointed layers: a x^2 + b x + c seconds, x = tokens / 32,000."""

    model: str
    a_s: float
    b_s: float
    c_s: float


A100_FITS: tuple[WholeModelFit, ...] = (
    # sail-sg/odc @13cfbd3, packing.py; balancing there uses a and b only. c is what a microbatch costs whatever is in
    # it, and doubtful: in the paper's tables 5 and 6 throughput / (1 - bubble), which leaves c in, is as high for one
    # sample a microbatch as for packed ones.
    WholeModelFit(model="qwen2.5-1.5b", a_s=1.982, b_s=2.612, c_s=0.667),
    WholeModelFit(model="qwen2.5-7b", a_s=4.348, b_s=8.768, c_s=0.951),
)
_REFERENCE_FIT = A100_FITS[1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImpliedEfficiency:
    """Fractions of the A100's dense bf16 peak that a fit implies; recompute counted as work."""

    linear: float
    attention: float
    source: str


def implied_efficiency(fit: WholeModelFit = _REFERENCE_FIT) -> ImpliedEfficiency:
    """The efficiency of the linear and the attention part that `fit` implies on the A100: 0.649 and 0.606 for 7B.

    Layers are 4 forwards (forward, recompute, backward = 2), the head 3, as it is not checkpointed.
    """
    model = _built_in(fit.model)
    linear_flops = FIT_UNIT_TOKENS * (
        _multiple(recompute=True) * model.layers * _layer_flops(model) + _multiple(recompute=False) * _head_flops(model)
    )
    attention_flops = FIT_UNIT_TOKENS**2 * _multiple(recompute=True) * model.layers * _attention_flops(model)
    return ImpliedEfficiency(
        linear=linear_flops / (fit.b_s * A100_PEAK_FLOPS),
        attention=attention_flops / (fit.a_s * A100_PEAK_FLOPS),
        source=f"what the published A100 fit of {fit.model} implies",
    )


def has_fit(model: ModelSpec, device_name: str) -> bool:
    """Whether a published fit is of this shape and device."""
    return device_name == A100_DEVICE and _find_fit(model) is not None


def fitted_costs(model: ModelSpec, device_name: str = A100_DEVICE, recompute: bool = True) -> ComputeCosts:
    """The published A100 fit of `model`, split over its units.

    a: all in the layers; b: over layers and head in proportion to their FLOPs; c: equally over the layers. A layer's
    forward is a quarter of its share and its backward, with recompute, the rest; the head's forward is a third.
    `recompute=False` leaves out the quarter that is recompute and is labelled analytic: no such run was fitted.
    Raises `InputError` where no fit of the shape or the device exists.
    """
    fit = _find_fit(model)
    names = " and ".join(f.model for f in A100_FITS)
    if fit is None:
        raise InputError(f"no published fit has the shape of model {model.name!r}, only {names}; use analytic costs")
    if device_name != A100_DEVICE:
        raise InputError(
            f"the published fits are of device {A100_DEVICE!r}, got {device_name!r}; use measured or analytic costs"
        )
    efficiency = implied_efficiency(fit)
    return _from_flops(
        model,
        linear_flops_per_s=efficiency.linear * A100_PEAK_FLOPS,
        attention_flops_per_s=efficiency.attention * A100_PEAK_FLOPS,
        layer_forward_fixed_s=_layer_fixed_s(fit),
        recompute=recompute,
        provenance="fitted" if recompute else "analytic",
        valid_tokens=FIT_VALID_TOKENS,
        source=f"A100 fit of {fit.model} in the paper's reference code{'' if recompute else ', less the recompute'}",
    )


def analytic_costs(model: ModelSpec, cluster: "Cluster", recompute: bool = True) -> ComputeCosts:
    """FLOPs over the device's peak times the cluster's efficiency.

    On the fits' own device a layer also takes the fixed share of the 7B fit, c / 28. On others it takes none: c belongs
    to one software stack on one kind of machine (four microbatches of a 28-layer model on an H200 took 2.97 s in all,
    less than four times c), and a cluster has its own host floor for launch time.
    """
    efficiency, device = cluster.efficiency, cluster.device
    return _from_flops(
        model,
        linear_flops_per_s=efficiency.linear * device.peak_flops,
        attention_flops_per_s=efficiency.attention * device.peak_flops,
        layer_forward_fixed_s=_layer_fixed_s(_REFERENCE_FIT) if device.name == A100_DEVICE else 0.0,
        recompute=recompute,
        provenance="analytic",
        valid_tokens=None,
        source=f"FLOPs at {efficiency.linear:.3f} (linear), {efficiency.attention:.3f} (attention) of {device.name}",
    )


def _from_flops(
    model: ModelSpec,
    *,
    linear_flops_per_s: float,
    attention_flops_per_s: float,
    layer_forward_fixed_s: float,
    recompute: bool,
    provenance: Provenance,
    valid_tokens: tuple[int, int] | None,
    source: str,
) -> ComputeCosts:
    layer = UnitCost(
        c0_s=layer_forward_fixed_s,
        c1_s_per_token=_layer_flops(model) / linear_flops_per_s,
        c2_s_per_token2=_attention_flops(model) / attention_flops_per_s,
    )
    head = UnitCost(c1_s_per_token=_head_flops(model) / linear_flops_per_s)
    return ComputeCosts(
        layers=model.layers,
        embedding_forward=UnitCost(),
        embedding_backward=UnitCost(),
        layer_forward=layer,
        layer_backward=layer.scaled(_multiple(recompute) - 1),
        head_forward=head,
        head_backward=head.scaled(_multiple(recompute=False) - 1),
        provenance=provenance,
        valid_tokens=valid_tokens,
        source=source,
    )


def _multiple(recompute: bool) -> int:
    """Forward and backward together, in forwards."""
    return 4 if recompute else 3


def _layer_flops(model: ModelSpec) -> float:
    return 2.0 * model.layer_parameters


def _head_flops(model: ModelSpec) -> float:
    return 2.0 * model.hidden * model.vocab


def _attention_flops(model: ModelSpec) -> float:
    # scores and values: 2 products of 2 * query_width * s^2 FLOPs, half of it masked
    return 2.0 * model.query_width


def _layer_fixed_s(fit: WholeModelFit) -> float:
    return fit.c_s / (_built_in(fit.model).layers * _multiple(recompute=True))


def _find_fit(model: ModelSpec) -> WholeModelFit | None:
    return next((fit for fit in A100_FITS if model.same_shape(_built_in(fit.model))), None)


def _built_in(name: str) -> ModelSpec:
    return next(model for model in BUILT_IN if model.name == name)
