"""What a measurement was made on: GPU, driver, links, library versions."""

import importlib.metadata
import os
import platform
import subprocess
from typing import Any

import torch

PACKAGES = ("torch", "triton", "numpy", "nvshmem4py-cu13", "nvidia-nccl-cu13", "nvidia-nvshmem-cu13")
VARIABLES = ("NCCL_NVLS_ENABLE", "TORCH_SYMM_MEM_DISABLE_MULTICAST", "NVSHMEM_DISABLE_NVLS", "NVSHMEM_SYMMETRIC_SIZE")

NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Set in the ranks that calibrate and train start unless the user has: NVLink multicast off, in both or in none."""


def describe() -> dict[str, Any]:
    """Facts about this process's machine, in JSON types. GPU entries only where there is a GPU."""
    facts: dict[str, Any] = {
        "os": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := _version(name)) is not None},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }
    if torch.cuda.is_available():  # pragma: cuda-only
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        facts["gpu"] = {
            "name": properties.name,
            "count": torch.cuda.device_count(),
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
        }
        facts["cuda"] = torch.version.cuda
        facts["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
        query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem"
        facts["nvidia_smi"] = run("nvidia-smi", f"--query-gpu={query}", "--format=csv")
        facts["topology"] = run("nvidia-smi", "topo", "-m")
        links = run("nvidia-smi", "nvlink", "--status", "-i", "0")
        facts["links"] = [line.strip() for line in links if "UUID" not in line]
    return facts


def run(*command: str) -> list[str]:
    """The lines a command prints, or why there are none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except FileNotFoundError:
        return [f"{command[0]}: not found"]
    except (OSError, subprocess.SubprocessError) as error:
        return [f"{command[0]}: {error}"]
    return [line.rstrip() for line in done.stdout.splitlines() if line.strip()]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
