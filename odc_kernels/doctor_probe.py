"""Experiments of the doctor, each in a process of its own, so that a crash or a hang is one line and not its end.

    python -m odc_kernels.doctor_probe gpus               what torch sees of the GPUs
    python -m odc_kernels.doctor_probe collectives        NCCL, one rank a GPU
    python -m odc_kernels.doctor_probe window cuda        (or nvshmem, cpu) open a window, exchange values, check them

The last line printed is JSON.
"""

import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from odc_kernels.copies import driver_has_batches
from odc_kernels.gather import gather
from odc_kernels.ranks import RankError, run_ranks
from odc_kernels.scatter_accumulate import scatter_accumulate
from odc_kernels.window import BackendName, open_window
from odc_sim.doctor import first_line

MARK = "ODC-DOCTOR "
RANKS_S = 60.0
"""For the ranks of one experiment: loading torch, NCCL's start and compiling two kernels."""
PROBE_S = 100.0
NUMEL = 5000
NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


def probe(*arguments: str, timeout_s: float = PROBE_S) -> dict[str, Any]:
    """What an experiment found, or {"problem": why there is nothing}."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    }
    command = [sys.executable, "-m", "odc_kernels.doctor_probe", *arguments]
    process = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        printed, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return {"problem": f"was not finished after {timeout_s:g} s"}
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)  # its ranks too
            process.communicate()
    for text in reversed(printed.splitlines()):
        if text.startswith(MARK):
            found: dict[str, Any] = json.loads(text.removeprefix(MARK))
            return found
    return {"problem": f"ended with exit code {process.returncode}: {reason(errors)}"}


def reason(text: str) -> str:
    """The line that says what happened, of a traceback or of several ranks' ones: the first rank's last error."""
    for part in re.split(r"^rank \d+ raised:$", text, flags=re.MULTILINE):
        errors = re.findall(r"^[\w.]*(?:Error|Exception|Interrupt)\b.*", part, flags=re.MULTILINE)
        if errors:
            return str(errors[-1]).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it printed nothing"


def main(arguments: Sequence[str]) -> None:
    """Run one experiment and print what it found."""
    experiments: dict[str, Callable[..., dict[str, Any]]] = {"gpus": gpus, "collectives": collectives, "window": window}
    try:
        found = experiments[arguments[0]](*arguments[1:])
    except RankError as error:
        print(error, file=sys.stderr)
        found = {"problem": reason(str(error))}
    print(MARK + json.dumps(found), flush=True)


def gpus() -> dict[str, Any]:
    """count, cuda, unreachable and no_atomics pairs, batched_copies, varlen (a problem or None)."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found: dict[str, Any] = {"count": count, "cuda": torch.version.cuda}
    if count:  # pragma: cuda-only
        pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
        unreachable = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
        found["unreachable"] = unreachable
        found["no_atomics"] = [pair for pair in pairs if pair not in unreachable and not _native_atomics(*pair)]
        found["batched_copies"] = driver_has_batches()
        found["varlen"] = _varlen_problem()
    return found


def _native_atomics(first: int, second: int) -> bool:  # pragma: cuda-only
    """Whether additions of one GPU into the other's memory are atomic; the driver numbers GPUs as this process does."""
    torch.cuda.init()
    value = ctypes.c_int()
    error = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(value), NATIVE_ATOMICS, first, second)
    return error == 0 and value.value == 1


def _varlen_problem() -> str | None:  # pragma: cuda-only
    from odc_kernels.varlen import packed_attention

    try:
        q, k, v = (torch.randn(24, heads, 64, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2))
        starts = torch.tensor([0, 10, 24], dtype=torch.int32)
        packed = packed_attention(q, k, v, starts.cuda(), 14)
        wanted = packed_attention(q.float().cpu(), k.float().cpu(), v.float().cpu(), starts, 14)
    except Exception as error:  # whatever is missing is the finding
        return first_line(error)
    difference = float((packed.float().cpu() - wanted).abs().max())
    return None if difference < 0.05 else f"differs from attention sample by sample by {difference:.2g}"


def collectives() -> dict[str, Any]:  # pragma: cuda-only
    """One all_reduce of NCCL."""
    run_ranks(_all_reduce, torch.cuda.device_count(), backend="nccl", timeout_s=RANKS_S)
    return {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _all_reduce(rank: int) -> None:  # pragma: cuda-only
    total = torch.full((NUMEL,), float(rank), device="cuda")
    dist.all_reduce(total)
    world_size = dist.get_world_size()
    if not bool((total == world_size * (world_size - 1) / 2).all()):
        raise RuntimeError("all_reduce gave a wrong sum")


def window(backend: BackendName) -> dict[str, Any]:
    """Ranks of this machine exchange values through a window: one a GPU, or two on a CPU."""
    if backend == "cpu":
        ranks, collective = 2, "gloo"
    else:  # pragma: cuda-only
        ranks, collective = torch.cuda.device_count(), "nccl"
    run_ranks(exchange, ranks, backend, backend=collective, timeout_s=RANKS_S)
    return {"ranks": ranks}


def exchange(rank: int, backend: BackendName) -> None:
    """Read what every rank wrote, and add into every rank's memory."""
    device = torch.device("cpu")
    if backend != "cpu":  # pragma: cuda-only
        device = torch.device("cuda", torch.cuda.current_device())
    with open_window(NUMEL, torch.float32, name="doctor", backend=backend, timeout_s=RANKS_S / 2) as opened:
        opened.local.fill_(rank + 1)
        opened.barrier()
        gathered = torch.zeros(opened.world_size, NUMEL, device=device)
        for method in ("copy", "auto") if device.type == "cpu" else ("copy", "triton"):
            gathered.zero_()
            gather(opened, gathered, method=method)
            for peer in range(opened.world_size):
                if not bool((gathered[peer] == peer + 1).all()):
                    raise RuntimeError(f"read something else than rank {peer} wrote (method {method})")
        opened.barrier()
        scatter_accumulate(opened, torch.ones(opened.world_size * NUMEL, device=device))
        opened.barrier()
        if not bool((opened.local == rank + 1 + opened.world_size).all()):
            raise RuntimeError("what the ranks added is not their sum")
    if backend == "nvshmem":  # pragma: cuda-only
        from odc_kernels import window_nvshmem

        window_nvshmem.finalize()


if __name__ == "__main__":
    main(sys.argv[1:])
