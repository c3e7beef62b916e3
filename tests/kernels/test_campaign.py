"""Several runs in one start of the ranks: planned beforehand, skipped where time is short, left alone where done."""

import csv
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

from odc_kernels.campaign import load, main
from odc_sim.campaign_plans import Studies, write_campaign
from odc_sim.errors import InputError
from odc_sim.run_files import read_run

LENGTHS = [100, 300, 50, 600, 700, 80, 90, 200] * 2
PAIRS = ("collective/lb-micro", "odc/lb-mini")


def studies(folder, **changes):
    (folder / "lengths.txt").write_text("\n".join(map(str, LENGTHS)))
    fields = {
        "studies": {"mine": {"lengths": folder / "lengths.txt"}},
        "pairs": PAIRS,
        "common": {"devices": 2, "minibatches": 2, "minibatch_size": 2, "model": "tiny", "max_tokens": 2000},
    }
    return Studies(**(fields | changes))


@pytest.fixture
def campaign(tmp_path):
    rows = write_campaign(tmp_path, studies(tmp_path), "made by a test")
    assert [(row["schedule"], row["policy"]) for row in rows] == [("collective", "lb-micro"), ("odc", "lb-mini")]
    return tmp_path / "campaign.toml"


def test_the_prediction_is_written_beside_the_plans(campaign):
    with (campaign.parent / "prediction.csv").open(newline="") as file:
        first, second = csv.DictReader(file)
    assert first["speedup"] == "1.0000"
    assert float(second["makespan_s"]) * float(second["speedup"]) == pytest.approx(float(first["makespan_s"]), rel=1e-3)
    assert sorted(p.name for p in (campaign.parent / "plans").iterdir()) == ["mine-lb-micro.json", "mine-lb-mini.json"]


def test_runs_follow_each_other_and_those_that_are_there_are_left_alone(campaign, tmp_path, capfd):
    arguments = [str(campaign), "--out", str(tmp_path / "runs"), "--device", "cpu"]
    main([*arguments, "--budget-s", "1"])
    assert "skipped: mine-collective-lb-micro, mine-odc-lb-mini" in capfd.readouterr().out
    main(arguments)
    assert "skipped: nothing" in capfd.readouterr().out
    runs = [read_run(tmp_path / "runs" / f"mine-{name}") for name in ("collective-lb-micro", "odc-lb-mini")]
    assert [run.label for run in runs] == ["collective/lb-micro", "odc/lb-mini"]
    losses = [run.steps["loss"].to_list() for run in runs]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    before = (tmp_path / "runs" / "mine-odc-lb-mini" / "steps.csv").stat().st_mtime_ns
    main(arguments)
    assert (tmp_path / "runs" / "mine-odc-lb-mini" / "steps.csv").stat().st_mtime_ns == before


def test_a_calibration_may_come_first_and_goes_into_every_run(tmp_path):
    quick = studies(tmp_path, pairs=PAIRS[1:], calibration='quick = true\nmodels = ["tiny"]')
    write_campaign(tmp_path, quick, "made by a test")
    command = [sys.executable, "-m", "odc_kernels.campaign", str(tmp_path / "campaign.toml")]
    command += ["--out", str(tmp_path / "runs"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ), timeout=240)
    assert done.returncode == 0, done.stderr
    run = read_run(tmp_path / "runs" / "mine-odc-lb-mini")
    assert run.calibration is not None
    assert {fit.model for fit in run.calibration.fits} == {"tiny"}


def test_a_run_may_have_a_chunk_of_its_own(campaign):
    campaign.write_text(campaign.read_text().replace('schedule = "odc"', 'schedule = "odc"\nchunked_loss_tokens = 64'))
    loaded = load(campaign, campaign.parent, budget_s=1.0, device="cpu", command="test")
    assert [job.config.chunked_loss_tokens for job in loaded.jobs] == [512, 64]


def test_a_calibration_that_was_to_be_there_is_missed(campaign):
    text = campaign.read_text().replace("world_size = 2\n", 'world_size = 2\n[calibration]\nfile = "mine.json"\n')
    campaign.write_text(text)
    with pytest.raises(InputError, match=r"mine\.json: no such file"):
        load(campaign, campaign.parent, budget_s=1.0, device="cpu", command="test")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("world_size = 2", "world_size = 4"), "mine-collective-lb-micro is planned for 2 ranks, not world_size"),
        (("estimate_s", "estimate"), r"runs.0.estimate: Extra inputs are not permitted"),
        (("world_size = 2", "world_size = "), "cannot be read as TOML"),
        (('"collective"', '"collectiv"'), "unknown schedule 'collectiv'"),
        (('"mine-odc-lb-mini"', '"mine-collective-lb-micro"'), "two are called 'mine-collective-lb-micro'"),
        (('"mine-odc-lb-mini"', '"../elsewhere"'), "name '../elsewhere', expected the name of a folder in --out"),
        (
            ('schedule = "odc"', 'schedule = "odc"\nsteps = 0'),
            r"runs.1.steps: Input should be greater than or equal to 1",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(campaign, change, message):
    campaign.write_text(campaign.read_text().replace(*change))
    with pytest.raises(InputError, match=message):
        load(campaign, campaign.parent, budget_s=1.0, device="cpu", command="test")


def test_the_command_ends_with_code_2(campaign, capsys):
    campaign.write_text("world_size = 2\nrun = 1\n")
    with pytest.raises(SystemExit) as ended:
        main([str(campaign), "--out", str(campaign.parent / "runs"), "--device", "cpu"])
    assert ended.value.code == 2
    assert "run: Extra inputs are not permitted" in capsys.readouterr().err


def test_a_campaign_needs_devices_and_runs_that_run(tmp_path):
    with pytest.raises(InputError, match="common has no 'devices'"):
        write_campaign(tmp_path, studies(tmp_path, common={}), "test")
