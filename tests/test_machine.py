"""Which built-in hardware stands behind a calibration."""

import json
from pathlib import Path

import pytest

from odc_sim import Study, simulate
from odc_sim.calibration import load_calibration
from odc_sim.errors import InputError
from odc_sim.fits import Line, spread
from odc_sim.hardware import load_cluster
from odc_sim.machine import load_machine

SMALL = Path(__file__).parent / "data" / "calibration-small.json"


@pytest.mark.parametrize(
    ("gpu", "like"),
    [
        ("NVIDIA H200", "h200-nvlink"),
        ("NVIDIA A100-SXM4-80GB", "a100-nvswitch-roce"),
        ("NVIDIA A100-PCIE-40GB", "generic"),
        ("NVIDIA GH200 480GB", "generic"),
        ("AMD Instinct MI300X", "generic"),
    ],
)
def test_the_gpu_of_a_calibration_is_matched_by_its_words_and_said(tmp_path, gpu, like):
    data = json.loads(SMALL.read_text())
    data["environment"]["gpu"] = gpu
    (tmp_path / "mine.json").write_text(json.dumps(data))
    machine = load_machine(str(tmp_path / "mine.json"))
    assert machine.name == "mine"
    assert machine.cluster.name == f"{like}, calibrated"
    assert machine.note.endswith(f"are those of {like}")
    assert machine.cluster.host.seconds_per_unit_forward == data["host"]["seconds_per_unit_forward"]


def test_slowdowns_come_from_the_calibration():
    collective = load_machine(str(SMALL)).cluster.overlap["collective"]
    assert collective.unshard.transfer == pytest.approx(2.0)
    assert collective.source == "the calibration, median of large transfers beside matrix products"


def test_what_a_transfer_costs_a_layer_comes_before_what_it_costs_matrix_products(tmp_path):
    data = json.loads(SMALL.read_text())
    row = next(row for row in data["transfers"] if row["op"] == "gather" and row["overlapped_p50_s"])
    of_layers = [
        row
        | {"bytes": 3 << 20, "slowdown_compute": slowdown, "overlapped_p50_s": 1.5 * row["p50_s"], "beside_layer": m}
        for m, slowdown in (("small", 2.0), ("large", 3.0))
    ]
    (tmp_path / "mine.json").write_text(json.dumps(data | {"transfers": data["transfers"] + of_layers}))
    data["transfers"] += [r | {"slowdown_copy_out": 3.0} for r in data["transfers"] if r["op"] == "scatter_accumulate"]
    (tmp_path / "copies.json").write_text(json.dumps(data))
    assert load_machine(str(tmp_path / "copies.json")).cluster.overlap["odc"].copy_out == 3.0
    for row in data["copies"][:2]:
        row |= {"slowdown_compute": 4.0 if row is data["copies"][0] else 2.0}
    (tmp_path / "copies.json").write_text(json.dumps(data))
    overlaps = load_machine(str(tmp_path / "copies.json")).cluster.overlap
    # three quarters and a half of the copy's time are lost: 5 / 8
    assert [overlaps[transport].copies for transport in ("collective", "odc")] == pytest.approx([8 / 3, 8 / 3])
    before = load_machine(str(SMALL)).cluster.overlap["odc"]
    assert (before.copy_out, before.copies) == (1.0, 1.0)
    overlap = load_machine(str(tmp_path / "mine.json")).cluster.overlap["odc"]
    # half and two thirds of the transfer's time are lost: 7 / 12 of it
    assert (overlap.unshard.transfer, overlap.unshard.compute) == (pytest.approx(1.5), pytest.approx(12 / 5))
    assert overlap.reduce == before.reduce
    assert overlap.source == "the calibration, median of large transfers beside layers and matrix products"


def test_a_slowdown_a_little_below_one_counts_as_one_and_one_far_below_as_unknown(tmp_path):
    data = json.loads(SMALL.read_text())
    for row in data["transfers"]:
        if row["op"] in ("gather", "scatter_accumulate") and row["overlapped_p50_s"]:
            row |= {"slowdown_compute": 0.97 if row["op"] == "gather" else 0.8, "flagged": True}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    machine = load_machine(str(tmp_path / "mine.json"))
    overlap = machine.cluster.overlap["odc"]
    assert (overlap.unshard.transfer, overlap.unshard.compute) == (1.0, 1.0)
    assert overlap.reduce == load_cluster(machine.cluster.name.removesuffix(", calibrated")).overlap["odc"].reduce


def test_slowdowns_that_were_not_measured_say_whose_they_are(tmp_path):
    data = json.loads(SMALL.read_text())
    for row in data["transfers"]:
        if row["op"] in ("gather", "all_gather", "reduce_scatter"):
            row |= {"slowdown_compute": None, "overlapped_p50_s": None}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    machine = load_machine(str(tmp_path / "mine.json"))
    base = load_cluster(machine.cluster.name.removesuffix(", calibrated")).overlap
    for transport, ops in (("odc", "gather"), ("collective", "all_gather and reduce_scatter")):
        overlap = machine.cluster.overlap[transport]
        assert overlap.unshard == base[transport].unshard
        assert overlap.source.endswith(f"; {ops} not measured beside compute: {base[transport].source}")


def test_built_in_h200_is_its_committed_calibration():
    machine = load_machine("h200-nvlink")
    assert (machine.name, machine.cluster.name) == ("h200-nvlink", "h200-nvlink")
    assert machine.calibration is not None
    assert machine.note.startswith("calibration: h200-nvlink-2gpu.json, measured 2026-11-30")
    assert 1.1 < machine.cluster.overlap["collective"].waiting < 1.25
    assert {fit.model for fit in machine.calibration.fits} == {
        *("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
    }
    assert max(fit.heldout_max_rel_error for fit in machine.calibration.fits) < 0.05
    assert not any(sample.flagged for sample in machine.calibration.compute)
    for overlap in machine.cluster.overlap.values():
        assert overlap.copies > 1
        for slowdown in (overlap.unshard, overlap.reduce):
            assert min(slowdown.transfer, slowdown.compute) >= 1


def test_a_calibration_of_another_lease_agrees_within_3_percent():
    """On every fit that both have, over the microbatches of 4,096 tokens and more of the first."""
    other = load_calibration(Path(__file__).parent.parent / "reports" / "validation-h200" / "calibration-3.json")
    built_in = load_machine("h200-nvlink").calibration
    fits = {(fit.model, fit.unit, fit.direction): fit for fit in built_in.fits}
    assert len(other.fits) == 7
    for fit in other.fits:
        part = fit.model, fit.unit, fit.direction
        shapes = [s.lengths for s in built_in.compute if (s.model, s.unit, s.direction) == part and s.tokens >= 4096]
        assert len(shapes) >= 4
        names = ("c0_s", "c1_s_per_token", "c2_s_per_token2", "floor_s")
        lines = [Line(**{name: getattr(each, name) for name in names}) for each in (fits[part], fit)]
        assert spread(*lines, shapes) < 0.03


@pytest.mark.parametrize(
    ("changes", "compute", "transfers"),
    [
        ({}, "measured", "measured"),
        ({"devices": 8}, "measured", "extrapolated"),
        ({"scale": 2.0}, "extrapolated", "measured"),
    ],
)
def test_what_is_measured_on_two_h200s_and_what_is_extrapolated(changes, compute, transfers):
    study = {"hardware": "h200-nvlink", "devices": 2, "minibatch_size": 2, "minibatches": 20, "policy": ("lb-mini",)}
    row = simulate(Study(**(study | {"schedule": ("odc",)} | changes))).row("odc", "lb-mini")
    assert row.provenance["compute"] == compute
    assert row.provenance["transfers"] == transfers
    assert row.provenance["optimizer"] == "measured"


def test_a_cpus_transfers_are_not_put_beside_a_gpus_compute(tmp_path):
    data = json.loads(SMALL.read_text())
    del data["environment"]["gpu"]
    (tmp_path / "laptop.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"^laptop is .* of a CPU, which knows toy, not tiny; .*, or use --model toy$"):
        simulate(Study(hardware=str(tmp_path / "laptop.json"), model="tiny", minibatches=2))


def test_memory_comes_from_the_calibration_where_it_says(tmp_path):
    data = json.loads(SMALL.read_text())
    data["environment"]["gpu"] = {"name": "NVIDIA H200", "count": 2, "memory_bytes": 150_109_880_320}
    (tmp_path / "mine.json").write_text(json.dumps(data))
    cluster = load_machine(str(tmp_path / "mine.json")).cluster
    assert cluster.name == "h200-nvlink, calibrated"
    assert cluster.device.name == "NVIDIA H200"
    assert cluster.device.memory_bytes == 150_109_880_320


def test_the_committed_kernel_benchmark_is_a_calibration():
    report = Path(__file__).parent.parent / "reports" / "kernels-h200" / "calibration.json"
    machine = load_machine(str(report))
    assert machine.cluster.name == "h200-nvlink, calibrated"
    for overlap in machine.cluster.overlap.values():
        for slowdown in (overlap.unshard, overlap.reduce):
            assert slowdown.transfer >= 1
            assert slowdown.compute >= 1
