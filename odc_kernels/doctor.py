"""`odc doctor` where torch is installed: versions, GPUs, and each kind of window actually tried."""

import importlib.metadata
import os
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from odc_kernels import doctor_gpu
from odc_kernels.doctor_probe import probe
from odc_kernels.doctor_system import system_checks
from odc_kernels.environment import run
from odc_sim.doctor import Check, State, installed
from odc_sim.errors import pip, pip_install

PACKAGES = (
    "torch",
    "triton",
    "numpy",
    "transformers",
    "nvshmem4py-cu13",
    "cuda-core",
    "nvidia-nccl-cu13",
    "nvidia-nvshmem-cu13",
)
REMEDIES = {  # what a failed experiment says: what to do
    "C compiler": "apt install gcc: Triton builds its launchers with it",
    "cannot allocate": "free memory on the GPUs, or on /dev/shm",
    "shared files": "more room in /dev/shm: docker run --shm-size=8g",
    "connectFullMesh|resolve|Gloo": "GLOO_SOCKET_IFNAME=lo, if the host's name leads nowhere",
    "NVLS|multicast|Multicast": "NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1",
    "was not finished|NCCL": "NCCL_DEBUG=WARN shows more; try NCCL_NVLS_ENABLE=0",
}


def machine_checks() -> Iterator[Check]:
    """Everything but the simulator's own checks, as it is found; experiments run meanwhile. About 20 seconds."""
    said = run("nvidia-smi", f"--query-gpu={doctor_gpu.QUERY}", "--format=csv,noheader,nounits")
    gpus = doctor_gpu.parse_gpus(said)
    versions = {name: installed(name) for name in PACKAGES}
    query = "gpu_uuid,pid,used_memory,process_name"
    busy = run("nvidia-smi", f"--query-compute-apps={query}", "--format=csv,noheader,nounits") if gpus else []
    with ThreadPoolExecutor() as pool:
        cpu = pool.submit(probe, "window", "cpu")
        seen = pool.submit(probe, "gpus") if gpus else None
        yield from version_checks(versions, requirements("torch"), interprets=interprets(os.environ), gpus=bool(gpus))
        yield doctor_gpu.gpus(gpus, said)
        if seen is not None:
            yield from _gpu_checks(pool, seen, gpus, busy, versions)
        yield window("cpu", cpu.result(), needed=not gpus)
    yield from system_checks(len(gpus))


def _gpu_checks(
    pool: ThreadPoolExecutor,
    seen: "Future[dict[str, Any]]",
    gpus: list[doctor_gpu.Gpu],
    busy: list[str],
    versions: Mapping[str, str | None],
) -> Iterator[Check]:
    yield doctor_gpu.memory(gpus, busy)
    topology = doctor_gpu.parse_topology(run("nvidia-smi", "topo", "-m"))
    yield doctor_gpu.links(topology, run("nvidia-smi", "nvlink", "--status"))
    yield doctor_gpu.mps(mps_runs())
    found = seen.result()
    if "problem" in found:
        yield Check("torch sees", "broken", f"asking torch for the GPUs: {found['problem']}", "install torch again")
        return
    yield from doctor_gpu.gpu_probe(found, gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found["count"] < 2:
        return
    started = {"collectives": pool.submit(probe, "collectives"), "cuda": pool.submit(probe, "window", "cuda")}
    if versions["nvshmem4py-cu13"] is not None:
        started["nvshmem"] = pool.submit(probe, "window", "nvshmem")
    yield collectives(started["collectives"].result())
    yield window("cuda", started["cuda"].result(), needed=True)
    if "nvshmem" in started:
        yield window("nvshmem", started["nvshmem"].result(), needed=False)


def version_checks(
    versions: Mapping[str, str | None], torch_wants: Mapping[str, str], *, interprets: bool, gpus: bool
) -> Iterator[Check]:
    """Versions on their own and together. `torch_wants`: the exact versions that torch's own metadata names."""
    yield torch(versions["torch"], {name: versions.get(name) for name in torch_wants}, torch_wants)
    yield triton(versions["triton"], versions["numpy"], interprets=interprets, gpus=gpus)
    yield transformers(versions["transformers"])
    if gpus:
        yield nvshmem(versions)


def torch(version: str | None, found: Mapping[str, str | None], wanted: Mapping[str, str]) -> Check:
    """torch, and the exact versions of other packages that it was built with."""
    if version is None:  # there is a module of this name, but no distribution
        return Check("torch", "warning", "of unknown version", "odc_kernels is tested with 2.11 and 2.13")
    if numbers(version) < (2, 11):
        found_ = f"{version}: fully_shard's hooks that OnDemand uses came with 2.11"
        return Check("torch", "broken", found_, pip("'torch>=2.11'"))
    other = [f"{name} {found[name]}" for name in wanted if found.get(name) not in (None, wanted[name])]
    if other:
        needs = ", ".join(f"{name}=={wanted[name]}" for name in wanted if found.get(name) not in (None, wanted[name]))
        found_ = f"{version} was built with other versions than {', '.join(other)}"
        return Check("torch", "warning", found_, f"{pip(needs)}, if something fails")
    return Check("torch", "ok", version)


def triton(version: str | None, numpy: str | None, *, interprets: bool, gpus: bool) -> Check:
    """Triton, which compiles the kernels, and its interpreter, which runs them without a GPU."""
    if version is None:
        if gpus:
            return Check("triton", "broken", "not installed: no kernel can be compiled", pip("triton"))
        return Check("triton", "absent", "not installed; CPU ranks do without")
    if numbers(version) < (3, 6):
        return Check("triton", "broken" if gpus else "warning", f"{version} is not tested", pip("'triton>=3.6'"))
    if numbers(version) < (3, 7) and numpy is not None and numbers(numpy) >= (2, 4):
        what = f"{version} with numpy {numpy}: its interpreter fails, compiled kernels do not"
        if interprets:
            remedy = pip("'triton>=3.7.1'") + " (or 'numpy<2.4'); unset TRITON_INTERPRET"
            return Check("triton", "broken", what, remedy)
        return Check("triton", "ok", what)
    return Check("triton", "ok", version)


def transformers(version: str | None) -> Check:
    """Where models come from."""
    if version is None:
        found = "not installed: odc train and odc calibrate build their models with it"
        return Check("transformers", "broken", found, pip_install("train"))
    if numbers(version) < (4, 57):
        found = f"{version}: packed samples need 4.57"
        return Check("transformers", "broken", found, pip("--upgrade transformers"))
    return Check("transformers", "ok", version)


def nvshmem(versions: Mapping[str, str | None]) -> Check:
    """nvshmem4py, for windows of the backend nvshmem, with the libraries beside it."""
    own, core, library = (versions[name] for name in ("nvshmem4py-cu13", "cuda-core", "nvidia-nvshmem-cu13"))
    if own is None:
        found = "nvshmem4py is not installed: no backend nvshmem; cuda does the same within a host"
        return Check("nvshmem4py", "absent", found, f"{pip('nvshmem4py-cu13')}, to try it")
    if numbers(own) < (0, 2, 2):
        found = f"{own} gives wrong memory with more than two GPUs"
        return Check("nvshmem4py", "warning", found, pip("'nvshmem4py-cu13>=0.4.1'"))
    if numbers(own) >= (0, 3) and (core is None or numbers(core) < (0, 5)):
        found = f"{own} with cuda-core {core or 'missing'} does not load"
        return Check("nvshmem4py", "warning", found, pip("'cuda-core>=0.5'"))
    what = f"{own}, library {library or 'of torch'}"
    if library is not None and numbers(library) >= (3, 8):
        found = f"{what}: Triton 3.6 cannot read its device functions, nor torch 2.11 find them"
        return Check("nvshmem4py", "warning", found, f"{pip('nvidia-nvshmem-cu13==3.4.5')}, if you need those")
    return Check("nvshmem4py", "ok", what)


def collectives(found: Mapping[str, Any]) -> Check:
    """NCCL, tried."""
    if "problem" in found:
        return Check("NCCL", "broken", f"all_reduce over all GPUs: {found['problem']}", remedy(found["problem"]))
    return Check("NCCL", "ok", f"{found['nccl']}: all_reduce over all GPUs")


def window(backend: str, found: Mapping[str, Any], *, needed: bool) -> Check:
    """A backend's windows, tried."""
    name = f"windows, {backend}"
    if "problem" in found:
        command = f"python -m odc_kernels.doctor_probe window {backend}"
        state: State = "broken" if needed else "warning"
        return Check(name, state, found["problem"], f"{remedy(found['problem'])}; all of it: {command}")
    return Check(name, "ok", f"{found['ranks']} ranks read each other's memory and added to it")


def remedy(problem: str) -> str:
    """What to do about what an experiment said."""
    for pattern, text in REMEDIES.items():
        if re.search(pattern, problem):
            return text
    return "the message says what it is"


def numbers(version: str) -> tuple[int, ...]:
    """(2, 11, 0) of 2.11.0+cu130."""
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])


def requirements(package: str) -> dict[str, str]:
    """The packages that a distribution wants in one exact version."""
    try:
        wanted = importlib.metadata.requires(package) or []
    except importlib.metadata.PackageNotFoundError:
        return {}
    return exact(wanted)


def exact(wanted: list[str]) -> dict[str, str]:
    """{"triton": "3.6.0"} of ["triton==3.6.0; platform_system == 'Linux'", "sympy>=1.13"]; extras are left out."""
    found = {}
    for requirement in wanted:
        match = re.match(r"([\w.-]+)\s*\(?==\s*([\w.]+)\)?\s*(?:;(.*))?$", requirement)
        if match and "extra" not in (match[3] or "") and match[1] in PACKAGES:
            found[match[1]] = match[2]
    return found


def interprets(environment: Mapping[str, str]) -> bool:
    """Whether Triton's kernels are interpreted."""
    return environment.get("TRITON_INTERPRET", "0") not in ("", "0")


def mps_runs(folder: Path | None = None) -> bool:
    """Whether CUDA's multi-process service answers here."""
    folder = folder or Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"))
    return (folder / "control").exists()
