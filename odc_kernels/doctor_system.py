"""Checks of the operating system, for several processes that share memory and meet: no GPU and no torch is asked."""

import os
import resource
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from odc_sim.doctor import Check

SMALL_SHM_BYTES = 1 << 30
"""Containers often get 64 MB. NCCL takes up to about 10 MB a pair of ranks, windows on a CPU what they hold."""
FEW_FILES = 1024
"""Open files a process: pipes and sockets to all ranks, and a file a window and rank."""
SMALL_LOCKED_BYTES = 1 << 30

VARIABLES = {
    "NCCL_NVLS_ENABLE": {"0": "NVLink multicast is off in NCCL: collectives, not ODC, may be slower for it"},
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": {"1": "NVLink multicast is off in torch; ODC does not use it"},
    "NVSHMEM_DISABLE_NVLS": {"1": "NVLink multicast is off in NVSHMEM; ODC does not use it"},
}
"""Settings of multicast, and what to say of a value."""


def system_checks(num_gpus: int) -> Iterator[Check]:
    """All of this module, of this machine."""
    yield shared_memory(*_room(Path("/dev/shm")))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield open_files(soft)
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    infiniband = Path("/sys/class/infiniband")
    yield locked_memory(
        None if soft == resource.RLIM_INFINITY else soft,
        sorted(path.name for path in infiniband.iterdir()) if infiniband.is_dir() else [],
    )
    yield process_handles(_pidfd_problem())
    yield network(_interfaces(), os.environ)
    yield from variables(os.environ, num_gpus)


def shared_memory(total_bytes: int | None, free_bytes: int | None) -> Check:
    """/dev/shm; None where there is none."""
    if total_bytes is None or free_bytes is None:
        found = "there is none: windows of CPU ranks lie in the temporary folder, on disk"
        return Check("/dev/shm", "warning", found, "mount a tmpfs there")
    what = f"{free_bytes / 1e9:.2f} of {total_bytes / 1e9:.2f} GB are free"
    if free_bytes < SMALL_SHM_BYTES:
        remedy = "docker run --shm-size=8g, or remove what fills it"
        return Check("/dev/shm", "warning", f"{what}: NCCL and windows of CPU ranks may not fit", remedy)
    return Check("/dev/shm", "ok", what)


def open_files(limit: int) -> Check:
    """`ulimit -n`."""
    if 0 <= limit < FEW_FILES:
        found = f"{limit} a process: many ranks and windows need more"
        return Check("ulimit -n", "warning", found, "ulimit -n 65536")
    return Check("ulimit -n", "ok", f"{limit if limit >= 0 else 'unlimited'} open files a process")


def locked_memory(limit_bytes: int | None, infiniband: Sequence[str]) -> Check:
    """`ulimit -l`, None where unlimited, and the InfiniBand or RoCE devices, which register memory under it."""
    what = "unlimited" if limit_bytes is None else f"{limit_bytes >> 10} KiB of locked memory"
    if infiniband and limit_bytes is not None and limit_bytes < SMALL_LOCKED_BYTES:
        found = f"{what}: {', '.join(infiniband)} cannot register buffers under it"
        return Check("ulimit -l", "warning", found, "ulimit -l unlimited (docker run --ulimit memlock=-1)")
    return Check("ulimit -l", "ok", what if infiniband else f"{what}; no InfiniBand here, so any will do")


def process_handles(problem: str | None) -> Check:
    """pidfd_open, by which ranks see each other die."""
    if problem is not None:
        found = f"the kernel gives none ({problem}): a dead rank is only found when a deadline passes"
        return Check(
            "process handles", "warning", found, "Linux 5.3 or newer, outside of sandboxes; or a short timeout"
        )
    return Check("process handles", "ok", "pidfd: a rank that dies is seen at once")


def network(interfaces: Sequence[str], environment: Mapping[str, str]) -> Check:
    """Interfaces other than loopback that are up; which of them NCCL and gloo take."""
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        chosen = environment.get(name, "")
        # NCCL's form: names or beginnings of names, all exact after "=", all excluded after "^".
        wanted = [] if chosen.startswith("^") else [part for part in chosen.lstrip("=").split(",") if part]
        known = [*interfaces, "lo"]
        if wanted and not any(interface.startswith(part) for part in wanted for interface in known):
            found = f"{name}={chosen}, but there are only {', '.join(known)}"
            return Check("network", "broken", found, f"unset {name}, or name one of those")
    what = ", ".join(interfaces) or "loopback only: one node"
    if len(interfaces) > 1 and "NCCL_SOCKET_IFNAME" not in environment:
        found = f"{what}: on several nodes NCCL and gloo may choose one that does not lead to the others"
        return Check("network", "warning", found, "set NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME there")
    return Check("network", "ok", what)


def variables(environment: Mapping[str, str], num_gpus: int) -> Iterator[Check]:
    """Environment variables that change what runs."""
    for name, meanings in VARIABLES.items():
        value = environment.get(name)
        if value in meanings:
            yield Check(name, "ok", f"{value}: {meanings[value]}")
    if environment.get("TRITON_INTERPRET", "0") not in ("", "0"):
        if num_gpus:
            found = "is set: kernels would run in the interpreter, thousands of times slower"
            yield Check("TRITON_INTERPRET", "broken", found, "unset TRITON_INTERPRET")
        else:
            yield Check(
                "TRITON_INTERPRET", "warning", "is set: kernels are interpreted, for tests", "unset it otherwise"
            )
    if environment.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"):
        found = "is set: the host waits for each kernel, so nothing overlaps and every measurement is off"
        yield Check("CUDA_LAUNCH_BLOCKING", "warning", found, "unset CUDA_LAUNCH_BLOCKING")


def _room(folder: Path) -> tuple[int | None, int | None]:
    if not folder.is_dir():
        return None, None
    found = os.statvfs(folder)
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def _pidfd_problem() -> str | None:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except AttributeError:
        return "not Linux"
    except OSError as error:
        return error.strerror
    return None


def _interfaces(folder: Path = Path("/sys/class/net")) -> list[str]:
    """Those that are up, without loopback and what containers and tunnels add."""
    names = [name for _, name in socket.if_nameindex()]
    virtual = ("lo", "docker", "veth", "br-", "virbr", "ifb", "tun", "tap", "cni", "flannel")
    return [
        name
        for name in names
        if not name.startswith(virtual)
        and (not (folder / name / "operstate").exists() or (folder / name / "operstate").read_text().strip() != "down")
    ]
