"""Runs that the simulator itself executed: predicted without error; then slower by known amounts, and in bad shape."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from recorded import run_config, step_rows, write_run
from typer.testing import CliRunner

from cli import app
from odc_sim.api import plan
from odc_sim.durations import CAUSE_WORDS, CAUSES
from odc_sim.errors import InputError
from odc_sim.machine import load_machine
from odc_sim.metrics import Speedup
from odc_sim.plans import read_plan, write_plan
from odc_sim.run_files import read_run, write_config, write_environment, write_steps
from odc_sim.study import Study
from odc_sim.table_validate import _time, order_line, run_lines, speedup_lines, step_lines, verdict_line
from odc_sim.timeline import Timeline, read_timeline
from odc_sim.validate import Order, validate
from odc_sim.validate_predict import predict
from odc_sim.validate_run import Pair

HARDWARE = "h100-ib"
CALIBRATION = Path(__file__).parent / "data" / "calibration-small.json"  # of a model "toy" on 4 ranks
HF = {
    "model_type": "llama",
    "hidden_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 4096,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}
CELLS = (
    ("collective", "lb-micro"),
    ("collective-deferred", "lb-mini"),
    ("odc", "lb-mini"),
    ("odc-local-sum", "lb-mini"),
)


@pytest.fixture(scope="module")
def plans(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model") / "toy"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(HF))
    study = Study(model=str(folder), hardware=HARDWARE, devices=4, minibatch_size=3, minibatches=4)
    return {policy: plan(study, policy) for policy in ("lb-micro", "lb-mini")}


@pytest.fixture(scope="module")
def runs(plans, tmp_path_factory):
    """Folders by schedule, as executed on HARDWARE."""
    root = tmp_path_factory.mktemp("runs")
    return {s: write_run(root / s, plans[policy], s, HF, HARDWARE) for s, policy in CELLS}


@pytest.fixture
def run(runs, tmp_path):
    """A copy of the odc run, to spoil."""
    return Path(shutil.copytree(runs["odc"], tmp_path / "odc"))


def slower(factor, rank=None):
    """Durations of a machine that computes so many times longer, on one rank or on all."""

    def change(durations):
        factors = np.ones(durations.world_size)
        factors[slice(None) if rank is None else rank] = factor
        return replace(durations, forward_s=durations.forward_s * factors, backward_s=durations.backward_s * factors)

    return change


def check(*folders, engine="event", **options):
    return validate(list(folders), hardware=HARDWARE, engine=engine, **options)


class TestExactRuns:
    def test_no_error_with_the_same_engine(self, runs):
        found = check(*runs.values())
        assert found.failures == ()
        for each in found.runs:
            assert each.step.percent == pytest.approx(0.0, abs=1e-9)
            assert each.minibatch_percent == pytest.approx(np.zeros(4), abs=1e-9)
            assert each.gaps.points == pytest.approx(0.0, abs=1e-9)
            assert each.compute.percent == pytest.approx(0.0, abs=1e-9)
            assert each.idle.predicted > 0.05
            for cause, pair in each.idle_causes.items():
                if cause != "port_contention":
                    assert pair.points == pytest.approx(0.0, abs=0.2), cause
            for name, pair in each.units.items():
                assert pair.predicted == pytest.approx(pair.measured, rel=1e-9), name
        assert [each.points for each in found.speedups] == pytest.approx([0.0] * 3, abs=1e-9)
        assert {each.baseline for each in found.speedups} == {"collective"}
        assert all(each.gain_share == pytest.approx(1.0) for each in found.speedups if each.gain_share)
        assert all(each.kept is not False for each in found.orders)

    def test_the_fast_engine_is_near(self, runs):
        found = check(*runs.values(), engine="fast")
        assert found.failures == ()
        assert max(abs(each.step.percent) for each in found.runs) < 1.0

    def test_causes_sum_to_the_idle_rate(self, runs):
        for each in check(*runs.values()).runs:
            assert set(each.idle_causes) == set(CAUSES)
            assert each.idle.measured == pytest.approx(each.gaps.measured + _inside(each), abs=1e-9)

    def test_a_run_with_its_own_calibration(self, plans, tmp_path):
        folder = write_run(tmp_path / "own", plans["lb-mini"], "odc", HF, CALIBRATION)
        shutil.copyfile(CALIBRATION, folder / "calibration.json")
        (each,) = validate([folder], engine="event").runs
        assert each.step.percent == pytest.approx(0.0, abs=1e-9)
        assert each.prediction.provenance["compute"] == "measured"
        assert each.units["layer forward"].percent == pytest.approx(0.0, abs=1e-6)

    def test_emulated_compute_counts_in_executed_seconds(self, plans, tmp_path):
        folder = write_run(
            tmp_path / "e",
            plans["lb-mini"],
            "odc",
            HF,
            HARDWARE,
            compute="emulated",
            time_scale=20.0,
            hardware=HARDWARE,
        )
        (each,) = validate([folder], engine="event").runs  # the hardware is the run's own
        assert each.step.percent == pytest.approx(0.0, abs=1e-9)
        assert each.memory is None
        (real,) = check(write_run(tmp_path / "r", plans["lb-mini"], "odc", HF, HARDWARE)).runs
        assert each.compute.measured == pytest.approx(20.0 * real.compute.measured, rel=0.02)

    def test_emulated_compute_neither_slows_transfers_nor_is_slowed(self, plans, tmp_path):
        slows = load_machine("h200-nvlink")
        assert slows.cluster.overlap["collective"].waiting > 1
        folder = write_run(tmp_path / "e", plans["lb-micro"], "collective", HF, "h200-nvlink", compute="emulated")
        predicted = predict(read_run(folder), slows)
        assert predicted.slowdown_s.tolist() == [0.0] * 4
        assert predicted.idle_s[:, CAUSES.index("compute_slowdown")].tolist() == [0.0] * 4
        write_config(folder, run_config(plans["lb-micro"], "collective"))
        assert predict(read_run(folder), slows).slowdown_s.min() > 0

    def test_on_a_cpu_nothing_overlaps(self, runs, tmp_path, plans):
        folder = shutil.copytree(runs["odc"], tmp_path / "cpu")
        write_config(folder, run_config(plans["lb-mini"], "odc", device="cpu"))
        assert check(folder).notes[0].startswith("ranks on a CPU: whatever else ran on it is in these numbers")
        (cpu,), (gpu,) = check(folder).runs, check(runs["odc"]).runs
        assert cpu.step.predicted > gpu.step.predicted
        assert cpu.prediction.slowdown_s.sum() == 0.0


def _inside(each):
    """Share of GPU time that was derived from compute spans."""
    excess_s = each.measured.compute_s.sum() - each.prediction.busy_s.sum()
    return max(excess_s, 0.0) / (4 * each.measured.timeline_s.sum())


class TestPerturbedRuns:
    def test_compute_ten_percent_slower(self, plans, tmp_path, runs):
        folder = write_run(tmp_path / "slow", plans["lb-mini"], "odc", HF, HARDWARE, change=slower(1.1))
        (each,) = check(folder).runs
        assert 8.0 < each.step.percent <= 10.0
        assert each.compute.percent == pytest.approx(10.0, abs=1e-6)
        for name in ("layer forward", "layer backward", "head and loss"):
            assert each.units[name].percent == pytest.approx(10.0, abs=1e-6)
        # the calibration cannot tell slower compute from compute slowed down
        inside_s = 0.1 * each.prediction.compute_s.sum() + each.prediction.slowdown_s.sum()
        share = inside_s / (4 * each.measured.timeline_s.sum())
        assert each.idle_causes["compute_slowdown"].measured == pytest.approx(share, rel=1e-6)
        assert each.gaps.points == pytest.approx(0.0, abs=1.0)
        low, high = each.step_ci95_percent
        assert low <= each.step.percent <= high

    def test_faster_compute_is_no_negative_slowdown(self, plans, tmp_path):
        folder = write_run(tmp_path / "fast", plans["lb-mini"], "odc", HF, HARDWARE, change=slower(0.9))
        (each,) = check(folder).runs
        assert each.step.percent < -8.0
        assert each.idle_causes["compute_slowdown"].measured == 0.0
        assert each.compute.percent == pytest.approx(-10.0, abs=1e-6)

    def test_one_slow_rank_shows_as_imbalance(self, plans, tmp_path):
        for schedule, policy, cause in (
            ("odc", "lb-mini", "imbalance_minibatch"),
            ("collective", "lb-micro", "imbalance_layer"),
        ):
            folder = write_run(tmp_path / schedule, plans[policy], schedule, HF, HARDWARE, change=slower(2.0, rank=1))
            (each,) = check(folder).runs
            assert each.step.percent > 30.0
            assert each.units["layer forward"].percent > 15.0
            assert each.idle_causes[cause].points > 10.0
            assert any(text.startswith(f"{CAUSE_WORDS[cause]} of {schedule} is +") for text in check(folder).misses)
            assert max(each.idle_causes.items(), key=lambda item: abs(item[1].points or 0.0))[0] == cause

    def test_longer_optimizer(self, plans, tmp_path):
        def change(durations):
            return replace(durations, optimizer_s=durations.optimizer_s + 0.02)

        folder = write_run(tmp_path / "step", plans["lb-mini"], "odc", HF, HARDWARE, change=change)
        (each,) = check(folder).runs
        added = 0.02 / each.step.measured
        assert each.idle_causes["optimizer"].measured == pytest.approx(
            added + each.idle_causes["optimizer"].predicted * each.step.predicted / each.step.measured
        )

    def test_a_speedup_that_is_missed(self, runs, plans, tmp_path):
        folder = write_run(tmp_path / "odc-slow", plans["lb-mini"], "odc", HF, HARDWARE, change=slower(1.5))
        found = check(folder, runs["collective"], tolerance_percent=100.0)
        (faster,) = found.speedups  # collective/lb-micro is the baseline though named second
        assert (faster.run, faster.baseline, faster.minibatches) == ("odc-slow", "collective", 4)
        assert faster.measured.value == pytest.approx(faster.predicted / 1.5, rel=0.03)
        assert faster.gain_share < 0.5
        assert found.failures == (
            f"speedup of odc-slow over collective is {faster.points:+.1f} points off (tolerance 2)",
        )
        (order,) = found.orders
        assert (order.faster, order.slower, order.kept) == ("odc-slow", "collective", False)
        assert "collective is faster than odc-slow" in speedup_lines(found)[-1]

    def test_a_machine_that_is_slower_as_a_whole_keeps_its_speedup(self, plans, tmp_path):
        folders = [
            write_run(tmp_path / s, plans[p], s, HF, HARDWARE, change=slower(1.1)) for s, p in (CELLS[0], CELLS[2])
        ]
        found = check(*folders)
        assert abs(found.speedups[0].points) < 1.0
        assert len(found.failures) == 2
        assert all("step time" in text and "tolerance 3 %" in text for text in found.failures)
        assert check(*folders, tolerance_percent=11.0).failures == ()

    def test_memory(self, run, plans):
        rows = step_rows(plans["lb-mini"], [0.1] * 4, peak_memory_bytes=10**10)
        write_steps(run, rows)
        (each,) = check(run).runs
        assert each.memory.measured == 1e10
        assert check(run).misses == (f"peak memory of odc is {each.memory.percent:+.1f} % off",)
        assert each.memory.percent == pytest.approx(100.0 * (1e10 / each.prediction.memory.total_bytes - 1.0))

    def test_time_between_minibatches_is_shown(self, run, plans):
        (each,) = check(run).runs
        assert each.measured.between_s == pytest.approx(0.001)
        assert "1 ms between minibatches" in step_lines([each])[-1]
        write_steps(run, step_rows(plans["lb-mini"], [0.1] * 4, between_s=math.nan))
        assert "was not recorded" in step_lines(check(run).runs)[-1]
        write_steps(run, step_rows(plans["lb-mini"], [0.1] * 4, between_s=-4e-5))
        assert step_lines(check(run).runs)[-1] == "odc: no time between minibatches"


def test_an_error_of_next_to_nothing_is_not_told():
    assert _time("head and loss", Pair(predicted=2e-7, measured=8e-4)).split()[-2:] == ["ms", "-"]
    assert _time("embedding", Pair(predicted=0.0, measured=8e-4)).split()[-2:] == ["ms", "-"]
    assert _time("layers", Pair(predicted=2e-6, measured=3e-6)).split()[-2:] == ["+50.0", "%"]


class TestDifferences:
    def fields(self, *folders, index=0, **options):
        return {d.field: d for d in check(*folders, **options).runs[index].differences}

    def test_hardware_instead_of_a_calibration(self, run):
        assert set(self.fields(run)) == {"calibration"}

    def test_interrupted_and_other_policy(self, run, plans):
        write_steps(run, step_rows(plans["lb-mini"], [0.1] * 4)[:2])
        write_config(run, run_config(plans["lb-mini"], "odc", policy="mine", steps=3))
        found = self.fields(run)
        assert found["minibatches"].line == (
            "minibatches: 2 finished of 3 asked for in the run, 4 in the plan (those that were finished are compared)"
        )
        assert found["policy"].line == "policy: mine in the run, lb-mini in the plan"
        (each,) = check(run).runs
        assert each.prediction.makespan_s.shape == (2,)

    def test_other_samples(self, run, plans):
        rows = step_rows(plans["lb-mini"], [0.1] * 4)
        write_steps(run, [replace(rows[0], tokens=7), rows[1], rows[2], replace(rows[3], tokens=8, samples=1)])
        found = self.fields(run)
        assert found["tokens of minibatch 0"].run == "7"
        assert "2 of 4 minibatches differ" in found["tokens of minibatch 0"].line
        assert found["samples of minibatch 3"].line.startswith("samples of minibatch 3: 1 in the run, 12 in the plan")

    def test_other_model(self, run):
        (run / "model.json").write_text(json.dumps(HF | {"num_hidden_layers": 2}))
        made = read_plan(run / "plan.json")
        write_plan(replace(made, model="qwen2.5-7b"), run / "plan.json", "odc plan")
        found = check(run).runs[0]
        difference = next(d for d in found.differences if d.field == "model")
        assert (difference.other, difference.compared_with) == ("qwen2.5-7b", "the plan")
        assert found.prediction.model.layers == 2

    def test_microbatches_and_makespans(self, run, plans):
        timeline = read_timeline(run / "timeline.parquet")
        late = timeline.microbatch.copy()
        late[(timeline.rank == 1) & (timeline.minibatch == 2) & (late >= 0)] += 1
        replace(timeline, microbatch=late, end_s=timeline.end_s).write_parquet(run / "timeline.parquet", "odc train")
        write_steps(run, step_rows(plans["lb-mini"], [10.0] * 4))
        found = self.fields(run)
        count = int(plans["lb-mini"].counts()[2, 1])
        line = f"microbatches of rank 1 in minibatch 2: {count + 1} in the run, {count} in the plan"
        assert found["microbatches of rank 1 in minibatch 2"].line.startswith(line)
        assert any("10 s in steps.csv" in d.line and "4 of 4 differ" in d.line for d in found.values())

    def test_part_of_a_timeline(self, run):
        timeline = read_timeline(run / "timeline.parquet")
        kept = timeline.minibatch < 3
        part = Timeline(**{name: getattr(timeline, name)[kept] for name in Timeline.__slots__})
        part.write_parquet(run / "timeline.parquet", "odc train")
        assert self.fields(run)["timeline"].line.startswith("timeline: 3 minibatches in the run, 4 in steps.csv (idle")
        (each,) = check(run).runs
        assert each.compute.percent == pytest.approx(0.0, abs=1e-9)
        assert each.gaps.points == pytest.approx(0.0, abs=1e-9)

    def test_no_timeline(self, run):
        (run / "timeline.parquet").unlink()
        (each,) = check(run).runs
        assert each.step.percent == pytest.approx(0.0, abs=1e-9)
        assert (each.idle.measured, each.gaps.measured, each.compute.measured, each.exposed.measured) == (None,) * 4
        assert "no timeline, so neither idle time nor units are compared" in run_lines(each)[0]
        assert {d.remark for d in each.differences if d.field == "timeline"} == {"no idle time, no units"}

    def test_machine_and_versions(self, run):
        data = json.loads(CALIBRATION.read_text())
        data["environment"] = {
            "gpu": {"name": "NVIDIA H200", "count": 4},
            "packages": {"torch": "2.11.0"},
            "variables": {},
            "nccl": "2.28.9",
        }
        own = run / "calibration.json"
        own.write_text(json.dumps(data))
        described = {
            "gpu": {"name": "NVIDIA H100", "count": 4},
            "packages": {"torch": "2.13.0"},
            "variables": {"NCCL_NVLS_ENABLE": "0"},
        }
        write_environment(run, "odc train", 0, described)
        (each,) = validate([run]).runs
        lines = [d.line for d in each.differences]
        assert "gpu name: NVIDIA H100 in the run, NVIDIA H200 in the calibration" in lines
        assert "package torch: 2.13.0 in the run, 2.11.0 in the calibration" in lines
        assert "variable NCCL_NVLS_ENABLE: 0 in the run, (none) in the calibration" in lines
        assert not any(line.startswith(("gpu count", "nccl")) for line in lines)

    def test_compute_in_another_dtype_than_was_calibrated(self, run, plans):
        data = json.loads(CALIBRATION.read_text())
        data["environment"]["calibrate"] = {"compute_dtype": "bf16"}
        (run / "calibration.json").write_text(json.dumps(data))
        assert "compute dtype" not in {d.field for d in validate([run]).runs[0].differences}
        write_config(run, run_config(plans["lb-mini"], "odc", gather_dtype="fp32"))
        assert (
            "compute dtype: fp32 in the run, bf16 in the calibration (compute is priced in that one, and copies are "
            "analytic; odc train --gather-dtype bf16 is like the calibration)"
        ) in [d.line for d in validate([run]).runs[0].differences]

    def test_what_was_not_calibrated(self, run, plans):
        shutil.copyfile(CALIBRATION, run / "calibration.json")
        write_config(run, run_config(plans["lb-mini"], "odc", reduce_dtype="bf16", chunked_loss_tokens=0))
        found = {d.field: d.line for d in validate([run]).runs[0].differences}
        assert found["dtype of scatter_accumulate"].startswith("dtype of scatter_accumulate: bf16 in the run, fp32 in")
        assert found["chunked_loss_tokens"].startswith("chunked_loss_tokens: 0 in the run, 512 in the calibration")

    def test_model_or_transfer_that_the_calibration_lacks(self, run, plans):
        data = json.loads(CALIBRATION.read_text())
        data["fits"] = []
        data["transfers"] = [t for t in data["transfers"] if t["op"] != "gather"]
        (run / "calibration.json").write_text(json.dumps(data))
        found = {d.field: d.line for d in validate([run]).runs[0].differences}
        assert found["model"] == "model: toy in the run, none in the calibration (compute is analytic)"
        assert found["gather"] == "gather: used in the run, not measured in the calibration (taken from links)"

    def test_between_runs(self, runs, run, plans):
        write_config(run, run_config(plans["lb-mini"], "odc", recompute=False, seed=5))
        found = check(runs["collective"], run)
        assert [d.line for d in found.between["odc"]] == [
            "recompute: False in the run, True in collective",
            "seed: 5 in the run, 0 in collective",
        ]

    def test_runs_that_cannot_be_compared(self, runs, run, plans):
        write_config(run, run_config(plans["lb-mini"], "odc", time_scale=2.0))
        found = check(runs["collective"], run)
        assert (found.speedups, found.orders, found.between) == ((), (), {})
        assert found.notes == ("odc shares no minibatch with another run before it: no speedup",)


class TestRefused:
    def test_nothing_to_predict_with(self, run):
        with pytest.raises(InputError, match=r"holds no calibration.json, so nothing says how fast .*--hardware NAME"):
            validate([run])

    def test_no_minibatch_finished(self, run):
        write_steps(run, [])
        with pytest.raises(InputError, match="odc: no minibatch was finished, so there is nothing to compare"):
            check(run)

    def test_a_plan_that_hangs(self, run, plans):
        write_config(run, run_config(plans["lb-mini"], "collective"))
        with pytest.raises(InputError, match="collective cannot run its plan: hangs"):
            check(run)

    def test_two_runs_of_one_name(self, run, runs):
        with pytest.raises(InputError, match="two runs are called 'odc', expected folders of different names"):
            check(run, runs["odc"])

    def test_a_model_that_is_gone(self, run):
        (run / "model.json").unlink()
        with pytest.raises(InputError, match=r"model config 'model.json': no such file"):
            check(run)

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"tolerance_percent": -1.0}, "--tolerance: got -1, expected percent, 0 or more"),
            ({"tolerance_percent": math.nan}, "--tolerance: got nan"),
            ({"engine": "slow"}, "--engine: got 'slow', expected fast or event"),
        ],
    )
    def test_options(self, run, options, message):
        with pytest.raises(InputError, match=message):
            check(run, **options)

    def test_no_run(self):
        with pytest.raises(InputError, match="got no run"):
            validate([])


class TestCommand:
    def run(self, *arguments):
        return CliRunner().invoke(app, ["validate", *map(str, arguments)])

    def test_within_tolerance(self, runs, tmp_path):
        out = tmp_path / "out"
        result = self.run(*runs.values(), "--hardware", HARDWARE, "--out", out)
        assert result.exit_code == 0, result.output
        assert "within tolerance: step times 3 %, speedups 2 points" in result.output
        # differences come before any error
        assert result.output.index("calibration: none in the run") < result.output.index("error %")
        data = json.loads((out / "validation.json").read_text())
        assert data["schema_version"] == 1
        assert [each["schedule"] for each in data["runs"]] == list(runs)
        assert len(data["runs"][0]["minibatches"]) == 4
        assert data["failures"] == []
        assert (out / "validation.png").read_bytes().startswith(b"\x89PNG")

    def test_beyond_tolerance(self, plans, tmp_path):
        folder = write_run(tmp_path / "slow", plans["lb-mini"], "odc", HF, HARDWARE, change=slower(1.1))
        result = self.run(folder, "--hardware", HARDWARE)
        assert result.exit_code == 3
        assert result.output.splitlines()[-1].startswith("beyond tolerance: step time of slow is +")
        assert "further off than aimed at (3 points for a cause, 5 % for memory): slowdown" in result.output
        result = self.run(folder, "--hardware", HARDWARE, "--tolerance", 20)
        assert result.exit_code == 0
        result = self.run(folder, "--hardware", HARDWARE, "--json", "-")
        assert result.exit_code == 3
        assert json.loads(result.stdout)["failures"]
        assert result.stderr.startswith("beyond tolerance: step time of slow")

    def test_json_file(self, runs, tmp_path):
        assert self.run(runs["odc"], "--hardware", HARDWARE, "--json", tmp_path / "v.json").exit_code == 0
        data = json.loads((tmp_path / "v.json").read_text())
        assert data["runs"][0]["idle_causes"]["compute_slowdown"]["derived"] is True
        assert data["runs"][0]["idle_causes"]["port_contention"]["measured"] is None

    def test_without_a_timeline(self, run, tmp_path):
        (run / "timeline.parquet").unlink()
        result = self.run(run, "--hardware", HARDWARE, "--out", tmp_path / "out")
        assert result.exit_code == 0, result.output
        assert (tmp_path / "out" / "validation.png").is_file()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["{run}/nowhere"], "no such folder"),
            (["{run}"], "holds no calibration.json"),
            (["{run}", "--hardware", "h100-ib", "--calibration", "x.json"], "got both, expected one of them"),
            (["{run}", "--calibration", "x.toml"], "expected a .json file that odc calibrate wrote"),
            (["{run}", "--calibration", "x.json"], "no such file"),
            (["{run}", "--hardware", "h1000"], "h1000"),
        ],
    )
    def test_user_mistakes(self, run, arguments, message):
        result = self.run(*(text.format(run=run) for text in arguments))
        assert result.exit_code == 2, result.output
        assert message in result.output
        assert result.output.count("\n") == 1

    def test_a_calibration_given_by_hand(self, run):
        result = self.run(run, "--calibration", CALIBRATION, "--tolerance", 1000)
        assert result.exit_code == 0
        assert "predicted with calibration-small" in result.output


def test_the_hosts_time_for_a_layer_is_compared(runs):
    measured = Path(__file__).parent.parent / "reports" / "validation-h200" / "runs" / "balanced-odc-lb-mini"
    (each,) = validate([measured], hardware="h200-nvlink").runs
    host = each.units["host, layer forward"]
    assert host.predicted == load_machine("h200-nvlink").cluster.host.seconds_per_unit_forward_one_sided
    assert host.measured == pytest.approx(0.00346, rel=0.01)
    assert any(line.startswith("  host, layer forward ") for line in run_lines(each))
    assert "host, layer forward" not in check(runs["odc"]).runs[0].units  # no time passes on this host


def test_verdict_of_one_run(runs):
    assert verdict_line(check(runs["odc"])) == "within tolerance: step times 3 %"
    assert speedup_lines(check(runs["odc"])) == ["speedups: only one run"]


def test_every_run_is_readable(runs):
    assert all(read_run(folder).timeline is not None for folder in runs.values())


def test_no_order_is_claimed_where_no_pair_can_be_told():
    def order(low, high):
        measured = Speedup(value=(low + high) / 2, low=low, high=high)
        return Order(faster="a", slower="b", predicted=1.1, measured=measured)

    close, kept = order(0.8, 1.2), order(1.1, 1.2)
    assert order_line([close]) == "order: too close to tell (1 pair)"
    assert order_line([close, close]) == "order: too close to tell (2 pairs)"
    assert order_line([close, kept]) == "order: as predicted; 1 of 2 pairs too close to tell"
    assert order_line([kept]) == "order: as predicted"
