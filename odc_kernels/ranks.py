"""Start some ranks on this host, run one function in each, and never wait longer than told.

For benchmarks and tests. Training is started with torchrun instead.
"""

import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


class RankError(RuntimeError):
    """Some ranks failed or did not end in time. The message has a traceback or a reason for each of them."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    may_die: bool = False,
) -> list[Any]:
    """function(rank, *args) in `world_size` new processes, joined in one process group; what each returned, by rank.

    Args:
        function: importable by name; its arguments and results are pickled.
        world_size: ranks to start; with the backend nccl, rank r uses GPU r.
        args: passed on to every rank.
        backend: of the process group.
        timeout_s: for everything together.
        environment: set in the ranks before they import anything.
        may_die: a rank that dies returns None instead of failing the run.

    Raises:
        RankError: a rank raised, died, or was not finished in time. All ranks are gone when it is raised.
    """
    context = multiprocessing.get_context("spawn")
    # Hosted here, so that it outlives any rank that dies.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    results = context.Queue()
    deadline = time.monotonic() + timeout_s
    ranks = [
        context.Process(
            target=_run,
            args=(function, rank, world_size, args, backend, store.port, timeout_s, dict(environment or {}), results),
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    answers: dict[int, tuple[str | None, Any]] = {}
    try:
        while len(answers) < world_size and time.monotonic() < deadline:
            try:
                rank, error, value = results.get(timeout=0.05)
                answers[rank] = (error, value)
            except queue.Empty:
                if all(rank in answers or process.exitcode is not None for rank, process in enumerate(ranks)):
                    break
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
    finally:
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in stuck:
            ranks[rank].kill()
            ranks[rank].join()
    problems = []
    for rank, process in enumerate(ranks):
        error, _ = answers.get(rank, (None, None))
        if error is not None:
            problems.append(f"rank {rank} raised:\n{error}")
        elif rank in stuck:
            problems.append(f"rank {rank} was not finished after {timeout_s:g} s")
        elif process.exitcode != 0 and not may_die:
            problems.append(f"rank {rank} died with exit code {process.exitcode}")
    if problems:
        raise RankError("\n".join(problems))
    return [answers.get(rank, (None, None))[1] for rank in range(world_size)]


def _run(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    backend: str,
    port: int,
    timeout_s: float,
    environment: dict[str, str],
    results: "multiprocessing.Queue[tuple[int, str | None, Any]]",
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    device = None
    if backend == "nccl":  # pragma: cuda-only
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    store = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout_s), device_id=device
    )
    try:
        value = function(rank, *args)
    except BaseException:
        results.put((rank, traceback.format_exc(), None))
        results.close()
        results.join_thread()
        # Not the ordinary end: destroying the group could wait for ranks that no longer come.
        os._exit(1)
    # gloo aborts at exit now and then where ranks leave the group at different times.
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, None, value))
