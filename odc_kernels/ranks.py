"""Start some ranks on this host, run one function in each, and never wait longer than told.

Several hosts need torchrun instead.
"""

import multiprocessing
import os
import queue
import signal
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

START_METHOD = "spawn"
"""Of `multiprocessing`. A fork of this process would inherit its devices and threads."""
INTERRUPT_S = 2.0
"""Ctrl-C reaches all processes of a terminal; so long the ranks have to end by themselves."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """Why a rank has no result."""

    rank: int
    kind: str
    """The name of the exception's class, or "died", or "stuck": ended by `run_ranks`."""
    message: str
    """Of the exception; or in words."""
    details: str
    """A traceback, if there is one."""


class RankError(RuntimeError):
    """Some ranks failed or did not end in time. The message has a traceback or a reason for each of them."""

    def __init__(self, message: str, failures: Sequence[Failure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 60.0,
    environment: Mapping[str, str] | None = None,
    may_die: bool = False,
    grace_s: float | None = None,
    group_timeout_s: float | None = None,
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
        grace_s: how long the others may go on when one has failed or died; None: as long as they like.
        group_timeout_s: of the process group's collectives; None: `timeout_s`.

    Raises:
        RankError: a rank raised, died, or was not finished in time. All ranks are gone when it is raised.
    """
    context = multiprocessing.get_context(START_METHOD)
    # Hosted here, so that it outlives any rank that dies.
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    results = context.Queue()
    deadline = time.monotonic() + timeout_s
    group_s = timeout_s if group_timeout_s is None else group_timeout_s
    ranks = [
        context.Process(
            target=_run,
            args=(function, rank, world_size, args, backend, store.port, group_s, dict(environment or {}), results),
        )
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    answers: dict[int, tuple[Failure | None, Any]] = {}

    def failed() -> bool:
        # A rank that died a moment ago may have left an answer that has not come through yet; `grace_s` covers that.
        died = any(process.exitcode and rank not in answers for rank, process in enumerate(ranks))
        return (died and not may_die) or any(failure is not None for failure, _ in answers.values())

    try:
        while len(answers) < world_size and time.monotonic() < deadline:
            try:
                rank, failure, value = results.get(timeout=0.05)
                answers[rank] = (failure, value)
            except queue.Empty:
                if all(rank in answers or process.exitcode is not None for rank, process in enumerate(ranks)):
                    break
            if grace_s is not None and failed():
                deadline = min(deadline, time.monotonic() + grace_s)
                grace_s = None
        for process in ranks:
            process.join(max(0.0, deadline - time.monotonic()))
    except KeyboardInterrupt:
        end = time.monotonic() + INTERRUPT_S
        for process in ranks:
            process.join(max(0.0, end - time.monotonic()))
        raise
    finally:
        stuck = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        for rank in stuck:
            ranks[rank].kill()
            ranks[rank].join()
    failures = []
    for rank, process in enumerate(ranks):
        failure, _ = answers.get(rank, (None, None))
        if failure is not None:
            failures.append(failure)
        elif rank in stuck:
            why = f"rank {rank} was not finished after {timeout_s:g} s"
            failures.append(Failure(rank=rank, kind="stuck", message=why, details=""))
        elif process.exitcode != 0 and not may_die:
            killed = ": killed, most likely out of memory" if process.exitcode == -signal.SIGKILL else ""
            why = f"rank {rank} died with exit code {process.exitcode}{killed}"
            failures.append(Failure(rank=rank, kind="died", message=why, details=""))
    if failures:
        lines = [
            f"rank {failure.rank} raised:\n{failure.details}" if failure.details else failure.message
            for failure in failures
        ]
        raise RankError("\n".join(lines), failures)
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
    results: "multiprocessing.Queue[tuple[int, Failure | None, Any]]",
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
    except BaseException as error:
        failure = Failure(rank=rank, kind=type(error).__name__, message=str(error), details=traceback.format_exc())
        results.put((rank, failure, None))
        results.close()
        results.join_thread()
        # Not the ordinary end: destroying the group could wait for ranks that no longer come.
        os._exit(1)
    # gloo aborts at exit now and then where ranks leave the group at different times.
    dist.barrier()
    dist.destroy_process_group()
    results.put((rank, None, value))
