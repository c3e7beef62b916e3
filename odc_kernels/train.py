"""`odc train`: a plan on hardware.

    train(job)                    # starts a rank a GPU, or is one of torchrun's

Ranks write nothing but what rank 0 collects; see `odc_sim.run_files` for the folder.
"""

import math
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from odc_kernels import train_checkpoint
from odc_kernels.collector import collected_between
from odc_kernels.emulated import EmulatedLm
from odc_kernels.environment import NO_MULTICAST, describe
from odc_kernels.fsdp_comm import Transfer
from odc_kernels.lm import build_lm, shard
from odc_kernels.ranks import Failure, RankError, run_ranks
from odc_kernels.train_clock import host_name, offset_to_rank_0
from odc_kernels.train_data import Samples, Synthetic, Tokenized, minibatch_samples
from odc_kernels.train_files import RunFiles, check_folder
from odc_kernels.train_hooks import Hooks
from odc_kernels.train_job import TIMEOUT_S, Job, check, peak_flops, slow_line, waits_line, warmup_minibatches
from odc_kernels.train_loop import Ran, Settled, Spans, Worker
from odc_kernels.train_modes import make_mode
from odc_kernels.train_progress import Progress
from odc_kernels.train_recorder import Recorder
from odc_sim.errors import InputError, RunError
from odc_sim.models import ModelSpec, model_flops
from odc_sim.run_files import StepRow

LONGEST_RUN_S = 1e6
GRACE_S = 5.0
"""When a rank has failed, the others find out by themselves in this time, or are ended."""
CONSEQUENCES = ("WindowError", "stuck", "RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError")
"""How ranks fail when another one has; whatever else a rank raises is a cause."""
TIMELINE_EVERY = 16
"""Minibatches after which the timeline is written; more often in the beginning."""


def train(job: Job) -> None:
    """Run a job, on ranks that are started here; under torchrun, as one of its ranks.

    Raises:
        InputError: the job cannot run, or not on this machine.
        RunError: it could not go on: a loss that is not finite, out of memory, a rank that died.
    """
    check(job)
    if job.config.compute == "emulated" and os.environ.get("RANK", "0") == "0":
        print(waits_line(job), file=sys.stderr, flush=True)
    if slow_line(job) and os.environ.get("RANK", "0") == "0":
        print(slow_line(job), file=sys.stderr, flush=True)
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _join_torchrun(job)
        return
    cuda = job.config.device == "cuda"
    world_size = job.plan.world_size
    if cuda and torch.cuda.device_count() < world_size:
        raise InputError(
            f"the plan is for {world_size} ranks, this machine has {torch.cuda.device_count()} GPUs; plan with "
            "--devices, use --device cpu, or start this command with torchrun on several hosts"
        )
    check_folder(job)
    # Processes that import torch and shard a model are silent for 10 seconds and more.
    where = "" if cuda else f" on this CPU ({os.cpu_count()} cores)"
    print(f"starting {world_size} ranks{where}: {job.spec.name}, {job.config.schedule}", file=sys.stderr, flush=True)
    try:
        run_ranks(
            run_rank,
            world_size,
            job,
            backend="nccl" if cuda else "gloo",
            timeout_s=LONGEST_RUN_S,
            environment={name: os.environ.get(name, value) for name, value in NO_MULTICAST.items()},
            grace_s=GRACE_S,
            group_timeout_s=TIMEOUT_S,
        )
    except RankError as error:
        raise _in_one_line(error) from error


def _in_one_line(error: RankError) -> Exception:
    """What the ranks' failures come down to: the first cause, not what followed from it on the other ranks."""
    by_kind: dict[str, Failure] = {}
    for failure in error.failures:
        by_kind.setdefault(failure.kind, failure)
    if "InputError" in by_kind:
        return InputError(by_kind["InputError"].message)
    if "KeyboardInterrupt" in by_kind:
        return KeyboardInterrupt()
    for kind in ("RunError", "died"):
        if kind in by_kind:
            return RunError(by_kind[kind].message)
    if any(kind not in CONSEQUENCES for kind in by_kind):
        return error
    for kind in ("WindowError", "stuck"):
        if kind in by_kind:
            return RunError(by_kind[kind].message)
    return error


def _join_torchrun(job: Job) -> None:
    cuda = job.config.device == "cuda"
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if world_size != job.plan.world_size:
        raise InputError(f"torchrun started {world_size} ranks, the plan is for {job.plan.world_size}")
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)
    device = None
    if cuda:  # pragma: cuda-only
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if cuda else "gloo", timeout=timedelta(seconds=TIMEOUT_S), device_id=device if cuda else None
    )
    if rank == 0:
        check_folder(job)
    run_rank(rank, job)
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, job: Job) -> None:
    """One rank of a job, in a process group of all of them."""
    control = dist.new_group(backend="gloo", timeout=timedelta(seconds=TIMEOUT_S))
    worker = make_worker(rank, job, control)
    try:
        start, folder = train_checkpoint.newest(job.out) if job.resume else (0, None)
        with Book(worker, start) if rank == 0 else nullcontext() as book:
            worker.warm_up(warmup_minibatches(job.plan, job.config.warmup_steps, job.config.steps))
            if folder is not None:
                train_checkpoint.load(folder, worker.model, worker.optimizer, control)
                worker.mode.publish()
            with collected_between() as collect:
                _loop(worker, start, book, collect)
    except BaseException:
        worker.mode.abandon()
        raise
    worker.mode.close()
    dist.barrier(control)
    dist.destroy_process_group(control)


def make_worker(rank: int, job: Job, control: dist.ProcessGroup) -> Worker:
    """A sharded model, its optimizer and its schedule. Collective; `control` is a gloo group of all ranks."""
    config, spec = job.config, job.spec
    cuda = config.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    hosts: list[str] = [""] * config.world_size
    dist.all_gather_object(hosts, host_name(), group=control)
    # The store of torch.distributed itself; there is no public way to it.
    offset_s = offset_to_rank_0(dist.distributed_c10d._get_default_store(), rank, hosts)

    model = _build(job, spec, device)
    dtypes = {"bf16": torch.bfloat16, "fp32": None}
    reduce_dtype = torch.bfloat16 if config.reduce_dtype == "bf16" else torch.float32
    mesh = init_device_mesh(device.type, (config.world_size,))
    shard(model, mesh, param_dtype=dtypes[config.gather_dtype], reduce_dtype=reduce_dtype)
    if cuda:  # pragma: cuda-only
        torch.cuda.empty_cache()  # of the whole model, which windows may need: torch does not allocate them

    recorder = Recorder(device, offset_s=offset_s, spans=job.timeline)
    units: dict[nn.Module, int] = {layer: unit for unit, layer in enumerate(model.layers, 1)}

    def observe(kind: str, modules: Sequence[FSDPModule], transfer: Transfer) -> Transfer:
        return recorder.observe(kind, units.get(modules[0], 0), transfer)

    if job.timeline:
        Hooks(recorder, model, model.layers)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Worker(
        rank=rank,
        job=job,
        device=device,
        model=model,
        spec=spec,
        optimizer=torch.optim.AdamW(parameters, lr=config.learning_rate, fused=cuda),
        mode=make_mode(config.schedule, model, observe, timeout_s=TIMEOUT_S),
        recorder=recorder,
        samples=_samples(job, spec),
        control=control,
    )


def _build(job: Job, spec: ModelSpec, device: torch.device) -> Any:
    config = job.config
    if config.compute == "emulated":
        return EmulatedLm(spec, job.costs(), time_scale=config.time_scale, device=device)
    return build_lm(
        job.model,
        device=device,
        seed=config.seed,
        recompute=config.recompute,
        chunked_loss_tokens=config.chunked_loss_tokens,
    )


def _samples(job: Job, spec: ModelSpec) -> Samples:
    if job.data is not None:
        return Tokenized(job.data, job.plan.lengths, spec.vocab)
    return Synthetic(job.plan.lengths, spec.vocab, job.config.seed)


def _loop(worker: Worker, start: int, book: "Book | None", collect: Callable[[], None]) -> None:
    job = worker.job
    steps, every = job.config.steps, job.checkpoint_every
    before: Ran | None = None

    def settle(ran: Ran) -> None:
        settled = worker.settle(ran)
        if book is not None:
            book.enter(settled)
        done = ran.number + 1 - start
        if job.timeline and (done in (1, 2, 4, 8) or done % TIMELINE_EVERY == 0 or ran.number + 1 == steps):
            spans = worker.collect()
            if book is not None:
                book.write_timeline(spans)
        # What only rank 0 does here must not make it late in the next minibatch.
        dist.barrier(worker.control)

    batches = worker.prepare(start) if start < steps else []
    dist.barrier(worker.control)
    for number in range(start, steps):
        ran = worker.run(number, batches)
        batches = worker.prepare(number + 1) if number + 1 < steps else []
        if before is not None:
            settle(before)
        before = ran
        collect()
        finished = number + 1
        saves = every > 0 and (finished % every == 0 or finished == steps)
        if saves or finished == steps:
            settle(ran)
            before = None
        if saves:
            train_checkpoint.save(job.out, finished, worker.model, worker.optimizer, worker.control)
            dist.barrier(worker.control)


class Book:
    """What rank 0 writes and shows of finished minibatches."""

    def __init__(self, worker: Worker, start: int) -> None:
        job = worker.job
        self._worker = worker
        self._files = RunFiles(job, describe(), finished=start)
        self._progress = Progress(job.config.steps, start)
        gpu = torch.cuda.get_device_name(worker.device) if worker.device.type == "cuda" else ""
        emulated = job.config.compute == "emulated"
        self._peak_flops = math.nan if emulated else peak_flops(gpu, job.measured())
        self._before_s = math.nan
        self._starts_s: dict[int, float] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def enter(self, settled: Settled) -> None:
        """A minibatch that all ranks have finished."""
        worker, shares = self._worker, settled.shares
        start_s, end_s = min(share.start_s for share in shares), max(share.end_s for share in shares)
        available_s = len(shares) * (end_s - start_s)
        lengths = worker.job.plan.lengths[minibatch_samples(worker.job.plan, settled.number)]
        row = StepRow(
            minibatch=settled.number,
            loss=settled.loss,
            grad_norm=settled.norm,
            makespan_s=end_s - start_s,
            tokens=int(lengths.sum()),
            samples=int(lengths.size),
            mfu=model_flops(worker.spec, lengths) / (available_s * self._peak_flops),
            idle_rate=1.0 - sum(share.busy_s for share in shares) / available_s,
            peak_memory_bytes=max(share.memory_bytes for share in shares),
            between_s=start_s - self._before_s,
        )
        self._before_s = end_s
        self._starts_s[settled.number] = start_s
        self._files.add(row)
        self._progress.show(row)

    def write_timeline(self, ranks: Sequence[Spans]) -> None:
        """Add every rank's spans of minibatches that have been entered."""
        self._files.add_spans(ranks, self._starts_s)
        self._starts_s.clear()
