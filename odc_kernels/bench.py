"""Time gather and scatter_accumulate against the collectives on this machine.

    python -m odc_kernels.bench --out reports/kernels-h200        all GPUs of this host, one rank each
    torchrun ... -m odc_kernels.bench --out ...                   ranks already started
    python -m odc_kernels.bench --ranks 2 --backend cpu --out /tmp/bench --sizes 65536

Writes rows.csv (one row per size and way), samples.csv (the samples behind it), beside.csv (the same transfers beside
matrix products), calibration.json (both in the form that `odc simulate --hardware` reads; plain collectives and our
own transfers only) and environment.json, then tables and plots made from them.
"""

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from odc_kernels.bench_cases import (
    BF16_BYTES,
    FP32_BYTES,
    Buffers,
    Case,
    all_gather_case,
    drain_case,
    gather_cases,
    pieces_case,
    reduce_scatter_case,
    rotation,
    scatter_case,
)
from odc_kernels.bench_files import LARGE_GEMM, Recorder, make_beside_row, make_row
from odc_kernels.overlap import product, time_beside
from odc_kernels.ranks import run_ranks
from odc_kernels.scatter_accumulate import accumulator_numel
from odc_kernels.timing import summarize, time_alone
from odc_kernels.window import BackendName, Window, open_window

SIZES_BYTES = tuple(1 << power for power in (12, 16, 18, 20, 22, 24, 26, 28))
PASSES, SAMPLES_A_PASS = 4, 20
BESIDE_BYTES = 16 << 20
"""Smaller transfers are bound by their launches, also beside compute."""
SWEEP_BYTES = 64 << 20
SWEEP_PROGRAMS = (16, 32, 64, 132, 264)
"""How many programs scatter_accumulate runs, tried at one size."""
PIECES_BYTES = 64 << 10
PIECES = (1, 2, 4, 8)
"""How many copies a gather makes, tried at one size: those of 2, 3, 5 and 9 ranks."""
GEMM_SIZES = (LARGE_GEMM, 4096)
"""Products of about 1.4 and 0.2 ms on an H200: kernels wait for the multiprocessors until one ends."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """What the command line says."""

    out: Path
    backend: BackendName
    sizes_bytes: tuple[int, ...]
    beside: bool
    variants: bool
    ways: str
    """Regular expression: which cases to measure, by "op backend"."""
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
    parser.add_argument("--ways", default="", help="only those of which 'op backend' holds this regular expression")
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
        ways=parsed.ways,
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
    sizes = [(num_bytes, rotation(num_bytes, world_size, device)) for num_bytes in options.sizes_bytes]
    capacity_bytes = max(num_bytes * slots for num_bytes, slots in sizes)
    capacity, accumulated = capacity_bytes // BF16_BYTES, capacity_bytes // FP32_BYTES
    slotted = accumulator_numel(accumulated, world_size, deterministic=True)
    measure = _Measure(options, device, Recorder(options.out, options.command, record=rank == 0))
    with ExitStack() as stack:
        variants = _register_variants(capacity, device, stack) if options.variants else {}
        buffers = Buffers.allocate(capacity, device)

        def window(numel: int, dtype: torch.dtype, name: str) -> Window:
            return stack.enter_context(open_window(numel, dtype, name=name, backend=options.backend))

        windows = _Windows(
            published=window(capacity, torch.bfloat16, "published"),
            accumulators=window(accumulated, torch.float32, "accumulators"),
            slots=window(slotted, torch.float32, "slots"),
        )
        windows.published.local.copy_(buffers.published)
        windows.published.barrier()
        for num_bytes, slots in sizes:
            cases = _cases(buffers, windows, variants, num_bytes, slots, options)
            measure([case for case in cases if re.search(options.ways, f"{case.op} {case.backend}")], num_bytes)
    measure.recorder.report()


Variants = dict[str, tuple[Buffers, dist.ProcessGroup]]


def _register_variants(capacity: int, device: torch.device, stack: ExitStack) -> Variants:  # pragma: cuda-only
    """NCCL with registered buffers; where the installed version has no such thing, say so and go on."""
    from odc_kernels.bench_nccl import VARIANTS, registered

    found: Variants = {}
    for variant in VARIANTS:
        try:
            found[variant] = stack.enter_context(registered(variant, capacity, device))
        except (AttributeError, TypeError, RuntimeError) as error:
            print(f"{variant}: not measured: {error}", file=sys.stderr, flush=True)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class _Windows:
    published: Window
    accumulators: Window
    slots: Window


class _Measure:
    """Checks a case, times it, and records it."""

    def __init__(self, options: Options, device: torch.device, recorder: Recorder) -> None:
        self._options = options
        self._device = device
        self.recorder = recorder
        self._gemms = {size: product(size, device) for size in GEMM_SIZES} if options.beside else {}

    def __call__(self, cases: list[Case], num_bytes: int) -> None:
        # On a stream of its own, as in FSDP2; copy-engine collectives and batches of copies refuse the default one.
        stream = torch.cuda.Stream(self._device, priority=-1) if self._device.type == "cuda" else None
        seconds: list[list[float]] = [[] for _ in cases]
        with torch.cuda.stream(stream):
            for case in cases:
                case.check()
            # In turn, because the speed of the host, which small transfers depend on, changes while a run goes on.
            for _ in range(PASSES):
                for case, samples in zip(cases, seconds, strict=True):
                    samples += time_alone(case.call, self._device, samples=SAMPLES_A_PASS).samples
        for case, samples in zip(cases, seconds, strict=True):
            beside = []
            if num_bytes >= BESIDE_BYTES:
                for size, gemm in self._gemms.items():  # pragma: cuda-only
                    beside.append(make_beside_row(case, num_bytes, size, time_beside(case.call, gemm, self._device)))
            alone = summarize(samples)
            self.recorder.add(make_row(case, num_bytes, alone), alone, beside)


def _cases(
    buffers: Buffers, windows: _Windows, variants: Variants, num_bytes: int, slots: int, options: Options
) -> Iterator[Case]:
    numel, numel_fp32 = num_bytes // BF16_BYTES, num_bytes // FP32_BYTES
    collectives = "gloo" if options.backend == "cpu" else "nccl"
    own = options.backend
    scatter = partial(scatter_case, buffers, numel=numel_fp32, slots=slots)
    yield all_gather_case(buffers, numel, slots, backend=collectives)
    for variant, (registered, group) in variants.items():  # pragma: cuda-only
        yield all_gather_case(registered, numel, slots, backend=variant, group=group)
    yield from gather_cases(buffers, windows.published, numel, slots, backend=own)
    yield reduce_scatter_case(buffers, numel_fp32, slots, backend=collectives)
    for variant, (registered, group) in variants.items():  # pragma: cuda-only
        yield reduce_scatter_case(registered, numel_fp32, slots, backend=variant, group=group)
    yield scatter(windows.accumulators, backend=f"{own}-atomic")
    yield scatter(windows.accumulators, backend=f"{own}-atomic-from-bf16", from_bf16=True)
    yield scatter(windows.slots, backend=f"{own}-deterministic", deterministic=True)
    overwriting = partial(scatter, windows.slots, deterministic=True, overwrite=True)
    yield overwriting(backend=f"{own}-copy-overwrite")
    if num_bytes >= BESIDE_BYTES:
        yield overwriting(backend=f"{own}-copy-overwrite@peers", skip_self=True)
        yield drain_case(buffers, windows.slots, numel_fp32, slots, backend=f"{own}-drain@slots")
    if num_bytes == PIECES_BYTES:
        for pieces in PIECES:
            label = f"{own}-copy@{pieces}"
            yield pieces_case(buffers, windows.published, numel, slots, backend=label, pieces=pieces)
    if own != "cpu":  # pragma: cuda-only
        yield scatter(windows.accumulators, backend=f"{own}-atomic-lean", lean=True)
        if num_bytes == SWEEP_BYTES:
            yield scatter(windows.accumulators, backend=f"{own}-atomic-lean@264", num_programs=264, lean=True)
            for programs in SWEEP_PROGRAMS:
                yield scatter(windows.accumulators, backend=f"{own}-atomic@{programs}", num_programs=programs)


if __name__ == "__main__":
    main()
