"""Where a sweep's points run: processes of this machine, or a Dask or Ray cluster, all through joblib."""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from odc_sim.errors import InputError, pip, unknown_name

A = TypeVar("A")
B = TypeVar("B")
DEFAULT_BACKEND = "loky"
BACKENDS = (DEFAULT_BACKEND, "dask", "ray")
CONNECT_SECONDS = 5.0
WORKER_SECONDS = 20.0
CHUNK_CALLS_PER_WORKER = 4
"""Ray's joblib backend cannot hand back one result at a time, so it gets this many calls a worker at once."""


def stream(
    function: Callable[[A], B],
    inputs: Sequence[A],
    *,
    jobs: int | None = None,
    backend: str = DEFAULT_BACKEND,
    address: str | None = None,
) -> Iterator[tuple[int, B]]:
    """(index, function(inputs[index])) in the order they finish.

    jobs: workers; default: all cores, or all that the cluster has. address: HOST:PORT of the cluster's scheduler.

    Raises:
        InputError: an unknown backend, a count below 1, a package that is missing, or a cluster that does not answer.
    """
    import joblib

    if backend not in BACKENDS:
        raise unknown_name("backend", backend, BACKENDS)
    if jobs is not None and jobs < 1:
        raise InputError(f"--jobs: got {jobs}, expected at least 1")
    if address and backend == DEFAULT_BACKEND:
        raise InputError(f"--address {address}: {backend} runs on this machine; add --backend dask or --backend ray")
    if backend != DEFAULT_BACKEND:
        _reach(address, backend)
    if not inputs:
        return
    workers = jobs or (-1 if backend != DEFAULT_BACKEND else joblib.cpu_count())
    calls = [joblib.delayed(_numbered)(function, i, value) for i, value in enumerate(inputs)]
    with _cluster(backend, address), joblib.parallel_config(backend=backend, n_jobs=workers):
        if backend == "ray":
            size = CHUNK_CALLS_PER_WORKER * max(joblib.effective_n_jobs(workers), 1)
            for first in range(0, len(calls), size):
                yield from joblib.Parallel(batch_size=1)(calls[first : first + size])
            return
        # one call a batch: a finished point is handed over, and kept, at once
        found = joblib.Parallel(batch_size=1, return_as="generator_unordered")(calls)
        with contextlib.closing(found):
            yield from found


def _numbered(function: Callable[[A], B], number: int, value: A) -> tuple[int, B]:
    return number, function(value)


def _reach(address: str | None, backend: str) -> None:
    """Refuse an address nobody listens at; the clients of Dask and Ray would wait long, and complain at length."""
    if address is None:
        raise InputError(f"--backend {backend} needs --address HOST:PORT, where its scheduler listens")
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not (colon and host and port.isdigit()):
        raise InputError(f"--address: got {address!r}, expected HOST:PORT of a {backend} scheduler")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise InputError(f"--address {address}: no {backend} scheduler answers there ({error})") from None


@contextlib.contextmanager
def _cluster(backend: str, address: str | None) -> Iterator[None]:
    """A connection to the cluster for as long as joblib uses it."""
    if backend == DEFAULT_BACKEND:
        yield
        return
    try:
        close = _dask(address) if backend == "dask" else _ray(address)
    except ImportError as error:
        package = "distributed" if backend == "dask" else "ray"
        raise InputError(f"--backend {backend}: cannot import {error.name}; {pip(package)}") from None
    except (OSError, ValueError, RuntimeError) as error:
        first = (str(error).splitlines() or [type(error).__name__])[0]
        raise InputError(f"--address {address}: cannot use the {backend} cluster: {first}") from None
    try:
        yield
    finally:
        close()


def _dask(address: str | None) -> Callable[[], None]:
    from distributed import Client

    client = Client(address, timeout=CONNECT_SECONDS)
    try:
        client.wait_for_workers(1, timeout=WORKER_SECONDS)
    except TimeoutError:
        client.close()
        raise RuntimeError(f"no worker within {WORKER_SECONDS:.0f} s") from None
    return client.close  # type: ignore[no-any-return]


def _ray(address: str | None) -> Callable[[], None]:
    import ray
    from ray.util.joblib import register_ray

    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    register_ray()
    return ray.shutdown  # type: ignore[no-any-return]
