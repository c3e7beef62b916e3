import dataclasses
import json
from pathlib import Path

import pytest

from odc_sim.calibration import (
    Calibration,
    ComputeSample,
    CopySample,
    Fit,
    TransferSample,
    load_calibration,
    write_calibration,
)
from odc_sim.calibration_report import failed, limits, markdown, summary, write_calibration_report
from odc_sim.calibration_tables import heldout_errors, in_words, size
from odc_sim.costs_measured import line_of
from odc_sim.header import header

DATA = Path(__file__).parent / "data" / "calibration-small.json"


def fit(**changes):
    values = {
        "model": "m", "unit": "layer", "direction": "forward", "c0_s": 1e-3, "c1_s_per_token": 1e-6,
        "c2_s_per_token2": 0.0, "floor_s": 0.0, "valid_tokens": (1000, 8000), "max_rel_error": 0.01,
        "heldout_max_rel_error": 0.02, "repeat_rel_spread": 0.004,
    }  # fmt: skip
    return Fit(**(values | changes))


def compute(lengths, seconds, **changes):
    values = {
        "model": "m", "unit": "layer", "direction": "forward", "lengths": lengths, "tokens": sum(lengths),
        "p20_s": seconds, "p50_s": seconds, "p80_s": seconds, "samples": 6,
    }  # fmt: skip
    return ComputeSample(**(values | changes))


def transfer(**changes):
    values = {
        "op": "gather", "backend": "cuda-auto", "world_size": 2, "bytes": 64 << 20, "dtype": "bf16", "p20_s": 1e-4,
        "p50_s": 2e-4, "p80_s": 3e-4, "samples": 6, "flagged": False,
    }  # fmt: skip
    return TransferSample(**(values | changes))


def copy(op, **fields):
    seconds = {"p20_s": 1e-4, "p50_s": 1e-4, "p80_s": 1e-4}
    return CopySample(op=op, elements=1000, dtype="bf16", samples=5, flagged=False, **seconds, **fields)


@pytest.fixture
def calibration():
    head = header("odc calibrate", None)
    head["environment"] |= {
        "gpu": {"name": "NVIDIA H200"},
        "calibrate": {
            "ranks": 2,
            "phases_s": {"a": 1.0, "b": 2.5},
            "failed": {"host": "rank 0: RuntimeError: why"},
            "left_out": ["optimizer of 16.4B parameters a rank: out of memory"],
            "interpolation": [
                {"op": "gather", "bytes": 3 << 20, "measured_s": 1e-5, "interpolated_s": 1.1e-5, "rel_error": 0.1}
            ],
        },
    }
    return Calibration(
        **head,
        transfers=(
            transfer(overlapped_p50_s=3e-4, slowdown_compute=0.99, flagged=True, beside_gemm_s=2e-4),
            transfer(overlapped_p50_s=2e-4, slowdown_compute=1.5, slowdown_copy_out=3.0, beside_layer="m"),
        ),
        fits=(fit(),),
        copies=(
            copy("copy_in", slowdown_compute=2.0, beside_layer="m"),
            copy("copy_out"),
        ),
        compute=(
            compute((1000,), 2e-3),
            compute((4000, 1000), 5e-3, heldout=True),
            compute((2000,), 3.3e-3, heldout=True),
            compute((8000,), 1.0, flagged=True),
        ),
    )


def test_errors_by_hand(calibration):
    assert heldout_errors(calibration, calibration.fits[0], long=True) == {(4000, 1000): pytest.approx(0.2)}
    assert heldout_errors(calibration, calibration.fits[0], long=False) == {(2000,): pytest.approx(3 / 3.3 - 1)}
    assert line_of(fit(floor_s=1.0))([[1]]) == [1.0]


def test_summary(calibration):
    lines = "\n".join(summary(calibration))
    assert lines.startswith("Calibration of NVIDIA H200, 2 ranks, measured in 4 s")
    assert "gather cuda-auto, 64 MiB: 335.5 GB/s, x1.50 (compute x0.990 *) beside compute" in lines
    assert (
        "m layer forward, one sample of 8,000 tokens: 9 ms; held out from 4,096 tokens 20.0%, 20.0% (median, worst); "
        "repeats 0.4%" in lines
    )
    assert "beside a layer of m: copy_in of 100 us costs it 50, gather of 200 us costs it 67" in lines
    assert "2 of 8 measurements flagged" in lines
    assert "left out: optimizer of 16.4B" in lines
    assert lines.endswith("FAILED: host: rank 0: RuntimeError: why")


def test_markdown_tells_everything(calibration):
    text = markdown(calibration, "c.json", [("cost.png", "caption")])
    for part in (
        "- **host failed**: rank 0: RuntimeError: why",
        "| gather cuda-auto | 64 MiB | products of 0.20 ms | 200 us | 300 us | x1.50 | x0.990 * |  |",
        "| gather cuda-auto | 64 MiB | a layer of m | 200 us | 200 us | x1.00 | x1.500 | x3.00 |",
        "| copy_in | 1,000 | 100.0 | 0.0 | x2.00 (m) |",
        "| copy_out | 1,000 | 100.0 | 0.0 |  |",
        "| gather | 3 MiB | 10.0 us | 11.0 us | +10.0% |",
        "![caption](cost.png)",
        "| m | layer forward | 1000.0 | 1000.00 | 0.0000 | 0.0 | 1,000 to 8,000 | 1.0% "
        "| 20.0%, 20.0% | 20.0%, 20.0% | 9.1% | 0.4% |",
        "| m | forward | 4000 + 1000 | 5,000 | 5.000 ms | 6.000 ms | +20.0% | +20.0% h |",
        "| m | forward | 8000 | 8,000 | 1000.000 ms | 9.000 ms | -99.1% | -99.1% * |",
        "- gather: shards outside 64 MiB to 64 MiB",
        "- transfers of any number of devices but 2",
        "- m: microbatches outside 1,000 to 8,000 tokens",
    ):
        assert part in text


def test_files_beside_the_calibration(tmp_path, calibration):
    write_calibration(tmp_path / "mine.json", calibration)
    written = write_calibration_report(tmp_path / "mine.json")
    assert [path.name for path in written] == ["report.md", "bandwidth.png", "cost.png"]
    assert {path.parent.name for path in written} == {"mine-report"}
    assert all(path.stat().st_size > 500 for path in written)


def test_calibrations_of_other_origin_have_a_report_too(tmp_path):
    file = tmp_path / "small.json"
    file.write_text(DATA.read_text())
    text = write_calibration_report(file)[0].read_text()
    found = load_calibration(file)
    assert failed(found) == {}
    assert "## Copies, optimizer, host, ceilings" in text
    assert all(op in text for op in ("copy_in", "pack", "matrix product"))


def test_an_empty_one(tmp_path):
    empty = Calibration(**header("x", None))
    write_calibration(tmp_path / "e.json", empty)
    (report,) = write_calibration_report(tmp_path / "e.json")
    assert "None were measured." in report.read_text()
    assert "all transfers: none were measured, so the built-in links are used" in limits(empty)
    assert "the host's time to enqueue a unit: not measured" in limits(empty)
    assert summary(empty) == ["Calibration of a CPU", "0 of 0 measurements flagged: noisy, or different when repeated"]


@pytest.mark.parametrize(
    ("num_bytes", "text"), [(100, "100 B"), (3 << 9, "1.5 KiB"), (1 << 20, "1 MiB"), (1 << 31, "2 GiB")]
)
def test_sizes_for_people(num_bytes, text):
    assert size(num_bytes) == text


def test_lengths_in_words():
    assert in_words([5]) == "5"
    assert in_words([5, 5]) == "2 x 5"
    assert in_words([5, 6]) == "5 + 6"


def test_nothing_is_lost_between_memory_and_file(tmp_path, calibration):
    write_calibration(tmp_path / "c.json", calibration)
    assert load_calibration(tmp_path / "c.json") == calibration
    data = json.loads((tmp_path / "c.json").read_text())
    assert data["fits"][0]["repeat_rel_spread"] == 0.004
    assert set(data["transfers"][0]) == {field.name for field in dataclasses.fields(TransferSample)}
