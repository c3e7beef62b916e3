"""`odc train` on CPU ranks."""

import functools
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

from kernels import train_checks  # noqa: E402
from kernels.train_checks import job_of  # noqa: E402

from odc_kernels.ranks import Failure, RankError, run_ranks  # noqa: E402
from odc_kernels.train import _in_one_line, train  # noqa: E402
from odc_kernels.train_options import Options, make_job  # noqa: E402
from odc_sim.errors import InputError, RunError  # noqa: E402
from odc_sim.run_files import read_run  # noqa: E402
from odc_sim.timeline import idle_by_cause  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STEPS = 4


@functools.cache
def outcomes():
    return run_ranks(train_checks.run, 2, timeout_s=280)


@pytest.mark.parametrize(("schedule", "policy"), train_checks.CASES)
def test_the_gradient_is_that_of_one_process(schedule, policy):
    for found in outcomes():
        assert found[f"{schedule}/{policy}"] < 1e-5


def long_job(out, schedule="odc", **fields):
    study = train_checks.STUDY.model_copy(update={"minibatches": STEPS})
    job = job_of(schedule, out=out)
    dealt = train_checks.plan(study, "lb-mini")
    return replace(job, plan=dealt, config=replace(job.config, steps=STEPS), **fields)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    out = tmp_path_factory.mktemp("train") / "run"
    train(long_job(out))
    return out


def test_a_run_is_readable_and_its_numbers_fit_together(unbroken):
    run = read_run(unbroken)
    assert run.steps["minibatch"].tolist() == list(range(STEPS))
    assert abs(run.steps["loss"] - np.log(256)).max() < 0.1
    timeline, counts = run.timeline, run.plan.counts()
    layers = 4
    for number, row in run.steps.iterrows():
        spans = timeline.spans(number)
        assert row["samples"] == 8
        own = [span for span in spans if span.stream == "compute"]
        busy_s = sum(s.end_s - s.start_s for s in own if s.kind in ("forward", "backward", "head_loss"))
        assert row["idle_rate"] == pytest.approx(1 - busy_s / (2 * row["makespan_s"]), abs=1e-9)
        assert min(span.start_s for span in own) == 0
        assert max(span.end_s for span in own) == pytest.approx(row["makespan_s"], abs=1e-3)
        for rank in (0, 1):
            mine = [span for span in own if span.rank == rank]
            assert sum(s.end_s - s.start_s for s in mine) == pytest.approx(row["makespan_s"], abs=1e-3)
            for microbatch in range(counts[number, rank]):
                found = [(s.kind, s.unit) for s in mine if s.microbatch == microbatch and s.kind != "wait"]
                units = list(range(layers + 1))
                expected = [("forward", unit) for unit in units] + [("head_loss", 0)]
                assert found == [*expected, ("backward", 0), *[("backward", u) for u in reversed(units)]]
                for stream, kinds in (("unshard", 2 * layers + 1), ("reduce", layers + 1)):
                    assert kinds == sum(
                        s.rank == rank and s.microbatch == microbatch and s.stream == stream for s in spans
                    )
                host = [s for s in spans if s.rank == rank and s.stream == "host" and s.microbatch == microbatch]
                assert len(host) == 2 * layers + 4
            assert [s.kind for s in mine if s.kind in ("optimizer", "publish")] == ["optimizer", "publish"]
    idle_s = (run.steps["idle_rate"] * 2 * run.steps["makespan_s"]).sum()
    assert sum(idle_by_cause(timeline).values()) == pytest.approx(idle_s, rel=1e-2)


def test_a_resumed_run_has_the_losses_of_an_unbroken_one(unbroken, tmp_path):
    job = long_job(tmp_path / "run", checkpoint_every=2)
    train(replace(job, config=replace(job.config, steps=3)))
    (folder,) = (job.out / "checkpoint").iterdir()
    assert folder.name == "minibatch-3"
    (folder / ".metadata").rename(tmp_path / "metadata")
    with pytest.raises(InputError, match="has no checkpoint to resume from; train with --checkpoint-every N"):
        train(replace(job, resume=True))
    (tmp_path / "metadata").rename(folder / ".metadata")
    with pytest.raises(
        InputError, match="--resume: the checkpoint holds 3 minibatches, 3 were asked for; go further with"
    ):
        train(replace(job, config=replace(job.config, steps=3), resume=True))
    train(replace(job, resume=True))
    run, expected = read_run(job.out), read_run(unbroken)
    assert run.steps["minibatch"].tolist() == list(range(STEPS))
    np.testing.assert_allclose(run.steps["loss"], expected.steps["loss"], rtol=1e-6)
    np.testing.assert_allclose(run.steps["grad_norm"], expected.steps["grad_norm"], rtol=1e-5)
    assert np.unique(run.timeline.minibatch).tolist() == list(range(STEPS))
    assert run.config.steps == STEPS


def test_an_emulated_run_of_ones_own_model_keeps_what_it_was_made_of(tmp_path, capfd):
    tiny = {"model_type": "qwen2", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 1}
    tiny |= {"num_hidden_layers": 2, "intermediate_size": 64, "vocab_size": 50}
    (tmp_path / "mine.json").write_text(json.dumps(tiny))
    calibration = ROOT / "tests/data/calibration-small.json"
    fields = {"model": str(tmp_path / "mine.json"), "scale": 0.01, "minibatches": 3, "minibatch_size": 1}
    rest = {"config": None, "out": tmp_path / "run", "timeline": True, "command": ""}
    own = {"schedule": "collective", "device": "cpu", "compute": "emulated", "calibration": calibration}
    options = Options(**own, checkpoint_every=1, steps=2, warmup_steps=0)
    train(make_job(options, fields, resume=False, **rest))
    assert capfd.readouterr().err.startswith(f"emulated: units wait as on {calibration} (")
    train(make_job(Options(steps=3), {}, resume=True, **rest))
    run = read_run(tmp_path / "run")
    assert len(run.steps) == 3
    assert [folder.name for folder in (run.folder / "checkpoint").iterdir()] == ["minibatch-3"]
    assert run.calibration is not None
    resumed = make_job(Options(steps=3), {}, resume=True, **rest)
    assert resumed.spec.name == "mine"  # as in a calibration of it, though its file is now model.json
    assert json.loads((run.folder / run.config.model).read_text()) == tiny
    counts = {span.unit for span in run.timeline.spans(2) if span.kind == "forward"}
    assert counts == {0, 1, 2}


def test_a_loss_that_is_not_finite_stops_every_rank(tmp_path):
    job = long_job(tmp_path / "run", schedule="odc-local-sum", timeline=False)
    with pytest.raises(
        RunError, match=r"minibatch [12]: loss (nan|inf), gradient norm \S+: not finite, all ranks stop"
    ):
        train(replace(job, config=replace(job.config, learning_rate=1e18)))
    run = read_run(job.out)
    assert run.steps["minibatch"].iloc[0] == 0
    assert run.timeline is None
    assert np.isnan(run.steps["idle_rate"]).all()


def start(tmp_path, *flags, launcher=()):
    command = [sys.executable, *launcher, str(ROOT / "cli.py"), "train", "--model", "tiny", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--scale", "0.01", "--out", str(tmp_path / "run"), *flags],
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )


def wait_for_minibatch(process, number):
    for line in process.stderr:
        if line.startswith(f"minibatch {number} "):
            return
    raise AssertionError(f"it ended with {process.wait()}")


def test_ctrl_c_leaves_a_readable_run(tmp_path):
    process = start(tmp_path, "--minibatches", "500", "--schedule", "collective", "--checkpoint-every", "2")
    wait_for_minibatch(process, 4)
    os.killpg(process.pid, signal.SIGINT)
    rest = process.stderr.read()
    assert process.wait(30) == 130, rest
    assert rest.splitlines()[-2:] == [
        f"go on from the last checkpoint with: odc train --resume --out {tmp_path / 'run'}",
        "interrupted; every file that was written is whole",
    ]
    run = read_run(tmp_path / "run")
    assert len(run.steps) >= 5
    assert np.unique(run.timeline.minibatch).size >= 4


@pytest.mark.parametrize("schedule", ["collective", "odc"])
def test_a_dead_rank_ends_the_run_in_one_line(tmp_path, schedule):
    process = start(tmp_path, "--minibatches", "500", "--schedule", schedule)
    wait_for_minibatch(process, 2)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    ranks = [pid for pid in children if "spawn_main" in Path(f"/proc/{pid}/cmdline").read_text()]
    os.kill(int(ranks[1]), signal.SIGKILL)
    began_s = time.monotonic()
    rest = process.stderr.read()
    assert process.wait(30) == 1, rest
    assert time.monotonic() - began_s < 20
    assert rest.splitlines()[-1] == "error: rank 1 died with exit code -9: killed, most likely out of memory"
    assert len(read_run(tmp_path / "run").steps) >= 3


def test_it_runs_under_torchrun(tmp_path):
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    process = start(tmp_path, "--steps", "2", launcher=launcher)
    rest = process.stderr.read()
    assert process.wait(60) == 0, rest
    assert len(read_run(tmp_path / "run").steps) == 2


def test_the_first_cause_is_told_and_not_what_followed():
    def told(*kinds):
        failures = [Failure(rank=i, kind=kind, message=f"{kind} {i}", details="") for i, kind in enumerate(kinds)]
        return _in_one_line(RankError("all", failures))

    assert str(told("WindowError", "died")) == "died 1"
    assert str(told("RuntimeError", "RunError", "stuck")) == "RunError 1"
    assert isinstance(told("RuntimeError", "InputError"), InputError)
    assert isinstance(told("RuntimeError", "KeyboardInterrupt"), KeyboardInterrupt)
    assert isinstance(told("ValueError"), RankError)
    assert str(told("WindowError", "RuntimeError")) == "WindowError 0"
    assert isinstance(told("RuntimeError", "DistStoreError"), RankError)
    # What is not known to follow from another rank's failure is not hidden behind what does.
    assert isinstance(told("PermissionError", "WindowError", "stuck"), RankError)


def test_what_cannot_run_is_refused(tmp_path):
    job = long_job(tmp_path / "run")

    def refused(text, **changes):
        with pytest.raises(InputError, match=re.escape(text)):
            train(replace(job, **changes))

    unequal = train_checks.plan(train_checks.STUDY, "lb-mini")
    refused(
        "--schedule collective cannot run this plan: hangs: rank",
        plan=unequal,
        config=replace(job.config, schedule="collective", steps=1),
    )
    without = unequal.from_nested(
        [[[[0, 1]], []]],
        **{"workload": {}, "model": "tiny", "world_size": 2, "minibatch_size": 1, "max_tokens": 99, "policy": "own"},
        balancing_cost={"name": "", "source": ""},
        lengths=[5, 6],
    )
    refused(
        "--schedule collective-deferred cannot run this plan: hangs: rank 1 runs no microbatch in minibatch 0",
        plan=without,
        config=replace(job.config, schedule="collective-deferred", steps=1),
    )
    refused("unknown schedule 'odx': did you mean 'odc'", config=replace(job.config, schedule="odx"))
    refused("--steps 9: the plan has 4 minibatches", config=replace(job.config, steps=9))
    refused(
        f"the plan is for 2 ranks, this machine has {torch.cuda.device_count()} GPUs",
        config=replace(job.config, device="cuda"),
    )
    refused("qwen2.5-32b takes 590 GB on CPUs for parameters, gradients and AdamW alone", model="qwen2.5-32b")
    refused("none.json: no such file", calibration=Path("none.json"))
    refused("--data none: no such file or folder", data=Path("none"))
    assert not job.out.exists()
    refused(f"--resume: {job.out} holds no plan.json and config.toml", resume=True)
    job.out.mkdir()
    (job.out / "plan.json").write_text("{}")
    refused(f"--out {job.out}: holds a run; choose another folder, or go on with it: --resume")
    refused("is a file, expected a folder", out=Path(__file__))
    refused("cannot be made: Not a directory; choose another folder", out=Path(__file__) / "run")


def test_a_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InputError, match="nothing can be written there; choose another folder, or allow it"):
        train(long_job(tmp_path / "run"))


def test_a_resumed_run_goes_on_with_its_data(tmp_path):
    rows = [[(3 * i + length) % 256 for i in range(length)] for length in (20, 21, 22, 23, 24, 25, 26, 27)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    (tmp_path / "lengths.txt").write_text("".join(f"{len(row)}\n" for row in rows))
    fields = {"model": "tiny", "lengths": tmp_path / "lengths.txt", "minibatch_size": 2, "minibatches": 2}
    rest = {"config": None, "timeline": False, "command": ""}
    options = Options(device="cpu", data=tmp_path / "d.jsonl", checkpoint_every=1)
    train(make_job(options, fields, resume=False, out=tmp_path / "whole", **rest))
    train(make_job(replace(options, steps=1), fields, resume=False, out=tmp_path / "cut", **rest))
    train(make_job(Options(steps=2), {}, resume=True, out=tmp_path / "cut", **rest))
    whole, cut = read_run(tmp_path / "whole"), read_run(tmp_path / "cut")
    assert cut.config.data == whole.config.data == str(tmp_path / "d.jsonl")
    np.testing.assert_allclose(cut.steps["loss"], whole.steps["loss"], rtol=1e-6)
