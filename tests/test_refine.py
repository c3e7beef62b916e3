"""What transfers, copies and the host cost in training: by hand, and from recorded runs."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cli import app
from odc_sim.calibration import CopySample, HostSample, TransferSample, load_calibration
from odc_sim.errors import InputError
from odc_sim.idle import Span
from odc_sim.in_training import ALONE, Trained, medians, read_trained, states
from odc_sim.models import load_model
from odc_sim.refine import (
    copies_in_training,
    host_in_training,
    lost,
    refine,
    speeds,
    transfers_in_training,
)
from odc_sim.run_files import read_run
from odc_sim.validate import validate

ROOT = Path(__file__).parent.parent
RUNS = ROOT / "reports" / "validation-h200" / "runs"
NAMES = ("balanced-collective-deferred-lb-mini", "balanced-collective-lb-micro", "balanced-odc-lb-mini")
FULL = ROOT / "traces" / "calibration" / "h200-nvlink-2gpu.json"
TINY = load_model("tiny")
SHARD = TINY.layer_parameters // 2


def trained(*, ranks=((2.0, 2.0), (2.2, 2.2)), forward=0.5, first=0.8, later=0.9, odc=0.2, late=0.0):
    """Forwards take `ranks` [ranks][rounds] seconds alone, backwards three times that; collectives add `forward`,
    `first` and `later`, one-sided transfers `odc` to each. Transfers take a second."""
    forward_s = np.array(ranks)
    extra = {ALONE: (0.0, 0.0, 0.0), "collective": (forward, first, later), "odc": (odc, odc, odc)}
    return Trained(
        seconds={
            schedule: {
                "forward": forward_s + f,
                "first backward": 3 * forward_s + b,
                "later backward": 3 * forward_s + more,
                "unshard": np.ones_like(forward_s),
                "reduce": np.ones_like(forward_s),
                "copy out": np.full_like(forward_s, 0.3),
                "hold": np.full_like(forward_s, 0.7),
                "host": forward_s + b,
                "late": np.full_like(forward_s, late),
            }
            for schedule, (f, b, more) in extra.items()
        }
    )


class TestByHand:
    def test_what_forwards_lose_is_the_unshards_and_what_backwards_lose_beyond_is_the_reductions(self):
        found = lost(trained(), "collective")
        assert (found.unshard_s, found.reduce_s, found.add_s) == pytest.approx((0.5, 0.3, 0.1))
        one_sided = lost(trained(), "odc")
        assert (one_sided.unshard_s, one_sided.reduce_s, one_sided.add_s) == pytest.approx((0.2, 0.0, 0.0), abs=1e-12)
        assert not found.noisy
        assert not one_sided.noisy

    def test_beside_collectives_the_slowest_rank_counts_and_one_sided_all_of_them(self):
        both = trained(forward=np.array([[0.9], [0.5]]), odc=np.array([[0.2], [0.4]]))
        assert lost(both, "collective").unshard_s == pytest.approx(0.5)
        assert lost(both, "odc").unshard_s == pytest.approx(0.3)
        assert speeds(both) == pytest.approx((2.1 / 2.0, 2.1 / 2.2))

    def test_rounds_that_do_not_agree_are_noisy(self):
        """A layer takes 8.8 s on the slowest rank, 2 % of which are 0.176."""
        assert not lost(trained(forward=np.array([0.5, 0.6])), "collective").noisy
        assert lost(trained(forward=np.array([0.5, 0.7])), "collective").noisy

    def test_the_hosts_time_depends_on_the_schedule_and_is_the_slower_ranks(self):
        found = host_in_training(HostSample(seconds_per_unit_forward=9.0, seconds_per_unit_backward=8.0), trained())
        assert found.seconds_per_unit_forward == pytest.approx(2.2 + 0.8)
        assert found.seconds_per_unit_forward_deferred == pytest.approx(2.2)
        assert found.seconds_per_unit_forward_one_sided == pytest.approx(2.2 + 0.2)
        assert found.seconds_per_unit_backward == 8.0

    def test_copies_and_transfers_share_what_is_lost(self):
        """Forwards lose 0.5 s beside a copy-in and an unshard of one second each, later backwards 0.1 s by `+=`."""
        known = copy_samples()
        copies = copies_in_training(trained(), known, pair("collective")[0], TINY, 2)
        slowed = [row for row in copies if row.slowdown_compute is not None]
        assert [(row.op, row.elements, row.beside_layer) for row in slowed] == [
            ("copy_in", SHARD, "tiny"),
            ("add", SHARD, "tiny"),
        ]
        assert [row.lost_s for row in slowed] == pytest.approx([0.25, 0.1])
        alone = [replace(row, slowdown_compute=None, beside_layer=None) for row in copies]
        assert alone[:-1] == known[:-1]
        assert alone[-1] == replace(known[-1], p20_s=0.7, p50_s=0.7, p80_s=0.7)  # the whole layer's gradients, held
        rows = transfers_in_training(trained(), "collective", pair("collective"), slowed, "tiny", copy_out_s=0.2)
        assert [row.lost_s for row in rows] == pytest.approx([0.25, 0.3])
        assert [row.overlapped_p50_s for row in rows] == [1.0, 1.0]
        assert [row.slowdown_copy_out for row in rows] == [None, pytest.approx(1.5)]
        assert not any(row.flagged for row in rows)
        rows = transfers_in_training(trained(), "odc", pair("odc"), slowed, "tiny")
        assert [row.lost_s for row in rows] == pytest.approx([0.0, 0.0], abs=1e-12)  # less than the copy-in alone
        assert [row.slowdown_copy_out for row in rows] == [None, None]

    def test_a_cost_of_copy_in_that_is_not_known_counts_as_the_unshards(self):
        unknown = transfers_in_training(trained(), "collective", pair("collective"), [], "tiny")
        assert [row.lost_s for row in unknown] == pytest.approx([0.5, 0.3])
        assert all(row.flagged for row in unknown)

    def test_states(self):
        """Of five layers the first and the last do not count; a reduction starts 0.2 s before the next backward."""
        found = states(rows_of(3, 5), 5)
        assert found["forward"] == pytest.approx([2.0, 3.0] * 3)
        assert found["first backward"] == pytest.approx([3.0] * 3)
        assert found["later backward"] == pytest.approx([4.0, 5.0] * 3)
        assert found["unshard"] == pytest.approx([0.25] * 9)
        assert found["reduce"] == pytest.approx([0.5] * 9)
        assert found["copy out"] == pytest.approx([0.2] * 9)
        assert found["hold"] == pytest.approx([0.3] * 3)
        assert found["host"] == pytest.approx([1.0])
        assert found["late"] == [0.0] * 6
        middle = medians([found, found | {"late": [1.0] * 6}])
        assert (middle["forward"], middle["late"]) == pytest.approx((2.5, 0.5))


def copy_samples():
    times = {"p20_s": 1.0, "p50_s": 1.0, "p80_s": 1.0}
    return [
        CopySample(op=op, elements=n, dtype="bf16", samples=5, flagged=False, **times)
        for op in ("copy_in", "copy_out", "add", "hold")
        for n in (SHARD, TINY.layer_parameters)
    ]


def pair(schedule):
    ops = ("gather", "scatter_accumulate") if schedule == "odc" else ("all_gather", "reduce_scatter")
    return [
        TransferSample(
            op=op, backend="b", world_size=2, bytes=1 << 20, dtype="bf16",
            p20_s=1.0, p50_s=1.0, p80_s=1.0, samples=5, flagged=False,
        )
        for op in ops
    ]  # fmt: skip


def rows_of(microbatches, layers):
    """A rank's minibatch: forwards of 1 s and more with the microbatch, backwards of 3; the host a second ahead."""
    found, now = [], 10.0
    for number in range(microbatches):
        for unit in range(1, layers + 1):
            found += [
                Span(0, "host", "forward", "", unit, number, now - 2.0, now - 1.0),
                Span(0, "compute", "forward", "", unit, number, now, now + 1.0 + number),
                Span(0, "unshard", "unshard", "", unit, number, now, now + 0.25),
            ]
            now += 1.5 + number
        for unit in range(layers, 0, -1):
            found += [
                Span(0, "compute", "backward", "", unit, number, now, now + 3.0 + number),
                Span(0, "reduce", "reduce", "", unit, number, now + 3.1 + number, now + 3.6 + number),
            ]
            now += 3.3 + number
    return found


@pytest.fixture(scope="module")
def balanced():
    return [read_run(RUNS / name) for name in NAMES]


class TestOnTwoH200s:
    """8,192 tokens through 1.5B."""

    def test_what_layers_lose(self, balanced):
        found = read_trained(balanced)
        beside, one_sided = lost(found, "collective"), lost(found, "odc")
        microseconds = [1e6 * part for part in (beside.unshard_s, beside.reduce_s, beside.add_s)]
        assert microseconds == pytest.approx([194, 281, 49], abs=4)
        assert [1e6 * part for part in (one_sided.unshard_s, one_sided.reduce_s)] == pytest.approx([78, 168], abs=4)
        assert not beside.noisy
        assert not one_sided.noisy
        assert speeds(found) == pytest.approx((1.002, 0.998), abs=0.001)
        assert 1e6 * np.median(found.of(ALONE, "hold")) == pytest.approx(188, abs=2)

    def test_the_built_in_calibration_is_the_full_one_refined_by_them(self, balanced):
        """Whose own numbers for other models, and for everything that is not in training, stay."""
        built_in = load_calibration(FULL.with_name("h200-nvlink-2gpu-refined.json"))
        made = refine(load_calibration(FULL), balanced, built_in.environment["calibrate"]["refined"])
        assert made == built_in
        host = made.host
        times_s = (host.seconds_per_unit_forward, host.seconds_per_unit_forward_deferred)
        assert 1e3 * np.array([*times_s, host.seconds_per_unit_forward_one_sided]) == pytest.approx(
            [3.76, 3.1, 3.41], abs=0.01
        )

    def test_other_runs_of_the_lease_are_predicted_better(self):
        """LongAlign cut to 8K, which nothing was refined with: 3.1 and 3.3 points off before."""
        runs = [
            RUNS / f"short-{pair}" for pair in ("collective-lb-micro", "odc-lb-mini", "collective-deferred-lb-mini")
        ]
        for hardware, worst in ((str(FULL), 3.4), ("h200-nvlink", 1.0)):
            found = validate(runs, hardware=hardware)
            off = [abs(each.points) for each in found.speedups]
            assert len(off) == 2
            assert max(off) == pytest.approx(worst, abs=0.15)


def cli(*arguments):
    return CliRunner().invoke(app, ["refine", *map(str, arguments)])


class TestCommand:
    def test_writes_the_file_and_says_what_changed(self, tmp_path):
        out = tmp_path / "refined.json"
        result = cli(*(RUNS / name for name in NAMES), "--calibration", FULL, "--out", out)
        assert result.exit_code == 0, result.output
        assert "layer of qwen2.5-1.5b beside reduce_scatter" in result.output
        assert "host, a layer's forward under odc" in result.output
        assert "7b" not in result.output
        assert load_calibration(out).environment["calibrate"]["refined"]["created"] > "2026-11-30"
        again = cli(*(RUNS / name for name in NAMES), "--calibration", FULL, "--out", out, "--json")
        rows = {row["what"]: row for row in json.loads(again.output)}
        assert rows["hold of 46,797,824 elements"]["after_us"] == pytest.approx(188, abs=2)

    @pytest.mark.parametrize(
        ("names", "message"),
        [
            (NAMES[:2], "got runs under collective-deferred, collective, expected one each under"),
            ((NAMES[0], NAMES[0], NAMES[2]), "got runs under collective-deferred, collective-deferred, odc"),
            (
                tuple(name.replace("balanced", "short") for name in NAMES),
                "got microbatches of 2,987 to 8,192 tokens, expected equal ones in all runs",
            ),
            (
                (NAMES[0], "longalign-7b-collective-lb-micro", NAMES[2]),
                "got model qwen2.5-7b, expected qwen2.5-1.5b as in",
            ),
        ],
    )
    def test_runs_that_do_not_tell(self, tmp_path, names, message):
        result = cli(*(RUNS / name for name in names), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2
        assert message in result.output, result.output
        assert result.output.count("\n") == 1

    def test_another_gpus_calibration(self, tmp_path):
        data = json.loads(FULL.read_text())
        data["environment"]["gpu"]["name"] = "NVIDIA A100"
        (tmp_path / "a100.json").write_text(json.dumps(data))
        result = cli(*(RUNS / name for name in NAMES), "--calibration", tmp_path / "a100.json", "--out", tmp_path / "c")
        assert result.exit_code == 2
        assert "ran on NVIDIA H200, the calibration is of NVIDIA A100" in result.output

    @pytest.mark.parametrize(
        ("part", "keep", "message"),
        [
            (
                "transfers",
                lambda row: row["op"] != "gather" or row["bytes"] != 46797824,
                "the calibration has no gather of a layer's shard of qwen2.5-1.5b over 2 ranks",
            ),
            (
                "copies",
                lambda row: False,
                "the calibration has no steady copy_in of a layer's shard of qwen2.5-1.5b",
            ),
        ],
    )
    def test_a_calibration_without_what_is_to_be_refined(self, tmp_path, part, keep, message):
        data = json.loads(FULL.read_text())
        data[part] = [row for row in data[part] if keep(row)]
        (tmp_path / "other.json").write_text(json.dumps(data))
        result = cli(
            *(RUNS / name for name in NAMES), "--calibration", tmp_path / "other.json", "--out", tmp_path / "c"
        )
        assert result.exit_code == 2
        assert message in result.output

    def test_every_run_is_of_that_gpu(self, tmp_path):
        for name in NAMES:
            shutil.copytree(RUNS / name, tmp_path / name)
        file = tmp_path / NAMES[2] / "environment.json"
        file.write_text(file.read_text().replace("NVIDIA H200", "NVIDIA H100"))
        result = cli(*(tmp_path / name for name in NAMES), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2
        assert "ran on NVIDIA H100, the calibration is of NVIDIA H200" in result.output

    @pytest.mark.parametrize(("kind", "lacks"), [("unshard", "spans of unshard"), ("host", "a span of ")])
    def test_a_timeline_with_holes(self, tmp_path, kind, lacks):
        for name in NAMES:
            shutil.copytree(RUNS / name, tmp_path / name)
        file = tmp_path / NAMES[1] / "timeline.parquet"
        table = pq.read_table(file)
        pq.write_table(table.filter(pc.not_equal(table["stream"], kind)), file)
        result = cli(*(tmp_path / name for name in NAMES), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2, result.output
        assert f"{NAMES[1]}: its timeline lacks {lacks}" in result.output

    @pytest.mark.parametrize(
        ("kept", "message"),
        [
            (lambda t: pc.less(t["minibatch"], 4), "has no timeline of at least 13 minibatches"),
            (lambda t: pc.less(t["minibatch"], 0), "has no timeline of at least 13 minibatches"),
            (
                lambda t: pc.or_(pc.equal(t["rank"], 0), pc.equal(t["kind"], "optimizer")),
                "its timeline lacks the forwards of rank 1 in minibatch 1",
            ),
        ],
    )
    def test_a_timeline_that_ends_early(self, tmp_path, kept, message):
        for name in NAMES:
            shutil.copytree(RUNS / name, tmp_path / name)
        file = tmp_path / NAMES[1] / "timeline.parquet"
        table = pq.read_table(file)
        pq.write_table(table.filter(kept(table)), file)
        result = cli(*(tmp_path / name for name in NAMES), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2, result.output
        assert f"{NAMES[1]}: {message}" in result.output

    def test_a_run_that_says_it_is_of_another_model_than_its_plan(self, tmp_path):
        for name in NAMES:
            shutil.copytree(RUNS / name, tmp_path / name)
            file = tmp_path / name / "config.toml"
            file.write_text(file.read_text().replace('"qwen2.5-1.5b"', '"qwen2.5-7b"'))
        result = cli(*(tmp_path / name for name in NAMES), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2, result.output
        assert "config.toml says model 'qwen2.5-7b', the plan 'qwen2.5-1.5b'" in result.output

    def test_a_run_without_timeline(self, tmp_path):
        for name in NAMES:
            shutil.copytree(RUNS / name, tmp_path / name)
        (tmp_path / NAMES[1] / "timeline.parquet").unlink()
        result = cli(*(tmp_path / name for name in NAMES), "--calibration", FULL, "--out", tmp_path / "c.json")
        assert result.exit_code == 2
        assert "has no timeline of at least 13 minibatches" in result.output


def test_where_the_host_was_late_or_rounds_disagree_nothing_is_said(balanced, monkeypatch):
    full = load_calibration(FULL)
    monkeypatch.setattr("odc_sim.refine.read_trained", lambda runs: trained(late=0.3))
    with pytest.raises(InputError, match=r"^the device waited for the host in 30% of the layers; plan larger"):
        refine(full, balanced, {})
    monkeypatch.setattr("odc_sim.refine.read_trained", lambda runs: trained(forward=np.array([0.5, 1.0])))
    with pytest.raises(InputError, match=r"^what layers lose under collective differs by more than 2% of their time"):
        refine(full, balanced, {})
