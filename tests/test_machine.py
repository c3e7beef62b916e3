"""Which built-in hardware stands behind a calibration."""

import json
from pathlib import Path

import pytest

from odc_sim import Study, simulate
from odc_sim.calibration import load_calibration
from odc_sim.errors import InputError
from odc_sim.fits import Line, spread
from odc_sim.hardware import load_cluster
from odc_sim.inputs import load_inputs
from odc_sim.machine import load_machine, of_model

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
    before = load_machine(str(SMALL)).cluster.overlap["odc"]
    overlap = load_machine(str(tmp_path / "mine.json")).cluster.overlap["odc"]
    # half and two thirds of the transfer's time are lost: 7 / 12 of it
    assert (overlap.unshard.transfer, overlap.unshard.compute) == (pytest.approx(1.5), pytest.approx(12 / 5))
    assert overlap.reduce == before.reduce
    assert overlap.source == "the calibration, median of large transfers beside layers and matrix products"


def beside_layers(model, slowdown, copy_slowdown):
    """The small calibration's last gather and reduce and first copies, as measured beside a layer of `model`."""
    data = json.loads(SMALL.read_text())
    reduce = [row for row in data["transfers"] if row["op"] == "scatter_accumulate"][-1]
    reduce |= {"beside_layer": model, "slowdown_compute": slowdown, "overlapped_p50_s": 1.5 * reduce["p50_s"]}
    reduce["flagged"] = False
    copies = [row for row in data["copies"] if row["op"] in ("copy_in", "add")]
    assert len({row["op"] for row in copies}) == 2
    gather = [row for row in data["transfers"] if row["op"] == "gather"][-1]
    gather |= {"beside_layer": model, "slowdown_compute": 1.2, "overlapped_p50_s": gather["p50_s"], "flagged": False}
    found = [gather, reduce | {"slowdown_copy_out": 2 * slowdown}], []
    for row in copies:
        found[1].append(row | {"beside_layer": model, "slowdown_compute": copy_slowdown + (row["op"] == "add")})
    return found


def test_what_was_measured_beside_a_models_own_layers_comes_first(tmp_path):
    data = json.loads(SMALL.read_text())
    for model, slowdown, copy_slowdown in (("tiny", 2.0, 1.5), ("large", 4.0, 3.0)):
        transfers, copies = beside_layers(model, slowdown, copy_slowdown)
        data["transfers"] += transfers
        data["copies"] += copies
    (tmp_path / "mine.json").write_text(json.dumps(data))
    machine = load_machine(str(tmp_path / "mine.json"))
    expected = {"tiny": (2.0, 4.0, 1.5, 2.5), "large": (4.0, 8.0, 3.0, 4.0)}
    # of another model half and three quarters are lost, so five eighths; stretches are as they are
    expected["other"] = (8 / 3, 6.0, 2.0, 40 / 13)
    for model, of_it in expected.items():
        overlap = of_model(machine, model).cluster.overlap["odc"]
        found = overlap.reduce.compute, overlap.copy_out, overlap.copy_in, overlap.add
        assert found == pytest.approx(of_it)
        assert overlap.unshard == machine.cluster.overlap["odc"].unshard
        assert overlap.source == machine.cluster.overlap["odc"].source
    for row in data["transfers"]:
        row["flagged"] = row["flagged"] or (row["op"], row.get("beside_layer")) == ("gather", "large")
    (tmp_path / "flagged.json").write_text(json.dumps(data))
    large = of_model(load_machine(str(tmp_path / "flagged.json")), "large").cluster.overlap["odc"]
    # a copy's loss does not go with another model's transfer
    assert (large.reduce.compute, large.copy_out, large.copy_in, large.add) == pytest.approx((4.0, 8.0, 1.5, 4.0))
    study = Study(hardware=str(tmp_path / "mine.json"), model="tiny", minibatches=2, devices=2, scale=0.01)
    assert load_inputs(study).machine.cluster.overlap["odc"].reduce.compute == pytest.approx(2.0)
    for row in (*data["transfers"], *data["copies"]):
        row["flagged"] = row["flagged"] or bool(row.get("beside_layer"))
    (tmp_path / "mine.json").write_text(json.dumps(data))
    assert load_machine(str(tmp_path / "mine.json")).cluster == load_machine(str(SMALL)).cluster
    assert of_model(load_machine("generic"), "tiny") == load_machine("generic")


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
    assert machine.note.startswith("calibration: h200-nvlink-2gpu-refined.json, measured 2026-11-30")
    assert 1.1 < machine.cluster.overlap["collective"].waiting < 1.25
    assert {fit.model for fit in machine.calibration.fits} == {
        *("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
    }
    errors = {(fit.model, fit.unit, fit.direction): fit.heldout_max_rel_error for fit in machine.calibration.fits}
    assert max(error for (_, unit, _), error in errors.items() if unit != "embedding") < 0.04
    assert max(errors.values()) < 0.051  # of a lookup of 20 us
    assert not any(sample.flagged for sample in machine.calibration.compute)
    for overlap in machine.cluster.overlap.values():
        assert overlap.copy_in > 1
        assert overlap.add >= 1
        for slowdown in (overlap.unshard, overlap.reduce):
            assert min(slowdown.transfer, slowdown.compute) >= 1


CALIBRATIONS = Path(__file__).parent.parent / "traces" / "calibration"
FIT = ("c0_s", "c1_s_per_token", "c2_s_per_token2", "floor_s")


def fits_apart(first, second, count=28):
    """Of each fit: the largest and the mean relative difference over the microbatches of 4,096 tokens and more."""
    fits = {(fit.model, fit.unit, fit.direction): fit for fit in first.fits}
    assert len(second.fits) == count
    most, mean = {}, {}
    for fit in second.fits:
        part = fit.model, fit.unit, fit.direction
        shapes = [s.lengths for s in first.compute if (s.model, s.unit, s.direction) == part and s.tokens >= 4096]
        assert len(shapes) >= 4
        lines = [Line(**{name: getattr(each, name) for name in FIT}) for each in (fits[part], fit)]
        most[part] = spread(*lines, shapes)
        mean[part] = float((lines[1](shapes) / lines[0](shapes)).mean()) - 1
    return most, mean


def test_full_calibrations_of_one_machine_agree():
    """Within 3 % for every fit; also at every microbatch, but for a lookup of 20 us."""
    runs = [load_calibration(CALIBRATIONS / f"{name}.json") for name in ("h200-1gpu", "h200-1gpu-again")]
    assert runs[0].environment["gpu"] == runs[1].environment["gpu"]
    most, mean = fits_apart(*runs)
    assert max(map(abs, mean.values())) < 0.02
    assert [part for part, apart in most.items() if apart > 0.03] == [("qwen2.5-7b", "embedding", "forward")]
    assert max(apart for (_, unit, _), apart in most.items() if unit != "embedding") < 0.021
    assert most["qwen2.5-7b", "embedding", "forward"] * 20e-6 < 1e-6


def test_quick_and_full_calibrations_of_one_machine_of_two_gpus_agree():
    """Minutes apart, a quick one of one model: its fits are a full one's within 2.1 %, a lookup of 20 us among them."""
    full = load_machine("h200-nvlink").calibration
    most, mean = fits_apart(full, load_calibration(CALIBRATIONS / "h200-nvlink-2gpu-quick.json"), count=7)
    assert max(most.values()) < 0.021
    assert max(map(abs, mean.values())) < 0.01


def test_full_calibrations_of_two_machines_of_a_kind_agree():
    """Within 3 % at each microbatch, but for a lookup of 20 us."""
    most, mean = fits_apart(
        load_machine("h200-nvlink").calibration, load_calibration(CALIBRATIONS / "h200-nvlink-2gpu-other.json")
    )
    assert [part for part, apart in most.items() if apart > 0.03] == [("qwen2.5-1.5b", "embedding", "forward")]
    assert most["qwen2.5-1.5b", "embedding", "forward"] * 20e-6 < 1.5e-6
    assert max(map(abs, mean.values())) < 0.02


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


def test_a_note_says_what_was_asked_and_what_was_measured():
    study = {"hardware": "h200-nvlink", "minibatch_size": 2, "minibatches": 20, "policy": ("lb-mini",)}

    def notes(**changes):
        return [n for n in simulate(Study(**study | {"schedule": ("odc",)} | changes)).notes if "extrapolated" in n]

    assert notes(devices=2) == []
    assert notes(devices=8) == ["transfers extrapolated: measured over 2 GPUs, here 8"]
    (note,) = notes(devices=2, scale=2.0)
    assert note.startswith("compute extrapolated: lb-micro, lb-mini with microbatches of ")
    assert note.endswith(" tokens, measured from 256 to 65,536")
    assert notes(devices=2, model="tiny") == ["transfers extrapolated: shards of sizes beyond those measured"]


def test_a_cpus_transfers_are_not_put_beside_a_gpus_compute(tmp_path):
    data = json.loads(SMALL.read_text())
    del data["environment"]["gpu"]
    (tmp_path / "laptop.json").write_text(json.dumps(data))
    with pytest.raises(InputError, match=r"^laptop is .* of a CPU, which knows toy, not tiny; .*, or use --model toy$"):
        simulate(Study(hardware=str(tmp_path / "laptop.json"), model="tiny", minibatches=2))


def test_on_a_cpu_nothing_runs_beside_anything(tmp_path):
    """So every transfer that hides behind compute on a GPU is in the open on a CPU."""
    toy = {"model_type": "llama", "hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8}
    toy |= {"intermediate_size": 4096, "vocab_size": 32000, "tie_word_embeddings": True}
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "config.json").write_text(json.dumps(toy))
    data = json.loads(SMALL.read_text())
    study = {"model": str(tmp_path / "toy"), "devices": 4, "minibatches": 3, "scale": 0.05, "policy": ("lb-mini",)}
    exposed = []
    for name in ("gpus", "laptop"):
        (tmp_path / f"{name}.json").write_text(json.dumps(data))
        row = simulate(Study(**study, hardware=str(tmp_path / f"{name}.json"))).row("odc", "lb-mini")
        exposed.append(row.idle_causes["exposed_unshard"] + row.idle_causes["exposed_reduce"])
        data["environment"].pop("gpu", None)
    assert exposed[1] > 1.5 * exposed[0] > 0


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
