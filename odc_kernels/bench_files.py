"""The files that `bench` writes: rows.csv, beside.csv, samples.csv, calibration.json, environment.json."""

import csv
import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from odc_kernels import environment, report
from odc_kernels.bench_cases import Case
from odc_kernels.overlap import Beside
from odc_kernels.timing import Timing
from odc_sim.calibration import Calibration, Ceilings, TransferSample, write_calibration
from odc_sim.header import header, write_json

LARGE_GEMM = 8192
"""The products whose slowdowns go into calibration.json."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of rows.csv. Times are seconds; `bytes` is the shard a rank holds, in the dtype that moves."""

    op: str
    backend: str
    world_size: int
    bytes: int
    dtype: str
    p20_s: float
    p50_s: float
    p80_s: float
    samples: int
    bytes_per_s: float
    """Received per rank: (world_size - 1) * bytes / p50_s."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BesideRow:
    """One line of beside.csv: a transfer beside matrix products of gemm_size x gemm_size bf16 matrices."""

    op: str
    backend: str
    world_size: int
    bytes: int
    dtype: str
    gemm_size: int
    transfer_alone_s: float
    transfer_beside_s: float
    gemm_alone_s: float
    gemm_beside_s: float
    slowdown_transfer: float
    slowdown_compute: float
    compute_lost_s: float
    flagged: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples:
    """One line of samples.csv: what the row of rows.csv with the same first fields is made of."""

    op: str
    backend: str
    bytes: int
    seconds: str
    """Separated by spaces."""


def make_row(case: Case, num_bytes: int, alone: Timing) -> Row:
    """The row of a case timed alone."""
    world_size = dist.get_world_size()
    return Row(
        op=case.op,
        backend=case.backend,
        world_size=world_size,
        bytes=num_bytes,
        dtype=case.dtype,
        p20_s=alone.p20_s,
        p50_s=alone.p50_s,
        p80_s=alone.p80_s,
        samples=len(alone.samples),
        bytes_per_s=(world_size - 1) * num_bytes / alone.p50_s,
    )


def make_beside_row(case: Case, num_bytes: int, gemm_size: int, beside: Beside) -> BesideRow:  # pragma: cuda-only
    """The row of a case timed beside products."""
    return BesideRow(
        op=case.op,
        backend=case.backend,
        world_size=dist.get_world_size(),
        bytes=num_bytes,
        dtype=case.dtype,
        gemm_size=gemm_size,
        slowdown_transfer=beside.slowdown_transfer,
        slowdown_compute=beside.slowdown_compute,
        compute_lost_s=beside.compute_lost_s,
        flagged=beside.flagged,
        **dataclasses.asdict(beside),
    )


class Recorder:
    """Keeps the rows and writes the files anew after each, so that a run cut short leaves what it had.

    On ranks that do not `record`, it does nothing.
    """

    def __init__(self, out: Path, command: str, *, record: bool) -> None:
        self._out = out
        self._record = record
        self._rows: list[Row] = []
        self._beside: list[BesideRow] = []
        self._samples: list[Samples] = []
        if record:
            out.mkdir(parents=True, exist_ok=True)
            self._header = header(command, seed=None)
            self._header["environment"] |= environment.describe()
            self._hbm_bytes_per_s = hbm_bytes_per_s() if torch.cuda.is_available() else None

    def add(self, row: Row, alone: Timing, beside: Sequence[BesideRow]) -> None:
        """Print the rows, and write all files."""
        if not self._record:
            return
        print(report.line(dataclasses.asdict(row)), flush=True)
        for other in beside:  # pragma: cuda-only
            print(report.beside_line(dataclasses.asdict(other)), flush=True)
        self._rows.append(row)
        self._beside += beside
        seconds = " ".join(f"{sample:.4g}" for sample in alone.samples)
        self._samples.append(Samples(op=row.op, backend=row.backend, bytes=row.bytes, seconds=seconds))
        write_csv(self._out / "rows.csv", self._rows)
        write_csv(self._out / "samples.csv", self._samples)
        if self._beside:  # pragma: cuda-only
            write_csv(self._out / "beside.csv", self._beside)
        write_json(self._out / "environment.json", self._header)
        write_calibration(self._out / "calibration.json", self._calibration())

    def report(self) -> None:
        """Tables and plots."""
        if self._record:
            report.write(self._out)
            print((self._out / "tables.md").read_text(), flush=True)

    def _calibration(self) -> Calibration:
        """What FSDP2 and ODC use: plain collectives and our own transfers, without variants and sweeps."""
        beside = {(row.op, row.backend, row.bytes): row for row in self._beside if row.gemm_size == LARGE_GEMM}
        transfers = []
        for row in self._rows:
            if row.backend.startswith("nccl-") or "@" in row.backend:
                continue
            other = beside.get((row.op, row.backend, row.bytes))
            transfers.append(
                TransferSample(
                    op=row.op,  # type: ignore[arg-type]
                    backend=row.backend,
                    world_size=row.world_size,
                    bytes=row.bytes,
                    dtype=row.dtype,
                    p20_s=row.p20_s,
                    p50_s=row.p50_s,
                    p80_s=row.p80_s,
                    samples=row.samples,
                    flagged=other is not None and (other.flagged or other.transfer_beside_s < row.p50_s),
                    overlapped_p50_s=None if other is None else other.transfer_beside_s,
                    slowdown_compute=None if other is None else other.slowdown_compute,
                )
            )
        ceilings = None
        if beside and self._hbm_bytes_per_s is not None:  # pragma: cuda-only
            ceilings = Ceilings(
                gemm_flops=2 * LARGE_GEMM**3 / statistics.median(row.gemm_alone_s for row in beside.values()),
                hbm_bytes_per_s=self._hbm_bytes_per_s,
                p2p_bytes_per_s=max((row.bytes_per_s for row in self._rows if row.op == "gather"), default=None),
            )
        return Calibration(**self._header, transfers=tuple(transfers), ceilings=ceilings)


def hbm_bytes_per_s() -> float:  # pragma: cuda-only
    """Bytes read plus bytes written per second by a large copy within the current GPU."""
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for _ in range(3):
        target.copy_(source)
    start.record()
    for _ in range(10):
        target.copy_(source)
    end.record()
    torch.cuda.synchronize()
    return 10 * 2 * source.numel() * source.element_size() / (start.elapsed_time(end) * 1e-3)


def write_csv(path: Path, rows: Sequence[Row | BesideRow | Samples]) -> None:
    """One line for each of the records, which are all of one kind, under a line with the names of their fields."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=[field.name for field in dataclasses.fields(rows[0])])
        writer.writeheader()
        writer.writerows(dataclasses.asdict(row) for row in rows)
