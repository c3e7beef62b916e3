"""What a matrix product leaves of an H200's multiprocessors, and what pushes that fit there cost it. On one GPU.

    python reports/kernels-h200/one-gpu/beside_products.py

Needs cupy. A push adds to the GPU's own memory here: how it waits for multiprocessors and what it costs the products
shows, the link does not. Writes beside_products.json.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch

from odc_kernels import launch, scatter_accumulate
from odc_kernels.calibrate_compute import layer_steps
from odc_kernels.environment import NO_MULTICAST, describe
from odc_kernels.overlap import product, time_beside
from odc_kernels.ranks import run_ranks

HERE = Path(__file__).parent
SIZES = {4096: 70, 8192: 500}
"""Of products, and after how many microseconds of one a kernel is launched beside it."""
NUMEL = 16 << 20
"""64 MiB of fp32."""
SHARED_BYTES = (0, 1024, 2048, 4096, 5120, 5632, 6144, 8192, 16384, 18000)
LEAN = ((128, 11), (256, 6), (512, 3))
"""Elements a tile, and tiles."""
BULK_SHARED_BYTES = 128 + 4 * 1024
MULTIPROCESSORS = 132


def resources(steps: list[Callable[[], None]]) -> list[dict[str, Any]]:
    """What each kernel of these steps takes of a multiprocessor, the longest first."""
    for step in steps:
        step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for step in steps:
            step()
        torch.cuda.synchronize()
    profile.export_chrome_trace("/tmp/trace.json")
    found: dict[tuple[Any, ...], list[float]] = {}
    for event in json.loads(Path("/tmp/trace.json").read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            about = event["args"]
            kind = (event["name"], int(np.prod(about["block"])), about["registers per thread"], about["shared memory"])
            found.setdefault(kind, []).append(event["dur"])
    rows = [
        {"kernel": name[:90], "threads": threads, "registers": threads * each, "shared_bytes": shared, "us": sum(us)}
        for (name, threads, each, shared), us in found.items()
    ]
    return sorted(rows, key=lambda row: -row["us"])[:6]


class Small:
    """The kernels of small.cu."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        options = ("--std=c++17", "-arch=sm_90a")
        module = cupy.RawModule(code=(HERE / "small.cu").read_text(), options=options, backend="nvrtc")
        self._wait, self._push = module.get_function("wait"), module.get_function("push_bulk")
        self._stamps = torch.zeros(MULTIPROCESSORS, 2, dtype=torch.int64, device=device)
        self._ends = torch.zeros(2, 2, dtype=torch.int64, device=device)

    def _stream(self) -> Any:
        return cupy.cuda.ExternalStream(torch.cuda.current_stream(self.device).cuda_stream)

    def wait(self, ctas: int, threads: int, shared_bytes: int, ns: int, stamps: int) -> None:
        """Enqueue it on the current stream."""
        arguments = (cupy.int64(ns), cupy.uint64(stamps))
        self._wait((ctas,), (threads,), arguments, shared_mem=shared_bytes, stream=self._stream())

    def push(self, source: int, target: int, num_bytes: int) -> None:
        """By bulk reductions."""
        arguments = (cupy.uint64(source), cupy.uint64(target), cupy.int64(num_bytes))
        self._push((MULTIPROCESSORS,), (32,), arguments, shared_mem=BULK_SHARED_BYTES, stream=self._stream())

    def starts(self, gemm: Callable[[], None], wait_us: int, threads: int, shared_bytes: int) -> dict[str, float]:
        """Of a kernel of one CTA a multiprocessor launched in the middle of a product, median of 6."""
        side = torch.cuda.Stream(self.device, priority=-1)
        rows = []
        for _ in range(6):
            for _ in range(3):
                gemm()
            torch.cuda.synchronize()
            self.wait(1, 32, 0, 0, self._ends[0].data_ptr())
            gemm()
            self.wait(1, 32, 0, 0, self._ends[1].data_ptr())
            since = time.perf_counter()
            while (time.perf_counter() - since) * 1e6 < wait_us:
                pass
            with torch.cuda.stream(side):
                self.wait(MULTIPROCESSORS, threads, shared_bytes, 3000, self._stamps.data_ptr())
            torch.cuda.synchronize()
            begin, end = self._ends[:, 0].tolist()
            started, places = self._stamps.cpu().numpy().T
            late = (np.median(started) - begin) / (end - begin)
            rows.append(((end - begin) / 1e3, late, len(set(places))))
        us, late, places = np.median(rows, axis=0)
        return {"product_us": us, "median_start": late, "multiprocessors": places}


def pushes(small: Small, device: torch.device) -> dict[str, Callable[[int], None]]:
    """Ways to add 64 MiB twice, as a rank of two does to its own and its peer's; each is checked."""
    source = torch.randn(2 * NUMEL, device=device)
    sums = torch.zeros(2, NUMEL, device=device)
    addresses = torch.tensor([row.data_ptr() for row in sums], device=device)
    arguments = (source, addresses, NUMEL, 0, 0, 2, 1.0)
    grid = (MULTIPROCESSORS,)

    def now(_: int) -> None:
        block, warps = scatter_accumulate.BLOCK, scatter_accumulate.NUM_WARPS
        launch.kernels().push_add_kernel[grid](*arguments, block=block, num_warps=warps)

    def lean(block: int, stages: int) -> Callable[[int], None]:
        options = scatter_accumulate.lean_options(4) | {"block": block, "stages": stages}
        return lambda _: launch.kernels().push_add_lean_kernel[grid](*arguments, **options)

    def bulk(_: int) -> None:
        for rank in (1, 0):
            small.push(source[rank * NUMEL :].data_ptr(), sums[rank].data_ptr(), 4 * NUMEL)

    found = {"atomic": now} | {f"lean, {stages} tiles of {block}": lean(block, stages) for block, stages in LEAN}
    found["bulk reductions"] = bulk
    for name, call in found.items():
        sums.zero_()
        call(0)
        torch.cuda.synchronize()
        assert torch.equal(sums.view(-1), source), name
    return found


def measure(_rank: int) -> None:
    """All of it."""
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    gemms = {size: product(size, device) for size in SIZES}
    found: dict[str, Any] = {"created": time.strftime("%Y-%m-%d"), "environment": describe(), "takes": {}, "starts": []}
    for size, gemm in gemms.items():
        found["takes"][f"product of {size}"] = resources([gemm])
    found["takes"]["layer of qwen2.5-1.5b, 8192 tokens"] = resources(layer_steps("qwen2.5-1.5b", (8192,), device))
    for name, rows in found["takes"].items():
        for row in rows:
            print(f"{name}: {row}")
    small = Small(device)
    for threads, shared_bytes in [(32, shared) for shared in SHARED_BYTES] + [(64, 0), (128, 0), (512, 0)]:
        for size, wait_us in SIZES.items():
            row = {"threads": threads, "shared_bytes": shared_bytes, "beside": size}
            found["starts"].append(row | small.starts(gemms[size], wait_us, threads, shared_bytes))
            print(found["starts"][-1], flush=True)
    found["pushes"] = []
    for name, call in pushes(small, device).items():
        for size, gemm in gemms.items():
            timed = time_beside(call, gemm, device, rounds=7, phase_s=0.02 if size == min(SIZES) else 0.04)
            row = {"push": name, "beside": size, "alone_s": timed.transfer_alone_s, "beside_s": timed.transfer_beside_s}
            found["pushes"].append(row | {"product_slowdown": timed.slowdown_compute, "lost_s": timed.compute_lost_s})
            print(found["pushes"][-1], flush=True)
    (HERE / "beside_products.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_ranks(measure, 1, backend="nccl", timeout_s=200, environment=NO_MULTICAST)
