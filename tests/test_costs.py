from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_sim.calibration import Calibration, Direction, Fit
from odc_sim.calibration import ComputeUnit as Unit
from odc_sim.costs import (
    A100_DEVICE,
    A100_FITS,
    ComputeCosts,
    UnitCost,
    analytic_costs,
    calibrated_costs,
    choose_costs,
    extrapolated,
    fitted_costs,
    has_fit,
    implied_efficiency,
)
from odc_sim.errors import InputError
from odc_sim.hardware import Cluster, Efficiency, load_cluster
from odc_sim.models import load_model

TINY = load_model("tiny")
FIT_NAMES = [fit.model for fit in A100_FITS]
UNITS = ("embedding", "layer", "head")


def a100() -> Cluster:
    """The paper's machine with exactly the efficiency its 7B fit implies."""
    implied = implied_efficiency()
    cluster = load_cluster("a100-nvswitch-roce")
    efficiency = Efficiency(linear=implied.linear, attention=implied.attention, source=implied.source)
    return replace(cluster, efficiency=efficiency)


def other_device() -> Cluster:
    """One teraflop at half efficiency."""
    cluster = load_cluster("generic")
    device = replace(cluster.device, name="other", peak_flops=1e12)
    return replace(cluster, device=device, efficiency=Efficiency(linear=0.5, attention=0.5, source="test"))


def calibration(*fits: Fit) -> Calibration:
    return Calibration(
        schema_version=1, toolkit_version="0", command="test", created="", seed=None, environment={}, fits=fits
    )


def fit(unit: Unit, direction: Direction, c1: float, *, model: str = "tiny", valid: tuple[int, int] = (10, 100)) -> Fit:
    return Fit(
        model=model,
        unit=unit,
        direction=direction,
        c0_s=0.5,
        c1_s_per_token=c1,
        c2_s_per_token2=c1 / 100,
        floor_s=0.25,
        valid_tokens=valid,
        max_rel_error=0.0,
        heldout_max_rel_error=0.0,
    )


LAYER_AND_HEAD = (
    fit("layer", "forward", 1.0, valid=(10, 100)),
    fit("layer", "backward", 2.0),
    fit("layer", "backward_recompute", 3.0, valid=(5, 90)),
    fit("head_loss", "forward", 4.0, valid=(20, 200)),
    fit("head_loss", "backward", 8.0),
)


def test_unit_cost_is_the_polynomial_without_its_floor() -> None:
    unit = UnitCost(c0_s=1.0, c1_s_per_token=2.0, c2_s_per_token2=3.0, floor_s=1e9)
    assert unit(0, 0) == 1.0
    np.testing.assert_array_equal(unit([[1, 2], [3, 4]], [[1, 4], [5, 8]]), [[6.0, 17.0], [22.0, 33.0]])
    assert unit.without_fixed() == UnitCost(c1_s_per_token=2.0, c2_s_per_token2=3.0)
    assert unit.scaled(2) == UnitCost(c0_s=2.0, c1_s_per_token=4.0, c2_s_per_token2=6.0, floor_s=1e9)


def test_unit_cost_does_not_overflow_on_small_integers() -> None:
    tokens = np.array([65_536], dtype=np.int32)
    assert UnitCost(c2_s_per_token2=1.0)(tokens, tokens.astype(np.int64) ** 2) == 65_536.0**2


@pytest.mark.parametrize("name", FIT_NAMES)
def test_fitted_units_add_up_to_the_whole_model_fit(name: str) -> None:
    published = next(f for f in A100_FITS if f.model == name)
    total = fitted_costs(load_model(name)).total()
    for tokens in (1, 16_000, 32_000, 65_536):
        x = tokens / 32_000
        expected = published.a_s * x * x + published.b_s * x + published.c_s
        assert total(tokens, tokens**2) == pytest.approx(expected, rel=1e-12)


def test_fitted_split_of_7b_by_hand() -> None:
    costs = fitted_costs(load_model("qwen2.5-7b"))
    layers, head = 28 * 233_057_792, 152_064 * 3584
    share = 4 * layers / (4 * layers + 3 * head)
    assert costs.layer_forward.c2_s_per_token2 == pytest.approx(4.348 / 32_000**2 / 28 / 4)
    assert costs.layer_backward.c2_s_per_token2 == pytest.approx(4.348 / 32_000**2 / 28 * 3 / 4)
    assert costs.layer_forward.c1_s_per_token == pytest.approx(8.768 / 32_000 * share / 28 / 4)
    assert costs.layer_backward.c1_s_per_token == pytest.approx(8.768 / 32_000 * share / 28 * 3 / 4)
    assert costs.head_forward.c1_s_per_token == pytest.approx(8.768 / 32_000 * (1 - share) / 3)
    assert costs.head_backward.c1_s_per_token == pytest.approx(8.768 / 32_000 * (1 - share) * 2 / 3)
    assert costs.layer_forward.c0_s == pytest.approx(0.951 / 28 / 4)
    assert costs.layer_backward.c0_s == pytest.approx(0.951 / 28 * 3 / 4)
    assert costs.embedding_forward == costs.embedding_backward == UnitCost()
    assert costs.head_forward.c0_s == costs.head_forward.c2_s_per_token2 == 0
    assert costs.provenance == "fitted"


def test_fitted_without_recompute_drops_a_forward_of_the_layers_and_is_analytic() -> None:
    model = load_model("qwen2.5-7b")
    full, plain = fitted_costs(model), fitted_costs(model, recompute=False)
    assert plain.layer_forward == full.layer_forward
    assert plain.layer_backward == full.layer_forward.scaled(2)
    assert (plain.head_forward, plain.head_backward) == (full.head_forward, full.head_backward)
    assert plain.provenance == "analytic"


def test_fits_exist_only_for_their_shapes_and_device() -> None:
    model = load_model("qwen2.5-1.5b")
    assert has_fit(replace(model, name="my copy"), A100_DEVICE)
    assert not has_fit(replace(model, layers=27), A100_DEVICE)
    assert not has_fit(model, "H200")
    with pytest.raises(
        InputError, match=r"no published fit has the shape of model 'tiny', only qwen2.5-1.5b and qwen2"
    ):
        fitted_costs(TINY)
    with pytest.raises(InputError, match="published fits are of device 'A100-SXM4-80GB', got 'H200'"):
        fitted_costs(model, "H200")


def test_implied_efficiencies() -> None:
    # 7B, of 312e12: (4 * layers + 3 * head) * 2 FLOPs * 32,000 tokens in 8.768 s; 8 * 28 * 3584 * 32,000^2 in 4.348 s
    seven = implied_efficiency()
    assert seven.linear == pytest.approx(0.6489, abs=1e-4)
    assert seven.attention == pytest.approx(0.6060, abs=1e-4)
    small = implied_efficiency(A100_FITS[0])
    assert small.linear == pytest.approx(0.4666, abs=1e-4)
    assert small.attention == pytest.approx(0.5697, abs=1e-4)


def test_the_a100_file_carries_about_the_implied_efficiency() -> None:
    implied, given_there = implied_efficiency(), load_cluster("a100-nvswitch-roce").efficiency
    assert given_there.linear == pytest.approx(implied.linear, abs=0.015)
    assert given_there.attention == pytest.approx(implied.attention, abs=0.015)


def test_analytic_7b_on_the_a100_is_the_fit_again() -> None:
    analytic, fitted = analytic_costs(load_model("qwen2.5-7b"), a100()), fitted_costs(load_model("qwen2.5-7b"))
    for unit in UNITS:
        for direction in ("forward", "backward"):
            a, f = (getattr(costs, f"{unit}_{direction}") for costs in (analytic, fitted))
            assert a([1, 50_000], [1, 10**9]) == pytest.approx(f([1, 50_000], [1, 10**9]), rel=1e-12)
    assert analytic.provenance == "analytic"
    assert analytic.valid_tokens is None


def test_analytic_tiny_by_hand() -> None:
    costs = analytic_costs(TINY, other_device())
    flops_per_s = 0.5e12
    layer = UnitCost(c1_s_per_token=2 * 37_120 / flops_per_s, c2_s_per_token2=2 * 64 / flops_per_s)
    head = UnitCost(c1_s_per_token=2 * 64 * 256 / flops_per_s)
    assert costs.layer_forward == layer
    assert costs.layer_backward == layer.scaled(3)
    assert (costs.head_forward, costs.head_backward) == (head, head.scaled(2))
    assert analytic_costs(TINY, other_device(), recompute=False).layer_backward == layer.scaled(2)


def test_fixed_part_of_analytic_costs_scales_with_layers_on_the_a100_only() -> None:
    model = load_model("qwen2.5-14b")
    assert analytic_costs(model, a100()).total().c0_s == pytest.approx(0.951 / 28 * 48)
    assert analytic_costs(model, other_device()).total().c0_s == 0


@given(st.lists(st.integers(min_value=1, max_value=200_000), min_size=1, max_size=8))
def test_sample_costs_add_up_to_their_microbatch_without_fixed_part(lengths: list[int]) -> None:
    costs = fitted_costs(load_model("qwen2.5-1.5b"))
    per_sample = costs.sample_cost_s(lengths)
    tokens, squares = sum(lengths), sum(s * s for s in lengths)
    units = [(1, costs.embedding_forward), (1, costs.embedding_backward), (1, costs.head_forward)]
    units += [(1, costs.head_backward), (28, costs.layer_forward), (28, costs.layer_backward)]
    whole = sum(n * (unit(tokens, squares) - unit.c0_s) for n, unit in units)
    assert per_sample.shape == (len(lengths),)
    assert per_sample.dtype == np.float64
    assert per_sample.sum() == pytest.approx(whole, rel=1e-9)


def test_without_fixed_keeps_only_the_slopes() -> None:
    bare = calibrated_costs(TINY, calibration(*LAYER_AND_HEAD)).without_fixed()
    assert bare.layer_backward == UnitCost(c1_s_per_token=3.0, c2_s_per_token2=0.03)
    assert bare.head_forward == UnitCost(c1_s_per_token=4.0, c2_s_per_token2=0.04)
    assert bare.total().c0_s == 0


def test_calibrated_costs_take_each_unit_and_direction() -> None:
    costs = calibrated_costs(TINY, calibration(*LAYER_AND_HEAD))
    assert costs.layer_forward == UnitCost(c0_s=0.5, c1_s_per_token=1.0, c2_s_per_token2=0.01, floor_s=0.25)
    slopes = [
        costs.layer_backward.c1_s_per_token,
        costs.head_forward.c1_s_per_token,
        costs.head_backward.c1_s_per_token,
    ]
    assert slopes == [3.0, 4.0, 8.0]
    assert costs.embedding_forward == UnitCost()
    assert "embedding not measured" in costs.source
    assert costs.valid_tokens == (20, 90)
    assert costs.layers == 4
    assert costs.provenance == "measured"
    plain = calibrated_costs(TINY, calibration(*LAYER_AND_HEAD), recompute=False)
    assert plain.layer_backward.c1_s_per_token == 2.0
    assert plain.valid_tokens == (20, 100)


def test_calibrated_embedding_and_recomputing_loss_are_used_where_measured() -> None:
    embedding = (fit("embedding", "forward", 0.1, valid=(30, 60)), fit("embedding", "backward", 0.2))
    loss = fit("head_loss", "backward_recompute", 12.0)
    costs = calibrated_costs(TINY, calibration(*LAYER_AND_HEAD[:4], loss, *embedding))
    assert (costs.embedding_forward.c1_s_per_token, costs.embedding_backward.c1_s_per_token) == (0.1, 0.2)
    assert costs.head_backward.c1_s_per_token == 12.0
    assert costs.valid_tokens == (20, 90)  # of layers and head: the embedding's time is next to nothing


def test_calibrated_errors_name_what_is_there() -> None:
    with pytest.raises(
        InputError, match=r"no fits of model 'qwen2.5-7b'; it has: tiny; use one of these, or hardware by name"
    ):
        calibrated_costs(load_model("qwen2.5-7b"), calibration(*LAYER_AND_HEAD))
    with pytest.raises(InputError, match="no fits of model 'tiny'; it has: none"):
        calibrated_costs(TINY, calibration())
    with pytest.raises(
        InputError, match="of model 'tiny' has no fit of layer backward_recompute; it has: head_loss backward, head"
    ):
        calibrated_costs(TINY, calibration(*LAYER_AND_HEAD[:2], *LAYER_AND_HEAD[3:]))
    with pytest.raises(InputError, match="token ranges of its fits have nothing in common"):
        calibrated_costs(TINY, calibration(*LAYER_AND_HEAD[1:], fit("layer", "forward", 1.0, valid=(300, 400))))


def test_a_calibration_knows_a_shape_under_its_builtin_name() -> None:
    known = calibration(*LAYER_AND_HEAD)
    assert calibrated_costs(replace(TINY, name="copy of tiny"), known).provenance == "measured"
    with pytest.raises(InputError, match="no fits of model 'tiny'"):
        calibrated_costs(replace(TINY, ffn=1), known)


def test_choice_is_measured_then_fitted_then_analytic() -> None:
    small, known = load_model("qwen2.5-1.5b"), calibration(*LAYER_AND_HEAD)
    assert choose_costs(TINY, a100(), known).provenance == "measured"
    assert choose_costs(small, a100(), known).provenance == "fitted"
    assert choose_costs(small, a100()).provenance == "fitted"
    assert choose_costs(small, a100(), recompute=False).provenance == "analytic"
    assert choose_costs(small, other_device()).provenance == "analytic"
    assert choose_costs(load_model("qwen2.5-14b"), a100()).provenance == "analytic"


@pytest.mark.parametrize(("tokens", "expected"), [(19, True), (20, False), (90, False), (91, True)])
def test_extrapolated_outside_the_measured_range(tokens: int, expected: bool) -> None:
    assert extrapolated(calibrated_costs(TINY, calibration(*LAYER_AND_HEAD)), tokens) is expected


def test_analytic_is_never_extrapolated_and_fits_are_past_64k() -> None:
    assert not extrapolated(analytic_costs(TINY, other_device()), 10**9)
    assert not extrapolated(fitted_costs(load_model("qwen2.5-7b")), 65_536)
    assert extrapolated(fitted_costs(load_model("qwen2.5-7b")), 65_537)
    with pytest.raises(InputError, match="longest_microbatch_tokens: got -1, expected at least 0"):
        extrapolated(analytic_costs(TINY, other_device()), -1)


def test_costs_are_frozen() -> None:
    costs: ComputeCosts = analytic_costs(TINY, other_device())
    with pytest.raises(AttributeError):
        costs.layers = 3  # type: ignore[misc]


def test_a_model_that_a_calibration_does_not_know_says_so() -> None:
    costs = choose_costs(load_model("qwen2.5-7b"), other_device(), calibration(*LAYER_AND_HEAD))
    assert costs.provenance == "analytic"
    assert costs.source.endswith(", as the calibration knows tiny only (odc calibrate --model)")
