"""Two results side by side: inputs first, then answers; noise told from differences."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from cli import app
from odc_sim import Study, simulate
from odc_sim.compare import compare
from odc_sim.compare_inputs import Loaded, load_results
from odc_sim.errors import InputError
from odc_sim.length_stats import length_stats
from odc_sim.results import Results

STUDY = Study(minibatches=4, policy=("lb-micro", "lb-mini"), schedule=("collective", "odc"))


@pytest.fixture(scope="module")
def results():
    return simulate(STUDY)


def loaded(results, version="1.0", **environment):
    return Loaded(path="x", results=results, toolkit_version=version, environment={"python": "3.11"} | environment)


def with_row(results, label, **changes):
    rows = tuple(replace(row, **changes) if row.label == label else row for row in results.rows)
    return replace(results, rows=rows)


def lines(found):
    return [difference.line for difference in found.inputs]


class TestInputs:
    def test_nothing_differs(self, results):
        found = compare(loaded(results), loaded(results))
        assert found.inputs == ()
        assert found.same_samples
        assert found.warnings == ()
        assert not any(row.differs for row in found.rows)

    def test_fields_of_the_study_versions_and_sources(self, results):
        study = results.study | {"gather_dtype": "fp32", "policy": ["lb-mini"], "max_tokens": 70000}
        other = replace(results, study=study, notes=("compute: guessed",))
        found = compare(loaded(results), loaded(other, version="1.1", numpy="2.5"))
        assert lines(found) == [
            "policy: lb-micro,lb-mini -> lb-mini",
            "gather_dtype: bf16 -> fp32",
            f"notes: {'; '.join(results.notes)} -> compute: guessed",
            "toolkit_version: 1.0 -> 1.1",
            "numpy: (none) -> 2.5",
        ]  # max_tokens: what both ran with is the same

    def test_what_a_plan_or_default_came_to(self, results):
        rows = tuple(replace(row, max_tokens=70000, devices=16, hardware="other") for row in results.rows)
        found = compare(loaded(results), loaded(replace(results, rows=rows)))
        assert lines(found) == [
            "devices: 8 -> 16",
            "max_tokens: 65,536 -> 70,000",
            "hardware as run: a100-nvswitch-roce -> other",
        ]
        assert not found.same_samples

    def test_a_file_from_before_a_field_existed_means_its_default(self, results):
        older = {name: value for name, value in results.study.items() if name not in ("stability", "jitter")}
        assert compare(loaded(replace(results, study=older)), loaded(results)).inputs == ()

    def test_files_of_the_same_name_are_warned_about(self, results):
        mine = replace(results, study=results.study | {"hardware": "mine/cluster.toml", "workload": "qwen2.5"})
        found = compare(loaded(mine), loaded(mine))
        assert found.warnings == (
            "hardware: both name the file mine/cluster.toml; whether its content was the same is not recorded",
        )

    def test_another_baseline_is_warned_about(self, results):
        other = replace(results, baseline="odc/lb-micro", study=results.study | {"baseline": "odc/lb-micro"})
        found = compare(loaded(results), loaded(other))
        assert lines(found) == ["baseline: collective/lb-micro -> odc/lb-micro"]
        assert found.warnings == ("speedups are relative to collective/lb-micro in A, to odc/lb-micro in B",)


def drawn(seed, n=800, median=8000.0, sigma=0.9, cap=65536):
    lengths = np.random.default_rng(seed).lognormal(np.log(median), sigma, n)
    return length_stats(np.clip(lengths, 1, cap).astype(np.int64))


class TestLengths:
    def differences(self, results, a, b):
        one, other = (replace(results, lengths=results.lengths | stats.as_dict()) for stats in (a, b))
        return [d for d in compare(loaded(one), loaded(other)).inputs if d.field.startswith("lengths")]

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 2**20), n=st.integers(300, 3000), sigma=st.floats(0.2, 1.3))
    def test_two_draws_of_one_distribution_do_not_differ(self, results, seed, n, sigma):
        assert self.differences(results, drawn([seed, 0], n, sigma=sigma), drawn([seed, 1], 2 * n, sigma=sigma)) == []

    @settings(max_examples=20, deadline=None, derandomize=True)
    @given(seed=st.integers(0, 2**20), factor=st.sampled_from([0.6, 1.6]))
    def test_other_distributions_do(self, results, seed, factor):
        found = self.differences(results, drawn([seed, 0]), drawn([seed, 1], median=8000.0 * factor))
        assert {"lengths mean", "lengths p50"} <= {difference.field for difference in found}
        assert all("standard errors apart" in difference.line for difference in found)

    def test_lengths_without_spread_differ_at_once_or_not_at_all(self, results):
        same, other = (length_stats(np.full(100, length)) for length in (500, 501))
        assert self.differences(results, same, same) == []
        line = self.differences(results, same, other)[0].line
        assert line == "lengths mean: 500 -> 501 (far beyond sampling noise)"

    def test_siblings_count_for_less(self, results):
        """The same means, 6 standard errors apart if samples were independent."""
        a = drawn(0)
        groups = {"group_correlation": 0.5}
        apart = 6.0 * np.sqrt(2.0) * a.sd / np.sqrt(a.num_samples)
        for extra, expected in (({}, True), (groups, False)):
            one = results.lengths | a.as_dict() | extra
            other = one | {"mean": a.mean + apart}
            found = compare(*(loaded(replace(results, lengths=stats)) for stats in (one, other))).inputs
            assert bool(found) is expected


class TestAnswers:
    def test_numbers_by_hand(self, results):
        row = results.row("odc", "lb-mini")
        causes = row.idle_causes | {"exposed_unshard": row.idle_causes["exposed_unshard"] + 0.05}
        changed = {
            "speedup": row.speedup * 2,
            "speedup_ci95": tuple(2 * x for x in row.speedup_ci95),
            "samples_per_s_per_device": row.samples_per_s_per_device * 1.5,
            "idle_rate": row.idle_rate + 0.05,
            "idle_causes": causes,
            "fits": False,
            "provenance": row.provenance | {"compute": "measured"},
        }
        found = compare(loaded(results), loaded(with_row(results, "odc/lb-mini", **changed)))
        other = next(r for r in found.rows if (r.schedule, r.policy) == ("odc", "lb-mini"))
        assert (other.speedup_a, other.speedup_b) == (row.speedup, 2 * row.speedup)
        assert other.samples_ratio == pytest.approx(1.5)
        assert (other.cause, other.cause_change) == ("exposed_unshard", pytest.approx(0.05))
        assert other.beyond_intervals
        gigabytes = f"{row.peak_memory_bytes['total'] / 1e9:.1f} GB"
        assert other.changes == (
            f"memory: fits ({gigabytes}) -> does not fit ({gigabytes})",
            "compute: fitted -> measured",
        )
        assert [r.differs for r in found.rows].count(True) == 1
        assert found.warnings == ("the same was asked and other answers came: the two were written by different code",)

    @pytest.mark.parametrize(
        ("a", "b", "beyond"),
        [
            ((1.3, 1.27, 1.33), (1.34, 1.31, 1.37), False),  # 0.04 apart, 0.042 explained
            ((1.3, 1.27, 1.33), (1.35, 1.32, 1.38), True),
            ((1.35, 1.32, 1.38), (1.3, 1.27, 1.33), True),  # whichever is larger
            ((1.3, 1.1, 1.31), (1.35, 1.34, 1.6), True),  # only the sides that face each other count
            ((1.0, 1.0, 1.0), (1.0, 1.0, 1.0), False),
        ],
    )
    def test_beyond_the_intervals(self, results, a, b, beyond):
        made = [with_row(results, "odc/lb-mini", speedup=s, speedup_ci95=(low, high)) for s, low, high in (a, b)]
        found = compare(*map(loaded, made))
        assert next(r for r in found.rows if r.policy == "lb-mini" and r.schedule == "odc").beyond_intervals is beyond

    def test_rows_that_cease_to_run(self, results):
        gone = {"speedup": None, "speedup_ci95": None, "samples_per_s_per_device": None, "idle_rate": None}
        other = with_row(results, "odc/lb-micro", **gone, verdict="cannot be planned: no")
        row = next(r for r in compare(loaded(results), loaded(other)).rows if r.changes)
        assert row.changes == ("verdict: runs -> cannot be planned: no",)
        assert (row.samples_ratio, row.beyond_intervals, row.cause) == (None, None, None)

    def test_who_hangs_whom_is_no_change(self, results):
        other = with_row(results, "collective/lb-mini", verdict="hangs: rank 7 runs 9 microbatches, rank 0 runs 1")
        assert not any(row.differs for row in compare(loaded(results), loaded(other)).rows)

    def test_rows_in_one_only(self, results):
        fewer = replace(results, rows=results.rows[1:])
        found = compare(loaded(results), loaded(fewer))
        assert found.only_a == (results.rows[0].label,)
        assert found.only_b == ()
        assert compare(loaded(fewer), loaded(results)).only_b == (results.rows[0].label,)

    def test_no_rows_at_all(self, results):
        empty = replace(results, rows=())
        assert not compare(loaded(empty), loaded(empty)).same_samples

    def test_other_seeds_are_other_samples_and_agree_within_noise(self, results):
        found = compare(loaded(results), loaded(simulate(STUDY.model_copy(update={"seed": 1}))))
        assert lines(found) == ["seed: 0 -> 1"]
        assert not found.same_samples
        assert found.warnings == (
            "the two ran different samples: throughputs and speedups are of different minibatches",
        )

    def test_another_model_runs_the_same_samples(self, results):
        other = simulate(STUDY.model_copy(update={"model": "qwen2.5-7b"}))
        found = compare(loaded(results), loaded(other))
        assert lines(found)[0] == "model: qwen2.5-1.5b -> qwen2.5-7b"
        assert found.same_samples
        assert found.rows[0].samples_ratio < 0.5


class TestCommand:
    @pytest.fixture
    def odc(self, tmp_path, monkeypatch, results):
        monkeypatch.chdir(tmp_path)
        results.write_json(tmp_path / "a" / "results.json", "odc simulate")
        simulate(STUDY.model_copy(update={"hardware": "h200-nvlink"})).write_json(tmp_path / "b.json", "odc simulate")
        (tmp_path / "empty").mkdir()
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "steps.csv").write_text("")
        (tmp_path / "plan.json").write_text("{}")
        return lambda *arguments: CliRunner().invoke(app, ["compare", *arguments])

    def test_inputs_come_before_answers(self, odc):
        result = odc("a", "b.json")
        assert result.exit_code == 0, result.output
        text = result.stdout
        assert text.index("hardware: a100-nvswitch-roce -> h200-nvlink") < text.index("answers")
        assert "both ran the same samples" in text
        assert "compute: fitted -> " in text
        assert "advice of A: No ODC needed: stock FSDP2 with --max-tokens 131072" in text
        assert "advice of B: No ODC needed: " in text

    def test_the_same_twice(self, odc):
        text = odc("a", "a/results.json").stdout
        assert "inputs: nothing differs" in text
        assert "answers: the same in all 4 rows that both have" in text
        assert "advice of both: No ODC needed: " in text

    def test_json(self, odc):
        data = json.loads(odc("a", "b.json", "--json").stdout)
        assert data["inputs"][0] == {"field": "hardware", "a": "a100-nvswitch-roce", "b": "h200-nvlink", "remark": ""}
        assert data["same_samples"] is True
        assert len(data["rows"]) == 4

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ("none", "error: none: no such file"),
            ("empty", "error: empty: holds no results.json, expected one or a folder with one"),
            ("run", "error: run: holds no results.json, expected one or a folder with one; it is a run of"),
            ("plan.json", "error: plan.json: field 'schema_version': got nothing"),
        ],
    )
    def test_mistakes(self, odc, other, message):
        result = odc("a", other)
        assert result.exit_code == 2
        assert result.stderr.strip().startswith(message)
        assert len(result.stderr.strip().splitlines()) == 1


def test_a_results_file_and_its_folder_are_the_same(tmp_path, results):
    results.write_json(tmp_path / "results.json", "odc")
    one, other = load_results(tmp_path), load_results(tmp_path / "results.json")
    assert one.results == other.results
    assert isinstance(one.results, Results)
    with pytest.raises(InputError, match="no such file"):
        load_results(tmp_path / "x.json")
