import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odc_sim import Study, simulate
from odc_sim.calibration import Calibration, ComputeSample, Fit, load_calibration
from odc_sim.calibration_tables import heldout_errors
from odc_sim.costs import ComputeCosts, UnitCost, calibrated_costs
from odc_sim.costs_measured import FEWEST_SAMPLES, fitted_unit, samples_of
from odc_sim.emulation import executed_costs
from odc_sim.fits import Line, columns, fit_line
from odc_sim.machine import load_machine
from odc_sim.models import load_model
from odc_sim.perturbation import Perturbation
from odc_sim.residuals import AMPLITUDE, LARGEST, LENGTH_SCALE, NOISE, Residuals, fit_residuals

CALIBRATIONS = Path(__file__).parent.parent / "traces" / "calibration"
LINE = Line(c0_s=0.0, c1_s_per_token=1e-6, c2_s_per_token2=0.0)
SEVERAL = st.lists(
    st.tuples(st.lists(st.integers(1, 70_000), min_size=1, max_size=5), st.floats(1e-9, 1e3)), min_size=1, max_size=12
)
TOKENS = st.integers(0, 10**9)


def one(lengths=(8000,), off=0.02):
    """Measured once, `off` from LINE."""
    return fit_residuals([lengths], [(1 + off) * LINE([lengths])[0]], LINE)


def at(residuals, lengths):
    return float(residuals(sum(lengths), sum(s * s for s in lengths)))


class TestByHand:
    def test_at_its_point_it_goes_nearly_all_the_way(self):
        assert at(one(), (8000,)) == pytest.approx(0.9 * 0.02)

    def test_it_fades_with_the_distance_in_logarithms(self):
        step = math.exp(LENGTH_SCALE)
        longer = float(one()(8000 * step, (8000 * step) ** 2))  # a length scale in tokens and one in sample length
        assert longer == pytest.approx(0.9 * 0.02 * math.exp(-1))
        more = float(one()(8000 * step, 8000**2 * step))  # more samples of the same length
        assert more == pytest.approx(0.9 * 0.02 * math.exp(-1 / 2))

    def test_packed_short_samples_are_another_place_than_one_long_sample(self):
        apart = fit_residuals([(8000,), (100,) * 80], [0.008 * 1.02, 0.008 * 0.98], LINE)
        assert at(apart, (8000,)) == pytest.approx(0.9 * 0.02, rel=0.01)
        assert at(apart, (100,) * 80) == pytest.approx(-0.9 * 0.02, rel=0.01)

    def test_of_repeats_of_one_shape_the_mean_counts_more_than_each(self):
        twice = fit_residuals([(8000,)] * 2, [0.008 * 1.01, 0.008 * 1.03], LINE)
        assert at(twice, (8000,)) == pytest.approx(0.02 * 2 * AMPLITUDE**2 / (2 * AMPLITUDE**2 + NOISE**2))

    def test_a_short_one_counts_less_beside_long_ones(self):
        both = fit_residuals([(1024,), (1,) * 10**6], [1.02 * 1024e-6, 1.0], LINE)  # knee 4096, so 4 times the noise
        assert at(both, (1024,)) == pytest.approx(0.02 * AMPLITUDE**2 / (AMPLITUDE**2 + (4 * NOISE) ** 2), rel=1e-3)

    def test_the_floor_is_no_part_of_the_line(self):
        floored = fit_residuals([(8000,)], [0.008], replace(LINE, floor_s=1.0))
        assert at(floored, (8000,)) == 0.0

    def test_arrays_broadcast(self):
        found = one()(np.array([[8000], [0]]), np.array([8000**2, 4000, 0]))
        assert found.shape == (2, 3)
        assert found[0, 0] == at(one(), (8000,))
        assert one()(1, 1).shape == ()


@given(SEVERAL, TOKENS, st.integers(0, 10**6))
def test_no_cost_is_ever_negative_or_undefined(measured, tokens, length):
    shapes, seconds = zip(*measured, strict=True)
    residuals = fit_residuals(shapes, seconds, LINE)
    unit = UnitCost(c1_s_per_token=1e-6, residuals=residuals)
    assert abs(residuals(tokens, tokens * length)) <= LARGEST
    line = 1e-6 * tokens
    assert (1 - LARGEST) * line * (1 - 1e-9) <= unit(tokens, tokens * length) <= (1 + LARGEST) * line * (1 + 1e-9)


@given(st.lists(st.integers(1000, 60_000), min_size=1, max_size=8), st.floats(-0.05, 0.05))
def test_far_from_all_that_was_measured_the_line_is_back(lengths, off):
    shapes = [(length,) for length in lengths]
    residuals = fit_residuals(shapes, [(1 + off) * LINE([shape])[0] for shape in shapes], LINE)
    assert residuals([0, 10, 10**8], [0, 100, 10**16]) == pytest.approx([0.0] * 3, abs=1e-3)


@given(st.integers(8000, 10**7), st.integers(8000, 10**7), st.floats(0.001, 0.1))
def test_from_one_point_on_it_only_fades(a, b, off):
    near, far = (at(one(off=off), (length,)) for length in sorted((a, b)))
    assert 0.0 <= far <= near <= off


@given(st.lists(st.integers(5000, 60_000), min_size=5, max_size=20), st.sampled_from([-0.05, -0.01, 0.02, 0.05]))
def test_where_all_is_off_alike_nothing_is_corrected_by_more(lengths, off):
    shapes = [(length,) for length in [*lengths, 20_000]]
    residuals = fit_residuals(shapes, [(1 + off) * LINE([shape])[0] for shape in shapes], LINE)
    for shape in shapes:
        assert 0.85 * abs(off) <= at(residuals, shape) * math.copysign(1, off) <= 1.05 * abs(off) + 1e-12


def fit(**changes):
    values = {
        "model": "tiny", "unit": "layer", "direction": "forward", "c0_s": 1e-3, "c1_s_per_token": 1e-6,
        "c2_s_per_token2": 0.0, "floor_s": 1e-4, "valid_tokens": (1000, 8000), "max_rel_error": 0.1,
    }  # fmt: skip
    return Fit(**(values | changes))


def sample(tokens, off, **changes):
    seconds = (1 + off) * (1e-3 + 1e-6 * tokens)
    values = {
        "model": "tiny", "unit": "layer", "direction": "forward", "lengths": (tokens,), "tokens": tokens,
        "p20_s": seconds, "p50_s": seconds, "p80_s": seconds, "samples": 6,
    }  # fmt: skip
    return ComputeSample(**(values | changes))


def calibration(*compute, known=None):
    return Calibration(
        schema_version=1, toolkit_version="0", command="test", created="", seed=None, environment={},
        fits=(known or fit(),), compute=compute,
    )  # fmt: skip


FIVE = tuple(sample(tokens, 0.02) for tokens in (4000, 5000, 6000, 7000, 8000))


class TestOfACalibration:
    def test_the_line_alone_without_samples_or_with_few(self):
        line = UnitCost(c0_s=1e-3, c1_s_per_token=1e-6, floor_s=1e-4)
        assert fitted_unit(calibration(), fit()) == line
        assert len(FIVE) == FEWEST_SAMPLES
        assert fitted_unit(calibration(*FIVE[1:]), fit()) == line
        assert fitted_unit(calibration(*(replace(s, direction="backward") for s in FIVE)), fit()) == line

    def test_neither_flagged_nor_held_out_ones_count(self):
        corrected = fitted_unit(calibration(*FIVE), fit())
        assert corrected.residuals is not None
        assert corrected(6000, 6000**2) == pytest.approx(7e-3 * 1.02, rel=0.001)
        others = sample(9000, 0.5, flagged=True), sample(9000, -0.5, heldout=True)
        assert fitted_unit(calibration(*FIVE, *others), fit()) == corrected
        assert hash(corrected) == hash(fitted_unit(calibration(*FIVE), fit()))

    def test_a_line_of_zero_seconds_is_left_as_it_is(self):
        nothing = fit(c0_s=0.0, c1_s_per_token=0.0)
        assert fitted_unit(calibration(*FIVE, known=nothing), nothing).residuals is None

    def test_report_errors_are_those_of_what_is_simulated(self):
        known = calibration(*FIVE, sample(6500, 0.02, heldout=True))
        ((_, error),) = heldout_errors(known, fit(), long=True).items()
        ((_, alone),) = heldout_errors(known, fit(), long=True, line_alone=True).items()
        assert alone == pytest.approx(1 / 1.02 - 1)
        assert abs(error) < 0.001


def whole_model(residuals):
    unit = UnitCost(c0_s=1.0, c1_s_per_token=2.0, c2_s_per_token2=3.0, residuals=residuals)
    names = [f"{unit}_{way}" for unit in ("embedding", "layer", "head") for way in ("forward", "backward")]
    return ComputeCosts(layers=2, provenance="measured", valid_tokens=None, source="test", **dict.fromkeys(names, unit))


class TestWhereCostsGo:
    residuals = Residuals(points=((math.log(10), math.log(10)),), weights=(0.5,))

    def test_a_unit_is_its_line_times_the_correction(self):
        unit = whole_model(self.residuals).layer_forward
        line = replace(unit, residuals=None)
        assert unit(10, 100) == pytest.approx(1.5 * line(10, 100))
        assert unit.scaled(3)(10, 100) == pytest.approx(3 * unit(10, 100))
        np.testing.assert_allclose(unit([[10, 0]], [[100, 0]]), line([[10, 0]], [[100, 0]]) * [[1.5, 1.0]], rtol=0.02)

    def test_what_adds_up_over_samples_is_the_line_alone(self):
        costs, line = whole_model(self.residuals), whole_model(None)
        assert costs.without_fixed() == line.without_fixed()
        assert costs.total() == line.total()
        assert costs.sample_cost_s([10]) == line.sample_cost_s([10])

    def test_emulated_units_wait_the_lines_seconds(self):
        assert executed_costs(whole_model(self.residuals), 0.5) == executed_costs(whole_model(None), 0.5)

    def test_costs_that_are_off_keep_their_corrections(self):
        off = Perturbation(linear=2.0, quadratic=2.0, fixed=2.0).compute(whole_model(self.residuals))
        assert off.layer_forward(10, 100) == pytest.approx(2 * whole_model(self.residuals).layer_forward(10, 100))


MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")


def test_simulated_layers_of_h200s_are_nearer_to_what_was_held_out_than_the_line_is():
    known = load_machine("h200-nvlink").calibration
    alone, simulated = [], []
    for model in MODELS:
        costs = {recompute: calibrated_costs(load_model(model), known, recompute) for recompute in (True, False)}
        units = {
            "forward": costs[True].layer_forward,
            "backward_recompute": costs[True].layer_backward,
            "backward": costs[False].layer_backward,
        }
        for direction, unit in units.items():
            (found,) = [f for f in known.fits if (f.model, f.unit, f.direction) == (model, "layer", direction)]
            held = [s for s in samples_of(known, found) if s.heldout and s.tokens >= 4096]
            _, tokens, squares = columns([s.lengths for s in held]).T
            measured = np.array([s.p50_s for s in held])
            simulated.extend(abs(unit(tokens, squares) / measured - 1))
            alone.extend(abs(replace(unit, residuals=None)(tokens, squares) / measured - 1))
    assert len(simulated) == 48
    assert np.median(simulated) < 0.9 * np.median(alone)
    assert max(simulated) < 0.8 * max(alone)
    assert np.median(simulated) <= 0.02
    assert max(simulated) <= 0.05


def leave_one_out(known, found):
    """Errors [microbatches of 4,096 tokens and more] of line and corrected line, made without that microbatch."""
    samples = [s for s in samples_of(known, found) if not s.flagged]
    errors = []
    for left_out in samples:
        if left_out.tokens < 4096:
            continue
        rest = [s for s in samples if s is not left_out]
        shapes, seconds = [s.lengths for s in rest], [s.p50_s for s in rest]
        line = fit_line(shapes, seconds, quadratic=found.unit == "layer")
        expected = float(line([left_out.lengths])[0])
        corrected = expected * (1 + at(fit_residuals(shapes, seconds, line), left_out.lengths))
        errors.append((expected / left_out.p50_s - 1, corrected / left_out.p50_s - 1))
    return np.array(errors)


@pytest.mark.parametrize(
    ("name", "line_median", "line_rms", "median", "rms"),
    [
        ("h200-nvlink-2gpu", 1.44, 2.19, 0.71, 1.56),
        ("h200-1gpu", 1.52, 2.54, 1.02, 2.05),
    ],
)
def test_leaving_one_out_as_documented(name, line_median, line_rms, median, rms):
    """The numbers of docs/calibration.md, in percent: of all layers, line and correction made anew for each."""
    known = load_calibration(CALIBRATIONS / f"{name}.json")
    errors = 100 * np.concatenate([leave_one_out(known, each) for each in known.fits if each.unit == "layer"])
    found = [*np.median(abs(errors), axis=0), *np.sqrt((errors**2).mean(axis=0))]
    print(f"{name}: {len(errors)} layers left out; median and rms, %: line, corrected", np.round(found, 2))
    assert found == pytest.approx([line_median, median, line_rms, rms], abs=0.006)


def test_the_bound_holds_where_residuals_make_microbatches_cheaper_than_their_samples_add_up_to():
    """By hand: 1 s a token and no fixed cost, and 1 % less at 100 tokens in samples of 10."""
    unit = UnitCost(c1_s_per_token=1.0)
    nothing = dict.fromkeys(
        ("embedding_forward", "embedding_backward", "head_forward", "head_backward", "layer_backward"), UnitCost()
    )
    costs = ComputeCosts(
        layers=1, layer_forward=unit, provenance="measured", valid_tokens=None, source="test", **nothing
    )
    assert costs.least_of_added((10, 100)) == 1.0
    cheaper = replace(unit, residuals=Residuals(points=((np.log(100), np.log(10)),), weights=(-0.01,)))
    assert replace(costs, layer_forward=cheaper).least_of_added((10, 100)) == pytest.approx(0.99)
    # a fixed cost in every microbatch makes up for it
    dearer = replace(cheaper, c0_s=200.0)
    assert replace(costs, layer_forward=dearer).least_of_added((10, 100)) == 1.0
    # and where the line stands alone no microbatch is of that shape
    assert replace(costs, layer_forward=cheaper).least_of_added((5000, 5000)) == pytest.approx(1.0, abs=1e-4)


def test_nothing_beats_the_bound_on_nearly_balanced_work():
    study = Study(workload="agentic-coding", hardware="h200-nvlink", devices=8, minibatches=20, policy=("lb-mini",))
    results = simulate(study)
    assert results.row("odc", "lb-mini").speedup <= results.bounds["speedup"]
    assert results.bounds["speedup"] < 1.1


def test_heads_and_embeddings_have_their_lines():
    costs = calibrated_costs(load_model("qwen2.5-1.5b"), load_machine("h200-nvlink").calibration)
    layers = (costs.layer_forward, costs.layer_backward)
    others = (costs.embedding_forward, costs.embedding_backward, costs.head_forward, costs.head_backward)
    assert all(unit.residuals is not None for unit in layers)
    assert all(unit.residuals is None for unit in others)


def test_samples_that_contradict_their_line_are_left_out():
    """Half and twice as long, and a line of next to nothing, which no time is a multiple of."""
    shapes = [[1000], [2000], [4000], [8000], [16000], [32000]]
    seconds = LINE(shapes)
    for wrong in (0.1, 2.0, 1e300):
        found = fit_residuals([*shapes, [9000]], [*seconds, wrong * LINE([[9000]])[0]], LINE)
        assert len(found.points) == len(shapes)
        assert at(found, [9000]) == pytest.approx(0.0, abs=1e-12)
    nothing = fit_residuals(shapes, seconds, Line(c0_s=1e-310, c1_s_per_token=0.0, c2_s_per_token2=0.0))
    assert nothing.points == ()
    assert at(nothing, [9000]) == 0.0


def test_the_bound_looks_at_all_sizes_and_closely():
    """Cheapest at 3,000 tokens in samples of 300, which is neither the shortest nor the longest; 16 times finer than
    what a grid of 64 misses."""
    unit = UnitCost(c1_s_per_token=1.0, residuals=Residuals(points=((np.log(3000), np.log(300)),), weights=(-0.01,)))
    nothing = dict.fromkeys(
        ("embedding_forward", "embedding_backward", "head_forward", "head_backward", "layer_backward"), UnitCost()
    )
    costs = ComputeCosts(
        layers=1, layer_forward=unit, provenance="measured", valid_tokens=None, source="test", **nothing
    )
    assert costs.least_of_added((10, 100_000)) == pytest.approx(0.99, abs=1e-5)
    assert costs.least_of_added((100_000, 100_000)) > 0.999
