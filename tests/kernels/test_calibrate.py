import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from cli import app  # noqa: E402
from odc_kernels import (  # noqa: E402
    calibrate,
    calibrate_compute,
    calibrate_copies,
    calibrate_optimizer,
    calibrate_phases,
    lm,
)
from odc_kernels import calibrate_shapes as shapes  # noqa: E402
from odc_kernels.calibrate_file import Draft, Talk  # noqa: E402
from odc_kernels.calibrate_phases import Lab, _effort  # noqa: E402
from odc_kernels.calibrate_timing import LONG_S, Effort, Item, Pace, Timed, _plan, _timed, measure  # noqa: E402
from odc_kernels.calibrate_transfers import interpolation_checks, with_beside  # noqa: E402
from odc_kernels.calibrate_waiting import slowdown  # noqa: E402
from odc_kernels.ranks import Failure, RankError, run_ranks  # noqa: E402
from odc_sim.calibration import TransferSample, load_calibration  # noqa: E402
from odc_sim.calibration_report import failed, how_measured, write_calibration_report  # noqa: E402
from odc_sim.errors import InputError, pip_install  # noqa: E402
from odc_sim.models import BUILT_IN, load_model  # noqa: E402

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
COMMAND = [sys.executable, str(ROOT / "cli.py"), "calibrate", "--quick", "--device", "cpu"]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("calibrate")
    done = subprocess.run(
        [*COMMAND, "--out", "mine.json"], cwd=folder, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Calibration of a CPU, 2 ranks" in done.stdout
    assert "1/6 ceilings" in done.stderr
    assert "wrote mine.json and report.md, bandwidth.png, cost.png in mine-report" in done.stderr
    return folder / "mine.json"


def test_everything_is_measured(file):
    found = load_calibration(file)
    assert failed(found) == {}
    assert {row.op for row in found.transfers} == {"all_gather", "reduce_scatter", "gather", "scatter_accumulate"}
    assert {row.dtype for row in found.transfers if row.op == "gather"} == {"bf16", "fp32"}
    assert {(fit.unit, fit.direction) for fit in found.fits} == {
        ("layer", "forward"),
        ("layer", "backward"),
        ("layer", "backward_recompute"),
        ("embedding", "forward"),
        ("embedding", "backward"),
        ("head_loss", "forward"),
        ("head_loss", "backward_recompute"),
    }
    for fit in found.fits:
        assert fit.model == "tiny"
        assert fit.repeat_rel_spread is not None
        key = (fit.unit, fit.direction)
        assert any(s.heldout for s in found.compute if (s.unit, s.direction) == key)
        assert fit.heldout_max_rel_error > 0
    assert {copy.op for copy in found.copies} == set(calibrate_copies.OPS)
    tiny = load_model("tiny")
    assert found.optimizer[-1].parameters >= tiny.parameters / 2
    assert found.optimizer[-1].publish_s > 0
    assert found.ceilings.p2p_bytes_per_s > 0
    assert found.host is None
    assert found.environment["packages"]["torch"] == torch.__version__
    about = how_measured(found)
    assert about["models"] == ["tiny"]
    assert {check["op"] for check in about["interpolation"]} == {row.op for row in found.transfers}


def test_the_simulator_takes_it_and_has_measurements_for_everything(file):
    rng = random.Random(0)
    (file.parent / "lengths.txt").write_text("\n".join(str(rng.randint(300, 2000)) for _ in range(64)))
    command = f"simulate --hardware {file} --model tiny --devices 2 --lengths {file.parent / 'lengths.txt'}"
    command += f" --minibatches 4 --max-tokens 2000 --out {file.parent / 'study'} --json {file.parent / 'r.json'}"
    done = CliRunner().invoke(app, command.split())
    assert done.exit_code == 0, done.output
    for row in json.loads((file.parent / "r.json").read_text())["rows"]:
        provenance = row["provenance"]
        assert provenance["compute"] == provenance["transfers"] == provenance["optimizer"] == "measured"


def test_the_report_is_made_again_from_the_file_alone(file):
    text = (file.parent / "mine-report" / "report.md").read_text()
    for part in (
        "## Transfers",
        "| 64 KiB |",
        "tiny | layer forward",
        "## What will be extrapolated",
        "to 2,048 tokens",
    ):
        assert part in text
    done = CliRunner().invoke(app, ["calibrate", "--report", str(file)])
    assert done.exit_code == 0
    assert "tiny layer backward_recompute" in done.output
    assert (file.parent / "mine-report" / "report.md").read_text() == text


def test_ctrl_c_leaves_a_whole_file(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--out", "cut.json"], cwd=tmp_path, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    file = tmp_path / "cut.json"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (file.exists() and load_calibration(file).transfers):
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert "interrupted; every file that was written is whole" in said
    found = load_calibration(file)
    assert found.transfers
    assert not found.fits
    assert [path.name for path in tmp_path.iterdir()] == ["cut.json"]


def run_one(rank, options):
    """A rank with a phase that breaks, and one that measures."""

    def phases(lab):
        return [("broken", lambda: 1 / 0 if rank < 0 else _break(rank)), ("ceilings", lab.ceilings)]

    calibrate.Lab.phases = phases
    return calibrate.run_rank(rank, options)


def _break(rank):
    if rank == 1:
        raise RuntimeError("no such link\nand a long story")


def test_a_phase_that_fails_is_recorded_and_the_rest_goes_on(tmp_path):
    options = calibrate.make_options(tmp_path / "c.json", [], True, "cpu", "auto", 2, command="odc calibrate")
    found, other = run_ranks(run_one, 2, options, timeout_s=100)
    assert other is None
    assert failed(found) == {"broken": "rank 1: RuntimeError: no such link"}
    assert found.ceilings.gemm_flops > 0
    assert load_calibration(tmp_path / "c.json") == found
    done = CliRunner().invoke(app, ["calibrate", "--report", str(tmp_path / "c.json")])
    assert "FAILED: broken: rank 1: RuntimeError: no such link" in done.output


SHORT = """
from odc_kernels.calibrate_phases import Lab
import cli
phases = Lab.phases
Lab.phases = lambda lab: [phase for phase in phases(lab) if not phase[0].startswith("compute")]
cli.main()
"""


def test_under_torchrun(tmp_path):
    (tmp_path / "short.py").write_text(SHORT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=1", "--standalone", "short.py"]
    command += [*COMMAND[2:], "--out", "one.json"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, timeout=200, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = load_calibration(tmp_path / "one.json")
    assert found.transfers == ()
    assert "transfers: there is only one rank" in how_measured(found)["left_out"]
    assert "all transfers: none were measured" in (tmp_path / "one-report" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--device cuda: torch sees no GPU here; use --device cpu"),
        (["--device", "tpu"], "--device: got 'tpu', expected cuda or cpu"),
        (["--device", "cpu", "--model", "qwen2.5-7"], "unknown model 'qwen2.5-7': did you mean 'qwen2.5-7b'?"),
        (["--device", "cpu", "--backend", "cuda"], "--backend cuda with --device cpu: GPUs need cuda or nvshmem"),
        (["--device", "cpu", "--backend", "rdma"], "--backend: got 'rdma', expected auto, cuda, nvshmem or cpu"),
        (["--device", "cpu", "--ranks", "0"], "--ranks: got 0, expected 1 to 64"),
        (["--device", "cpu", "--out", "/"], "--out /: is a directory, expected the name of the file to write"),
        (["--report", "none.json"], "none.json: no such file"),
    ],
)
def test_mistakes_are_one_line(arguments, message, monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["calibrate", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert done.output.count("\n") == 1


def test_without_transformers(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "transformers" else object())
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu"])
    assert done.exit_code == 2
    assert "-m pip install 'odc-toolkit[train]'" in done.output


def test_without_torch(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = CliRunner().invoke(app, ["calibrate"])
    assert done.exit_code == 2
    assert f"error: calibrate: torch is not installed: {pip_install('train')}\n" in done.output


def test_a_dead_rank_ends_in_one_line_with_the_file_kept(monkeypatch, tmp_path):
    def die(*arguments, **options):
        raise RankError("...", [Failure(rank=1, kind="died", message="rank 1 died with exit code -9", details="")])

    monkeypatch.setattr(calibrate, "run_ranks", die)
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--out", str(tmp_path / "c.json")])
    assert done.exit_code == 1
    assert done.output.startswith("error: calibrate: rank 1 died with exit code -9; ")
    assert done.output.endswith("c.json has what was measured before\n")


def test_what_a_rank_refuses_is_a_mistake_of_the_caller(monkeypatch, tmp_path):
    def refuse(*arguments, **options):
        failures = [
            Failure(rank=r, kind=k, message=f"{k} {r}", details="") for r, k in enumerate(("died", "InputError"))
        ]
        raise RankError("...", failures)

    monkeypatch.setattr(calibrate, "run_ranks", refuse)
    done = CliRunner().invoke(app, ["calibrate", "--device", "cpu", "--out", str(tmp_path / "c.json")])
    assert (done.exit_code, done.output) == (2, "error: InputError 1\n")


def test_a_fit_that_rests_on_unsteady_times_fails_its_phase(monkeypatch):
    lab = object.__new__(Lab)
    lab.options = SimpleNamespace(quick=True, on_gpu=False)
    lab.draft, lab.effort, lab.pace, lab.talk = Draft.start(None, "", {}), {"compute": None}, None, Talk([], loud=False)
    monkeypatch.setattr(calibrate_phases, "measure_model", lambda *_, **__: ([], ["why"]))
    monkeypatch.setattr(calibrate_phases, "fits_of", lambda *_: ([], ["layer forward: too few", "head: too few"]))
    with pytest.raises(RuntimeError, match=r"^layer forward: too few; head: too few$"):
        lab.compute("tiny")
    assert lab.draft.left_out == ["why"]


def test_progress_on_a_terminal(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    talk = Talk(["first", "second"], loud=True)
    talk.phase("second")
    talk.say("something small")
    talk.line("a line that stays")
    talk.close()
    assert "a line that stays" in capsys.readouterr().err


# Which samples count.

EFFORT = Effort(budget_s=0.01, limit_s=10, most=5, spread=1.1, drift=0.03)


def test_two_quiet_passes_that_agree_are_not_flagged():
    timed = _timed([[1.0, 1.01, 1.0], [1.02, 1.01, 1.02]], EFFORT)
    assert not timed.flagged
    assert timed.percentiles["samples"] == 6
    assert timed.percentiles["p50_s"] == pytest.approx(1.01)


def test_a_pass_that_differs_is_flagged_and_a_third_one_that_agrees_replaces_it():
    disturbed, quiet = [1.5, 1.5, 1.5], [1.0, 1.0, 1.0]
    assert _timed([disturbed, quiet], EFFORT).flagged
    timed = _timed([disturbed, quiet, [1.01, 1.01, 1.01]], EFFORT)
    assert not timed.flagged
    assert max(timed.samples) < 1.1  # the disturbed pass is not averaged in


def test_a_noisy_sample_is_flagged():
    assert _timed([[1, 1.4, 1, 1.4], [1, 1.4, 1.4, 1]], EFFORT).flagged


def test_long_steps_need_few_samples_and_short_ones_a_run_up():
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 0)
    long = _plan(2 * LONG_S, 0.0, EFFORT, gpu, False)
    assert (long.untimed, long.samples, long.long) == (1, 2, True)
    short = _plan(0.01, 0.02, EFFORT, gpu, False)
    assert (short.untimed, short.samples, short.lead_s) == (4, 3, 0.02)  # rounds of 30 ms
    assert _plan(1e-4, 0.0, EFFORT, gpu, False).samples == EFFORT.most
    assert _plan(0.01, 0.0, EFFORT, cpu, True).clock is time.perf_counter
    assert _plan(0.01, 0.0, EFFORT, cpu, False).clock is time.thread_time


def test_a_lead_is_made_of_whole_pieces_of_work():
    pace = Pace.__new__(Pace)
    pace._work_s = 0.011
    assert [pace.lead_s(seconds) for seconds in (0.0, 0.004, 0.02)] == pytest.approx([0.0, 0.011, 0.022])


def test_gpus_are_held_to_more_than_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    options = calibrate.make_options(Path("c.json"), [], False, None, "auto", None, command="x")
    assert (options.device, options.backend, options.ranks, options.models) == ("cuda", "cuda", 2, calibrate.MODELS)
    assert _effort(options)["compute"].drift == 0.05
    with pytest.raises(InputError, match="--ranks: got 3, expected 1 to 2"):
        calibrate.make_options(Path("c.json"), [], False, None, "nvshmem", 3, command="x")


def test_a_layer_that_is_called_by_keyword():
    class Layer(torch.nn.Module):
        def forward(self, hidden_states, *, scale):
            return (hidden_states * scale,)

    class Lm:
        spec = load_model("tiny")
        layers = (Layer(),)

        def hidden(self, batch):
            return self.layers[0](hidden_states=torch.ones(1, batch.num_tokens, 2), scale=2.0)

    lm = Lm()
    args, kwargs = calibrate_compute.layer_arguments(lm, calibrate_compute._batch((3, 2), 9, torch.device("cpu")))
    assert args == ()
    assert kwargs["scale"] == 2.0
    for step in calibrate_compute._layer_steps(lm, torch.device("cpu"), (3, 2), recompute=False):
        step()


def found(lengths, seconds, *, part=("layer", "forward"), held_out=False, flagged=False):
    timed = Timed(samples=(seconds,) * 4, passes_s=(seconds, seconds * 1.01), flagged=flagged)
    return calibrate_compute.Found(part=part, lengths=lengths, held_out=held_out, timed=timed)


def test_flagged_microbatches_do_not_enter_the_fit():
    def exact(lengths):
        return 1e-3 + 1e-6 * sum(lengths) + 1e-10 * sum(n * n for n in lengths)

    lengths = [(1000,), (5000,), (9000,), (1000,) * 9]
    series = [found(each, exact(each)) for each in lengths]
    series.append(found((4000,), 1.0, flagged=True))
    series.append(found((7000,), 1.1 * exact((7000,)), held_out=True))
    (fit,), problems = calibrate_compute.fits_of("m", series)
    assert problems == []
    assert fit.c1_s_per_token == pytest.approx(1e-6)
    assert fit.max_rel_error == pytest.approx(0, abs=1e-9)
    assert fit.heldout_max_rel_error == pytest.approx(1 - 1 / 1.1)
    assert fit.valid_tokens == (1000, 9000)
    assert fit.repeat_rel_spread == pytest.approx(0.01)


def test_with_too_few_steady_microbatches_all_are_used_and_said_to_be():
    series = [found((1000,), 1.0), found((2000,), 2.0), found((3000,), 3.0, flagged=True)]
    (fit,), (problem,) = calibrate_compute.fits_of("m", series)
    assert problem.startswith("layer forward: a fit needs at least 3 different microbatches with steady times, got 2")
    assert problem.endswith("until then all are used")
    assert fit.c1_s_per_token == pytest.approx(1e-3)
    assert fit.heldout_max_rel_error is None  # not 0: nothing was checked


def test_a_unit_without_enough_microbatches_costs_no_other_its_fit():
    series = [found((1000 * k,), float(k), part=("layer", "backward")) for k in (1, 2)]
    series += [found((1000 * k,), float(k)) for k in (1, 2, 3)]
    (fit,), (problem,) = calibrate_compute.fits_of("m", series)
    assert (fit.unit, fit.direction) == ("layer", "forward")
    assert problem.startswith("layer backward: a fit needs at least 3 different microbatches")
    assert problem.endswith("until then it has no fit")


def test_nothing_to_measure_is_no_error(monkeypatch):
    monkeypatch.setattr("odc_kernels.calibrate_timing.estimate", lambda *arguments, **options: 1e-3)
    pace = Pace(torch.device("cpu"))
    assert measure([], pace, EFFORT, how="max", say=lambda text: None) == ({}, [])


def test_out_of_memory_leaves_an_item_out(monkeypatch):
    monkeypatch.setattr("odc_kernels.calibrate_timing._survey", lambda item, pace: None)
    monkeypatch.setattr("odc_kernels.calibrate_timing.estimate", lambda *arguments, **options: 1e-3)
    items = [Item(name="huge", make=lambda: [lambda: None], work=1)]
    pace = Pace(torch.device("cpu"))
    assert measure(items, pace, EFFORT, how="max", say=lambda text: None) == ({}, ["huge: out of memory"])


def left_out_rank(rank):
    pace = Pace(torch.device("cpu"))
    items = [Item(name=f"item {n}", make=lambda: [lambda: time.sleep(1e-3)], work=n) for n in (1, 2, 10**6)]
    timed, left_out = measure(items, pace, EFFORT, how="max", say=lambda text: None)
    return sorted(timed), left_out


def test_what_would_take_too_long_is_left_out():
    for timed, left_out in run_ranks(left_out_rank, 2):
        assert timed == ["item 1", "item 2"]
        assert left_out[0].startswith("item 1000000: would take about ")


# Sizes and shapes.


def test_parameter_shapes_are_the_models():
    all_biases = replace(load_model("tiny"), o_bias=True, mlp_bias=True, qk_norm=True, tied_embeddings=True)
    for model in (*BUILT_IN, all_biases):
        assert calibrate_copies.elements_of(shapes.layer_tensors(model)) == model.layer_parameters
        assert calibrate_copies.elements_of(shapes.root_tensors(model)) == model.root_parameters


def test_transfer_sizes():
    small = [load_model("qwen2.5-1.5b")]
    full = shapes.transfer_sizes(small, 2, quick=False, on_gpu=True)
    assert full[0] == 4096
    assert full[-1] == 1 << 30
    assert len(full) == 19
    assert shapes.transfer_sizes(small, 2, quick=True, on_gpu=True) == full[::2]
    # the root of the 32B model has shards of 3.1 GB in fp32
    assert shapes.transfer_sizes([load_model("qwen2.5-32b")], 2, quick=False, on_gpu=True)[-1] == 1 << 32


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("on_gpu", [True, False])
def test_microbatches_tell_tokens_from_squares(quick, on_gpu):
    for kind in (shapes.layer_shapes, shapes.plain_shapes):
        found = kind(quick, on_gpu)
        tokens = [sum(lengths) for lengths in found.all]
        assert tokens == sorted(tokens)
        assert not set(found.fit) & set(found.held_out)
        assert found.held_out
        spread = [sum(n * n for n in lengths) / sum(lengths) for lengths in found.fit if sum(lengths) >= 2000]
        assert max(spread) > 4 * min(spread)
    if on_gpu:
        assert max(sum(lengths) for lengths in found.fit) == 65_536
        assert sum(sum(lengths) >= 4096 for lengths in found.held_out) >= 2


def test_shapes_in_words():
    assert shapes.name((1500,) * 28) == "28 x 1500 tokens"
    assert shapes.name((300, 500)) == "300 + 500 tokens"


def transfer(num_bytes, seconds, backend="nccl"):
    return TransferSample(
        op="all_gather", backend=backend, world_size=2, bytes=num_bytes, dtype="bf16",
        p20_s=seconds, p50_s=seconds, p80_s=seconds, samples=5, flagged=False,
    )  # fmt: skip


def test_interpolation_checks_by_hand():
    # halfway in the logarithm: the geometric mean of 1 and 4
    table = [transfer(1 << 20, 1.0), transfer(1 << 22, 4.0), transfer(1 << 22, 1.0, "other")]
    (check,) = interpolation_checks(table, [transfer(1 << 21, 2.5)])
    assert check["interpolated_s"] == pytest.approx(2.0)
    assert check["rel_error"] == pytest.approx(2.0 / 2.5 - 1)
    assert interpolation_checks(table, [transfer(1 << 23, 9.0)]) == []
    assert interpolation_checks(table, [transfer(1 << 21, 9.0, "unknown")]) == []
    assert interpolation_checks(table, [transfer(1 << 20, 1.0)])[0]["rel_error"] == pytest.approx(0)


def test_beside_replaces_alone():
    alone = [transfer(1, 1.0), transfer(2, 2.0)]
    beside = [replace(alone[1], overlapped_p50_s=3.0, beside_gemm_s=gemm_s) for gemm_s in (1e-4, 1e-3)]
    assert with_beside(alone, beside) == [alone[0], *beside]


def test_what_a_waiting_collective_costs_by_hand():
    # 3 products of 1 s alone, then 3 beside, of which the first 2 may have begun before it: only the last counts
    ends = [0, 1, 2, 3, 5, 8, 9.5]
    assert slowdown(list(pairwise(ends)), 3) == 1.5


# Copies run as FSDP2 runs them.


@pytest.mark.parametrize("op", calibrate_copies.OPS)
def test_copies_run_on_uneven_parameters(op):
    (step,) = calibrate_copies.steps_of(op, [(5, 3), (4,), (7, 2)], 2, torch.device("cpu"))
    step()


def host_rank(rank):
    return calibrate_optimizer.measure_host(Pace(torch.device("cpu")))


def test_host_time_is_that_of_the_slowest_rank():
    first, second = run_ranks(host_rank, 2, timeout_s=120)
    assert first == second
    assert first.seconds_per_unit_backward > 0


def test_a_host_is_measured_with_a_real_models_layers_where_they_fit():
    assert calibrate_optimizer.host_model(40e9) == "qwen2.5-1.5b"  # 12 bytes of each of 1.8B parameters
    assert calibrate_optimizer.host_model(10e9) == "tiny"


def copies_rank(rank):
    effort = replace(EFFORT, limit_s=1e-9)
    pace = Pace(torch.device("cpu"))
    models = [load_model("tiny")]
    return calibrate_copies.measure_copies(models, pace, effort, world_size=2, parts=(8,), say=lambda text: None)


def test_copies_that_would_take_too_long_are_left_out():
    samples, left_out = run_ranks(copies_rank, 1, timeout_s=60)[0]
    assert len(samples) == len(calibrate_copies.OPS)  # of each the smallest
    assert left_out[0].startswith("copy_in of 32,832 elements: would take about ")


def optimizer_rank(rank):
    pace = Pace(torch.device("cpu"))
    return calibrate_optimizer.measure_optimizer(
        [load_model("tiny")], pace, EFFORT, memory_bytes=1_000_000, say=lambda text: None
    )


def test_an_optimizer_that_does_not_fit_is_left_out():
    (samples, left_out), _ = run_ranks(optimizer_rank, 2, timeout_s=120)
    assert [sample.parameters for sample in samples] == [18_560]
    assert left_out == ["optimizer of 0.0B parameters a rank: out of memory"]


def test_a_directory_is_no_output(tmp_path):
    with pytest.raises(InputError, match="is a directory"):
        calibrate.make_options(tmp_path, [], True, "cpu", "auto", None, command="x")


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch):
    def refused(text, out):
        with pytest.raises(InputError, match=text):
            calibrate.make_options(out, [], True, "cpu", "auto", None, command="x")

    (tmp_path / "file").write_text("")
    refused("its folder cannot be made: ", tmp_path / "file" / "c.json")
    monkeypatch.setattr("os.access", lambda *_: False)
    refused("nothing can be written to its folder", tmp_path / "c.json")


def free_bytes_rank(rank):
    calibrate_phases._free_bytes = lambda device, world_size: 1e9 * (rank + 1)
    options = calibrate.make_options(Path("c.json"), [], True, "cpu", "auto", None, command="x")
    return Lab(options, torch.device("cpu"), Draft.start(None, "", {}))._agreed_free_bytes()


def test_ranks_agree_on_the_memory_that_they_have():
    assert run_ranks(free_bytes_rank, 2) == [1e9, 1e9]


def test_the_report_of_something_else(tmp_path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(InputError, match="schema_version"):
        write_calibration_report(tmp_path / "x.json")


def test_the_lead_of_a_layer_is_a_forward_that_leaves_nothing_behind(monkeypatch):
    monkeypatch.setattr(calibrate_compute, "LEAD_ELEMENTS", 300 * 64)
    model = lm.build_lm("tiny", device=torch.device("cpu"), num_layers=1, recompute=False)
    lead = calibrate_compute._lead(model, torch.device("cpu"))
    lead()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_embeddings_backward_adds_to_the_heads_gradient_where_both_are_one_table(tmp_path):
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    config = {"model_type": "qwen2", "num_attention_heads": 1, "num_key_value_heads": 1, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config | sizes))
    model = lm.build_lm(str(tmp_path / "config.json"), device=CPU, recompute=False)
    table = model.embedding.weight
    assert model.model.get_output_embeddings().weight is table
    embed, embed_backward, head, head_backward = calibrate_compute._root_steps(model, CPU, (5, 3))
    embed()
    head()
    head_backward()
    of_head = table.grad.clone()
    sums = []
    table.register_post_accumulate_grad_hook(lambda parameter: sums.append(parameter.grad.clone()))
    embed_backward()
    tokens = calibrate_compute._batch((5, 3), 16, CPU).tokens[0].unique()
    added_to = (sums[0] != of_head).any(dim=1)
    assert of_head.abs().sum() > 0
    assert set(added_to.nonzero()[:, 0].tolist()) == set(tokens.tolist())
    assert table.grad is None
