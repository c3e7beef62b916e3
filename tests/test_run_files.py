"""The folder of a run: written and read back, cut short, and every way in which it can be wrong."""

import math
from dataclasses import asdict, replace

import pytest

from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.plans import Plan, write_plan
from odc_sim.run_files import (
    STEP_COLUMNS,
    RunConfig,
    StepRow,
    append_steps,
    read_run,
    write_config,
    write_environment,
    write_steps,
)
from odc_sim.timeline import Timeline

CONFIG = RunConfig(
    schedule="odc",
    policy="lb-mini",
    model="qwen2.5-1.5b",
    device="cuda",
    compute="real",
    world_size=2,
    steps=3,
    seed=0,
    gather_dtype="bf16",
    reduce_dtype="fp32",
    recompute=True,
    chunked_loss_tokens=512,
    learning_rate=1e-5,
    max_grad_norm=1.0,
    time_scale=1.0,
    warmup_steps=1,
)
PLAN = Plan.from_nested(
    [[[[2 * m]], [[2 * m + 1]]] for m in range(3)],
    workload={"name": "test"},
    model="qwen2.5-1.5b",
    world_size=2,
    minibatch_size=1,
    max_tokens=64,
    policy="lb-mini",
    balancing_cost={"name": "tokens", "source": "test"},
    lengths=[10, 20, 30, 40, 50, 60],
    seed=0,
)


def step(minibatch, **fields):
    values = {
        "loss": 2.5,
        "grad_norm": 1.0,
        "makespan_s": 0.5,
        "tokens": 30,
        "samples": 2,
        "mfu": 0.4,
        "idle_rate": 0.1,
        "peak_memory_bytes": 10**9,
    }
    return StepRow(minibatch=minibatch, **(values | fields))


@pytest.fixture
def run(tmp_path):
    """A run of three minibatches of which two are finished."""
    write_plan(PLAN, tmp_path / "plan.json", "odc train")
    write_config(tmp_path, CONFIG, "odc train")
    write_environment(tmp_path, "odc train", 0, {"gpu": {"name": "NVIDIA H200"}})
    write_steps(tmp_path, [step(0), step(1, makespan_s=0.7)])
    return tmp_path


def test_written_and_read_back(run):
    found = read_run(run)
    assert found.config == CONFIG
    assert found.steps["makespan_s"].tolist() == [0.5, 0.7]
    assert found.steps["minibatch"].tolist() == [0, 1]
    assert math.isnan(found.steps["between_s"][0])
    assert found.environment["environment"]["gpu"] == {"name": "NVIDIA H200"}
    assert found.plan.num_minibatches == 3
    assert (found.timeline, found.calibration) == (None, None)
    assert (found.label, found.name) == ("odc/lb-mini", run.name)


@pytest.mark.parametrize("text", ["a 'b' \"c\" \\ \n\x7f\x01 \N{GRINNING FACE}", "x/config.json"])
def test_any_text_survives(run, text):
    write_config(run, replace(CONFIG, model=text, learning_rate=1e-30, time_scale=3), "odc 'x'")
    found = read_run(run).config
    assert (found.model, found.learning_rate, found.time_scale) == (text, 1e-30, 3.0)


def test_appended_rows_and_a_line_cut_short(run):
    append_steps(run, [step(2, loss=math.nan, mfu=math.nan, between_s=0.25)])
    assert read_run(run).steps["between_s"].tolist()[2] == 0.25
    assert math.isnan(read_run(run).steps["loss"][2])
    with (run / "steps.csv").open("a") as stream:
        stream.write("3,2.5,1.0,0.")
    assert read_run(run).steps["minibatch"].tolist() == [0, 1, 2]


def test_no_minibatch_finished(run):
    write_steps(run, [])
    assert read_run(run).steps["minibatch"].tolist() == []


def test_hardware_of_an_emulated_run(run):
    assert read_run(run).config.hardware == ""
    write_config(run, replace(CONFIG, hardware="h200-nvlink"))
    assert read_run(run).config.hardware == "h200-nvlink"


def test_append_begins_the_file(run):
    (run / "steps.csv").unlink()
    append_steps(run, [step(0)])
    assert len(read_run(run).steps) == 1


def test_steps_without_the_time_between(run):
    lines = (run / "steps.csv").read_text().splitlines()
    (run / "steps.csv").write_text("".join(line.rpartition(",")[0] + "\n" for line in lines))
    assert read_run(run).steps["between_s"].isna().all()


def test_timeline_of_finished_minibatches_only(run):
    spans = [Span(rank, "compute", "forward", "", 1, 0, 0.0, 1.0) for rank in range(2)]
    Timeline.from_spans([(m, spans) for m in range(3)]).write_parquet(run / "timeline.parquet", "odc train")
    assert sorted(set(read_run(run).timeline.minibatch.tolist())) == [0, 1]
    Timeline.from_spans([(0, [spans[0]._replace(rank=2)])]).write_parquet(run / "timeline.parquet", "odc train")
    with pytest.raises(InputError, match=r"timeline.parquet: has rank 2, expected 0 to 1 as in plan.json"):
        read_run(run)


@pytest.mark.parametrize("last", [0, 1])
def test_a_timeline_without_a_rank(run, last):
    """Its time would count as neither busy nor idle."""
    spans = [Span(rank, "compute", "optimizer", "", -1, -1, 0.0, 1.0) for rank in range(2)]
    minibatches = [(m, spans[: 1 if m == last else 2]) for m in range(last + 1)]
    Timeline.from_spans(minibatches).write_parquet(run / "timeline.parquet", "odc train")
    with pytest.raises(InputError, match=f"minibatch {last} has no spans of rank 1, expected every rank's"):
        read_run(run)


def test_calibration(run):
    text = (run / "environment.json").read_text()
    (run / "calibration.json").write_text(text)
    assert read_run(run).calibration.fits == ()


class TestRefused:
    def test_no_folder(self, run):
        with pytest.raises(InputError, match="nowhere: no such folder, expected the folder that odc train wrote"):
            read_run(run / "nowhere")
        with pytest.raises(InputError, match=r"plan.json: is a file, expected the folder"):
            read_run(run / "plan.json")

    @pytest.mark.parametrize("name", ["plan.json", "config.toml", "environment.json", "steps.csv"])
    def test_missing_file(self, run, name):
        (run / name).unlink()
        with pytest.raises(InputError, match=f"holds no {name}"):
            read_run(run)

    @pytest.mark.parametrize(
        ("old", "new", "message"),
        [
            ('schedule = "odc"', 'schedule = "ocd"', "field 'schedule': got 'ocd', expected 'collective'"),
            ("seed = 0", "", "field 'seed' is missing"),
            ("seed = 0", "seed = true", "field 'seed': got True, expected a valid integer"),
            ("seed = 0", 'seed = "0"', "field 'seed': got '0', expected a valid integer"),
            ("recompute = true", "recompute = 1", "field 'recompute': got 1, expected a valid boolean"),
            ("time_scale = 1.0", "time_scale = 0.0", "field 'time_scale': got 0.0, expected greater than 0"),
            ("time_scale = 1.0", "time_scale = nan", "field 'time_scale': got nan, expected a finite number"),
            ("seed = 0", "seed = 0\nfuture = 1", "unknown field 'future'"),
            ("world_size = 2", "world_size = 4", "field 'world_size': got 4, expected 2 as in plan.json"),
            ("schema_version = 1", "schema_version = 7", "field 'schema_version': got 7, expected 1"),
            ("seed = 0", "seed = ", "not valid TOML"),
        ],
    )
    def test_config(self, run, old, new, message):
        file = run / "config.toml"
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))
        with pytest.raises(InputError, match=message) as caught:
            read_run(run)
        assert str(caught.value).startswith(str(file))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"minibatch": "x"}, "line 2: minibatch is 'x', expected a whole number"),
            ({"loss": "low"}, "line 2: loss is 'low', expected a number"),
            ({"minibatch": 3}, "line 2: minibatch 3, expected more than the line before and fewer than the 3"),
            ({"makespan_s": math.nan}, "line 2: makespan_s nan, expected a number > 0"),
            ({"makespan_s": 0.0}, "line 2: makespan_s 0.0, expected a number > 0"),
        ],
    )
    def test_steps(self, run, change, message):
        values = ",".join(str(value) for value in (asdict(step(0)) | change).values())
        (run / "steps.csv").write_text(",".join(STEP_COLUMNS) + "\n" + values + "\n")
        with pytest.raises(InputError, match=message):
            read_run(run)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "column 'minibatch' is missing"),
            (",".join(STEP_COLUMNS) + ",x\n", "unknown column 'x'"),
            (",".join(STEP_COLUMNS) + "\n1,2\n", "line 2 has 2 values, expected 10"),
        ],
    )
    def test_steps_file(self, run, text, message):
        (run / "steps.csv").write_text(text)
        with pytest.raises(InputError, match=message):
            read_run(run)

    def test_minibatch_twice(self, run):
        write_steps(run, [step(0), step(0)])
        with pytest.raises(InputError, match="line 3: minibatch 0, expected more than the line before"):
            read_run(run)

    def test_not_text(self, run):
        (run / "steps.csv").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match=r"steps.csv: cannot be read as CSV text"):
            read_run(run)
        (run / "config.toml").write_bytes(b"\xff\xfe")
        with pytest.raises(InputError, match=r"config.toml: not valid TOML"):
            read_run(run)

    def test_environment(self, run):
        (run / "environment.json").write_text("{}")
        with pytest.raises(InputError, match=r"environment.json: field 'schema_version': got nothing, expected 1"):
            read_run(run)
