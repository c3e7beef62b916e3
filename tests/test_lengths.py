import csv
import json
import re
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from odc_sim.errors import InputError
from odc_sim.lengths import read_lengths
from odc_sim.overlong import apply_overlong, check_lengths, scale_lengths

LENGTHS = st.lists(st.integers(1, 2**31), min_size=1, max_size=50)


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def refusal(path, column=None):
    """The message, without the file's name, after checking that it is one line that starts with it."""
    with pytest.raises(InputError) as error:
        read_lengths(path, column)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"{path}: ")
    return message.removeprefix(f"{path}: ")


def save(path, lengths):
    if path.suffix == ".txt":
        path.write_text("".join(f"{n}\n" for n in lengths))
    elif path.suffix == ".csv":
        with path.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["prompt", "length"])
            writer.writerows([f'one, "two"\n{n}', n] for n in lengths)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"id": "x", "length": n}) + "\n" for n in lengths))
    else:
        pq.write_table(pa.table({"id": ["x"] * len(lengths), "length": lengths}), path)


@pytest.mark.parametrize("extension", [".txt", ".csv", ".jsonl", ".parquet"])
@settings(max_examples=25, deadline=None)
@given(lengths=LENGTHS)
def test_what_is_written_is_read_back(tmp_path_factory, extension, lengths):
    path = tmp_path_factory.mktemp("lengths") / f"x{extension}"
    save(path, lengths)
    got = read_lengths(path)
    assert got.dtype == np.int64
    assert got.tolist() == lengths


# What is accepted


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "5\n7\n"),
        ("a.txt", "5\n7"),
        ("a.txt", "5\n7\n\n  \n"),
        ("a.txt", "\ufeff5\r\n7\r\n"),
        ("a.txt", "5.0\r7e0"),
        ("A.TXT", " 5 \n\t7\n"),
        ("a.csv", "5\n7\n"),
        ("a.csv", "\ufefflength\r\n5\r\n7\r\n"),
        ("a.csv", "any\n5\n7\n"),
        ("a.csv", "id,Length\n1,5\n2,7\n\n"),
        ("a.csv", "name,n\nx,5\n\ny, 7.0\n"),
        ("a.csv", 'name,n\n"two\nlines",5\ny,"7"\n'),
        ("a.csv", "x,x,tokens\n1,2,5\n1,2,7\n"),
        ("a.jsonl", "5\n\n7.0\n"),
        ("a.jsonl", '\ufeff{"tokens": 5}\r\n\r\n{"tokens": 7, "more": 1}\r\n'),
        ("a.jsonl", '{"id": "a", "n": 5}\n{"n": 7}\n'),
        ("a.jsonl", '{"id": 1, "text": "\u2028", "length": 5}\n{"length": 7}'),
    ],
)
def test_accepted_forms(tmp_path, name, content):
    assert read_lengths(write(tmp_path, name, content)).tolist() == [5, 7]


def test_column_picks_between_columns(tmp_path):
    table = {"prompt": [1, 2], "total": [5, 7]}
    text = write(tmp_path, "a.csv", "prompt,total\n1,5\n2,7\n")
    lines = write(tmp_path, "a.jsonl", '{"prompt": 1, "total": 5}\n{"prompt": 2, "total": 7}\n')
    pq.write_table(pa.table(table), tmp_path / "a.parquet")
    for path in (text, lines, tmp_path / "a.parquet"):
        assert read_lengths(path, "total").tolist() == [5, 7]
        assert read_lengths(str(path), "prompt").tolist() == [1, 2]


@pytest.mark.parametrize("dtype", [pa.int8(), pa.uint64(), pa.float32(), pa.int64()])
def test_parquet_number_types(tmp_path, dtype):
    pq.write_table(pa.table({"n": pa.array([5, 7], dtype)}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet").tolist() == [5, 7]


def test_parquet_column_with_a_dot_beside_a_struct_of_that_path(tmp_path):
    struct = pa.array([{"b": 1}, {"b": 2}])
    pq.write_table(pa.table({"a": struct, "a.b": pa.array([5, 7])}), tmp_path / "a.parquet")
    assert read_lengths(tmp_path / "a.parquet", "a.b").tolist() == [5, 7]


# What is refused

AT_LEAST_ONE = "lengths must be at least 1 token"
BAD_TEXT = [
    ("0", f"is '0': {AT_LEAST_ONE}"),
    ("-3", f"is '-3': {AT_LEAST_ONE}"),
    ("nan", "is 'nan': lengths must be finite"),
    ("-Infinity", "is '-Infinity': lengths must be finite"),
    ("1e999", "is '1e999': lengths must be finite"),
    ("12.5", "is '12.5': lengths must be whole numbers"),
    ("0.5", "is '0.5': lengths must be whole numbers"),
    ("1_000", "is '1_000': not a number"),
    ("1000 tokens", "is '1000 tokens': not a number"),
    ("# note", "is '# note': not a number"),
    ("\u0663", "is '\u0663': not a number"),
    ("x" * 90, f"is '{'x' * 36}...: not a number"),
    ("2147483649", "is '2147483649': longer than 2^31 tokens, surely not a length"),
    ("9" * 5000, f"is '{'9' * 36}...: longer than 2^31 tokens, surely not a length"),
]


@pytest.mark.parametrize(("value", "problem"), BAD_TEXT)
def test_bad_entries_of_text_files_name_line_and_value(tmp_path, value, problem):
    finite = problem.replace("longer than 2^31 tokens, surely not a length", "lengths must be finite")
    expected = (problem, finite) if len(value) > 400 else (problem,)
    assert refusal(write(tmp_path, "a.txt", f"5\n{value}\n7\n")).removeprefix("line 2 ") in expected
    assert refusal(write(tmp_path, "a.csv", f'id,length\na,5\n"b\nb",{value}\n')).removeprefix("line 4 ") in expected


def test_blank_line_in_the_middle_of_txt(tmp_path):
    assert refusal(write(tmp_path, "a.txt", "5\n\n7\n")) == "line 2 is missing a value"


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("0", f"is 0: {AT_LEAST_ONE}"),
        ("-1", f"is -1: {AT_LEAST_ONE}"),
        ("1.5", "is 1.5: lengths must be whole numbers"),
        ("NaN", "is nan: lengths must be finite"),
        ("Infinity", "is inf: lengths must be finite"),
        ("2147483649", "is 2147483649: longer than 2^31 tokens, surely not a length"),
        ("null", "is missing a value"),
        ("true", "is True: not a number"),
        ('"12"', "is '12': text, expected a number"),
        ("[1, 2]", "is [1, 2]: not a number"),
    ],
)
def test_bad_entries_of_jsonl(tmp_path, value, problem):
    assert refusal(write(tmp_path, "a.jsonl", f"5\n\n{value}\n")) == f"line 3 {problem}"
    path = write(tmp_path, "b.jsonl", f'{{"n": 5}}\n{{"n": {value}}}\n')
    assert refusal(path) == f"line 2 {problem}"


def test_jsonl_object_where_a_number_belongs(tmp_path):
    assert refusal(write(tmp_path, "a.jsonl", '{"n": 5}\n{"n": {"m": 1}}\n')) == "line 2 is an object: not a number"


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([5, 0], f"row 2 is 0: {AT_LEAST_ONE}"),
        ([5, -4], f"row 2 is -4: {AT_LEAST_ONE}"),
        ([5, None], "row 2 is missing a value"),
        ([5, 2**40], f"row 2 is {2**40}: longer than 2^31 tokens, surely not a length"),
        ([5.0, 1.5], "row 2 is 1.5: lengths must be whole numbers"),
        ([5.0, float("nan")], "row 2 is nan: lengths must be finite"),
        ([5.0, float("inf")], "row 2 is inf: lengths must be finite"),
        (["5", "7"], "column 'n' holds string, expected whole numbers"),
        ([True, False], "column 'n' holds bool, expected whole numbers"),
        ([[1], [2]], "column 'n' holds list<element: int64>, expected whole numbers"),
    ],
)
def test_bad_entries_of_parquet(tmp_path, values, problem):
    pq.write_table(pa.table({"n": values}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == problem


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.parquet"])
def test_empty_files(tmp_path, name):
    assert refusal(write(tmp_path, name, "")) == "is empty"


@pytest.mark.parametrize(("name", "content"), [("a.txt", "\n \n"), ("a.csv", " , \n"), ("a.jsonl", "\ufeff\r\n\r\n")])
def test_files_of_blanks_are_empty_too(tmp_path, name, content):
    assert refusal(write(tmp_path, name, content)) == "is empty"


def test_tables_without_rows(tmp_path):
    assert refusal(write(tmp_path, "a.csv", "length\n")) == "holds no lengths"
    pq.write_table(pa.table({"n": pa.array([], pa.int64())}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == "holds no lengths"


def test_paths_that_are_no_length_files(tmp_path):
    assert refusal(tmp_path / "none.txt") == "no such file"
    assert refusal(tmp_path) == "is a directory, expected a file (.txt, .csv, .jsonl, .parquet)"
    (tmp_path / "folder.csv").mkdir()
    assert refusal(tmp_path / "folder.csv").startswith("is a directory")
    expected = "expected one of .txt, .csv, .jsonl, .parquet"
    assert refusal(write(tmp_path, "a.json", "5")) == f"unknown extension '.json', {expected}"
    assert refusal(write(tmp_path, "lengths", "5")) == f"unknown extension '', {expected}"


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl"])
def test_text_that_is_not_utf8(tmp_path, name):
    assert refusal(write(tmp_path, name, b"5\n\xff\n")) == "line 2 is not UTF-8 text: save the file as UTF-8"
    assert "not UTF-8" in refusal(write(tmp_path, name, "5\n7\n".encode("utf-16")))


def test_broken_files(tmp_path):
    path = write(tmp_path, "a.jsonl", '{"n": 5}\n{"n": 6\n')
    assert refusal(path) == "line 2 is not valid JSON (Expecting ',' delimiter)"
    assert refusal(write(tmp_path, "a.jsonl", "[" * 100_000)).startswith("line 1 is not valid JSON")
    assert refusal(write(tmp_path, "a.jsonl", "9" * 5000)) == "line 1 is not valid JSON (ValueError)"
    assert refusal(write(tmp_path, "a.parquet", b"not parquet at all")).startswith("not a readable parquet file (")
    pq.write_table(pa.table({"n": list(range(1, 1000))}), tmp_path / "b.parquet")
    cut = (tmp_path / "b.parquet").read_bytes()[:-40]
    assert refusal(write(tmp_path, "b.parquet", cut)).startswith("not a readable parquet file (")
    assert refusal(write(tmp_path, "a.csv", 'length\n"5\n')) == "line 2: not valid CSV (unexpected end of data)"
    assert refusal(write(tmp_path, "a.csv", "a,length\nx,5\n7\n")) == "line 3 has 1 cells, the header has 2"
    assert refusal(write(tmp_path, "a.csv", "1,2\n3,4\n")) == "line 1 holds numbers, expected the names of the columns"


def test_parquet_damaged_in_the_data_is_refused(tmp_path):
    pq.write_table(pa.table({"n": list(range(1, 1000))}), tmp_path / "a.parquet")
    raw = bytearray((tmp_path / "a.parquet").read_bytes())
    raw[4:200] = b"\xff" * 196
    assert refusal(write(tmp_path, "a.parquet", bytes(raw))).startswith("not a readable parquet file (")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    pq.write_table(pa.table({"n": [5]}), tmp_path / "a.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    wanted = f"reading .parquet needs pyarrow: {sys.executable} -m pip install pyarrow, or convert to .csv"
    assert refusal(tmp_path / "a.parquet") == wanted


def test_a_file_that_may_not_be_read(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    assert refusal(write(tmp_path, "a.txt", "5\n")) == "cannot be read (Permission denied)"


def test_wrong_column(tmp_path):
    path = write(tmp_path, "a.csv", "id,length\n1,5\n")
    assert refusal(path, "lenght") == "no column 'lenght': did you mean 'length'? columns: id, length"
    assert refusal(path, "zzz") == "no column 'zzz': columns: id, length"
    lines = write(tmp_path, "a.jsonl", '{"id": 1, "length": 5}\n')
    assert refusal(lines, "lenght") == "no column 'lenght': did you mean 'length'? columns: id, length"
    pq.write_table(pa.table({"id": [1], "length": [5]}), tmp_path / "a.parquet")
    assert (
        refusal(tmp_path / "a.parquet", "lengthy") == "no column 'lengthy': did you mean 'length'? columns: id, length"
    )


def test_column_where_there_are_none(tmp_path):
    message = "a .txt file has no columns, so --column 'n' does not apply"
    assert refusal(write(tmp_path, "a.txt", "5\n"), "n") == message
    assert refusal(write(tmp_path, "a.jsonl", "5\n"), "n") == "line 1 is not an object, so --column 'n' does not apply"
    assert refusal(write(tmp_path, "a.csv", "5\n7\n"), "n") == "line 1 holds numbers, expected the names of the columns"


def test_ambiguous_columns_are_listed(tmp_path):
    wanted = "several columns could be the lengths (a, b): choose one with --column of: a, name, b"
    assert refusal(write(tmp_path, "a.csv", "a,name,b\n1,x,5\n")) == wanted
    assert refusal(write(tmp_path, "a.jsonl", '{"a": 1, "name": "3", "b": 5}')) == wanted
    pq.write_table(pa.table({"a": [1], "name": ["x"], "b": [5]}), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == wanted
    both = refusal(write(tmp_path, "b.csv", "tokens,length\n1,5\n"))
    assert both.startswith("several columns could be the lengths (tokens, length)")
    none = refusal(write(tmp_path, "c.csv", "a,b\nx,y\n"))
    assert none == "no column holds whole numbers: choose one with --column (columns: a, b)"


def test_column_names_that_appear_twice(tmp_path):
    twice = "column 'length' appears 2 times: rename one (columns: length, length)"
    assert refusal(write(tmp_path, "a.csv", "length,length\n1,5\n")) == twice
    assert refusal(write(tmp_path, "a.csv", "length,length\n1,5\n"), "length") == twice
    assert refusal(write(tmp_path, "a.jsonl", '{"length": 1, "length": 5}')) == twice
    table = pa.Table.from_arrays([pa.array([1]), pa.array([5])], names=["length", "length"])
    pq.write_table(table, tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet") == twice
    later = write(tmp_path, "b.jsonl", '{"length": 1}\n{"length": 1, "length": 5}\n')
    assert refusal(later) == "line 2 has more than one 'length'"


def test_jsonl_lines_that_disagree(tmp_path):
    assert refusal(write(tmp_path, "a.jsonl", '{"n": 5}\n{"m": 5}\n')) == "line 2 has no 'n'"
    assert refusal(write(tmp_path, "a.jsonl", '{"n": 5}\n7\n')) == "line 2 is not an object with 'n'"
    mixed = refusal(write(tmp_path, "a.jsonl", '5\n{"n": 5}\n'))
    assert mixed == "line 2 is an object, the lines before hold bare numbers"
    assert (
        refusal(write(tmp_path, "a.jsonl", "{}\n"))
        == "no column holds whole numbers: choose one with --column (columns: none)"
    )


# Scaling and samples over the cap


def test_overlong_by_hand():
    lengths = [10, 40, 20, 80]
    clip = apply_overlong(lengths, 40, "clip")
    assert (clip.lengths.tolist(), clip.kept.tolist(), clip.changed) == ([10, 40, 20, 40], [0, 1, 2, 3], 1)
    assert clip.note == "1 of 4 samples clipped to 40 tokens"
    drop = apply_overlong(lengths, 20, "drop")
    assert (drop.lengths.tolist(), drop.kept.tolist(), drop.changed) == ([10, 20], [0, 2], 2)
    assert drop.note == "2 of 4 samples dropped (longer than 20 tokens)"
    scale = apply_overlong(lengths, 40, "scale")
    assert (scale.lengths.tolist(), scale.kept.tolist(), scale.changed) == ([5, 20, 10, 40], [0, 1, 2, 3], 4)
    assert scale.note == "all samples scaled by 0.5 so that the longest (80 tokens) fits 40"
    part = apply_overlong(lengths[:3], 40, "scale", longest=80)
    assert part.lengths.tolist() == [5, 20, 10]


def test_overlong_error_names_the_first_offender():
    with pytest.raises(InputError) as error:
        apply_overlong([10, 50, 20, 80], 40)
    assert str(error.value) == (
        "sample 1 has 50 tokens, more than max_tokens 40 (2 of 4 samples do): "
        "raise --max-tokens or choose --overlong drop|clip|scale"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([50, 60], 40, "drop"),
            "--overlong drop leaves no sample: all 2 are longer than max_tokens 40 (the shortest has 50)",
        ),
        (([50], 0, "clip"), "max_tokens is 0: expected at least 1"),
        (([50], 40, "clop"), "unknown --overlong choice 'clop': did you mean 'clip'? known: clip, drop, error, scale"),
    ],
)
def test_overlong_refusals(arguments, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        apply_overlong(*arguments)


@given(lengths=LENGTHS, cap=st.integers(1, 2**31), how=st.sampled_from(["drop", "clip", "scale"]))
def test_overlong_keeps_its_promises(lengths, cap, how):
    before = np.array(lengths)
    if how == "drop" and before.min() > cap:
        with pytest.raises(InputError, match="leaves no sample"):
            apply_overlong(before, cap, how)
        return
    after = apply_overlong(before, cap, how)
    assert after.lengths.min() >= 1
    assert after.lengths.max() <= cap
    source = before[after.kept]
    assert source.size == after.lengths.size
    assert (after.lengths <= source).all()
    assert (np.diff(after.lengths[np.argsort(source, kind="stable")]) >= 0).all()
    if how != "scale":
        assert (after.lengths[source <= cap] == source[source <= cap]).all()
        assert after.changed == (before > cap).sum()
    elif before.max() > cap:
        exact = source * (cap / before.max())
        assert after.lengths.max() == cap
        assert (np.abs(after.lengths - np.maximum(exact, 1)) <= 1.001).all()
    if before.max() <= cap:
        assert after.changed == 0
        assert after.note == ""
        assert after.lengths.tolist() == lengths


def test_scale_lengths():
    assert scale_lengths([1, 10, 15], 0.5).tolist() == [1, 5, 8]
    assert scale_lengths([1, 10], 2).tolist() == [2, 20]
    for factor in (0, -1, float("nan"), float("inf")):
        with pytest.raises(InputError, match=f"the scale factor is {factor}: expected a positive number"):
            scale_lengths([1], factor)
    with pytest.raises(
        InputError, match=r"scaling by 1000000000.0 makes a sample of 5e\+09 tokens: the limit is 2\^31"
    ):
        scale_lengths([1, 5], 1e9)


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        ([], "lengths have shape [0]: expected a non-empty list of token counts"),
        ([[1, 2]], "lengths have shape [1, 2]: expected a non-empty list"),
        ([1, 0], "sample 1 has length 0: expected a whole number from 1 to 2^31"),
        ([1.5], "sample 0 has length 1.5: expected a whole number"),
        ([float("nan")], "sample 0 has length nan: expected a whole number"),
        (["a"], "lengths are of type <U1: expected whole numbers of tokens"),
    ],
)
def test_check_lengths(lengths, message):
    with pytest.raises(InputError, match=f"^{re.escape(message)}"):
        check_lengths(lengths)
