"""Transfers as training makes them: NCCL's (gloo's) collectives, and our own, alone and beside matrix products.

All sizes of all ways are timed twice, the second time largest first. Sizes that the models' own units have are timed as
well, and show how well the others are interpolated.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from odc_kernels.bench_cases import (
    BF16_BYTES,
    FP32_BYTES,
    Buffers,
    Case,
    all_gather_case,
    gather_cases,
    reduce_scatter_case,
    rotation,
    scatter_case,
)
from odc_kernels.calibrate_shapes import MIB
from odc_kernels.calibrate_timing import Effort, Pace
from odc_kernels.overlap import product, time_beside
from odc_kernels.timing import summarize, time_alone
from odc_kernels.window import BackendName, open_window
from odc_sim.calibration import TransferSample
from odc_sim.transfers import best_times, interpolate

CHECKED_BYTES = 16 * MIB
"""Results are compared with float64 sums up to this size; beyond, that would need more memory than training does."""
BESIDE_PRODUCTS = (4096, 8192)
"""Square products of about 0.2 and 1.7 ms on an H200, as a layer's are on short and on long microbatches."""

MakeCase = Callable[[int, int], Case]
"""(elements of a shard, places to rotate through) -> the transfer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """One way to move shards of one dtype, of any size."""

    op: str
    itemsize: int
    make: MakeCase

    def bytes_of(self, fp32_bytes: int) -> int:
        """Of as many elements as `fp32_bytes` are in fp32."""
        return fp32_bytes * self.itemsize // FP32_BYTES

    def case(self, num_bytes: int, device: torch.device) -> Case:
        """Shards of `num_bytes`."""
        places = rotation(num_bytes, dist.get_world_size(), device, least=1)
        return self.make(num_bytes // self.itemsize, places)


def room_bytes(sizes: Sequence[int], device: torch.device) -> int:
    """What the buffers must hold for all places of all sizes."""
    return max(num_bytes * rotation(num_bytes, dist.get_world_size(), device, least=1) for num_bytes in sizes)


def collectives(buffers: Buffers) -> list[Way]:
    """all_gather of bf16 and reduce_scatter of fp32, as FSDP2 makes them."""
    backend = "nccl" if buffers.gathered.is_cuda else "gloo"
    return [
        Way(op="all_gather", itemsize=BF16_BYTES, make=partial(all_gather_case, buffers, backend=backend)),
        Way(op="reduce_scatter", itemsize=FP32_BYTES, make=partial(reduce_scatter_case, buffers, backend=backend)),
    ]


def collectives_fp32(buffers: Buffers) -> list[Way]:
    """all_gather of fp32 parameters, for those who gather them so: as many bytes take as long."""
    backend = "nccl" if buffers.gathered.is_cuda else "gloo"
    wide = _as_fp32(buffers)
    return [Way(op="all_gather", itemsize=FP32_BYTES, make=partial(_fp32_case, all_gather_case, wide, backend))]


@contextmanager
def one_sided(buffers: Buffers, backend: BackendName) -> Iterator[list[Way]]:
    """gather of bf16 by the method that it chooses itself, and scatter_accumulate of fp32, on windows of their own."""
    capacity, accumulated = buffers.published.numel(), buffers.reduced.numel()
    with ExitStack() as stack:
        published = stack.enter_context(open_window(capacity, torch.bfloat16, name="published", backend=backend))
        sums = stack.enter_context(open_window(accumulated, torch.float32, name="accumulators", backend=backend))
        published.local.copy_(buffers.published)
        published.barrier()

        def gather_auto(numel: int, places: int) -> Case:
            cases = gather_cases(buffers, published, numel, places, backend=backend)
            return next(case for case in cases if case.backend == f"{backend}-auto")

        lean = "" if backend == "cpu" else "-lean"  # as OnDemand pushes
        yield [
            Way(op="gather", itemsize=BF16_BYTES, make=gather_auto),
            Way(
                op="scatter_accumulate",
                itemsize=FP32_BYTES,
                make=partial(scatter_case, buffers, sums, backend=f"{backend}-atomic{lean}", lean=bool(lean)),
            ),
        ]


@contextmanager
def one_sided_fp32(buffers: Buffers, backend: BackendName) -> Iterator[list[Way]]:
    """gather of fp32 parameters, likewise."""
    wide = _as_fp32(buffers)
    with open_window(wide.published.numel(), torch.float32, name="published fp32", backend=backend) as window:
        window.local.copy_(wide.published)
        window.barrier()

        def gather_auto(wide: Buffers, numel: int, places: int, *, backend: str) -> Case:
            cases = gather_cases(wide, window, numel, places, backend=backend)
            return next(case for case in cases if case.backend == f"{backend}-auto")

        yield [Way(op="gather", itemsize=FP32_BYTES, make=partial(_fp32_case, gather_auto, wide, backend))]


def _as_fp32(buffers: Buffers) -> Buffers:
    """The buffers with fp32 parameters in place of bf16 ones, as many bytes, other values."""
    wide = replace(
        buffers,
        published=buffers.published.view(torch.float32),
        gathered=buffers.gathered.view(torch.float32),
    )
    wide.published.normal_()  # as bits, bf16 numbers may be no numbers, which are equal to nothing
    return wide


def _fp32_case(make: Callable[..., Case], buffers: Buffers, backend: str, numel: int, places: int) -> Case:
    return replace(make(buffers, numel, places, backend=backend), dtype="fp32")


def measure_alone(
    ways: Sequence[Way], sizes: Sequence[int], pace: Pace, effort: Effort, *, say: Callable[[str], None]
) -> list[TransferSample]:
    """Every way at every size. Collective.

    Raises AssertionError where a transfer gives a wrong result.
    """
    device = pace.device
    stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # as FSDP2's
    cases = {(way.op, size): way.case(size, device) for size in sizes for way in ways}
    seconds: dict[tuple[str, int], list[tuple[float, ...]]] = {key: [] for key in cases}
    pace.heat()
    with torch.cuda.stream(stream):
        for (op, size), case in cases.items():
            if size <= CHECKED_BYTES:
                say(f"{op} of {size >> 10} KiB: is it right?")
                case.check()
        # The second time the other way round: what drifts shows itself.
        for order in (list(cases), list(reversed(cases))):
            for op, size in order:
                say(f"{op} of {size >> 10} KiB")
                timing = time_alone(cases[op, size].call, device, samples=effort.most, total_s=effort.budget_s)
                seconds[op, size].append(timing.samples)
    return [_sample(case, size, *seconds[op, size], effort) for (op, size), case in cases.items()]


def measure_beside(
    ways: Sequence[Way],
    alone: Sequence[TransferSample],
    sizes: Sequence[int],
    products: Sequence[int],
    device: torch.device,
    *,
    say: Callable[[str], None],
) -> list[TransferSample]:  # pragma: cuda-only
    """The samples of `alone` at `sizes`, one for each kind of product, with how each slows the other. Collective."""
    found = []
    for product_size in products:
        gemm = product(product_size, device)
        for size in sizes:
            for way in ways:
                say(f"{way.op} of {size >> 10} KiB beside products of {product_size}")
                case = way.case(size, device)
                before = next(s for s in alone if (s.op, s.backend, s.bytes) == (way.op, case.backend, size))
                beside = time_beside(case.call, gemm, device, rounds=4)
                found.append(
                    replace(
                        before,
                        flagged=beside.slowdown_compute < 1 or beside.transfer_beside_s < before.p50_s,
                        overlapped_p50_s=beside.transfer_beside_s,
                        slowdown_compute=beside.slowdown_compute,
                        beside_gemm_s=beside.gemm_alone_s,
                    )
                )
    return found


def with_beside(alone: Sequence[TransferSample], beside: Sequence[TransferSample]) -> list[TransferSample]:
    """All samples, those that were also timed beside products in that form only."""
    done = {(s.op, s.backend, s.bytes, s.dtype) for s in beside}
    return [*(s for s in alone if (s.op, s.backend, s.bytes, s.dtype) not in done), *beside]


def interpolation_checks(table: Sequence[TransferSample], checks: Sequence[TransferSample]) -> list[dict[str, Any]]:
    """What the table says about sizes that are not in it, against what they took."""
    found = []
    for check in checks:
        points = [(s.bytes, s.p50_s) for s in table if (s.op, s.backend) == (check.op, check.backend)]
        if not points:
            continue
        seconds, inside = interpolate(*best_times(points), np.array([float(check.bytes)]))
        if not inside:
            continue
        expected_s = float(seconds[0])
        found.append(
            {
                "op": check.op,
                "bytes": check.bytes,
                "measured_s": check.p50_s,
                "interpolated_s": expected_s,
                "rel_error": expected_s / check.p50_s - 1,
            }
        )
    return found


def _sample(
    case: Case, num_bytes: int, first: tuple[float, ...], second: tuple[float, ...], effort: Effort
) -> TransferSample:
    both = summarize([*first, *second])
    return TransferSample(
        op=case.op,
        backend=case.backend,
        world_size=dist.get_world_size(),
        bytes=num_bytes,
        dtype=case.dtype,
        p20_s=both.p20_s,
        p50_s=both.p50_s,
        p80_s=both.p80_s,
        samples=len(both.samples),
        flagged=not effort.steady(first, second),
    )
