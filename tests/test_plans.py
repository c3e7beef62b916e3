"""Plans: columns against lists, padding, and every reason for which a plan.json is refused."""

import json
import os
import re
import stat
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.calibration import load_calibration
from odc_sim.errors import InputError
from odc_sim.header import check_header, header, read_json, write_json
from odc_sim.plans import Plan, pad_microbatches, read_plan, unequal_counts, validate, write_plan
from odc_sim.results import read_results

# Two minibatches on two ranks; rank 1 of the second has nothing to do.
NESTED = [[[[0, 2], [1]], [[3]]], [[[5], [4]], []]]
LENGTHS = [10, 20, 30, 40, 50, 60]


def make(nested=NESTED, **changes):
    fields = {
        "workload": {"name": "longalign"},
        "model": "qwen2.5-1.5b",
        "world_size": 2,
        "minibatch_size": 2,
        "max_tokens": 60,
        "policy": "lb-mini",
        "balancing_cost": {"name": "tokens", "source": "by hand"},
        "lengths": LENGTHS,
        "seed": 7,
    }
    return Plan.from_nested(nested, **(fields | changes))


def same(a, b):
    return all(
        np.array_equal(getattr(a, name), getattr(b, name))
        for name in ("lengths", "sample_ids", "microbatch_start", "rank_start", "padding")
    )


def test_columns_by_hand():
    plan = make()
    assert plan.num_minibatches == 2
    assert plan.num_microbatches == 5
    assert plan.sample_ids.tolist() == [0, 2, 1, 3, 5, 4]
    assert plan.microbatch_start.tolist() == [0, 2, 3, 4, 5, 6]
    assert plan.rank_start.tolist() == [0, 2, 3, 5, 5]
    assert plan.counts().tolist() == [[2, 1], [2, 0]]
    assert plan.tokens().tolist() == [40, 20, 40, 60, 50]
    assert plan.squares().tolist() == [1000, 400, 1600, 3600, 2500]
    assert plan.samples().tolist() == [2, 1, 1, 1, 1]
    assert plan.ranks().tolist() == [0, 0, 1, 2, 2]
    assert plan.nested() == NESTED


def test_padded_puts_zeros_where_there_is_no_microbatch():
    plan = make()
    assert plan.padded(plan.tokens()).tolist() == [[[40, 40], [20, 0]], [[60, 0], [50, 0]]]
    assert plan.padded(plan.tokens() * 0.5).dtype == np.float64


def test_pad_microbatches_by_hand():
    padded = pad_microbatches(make())
    assert padded.nested() == [[[[0, 2], [1]], [[3], []]], [[[5], [4]], [[], []]]]
    assert padded.padding.tolist() == [False, False, False, True, False, False, True, True]
    assert padded.tokens().tolist() == [40, 20, 40, 0, 60, 50, 0, 0]
    assert padded.squares()[3] == 0
    assert unequal_counts(padded) is None
    assert pad_microbatches(padded) is padded
    validate(padded)


def test_unequal_counts_names_the_extremes_of_the_first_bad_minibatch():
    first = unequal_counts(make())
    assert first == (0, 0, 2, 1, 1)
    assert (first.minibatch, first.rank_a, first.count_a, first.rank_b, first.count_b) == (0, 0, 2, 1, 1)
    later = make([[[[0]], [[3]]], [[[1]], [[2], [4], [5]]]])
    assert unequal_counts(later) == (1, 1, 3, 0, 1)


@st.composite
def plans(draw):
    world_size = draw(st.integers(1, 4))
    shapes = draw(
        st.lists(
            st.lists(st.lists(st.integers(1, 3), max_size=3), min_size=world_size, max_size=world_size),
            min_size=1,
            max_size=4,
        )
    )
    total = sum(size for ranks in shapes for rank in ranks for size in rank)
    ids = iter(draw(st.permutations(range(total))))
    nested = [[[[next(ids) for _ in range(size)] for size in rank] for rank in ranks] for ranks in shapes]
    lengths = draw(st.lists(st.integers(1, 1000), min_size=total, max_size=total))
    groups = draw(st.none() | st.just([i // 2 for i in range(total)]))
    return make(nested, world_size=world_size, max_tokens=3000, lengths=lengths, groups=groups)


@given(plans())
@settings(max_examples=60, deadline=None)
def test_sums_and_padding_agree_with_lists(plan):
    lengths = plan.lengths
    flat = [ids for ranks in plan.nested() for rank in ranks for ids in rank]
    assert plan.tokens().tolist() == [sum(int(lengths[i]) for i in ids) for ids in flat]
    assert plan.squares().tolist() == [sum(int(lengths[i]) ** 2 for i in ids) for ids in flat]
    padded = pad_microbatches(plan)
    validate(padded)
    assert unequal_counts(padded) is None
    assert padded.sample_ids.tolist() == plan.sample_ids.tolist()
    assert padded.tokens()[~padded.padding].tolist() == plan.tokens().tolist()
    assert np.array_equal(padded.padded(padded.tokens()), plan.padded(plan.tokens()))
    assert [[[m for m in rank if m] for rank in ranks] for ranks in padded.nested()] == plan.nested()


@given(plans=plans())
@settings(max_examples=40, deadline=None)
def test_files_come_back_as_they_went(plans, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    for plan in (plans, pad_microbatches(plans)):
        write_plan(plan, path, "odc plan")
        back = read_plan(path)
        assert same(plan, back)
        assert back.seed == 7
        assert (back.groups is None) == (plan.groups is None)
        assert dict(back.workload) == {"name": "longalign"}


def test_squares_survive_a_running_total_beyond_int64():
    lengths = np.full(40, 2**31)
    plan = make([[[[i] for i in range(40)]]], world_size=1, max_tokens=2**31, lengths=lengths)
    assert plan.squares().tolist() == [2**62] * 40


def test_the_file_is_what_the_contract_says(tmp_path):
    path = tmp_path / "deep" / "plan.json"
    write_plan(pad_microbatches(make()), path, "odc plan --seed 7")
    data = json.loads(path.read_text())
    assert set(data) == {
        "schema_version", "toolkit_version", "command", "created", "seed", "environment", "workload", "model",
        "world_size", "minibatch_size", "max_tokens", "policy", "balancing_cost", "lengths", "groups", "minibatches",
        "padding",
    }  # fmt: skip
    assert data["schema_version"] == 1
    assert data["command"] == "odc plan --seed 7"
    assert data["created"].endswith("+00:00")
    assert set(data["environment"]) == {"os", "python", "numpy"}
    assert data["minibatches"][0] == [[[0, 2], [1]], [[3], []]]
    assert data["padding"] == [[0, 1, 1], [1, 1, 0], [1, 1, 1]]
    assert [entry.name for entry in path.parent.iterdir()] == ["plan.json"]


BAD = {
    "version": ({"schema_version": 2}, "field 'schema_version': got 2, expected 1; write the file again"),
    "version type": ({"schema_version": True}, "field 'schema_version': got True, expected 1"),
    "no version": ({"schema_version": ...}, "field 'schema_version': got nothing, expected 1"),
    "no model": ({"model": ...}, "field 'model' is missing"),
    "no groups": ({"groups": ...}, "field 'groups' is missing"),
    "no padding": ({"padding": ...}, "field 'padding' is missing"),
    "no cost name": ({"balancing_cost": {"source": "x"}}, "field 'balancing_cost': field 'name' is missing"),
    "unknown": ({"speed": 1}, "unknown field 'speed': expected workload, model"),
    "type": ({"world_size": "2"}, "field 'world_size': got a JSON string, expected a JSON integer"),
    "bool": ({"max_tokens": True}, "field 'max_tokens': got a JSON boolean, expected a JSON integer"),
    "seed": ({"seed": 1.5}, "field 'seed': got a JSON number, expected a JSON integer"),
    "length type": ({"lengths": [10, 20.5]}, "field 'lengths': entry 1 is 20.5, expected an integer"),
    "huge length": ({"lengths": [2**70]}, "field 'lengths': a number is beyond 64 bits"),
    "negative seed": ({"seed": -1}, "field 'seed': got -1, expected a whole number from 0 to 2^63 - 1"),
    "huge seed": ({"seed": 2**63}, "field 'seed': got 9223372036854775808, expected a whole number from 0 to 2^63 - 1"),
    "not finite": (
        {"workload": {"name": "NaN", "scale": float("nan")}},
        ": got NaN, expected a finite number",
    ),
    "long": (
        {"lengths": [10, 20, 2**31 + 1, 40, 50, 60]},
        "field 'lengths': sample 2 has 2147483649 tokens: expected at most 2^31",
    ),
    "long cap": ({"max_tokens": 2**31 + 1}, "field 'max_tokens' is 2147483649: expected at most 2^31"),
    "many samples": (
        {"minibatch_size": 10**400},
        "field 'minibatch_size' is a whole number of about 401 digits: expected at most 1,000,000",
    ),
    "many ranks": (
        {"world_size": 10**400},
        "minibatch 0 has 2 ranks, expected world_size = a whole number of about 401 digits",
    ),
    "length": ({"lengths": [10, 20, 30, 0, 50, 60]}, "field 'lengths': sample 3 has 0 tokens: expected at least 1"),
    "groups": ({"groups": [1, 2]}, "field 'groups' has 2 entries, expected one for each of 6 lengths"),
    "zero": ({"minibatch_size": 0}, "field 'minibatch_size' is 0: expected at least 1"),
    "world": ({"world_size": 3}, "minibatch 0 has 2 ranks, expected world_size = 3"),
    "cap": ({"max_tokens": 39}, "minibatch 0, rank 0, microbatch 0 has 40 tokens, more than field 'max_tokens' = 39"),
    "none": ({"minibatches": []}, "field 'minibatches' is empty: expected at least one minibatch"),
    "lost": ({"minibatches": [NESTED[0], [[[5]], []]]}, "sample 4 is in no minibatch: expected each sample once"),
    "twice": (
        {"minibatches": [NESTED[0], [[[5], [4]], [[3]]]]},
        "sample 3 is in two places: minibatch 0, rank 1, microbatch 0 and minibatch 1, rank 1, microbatch 0",
    ),
    "unknown id": (
        {"minibatches": [NESTED[0], [[[5], [6]], []]]},
        "minibatch 1, rank 0, microbatch 1 has sample 6, but there are lengths for 0 to 5 only",
    ),
    "negative id": ({"minibatches": [NESTED[0], [[[-1], [4]], []]]}, "minibatch 1, rank 0, microbatch 0 has sample -1"),
    "empty": (
        {"minibatches": [NESTED[0], [[[5], [4]], [[]]]]},
        "minibatch 1, rank 1, microbatch 0 is empty but not listed in field 'padding'",
    ),
    "full padding": ({"padding": [[0, 1, 0]]}, "minibatch 0, rank 1, microbatch 0 is listed in field 'padding' but"),
    "no such padding": (
        {"padding": [[1, 1, 0]]},
        "field 'padding': there is no minibatch 1, rank 1, microbatch 0",
    ),
    "padding form": ({"padding": [[1, 1]]}, "field 'padding': entry 0 is [1, 1], expected [minibatch, rank, micro"),
    "rank form": (
        {"minibatches": [NESTED[0], ["ab", []]]},
        "field 'minibatches': minibatch 1, rank 0: got 'ab', expected a list of microbatches",
    ),
    "minibatch form": ({"minibatches": [3]}, "field 'minibatches': minibatch 0: got 3, expected a list of ranks"),
    "microbatch form": (
        {"minibatches": [[[3], []]]},
        "field 'minibatches': minibatch 0, rank 0, microbatch 0: got 3, expected a list of sample ids",
    ),
    "id form": (
        {"minibatches": [[[[True]], []]]},
        "field 'minibatches': minibatch 0, rank 0, microbatch 0: got True, expected an integer sample id",
    ),
    "huge id": ({"minibatches": [[[[2**70]], []]]}, "field 'minibatches': a sample id is beyond 64 bits"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_the_reader_refuses(tmp_path, change, message):
    path = tmp_path / "plan.json"
    write_plan(make(), path, "odc plan")
    data = {key: value for key, value in (json.loads(path.read_text()) | change).items() if value is not ...}
    path.write_text(json.dumps(data))
    with pytest.raises(InputError) as error:
        read_plan(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"a": 1,\n "b" 2}', "not valid JSON at line 2, column 6"),
        (b"[1]", "got a JSON array, expected an object with the field 'schema_version'"),
        (b"\xff\xfe", "not UTF-8 text"),
        (b"[" * 100_000, "cannot be read as JSON"),
        (b"1" * 5000, "cannot be read as JSON"),
    ],
)
def test_what_is_no_json_object_is_refused(tmp_path, content, message):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    with pytest.raises(InputError) as error:
        read_plan(path)
    assert str(error.value).startswith(f"{path}: ")
    assert message in str(error.value)


def test_missing_files_and_directories_are_refused(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        read_plan(tmp_path / "plan.json")
    with pytest.raises(InputError, match="is a directory, expected a JSON file"):
        read_json(tmp_path)
    with pytest.raises(InputError, match="is a directory, expected the name of the file to write"):
        write_plan(make(), tmp_path, "odc plan")


def test_a_path_below_a_file_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(InputError, match="cannot be written"):
        write_json(tmp_path / "file" / "plan.json", {})


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = tmp_path / "plan.json"
    write_plan(make(), path, "first")
    before = path.read_text()

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("os.replace", refuse)
    with pytest.raises(InputError, match=r"plan\.json: cannot be written: Permission denied; choose another path"):
        write_plan(make(), path, "second")
    assert path.read_text() == before
    assert [entry.name for entry in tmp_path.iterdir()] == ["plan.json"]


def test_a_symbolic_link_stays_one(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    link = tmp_path / "plan.json"
    link.symlink_to(tmp_path / "elsewhere" / "real.json")
    for version in (1, 2):  # the first time it leads nowhere yet
        write_json(link, {"a": version})
        assert link.is_symlink()
        assert read_json(tmp_path / "elsewhere" / "real.json") == {"a": version}
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["elsewhere", "plan.json"]
    assert [entry.name for entry in (tmp_path / "elsewhere").iterdir()] == ["real.json"]


def test_what_is_no_file_is_written_to_and_stays(tmp_path):
    # A pipe of the test's own, never a device: a write that goes wrong replaces what it is given.
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with os.fdopen(os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)) as reader:
        write_json(pipe, {"a": 1}, indent=None)
        assert reader.read() == '{"a": 1}\n'
    assert stat.S_ISFIFO(os.stat(pipe).st_mode)


def test_standard_output_is_written_to():
    # What /dev/stdout points to, where nothing can be replaced.
    code = "from odc_sim.header import write_json; write_json('/proc/self/fd/1', {'a': 1}, indent=None)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == '{"a": 1}\n'


def test_names_as_long_as_a_file_system_takes_and_longer(tmp_path):
    write_json(tmp_path / ("x" * 255), {})
    assert [entry.name for entry in tmp_path.iterdir()] == ["x" * 255]
    with pytest.raises(
        InputError, match=r"\(5\d\d\d characters\): cannot be written: File name too long; choose another"
    ):
        write_json(tmp_path / ("x" * 5000), {})
    with pytest.raises(InputError, match=r"\(5\d\d\d characters\): cannot be read: File name too long"):
        read_json(tmp_path / ("x" * 5000))


def test_files_can_be_read_by_others(tmp_path):
    write_json(tmp_path / "a.json", {})
    (tmp_path / "b.json").write_text("{}")
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == stat.S_IMODE((tmp_path / "b.json").stat().st_mode)


def test_numpy_values_become_numbers_and_nan_is_refused(tmp_path):
    path = tmp_path / "a.json"
    write_json(path, {"a": np.int64(3), "b": np.arange(2), "c": np.float32(0.5)})
    assert json.loads(path.read_text()) == {"a": 3, "b": [0, 1], "c": 0.5}
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(path, {"a": float("nan")})
    with pytest.raises(TypeError, match="set has no JSON form"):
        write_json(path, {"a": {1}})


def test_headers_check_their_fields():
    data = header("odc calibrate", None)
    check_header(data, "x.json")
    with pytest.raises(InputError, match=r"^x\.json: field 'created' is missing$"):
        check_header({key: value for key, value in data.items() if key != "created"}, "x.json")
    with pytest.raises(InputError, match=r"^x\.json: field 'environment': got a JSON null, expected a JSON object$"):
        check_header(data | {"environment": None}, "x.json")


def test_columns_that_do_not_fit_together_are_refused():
    plan = make()
    for name, value, message in (
        ("microbatch_start", plan.microbatch_start + 1, "microbatch_start is no list of starts"),
        ("rank_start", plan.rank_start[:-1], "rank_start has 3 ranks, expected a multiple of world_size = 2"),
        ("rank_start", plan.rank_start[::-1], "rank_start is no list of starts"),
        ("padding", plan.padding[1:], "padding has 4 flags for 5 microbatches"),
    ):
        with pytest.raises(InputError) as error:
            validate(replace(plan, **{name: value}))
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("read", "expected"),
    [
        (read_plan, "a plan (odc plan)"),
        (read_results, "results (odc simulate)"),
        (load_calibration, "a calibration (odc calibrate)"),
    ],
)
def test_a_file_of_another_kind_is_called_by_its_name(tmp_path, read, expected):
    data = header("odc x", 0) | {"runs": [], "between_runs": {}}
    write_json(tmp_path / "validation.json", data)
    message = f"validation.json: holds a validation (odc validate), expected {expected}"
    with pytest.raises(InputError, match=re.escape(message)):
        read(tmp_path / "validation.json")
