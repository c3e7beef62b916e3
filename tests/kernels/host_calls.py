"""Microseconds of a CPU core that Python takes to make one call of a transfer, without a GPU.

    PYTHONPATH=. python tests/kernels/host_calls.py

What a GPU's driver does is left out on both sides: streams are objects that do nothing, the driver's batch copy is a
function of the C library that takes nothing and returns zero, torch's collectives go to its own `fake` process group.
So this compares what the two ways do in Python, and one version of `odc_kernels` with another.
"""

import ctypes
import json
import os
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import odc_kernels.copies as copies
import odc_kernels.fsdp_comm as fsdp_comm
import odc_kernels.gather as gather_module
import odc_kernels.scatter_accumulate as push_module
from odc_kernels.fsdp_comm import Drift, Gather, Push, StockGather, StockReduceScatter
from odc_kernels.signals import Signals

WORLD_SIZE, NUMEL, CALLS, ROUNDS = 2, 4096, 2000, 15


class Stream:
    """A stream on which nothing happens."""

    cuda_stream = 7

    def wait_event(self, event: object) -> None:
        """Go on."""


def window(dtype: torch.dtype, numel: int) -> Any:
    """What transfers look at in a window."""
    peers = tuple(torch.zeros(numel, dtype=dtype) for _ in range(WORLD_SIZE))
    return SimpleNamespace(
        rank=0,
        world_size=WORLD_SIZE,
        local=peers[0],
        peers=peers,
        reaches_all=True,
        numel=numel,
        dtype=dtype,
        device=peers[0].device,
        pointers=tuple(peer.data_ptr() for peer in peers),
        write=lambda values, peer, offset: None,  # the own chunk's copy is torch's, not counted
    )


def moved(window: Any) -> Any:
    """The same window, on a GPU."""
    return SimpleNamespace(**vars(window) | {"device": SimpleNamespace(type="cuda", index=0)})


def on_gpu(signals: Signals) -> Signals:
    """The branch for GPUs, past the last wait."""
    signals._on_gpu = True
    signals._passed = object()
    return signals


def pretend_driver() -> None:
    """Batches of copies go to a C function that does nothing."""
    function = ctypes.CDLL(None).getppid
    size, pointer = ctypes.c_size_t, ctypes.c_void_p
    function.argtypes = (pointer, pointer, pointer, size, pointer, pointer, size, pointer)
    copies._driver = lambda: lambda *arguments: function(*arguments) and 0
    stream = Stream()
    torch.cuda.current_stream = lambda device=None: stream
    torch._C._cuda_getCurrentRawStream = lambda index: 7
    copy_batch = copies.copy_batch
    cuda = SimpleNamespace(type="cuda", index=0)
    for module in (gather_module, push_module):
        module.copy_batch = lambda targets, sources, num_bytes, device: copy_batch(targets, sources, num_bytes, cuda)
    if hasattr(copies, "Batch"):
        prepared = {"prepare": gather_module, "prepare_overwrite": push_module}
        for name, module in prepared.items():
            original = getattr(module, name)
            setattr(fsdp_comm, name, lambda window, *rest, original=original: original(moved(window), *rest))


def core_us(call: Callable[[], Any]) -> float:
    """Of one call: median over rounds."""
    found = []
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(CALLS):
            call()
        found.append((time.thread_time() - start) / CALLS * 1e6)
    return round(statistics.median(found), 2)


def main() -> None:
    """Print every way's microseconds."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
    pretend_driver()
    group = dist.group.WORLD
    module = torch.nn.Linear(64, 64, bias=False)
    known = SimpleNamespace(owner=module, attribute="weight", parameter=module.weight, name="weight", numel=NUMEL)
    device = torch.device("cpu")
    unit = SimpleNamespace(name="layer", numel=NUMEL, shards=[known] * 7, trained=[known], device=device)

    published = window(torch.bfloat16, NUMEL)
    drift = Drift([unit])
    signals = on_gpu(Signals(window(torch.int32, WORLD_SIZE), range(WORLD_SIZE)))
    gather = Gather(unit, 0, published, 0, drift, signals)
    whole = torch.zeros(WORLD_SIZE * NUMEL, dtype=torch.bfloat16)
    own = whole[:NUMEL]
    gather(whole, own, group)

    def first_gather() -> None:
        drift._compared[0] = False
        gather(whole, own, group)

    slots = window(torch.float32, NUMEL * WORLD_SIZE)
    push = Push(unit, slots, 0, signals, scale=1.0, deterministic=True, replicated=False)
    gradients = torch.zeros(WORLD_SIZE * NUMEL)
    reduced = gradients[:NUMEL]

    def first_push() -> None:
        push.pushed = False
        push(reduced, gradients, group, dist.ReduceOp.AVG)

    atomic = Push(unit, window(torch.float32, NUMEL), 0, signals, scale=0.5, deterministic=False, replicated=False)
    push_module.launch.interpreted = lambda: True  # past the choice of a method, to the launch
    push_module._push_triton = lambda *rest: None

    stock_gather, stock_reduce = StockGather(), StockReduceScatter()
    result = {
        "torch": torch.__version__,
        "cores": os.cpu_count(),
        "core_us": {
            "Gather, first of a minibatch": core_us(first_gather),
            "Gather": core_us(lambda: gather(whole, own, group)),
            "all_gather": core_us(lambda: stock_gather(whole, own, group)),
            "Push, by copy engines": core_us(first_push),
            "Push, by atomics, to Triton's launch": core_us(
                lambda: atomic(reduced, gradients, group, dist.ReduceOp.AVG)
            ),
            "reduce_scatter": core_us(lambda: stock_reduce(reduced, gradients, group, dist.ReduceOp.AVG)),
        },
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
