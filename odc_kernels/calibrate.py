"""`odc calibrate`: measure this machine's GPUs (or, on a laptop, its CPU) and links, for the simulator to use.

One process a GPU, all measuring at once, because heat, power and shared links are then as in training. The phases are
independent: one that fails is recorded in the file with its reason, and the rest goes on.
"""

import gc
import importlib.util
import os
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from odc_kernels.calibrate_file import Draft, Talk
from odc_kernels.calibrate_phases import Lab, Options
from odc_kernels.environment import NO_MULTICAST
from odc_kernels.ranks import RankError, run_ranks
from odc_kernels.rendezvous import Rendezvous
from odc_sim.calibration import Calibration
from odc_sim.errors import InputError, RunError, pip_install
from odc_sim.models import load_model

MODELS = ("qwen2.5-1.5b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
QUICK_MODELS = ("qwen2.5-1.5b",)
CPU_MODELS = ("tiny",)
CPU_RANKS = 2

GRACE_S = 20.0
MEETING_S = 60.0
"""How long ranks wait for each other at the end of a phase before they give up."""
TIMEOUT_S = {True: 600.0, False: 1800.0}
"""Of the whole run, with --quick and without: several times what it should take."""


def make_options(
    out: Path,
    models: Sequence[str],
    quick: bool,
    device: str | None,
    backend: str,
    ranks: int | None,
    *,
    command: str,
) -> Options:
    """Check what the user asked for, and fill in the rest.

    Raises:
        InputError: an unknown name, something that does not go together, or more ranks than GPUs.
    """
    device = device or "cuda"
    if device not in ("cuda", "cpu"):
        raise InputError(f"--device: got {device!r}, expected cuda or cpu")
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; use --device cpu to measure this machine's CPU")
    if backend not in ("auto", "cuda", "nvshmem", "cpu"):
        raise InputError(f"--backend: got {backend!r}, expected auto, cuda, nvshmem or cpu")
    if backend == "auto":
        backend = device
    if (backend == "cpu") != (device == "cpu"):
        raise InputError(f"--backend {backend} with --device {device}: GPUs need cuda or nvshmem, CPUs need cpu")
    available = torch.cuda.device_count() if device == "cuda" else None
    ranks = (available or CPU_RANKS) if ranks is None else ranks
    if not 1 <= ranks <= (available or 64):
        raise InputError(f"--ranks: got {ranks}, expected 1 to {available or 64}, one for each GPU")
    if importlib.util.find_spec("transformers") is None:
        raise InputError(f"transformers is not installed, and the models are its own: {pip_install('train')}")
    names = tuple(models) or (CPU_MODELS if device == "cpu" else QUICK_MODELS if quick else MODELS)
    for name in names:
        load_model(name)
    if out.is_dir():
        raise InputError(f"--out {out}: is a directory, expected the name of the file to write")
    _check_folder(out)
    return Options(
        out=out,
        models=tuple(dict.fromkeys(names)),
        quick=quick,
        device="cuda" if device == "cuda" else "cpu",
        backend="cuda" if backend == "cuda" else "nvshmem" if backend == "nvshmem" else "cpu",
        ranks=ranks,
        command=command,
    )


def _check_folder(out: Path) -> None:
    """Minutes of measuring must not end in a file that cannot be written."""
    folder = out.resolve().parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out}: its folder cannot be made: {error.strerror}; choose another path") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(f"--out {out}: nothing can be written to its folder; choose another path, or allow it")


def calibrate(options: Options) -> Calibration | None:
    """Measure, and write `options.out`; what was written, or None on a rank of torchrun other than the first.

    Raises:
        InputError: the file cannot be written.
        RunError: a rank died or got stuck; the file has what was measured before.
    """
    process_group = "nccl" if options.on_gpu else "gloo"
    if "RANK" in os.environ:
        for name, value in NO_MULTICAST.items():
            os.environ.setdefault(name, value)
        device = None
        if options.on_gpu:  # pragma: cuda-only
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        dist.init_process_group(process_group, device_id=device)
        found = run_rank(dist.get_rank(), options)
        dist.barrier()
        dist.destroy_process_group()
        return found
    try:
        found, *_ = run_ranks(
            run_rank,
            options.ranks,
            options,
            backend=process_group,
            timeout_s=TIMEOUT_S[options.quick],
            grace_s=GRACE_S,
            environment={name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()},
        )
    except RankError as error:
        refused = next((failure for failure in error.failures if failure.kind == "InputError"), None)
        if refused is not None:
            raise InputError(refused.message) from error
        reason = error.failures[0].message.splitlines()[0] if error.failures else str(error).splitlines()[0]
        raise RunError(f"calibrate: {reason}; {options.out} has what was measured before") from error
    return found


def run_rank(rank: int, options: Options) -> Calibration | None:
    """One rank's part of the whole; what rank 0 wrote."""
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    torch.set_num_threads(1)  # ranks share a CPU's cores
    device = torch.device("cuda", torch.cuda.current_device()) if options.on_gpu else torch.device("cpu")
    world_size = dist.get_world_size()
    settings = {
        "quick": options.quick,
        "models": list(options.models),
        "backend": options.backend,
        "ranks": world_size,
        "compute_dtype": "bf16",
    }
    draft = Draft.start(options.out if rank == 0 else None, options.command, settings)
    lab = Lab(options, device, draft)
    phases = lab.phases()
    talk = Talk([name for name, _ in phases], loud=rank == 0)
    lab.talk = talk
    meeting = Rendezvous(dist.group.WORLD, timeout_s=TIMEOUT_S[options.quick])
    try:
        for name, phase in phases:
            talk.phase(name)
            start = time.monotonic()
            problem = _attempt(phase)
            draft.phases_s[name] = time.monotonic() - start
            reasons = meeting.exchange(f"end of {name}", problem, timeout_s=MEETING_S if problem else None)
            failed = [f"rank {r}: {reason}" for r, reason in enumerate(reasons) if reason]
            if failed:
                draft.failed[name] = failed[0]
                talk.line(f"{name} failed: {failed[0]}")
            draft.write()
    finally:
        talk.close()
    return draft.calibration() if rank == 0 else None


def _attempt(phase: Callable[[], None]) -> str | None:
    """Run a phase; why it failed, in one line. The traceback goes to standard error."""
    problem = None
    try:
        phase()
    except Exception as error:  # whatever it is, what the other phases measure is worth having
        traceback.print_exc()
        first = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {first[0]}"
    gc.collect()
    if torch.cuda.is_available():  # pragma: cuda-only
        torch.cuda.empty_cache()
    return problem
