"""What every window backend and both transfers must do: run in each rank, the same on CPUs and GPUs.

`CHECKS` run one after another in one set of ranks; the functions below them end their ranks' run and get a set each.
"""

import os
import random
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from odc_kernels import reference
from odc_kernels.gather import gather
from odc_kernels.rendezvous import WindowError
from odc_kernels.scatter_accumulate import accumulator_numel, drain, scatter_accumulate
from odc_kernels.signals import Signals
from odc_kernels.window import BackendName, open_window
from odc_sim.errors import InputError

F32, BF16 = torch.float32, torch.bfloat16
SIZES = (0, 1, 3, 16, 1000, 4099, 8192)


class Setup:
    """Where a check runs."""

    def __init__(self, rank: int, backend: BackendName, rounds: int) -> None:
        self.rank = rank
        self.world_size = dist.get_world_size()
        self.backend: BackendName = backend
        self.rounds = rounds
        self.cpu = backend == "cpu"
        self.device = torch.device("cpu") if self.cpu else torch.device("cuda", torch.cuda.current_device())
        self.methods = ("auto", "copy") if self.cpu and not interpreted() else ("auto", "copy", "triton")

    def open(self, numel: int, dtype: torch.dtype = F32, name: str = "check", timeout_s: float = 30.0):
        return open_window(numel, dtype, name=name, backend=self.backend, timeout_s=timeout_s)

    def random(self, *key: int, numel: int, dtype: torch.dtype = F32, integers: bool = False) -> torch.Tensor:
        """The same on every rank that asks with the same key."""
        rng = np.random.default_rng(key)
        values = rng.integers(-100, 100, numel) if integers else rng.standard_normal(numel)
        return torch.from_numpy(values.astype(np.float32)).to(dtype).to(self.device)

    @contextmanager
    def stream(self, *, own: bool) -> Iterator[None]:
        """On GPUs a stream other than the default one where `own`: copies then go in batches."""
        if self.cpu or not own:
            yield
            return
        stream, outer = torch.cuda.Stream(self.device), torch.cuda.current_stream(self.device)
        stream.wait_stream(outer)
        with torch.cuda.stream(stream):
            yield
        outer.wait_stream(stream)


def interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@contextmanager
def raises(kind: type[Exception], *parts: str) -> Iterator[None]:
    """The message must be one line that holds all parts."""
    try:
        yield
    except kind as error:
        message = str(error)
        assert "\n" not in message, message
        for part in parts:
            assert part in message, f"{part!r} not in {message!r}"
    else:
        raise AssertionError(f"no {kind.__name__}")


def peers_see_what_a_rank_writes(setup: Setup) -> None:
    for dtype in (F32, BF16, torch.int32):
        for numel in SIZES:
            with setup.open(numel, dtype) as window:
                assert (window.rank, window.world_size) == (setup.rank, setup.world_size)
                assert window.numel == numel
                assert window.dtype == dtype
                assert len(window.peers) == setup.world_size
                assert window.peers[setup.rank] is window.local
                assert not window.local.any(), "not zero when opened"
                assert window.addresses.dtype == torch.int64
                assert window.addresses.device == window.device == window.local.device
                if numel:
                    assert window.addresses.tolist() == [peer.data_ptr() for peer in window.peers]
                window.barrier()
                window.local.fill_(setup.rank + 1)
                window.barrier()
                for rank, peer in enumerate(window.peers):
                    assert peer.tolist() == [rank + 1] * numel
                window.barrier()
                right = (setup.rank + 1) % setup.world_size
                window.peers[right][numel // 2 :].fill_(100 + setup.rank)
                window.barrier()
                left = (setup.rank - 1) % setup.world_size
                assert window.local[numel // 2 :].tolist() == [100 + left] * (numel - numel // 2)


def windows_open_and_close_many_times(setup: Setup) -> None:
    order = random.Random(1)
    for _ in range(3):
        windows = [setup.open(order.randrange(1, 3000), name=f"w{i}") for i in range(8)]
        order.shuffle(windows)
        for i, window in enumerate(windows):
            window.local.fill_(i * 10 + setup.rank)
        windows[0].barrier()
        for i, window in enumerate(windows):
            assert [int(peer[-1]) for peer in window.peers] == [i * 10 + rank for rank in range(setup.world_size)]
        forgotten = windows[0].local[:1] if setup.rank == 0 and setup.backend != "nvshmem" else None
        for window in windows:
            window.close()
            window.close()
            assert "closed" in repr(window)
            assert window.local.numel() == 0
        del forgotten


def ranks_that_disagree_all_get_the_same_line(setup: Setup) -> None:
    if setup.world_size == 1:
        return
    sizes = (100, 200) if setup.rank != 1 else (200, 100)
    with raises(WindowError, "rank 1 asked for numel 200, rank 0 for numel 100", "same order on every rank"):
        setup.open(sizes[0], name="a")
    with raises(WindowError, "rank 1 asked for name b, dtype bfloat16, rank 0 for name a, dtype float32"):
        setup.open(100, F32 if setup.rank != 1 else BF16, name="a" if setup.rank != 1 else "b")
    setup.open(5).close()


def too_much_memory_names_the_rank_and_what_is_free(setup: Setup) -> None:
    numel = 1 << 43
    with raises(WindowError, "open of window", "rank 0: ", f"{4 * numel} bytes", "free"):
        setup.open(numel, name="huge")
    setup.open(5).close()


def one_rank_without_room_stops_all(setup: Setup) -> None:
    if setup.cpu:
        from odc_kernels import window_cpu

        last, create = setup.world_size - 1, window_cpu._create
        if setup.rank == last:
            window_cpu._create = lambda *_: create(*_).rename("/dev/shm/odc-moved").with_name("odc-elsewhere")
        cannot = f"rank 0: cannot map the file of rank {last} (/dev/shm/odc-elsewhere): not the same host or container"
        with raises(WindowError, cannot):
            setup.open(5)
        if setup.rank == last:
            os.unlink("/dev/shm/odc-moved")
            window_cpu._create = create
            allocate = os.posix_fallocate
            os.posix_fallocate = full  # another process is faster to take the room that was free
            with raises(OSError):
                create(20, window_cpu.folders())
            os.posix_fallocate = allocate
            window_cpu.folders = list  # no folder has room here
        with raises(WindowError, f"rank {last}: needs 20 bytes of shared files"):
            setup.open(5)


def full(*_: int) -> None:
    raise OSError("no space left")


def gather_equals_all_gather(setup: Setup) -> None:
    order = random.Random(2)
    capacity = 9000
    for dtype in (F32, BF16):
        with setup.open(capacity, dtype) as window:
            window.local.copy_(setup.random(3, setup.rank, numel=capacity, dtype=dtype))
            window.barrier()
            for method in setup.methods:
                for number in range(8):
                    shard = order.choice((*SIZES, order.randrange(1, 8192)))
                    offset = order.choice((0, 16, order.randrange(capacity - shard)))
                    wanted = torch.empty(shard * setup.world_size, dtype=dtype, device=setup.device)
                    if shard:
                        reference.all_gather(wanted, window.local[offset : offset + shard].clone())
                    output = torch.full_like(wanted, torch.nan)
                    skip_self = number % 3 == 0
                    with setup.stream(own=number % 2 == 0):
                        gather(window, output, offset=offset, skip_self=skip_self, method=method)
                    if skip_self:
                        mine = slice(shard * setup.rank, shard * (setup.rank + 1))
                        assert output[mine].isnan().all(), "the own shard was to be left alone"
                        output[mine] = wanted[mine]
                    assert torch.equal(output, wanted), (method, shard, offset)
            wide = torch.empty(capacity * setup.world_size, device=setup.device)
            if dtype == BF16 and ("triton" in setup.methods or setup.cpu):
                gather(window, wide)  # another dtype: cast on the way
                narrow = torch.empty_like(wide, dtype=BF16)
                gather(window, narrow)
                assert torch.equal(wide, narrow.float())
            window.barrier()


def scatter_accumulate_equals_reduce_scatter(setup: Setup) -> None:
    order = random.Random(4)
    capacity = 9000
    for deterministic in (False, True):
        numel = accumulator_numel(capacity, setup.world_size, deterministic=deterministic)
        with setup.open(numel, name="gradients") as window:
            for number in range(12):
                shard = order.choice((*SIZES, order.randrange(1, 8192)))
                offset = order.choice((0, 16, order.randrange(capacity - shard)))
                dtype = order.choice((F32, BF16))
                pushes = order.randrange(1, 4)
                scale = order.choice((1.0, 0.5, 1 / 3))
                window.local.zero_()
                window.barrier()
                wanted = torch.zeros(shard, dtype=torch.float64, device=setup.device)
                for push in range(pushes):
                    gradients = setup.random(5, number, push, setup.rank, numel=shard * setup.world_size, dtype=dtype)
                    if shard:
                        wanted += scale * reference.exact_reduce_scatter(gradients)
                    lean = order.random() < 0.5
                    scatter_accumulate(
                        window, gradients, offset=offset, deterministic=deterministic, scale=scale, lean=lean
                    )
                window.barrier()
                total = drain(window, shard, offset=offset, deterministic=deterministic)
                assert total.dtype == F32
                assert near(total, wanted, 2 * pushes * setup.world_size), (shard, offset, dtype, deterministic)
                rest = drain(window, capacity, deterministic=deterministic).clone()
                rest[offset : offset + shard] = 0
                assert not rest.any(), "something was written outside the shard"
                if deterministic:
                    halved = drain(window, shard, offset=offset, deterministic=True, scale=0.5, in_place=True)
                    assert halved.data_ptr() == window.local[offset:].data_ptr() or shard == 0
                    assert torch.equal(halved, 0.5 * total)
                window.barrier()


def near(total: torch.Tensor, exact: torch.Tensor, additions: int) -> bool:
    """Equal to rounding: each of the additions of values of about 1 may be off by half a unit in the last place."""
    return bool((total.double() - exact).abs().le(additions * 2.0**-24 * (1 + additions * 6.0)).all())


def contention_loses_nothing(setup: Setup) -> None:
    """Many rounds of random overlapping pushes from two streams a rank, while the owner computes; small integers, so
    that fp32 sums are exact in any order and one lost or doubled addition shows, then reals against the fp64 sum."""
    capacity, rounds = 2048, setup.rounds
    for integers in (True, False):
        order = random.Random(6)
        with setup.open(capacity, name="contention") as window:
            wanted = torch.zeros(capacity, dtype=torch.float64, device=setup.device)
            pushed = torch.zeros(capacity, dtype=torch.int64, device=setup.device)
            with two_streams(setup) as enqueue:
                for number in range(rounds):
                    shard = order.choice((order.randrange(1, 300), 16 * order.randrange(1, 19)))  # lean needs such
                    offset = order.randrange(capacity - shard)
                    for stream in range(2):
                        key = (7, number, stream)
                        numel = shard * setup.world_size
                        mine = setup.random(*key, setup.rank, numel=numel, integers=integers)
                        enqueue(stream, window, mine, offset)
                        for rank in range(setup.world_size):
                            theirs = setup.random(*key, rank, numel=numel, integers=integers)
                            chunk = theirs.view(setup.world_size, shard)[setup.rank]
                            wanted[offset : offset + shard] += chunk
                            pushed[offset : offset + shard] += 1
                    keep_busy(setup)
            window.barrier()
            total = drain(window, capacity)
            if integers:
                assert torch.equal(total.double(), wanted), "an addition was lost or doubled"
            else:
                # Sums of k values of about 1 are about sqrt(k); each of k additions rounds by half a unit of that.
                allowed = pushed.double().pow(1.5) * 2.0**-24 * 3 + 1e-6
                assert bool(((total.double() - wanted).abs() <= allowed).all()), (total.double() - wanted).abs().max()
            window.barrier()


def long_additions_at_the_same_place_lose_nothing(setup: Setup) -> None:
    """Additions long enough to overlap every time: without atomics, or the lock on CPUs, some are lost."""
    shard, pushes = 100_000, 5 if interpreted() else 100
    gradients = torch.ones(shard * setup.world_size, device=setup.device)
    with setup.open(shard, name="contended") as window:
        window.barrier()
        with two_streams(setup) as enqueue:
            for push in range(pushes):
                enqueue(push % 2, window, gradients, 0)
        window.barrier()
        assert (drain(window, shard) == pushes * setup.world_size).all(), "an addition was lost"
        window.barrier()


@contextmanager
def two_streams(setup: Setup) -> Iterator[Callable]:
    """A function (stream, window, gradients, offset) that pushes on one of two streams: CUDA's, or threads on a CPU."""
    if not setup.cpu:
        streams = [torch.cuda.Stream(setup.device) for _ in range(2)]

        def enqueue(number, window, gradients, offset):
            stream = streams[number]
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                scatter_accumulate(window, gradients, offset=offset, num_programs=4, lean=number == 1)
                gradients.record_stream(stream)

        yield enqueue
        return
    waiting: list[list[tuple]] = [[], []]

    def enqueue(number, window, gradients, offset):
        waiting[number].append((window, gradients, offset))

    def work(number):
        for window, gradients, offset in waiting[number]:
            scatter_accumulate(window, gradients, offset=offset)

    yield enqueue
    # The interpreter patches triton.language while it runs a kernel, so only one thread may be in it; other ranks
    # contend all the same.
    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
        if interpreted():
            thread.join()
    for thread in threads:
        thread.join()


def keep_busy(setup: Setup) -> None:
    if not setup.cpu:
        square = torch.ones(256, 256, device=setup.device)
        torch.mm(square, square)


def deterministic_mode_repeats_bitwise(setup: Setup) -> None:
    shard, pushes = 777, 3
    with setup.open(accumulator_numel(shard, setup.world_size, deterministic=True)) as window:
        wanted = torch.zeros(shard, device=setup.device)
        for rank in range(setup.world_size):
            slot = torch.zeros(shard, device=setup.device)
            for push in range(pushes):
                theirs = setup.random(8, push, rank, numel=shard * setup.world_size)
                slot += theirs.view(setup.world_size, shard)[setup.rank]
            wanted += slot
        for repeat in range(5):
            window.local.zero_()
            window.barrier()
            for push in range(pushes):
                time.sleep(random.Random(repeat * 10 + setup.rank).random() * 2e-3)
                gradients = setup.random(8, push, setup.rank, numel=shard * setup.world_size)
                scatter_accumulate(window, gradients, deterministic=True)
            window.barrier()
            assert torch.equal(drain(window, shard, deterministic=True), wanted), "not the sum in rank order"
            window.barrier()


def devices_wait_for_each_other(setup: Setup) -> None:
    """Pushes, sums and zeroing in turn, with hosts that never wait for their devices."""
    world_size, numel = setup.world_size, 5000
    stream = None if setup.cpu else torch.cuda.Stream(setup.device)
    sums = []
    with setup.open(numel) as window, setup.open(world_size, torch.int32, name="signals") as flags:
        signals = Signals(flags, [10 + rank for rank in range(world_size)])
        assert signals.missing() == []

        def meet() -> None:
            signals.signal()
            window._meeting.barrier("hosts")
            signals.wait()

        for number in range(20):
            gradients = torch.full((world_size * numel,), number + 1.0, device=setup.device)
            if stream is not None:
                stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                signals.transfer()
                if stream is not None:
                    torch.cuda._sleep(1_000_000 * ((number + setup.rank) % 3))
                scatter_accumulate(window, gradients)
            meet()
            sums.append(drain(window, numel).clone())
            window.local.zero_()
            meet()
        for number, total in enumerate(sums):
            assert (total == world_size * (number + 1)).all(), (number, total)
        window.barrier()
        assert signals.passed()
        assert not signals.waiting()
        assert signals.missing() == []
        signals._count += 1
        assert signals.missing() == [10 + rank for rank in range(world_size)]
        if setup.cpu and not interpreted():
            signals.release()
        else:
            threading.Timer(0.3, signals.release).start()
        signals.wait()  # ends without the others
        window.barrier()
        assert signals.missing() == []


def overwriting_replaces_what_a_slot_held(setup: Setup) -> None:
    capacity, shard, offset = 1000, 501, 7
    numel = shard * setup.world_size
    with setup.open(accumulator_numel(capacity, setup.world_size, deterministic=True)) as window:
        for repeat in range(3):  # without zeroing in between
            for push, overwrite in enumerate((True, False)):
                gradients = setup.random(10, repeat, push, setup.rank, numel=numel)
                with setup.stream(own=repeat > 0):
                    scatter_accumulate(window, gradients, offset=offset, deterministic=True, overwrite=overwrite)
            window.barrier()
            wanted = torch.zeros(shard, device=setup.device)
            for rank in range(setup.world_size):
                first, second = (setup.random(10, repeat, push, rank, numel=numel) for push in range(2))
                wanted += (first + second).view(setup.world_size, shard)[setup.rank]
            assert torch.equal(drain(window, shard, offset=offset, deterministic=True), wanted)
            total = drain(window, capacity, deterministic=True)
            assert not total[:offset].any()
            assert not total[offset + shard :].any()
            window.barrier()
        window.local.fill_(-1)
        window.barrier()
        ones = torch.ones(numel, device=setup.device)
        scatter_accumulate(window, ones, deterministic=True, overwrite=True, skip_self=True)
        window.barrier()
        for rank, slot in enumerate(window.local.view(setup.world_size, capacity)[:, :shard]):
            assert (slot == (-1 if rank == setup.rank else 1)).all()
        window.barrier()


def wrong_arguments_are_refused(setup: Setup) -> None:
    world_size, device = setup.world_size, setup.device
    with raises(InputError, "got numel -1"):
        setup.open(-1)
    with raises(InputError, "unknown window backend 'cdua': did you mean 'cuda'?"):
        open_window(1, F32, backend="cdua")
    with setup.open(10, F32) as window, setup.open(10, torch.int32) as integers:
        shards = torch.zeros(world_size * 4, device=device)
        with raises(InputError, f"expected a contiguous one of world_size {world_size} equal shards"):
            gather(window, torch.zeros(world_size * 8, device=device)[::2])
        with raises(InputError, "got shards of 4 elements at 7, expected them within [0, 10)"):
            gather(window, shards, offset=7)
        with raises(InputError, "got shards of 4 elements at -1"):
            gather(window, shards, offset=-1)
        with raises(InputError, "got a tensor on meta"):
            gather(window, torch.zeros(world_size * 4, device="meta"))
        with raises(InputError, "unknown gather method 'tritno': did you mean 'triton'?"):
            gather(window, shards, method="tritno")
        if "triton" in setup.methods:
            with raises(InputError, "got a window of torch.int32, expected fp32, bf16 or fp16"):
                gather(integers, shards.int(), method="triton")
            gather(window, shards, skip_self=True, method="triton")
        elif setup.cpu:
            with raises(InputError, "set TRITON_INTERPRET=1"):
                gather(window, shards, method="triton")
        if not setup.cpu:
            with raises(InputError, "only for windows of the backend 'cpu'"):
                scatter_accumulate(window, shards, method="torch")
        with raises(InputError, "got a window of torch.int32, expected torch.float32"):
            scatter_accumulate(integers, shards)
        with raises(InputError, "got gradients of torch.float64"):
            scatter_accumulate(window, shards.double())
        with raises(InputError, "unknown scatter_accumulate method 'torhc': did you mean 'torch'?"):
            scatter_accumulate(window, shards, method="torhc")
        with raises(InputError, "overwrite needs the deterministic layout"):
            scatter_accumulate(window, shards, overwrite=True)
        with raises(InputError, "got scale 0.5 with overwrite, which copies; scale in drain instead"):
            scatter_accumulate(window, shards, overwrite=True, deterministic=True, scale=0.5)
        with raises(InputError, "skip_self is only for overwrite"):
            scatter_accumulate(window, shards, skip_self=True)
        with raises(InputError, "lean is a way to add"):
            scatter_accumulate(window, shards, lean=True, overwrite=True, deterministic=True)
        with raises(InputError, "drain: got scale 0.5 in the atomic layout"):
            drain(window, 4, scale=0.5)
        with raises(InputError, "drain: got [8, 12), expected a range within [0, 10)"):
            drain(window, 4, offset=8)
        if 10 % world_size:
            with raises(InputError, f"got a window of 10 elements, expected a multiple of world_size {world_size}"):
                drain(window, 1, deterministic=True)
        window.barrier()
        integers.barrier()


CHECKS: list[Callable[[Setup], None]] = [
    peers_see_what_a_rank_writes,
    windows_open_and_close_many_times,
    ranks_that_disagree_all_get_the_same_line,
    too_much_memory_names_the_rank_and_what_is_free,
    gather_equals_all_gather,
    scatter_accumulate_equals_reduce_scatter,
    contention_loses_nothing,
    long_additions_at_the_same_place_lose_nothing,
    deterministic_mode_repeats_bitwise,
    overwriting_replaces_what_a_slot_held,
    devices_wait_for_each_other,
    wrong_arguments_are_refused,
    one_rank_without_room_stops_all,  # last: it leaves the backend without room
]


def run_checks(rank: int, backend: BackendName, rounds: int) -> dict[str, str | None]:
    """What each check of this rank raised, None where it passed; missing: an earlier one failed."""
    setup = Setup(rank, backend, rounds)
    outcomes: dict[str, str | None] = {}
    for check in CHECKS:
        outcomes[check.__name__] = None
        try:
            check(setup)
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
            break
    if backend == "nvshmem":
        from odc_kernels import window_nvshmem

        window_nvshmem.finalize()
    return outcomes


def a_rank_that_stays_away(rank: int, backend: BackendName) -> float:
    """The last rank does not come to the barrier, nor to the next window."""
    setup = Setup(rank, backend, 0)
    away = setup.world_size - 1
    window = setup.open(10, name="lonely", timeout_s=20)
    dist.barrier()
    waited_s = 0.0
    if rank != away:
        start = time.monotonic()
        with raises(WindowError, "barrier of window 1 ('lonely')", f"rank {rank} waited 1 s for rank {away}:"):
            window.barrier(timeout_s=1)
        with raises(WindowError, "open of window 2 ('other')", f"rank {rank} waited 1 s for rank {away}:"):
            setup.open(10, name="other", timeout_s=1)
        waited_s = time.monotonic() - start
    dist.barrier()
    return waited_s


def a_store_that_is_lost(rank: int, backend: BackendName) -> None:
    """The process that hosts the store of torch.distributed dies."""

    class Lost:
        def __getattr__(self, name: str) -> Callable:
            raise dist.DistNetworkError("Connection reset by peer\nand a stack trace")

    setup = Setup(rank, backend, 0)
    window = setup.open(10)
    dist.barrier()
    window._meeting._store = Lost()
    with raises(WindowError, "the store of torch.distributed is gone", "died: Connection reset by peer"):
        window.barrier()
    dist.distributed_c10d._get_default_store = Lost
    with raises(WindowError, "the store of torch.distributed is gone"):
        setup.open(10)


def raises_on_rank_1(rank: int) -> None:
    if rank == 1:
        raise ValueError("something of its own")


def never_ends(rank: int) -> None:
    if rank == 1:
        time.sleep(600)


def a_rank_that_dies(rank: int, backend: BackendName) -> str:
    """Rank 1 dies between two barriers; the others find out within the deadline and can still leave."""
    setup = Setup(rank, backend, 0)
    try:
        # torch's store has 300 s of its own; the deadline here must be ours.
        with setup.open(10, name="doomed", timeout_s=2) as window:
            window.barrier()
            if rank == 1:
                os._exit(7)
            window.barrier()
    except WindowError as error:
        os.write(1, f"{error}\n".encode())
        return_and_leave(str(error))
    raise AssertionError("the barrier came through without rank 1")


def return_and_leave(message: str) -> None:
    """Write the message where the test looks for it, and end without the usual farewell, which needs all ranks."""
    path = os.environ["ODC_TEST_MESSAGES"]
    with open(path, "a", encoding="utf-8") as file:
        file.write(message + "\n")
    os._exit(0)


def groups_of_some_ranks(rank: int, backend: BackendName) -> None:
    """Two windows at once, one in each half of the ranks, as hybrid sharding uses them."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    group = halves[rank // 2]
    with open_window(4, F32, group, backend=backend, timeout_s=20) as window:
        assert (window.rank, window.world_size) == (rank % 2, 2)
        window.local.fill_(rank)
        window.barrier()
        assert [int(peer[0]) for peer in window.peers] == [rank // 2 * 2, rank // 2 * 2 + 1]
        window.barrier()
    if rank == 2:
        with raises(WindowError, "rank 0 (global rank 2) waited 0.5 s for rank 1 (global rank 3)"):
            open_window(4, F32, group, backend=backend, timeout_s=0.5)


def reads_from_other_hosts(rank: int) -> None:
    """NVSHMEM's path for peers that loads do not reach, forced on ranks of one host."""
    from odc_kernels import window_nvshmem

    window_nvshmem._reach = lambda *_: None
    window_nvshmem.STAGING_BYTES = 1 << 12  # smaller than a shard, so that it goes in pieces
    setup = Setup(rank, "nvshmem", 0)
    with setup.open(9000) as window:
        assert not window.reaches_all
        assert window.addresses.tolist().count(0) == setup.world_size - 1
        window.local.copy_(setup.random(9, rank, numel=9000))
        window.barrier()
        wanted = torch.empty(setup.world_size * 8001, device=setup.device)
        reference.all_gather(wanted, window.local[5:8006].clone())
        output = torch.full_like(wanted, torch.nan)
        gather(window, output, offset=5)
        assert torch.equal(output, wanted)
        with raises(InputError, "a peer is on another host", "use 'copy'"):
            gather(window, output, method="triton")
        with raises(InputError, "a peer is on another host", "shard within hosts"):
            scatter_accumulate(window, wanted)
        window.barrier()
    overwritten = [setup.random(11, peer, numel=setup.world_size * 4000) for peer in range(setup.world_size)]
    with setup.open(accumulator_numel(4000, setup.world_size, deterministic=True)) as window:
        scatter_accumulate(window, overwritten[rank], deterministic=True, overwrite=True)
        window.barrier()
        mine = [gradients.view(setup.world_size, 4000)[rank] for gradients in overwritten]
        assert torch.equal(drain(window, 4000, deterministic=True), sum(mine[1:], mine[0]))
        window.barrier()
    window_nvshmem.finalize()
