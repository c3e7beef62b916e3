"""Whether the best stays best: perturbed costs, repeats counted by hand, and the flag of `odc simulate`."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from odc_sim import Study
from odc_sim.api import _run, run_study
from odc_sim.costs import choose_costs
from odc_sim.errors import InputError
from odc_sim.hardware import load_cluster
from odc_sim.models import load_model
from odc_sim.perturbation import COPIES, Perturbation
from odc_sim.results import Results, Row, read_results
from odc_sim.stability import can_win, with_stability
from odc_sim.transfers import transfer_costs

BASE = ("collective", "lb-micro")
ODC = ("odc", "lb-mini")
LOCAL = ("odc-local-sum", "lb-mini")


def make_row(schedule, policy, speedup, fits=True):
    names = {"workload": "w", "model": "m", "hardware": "h", "sharding": "zero3", "gather_dtype": "bf16"}
    sizes = {"devices": 8, "minibatch_size": 4, "minibatches": 10, "seed": 0, "max_tokens": 100}
    return Row(schedule=schedule, policy=policy, speedup=speedup, fits=fits, **names, **sizes)


def make_results(speedups, unfit=()):
    rows = tuple(make_row(*key, value, key not in unfit) for key, value in speedups.items())
    shared = {"bounds": {}, "advice": "", "notes": (), "study": {"seed": 0}, "lengths": {}}
    return Results(rows=rows, baseline="collective/lb-micro", **shared)


FIRST = {BASE: 1.0, ODC: 1.30, LOCAL: 1.29, ("odc", "none"): 0.7}


def repeated(*outcomes):
    """with_stability over given repeats: speedups, an error, or (speedups, what does not fit)."""
    asked = []

    def repeat(study, perturbation):
        asked.append((study, perturbation))
        found = outcomes[len(asked) - 1]
        if isinstance(found, Exception):
            raise found
        return make_results(*found) if isinstance(found, tuple) else make_results(found)

    study = Study(stability=len(outcomes), calibration_error=0.1)
    return with_stability(make_results(FIRST), study, repeat, lambda *_: None), asked


class TestByHand:
    def test_wins_are_counted_and_the_advised_row_is_followed(self):
        results, asked = repeated(
            {BASE: 1.0, ODC: 1.30, LOCAL: 1.20},
            {BASE: 1.0, ODC: 1.25, LOCAL: 1.26},
            {BASE: 1.0, ODC: 1.20, LOCAL: 1.26},
            {BASE: 1.0, ODC: 1.30, LOCAL: 1.30},  # a tie goes to what takes less effort
        )
        assert results.row(*ODC).best_share == 0.5
        assert results.row(*LOCAL).best_share == 0.5
        assert results.row(*BASE).best_share == 0.0
        assert results.row("odc", "none").best_share is None
        assert results.stability["advised"] == {
            "schedule": "odc",
            "policy": "lb-mini",
            "fastest": 2,
            "within_1_percent": 3,
            "does_not_fit": 0,
            "most_behind": pytest.approx(0.05),
        }
        assert results.stability["text"] == (
            "odc + lb-mini is fastest in 2 of 4 repeats (other seeds, 10 % calibration error), "
            "within 1 % of the fastest in 3; never more than 5.0 % behind; not repeated: 1 row too far behind to win"
        )
        assert [study.seed for study, _ in asked] == [1, 2, 3, 4]
        for study, _ in asked:
            assert (study.stability, study.policy, study.schedule) == (0, ("lb-mini",), ("odc", "odc-local-sum"))
        assert len({perturbation for _, perturbation in asked}) == 4

    def test_the_usual_winner_is_named_where_it_is_not_the_advised_one(self):
        results, _ = repeated({BASE: 1.0, ODC: 1.2, LOCAL: 1.3}, {BASE: 1.0, ODC: 1.2, LOCAL: 1.3})
        assert "; most often fastest: odc-local-sum + lb-mini (2);" in results.stability["text"]

    def test_what_does_not_fit_cannot_be_fastest(self):
        results, _ = repeated(({BASE: 1.0, ODC: 1.3, LOCAL: 1.2}, {ODC}), {BASE: 1.0, ODC: 1.3, LOCAL: 1.2})
        assert results.row(*LOCAL).best_share == 0.5
        assert results.stability["advised"]["does_not_fit"] == 1
        assert "cannot run or does not fit in 1" in results.stability["text"]

    def test_repeats_that_cannot_run_are_left_out_and_told(self):
        results, _ = repeated(InputError("sample 3 is too long"), {BASE: 1.0, ODC: 1.3, LOCAL: 1.2})
        assert results.row(*ODC).best_share == 1.0
        assert results.stability["repeats"] == 1
        assert "1 repeat could not run (sample 3 is too long)" in results.stability["text"]

    def test_nothing_that_fits_is_nothing_to_repeat(self):
        never = {"repeat": lambda *_: pytest.fail("repeated"), "progress": lambda *_: None}
        found = with_stability(make_results(FIRST, unfit=FIRST), Study(stability=3), **never)
        assert found.stability == {
            "repeats": 0,
            "text": "stability: nothing that fits can be counted on, so nothing was repeated",
        }

    def test_only_rows_that_fit_and_are_close_can_win(self):
        rows = make_results({BASE: 1.0, ODC: 1.17, LOCAL: 9.9, ("odc", "ffd"): 0.99}, unfit={LOCAL}).rows
        assert [row.label for row in can_win(rows)] == ["collective/lb-micro", "odc/lb-mini"]
        lucky = replace(rows[1], verdict="microbatch counts happened to be equal")
        assert [row.label for row in can_win((rows[0], lucky))] == ["collective/lb-micro"]


class TestPerturbation:
    def costs(self):
        model, cluster = load_model("qwen2.5-1.5b"), load_cluster("a100-nvswitch-roce")
        shape = {"world_size": 8, "gather_dtype": "bf16"}
        transfers = {one: transfer_costs(model, cluster, one_sided=one, **shape) for one in (False, True)}
        return choose_costs(model, cluster), transfers

    def test_each_factor_scales_its_part_and_nothing_else(self):
        compute, transfers = self.costs()
        off = Perturbation(linear=2, quadratic=3, fixed=5, all_gather=7, reduce_scatter=11, gather=13,
                           scatter_accumulate=17, copies=19, optimizer=23)  # fmt: skip
        one, other = compute.total(), off.compute(compute).total()
        assert other.c1_s_per_token == pytest.approx(2 * one.c1_s_per_token)
        assert other.c2_s_per_token2 == pytest.approx(3 * one.c2_s_per_token2)
        assert other.c0_s == pytest.approx(5 * one.c0_s)
        for one_sided, gather, reduce in ((False, 7, 11), (True, 13, 17)):
            before = transfers[one_sided]
            after = off.transfers(before, one_sided=one_sided)
            np.testing.assert_allclose(after.gather_s, gather * before.gather_s)
            np.testing.assert_allclose(after.reduce_s, reduce * before.reduce_s)
            np.testing.assert_allclose(after.traffic.gather_inside_s, gather * before.traffic.gather_inside_s)
            np.testing.assert_array_equal(after.traffic.gather_bytes, before.traffic.gather_bytes)
            for name in COPIES:
                np.testing.assert_allclose(getattr(after, name), 19 * getattr(before, name))
            assert after.optimizer_s == pytest.approx(23 * before.optimizer_s)

    @settings(max_examples=20, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1))
    def test_no_error_is_no_change(self, seed):
        assert Perturbation.draw(0.0, np.random.default_rng(seed)) == Perturbation()

    def test_factors_are_lognormal_with_the_asked_spread(self):
        rng = np.random.default_rng(0)
        draws = [Perturbation.draw(0.1, rng) for _ in range(2000)]
        for name in Perturbation.__dataclass_fields__:
            logs = np.log([getattr(draw, name) for draw in draws])
            assert logs.std() == pytest.approx(0.1, rel=0.06)
            assert logs.mean() == pytest.approx(0.0, abs=0.01)

    def test_plans_are_made_with_the_costs_that_are_believed(self):
        study = Study(minibatches=3, policy=("lb-mini",), schedule=("odc",))
        believed, off = _run(study, lambda *_: None), _run(study, lambda *_: None, Perturbation(quadratic=4.0))
        np.testing.assert_array_equal(off.plans["lb-mini"].sample_ids, believed.plans["lb-mini"].sample_ids)
        assert (off.executed["odc", "lb-mini"].makespan_s > 1.2 * believed.executed["odc", "lb-mini"].makespan_s).all()


SMALL = {"minibatches": 4, "policy": ("lb-micro", "lb-mini"), "schedule": ("collective", "odc")}


class TestStudies:
    def test_a_clear_winner_stays_it(self):
        results = run_study(Study(**SMALL, stability=3)).results
        assert results.row("odc", "lb-mini").best_share == 1.0
        assert results.stability["repeats"] == 3
        assert "odc + lb-mini is fastest in 3 of 3 repeats" in results.stability["text"]

    def test_repeats_change_nothing_but_what_they_add(self):
        plain, more = (run_study(Study(**SMALL, stability=n)).results for n in (0, 2))
        assert plain.stability is None
        for one, other in zip(plain.rows, more.rows, strict=True):
            assert one.speedup == other.speedup
            assert one.best_share is None

    def test_equal_work_is_a_toss_up_between_equals(self, tmp_path):
        """Transfers alone decide, and which of them are faster depends on the draw."""
        (tmp_path / "equal.txt").write_text("16384\n" * 64)
        fields = {"minibatches": 2, "policy": ("lb-micro",), "schedule": ("collective", "odc")}
        study = Study(lengths=tmp_path / "equal.txt", **fields, stability=12, calibration_error=0.5)
        results = run_study(study).results
        shares = [row.best_share for row in results.rows]
        assert sum(shares) == pytest.approx(1.0)
        assert 0.0 < min(shares) < max(shares) < 1.0
        assert "% behind" in results.stability["text"]

    def test_the_same_seed_gives_the_same_answer(self):
        one, other = (run_study(Study(**SMALL, stability=2)).results for _ in range(2))
        assert one.stability == other.stability


class TestCommand:
    @pytest.fixture
    def odc(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        base = ["simulate", "--minibatches", "3", "--policy", "lb-micro,lb-mini", "--out", "out"]
        return lambda *arguments: CliRunner().invoke(app, [*base, *map(str, arguments)])

    def test_the_table_and_the_file_say_how_the_ranking_held(self, odc, tmp_path):
        result = odc("--stability", 3, "--calibration-error", 0.1)
        assert result.exit_code == 0, result.output
        assert "best in" in result.stdout
        assert "of 3 repeats (other seeds, 10 % calibration error)" in result.stdout
        found = read_results(tmp_path / "out" / "results.json")
        assert found.stability["repeats"] == 3
        assert found.row("odc", "lb-mini").best_share is not None
        assert json.loads((tmp_path / "out" / "results.json").read_text())["study"]["stability"] == 3

    def test_without_the_flag_there_is_no_such_column(self, odc):
        assert "best in" not in odc().stdout

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["--stability", "-1"], "stability: got -1"), (["--calibration-error", "2"], "calibration_error: got 2.0")],
    )
    def test_mistakes(self, odc, arguments, message):
        result = odc(*arguments)
        assert result.exit_code == 2
        assert message in result.stderr
        assert len(result.stderr.strip().splitlines()) == 1
