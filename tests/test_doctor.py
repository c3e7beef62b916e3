import importlib.util
import json
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

import cli
from odc_sim import doctor
from odc_sim.doctor import Check

VERSIONS = dict.fromkeys(doctor.PACKAGES, "1.0")

SAID = [
    (doctor.python((3, 12, 3), "Linux"), "ok", "3.12.3 on Linux", ""),
    (doctor.python((3, 10, 1), "Linux"), "broken", "3.10.1", "install Python 3.11 or newer"),
    (doctor.packages(VERSIONS, None), "ok", "numpy 1.0, numba 1.0, pandas 1.0", ""),
    (doctor.packages(VERSIONS | {"simpy": None}, None), "broken", "not installed: simpy", "pip install simpy"),
    (
        doctor.packages(VERSIONS, "Numba needs NumPy 2.3 or less"),
        "broken",
        "numba 1.0 does not load beside numpy 1.0: Numba needs NumPy 2.3 or less",
        "pip install --upgrade numba",
    ),
    (doctor.processors(8, 64 << 30), "ok", "8 cores, 68.7 GB of memory available", ""),
    (doctor.processors(8, None), "ok", "8 cores", ""),
    (doctor.processors(None, None), "ok", "unknown", ""),
    (doctor.processors(8, 1 << 30), "warning", "8 cores, 1.1 GB", "odc sweep --jobs 1"),
    (doctor.numba_cache(None, True, True), "ok", "beside the package", ""),
    (doctor.numba_cache(None, False, True), "ok", "in the user cache", ""),
    (
        doctor.numba_cache(None, False, False),
        "warning",
        "each command compiles anew",
        "export NUMBA_CACHE_DIR=/tmp/numba",
    ),
    (doctor.numba_cache("/proc/here", True, True), "warning", "NUMBA_CACHE_DIR=/proc/here is not writable", "unset"),
    (doctor.terminal(True, "utf-8"), "ok", "a terminal, utf-8", ""),
    (doctor.terminal(False, "UTF8"), "ok", "not a terminal, UTF8", ""),
    (doctor.terminal(True, "ANSI_X3.4-1968"), "warning", "tables lose their frames", "export PYTHONUTF8=1"),
    (doctor.without_torch(None), "broken", "not installed: simulating, planning and sweeps work", "pip install"),
    (doctor.without_torch("libc is too old"), "broken", "does not load (libc is too old)", "install torch again"),
]


@pytest.mark.parametrize(("check", "state", "what", "remedy"), SAID)
def test_every_line(check, state, what, remedy):
    assert check.state == state
    assert what in check.what
    assert remedy in check.remedy
    assert bool(check.remedy) == (state != "ok")
    assert "\n" not in doctor.line(check)


def test_a_chosen_cache_folder(tmp_path):
    assert doctor.numba_cache(str(tmp_path / "new"), False, False).state == "ok"


def test_a_line_has_the_remedy_behind_an_arrow():
    check = Check("GPUs", "absent", "none", "install the driver")
    assert doctor.line(check) == "absent   GPUs               none  -> install the driver"
    assert doctor.line(Check("GPUs", "ok", "two")) == "ok       GPUs               two"


def test_only_what_is_broken_fails():
    fine = [Check("a", "ok", ""), Check("b", "warning", "", "x"), Check("c", "absent", "", "x")]
    assert doctor.exit_code(fine) == 0
    assert doctor.exit_code([*fine, Check("d", "broken", "", "x")]) == 1


def test_what_does_not_import_is_said_in_one_line(tmp_path, monkeypatch):
    (tmp_path / "bad_module.py").write_text("raise RuntimeError('\\n  no such symbol\\nand more')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert doctor.importing("bad_module") == "no such symbol"
    assert doctor.importing("json") is None
    assert doctor.first_line(KeyError()) == "KeyError"
    assert doctor.installed("no-such-distribution") is None


def test_free_memory_is_read_where_the_system_says_it(tmp_path):
    file = tmp_path / "meminfo"
    assert doctor._memory(file) is None
    file.write_text("MemTotal:  100 kB\n")
    assert doctor._memory(file) is None
    file.write_text("MemTotal:  100 kB\nMemAvailable:   50 kB\n")
    assert doctor._memory(file) == 50 << 10


def test_without_torch_the_command_says_what_works_and_fails(monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else found(name))
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert [text.split()[0] for text in lines[:2]] == ["ok", "ok"]
    assert lines[-1] == doctor.line(doctor.without_torch(None))

    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    data = json.loads(result.output)
    assert (result.exit_code, data["exit_code"], data["schema_version"]) == (1, 1, 1)
    assert data["checks"][-1] == asdict(doctor.without_torch(None))


def test_a_torch_that_does_not_load_is_a_line(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(doctor, "importing", lambda name: "undefined symbol" if name == "torch" else None)
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == 1
    assert "torch              does not load (undefined symbol)" in result.output
