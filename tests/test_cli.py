"""The command line as a user meets it: output, files, one-line errors with exit code 2."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli import _is_interrupt, app
from odc_sim.study import Study

QUICK = ["--minibatches", "3", "--policy", "lb-micro,lb-mini"]
FILES = {
    "results.csv",
    "results.json",
    "speedup.png",
    "idle.png",
    "lengths.png",
    "timeline.png",
    "timeline.json",
    "timeline.parquet",
    "timeline-baseline.json",
    "timeline-baseline.parquet",
}


@pytest.fixture
def odc(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [str(a) for a in arguments])
        assert result.exit_code == code, result.output + repr(result.exception)
        return result

    return run


def test_simulate_prints_a_table_and_writes_a_report(odc, tmp_path):
    result = odc("simulate", "--workload", "longalign", *QUICK)
    assert "lb-mini" in result.stdout
    assert "Of this table use odc + lb-mini" in result.stdout
    assert "cannot run: collective with lb-mini (hangs: rank" in result.stdout
    assert {path.name for path in (tmp_path / "reports" / "longalign").iterdir()} == FILES


def test_json_goes_to_standard_output_alone(odc):
    data = json.loads(odc("simulate", *QUICK, "--json", "-").stdout)
    assert data["schema_version"] == 1
    assert {row["schedule"] for row in data["rows"]} == {"collective", "collective-deferred", "odc", "odc-local-sum"}
    assert data["study"]["minibatches"] == 3
    assert data["command"].startswith("odc")


def test_a_plan_is_made_saved_and_simulated(odc, tmp_path):
    made = odc("plan", "--minibatches", "3", "--out", "plan.json").stdout
    again = odc("plan", "--plan", "plan.json", "--out", "again.json", code=2).stderr
    assert again == "error: --plan: got a plan to make a plan of; odc simulate --plan FILE says what it takes\n"
    for flag, value in (("--schedule", "odc"), ("--stability=20", None), ("--device-speed", "1,1,1,1,1,1,1,0.5")):
        refused = odc("plan", flag, *([value] if value else []), "--out", "again.json", code=2).stderr
        name = flag.partition("=")[0]
        assert refused.startswith(f"error: {name}: samples are dealt the same whatever it is; give it to odc simulate")
    assert "3 minibatches on 8 ranks, lb-mini" in made
    assert "needs odc or collective-deferred" in made
    odc("simulate", "--plan", "plan.json", "--out", "out")
    odc("simulate", "--minibatches", "3", "--policy", "lb-mini", "--save-plan", "again.json", "--out", "out")
    one, other = (json.loads((tmp_path / name).read_text()) for name in ("plan.json", "again.json"))
    assert one["minibatches"] == other["minibatches"]


def test_own_lengths(odc, tmp_path):
    (tmp_path / "mine.csv").write_text("id,length\n" + "".join(f"{i},{1000 + 37 * i}\n" for i in range(200)))
    result = odc("simulate", "--lengths", "mine.csv", *QUICK)
    assert (tmp_path / "reports" / "mine" / "results.json").is_file()
    assert "mine, qwen2.5-1.5b on 8 devices" in result.stdout


def test_a_study_file(odc, tmp_path):
    (tmp_path / "study.toml").write_text('workload = "swesmith"\nminibatches = 3\npolicy = ["lb-mini"]\n')
    data = json.loads(odc("simulate", "--config", "study.toml", "--devices", "4", "--json", "-").stdout)
    assert data["rows"][0]["workload"] == "swesmith"
    assert data["study"]["devices"] == 4


def test_every_field_of_a_study_is_a_flag(odc):
    flags = (
        *("--recipe", "mixed", "--recompute", "false", "--chunked-loss-tokens", "0", "--collectives", "two-level"),
        *("--forward-prefetch", "3", "--backward-prefetch=2", "--separate-reduce", "--port-contention", "false"),
        *("--device-speed", "1,0.5", "--batch-minibatches", "2", "--devices", "2", "--json", "-"),
    )
    study = json.loads(odc("simulate", *QUICK, *flags).stdout)["study"]
    assert (study["recipe"], study["recompute"], study["chunked_loss_tokens"]) == ("mixed", False, 0)
    assert (study["collectives"], study["forward_prefetch"], study["backward_prefetch"]) == ("two-level", 3, 2)
    assert (study["separate_reduce"], study["port_contention"], study["device_speed"]) == (True, False, [1.0, 0.5])
    assert (study["batch_minibatches"], study["devices"], study["minibatches"]) == (2, 2, 3)


def test_the_help_names_every_field_of_a_study(odc):
    for command in ("simulate", "plan"):
        text = odc(command, "--help").stdout
        assert "Every other field of a study file is a flag too" in text
        assert [name for name in Study.model_fields if f"--{name.replace('_', '-')}" not in text] == []


def test_a_plan_takes_every_field_too(odc, tmp_path):
    flags = ["--policy", "verl-native", "--minibatches", "4", "--batch-minibatches"]
    odc("plan", *flags, "2", "--out", "two.json")
    odc("plan", *flags, "4", "--out", "four.json")
    two, four = (json.loads((tmp_path / name).read_text())["minibatches"] for name in ("two.json", "four.json"))
    assert two != four
    assert "unknown option '--batch-minibatch': did you mean '--batch-minibatches'?" in (
        odc("plan", "--batch-minibatch", "2", "--out", "x.json", code=2).stderr
    )


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (["workloads"], ["longalign", "aime-qwen3", "deepseek-r1"]),
        (["workloads", "longalign"], ["p50", "evidence:", "█"]),
        (["models"], ["qwen2.5-32b", "llama-65b"]),
        (["models", "qwen2.5-7b"], ["7.62 B parameters", "233 M  root", "hidden 3584"]),
        (["models", "tiny"], ["181 K parameters", "37.1 K  root 32.8 K", "source: ours"]),
        (["models", "Qwen/Qwen2.5-1.5B"], ["embeddings untied; source: config.json of deepseek-ai/DeepSeek-R1-Dis"]),
        (["models", "llama-65b"], ["source: LLaMA 1, arXiv 2302.13971"]),
        (["hardware"], ["a100-nvswitch-roce", "h200-nvlink"]),
        (["workloads", "longalign"], ["10,000 samples drawn, "]),
        (["workloads", "prolong-docs"], ["77,932 samples, "]),
        (["workloads"], ["16,345", "1,527", "10,000 samples drawn"]),
        (["hardware", "h200-nvlink"], ["source:", "host", "efficiency", "calibration: h200"]),
        (["--version"], ["0"]),
        (["--help"], ["simulate", "plan", "workloads", "models", "hardware"]),
        (["simulate", "--help"], ["Example:", "--policy", "--config"]),
        (["plan", "--help"], ["Example:"]),
    ],
)
def test_listings(odc, command, expected):
    output = odc(*command).stdout
    for text in expected:
        assert text in output


def test_numbers_that_a_calibration_replaces_are_marked(odc):
    text = odc("hardware", "h200-nvlink").stdout
    assert "    instead: the calibration's times of all_gather, reduce_scatter, gather, scatter_accumulate\n" in text
    assert "    instead: the calibration's times of copies and optimizer, not hbm_bytes_per_s\n" in text
    assert "    instead: the calibration's times of qwen2.5-1.5b, qwen2.5-14b, " in text
    assert "instead" not in odc("hardware", "generic").stdout


def test_a_column_of_a_file_of_lengths_can_be_looked_at(tmp_path):
    file = tmp_path / "two.jsonl"
    file.write_text('{"a": 1, "b": 2}\n{"a": 3, "b": 4}\n')
    assert "choose one with --column of: a, b" in CliRunner().invoke(app, ["workloads", str(file)]).stderr
    found = CliRunner().invoke(app, ["workloads", str(file), "--column", "b"])
    assert "two: 2 samples, 6 tokens" in found.stdout


@pytest.mark.parametrize("command", [["workloads"], ["workloads", "swesmith"], ["models"], ["hardware", "generic"]])
def test_listings_for_machines(odc, command):
    assert json.loads(odc(*command, "--json").stdout)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "0"], "devices: got 0, expected greater than or equal to 1"),
        (["--minibatch-size", "-2"], "minibatch_size: got -2"),
        (["--scale", "0"], "scale: got 0.0, expected greater than 0"),
        (["--workload", "longaling"], "unknown workload 'longaling': did you mean 'longalign'?"),
        (["--model", "qwen2.5-7"], "unknown model 'qwen2.5-7': did you mean 'qwen2.5-7b'?"),
        (["--hardware", "h200"], "unknown hardware 'h200': did you mean 'h200-nvlink'?"),
        (["--policy", ","], "--policy: got no name"),
        (["--workload", "x" * 5000], "unknown workload"),
        (["--policy", "lb-maxi"], "unknown policy 'lb-maxi': did you mean 'lb-mini'?"),
        (["--schedule", "ocd"], "unknown schedule 'ocd': did you mean 'odc'?"),
        (["--overlong", "cut"], "overlong: got 'cut', expected 'error', 'drop', 'clip' or 'scale'"),
        (["--barrier", "never"], "barrier: got 'never'"),
        (["--sharding", "zero9"], "sharding: got 'zero9'"),
        (["--max-tokens", "5000"], "--overlong drop|clip|scale"),
        (["--lengths", "none.txt"], "none.txt: no such file"),
        (["--lengths", "."], "directory"),
        (["--lengths", "empty.txt"], "empty"),
        (["--lengths", "zero.txt"], "line 2"),
        (["--lengths", "nan.txt"], "line 1"),
        (["--lengths", "words.txt"], "many"),
        (["--lengths", "table.csv", "--column", "tokns"], "tokens"),
        (["--lengths", "broken.jsonl"], "line 2"),
        (["--lengths", "three.txt"], "got 3 samples, expected at least one for each of 8 devices"),
        (["--config", "none.toml"], "none.toml: no such study file"),
        (["--config", "typo.toml"], "unknown field 'devcies': did you mean 'devices'?"),
        (["--plan", "none.json"], "none.json: no such file"),
        (["--plan", "half.json"], "half.json: not valid JSON"),
        (["--out", "empty.txt"], "is a file, expected a directory"),
        (["--out", "empty.txt/out"], "cannot be created"),
        (["--json", "."], "is a directory"),
        (["--save-plan", "p.json"], "--save-plan needs exactly one --policy"),
        (["--baseline", "collective"], "expected schedule/policy"),
        (["--hardware", "bad.toml"], "bytes_per_s"),
        (["--model", "bad"], "model_type"),
        (["--devcies", "4"], "unknown option '--devcies': did you mean '--devices'?"),
        (["--outt=x"], "unknown option '--outt': did you mean '--out'?"),
        (["--zzzzzzzzzzzz", "4"], "unknown option '--zzzzzzzzzzzz': see --help"),
        (["-q"], "unknown option '-q'"),
        (["longalign"], "got 'longalign', expected options only, as --field value"),
        (["--recipe"], "--recipe: got no value"),
        (["--recipe", "cheap"], "--recipe: got 'cheap', expected 'paper' or 'mixed'"),
        (["--recompute", "maybe"], "--recompute: got 'maybe', expected a valid boolean"),
        (["--forward-prefetch", "-1"], "--forward-prefetch: got '-1', expected greater than or equal to 1"),
        (["--device-speed", "1,fast"], "--device-speed: got 'fast', expected a valid number"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(odc, tmp_path, arguments, message):
    files = {
        "empty.txt": "",
        "zero.txt": "5\n0\n7\n",
        "nan.txt": "nan\n",
        "words.txt": "12\nmany\n",
        "three.txt": "1\n2\n3\n",
        "table.csv": "id,tokens\na,5\n",
        "broken.jsonl": "5\n{oops\n",
        "typo.toml": "devcies = 4\n",
        "half.json": '{"schema_version": 1, "min',
        "bad.toml": '[cluster]\nname = "x"\ndevices_per_node = 8\n[device]\nname = "x"\npeak_flops = 1e15\n'
        "hbm_bytes_per_s = 1e12\nmemory_bytes = 8e10\n[intra]\nbytes_per_s = -3\nlatency_s = 0\n",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.json").write_text('{"model_type": "mixtral"}')
    result = odc("simulate", *QUICK[:2], *arguments, code=2)
    assert result.stdout == "" or "--json" in arguments
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--devices", "many"], "--devices"),
        (["simulat"], "simulat"),
        (["simulate", "--polcy", "lb-mini"], "--polcy"),
        (["plan"], "--out"),
    ],
)
def test_mistakes_in_the_flags_are_one_line_too(arguments, message, tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent)}
    command = [sys.executable, "-m", "cli", *arguments]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert result.returncode == 2
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_folder(odc, tmp_path):
    (tmp_path / "locked").mkdir(mode=0o500)
    assert "locked/out" in odc("simulate", *QUICK, "--out", "locked/out", code=2).stderr


def test_an_interrupt_is_known_through_compiled_code():
    inner, outer = SystemError("inner"), SystemError("outer")
    inner.__cause__, outer.__cause__ = KeyboardInterrupt(), inner
    assert _is_interrupt(outer)
    assert _is_interrupt(KeyboardInterrupt())
    assert not _is_interrupt(SystemError("a bug"))


def test_ctrl_c_leaves_nothing_half_written(tmp_path):
    command = [sys.executable, "-m", "cli", "simulate", "--minibatches", "20000", "--out", "out"]
    root = Path(__file__).parent.parent
    environment = os.environ | {"PYTHONPATH": str(root)}
    process = subprocess.Popen(
        command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    time.sleep(7.0)  # past the imports on a slow machine, far from the end
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert not list(tmp_path.rglob("*.*"))
