"""The directory a study writes: which files, whole or not at all, and what is said when it cannot be."""

import csv
import json
import os
from pathlib import Path

import numpy as np
import pytest
from builders import make_results, make_row

from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.length_stats import length_stats
from odc_sim.report import write_report
from odc_sim.results import read_results
from odc_sim.timeline import Timeline, read_timeline

ALWAYS = ["results.csv", "results.json", "speedup.png", "idle.png", "lengths.png"]


def row_at(schedule, speedup):
    interval = (speedup - 0.1, speedup + 0.1)
    return make_row(
        schedule, "lb-micro", seed=3, speedup=speedup, speedup_ci95=interval, idle_causes={"imbalance_layer": 0.2}
    )


@pytest.fixture
def results():
    return make_results(
        (row_at("collective", 1.0), row_at("odc", 1.25)),
        bounds={"speedup": 1.4},
        advice="Use odc.",
        study={"seed": 3},
        lengths={"name": "longalign", **length_stats(np.array([1000, 2000, 30000])).as_dict()},
    )


@pytest.fixture
def spans():
    return [
        Span(0, "compute", "forward", "", 1, 0, 0.0, 1.0),
        Span(0, "compute", "wait", "imbalance_minibatch", -1, -1, 1.0, 2.0),
        Span(1, "compute", "forward", "", 1, 0, 0.0, 2.0),
    ]


def names(paths):
    return [path.name for path in paths]


def test_a_report_has_results_and_figures(tmp_path, results):
    out = tmp_path / "reports" / "mine"
    written = write_report(out, results, "odc simulate")
    assert names(written) == ALWAYS
    assert sorted(out.iterdir()) == sorted(written)  # and no temporary file
    assert read_results(out / "results.json") == results
    with (out / "results.csv").open(newline="") as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["schedule"], row["speedup"]) for row in rows] == [("collective", "1.0"), ("odc", "1.25")]
    for path in written[2:]:
        assert path.read_bytes().startswith(b"\x89PNG")


def test_timelines_are_written_where_there_are_any(tmp_path, results, spans):
    timeline = Timeline.from_spans([(b, spans) for b in range(3)])
    written = write_report(
        tmp_path, results, "odc simulate", panels=[("collective", 2.0, spans)], timelines={"timeline": timeline}
    )
    assert names(written) == [*ALWAYS, "timeline.png", "timeline.json", "timeline.parquet"]
    assert len(read_timeline(tmp_path / "timeline.parquet")) == 9
    trace = json.loads((tmp_path / "timeline.json").read_text())
    assert (trace["schema_version"], trace["command"], trace["seed"]) == (1, "odc simulate", 3)
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {bar["args"]["minibatch"] for bar in bars} == {0, 1}
    assert len(bars) == 6


def test_a_report_replaces_its_own_files_only(tmp_path, results):
    (tmp_path / "results.csv").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    write_report(tmp_path, results, "odc simulate")
    assert (tmp_path / "results.csv").read_text().startswith("workload,")
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_an_interrupted_report_has_whole_files_only(tmp_path, results, monkeypatch):
    write_report(tmp_path, results, "first")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    replace = os.replace

    def interrupted(source, target):
        if Path(target).name == "speedup.png":
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_report(tmp_path, results, "second")
    after = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert sorted(after) == sorted(before)
    assert json.loads(after["results.json"])["command"] == "second"
    assert after["speedup.png"] == before["speedup.png"]


def test_a_file_is_no_directory(tmp_path, results):
    path = tmp_path / "taken"
    path.write_text("")
    with pytest.raises(InputError) as caught:
        write_report(path, results, "odc simulate")
    assert str(caught.value) == f"{path}: is a file, expected a directory for the report; choose another with --out"


def test_a_directory_that_cannot_be_created_is_named(tmp_path, results):
    (tmp_path / "taken").write_text("")
    path = tmp_path / "taken" / "below"
    with pytest.raises(InputError) as caught:
        write_report(path, results, "odc simulate")
    line = str(caught.value)
    assert line.startswith(f"{path}: cannot be created: ")
    assert line.endswith("; choose another directory with --out")


def test_a_directory_that_cannot_be_written_is_named(tmp_path, results, monkeypatch):
    def refused(**_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("tempfile.mkstemp", refused)
    with pytest.raises(InputError) as caught:
        write_report(tmp_path, results, "odc simulate")
    path = tmp_path / "results.csv"
    assert str(caught.value) == f"{path}: cannot be written: Permission denied; choose another path"


def test_files_of_the_user_stay(tmp_path, results):
    mine = [tmp_path / "timeline-of-my-project.json", tmp_path / "timeline_notes.png"]
    for path in mine:
        path.write_text("mine")
    (tmp_path / "timeline.png").write_text("of an earlier study")
    (tmp_path / "timeline-baseline.json").mkdir()
    write_report(tmp_path, results, "odc simulate")
    assert all(path.read_text() == "mine" for path in mine)
    assert not (tmp_path / "timeline.png").exists()
