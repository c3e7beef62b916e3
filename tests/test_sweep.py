"""Sweeps: which points they make, what a user can get wrong, and that a stopped one goes on where it was."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import app
from odc_sim.datafiles import data_dir
from odc_sim.errors import InputError
from odc_sim.machine import machine_files
from odc_sim.plots_sweep import factor_figure, positions
from odc_sim.study import Study
from odc_sim.sweep import Factor, Sweep
from odc_sim.sweep_file import builtin_sweeps, load_sweep
from odc_sim.sweep_flags import sweep_from_flags
from odc_sim.sweep_report import csv_text
from odc_sim.sweep_run import point_key, run_sweep
from odc_sim.workload import builtin_workloads

QUICK = {"minibatches": 3, "policy": ("lb-micro", "lb-mini"), "schedule": ("collective", "odc")}
FACTORS = (Factor(field="devices", values=(2, 4)), Factor(field="minibatch_size", values=(1, 2, 4)))


def flags(text, **more):
    return sweep_from_flags(text.split(), **more)


def small(**fields):
    return Sweep(name="small", base={**QUICK, **fields}, factors=FACTORS)


# ---- points


def test_a_grid_has_every_combination_once():
    points = Sweep(name="g", factors=FACTORS).points()
    assert [tuple(p.settings.values()) for p in points] == [(2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (4, 4)]
    assert [(p.study.devices, p.study.minibatch_size) for p in points[:2]] == [(2, 1), (2, 2)]


def test_one_at_a_time_varies_each_factor_from_the_base_and_has_the_base_once():
    sweep = Sweep(name="o", base={"devices": 4}, factors=FACTORS, mode="one-at-a-time")
    # minibatch_size is 4 by default, so (4, 4) is the base: the second value of one factor and the third of the other
    assert [tuple(p.settings.values()) for p in sweep.points()] == [(2, 4), (4, 4), (4, 1), (4, 2)]
    assert sweep.along(FACTORS[1]) == [{"devices": 4, "minibatch_size": m} for m in (1, 2, 4)]


def test_a_grid_is_looked_at_along_a_factor_at_the_base_or_the_first_value():
    assert Sweep(name="g", base={"devices": 4}, factors=FACTORS).reference(FACTORS[0]) == 4
    assert Sweep(name="g", factors=FACTORS).reference(FACTORS[0]) == 2


def test_flags_with_one_value_fix_a_field_and_lists_vary_it():
    sweep = flags("--devices 8,16 --scale=0.5 --policy lb-micro,lb-mini --schedule odc --recompute true,false")
    assert sweep.base == {"scale": 0.5, "policy": ("lb-micro", "lb-mini"), "schedule": ("odc",)}
    assert {f.field: f.values for f in sweep.factors} == {"devices": (8, 16), "recompute": (True, False)}
    assert (sweep.name, sweep.mode, len(sweep.points())) == ("sweep-longalign", "grid", 4)


def test_flags_may_be_repeated_stand_alone_and_say_none():
    sweep = flags("--devices 8 --devices 16 --pad-microbatches --max-tokens none,70000,none --policy ffd --policy bfd")
    assert sweep.base == {"pad_microbatches": True, "policy": ("ffd", "bfd")}
    assert [f.values for f in sweep.factors] == [(8, 16), (None, 70_000)]


def test_flags_win_over_a_sweep_file():
    sweep = flags("paper-parametric --minibatches 7 --scale 0.5 --minibatch-size 2,3 --max-tokens 70000,80000")
    assert sweep.base["minibatches"] == 7
    assert {f.field: f.values for f in sweep.factors} == {
        "minibatch_size": (2, 3),
        "max_tokens": (70_000, 80_000),
        "devices": (1, 2, 4, 8, 16, 32),
    }
    assert sweep.factors[0].label == "minibatch size"
    assert sweep.factors[1].label == ""  # other values of max_tokens are no packing ratios
    assert sweep.base["scale"] == 0.5


def test_a_study_file_is_the_base(tmp_path):
    (tmp_path / "mine.csv").write_text("length\n5\n9\n")
    study = tmp_path / "study.toml"
    study.write_text('lengths = "mine.csv"\ndevices = 2\nminibatches = 5\n')
    sweep = flags("--minibatch-size 1,2 --minibatches 3", config=study, mode="one-at-a-time")
    assert sweep.base == {"lengths": tmp_path / "mine.csv", "devices": 2, "minibatches": 3}
    assert (sweep.name, sweep.mode) == ("sweep-mine", "one-at-a-time")


def test_a_sweep_file_of_ones_own(tmp_path):
    (tmp_path / "mine.txt").write_text("5\n9\n")
    path = tmp_path / "s.toml"
    path.write_text(
        '[sweep]\nname = "s"\n[study]\nlengths = "mine.txt"\n'
        '[[factor]]\nfield = "policy"\nvalues = [["lb-mini"], ["ffd", "bfd"]]\n'
    )
    sweep = load_sweep(path)
    assert sweep.base == {"lengths": tmp_path / "mine.txt"}
    assert sweep.factors[0].values == (("lb-mini",), ("ffd", "bfd"))
    assert sweep.factors[0].show(("ffd", "bfd")) == "ffd bfd"


# ---- mistakes

FILE = '[sweep]\nname = "s"\n[[factor]]\nfield = "devices"\n'


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (FILE + "values = [1, 'x']", "factor[0].values[1]: got 'x', expected a valid integer"),
        (FILE + "values = []", "factor.0.values: got []: List should have at least 1 item"),
        (FILE + "values = [2, 2]", "factor[0].values: a value of devices is given twice"),
        (FILE + "values = [1, 2]\nshown_as = [1]", "factor[0].shown_as: got 1 entries, expected one for each of 2"),
        (FILE + "values = [1, 2]\nlable = 'x'", "unknown field factor.0.lable"),
        (FILE.replace("devices", "devcies") + "values = [1]", "unknown field 'devcies': did you mean 'devices'?"),
        (FILE + "values = [1]\n[study]\nseed = -1", "study.seed: got -1, expected greater than or equal to 0"),
        (FILE + "values = [1]\n[study]\nsede = 1", "unknown field 'sede': did you mean 'seed'?"),
        (FILE + "values = [1]\n" + FILE.partition("\n[[")[1] + FILE.partition("\n[[")[2] + "values = [2]", "twice"),
        ("[sweep]\nname = 's'", "factor is missing: a sweep file needs [sweep] name and at least one [[factor]]"),
        ("[sweep", "not valid TOML"),
        ("devices = 3", "sweep is missing"),
    ],
)
def test_a_wrong_sweep_file_is_named_with_the_field(tmp_path, content, message):
    path = tmp_path / "s.toml"
    path.write_text(content)
    with pytest.raises(InputError) as error:
        load_sweep(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--devcies 1,2", "unknown field 'devcies': did you mean 'devices'?"),
        ("--devices 1,x", "--devices: got 'x', expected a valid integer"),
        ("--devices 0,1", "--devices: got '0', expected greater than or equal to 1"),
        ("--overlong cut,drop", "--overlong: got 'cut', expected 'error', 'drop', 'clip' or 'scale'"),
        ("--devices", "--devices: got no value, expected one value or a comma list"),
        ("--devices ,", "--devices: got ',', expected a value or a comma list of values, none of them empty"),
        ("--devices 1,,2", "none of them empty"),
        ("--minibatches 3", "nothing to vary: give a field a comma list, as in --minibatch-size 1,2,4,8"),
        ("--devices 3,3", "nothing to vary"),
        ("-z 3", "unknown option '-z'"),
        ("one two", "got 'two' after the sweep 'one'"),
        ("paper-param", "unknown sweep 'paper-param': did you mean 'paper-parametric'?"),
        ("none.toml", "none.toml: no such sweep file"),
        (".toml/x.toml", "no such sweep file"),
        ("paper-parametric --config study.toml", "give one of them"),
        ("--devices 1,2 --config none.toml", "none.toml: no such study file"),
        ("--devices 1,2 --workload longaling", "unknown workload 'longaling': did you mean 'longalign'?"),
        ("--workload longalign,swesmiht", "unknown workload 'swesmiht': did you mean 'swesmith'?"),
        ("--model qwen2.5-7b,qwen2.5-7", "unknown model 'qwen2.5-7'"),
        ("--hardware h200,generic", "unknown hardware 'h200'"),
        ("--devices 1,2 --policy lb-maxi", "unknown policy 'lb-maxi': did you mean 'lb-mini'?"),
        ("--devices 1,2 --schedule ocd", "unknown schedule 'ocd': did you mean 'odc'?"),
        ("--devices 1,2 --lengths none.txt", "none of 2 points can run: none.txt: no such file"),
        ("--devices 1,2 --out file.txt", "file.txt: is a file, expected a directory"),
        ("--devices 1,2 --jobs 0", "--jobs: got 0, expected at least 1"),
        ("--devices 1,2 --backend dsk", "unknown backend 'dsk': did you mean 'dask'?"),
        ("--devices 1,2 --backend dask", "--backend dask needs --address HOST:PORT"),
        ("--devices 1,2 --backend dask --address here", "--address: got 'here', expected HOST:PORT"),
        ("--devices 1,2 --backend dask --address 127.0.0.1:1", "127.0.0.1:1: no dask scheduler answers there"),
        ("--devices 1,2 --address 127.0.0.1:1", "add --backend dask or --backend ray"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file.txt").write_text("")
    result = CliRunner().invoke(app, ["sweep", "--jobs", "1", *arguments.split()])
    assert result.exit_code == 2, result.output + repr(result.exception)
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


# ---- runs


def test_a_second_run_repeats_nothing_and_a_changed_field_is_another_point(tmp_path):
    first = run_sweep(small(), tmp_path, jobs=1)
    assert (first.reused, len(first.outcomes), first.notes) == (0, 6, ())
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()}
    again = run_sweep(small(), tmp_path, jobs=1)
    assert again.reused == 6
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "points").iterdir()} == before
    assert [o.rows for o in again.outcomes] == [o.rows for o in first.outcomes]
    assert run_sweep(small(seed=1), tmp_path, jobs=1).reused == 0
    assert len(list((tmp_path / "points").iterdir())) == 12


@pytest.mark.parametrize("damage", ["", "{", "[]", "other", "no rows", "odd rows"])
def test_a_damaged_point_is_computed_again_with_a_note(tmp_path, damage):
    first = run_sweep(small(), tmp_path, jobs=1)
    path = tmp_path / "points" / f"{first.outcomes[2].key}.json"
    whole = json.loads(path.read_text())
    texts = {
        "other": json.dumps({**whole, "point": "0" * 24}),
        "no rows": json.dumps({k: v for k, v in whole.items() if k != "bounds"}),
        "odd rows": json.dumps({**whole, "rows": 5}),
    }
    path.write_text(texts.get(damage, damage))
    again = run_sweep(small(), tmp_path, jobs=1)
    assert again.reused == 5
    assert len(again.notes) == 1
    assert "damaged, computed again" in again.notes[0]
    assert [o.rows for o in again.outcomes] == [o.rows for o in first.outcomes]
    assert json.loads(path.read_text())["rows"] == whole["rows"]


def test_the_key_follows_the_content_of_files_and_not_how_defaults_are_written(tmp_path):
    assert point_key(Study()) == point_key(Study(devices=8))
    assert point_key(Study()) != point_key(Study(devices=4))
    lengths = tmp_path / "l.txt"
    lengths.write_text("5\n")
    before = point_key(Study(lengths=lengths))
    lengths.write_text("6\n")
    assert point_key(Study(lengths=lengths)) != before


def test_the_key_follows_a_built_in_calibration(monkeypatch, tmp_path):
    h200 = Study(hardware="h200-nvlink", devices=2)
    before = point_key(h200)
    toml, calibration = machine_files("h200-nvlink")
    assert (toml.name, calibration.name) == ("h200-nvlink.toml", "h200-nvlink-2gpu-refined.json")
    newer = tmp_path / "newer.json"
    newer.write_text(calibration.read_text().replace("2026", "2027"))
    monkeypatch.setattr("odc_sim.machine.machine_files", lambda _: [toml, newer])
    assert point_key(h200) != before
    monkeypatch.undo()
    assert point_key(h200) == before
    assert [path.name for path in machine_files("generic")] == ["generic.toml"]
    assert machine_files(str(newer)) == [newer]


def test_points_that_cannot_run_are_rows_with_their_verdict(tmp_path):
    (tmp_path / "l.txt").write_text("5\n7\n9\n")
    base = {**QUICK, "lengths": tmp_path / "l.txt", "device_speed": (1.0, 0.5)}
    found = run_sweep(
        Sweep(name="s", base=base, factors=(Factor(field="devices", values=(2, 4)),)), tmp_path / "out", jobs=1
    )
    assert "device_speed: got 2 values, expected one for each of 4 devices" in found.outcomes[1].verdict
    del base["device_speed"]
    sweep = Sweep(name="s", base=base, factors=(Factor(field="devices", values=(2, 4)),))
    found = run_sweep(sweep, tmp_path / "out", jobs=1)
    assert "got 3 samples, expected at least one for each of 4 devices" in found.outcomes[1].verdict
    rows = list(csv.DictReader(csv_text(found).splitlines()))
    assert [row["devices"] for row in rows] == ["2", "2", "2", "2", "4"]
    assert (rows[4]["schedule"], rows[4]["speedup"]) == ("collective odc", "")
    assert "got 3 samples" in rows[4]["verdict"]
    (tmp_path / "l.txt").write_text("5\n7\n9\n8\n")
    assert run_sweep(sweep, tmp_path / "out", jobs=1).outcomes[1].results is not None
    factor_figure(found, sweep.factors[0])  # a line may have gaps


def test_points_with_other_samples_are_told_apart(tmp_path):
    found = run_sweep(flags("--overlong clip --max-tokens 30000,60000 --devices 2 --minibatches 2"), tmp_path, jobs=1)
    assert found.notes == ("with --overlong clip points of different max_tokens have different samples",)
    assert run_sweep(flags("--overlong clip --devices 1,2 --minibatches 2"), tmp_path, jobs=1).notes == ()


def test_a_sweep_over_lengths_is_named_after_none_of_them():
    assert flags("--workload longalign,swesmith").name == "sweep-lengths"
    assert flags("--workload swesmith --devices 1,2").name == "sweep-swesmith"


def test_tables_hold_the_best_of_stock_fsdp2_however_much_odc_gains(tmp_path):
    base = Study(minibatches=3, devices=8, policy=("lpt", "lb-micro", "lb-mini", "cost-rows")).model_dump()
    found = run_sweep(
        Sweep(name="s", base=base, factors=(Factor(field="minibatch_size", values=(4,)),)), tmp_path, jobs=1
    )
    ran = found.outcomes[0].ran
    stock = {label: row.speedup for label, row in ran.items() if not label.startswith("odc") and not row.verdict}
    del stock[found.baseline]
    labels = found.labels(found.sweep.factors[0], most=4)
    assert len(labels) == 4
    assert [label for label in labels if label in stock] == [max(stock, key=stock.get)]
    assert found.baseline in labels
    assert max(ran, key=lambda label: ran[label].speedup) in labels


def test_the_command_prints_a_table_a_factor_and_writes_files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = ["sweep", "--devices", "2,4", "--minibatch-size", "1,2", "--minibatches", "3", "--jobs", "1"]
    command += ["--policy", "lb-micro,lb-mini"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "devices; others at minibatch size 1" in result.stdout
    assert "minibatch size; others at devices 2" in result.stdout
    assert "largest gain: " in result.stdout
    assert "sources: compute " in result.stdout
    assert "highest throughput: " in result.stdout
    assert "collective with lb-mini, 4 points, such as devices 2, minibatch size 1: microbatch counts" in result.stdout
    out = tmp_path / "reports" / "sweep-longalign"
    assert {path.name for path in out.iterdir()} == {
        *("points", "sweep.csv", "sweep.json", "sweep-devices.png", "sweep-minibatch_size.png")
    }
    rows = list(csv.DictReader((out / "sweep.csv").open()))
    assert list(rows[0])[:2] == ["devices", "minibatch_size"]
    assert len(rows) == 4 * 8
    data = json.loads((out / "sweep.json").read_text())
    assert data["schema_version"] == 1
    assert data["sweep"]["mode"] == "grid"
    assert [point["settings"] for point in data["points"]][1] == {"devices": 2, "minibatch_size": 2}
    assert {path.stem for path in (out / "points").iterdir()} == {point["point"] for point in data["points"]}
    again = CliRunner().invoke(app, [*command[:3], "--minibatch-size", "1", *command[5:]])
    assert "2 of 2 points were finished before" in again.stderr
    assert not (out / "sweep-minibatch_size.png").exists()


def test_help_lists_every_field():
    text = CliRunner().invoke(app, ["sweep", "--help"]).stdout
    for name in Study.model_fields:
        assert f"--{name.replace('_', '-')}" in text
    assert "Example:  odc sweep --workload longalign --minibatch-size 1,2,4,8" in text


@pytest.mark.parametrize(
    ("values", "expected", "log"),
    [
        ([1, 2, 4, 8], [1, 2, 4, 8], True),
        ([8, 24, 64], [8, 24, 64], True),
        ([1, 2, 3], [1, 2, 3], False),
        ([0, 1, 10], [0, 1, 10], False),
        ([1, 2, 3, 4, 100], [1, 2, 3, 4, 100], False),
        (["a", "b"], [0, 1], False),
        ([None, 8, 16], [0, 1, 2], False),
        ([True, False], [0, 1], False),
    ],
)
def test_geometric_values_get_a_log_axis_and_names_stand_side_by_side(values, expected, log):
    assert positions(values) == (expected, log)


# ---- other machines, and sudden ends


def test_points_run_on_a_dask_cluster(tmp_path):
    distributed = pytest.importorskip("distributed")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=False, protocol="tcp://", dashboard_address=None
    )
    with cluster:
        found = run_sweep(small(), tmp_path / "dask", backend="dask", address=cluster.scheduler_address)
    assert len(list((tmp_path / "dask" / "points").iterdir())) == 6
    here = run_sweep(small(), tmp_path / "here", jobs=1)
    assert [o.rows for o in found.outcomes] == [o.rows for o in here.outcomes]


def test_a_dask_cluster_without_workers_is_refused(tmp_path, monkeypatch):
    distributed = pytest.importorskip("distributed")
    monkeypatch.setattr("odc_sim.sweep_backends.WORKER_SECONDS", 0.1)
    with (
        distributed.LocalCluster(n_workers=0, processes=False, protocol="tcp://", dashboard_address=None) as cluster,
        pytest.raises(InputError, match=r"cannot use the dask cluster: no worker within"),
    ):
        run_sweep(small(), tmp_path, backend="dask", address=cluster.scheduler_address)


MODEL = {
    "model_type": "qwen2",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
POINTS = 200


def start(folder, *more):
    """200 cheap points in a process group of its own."""
    seeds = ",".join(map(str, range(POINTS)))
    fields = ["--seed", seeds, "--minibatches", "4", "--devices", "2", "--model", "config.json", "--policy", "lb-micro"]
    command = [sys.executable, "-m", "cli", "sweep", *fields, "--schedule", "collective,odc", "--out", "out", *more]
    (folder / "config.json").write_text(json.dumps(MODEL))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=folder, start_new_session=True, **pipes)


def finished(folder):
    return {path: path.stat().st_mtime_ns for path in folder.glob("out/points/*.json")}


def stop(process, folder, number, least):
    deadline = time.monotonic() + 60
    while len(finished(folder)) < least:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.killpg(process.pid, number)
    return process.communicate(timeout=60)


def test_200_points_survive_kill_9_and_go_on_without_repeating_any(tmp_path):
    stop(start(tmp_path, "--jobs", "2"), tmp_path, signal.SIGKILL, 60)
    before = finished(tmp_path)
    assert 60 <= len(before) < POINTS
    process = start(tmp_path, "--jobs", "2")
    output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    after = finished(tmp_path)
    assert len(after) == POINTS
    assert {path: after[path] for path in before} == before
    assert f"{len(before)} of {POINTS} points were finished before" in errors
    assert "damaged" not in output
    rows = list(csv.DictReader((tmp_path / "out" / "sweep.csv").open()))
    assert [row["seed"] for row in rows[::2]] == [str(seed) for seed in range(POINTS)]


def test_ctrl_c_keeps_finished_points(tmp_path):
    output, errors = stop(process := start(tmp_path, "--jobs", "1"), tmp_path, signal.SIGINT, 5)
    assert process.returncode == 130
    assert (output, errors.count("\n")) == ("", 1)
    assert "interrupted: finished points are in out/points; the same command goes on" in errors
    assert 5 <= len(finished(tmp_path)) < POINTS


# ---- the paper's parametric study


def test_sweeps_and_workloads_lie_side_by_side_and_are_told_apart():
    assert builtin_sweeps() == ["paper-parametric"]
    assert "paper-parametric" not in builtin_workloads()
    files = {path.stem: tomllib.loads(path.read_text()) for path in data_dir("workloads").glob("*.toml")}
    assert sorted(builtin_sweeps() + builtin_workloads()) == sorted(files)


@pytest.fixture(scope="module")
def parametric(tmp_path_factory):
    sweep = flags("paper-parametric --minibatches 40")
    return run_sweep(sweep, tmp_path_factory.mktemp("parametric"), jobs=1)


def gains(found, field):
    factor = next(factor for factor in found.sweep.factors if factor.field == field)
    rows = found.line(factor, "odc/lb-mini")
    return {factor.show(value): row.speedup for value, row in zip(factor.values, rows, strict=True)}


def test_the_shipped_study_has_the_papers_setting_and_axes(parametric):
    assert len(parametric.outcomes) == 5 + 5 + 4 + 6 - 3  # the base is a value of each of the four factors
    axes = {factor.title: [factor.show(v) for v in factor.values] for factor in parametric.sweep.factors}
    assert axes == {
        "minibatch size (samples a device)": [1, 2, 4, 8, 16],
        "longest sample (K tokens)": [8, 16, 32, 64, 128],
        "packing ratio": [1, 2, 4, 8],
        "devices": [1, 2, 4, 8, 16, 32],
    }
    ratios = [o for o in parametric.outcomes if o.point.settings["max_tokens"]]
    assert [o.rows[0].max_tokens for o in ratios] == [2 * 65_536, 4 * 65_536, 8 * 65_536]
    longest = {o.point.settings["scale"]: o.rows[0].max_tokens for o in parametric.outcomes if o not in ratios}
    assert longest == {s: int(s * 65_536) for s in (0.125, 0.25, 0.5, 1.0, 2.0)}


def test_the_gain_peaks_at_a_moderate_minibatch(parametric):
    gain = gains(parametric, "minibatch_size")
    assert gain[1] == pytest.approx(1.0, abs=0.01)
    assert max(gain, key=gain.get) in (2, 4, 8)
    assert gain[1] < gain[2] < gain[4] > gain[8] > gain[16] > 1.05


def test_the_gain_rises_with_length_until_the_longest_sample_alone_binds(parametric):
    gain = gains(parametric, "scale")
    assert gain[8] < gain[16] < gain[32] < gain[64]
    assert gain[128] > gain[16]
    bounds = [outcome.results.bounds for outcome in parametric.along(parametric.sweep.factors[1])]
    # squares of lengths outgrow lengths: the longest sample's share of a minibatch rises, and with it the floor
    assert all(more > less for less, more in pairwise([b["largest_sample"] / b["balanced_share"] for b in bounds]))
    assert bounds[-1]["speedup"] < bounds[-2]["speedup"]


def test_the_gain_rises_with_devices_and_one_device_has_none(parametric):
    gain = gains(parametric, "devices")
    assert gain[1] == pytest.approx(1.0, abs=5e-4)
    assert all(more > less for less, more in pairwise([gain[d] for d in (1, 2, 4, 8)]))
    assert min(gain[16], gain[32]) > gain[4]


def test_the_gain_falls_with_the_packing_ratio(parametric):
    gain = gains(parametric, "max_tokens")
    assert gain[1] > gain[2] + 0.1
    assert gain[2] >= gain[4] >= gain[8] > 1.0


def test_the_committed_study_is_what_the_simulator_says_today(tmp_path):
    """With all its minibatches, at the point with most ports to share."""
    committed = Path(__file__).parent.parent / "reports" / "parametric" / "sweep.csv"
    with committed.open() as file:
        rows = [row for row in csv.DictReader(file) if row["devices"] == "32"]
    sweep = flags("paper-parametric --devices 32,8 --minibatch-size 4 --max-tokens 65536 --scale 1")
    outcome = next(o for o in run_sweep(sweep, tmp_path, jobs=1).outcomes if o.point.settings["devices"] == 32)
    ran = [row for row in rows if row["speedup"]]
    assert len(ran) >= 4
    for row in ran:
        now = outcome.results.row(row["schedule"], row["policy"])
        assert now.speedup == pytest.approx(float(row["speedup"]), rel=1e-6)
        assert now.peak_memory_bytes["total"] == pytest.approx(float(row["peak_memory_bytes_total"]), rel=1e-6)
