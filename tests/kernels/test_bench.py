import csv
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from odc_kernels import bench, bench_files, report  # noqa: E402
from odc_sim.calibration import load_calibration  # noqa: E402

SIZES = ["65536", "524288"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    bench.main(["--ranks", "2", "--out", str(folder), "--sizes", *SIZES])
    return folder


def test_a_row_for_every_way_and_size(folder):
    rows = report.read(folder / "rows.csv")
    ways = {(row["op"], row["backend"]) for row in rows}
    assert {("all_gather", "gloo"), ("gather", "cpu-copy"), ("scatter_accumulate", "cpu-atomic")} <= ways
    for way in ways:
        sizes = [row["bytes"] for row in rows if (row["op"], row["backend"]) == way]
        assert sizes == ([65536] if "@" in way[1] else [65536, 524288])
    for row in rows:
        assert row["p20_s"] <= row["p50_s"] <= row["p80_s"]
        assert row["bytes_per_s"] == pytest.approx(row["bytes"] / row["p50_s"])


def test_the_samples_are_those_of_the_rows(folder):
    rows = report.read(folder / "rows.csv")
    with (folder / "samples.csv").open() as file:
        samples = [[float(second) for second in row["seconds"].split()] for row in csv.DictReader(file)]
    for row, seconds in zip(rows, samples, strict=True):
        assert len(seconds) == row["samples"]
        assert sorted(seconds)[0] <= row["p20_s"] * 1.001


def test_the_simulator_reads_the_calibration(folder):
    calibration = load_calibration(folder / "calibration.json")
    assert {sample.op for sample in calibration.transfers} == {
        "all_gather",
        "gather",
        "reduce_scatter",
        "scatter_accumulate",
    }
    assert not [sample for sample in calibration.transfers if "@" in sample.backend]
    assert calibration.environment["packages"]["torch"] == torch.__version__
    assert calibration.command.startswith("python -m odc_kernels.bench --ranks 2")


def test_tables_and_plot(folder):
    text = (folder / "tables.md").read_text()
    assert "| transfer | 64 KiB | 512 KiB |" in text
    assert (folder / "bandwidth.png").stat().st_size > 1000
    assert not (folder / "beside.png").exists()


def test_only_some_ways_and_what_the_owner_adds_up(tmp_path):
    ways = "overwrite|drain"
    bench.main(["--ranks", "2", "--out", str(tmp_path), "--sizes", str(bench.BESIDE_BYTES), "--ways", ways])
    rows = report.read(tmp_path / "rows.csv")
    assert [row["backend"] for row in rows] == ["cpu-copy-overwrite", "cpu-copy-overwrite@peers", "cpu-drain@slots"]
    assert [sample.backend for sample in load_calibration(tmp_path / "calibration.json").transfers] == [
        "cpu-copy-overwrite"
    ]


def test_under_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m"]
    command += ["odc_kernels.bench", "--backend", "cpu", "--out", str(tmp_path), "--sizes", "4096"]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    assert len(report.read(tmp_path / "rows.csv")) > 5


def beside_row(**changes):
    values = {
        "op": "gather",
        "backend": "cuda-copy",
        "world_size": 2,
        "bytes": 64 << 20,
        "dtype": "bf16",
        "gemm_size": 8192,
        "transfer_alone_s": 1e-4,
        "transfer_beside_s": 2e-4,
        "gemm_alone_s": 1e-3,
        "gemm_beside_s": 1.1e-3,
        "slowdown_transfer": 2.0,
        "slowdown_compute": 1.1,
        "compute_lost_s": 1.8e-5,
        "flagged": False,
    }
    return bench_files.BesideRow(**(values | changes))


def test_beside_products_is_shown_with_its_flags(tmp_path, folder):
    rows = [beside_row(), beside_row(op="all_gather", backend="nccl", slowdown_compute=0.98, flagged=True)]
    (tmp_path / "rows.csv").write_text((folder / "rows.csv").read_text())
    bench_files.write_csv(tmp_path / "beside.csv", rows)
    report.write(tmp_path)
    text = (tmp_path / "tables.md").read_text()
    assert "Beside products of 8192 x 8192 bf16 matrices" in text
    assert "| gather cuda-copy | 200, +10.0%, 18 |" in text
    assert "| all_gather nccl | 200, -2.0%, 18 * |" in text
    assert (tmp_path / "beside.png").stat().st_size > 1000
    read = report.read(tmp_path / "beside.csv")
    assert "x2.000, product   1100.0 us x1.100, lost 18.0 us" in report.beside_line(read[0])


@pytest.mark.parametrize(("num_bytes", "text"), [(100, "100 B"), (1 << 16, "64 KiB"), (3 << 19, "1.5 MiB")])
def test_sizes_for_people(num_bytes, text):
    assert report.size(num_bytes) == text
