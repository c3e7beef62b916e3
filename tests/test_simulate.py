"""Whole studies: controls with known answers, definitions that must add up, what is reported and refused."""

import re
from pathlib import Path

import numpy as np
import pytest

from odc_sim import Study, plan, simulate
from odc_sim.api import run_study
from odc_sim.durations import CAUSES
from odc_sim.errors import InputError
from odc_sim.plans import Plan, write_plan
from odc_sim.policies import POLICIES
from odc_sim.results import read_results
from odc_sim.schedules import SCHEDULES
from odc_sim.study import load_study, make_study

PAIR = ("lb-micro", "lb-mini")

CLUSTER = """
[cluster]
name = "made-up"
devices_per_node = 8
[device]
name = "made-up"
peak_flops = 1e15
hbm_bytes_per_s = 4e12
memory_bytes = 80e9
[intra]
bytes_per_s = {bytes_per_s}
latency_s = 1e-5
"""


@pytest.fixture
def equal_lengths(tmp_path):
    path = tmp_path / "equal.txt"
    path.write_text("16384\n" * 64)
    return path


def cluster(tmp_path: Path, bytes_per_s: float) -> str:
    path = tmp_path / f"{bytes_per_s:g}.toml"
    path.write_text(CLUSTER.format(bytes_per_s=bytes_per_s))
    return str(path)


class TestControls:
    def test_equal_lengths_leave_odc_nothing_to_gain(self, equal_lengths):
        results = simulate(Study(lengths=equal_lengths, minibatches=10, policy=PAIR))
        for row in results.rows:
            assert row.speedup == pytest.approx(1.0, abs=0.01)
            assert sum(row.idle_causes[c] for c in CAUSES if c.startswith("imbalance")) == pytest.approx(0, abs=1e-9)
        assert results.advice.startswith("Keep collective + lb-micro")

    def test_one_slow_gpu_with_equal_work_leaves_odc_nothing_to_gain(self, equal_lengths):
        slow = (0.5, *[1.0] * 7)
        results = simulate(Study(lengths=equal_lengths, minibatches=10, policy=PAIR, device_speed=slow))
        for row in results.rows:
            assert row.speedup == pytest.approx(1.0, abs=0.01)
            assert row.idle_rate == pytest.approx(7 / 16, abs=0.02)  # seven ranks wait half the time for the eighth

    def test_one_device_is_idle_for_the_optimizer_and_its_own_copies_only(self):
        results = simulate(Study(devices=1, minibatches=5, policy=PAIR))
        for row in results.rows:
            causes = {cause for cause, rate in row.idle_causes.items() if rate > 1e-12}
            assert causes - {"compute_slowdown"} == {"optimizer", "exposed_unshard", "exposed_reduce"}
        one, other = (results.row(*pair) for pair in (("collective", "lb-micro"), ("odc", "lb-micro")))
        assert other.peak_memory_bytes == one.peak_memory_bytes  # `OnDemand` leaves one rank to FSDP2
        assert other.speedup == pytest.approx(1.0, abs=0.005)

    @pytest.mark.parametrize("schedule", [s.name for s in SCHEDULES])
    def test_halving_a_bandwidth_moves_the_answer_where_transfers_are_exposed(self, tmp_path, schedule):
        def samples_per_s(bytes_per_s):
            study = Study(
                minibatches=5, policy=("lb-micro",), schedule=(schedule,), hardware=cluster(tmp_path, bytes_per_s)
            )
            row = simulate(study).row(schedule, "lb-micro")
            assert row.idle_causes["exposed_unshard"] + row.idle_causes["exposed_reduce"] > 0
            return row.samples_per_s_per_device

        assert samples_per_s(20e9) < samples_per_s(40e9) < samples_per_s(80e9)

    def test_a_small_model_with_short_sequences_needs_no_odc(self):
        results = simulate(Study(scale=0.05, minibatch_size=8, minibatches=20, policy=PAIR))
        assert results.advice.startswith("Use collective-deferred")
        assert "no ODC needed" in results.advice

    def test_a_large_model_whose_deferred_gradients_do_not_fit_is_told_so(self):
        results = simulate(Study(model="qwen2.5-14b", minibatches=10, max_tokens=65536, policy=PAIR, minibatch_size=8))
        deferred = results.row("collective-deferred", "lb-micro")
        assert not deferred.fits
        assert deferred.largest_max_tokens is None
        assert results.row("odc", "lb-mini").fits is False or "does not fit" in results.advice

    def test_counts_that_are_equal_by_luck_are_not_recommended(self, tmp_path):
        path = tmp_path / "short.txt"
        path.write_text("".join(f"{900 + 7 * i}\n" for i in range(64)))  # a rank's four always fit one microbatch
        study = Study(lengths=path, max_tokens=65536, minibatches=5, policy=PAIR, schedule=("collective",))
        row = simulate(study).row("collective", "lb-mini")
        assert row.runs
        assert "happened to be equal in these 5 minibatches" in row.verdict
        assert not row.usable
        assert "lb-mini" not in simulate(study).advice
        padded = simulate(study.model_copy(update={"pad_microbatches": True})).row("collective", "lb-mini")
        assert padded.usable

    def test_stock_fsdp_is_named_beside_odc(self):
        advice = simulate(Study(minibatches=30, policy=(*PAIR, "cost-rows"))).advice
        assert advice.startswith(
            "No ODC needed: stock FSDP2 with --max-tokens 131072, collective-deferred + lb-mini, reaches"
        )
        assert "Of this table use odc + lb-mini: " in advice
        assert "The best that stock FSDP2 reaches in it is +" in advice

    def test_stock_fsdp_is_not_judged_by_few_rows(self):
        advice = simulate(Study(minibatches=5, policy=PAIR, schedule=("collective", "odc"))).advice
        assert "The best stock FSDP2 among the rows simulated here is +0%, collective + lb-micro." in advice

    def test_a_baseline_that_does_not_fit_is_not_kept(self, tmp_path, equal_lengths):
        text = CLUSTER.format(bytes_per_s=4e11).replace("memory_bytes = 80e9", "memory_bytes = 1.9e10")
        (tmp_path / "small.toml").write_text(text)
        study = Study(
            lengths=equal_lengths,
            max_tokens=65536,
            minibatches=4,
            hardware=str(tmp_path / "small.toml"),
            policy=("none", "lb-micro"),
        )
        results = simulate(study)
        assert not results.row("collective", "lb-micro").fits
        assert results.row("collective", "none").fits
        assert results.advice.startswith("Use collective + none: collective + lb-micro, the baseline, does not fit")

    def test_the_longest_sample_is_named_when_it_binds(self):
        assert "longest sample" in simulate(Study(minibatch_size=1, minibatches=20, policy=PAIR)).advice


@pytest.fixture(scope="module")
def simulation():
    return run_study(Study(minibatches=30))


class TestDefinitions:
    def test_every_policy_under_every_schedule_has_a_row(self, simulation):
        assert {(r.schedule, r.policy) for r in simulation.results.rows} == {
            (s.name, p) for s in SCHEDULES for p in POLICIES
        }

    def test_idle_causes_sum_to_the_idle_rate(self, simulation):
        for row in (r for r in simulation.results.rows if r.runs):
            assert sum(row.idle_causes.values()) == pytest.approx(row.idle_rate, abs=1e-9)

    def test_nothing_beats_the_bounds(self, simulation):
        bounds = simulation.results.bounds
        assert bounds["lower_bound"] >= max(bounds["balanced_share"], bounds["largest_sample"]) - 1e-9
        for row in (r for r in simulation.results.rows if r.runs):
            assert row.speedup <= bounds["speedup"] + 1e-9
            assert row.makespan_s["mean"] >= bounds["lower_bound"] - 1e-9

    def test_no_bound_is_claimed_where_compute_is_jittered(self):
        results = simulate(Study(minibatches=3, jitter=2.0, devices=2, minibatch_size=1, seed=3, policy=PAIR))
        assert "speedup" not in results.bounds
        assert "caps any policy" not in results.advice

    def test_the_baseline_is_one(self, simulation):
        row = simulation.results.row("collective", "lb-micro")
        assert (row.speedup, row.speedup_ci95) == (1.0, (1.0, 1.0))

    def test_intervals_hold_their_value(self, simulation):
        for row in (r for r in simulation.results.rows if r.runs):
            low, high = row.speedup_ci95
            assert low <= row.speedup <= high

    def test_unequal_counts_hang_under_collectives_only(self, simulation):
        row = simulation.results.row("collective", "lb-mini")
        assert not row.runs
        assert row.verdict.startswith("hangs: rank ")
        assert simulation.results.row("odc", "lb-mini").runs

    def test_rates_are_ratios_of_sums(self, simulation):
        run = simulation.executed["odc", "lb-mini"]
        row = simulation.results.row("odc", "lb-mini")
        assert row.idle_rate == pytest.approx(1 - run.busy_s.sum() / (8 * run.makespan_s.sum()))
        base = simulation.executed["collective", "lb-micro"]
        assert row.speedup == pytest.approx(base.makespan_s.sum() / run.makespan_s.sum())
        samples = 30 * 4 * 8
        assert row.samples_per_s_per_device == pytest.approx(samples / run.makespan_s.sum() / 8)
        saved = (base.makespan_s - run.makespan_s).mean() * 1000 * 8 / 3600
        assert row.gpu_hours_saved_per_1000_steps == pytest.approx(saved)

    def test_same_seed_same_answer(self):
        study = Study(minibatches=5, policy=PAIR, jitter=0.1)
        assert simulate(study).rows == simulate(study).rows
        assert simulate(study).rows != simulate(study.model_copy(update={"seed": 1})).rows

    def test_bubble_rate_ignores_everything_but_compute(self):
        study = Study(minibatches=10, policy=PAIR, schedule=("collective", "odc"))
        bf16, fp32 = (simulate(study.model_copy(update={"gather_dtype": d})) for d in ("bf16", "fp32"))
        for one, other in zip(bf16.rows, fp32.rows, strict=True):
            assert one.bubble_rate == other.bubble_rate
        assert bf16.row("collective", "lb-micro").idle_rate < fp32.row("collective", "lb-micro").idle_rate

    def test_the_event_engine_gives_the_same_table(self):
        study = Study(minibatches=2, policy=PAIR, model="tiny", port_contention=False)
        fast, event = simulate(study), simulate(study.model_copy(update={"engine": "event"}))
        for one, other in zip(fast.rows, event.rows, strict=True):
            if one.runs:
                assert one.speedup == pytest.approx(other.speedup, rel=1e-9)
                assert one.idle_causes == pytest.approx(other.idle_causes, abs=1e-9)

    def test_provenance_is_on_every_row(self, simulation):
        for row in (r for r in simulation.results.rows if r.runs):
            assert row.provenance == {
                "compute": "fitted",
                "transfers": "analytic",
                "optimizer": "analytic",
                "memory": "analytic",
            }

    def test_a_calibration_is_measured_and_extrapolation_is_labelled(self, tmp_path):
        path = Path(__file__).parent / "data" / "calibration-small.json"
        model = tmp_path / "toy" / "config.json"
        model.parent.mkdir()
        model.write_text(
            '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,'
            ' "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 512}'
        )
        study = Study(model=str(model.parent), hardware=str(path), devices=4, minibatches=3, policy=PAIR)
        provenance = simulate(study).row("odc", "lb-mini").provenance
        assert provenance["compute"] == "measured"
        twice = study.model_copy(update={"devices": 8})
        assert simulate(twice).row("odc", "lb-mini").provenance["transfers"] == "extrapolated"
        short = tmp_path / "short.txt"
        short.write_text("3\n8000\n" * 40)  # a microbatch of 3 tokens lies outside too
        mixed = study.model_copy(update={"lengths": short, "policy": ("none",), "max_tokens": 16384})
        assert simulate(mixed).row("odc", "none").provenance["compute"] == "extrapolated"
        longer = study.model_copy(update={"scale": 2.0})
        assert simulate(longer).row("odc", "lb-mini").provenance["compute"] == "extrapolated"


class TestPlansAndStudies:
    def test_a_saved_plan_gives_the_same_row(self, tmp_path):
        study = Study(minibatches=8, policy=("lb-mini",))
        write_plan(plan(study), tmp_path / "plan.json", "test")
        again = simulate(Study(plan=tmp_path / "plan.json"))
        assert again.row("odc", "lb-mini").speedup == pytest.approx(simulate(study).row("odc", "lb-mini").speedup)
        # a plan is for no machine; which one was taken must not go unsaid
        assert "hardware: a100-nvswitch-roce, unless --hardware says another" in again.notes
        asked = simulate(Study(plan=tmp_path / "plan.json", hardware="a100-nvswitch-roce"))
        assert not any(note.startswith("hardware: ") for note in asked.notes)

    def test_a_plan_contradicting_a_flag_is_refused(self, tmp_path):
        write_plan(plan(Study(minibatches=2)), tmp_path / "plan.json", "test")
        with pytest.raises(InputError, match=r"--devices 16 contradicts .*plan.json, which is for 8"):
            simulate(Study(plan=tmp_path / "plan.json", devices=16))
        for field, value in (("minibatches", 50), ("scale", 0.5), ("workload", "swesmith"), ("policy", ("none",))):
            with pytest.raises(InputError, match=rf"--{field} .* contradicts"):
                simulate(Study(plan=tmp_path / "plan.json", **{field: value}))
        both = Study(plan=tmp_path / "plan.json", policy=("lb-micro", "lb-mini"))
        with pytest.raises(InputError, match=r"--policy lb-micro,lb-mini contradicts .*, which is for lb-mini; leave"):
            simulate(both)

    def test_a_plan_brings_its_balancing_cost_and_fills_the_study(self, tmp_path):
        study = Study(minibatches=10, policy=("lb-mini",), balancing_cost="tokens", workload="swesmith")
        write_plan(plan(study), tmp_path / "plan.json", "test")
        again = simulate(Study(plan=tmp_path / "plan.json"))
        assert again.row("odc", "lb-mini").speedup == pytest.approx(simulate(study).row("odc", "lb-mini").speedup)
        assert again.study["balancing_cost"] == "tokens"
        assert again.study["workload"] == "swesmith"
        assert again.study["policy"] == ["lb-mini"]

    def test_device_speeds_are_of_the_plans_ranks(self, tmp_path):
        write_plan(plan(Study(minibatches=2, devices=4)), tmp_path / "plan.json", "test")
        simulate(Study(plan=tmp_path / "plan.json", device_speed=(1.0, 1.0, 0.9, 1.0)))
        with pytest.raises(
            InputError, match=r"device_speed: got 8 values, expected one for each of the plan's 4 ranks"
        ):
            simulate(Study(plan=tmp_path / "plan.json", device_speed=(1.0,) * 8))

    def test_padding_lets_collectives_run_unequal_plans_at_a_cost(self):
        study = Study(minibatches=10, policy=PAIR, pad_microbatches=True)
        padded = simulate(study).row("collective", "lb-mini")
        assert padded.runs
        assert padded.speedup < simulate(study).row("odc", "lb-mini").speedup

    def test_the_python_plan_is_a_plan(self):
        made = plan(Study(minibatches=3), "ffd")
        assert isinstance(made, Plan)
        assert made.policy == "ffd"
        assert sorted(made.sample_ids) == list(range(3 * 4 * 8))

    def test_results_survive_their_file(self, tmp_path):
        results = simulate(Study(minibatches=3, policy=PAIR))
        results.write_json(tmp_path / "results.json", "odc simulate")
        assert read_results(tmp_path / "results.json") == results

    def test_a_study_file_is_overridden_by_flags(self, tmp_path):
        (tmp_path / "study.toml").write_text('workload = "swesmith"\ndevices = 4\npolicy = ["lb-mini"]\n')
        study = load_study(tmp_path / "study.toml", {"devices": 2})
        assert (study.workload, study.devices, study.policy) == ("swesmith", 2, ("lb-mini",))

    def test_the_documented_study_file_is_the_defaults_and_names_every_field(self):
        path = Path(__file__).parent.parent / "docs" / "study.toml"
        assert load_study(path) == Study()
        named = set(re.findall(r"^(?:# )?(\w+) = ", path.read_text(), flags=re.MULTILINE))
        assert named == set(Study.model_fields)

    def test_files_named_in_a_study_are_found_beside_it(self, tmp_path):
        (tmp_path / "mine.txt").write_text("100\n200\n")
        (tmp_path / "study.toml").write_text('lengths = "mine.txt"\ndevices = 2\n')
        assert simulate(load_study(tmp_path / "study.toml", {"minibatches": 2})).lengths["max"] == 200

    def test_a_model_folder_beside_a_study_is_found_but_hides_no_builtin(self, tmp_path):
        for name in ("mymodel", "tiny"):
            (tmp_path / name).mkdir()
            (tmp_path / "study.toml").write_text(f'model = "{name}"\nworkload = "longalign"\n')
            (tmp_path / "longalign").mkdir(exist_ok=True)
            found = load_study(tmp_path / "study.toml")
            assert found.model == ("tiny" if name == "tiny" else str(tmp_path / "mymodel"))
            assert found.workload == "longalign"

    def test_names_may_be_a_comma_list(self):
        assert make_study({"policy": "lb-micro, lb-mini,"}).policy == PAIR


class TestNotes:
    def notes(self, **fields):
        return simulate(Study(minibatches=2, policy=("lb-micro",), **fields)).notes

    def test_memory_states_its_assumptions(self):
        assert (
            "memory: estimate against 85.9 GB, recipe paper, layers recomputed, loss in chunks of 512 tokens"
            in self.notes()
        )
        assert any("loss over all tokens" in note for note in self.notes(chunked_loss_tokens=0))

    def test_what_is_not_the_default_is_said(self):
        assert self.notes() == self.notes(seed=1)
        assert "not the default: jitter = 0.1" in self.notes(jitter=0.1)
        assert any("device_speed = (0.9" in note for note in self.notes(device_speed=(0.9, *[1.0] * 7)))

    def test_own_lengths_are_said_to_be_drawn(self, equal_lengths):
        note = f"64 samples drawn from {equal_lengths}, which has 64: each once before any repeats"
        assert note in self.notes(lengths=equal_lengths)

    def test_a_cluster_file_goes_by_its_own_name(self, tmp_path):
        row = simulate(Study(minibatches=2, policy=("lb-micro",), hardware=cluster(tmp_path, 40e9))).rows[0]
        assert row.hardware == "4e+10"

    def test_whole_logits_need_memory(self):
        def total(chunk):
            study = Study(minibatches=2, policy=("lb-micro",), chunked_loss_tokens=chunk)
            return simulate(study).rows[0].peak_memory_bytes["total"]

        assert total(0) > total(512) + 10e9


class TestRefused:
    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"devices": 0}, r"devices: got 0, expected greater than or equal to 1"),
            ({"minibatches": -1}, r"minibatches: got -1"),
            ({"minibatch_sise": 4}, r"unknown field 'minibatch_sise': did you mean 'minibatch_size'"),
            ({"scale": float("nan")}, r"scale: got nan"),
            ({"engine": "quick"}, r"engine: got 'quick', expected 'fast' or 'event'"),
            ({"device_speed": (1.0,)}, r"device_speed: got 1 values, expected one for each of 8 devices"),
            ({"baseline": "lb-micro"}, r"baseline: got 'lb-micro', expected schedule/policy"),
            (
                {"lengths": Path("x.txt"), "workload": "longalign"},
                r"lengths and workload: got both, expected one of them",
            ),
            ({"column": "length"}, r"column: given without a lengths file"),
            ({"max_tokens": 10**20}, r"^max_tokens: got 10{20}, expected less than or equal to 2147483648$"),
            ({"forward_prefetch": 10**20}, r"^forward_prefetch: got 10{20}, expected less than or equal to 10000$"),
            ({"backward_prefetch": 10**20}, r"^backward_prefetch: got 10{20}, expected less than or equal to 10000$"),
            ({"batch_minibatches": 10**20}, r"^batch_minibatches: got 10{20}, expected less than or equal to 1000000$"),
            (
                {"minibatches": 99999999999999},
                r"^minibatches: got 99999999999999, expected less than or equal to 1000000",
            ),
            (
                {"minibatches": 10_000_000},
                r"^devices \* minibatch_size \* minibatches: got 8 \* 4 \* 10000000 = 320,000,000 samples, "
                r"expected at most 200,000,000; lower minibatches$",
            ),
            ({"seed": 2**63}, r"^seed: got 9223372036854775808, expected less than or equal to 9223372036854775807$"),
            (
                {"devices": 1 << 50_000},
                r"^devices: got a whole number of about 15052 digits, expected less than or equal",
            ),
            ({"minibatches": True}, r"^minibatches: got True, expected a whole number$"),
            ({"minibatches": 4.0}, r"^minibatches: got 4\.0, expected a whole number$"),
            ({"jitter": True}, r"^jitter: got True, expected a number$"),
            ({"scale": 1e308}, r"^scale: got 1e\+308, expected less than or equal to 1000000$"),
            (
                {"device_speed": (1e-308,) * 8},
                r"^device_speed\.0: got 1e-308, expected greater than or equal to 0\.001$",
            ),
            ({"device_speed": (1e4,) * 8}, r"^device_speed\.0: got 10000\.0, expected less than or equal to 1000$"),
            (
                {"policy": ","},
                r"^policy: got no name, expected one or several with commas between; leave it out for all$",
            ),
            ({"schedule": " "}, r"^schedule: got no name, expected one or several"),
        ],
    )
    def test_fields(self, fields, message):
        with pytest.raises(InputError, match=message):
            make_study(fields)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"policy": ("lb-mikro",)}, r"unknown policy 'lb-mikro': did you mean 'lb-micro'"),
            ({"schedule": ("colective",)}, r"unknown schedule 'colective': did you mean 'collective'"),
            ({"model": "qwen2.5-1.5"}, r"unknown model 'qwen2.5-1.5': did you mean 'qwen2.5-1.5b'"),
            ({"hardware": "a100"}, r"unknown hardware 'a100'"),
            ({"workload": "longalgin"}, r"unknown workload 'longalgin': did you mean 'longalign'"),
            ({"baseline": "collective/lb-mini"}, r"the baseline collective/lb-mini cannot run: hangs: rank"),
            ({"max_tokens": 20_000}, r"--overlong drop\|clip\|scale"),
            ({"devices": 12}, r"12"),
        ],
    )
    def test_names_and_sizes(self, fields, message):
        with pytest.raises(InputError, match=message):
            simulate(Study(minibatches=10, **fields))

    def test_fewer_samples_than_devices(self, tmp_path):
        (tmp_path / "few.txt").write_text("100\n200\n300\n")
        with pytest.raises(InputError, match=r"got 3 samples, expected at least one for each of 8 devices"):
            simulate(Study(lengths=tmp_path / "few.txt"))

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("devices = ", r"not valid TOML"),
            ("devcies = 4", r"study.toml: unknown field 'devcies': did you mean 'devices'"),
            ("devices = 'many'", r"study.toml: devices: got 'many'"),
            ("minibatches = true", r"study.toml: minibatches: got True, expected a whole number"),
            ("minibatches = " + 5000 * "9", r"study.toml: not valid TOML: Exceeds the limit \(4300 digits\)"),
            ("policy = " + 50_000 * "[", r"study.toml: not valid TOML: maximum recursion depth exceeded"),
        ],
    )
    def test_study_files(self, tmp_path, text, message):
        (tmp_path / "study.toml").write_text(text)
        with pytest.raises(InputError, match=message):
            load_study(tmp_path / "study.toml")

    def test_a_missing_study_file(self, tmp_path):
        with pytest.raises(InputError, match=r"no such study file"):
            load_study(tmp_path / "none.toml")
        with pytest.raises(InputError, match=r"characters\): cannot be read as a study file: File name too long"):
            load_study("x" * 5000)

    def test_names_too_long_for_a_path_are_no_crash(self, tmp_path):
        name = "x" * 5000
        (tmp_path / "study.toml").write_text(f'model = "{name}"\n')
        with pytest.raises(InputError, match=r"model x{60}\.\.\. \(5000 characters\): File name too long"):
            simulate(load_study(tmp_path / "study.toml"))
        with pytest.raises(InputError, match=r"\(5004 characters\): cannot be read \(File name too long\)"):
            simulate(Study(lengths=Path(name + ".txt")))

    def test_ranks_without_microbatches_cannot_join_collectives(self, tmp_path):
        path = tmp_path / "uneven.txt"
        path.write_text("60000\n" + "10\n" * 7)
        results = simulate(Study(lengths=path, minibatch_size=1, minibatches=2, policy=PAIR, schedule=("odc",)))
        assert np.isfinite(results.row("odc", "lb-mini").speedup)
