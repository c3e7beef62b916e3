"""What `bench` writes: rows.csv, samples.csv, calibration.json, environment.json, then tables and plots from them."""

import csv
import dataclasses
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_kernels import environment, report
from odc_kernels.bench_cases import Case
from odc_kernels.overlap import Beside
from odc_kernels.timing import Timing
from odc_sim.calibration import Calibration, Ceilings, TransferSample, write_calibration
from odc_sim.header import header, write_json


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
    transfer_alone_s: float | None = None
    transfer_beside_s: float | None = None
    gemm_alone_s: float | None = None
    gemm_beside_s: float | None = None
    slowdown_transfer: float | None = None
    slowdown_compute: float | None = None
    flagged: bool = False


def make_row(case: Case, num_bytes: int, alone: Timing, beside: Beside | None) -> Row:
    """The row of one case."""
    world_size = dist.get_world_size()
    row = Row(
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
    if beside is None:
        return row
    return dataclasses.replace(
        row,
        **dataclasses.asdict(beside),
        slowdown_transfer=beside.slowdown_transfer,
        slowdown_compute=beside.slowdown_compute,
        flagged=beside.flagged or beside.transfer_beside_s < alone.p50_s,
    )


class Recorder:
    """Keeps the rows and writes the files anew after each, so that a run cut short leaves what it had.

    On ranks that do not `record`, it does nothing.
    """

    def __init__(self, out: Path, command: str, *, record: bool) -> None:
        self._out = out
        self._record = record
        self._rows: list[Row] = []
        self._samples: list[dict[str, Any]] = []
        if record:
            out.mkdir(parents=True, exist_ok=True)
            self._header = header(command, seed=None)
            self._header["environment"] |= environment.describe()
            self._hbm_bytes_per_s = hbm_bytes_per_s() if torch.cuda.is_available() else None

    def add(self, row: Row, alone: Timing) -> None:
        """Print the row, and write all files."""
        if not self._record:
            return
        print(report.line(dataclasses.asdict(row)), flush=True)
        self._rows.append(row)
        names = {"op": row.op, "backend": row.backend, "bytes": row.bytes}
        self._samples += [names | {"sample": i, "seconds": f"{s:.4g}"} for i, s in enumerate(alone.samples)]
        _write_csv(self._out / "rows.csv", [dataclasses.asdict(row) for row in self._rows])
        _write_csv(self._out / "samples.csv", self._samples)
        write_json(self._out / "environment.json", self._header)
        write_calibration(self._out / "calibration.json", self._calibration())

    def report(self) -> None:
        """Tables and plots."""
        if self._record:
            report.write(self._out)
            print((self._out / "tables.md").read_text(), flush=True)

    def _calibration(self) -> Calibration:
        """What FSDP2 and ODC use: plain collectives and our own transfers, without variants and sweeps."""
        rows = [row for row in self._rows if not row.backend.startswith("nccl-") and "@" not in row.backend]
        transfers = tuple(
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
                flagged=row.flagged,
                overlapped_p50_s=row.transfer_beside_s,
                slowdown_compute=row.slowdown_compute,
            )
            for row in rows
        )
        gemms = [row.gemm_alone_s for row in self._rows if row.gemm_alone_s is not None]
        ceilings = None
        if gemms and self._hbm_bytes_per_s is not None:  # pragma: cuda-only
            from odc_kernels.bench import GEMM_SIZE

            gathers = [row.bytes_per_s for row in rows if row.op == "gather"]
            ceilings = Ceilings(
                gemm_flops=2 * GEMM_SIZE**3 / statistics.median(gemms),
                hbm_bytes_per_s=self._hbm_bytes_per_s,
                p2p_bytes_per_s=max(gathers, default=None),
            )
        return Calibration(**self._header, transfers=transfers, ceilings=ceilings)


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


def _write_csv(path: Path, rows: list[dict[str, Any]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
