"""Time gather and scatter_accumulate against the collectives on this machine.

    python -m odc_kernels.bench --out reports/kernels-h200        all GPUs of this host, one rank each
    torchrun ... -m odc_kernels.bench --out ...                   ranks already started
    python -m odc_kernels.bench --ranks 2 --backend cpu --out /tmp/bench --sizes 65536

Writes rows.csv (one row per size and way), samples.csv (the samples behind it), beside.csv (the same transfers beside
matrix products), calibration.json (both in the form that `odc simulate --calibration` reads; plain collectives and our
own transfers only) and environment.json, then tables and plots made from them.
"""

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import (
    Buffers,
    Case,
    all_gather_case,
    gather_cases,
    pieces_case,
    reduce_scatter_case,
    scatter_case,
)
from odc_kernels.bench_files import LARGE_GEMM, Recorder, make_beside_row, make_row
from odc_kernels.overlap import time_beside
from odc_kernels.ranks import run_ranks
from odc_kernels.scatter_accumulate import accumulator_numel
from odc_kernels.timing import time_alone
from odc_kernels.window import BackendName, Window, open_window

SIZES_BYTES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26, 28))
BESIDE_BYTES = 4 << 20
"""Smaller transfers are bound by their launches, also beside compute."""
SWEEP_BYTES = 64 << 20
SWEEP_PROGRAMS = (8, 16, 32, 64, 96, 132, 264)
"""How many programs scatter_accumulate runs, tried at one size."""
PIECES_BYTES = 64 << 10
PIECES = (1, 2, 4, 7)
"""How many copies a gather makes, tried at one size: those of 2, 3, 5 and 8 ranks."""
GEMM_SIZES = (LARGE_GEMM, 4096)
"""Products of about 1.4 and 0.2 ms on an H200: kernels wait for the multiprocessors until one ends."""
CPU_CACHE_BYTES = 32 << 20
BF16_BYTES, FP32_BYTES = 2, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says."""

    out: Path
    backend: BackendName
    sizes_bytes: tuple[int, ...]
    beside: bool
    variants: bool
    command: str


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m odc_kernels.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--ranks", type=int, help="ranks to start; default: one per GPU, or 2 on a CPU")
    parser.add_argument("--backend", choices=("auto", "cuda", "nvshmem", "cpu"), default="auto", help="of the windows")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES_BYTES, help="shard sizes in bytes")
    parser.add_argument("--no-beside", action="store_true", help="skip the timing beside matrix products")
    parser.add_argument("--no-variants", action="store_true", help="skip NCCL with registered buffers")
    parsed = parser.parse_args(arguments)
    backend = parsed.backend
    if backend == "auto":
        backend = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = backend != "cpu"
    options = Options(
        out=parsed.out,
        backend=backend,
        sizes_bytes=tuple(parsed.sizes),
        beside=on_gpu and not parsed.no_beside,
        variants=on_gpu and not parsed.no_variants,
        command=" ".join(["python -m odc_kernels.bench", *(sys.argv[1:] if arguments is None else arguments)]),
    )
    collectives = "nccl" if on_gpu else "gloo"
    if "RANK" in os.environ:
        if on_gpu:  # pragma: cuda-only
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(collectives)
        bench(dist.get_rank(), options)
        dist.barrier()
        dist.destroy_process_group()
    else:
        world_size = parsed.ranks or (torch.cuda.device_count() if on_gpu else 2)
        run_ranks(bench, world_size, options, backend=collectives, timeout_s=1800)


def bench(rank: int, options: Options) -> None:
    """One rank's part of the whole run; rank 0 writes the files, after every size anew."""
    device = torch.device("cpu") if options.backend == "cpu" else torch.device("cuda", torch.cuda.current_device())
    world_size = dist.get_world_size()
    sizes = [(num_bytes, _slots(num_bytes, world_size, device)) for num_bytes in options.sizes_bytes]
    capacity_bytes = max(num_bytes * slots for num_bytes, slots in sizes)
    measure = _Measure(options, device, Recorder(options.out, options.command, record=rank == 0))
    buffers = Buffers.allocate(capacity_bytes // BF16_BYTES, device)
    accumulated = capacity_bytes // FP32_BYTES
    slotted = accumulator_numel(accumulated, world_size, deterministic=True)
    with (
        open_window(buffers.published.numel(), torch.bfloat16, name="published", backend=options.backend) as published,
        open_window(accumulated, torch.float32, name="accumulators", backend=options.backend) as accumulators,
        open_window(slotted, torch.float32, name="slots", backend=options.backend) as slots_window,
    ):
        published.local.copy_(buffers.published)
        published.barrier()
        for num_bytes, slots in sizes:
            for case in _cases(buffers, published, accumulators, slots_window, num_bytes, slots, options):
                measure(case, num_bytes)
        published.barrier()
    if options.variants:  # pragma: cuda-only
        # Last: a failure inside NCCL can leave its communicator unusable.
        del buffers
        for variant in _variants():
            _measure_variant(variant, capacity_bytes, sizes, device, measure)
    measure.recorder.report()


class _Measure:
    """Checks a case, times it, and records it."""

    def __init__(self, options: Options, device: torch.device, recorder: Recorder) -> None:
        self._options = options
        self._device = device
        self.recorder = recorder
        self._gemms = {size: _gemm(size, device) for size in GEMM_SIZES} if options.beside else {}

    def __call__(self, case: Case, num_bytes: int) -> None:
        # On a stream of its own, as in FSDP2; NCCL's copy-engine collectives refuse the default stream.
        stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        with torch.cuda.stream(stream):
            case.check()
            alone = time_alone(case.call, self._device)
        beside = []
        if num_bytes >= BESIDE_BYTES:
            for size, gemm in self._gemms.items():  # pragma: cuda-only
                beside.append(make_beside_row(case, num_bytes, size, time_beside(case.call, gemm, self._device)))
        self.recorder.add(make_row(case, num_bytes, alone), alone, beside)


def _gemm(size: int, device: torch.device) -> Callable[[], None]:  # pragma: cuda-only
    """The compute beside transfers: a square bf16 matrix product of random numbers."""
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    return partial(torch.mm, a, b, out=torch.empty_like(a))


def _slots(num_bytes: int, world_size: int, device: torch.device) -> int:
    """How many places to rotate through: four times the last-level cache in all, at least 2, at most 512."""
    cache_bytes = CPU_CACHE_BYTES
    if device.type == "cuda":  # pragma: cuda-only
        cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return min(512, max(2, -(-4 * cache_bytes // (num_bytes * world_size))))


def _cases(
    buffers: Buffers,
    published: Window,
    accumulators: Window,
    slots_window: Window,
    num_bytes: int,
    slots: int,
    options: Options,
) -> Iterator[Case]:
    numel, numel_fp32 = num_bytes // BF16_BYTES, num_bytes // FP32_BYTES
    collectives = "gloo" if options.backend == "cpu" else "nccl"
    own = options.backend
    yield all_gather_case(buffers, numel, slots, backend=collectives)
    yield from gather_cases(buffers, published, numel, slots, backend=own)
    if num_bytes == PIECES_BYTES:
        for pieces in PIECES:
            yield pieces_case(buffers, published, numel, slots, backend=f"{own}-copy@{pieces}", pieces=pieces)
    yield reduce_scatter_case(buffers, numel_fp32, slots, backend=collectives)
    atomic, fixed = f"{own}-atomic", f"{own}-deterministic"
    yield scatter_case(buffers, accumulators, numel_fp32, slots, backend=atomic)
    yield scatter_case(buffers, accumulators, numel_fp32, slots, backend=f"{atomic}-from-bf16", from_bf16=True)
    yield scatter_case(buffers, slots_window, numel_fp32, slots, backend=fixed, deterministic=True)
    copied = f"{own}-copy-overwrite"
    yield scatter_case(buffers, slots_window, numel_fp32, slots, backend=copied, deterministic=True, overwrite=True)
    if num_bytes == SWEEP_BYTES and own != "cpu":  # pragma: cuda-only
        for programs in SWEEP_PROGRAMS:
            label = f"{atomic}@{programs}"
            yield scatter_case(buffers, accumulators, numel_fp32, slots, backend=label, num_programs=programs)


def _variants() -> tuple[str, ...]:  # pragma: cuda-only
    from odc_kernels.bench_nccl import VARIANTS

    return VARIANTS


def _measure_variant(
    variant: str, capacity_bytes: int, sizes: list[tuple[int, int]], device: torch.device, measure: _Measure
) -> None:  # pragma: cuda-only
    """NCCL with registered buffers; where the installed version has no such thing, say so and go on."""
    from odc_kernels.bench_nccl import registered

    try:
        with registered(variant, capacity_bytes // BF16_BYTES, device) as (buffers, group):
            for num_bytes, slots in sizes:
                numel, numel_fp32 = num_bytes // BF16_BYTES, num_bytes // FP32_BYTES
                measure(all_gather_case(buffers, numel, slots, backend=variant, group=group), num_bytes)
                measure(reduce_scatter_case(buffers, numel_fp32, slots, backend=variant, group=group), num_bytes)
    except (AttributeError, TypeError, RuntimeError, AssertionError):
        print(f"{variant}: not measured\n{traceback.format_exc()}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
