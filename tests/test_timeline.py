"""timeline.parquet and timeline.json: what is kept, what is refused, and that idle time adds up."""

import json
import math
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.durations import CAUSES, Durations, no_stretch
from odc_sim.engine_event import play
from odc_sim.errors import InputError
from odc_sim.header import write_bytes, write_json
from odc_sim.idle import Span
from odc_sim.schedules import SCHEDULES, make_schedule
from odc_sim.timeline import COLUMNS, METADATA_KEY, Timeline, chrome_trace, idle_by_cause, read_timeline

ONE = "expected one span at a time"


def span(start_s, end_s, *, rank=0, stream="compute", kind="forward", cause="", unit=1, microbatch=0):
    return Span(rank, stream, kind, cause, unit, microbatch, start_s, end_s)


def durations(seed, ranks=3, layers=3, microbatches=2):
    """Two minibatches of random durations, every rank with all its microbatches."""
    rng = np.random.default_rng(seed)
    shape = (2, microbatches, layers + 2, ranks)
    units = [rng.exponential(0.3, layers + 1) for _ in range(7)]
    names = ("gather_s", "reduce_s", "copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")
    stretch = no_stretch(2, microbatches, ranks)
    forward_s, backward_s = rng.exponential(1.0, shape), rng.exponential(2.0, shape)
    return Durations(
        counts=np.full((2, ranks), microbatches),
        forward_s=forward_s,
        backward_s=backward_s,
        slot_class=np.arange(layers + 2),
        gather_forward_stretch=stretch,
        gather_backward_stretch=stretch,
        reduce_stretch=stretch,
        host_forward_s=0.05,
        host_backward_s=0.05,
        optimizer_s=0.3,
        publish_s=0.2,
        busy_s=(forward_s + backward_s).sum((1, 2)),
        compute_slowdown_s=np.zeros((2, ranks)),
        floor_s=np.zeros((2, ranks)),
        **dict(zip(names, units, strict=True)),
    )


@pytest.fixture(scope="module")
def played():
    """(timeline, spans of minibatch 0, spans of minibatch 1) of the schedule odc."""
    t, schedule = durations(0), make_schedule("odc")
    spans = [play(t, schedule, b)[1] for b in range(2)]
    return Timeline.from_spans(enumerate(spans)), *spans


@pytest.fixture
def error_of(tmp_path, played):
    """The message for a timeline.parquet after `change(table) -> table`, without the path that starts it."""

    def message(change):
        path = tmp_path / "changed.parquet"
        played[0].write_parquet(path, "a test")
        pq.write_table(change(pq.read_table(path)), path)
        with pytest.raises(InputError) as caught:
            read_timeline(path)
        line = str(caught.value)
        assert line.startswith(f"{path}: ")
        assert "\n" not in line
        return line.removeprefix(f"{path}: ")

    return message


def replaced(name, values):
    """A change of one column's values; the schema, its metadata included, is kept."""

    def change(table):
        index = table.column_names.index(name)
        return table.set_column(index, table.schema.field(index), pa.array(values(table.column(name).to_pylist())))

    return change


def with_metadata(**fields):
    def change(table):
        data = json.loads(table.schema.metadata[METADATA_KEY]) | fields
        return table.replace_schema_metadata({METADATA_KEY: json.dumps(data)})

    return change


def test_every_span_of_the_engine_becomes_a_row_in_its_order(played):
    timeline, first, second = played
    assert len(timeline) == len(first) + len(second)
    assert timeline.spans(0) == first
    assert timeline.spans(1) == second
    assert timeline.spans(2) == []
    assert timeline.minibatch.dtype == timeline.unit.dtype == np.int32
    assert timeline.start_s.dtype == np.float64


def test_a_timeline_without_spans_is_one():
    timeline = Timeline.from_spans([])
    assert len(timeline) == 0
    assert set(idle_by_cause(timeline).values()) == {0.0}
    assert chrome_trace(timeline)["traceEvents"] == []


def test_parquet_keeps_every_value_and_carries_the_header(tmp_path, played):
    path = tmp_path / "new" / "timeline.parquet"
    played[0].write_parquet(path, "odc simulate --seed 7", seed=7)
    table = pq.read_table(path)
    assert tuple(table.column_names) == COLUMNS
    meta = json.loads(table.schema.metadata[METADATA_KEY])
    assert (meta["schema_version"], meta["command"], meta["seed"]) == (1, "odc simulate --seed 7", 7)
    back = read_timeline(path)
    for name in COLUMNS:
        np.testing.assert_array_equal(getattr(back, name), getattr(played[0], name))
    assert [p.name for p in path.parent.iterdir()] == ["timeline.parquet"]


def test_an_empty_timeline_survives_parquet(tmp_path):
    Timeline.from_spans([]).write_parquet(tmp_path / "t.parquet", "a test")
    assert len(read_timeline(tmp_path / "t.parquet")) == 0


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10**6), name=st.sampled_from([s.name for s in SCHEDULES]), ranks=st.integers(1, 4))
def test_idle_by_cause_is_what_the_ranks_did_not_compute(seed, name, ranks):
    t = durations(seed, ranks=ranks)
    made = [play(t, make_schedule(name), b) for b in range(2)]
    timeline = Timeline.from_spans((b, spans) for b, (_, spans) in enumerate(made))
    idle = idle_by_cause(timeline)
    assert tuple(idle) == CAUSES
    for cause in CAUSES:
        spans = [s for _, spans in made for s in spans if s.stream == "compute" and s.cause == cause]
        assert idle[cause] == pytest.approx(math.fsum(s.end_s - s.start_s for s in spans), rel=1e-9, abs=1e-12)
    total_s = ranks * sum(makespan_s for makespan_s, _ in made) - float(t.busy_s.sum())
    assert sum(idle.values()) == pytest.approx(total_s, rel=1e-9)


def test_idle_by_cause_by_hand():
    spans = [
        span(0.0, 2.0),
        span(2.0, 3.5, kind="wait", cause="imbalance_layer"),
        span(3.5, 4.0, kind="optimizer", cause="optimizer", unit=-1),
        span(0.0, 3.0, rank=1, kind="wait", cause="imbalance_layer"),
        span(0.0, 9.0, rank=1, stream="unshard", kind="unshard"),
        span(0.0, 9.0, rank=1, stream="host", kind="wait", cause="host"),
    ]
    idle = idle_by_cause(Timeline.from_spans([(4, spans)]))
    assert {cause: s for cause, s in idle.items() if s} == {"imbalance_layer": 4.5, "optimizer": 0.5}


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        (
            [span(0.0, 2.0), span(1.0, 3.0)],
            "timeline: rows 0 and 1 overlap on the compute stream of rank 0 in minibatch 5, " + ONE,
        ),
        (
            [span(5.0, 6.0, rank=2, stream="reduce", kind="reduce")] * 2,
            "timeline: rows 0 and 1 overlap on the reduce stream of rank 2 in minibatch 5, " + ONE,
        ),
        (
            [span(0.0, 1.0), span(3.0, 2.0)],
            "timeline: row 1: got start_s 3.0 and end_s 2.0, expected finite times and end_s >= start_s",
        ),
        (
            [span(0.0, math.nan)],
            "timeline: row 0: got start_s 0.0 and end_s nan, expected finite times and end_s >= start_s",
        ),
        (
            [span(0.0, 1.0, stream="copy_in")],
            "timeline: column 'stream': row 0 is 'copy_in', expected one of compute, unshard, reduce, host",
        ),
        (
            [span(0.0, 1.0), span(1.0, 2.0, kind="forwarded")],  # as long as no known word
            "timeline: column 'kind': row 1 is 'forwarded', expected one of forward, backward, recompute, head_loss, "
            "unshard, reduce, optimizer, publish, wait",
        ),
        (
            [span(0.0, 1.0, kind="wait", cause="imbalance_microbatches")],  # longer than any known word
            "timeline: column 'cause': row 0 is 'imbalance_microbatches', expected one of (empty), imbalance_layer, "
            "imbalance_microbatch, imbalance_minibatch, port_contention, exposed_unshard, exposed_reduce, "
            "compute_slowdown, host, optimizer, publish",
        ),
    ],
)
def test_spans_that_cannot_be_are_refused(spans, message):
    with pytest.raises(InputError) as caught:
        Timeline.from_spans([(5, spans)])
    assert str(caught.value) == message


def test_spans_may_touch_overlap_by_rounding_and_share_time_with_other_streams_ranks_and_minibatches():
    spans = [span(0.0, 1.0), span(1.0 - 1e-10, 2.0), span(0.5, 1.5, rank=1), span(0.5, 1.5, stream="host")]
    Timeline.from_spans([(0, spans), (1, spans)])
    with pytest.raises(InputError, match="rows 0 and 1 overlap"):
        Timeline.from_spans([(0, [span(0.0, 1.0), span(1.0 - 1e-8, 2.0)])])


def test_files_that_are_no_timeline_are_refused(tmp_path):
    def message(path):
        with pytest.raises(InputError) as caught:
            read_timeline(path)
        return str(caught.value).replace(str(path), "PATH")

    assert message(tmp_path / "absent") == "PATH: no such file"
    assert message(tmp_path) == "PATH: is a directory, expected a timeline.parquet"
    text = tmp_path / "text"
    text.write_text("minibatch,rank\n0,0\n")
    assert message(text) == "PATH: not a Parquet file, expected a timeline.parquet"
    other = tmp_path / "other.parquet"
    pq.write_table(pa.table({"length": [1, 2]}), other)
    missing = "PATH: metadata field 'odc_timeline' is missing, expected a timeline that this toolkit wrote"
    assert message(other) == missing
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({METADATA_KEY: "{"}), other)
    assert message(other) == "PATH: metadata field 'odc_timeline' is not valid JSON"


def test_a_damaged_timeline_is_refused(tmp_path, played):
    path = tmp_path / "cut.parquet"
    played[0].write_parquet(path, "a test")
    data = bytearray(path.read_bytes())
    data[40:400] = bytes(360)
    path.write_bytes(data)
    with pytest.raises(
        InputError, match=r"cut\.parquet: (cannot be read: it is cut off or damaged|not a Parquet file)"
    ):
        read_timeline(path)


def test_columns_and_header_fields_are_named_in_the_refusal(error_of):
    assert error_of(lambda t: t.drop_columns(["unit"])) == (
        "column 'unit' is missing, expected minibatch, rank, stream, kind, cause, unit, microbatch, start_s, end_s"
    )
    assert error_of(lambda t: t.append_column("power_w", pa.array([1.0] * len(t)))) == (
        "unknown column 'power_w'; written by a newer version?"
    )
    assert error_of(lambda t: t.set_column(1, "rank", t.column("rank").cast("string"))) == (
        "column 'rank': got type string, expected int32"
    )
    assert error_of(replaced("cause", lambda values: [None, None, *values[2:]])) == (
        "column 'cause': has 2 empty values, expected none"
    )
    assert error_of(replaced("stream", lambda values: ["gpu", *values[1:]])) == (
        "column 'stream': row 0 is 'gpu', expected one of compute, unshard, reduce, host"
    )
    assert error_of(replaced("end_s", lambda values: [-1.0, *values[1:]])).endswith(
        "and end_s -1.0, expected finite times and end_s >= start_s"
    )
    assert error_of(with_metadata(schema_version=2)).startswith("field 'schema_version': got 2, expected 1; ")
    assert error_of(with_metadata(environment=[])) == ("field 'environment': got a JSON array, expected a JSON object")


def test_chrome_trace_is_what_perfetto_expects(tmp_path, played):
    timeline, first, _ = played
    path = tmp_path / "timeline.json"
    write_json(path, chrome_trace(timeline), indent=None)
    events = json.loads(path.read_text())["traceEvents"]
    named = {(e["name"], e["pid"], e["tid"]): e["args"] for e in events if e["ph"] == "M"}
    assert named["process_name", 2, 0] == {"name": "rank 2"}
    assert [named["thread_name", 0, tid]["name"] for tid in range(3)] == ["compute", "unshard", "reduce"]
    bars = [e for e in events if e["ph"] == "X"]
    assert len(bars) == len(first)
    assert len(events) == len(bars) + len(named)
    for bar, made in zip(bars, first, strict=True):
        assert all(type(bar[key]) in (int, float) for key in ("ts", "dur", "pid", "tid"))
        assert bar["ts"] == pytest.approx(made.start_s * 1e6, abs=1e-3)
        assert bar["dur"] == pytest.approx((made.end_s - made.start_s) * 1e6, abs=2e-3)
        assert bar["name"] == (made.cause if made.kind == "wait" else made.kind)
        assert (bar["args"]["unit"], bar["args"]["microbatch"], bar["args"]["cause"]) == (
            made.unit,
            made.microbatch,
            made.cause,
        )
    assert_tracks_do_not_overlap(bars)


def assert_tracks_do_not_overlap(bars):
    tracks = {}
    for bar in bars:
        tracks.setdefault((bar["pid"], bar["tid"]), []).append((bar["ts"], bar["ts"] + bar["dur"]))
    assert len(tracks) == 9  # three ranks, three streams
    for times in tracks.values():
        times.sort()
        assert all(a_end <= b_start + 1e-6 for (_, a_end), (b_start, _) in pairwise(times))


def test_chrome_trace_lines_minibatches_up(played):
    timeline, first, second = played
    bars = [e for e in chrome_trace(timeline, minibatches=2)["traceEvents"] if e["ph"] == "X"]
    assert len(bars) == len(first) + len(second)
    assert_tracks_do_not_overlap(bars)
    end_us = max(s.end_s for s in first) * 1e6
    assert min(b["ts"] for b in bars if b["args"]["minibatch"] == 1) == pytest.approx(end_us, abs=1e-2)


def test_written_bytes_are_whole_or_absent(tmp_path, monkeypatch):
    path = tmp_path / "a" / "file"
    write_bytes(path, b"old")
    assert path.read_bytes() == b"old"

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_paths_that_cannot_be_written_are_named(tmp_path):
    with pytest.raises(InputError) as caught:
        write_bytes(tmp_path, b"")
    assert str(caught.value) == f"{tmp_path}: is a directory, expected the name of the file to write"
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "below"
    with pytest.raises(InputError) as caught:
        write_bytes(path, b"")
    assert str(caught.value) in (
        f"{path}: cannot be written: {reason}; choose another path" for reason in ("File exists", "Not a directory")
    )


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="nothing lists the threads here")
def test_reading_starts_no_thread(tmp_path):
    """Arrow's threads abort a process that ends while they start, with exit code 134 in place of its own."""
    Timeline.from_spans([(0, [Span(0, "compute", "forward", "", 1, 0, 0.0, 1.0)])]).write_parquet(tmp_path / "a", "x")
    pq.write_table(pq.ParquetFile(tmp_path / "a").read().replace_schema_metadata(None), tmp_path / "b")
    script = """
import os, sys
import pandas
from odc_sim.measured import read_measured
from odc_sim.timeline import read_timeline
before = len(os.listdir("/proc/self/task"))
read_timeline(sys.argv[1])
read_measured(sys.argv[2])
print(len(os.listdir("/proc/self/task")) - before)
"""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", script, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.stdout == "0\n", done.stderr
