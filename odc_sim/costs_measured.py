"""Costs from a calibration file's fits of measured unit times, and from what the fits leave of those times."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from odc_sim.costs_types import ComputeCosts, UnitCost
from odc_sim.errors import InputError
from odc_sim.fits import Line
from odc_sim.models import BUILT_IN, ModelSpec
from odc_sim.residuals import Residuals, fit_residuals

if TYPE_CHECKING:
    from odc_sim.calibration import Calibration, ComputeSample, Fit

FEWEST_SAMPLES = 5
"""Of fewer the line, which has up to three coefficients, leaves nothing to tell from noise."""


def measured_models(model: ModelSpec, calibration: "Calibration") -> list[str]:
    """The names under which the calibration holds `model`: its own, or a built-in of the same shape."""
    shapes = {built_in.name: built_in for built_in in BUILT_IN}

    def is_model(name: str) -> bool:
        # A name that is built in means that shape, also when a user's directory happens to bear it.
        return shapes[name].same_shape(model) if name in shapes else name == model.name

    return [name for name in dict.fromkeys(fit.model for fit in calibration.fits) if is_model(name)]


def calibrated_costs(model: ModelSpec, calibration: "Calibration", recompute: bool = True) -> ComputeCosts:
    """The costs of `model` from `calibration`'s fits of its units, corrected by their samples (see `fitted_unit`).

    A layer's backward is the fit "backward_recompute" with `recompute`, else "backward". The head is not checkpointed
    with the layers: its "backward" counts or, where the loss recomputes its own chunks, "backward_recompute". The
    embedding counts as 0 where it was not measured. `valid_tokens` is what the fits of layers and head have in common.
    Raises `InputError` naming what is missing: the model (with those that are there), a unit or a direction.
    """
    names = measured_models(model, calibration)
    if not names:
        there = ", ".join(sorted({fit.model for fit in calibration.fits})) or "none"
        raise InputError(
            f"the calibration has no fits of model {model.name!r}; it has: {there}; "
            "use one of these, or hardware by name"
        )
    name = names[0]
    fits: dict[tuple[str, str], Fit] = {(fit.unit, fit.direction): fit for fit in calibration.fits if fit.model == name}
    embedding: list[Fit] = []
    if any(unit == "embedding" for unit, _ in fits):
        embedding = [_find(fits, name, "embedding", "forward"), _find(fits, name, "embedding", "backward")]
    head_recomputes = ("head_loss", "backward") not in fits and ("head_loss", "backward_recompute") in fits
    used = [
        _find(fits, name, "layer", "forward"),
        _find(fits, name, "layer", "backward_recompute" if recompute else "backward"),
        _find(fits, name, "head_loss", "forward"),
        _find(fits, name, "head_loss", "backward_recompute" if head_recomputes else "backward"),
    ]
    costs = [fitted_unit(calibration, fit) for fit in used]
    embedding_costs = [fitted_unit(calibration, fit) for fit in embedding] or [UnitCost(), UnitCost()]
    return ComputeCosts(
        layers=model.layers,
        embedding_forward=embedding_costs[0],
        embedding_backward=embedding_costs[1],
        layer_forward=costs[0],
        layer_backward=costs[1],
        head_forward=costs[2],
        head_backward=costs[3],
        provenance="measured",
        # The embedding, a lookup of less than a thousandth of a microbatch's time, does not limit it.
        valid_tokens=_common_range(used, name),
        source=f"calibration of {name}" + ("" if embedding else ", embedding not measured"),
    )


def _find(fits: "dict[tuple[str, str], Fit]", model: str, unit: str, direction: str) -> "Fit":
    if (unit, direction) not in fits:
        there = ", ".join(f"{u} {d}" for u, d in sorted(fits))
        raise InputError(f"the calibration of model {model!r} has no fit of {unit} {direction}; it has: {there}")
    return fits[unit, direction]


def line_of(fit: "Fit") -> Line:
    """The fit as a function."""
    return Line(
        c0_s=fit.c0_s, c1_s_per_token=fit.c1_s_per_token, c2_s_per_token2=fit.c2_s_per_token2, floor_s=fit.floor_s
    )


def samples_of(calibration: "Calibration", fit: "Fit") -> "list[ComputeSample]":
    """What the fit and its check were made from, flagged ones included."""
    key = (fit.model, fit.unit, fit.direction)
    return [s for s in calibration.compute if (s.model, s.unit, s.direction) == key]


def fitted_unit(calibration: "Calibration", fit: "Fit") -> UnitCost:
    """What the simulator takes a unit to cost: the fit, for a layer corrected by what it leaves of its samples.

    Without the samples, as in files of other origin, or with few of them, the fit alone; so for heads and embeddings,
    which have few samples and no attention: a correction made held-out ones worse (docs/calibration.md).
    """
    return UnitCost(
        residuals=_residuals(calibration, fit),
        c0_s=fit.c0_s,
        c1_s_per_token=fit.c1_s_per_token,
        c2_s_per_token2=fit.c2_s_per_token2,
        floor_s=fit.floor_s,
    )


def _residuals(calibration: "Calibration", fit: "Fit") -> Residuals | None:
    # Samples that are held out stay out here too: a report's errors at them are those of what is simulated.
    samples = [s for s in samples_of(calibration, fit) if not (s.flagged or s.heldout)]
    if fit.unit != "layer" or len(samples) < FEWEST_SAMPLES:
        return None
    found = fit_residuals([s.lengths for s in samples], [s.p50_s for s in samples], line_of(fit))
    return found if found.points else None


def _common_range(fits: "Sequence[Fit]", model: str) -> tuple[int, int]:
    low, high = max(fit.valid_tokens[0] for fit in fits), min(fit.valid_tokens[1] for fit in fits)
    if low > high:
        raise InputError(f"the calibration of model {model!r}: the token ranges of its fits have nothing in common")
    return low, high
