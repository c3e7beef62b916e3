import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from odc_kernels import doctor, doctor_gpu, doctor_probe, doctor_system  # noqa: E402
from odc_kernels.doctor_gpu import Gpu  # noqa: E402
from odc_kernels.environment import run  # noqa: E402
from odc_sim.doctor import line  # noqa: E402

QUERIED = [
    "0, GPU-aa, NVIDIA H200, 580.65.06, 9.0, 143771, 143000, Disabled",
    "1, GPU-bb, NVIDIA H200, 580.65.06, 9.0, 143771, 143000, [N/A]",
]
GPUS = doctor_gpu.parse_gpus(QUERIED)
TOPOLOGY = """\
\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPIX\t0-23
GPU1\tNV18\t X \tNV18\tSYS\t0-23
GPU2\tSYS\tNV18\t X \tSYS\t24-47
NIC0\tPIX\tSYS\tSYS\t X

Legend:
  X    = Self
"""


def gpu(**changes):
    values = {name: getattr(GPUS[0], name) for name in Gpu.__slots__}
    return Gpu(**(values | changes))


PINS = {"triton": "3.6.0", "nvidia-nccl-cu13": "2.28.9"}
NVSHMEM = {"nvshmem4py-cu13": "0.4.1", "cuda-core": "1.2.2", "nvidia-nvshmem-cu13": "3.4.5"}
SYSTEM = doctor_system
SAID = [
    (doctor_gpu.gpus(GPUS, QUERIED), "ok", "2 x NVIDIA H200 (140 GiB, sm_90), driver 580.65.06", ""),
    (doctor_gpu.gpus([], ["nvidia-smi: not found"]), "absent", "(nvidia-smi: not found): simulating works", "driver"),
    (doctor_gpu.gpus([], []), "absent", "nvidia-smi says nothing", "driver"),
    (doctor_gpu.gpus([gpu(mig=True)], []), "warning", "divided by MIG", "nvidia-smi -mig 0"),
    (doctor_gpu.gpus([gpu(capability=(7, 5))], []), "broken", "sm_75), driver 580.65.06: bf16", "A100 or newer"),
    (doctor_gpu.gpus([gpu(), gpu(name="A")], []), "warning", "ranks are unequal", "CUDA_VISIBLE_DEVICES"),
    (doctor_gpu.memory(GPUS, []), "ok", "at least 139.6 GiB free on each", ""),
    (
        doctor_gpu.memory(GPUS, ["GPU-bb, 77, 100, /usr/bin/python3"]),
        "warning",
        "GPU 1: 0.8 of 140 GiB used by python3 (process 77)",
        "end them",
    ),
    (
        doctor_gpu.memory([gpu(free_bytes=1 << 30)], ["No running processes found"]),
        "warning",
        "GPU 0: 139.4 of 140 GiB used by processes that are not seen from here",
        "end them",
    ),
    (doctor_gpu.visible(GPUS, 2, None, "13.0"), "ok", "all 2 GPUs", ""),
    (doctor_gpu.visible(GPUS, 0, None, None), "broken", "built without CUDA", "pip install torch"),
    (doctor_gpu.visible(GPUS, 0, "", "13.0"), "broken", "CUDA_VISIBLE_DEVICES=''", "unset CUDA_VISIBLE_DEVICES"),
    (doctor_gpu.visible(GPUS, 0, None, "13.0"), "broken", "no GPU of 2", "a driver for CUDA 13.0 (found 580.65.06)"),
    (doctor_gpu.visible(GPUS, 1, "0", "13.0"), "warning", "1 of 2 GPUs (CUDA_VISIBLE_DEVICES=0)", "unset"),
    (doctor_gpu.visible(GPUS, 1, None, "13.0"), "warning", "1 of 2 GPUs", "unset"),
    (doctor_gpu.peers([], [], 2), "ok", "each of 2 GPUs reaches each other one", ""),
    (doctor_gpu.peers([], [], 1), "absent", "one GPU", ""),
    (doctor_gpu.peers([[0, 1]], [], 2), "broken", "none between GPUs 0-1", "topo -p2p r"),
    (
        doctor_gpu.peers([(a, 4) for a in range(6)], [], 8),
        "broken",
        "none between GPUs 0-4, 1-4, 2-4, 3-4 and 2 more pairs",
        "topo -p2p r",
    ),
    (doctor_gpu.peers([], [(1, 0)], 2), "broken", "between GPUs 1-0 additions are not atomic", "deterministic=True"),
    (doctor_gpu.links({(0, 1): "NV18"}, ["Link 0: 26.562 GB/s"]), "ok", "every pair by NVLink (NV18)", ""),
    (doctor_gpu.links({}, []), "absent", "one GPU, or", ""),
    (doctor_gpu.links({(0, 1): "NV18"}, ["Link 0: <inactive>"]), "warning", "NV18, but 1 NVLinks are inactive", "ask"),
    (
        doctor_gpu.links(doctor_gpu.parse_topology(TOPOLOGY.splitlines()), []),
        "warning",
        "GPUs 0 and 2 (1 of 3 pairs) are connected over PCIe and between processors (SYS)",
        "calibrate here",
    ),
    (doctor_gpu.mps(False), "ok", "not running", ""),
    (doctor_gpu.mps(True), "warning", "a fault in one process ends all", "echo quit | nvidia-cuda-mps-control"),
    (doctor_gpu.copies(True), "ok", "in batches", ""),
    (doctor_gpu.copies(False), "warning", "one at a time", "580 or newer"),
    (doctor_gpu.attention(None), "ok", "packed samples", ""),
    (doctor_gpu.attention("No module named varlen"), "broken", "No module named varlen", "torch 2.11 or newer"),
    (doctor.torch("2.11.0+cu130", PINS, PINS), "ok", "2.11.0+cu130", ""),
    (doctor.torch("2.10.0", {}, {}), "broken", "2.10.0: fully_shard's hooks", "torch>=2.11"),
    (doctor.torch(None, {}, {}), "warning", "unknown version", "2.11 and 2.13"),
    (
        doctor.torch("2.11.0", PINS | {"triton": "3.9.0"}, PINS),
        "warning",
        "2.11.0 was built with other versions than triton 3.9.0",
        "pip install triton==3.6.0, if something fails",
    ),
    (doctor.torch("2.11.0", PINS | {"triton": None}, PINS), "ok", "2.11.0", ""),
    (doctor.triton("3.9.0", "2.4.6", interprets=True, gpus=False), "ok", "3.9.0", ""),
    (doctor.triton(None, "2.4.6", interprets=False, gpus=False), "absent", "CPU ranks do without", ""),
    (doctor.triton(None, "2.4.6", interprets=False, gpus=True), "broken", "no kernel can be compiled", "pip install"),
    (doctor.triton("3.5.1", "2.4.6", interprets=False, gpus=True), "broken", "not tested", "triton>=3.6"),
    (doctor.triton("3.5.1", "2.4.6", interprets=False, gpus=False), "warning", "not tested", "triton>=3.6"),
    (
        doctor.triton("3.6.0", "2.5.2", interprets=False, gpus=True),
        "ok",
        "its interpreter fails, compiled kernels do",
        "",
    ),
    (doctor.triton("3.6.0", "2.5.2", interprets=True, gpus=False), "broken", "its interpreter fails", "numpy<2.4"),
    (doctor.triton("3.6.0", "2.3.5", interprets=True, gpus=False), "ok", "3.6.0", ""),
    (doctor.transformers("5.17.0"), "ok", "5.17.0", ""),
    (doctor.transformers(None), "broken", "not installed", "odc-toolkit[train]"),
    (doctor.transformers("4.40.1"), "broken", "packed samples need 4.57", "pip install --upgrade transformers"),
    (doctor.nvshmem(NVSHMEM), "ok", "0.4.1, library 3.4.5", ""),
    (
        doctor.nvshmem(NVSHMEM | {"nvshmem4py-cu13": None}),
        "absent",
        "no backend nvshmem",
        "pip install nvshmem4py-cu13",
    ),
    (doctor.nvshmem(NVSHMEM | {"nvshmem4py-cu13": "0.2.1"}), "warning", "wrong memory with more than two", ">=0.4.1"),
    (doctor.nvshmem(NVSHMEM | {"cuda-core": "0.4.0"}), "warning", "0.4.1 with cuda-core 0.4.0 does not load", ">=0.5"),
    (doctor.nvshmem(NVSHMEM | {"cuda-core": None}), "warning", "with cuda-core missing", "cuda-core>=0.5"),
    (
        doctor.nvshmem(NVSHMEM | {"nvidia-nvshmem-cu13": "3.8.0"}),
        "warning",
        "cannot read its device functions",
        "3.4.5",
    ),
    (doctor.collectives({"nccl": "2.28.9"}), "ok", "2.28.9: all_reduce", ""),
    (doctor.collectives({"problem": "NCCL error"}), "broken", "all_reduce over all GPUs: NCCL error", "NCCL_DEBUG"),
    (doctor.window("cuda", {"ranks": 2}, needed=True), "ok", "2 ranks read each other's memory", ""),
    (
        doctor.window("cuda", {"problem": "no peer access"}, needed=True),
        "broken",
        "no peer access",
        "doctor_probe window cuda",
    ),
    (doctor.window("nvshmem", {"problem": "Failed to find C compiler"}, needed=False), "warning", "compiler", "gcc"),
    (SYSTEM.shared_memory(8 << 30, 4 << 30), "ok", "4.29 of 8.59 GB are free", ""),
    (SYSTEM.shared_memory(64 << 20, 60 << 20), "warning", "0.06 of 0.07 GB are free", "--shm-size=8g"),
    (SYSTEM.shared_memory(None, None), "warning", "there is none", "mount a tmpfs"),
    (SYSTEM.open_files(65536), "ok", "65536 open files", ""),
    (SYSTEM.open_files(-1), "ok", "unlimited", ""),
    (SYSTEM.open_files(256), "warning", "256 a process", "ulimit -n 65536"),
    (SYSTEM.locked_memory(None, []), "ok", "unlimited; no InfiniBand", ""),
    (SYSTEM.locked_memory(None, ["mlx5_0"]), "ok", "unlimited", ""),
    (SYSTEM.locked_memory(8 << 20, []), "ok", "8192 KiB of locked memory; no InfiniBand", ""),
    (SYSTEM.locked_memory(8 << 20, ["mlx5_0"]), "warning", "mlx5_0 cannot register buffers", "memlock=-1"),
    (SYSTEM.process_handles(None), "ok", "seen at once", ""),
    (SYSTEM.process_handles("Function not implemented"), "warning", "(Function not implemented)", "Linux 5.3"),
    (SYSTEM.network([], {}), "ok", "loopback only: one node", ""),
    (SYSTEM.network(["eth0"], {}), "ok", "eth0", ""),
    (SYSTEM.network(["eth0", "ib0"], {}), "warning", "eth0, ib0: on several nodes", "set NCCL_SOCKET_IFNAME"),
    (SYSTEM.network(["eth0", "ib0"], {"NCCL_SOCKET_IFNAME": "=ib0"}), "ok", "eth0, ib0", ""),
    (SYSTEM.network(["eth0", "ib0"], {"NCCL_SOCKET_IFNAME": "^docker"}), "ok", "eth0, ib0", ""),
    (SYSTEM.network(["eth0"], {"GLOO_SOCKET_IFNAME": "ens"}), "broken", "GLOO_SOCKET_IFNAME=ens, but", "unset GLOO"),
]


@pytest.mark.parametrize(("check", "state", "what", "remedy"), SAID)
def test_every_line(check, state, what, remedy):
    assert (check.state, what in check.what, remedy in check.remedy) == (state, True, True), check
    assert check.remedy or state in ("ok", "absent")
    assert "\n" not in line(check)


def test_variables_are_only_named_where_they_matter():
    def said(environment, num_gpus=2):
        return [(check.name, check.state) for check in SYSTEM.variables(environment, num_gpus)]

    assert said({}) == said({"NCCL_NVLS_ENABLE": "1", "TRITON_INTERPRET": "0"}) == []
    off = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    assert said(off) == [(name, "ok") for name in off]
    assert said({"TRITON_INTERPRET": "1"}) == [("TRITON_INTERPRET", "broken")]
    assert said({"TRITON_INTERPRET": "1"}, 0) == [("TRITON_INTERPRET", "warning")]
    assert said({"CUDA_LAUNCH_BLOCKING": "1"}) == [("CUDA_LAUNCH_BLOCKING", "warning")]
    assert doctor.interprets({"TRITON_INTERPRET": "1"})
    assert not doctor.interprets({})


def test_topology_and_gpus_are_read_from_what_the_driver_prints():
    assert doctor_gpu.parse_topology(TOPOLOGY.splitlines()) == {(0, 1): "NV18", (0, 2): "SYS", (1, 2): "NV18"}
    assert run("odc-no-such-command") == ["odc-no-such-command: not found"]
    assert doctor_gpu.parse_topology(["nvidia-smi: not found"]) == {}
    assert doctor_gpu.parse_gpus(["nvidia-smi: not found", "", "No devices were found"]) == []
    assert [found.capability for found in GPUS] == [(9, 0)] * 2


def test_exact_versions_are_read_from_requirements():
    wanted = ["triton==3.6.0; platform_system == 'Linux'", "sympy>=1.13", "numpy==1.0; extra == 'x'", "other==1"]
    assert doctor.exact([*wanted, "nvidia-nccl-cu13 (==2.28.9)"]) == {"triton": "3.6.0", "nvidia-nccl-cu13": "2.28.9"}
    assert doctor.requirements("no-such-distribution") == {}


@pytest.mark.parametrize(
    ("problem", "remedy"),
    [
        ("RuntimeError: Gloo connectFullMesh failed", "GLOO_SOCKET_IFNAME=lo"),
        ("WindowError: rank 0: cannot allocate 20 bytes", "free memory"),
        ("WindowError: needs 20 bytes of shared files", "--shm-size"),
        ("RuntimeError: multicast bind failed", "NCCL_NVLS_ENABLE=0 TORCH_SYMM"),
        ("rank 1 was not finished after 60 s", "NCCL_DEBUG=WARN"),
        ("RuntimeError: something new", "the message says what it is"),
    ],
)
def test_remedies_of_failed_experiments(problem, remedy):
    assert remedy in doctor.remedy(problem)


def test_mps_is_seen_by_its_pipe(tmp_path):
    assert not doctor.mps_runs(tmp_path)
    (tmp_path / "control").touch()
    assert doctor.mps_runs(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_torch_sees_no_gpu_here():
    assert doctor_probe.gpus() == {"count": 0, "cuda": torch.version.cuda}


def test_the_reason_is_the_line_of_the_error():
    text = (
        "rank 1 raised:\nTraceback (most recent call last):\n  File\nodc_kernels.x.WindowError: no room\nrank 2 died\n"
    )
    assert doctor_probe.reason(text) == "odc_kernels.x.WindowError: no room"
    chained = f"{text}rank 2 raised:\nOSError: other\n"
    assert doctor_probe.reason("ValueError: first\n\nDuring handling\n" + chained) == "ValueError: first"
    assert doctor_probe.reason(chained) == "odc_kernels.x.WindowError: no room"
    assert doctor_probe.reason("rank 1 died with exit code -11\n") == "rank 1 died with exit code -11"
    assert doctor_probe.reason("") == "it printed nothing"


def test_experiments_that_crash_hang_or_fail_are_one_line(tmp_path, monkeypatch):
    assert doctor_probe.probe("nothing") == {"problem": "ended with exit code 1: KeyError: 'nothing'"}
    (tmp_path / "sitecustomize.py").write_text(
        "import os, time\nif 'CRASH' in os.environ: os._exit(9)\ntime.sleep(60)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    start = time.monotonic()
    assert doctor_probe.probe("gpus", timeout_s=1) == {"problem": "was not finished after 1 s"}
    assert time.monotonic() - start < 5
    monkeypatch.setenv("CRASH", "1")
    assert doctor_probe.probe("gpus") == {"problem": "ended with exit code 9: it printed nothing"}
    monkeypatch.setattr(doctor_probe, "collectives", fail)
    monkeypatch.setattr(sys, "stdout", (out := Out()))
    doctor_probe.main(["collectives"])
    assert json.loads(out.text.removeprefix(doctor_probe.MARK)) == {"problem": "x.NcclError: broken"}


class Out:
    text = ""

    def write(self, text):
        self.text += text

    def flush(self):
        pass


def fail():
    raise doctor_probe.RankError("rank 0 raised:\nTraceback\nx.NcclError: broken")


def test_wrong_values_in_a_window_are_seen(monkeypatch):
    for name, message in (("gather", "read something else than rank 0 wrote"), ("scatter_accumulate", "not their sum")):
        problem = subprocess.run(
            [sys.executable, "-c", BROKEN.format(name=name)],
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert message in problem


BROKEN = """
import torch.distributed as dist
from odc_kernels import doctor_probe
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
doctor_probe.{name} = lambda *_, **__: None
try:
    doctor_probe.exchange(0, "cpu")
except RuntimeError as error:
    print(error)
dist.destroy_process_group()
"""


def test_this_machine(capfd):
    """For real, without a GPU."""
    found = {check.name: check for check in doctor.machine_checks()}
    assert found["GPUs"].state == ("ok" if torch.cuda.is_available() else "absent")
    assert found["windows, cpu"].what == "2 ranks read each other's memory and added to it"
    assert {"torch", "triton", "/dev/shm", "ulimit -n", "ulimit -l", "process handles", "network"} <= set(found)


def test_a_machine_with_gpus_that_are_not_there(monkeypatch):
    """Everything asked of GPUs, with answers made up."""
    answers = {
        ("nvidia-smi", "topo"): TOPOLOGY.splitlines(),
        ("nvidia-smi", "nvlink"): ["Link 0: 26.562 GB/s"],
    }

    def run(*command):
        if "--query-gpu" in command[1]:
            return QUERIED
        return answers.get(command[:2], [])

    probed = {
        ("gpus",): {
            "count": 2,
            "cuda": "13.0",
            "unreachable": [],
            "no_atomics": [],
            "batched_copies": True,
            "varlen": None,
        },
        ("collectives",): {"nccl": "2.28.9"},
        ("window", "cuda"): {"ranks": 2},
        ("window", "nvshmem"): {"problem": "x.NvshmemError: no"},
        ("window", "cpu"): {"ranks": 2},
    }
    monkeypatch.setattr(doctor, "run", run)
    monkeypatch.setattr(doctor, "probe", lambda *arguments: probed[arguments])
    versions = {"nvshmem4py-cu13": "0.4.1", "cuda-core": "1.0", "torch": "2.11.0", "triton": "3.6.0", "numpy": "2.5.2"}
    monkeypatch.setattr(doctor, "installed", versions.get)
    found = {check.name: check.state for check in doctor.machine_checks()}
    expected = ["GPUs", "GPU memory", "torch sees", "peer access", "copy engines", "attention", "NCCL", "windows, cuda"]
    assert [found[name] for name in expected] == ["ok"] * len(expected)
    assert (found["windows, nvshmem"], found["links"], found["windows, cpu"]) == ("warning", "warning", "ok")

    probed["gpus",] |= {"count": 1}
    versions["nvshmem4py-cu13"] = None
    found = {check.name: check.state for check in doctor.machine_checks()}
    assert found["peer access"] == "absent"
    assert "NCCL" not in found
    probed["gpus",] |= {"count": 0}
    assert [check.state for check in doctor.machine_checks() if check.name == "torch sees"] == ["broken"]
    probed["gpus",] = {"problem": "ended with exit code -11: it printed nothing"}
    (seen,) = (check for check in doctor.machine_checks() if check.name == "torch sees")
    assert (seen.state, seen.what) == (
        "broken",
        "asking torch for the GPUs: ended with exit code -11: it printed nothing",
    )


def test_what_the_system_says_is_found(tmp_path, monkeypatch):
    assert SYSTEM._room(tmp_path / "none") == (None, None)
    total, free = SYSTEM._room(tmp_path)
    assert 0 < free <= total
    monkeypatch.delattr(os, "pidfd_open", raising=False)
    assert SYSTEM._pidfd_problem() == "not Linux"

    def refuse(_):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse, raising=False)
    assert SYSTEM._pidfd_problem() == "Function not implemented"
    assert "lo" not in SYSTEM._interfaces()
