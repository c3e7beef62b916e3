"""Checks of the GPUs: what the driver says (nvidia-smi), and what torch sees of it (odc_kernels.doctor_probe)."""

import csv
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from odc_sim.doctor import Check
from odc_sim.errors import pip

QUERY = "index,uuid,name,driver_version,compute_cap,memory.total,memory.free,mig.mode.current"
BUSY_SHARE = 0.05
"""Of a GPU's memory: more than this in use before anything was started is somebody's."""
SLOW_LINKS = {
    "SYS": "over PCIe and between processors",
    "NODE": "over PCIe and between host bridges",
    "PHB": "over PCIe through the processor",
    "PXB": "over several PCIe switches",
    "PIX": "over one PCIe switch",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """One GPU as the driver shows it."""

    index: int
    uuid: str
    name: str
    driver: str
    capability: tuple[int, int]
    total_bytes: int
    free_bytes: int
    mig: bool


def parse_gpus(lines: Sequence[str]) -> list[Gpu]:
    """From `nvidia-smi --query-gpu=QUERY --format=csv,noheader,nounits`; lines that are none are left out."""
    found = []
    for row in csv.reader(lines, skipinitialspace=True):
        if len(row) == len(QUERY.split(",")) and row[0].isdigit():
            major, _, minor = row[4].partition(".")
            found.append(
                Gpu(
                    index=int(row[0]),
                    uuid=row[1],
                    name=row[2],
                    driver=row[3],
                    capability=(int(major), int(minor or 0)),
                    total_bytes=int(row[5]) << 20,
                    free_bytes=int(row[6]) << 20,
                    mig=row[7] == "Enabled",
                )
            )
    return found


def gpus(found: Sequence[Gpu], said: Sequence[str]) -> Check:
    """Which there are; `said` is what nvidia-smi printed."""
    if not found:
        reason = said[0] if said else "nvidia-smi says nothing"
        can = "simulating works, and calibrating and training on CPU ranks (--device cpu)"
        return Check("GPUs", "absent", f"none ({reason}): {can}", "on a GPU machine: install the driver")
    kinds = sorted(
        {f"{gpu.name} ({gpu.total_bytes / 2**30:.0f} GiB, sm_{''.join(map(str, gpu.capability))})" for gpu in found}
    )
    what = f"{len(found)} x {', '.join(kinds)}, driver {found[0].driver}"
    if any(gpu.mig for gpu in found):
        found_ = f"{what}, divided by MIG: parts of a GPU cannot reach each other's memory"
        return Check("GPUs", "warning", found_, "nvidia-smi -mig 0, to train over several GPUs")
    if any(gpu.capability < (8, 0) for gpu in found):
        return Check("GPUs", "broken", f"{what}: bf16 and packed attention need sm_80", "use an A100 or newer")
    if len(kinds) > 1:
        return Check("GPUs", "warning", f"{what}: ranks are unequal", "choose equal ones with CUDA_VISIBLE_DEVICES")
    return Check("GPUs", "ok", what)


def memory(found: Sequence[Gpu], processes: Sequence[str]) -> Check:
    """Free memory; `processes` from `nvidia-smi --query-compute-apps=gpu_uuid,pid,used_memory,process_name`."""
    owners: dict[str, list[str]] = {}
    for row in csv.reader(processes, skipinitialspace=True):
        if len(row) == 4:
            owners.setdefault(row[0], []).append(f"{row[3].rsplit('/', 1)[-1]} (process {row[1]})")
    busy = []
    for gpu in found:
        used = gpu.total_bytes - gpu.free_bytes
        if gpu.uuid in owners or used > BUSY_SHARE * gpu.total_bytes:
            users = ", ".join(owners.get(gpu.uuid, ["processes that are not seen from here"]))
            busy.append(f"GPU {gpu.index}: {used / 2**30:.1f} of {gpu.total_bytes / 2**30:.0f} GiB used by {users}")
    if busy:
        remedy = "end them, or choose others with CUDA_VISIBLE_DEVICES: they falsify measurements"
        return Check("GPU memory", "warning", "; ".join(busy), remedy)
    least = min(gpu.free_bytes for gpu in found)
    return Check("GPU memory", "ok", f"at least {least / 2**30:.1f} GiB free on each, no other processes")


def visible(found: Sequence[Gpu], seen: int | None, chosen: str | None, cuda: str | None) -> Check:
    """What torch sees of the driver's GPUs. `chosen` is CUDA_VISIBLE_DEVICES, `cuda` the version torch is built for."""
    name = "torch sees"
    if cuda is None:
        remedy = pip("torch --index-url https://download.pytorch.org/whl/cu130")
        return Check(name, "broken", f"no GPU of {len(found)}: this torch is built without CUDA", remedy)
    if not seen:
        if chosen is not None:
            found_ = f"no GPU of {len(found)}: CUDA_VISIBLE_DEVICES={chosen!r}"
            return Check(name, "broken", found_, "unset CUDA_VISIBLE_DEVICES")
        remedy = f"a driver for CUDA {cuda} (found {found[0].driver}), or a torch built for an older CUDA"
        return Check(name, "broken", f"no GPU of {len(found)}", remedy)
    if seen < len(found):
        why = f" (CUDA_VISIBLE_DEVICES={chosen})" if chosen else ""
        return Check(name, "warning", f"{seen} of {len(found)} GPUs{why}", "unset CUDA_VISIBLE_DEVICES to use all")
    return Check(name, "ok", f"all {seen} GPUs")


def peers(unreachable: Sequence[Sequence[int]], no_atomics: Sequence[Sequence[int]], count: int) -> Check:
    """Pairs of GPUs without peer access, and those whose additions are not atomic across the link."""
    name = "peer access"
    if count < 2:
        return Check(name, "absent", "one GPU: there are no peers")
    if unreachable:
        found = f"none between GPUs {_pairs(unreachable)}: windows cannot be opened over them"
        remedy = (
            "nvidia-smi topo -p2p r says why (virtual machine, IOMMU, kinds of GPUs); NCCL's collectives still work"
        )
        return Check(name, "broken", found, remedy)
    if no_atomics:
        found = f"between GPUs {_pairs(no_atomics)} additions are not atomic: gradients could be lost"
        return Check(name, "broken", found, "OnDemand(deterministic=True), which adds without them")
    return Check(name, "ok", f"each of {count} GPUs reaches each other one, with atomic additions")


def _pairs(pairs: Sequence[Sequence[int]]) -> str:
    shown = ", ".join("-".join(map(str, pair)) for pair in pairs[:4])
    return f"{shown} and {len(pairs) - 4} more pairs" if len(pairs) > 4 else shown


def parse_topology(lines: Sequence[str]) -> dict[tuple[int, int], str]:
    """(a, b) with a < b -> how they are connected, from `nvidia-smi topo -m`."""
    clean = [re.sub(r"\x1b\[[0-9;]*m", "", text).split() for text in lines]
    columns: list[int] = []
    found = {}
    for words in clean:
        numbers = [int(word[3:]) for word in words if re.fullmatch(r"GPU\d+", word)]
        if not columns and numbers:
            columns = numbers
        elif columns and words and re.fullmatch(r"GPU\d+", words[0]):
            row = int(words[0][3:])
            for column, kind in zip(columns, words[1:], strict=False):
                if row < column:
                    found[row, column] = kind
    return found


def links(kinds: Mapping[tuple[int, int], str], status: Sequence[str]) -> Check:
    """How GPUs are connected, and `nvidia-smi nvlink --status`."""
    if not kinds:
        return Check("links", "absent", "one GPU, or nvidia-smi topo says nothing")
    down = sum("inactive" in text.lower() for text in status)
    slow = {pair: kind for pair, kind in kinds.items() if not kind.startswith("NV")}
    named = ", ".join(sorted(set(kinds.values())))
    if slow:
        (first, second), kind = next(iter(slow.items()))
        how = SLOW_LINKS.get(kind, kind)
        found = f"GPUs {first} and {second} ({len(slow)} of {len(kinds)} pairs) are connected {how} ({kind})"
        remedy = "transfers are several times slower than over NVLink; calibrate here, and simulate with that"
        return Check("links", "warning", found, remedy)
    if down:
        remedy = "nvidia-smi nvlink --status, and ask whoever runs the machine"
        return Check("links", "warning", f"{named}, but {down} NVLinks are inactive", remedy)
    return Check("links", "ok", f"every pair by NVLink ({named})")


def mps(running: bool) -> Check:
    """CUDA's multi-process service."""
    if running:
        found = "runs: a fault in one process ends all on its GPU, and ODC has no use for it"
        return Check("MPS", "warning", found, "echo quit | nvidia-cuda-mps-control")
    return Check("MPS", "ok", "not running; ODC has no need of it")


def gpu_probe(result: Mapping[str, Any], gpus_: Sequence[Gpu], chosen: str | None) -> Iterator[Check]:
    """The lines from what `doctor_probe gpus` found."""
    count = result["count"]
    yield visible(gpus_, count, chosen, result["cuda"])
    if not count:
        return
    yield peers(result["unreachable"], result["no_atomics"], count)
    yield copies(result["batched_copies"])
    yield attention(result["varlen"])


def copies(batched: bool) -> Check:
    """cuMemcpyBatchAsync, which hands several copies to the copy engines at once."""
    if not batched:
        found = "the driver takes copies one at a time only: small gathers are slower"
        return Check("copy engines", "warning", found, "a driver for CUDA 13 (580 or newer)")
    return Check("copy engines", "ok", "the driver takes copies in batches")


def attention(problem: str | None) -> Check:
    """torch.nn.attention.varlen, tried on the GPU."""
    if problem is not None:
        found = f"packed attention does not work: {problem}"
        return Check("attention", "broken", found, "torch 2.11 or newer, built for this GPU")
    return Check("attention", "ok", "packed samples of variable length")
