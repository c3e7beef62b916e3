"""Prepared copies and streams' order, with a driver and streams that are ours: what GPUs do, without one."""

import ctypes
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")

from odc_kernels import copies, fsdp_comm, signals  # noqa: E402
from odc_kernels.gather import prepare  # noqa: E402
from odc_kernels.scatter_accumulate import prepare_overwrite  # noqa: E402

CUDA = SimpleNamespace(type="cuda", index=0)


class Driver:
    """cuMemcpyBatchAsync that copies at once; `error` is what it returns."""

    error = 0
    calls = 0

    def __call__(self, targets, sources, sizes, count, attributes, indices, kinds, stream):
        self.calls += 1
        assert (count, kinds, stream) == (len(targets), 1, 7)
        assert attributes[0].flags == copies.PREFER_OVERLAP_WITH_COMPUTE
        if not self.error:
            for target, source, size in zip(targets, sources, sizes, strict=True):
                ctypes.memmove(target, source, size)
        return self.error


@pytest.fixture
def driver(monkeypatch):
    ours = Driver()
    monkeypatch.setattr(copies, "_driver", lambda: ours)
    monkeypatch.setattr(copies, "current_stream", lambda device: 7)
    return ours


def window_of(rank, peers, **changes):
    """What transfers look at in a window of `peers` [world_size] tensors."""
    facts = {
        "rank": rank,
        "world_size": len(peers),
        "numel": peers[0].numel(),
        "dtype": peers[0].dtype,
        "device": CUDA,
        "local": peers[rank],
        "reaches_all": True,
        "pointers": tuple(peer.data_ptr() for peer in peers),
        "write": lambda values, peer, offset: peers[peer][offset : offset + values.numel()].copy_(values),
    }
    return SimpleNamespace(**facts | changes)


def unit_of(numel):
    owner = torch.nn.Linear(1, 1, bias=False)
    shard = SimpleNamespace(owner=owner, attribute="weight", parameter=owner.weight, name="weight", numel=numel)
    return SimpleNamespace(name="layer", numel=numel, shards=[shard], trained=[shard], device=torch.device("cpu"))


IDLE = SimpleNamespace(transfer=lambda: None)


def test_prepared_reads_are_those_of_a_gather(driver):
    peers = [torch.arange(10.0) + 100 * rank for rank in range(3)]
    whole = torch.full((12,), -1.0)
    assert prepare(window_of(1, peers), 4, 5).read(whole.data_ptr())
    assert whole.tolist() == [5, 6, 7, 8, -1, -1, -1, -1, 205, 206, 207, 208]  # rank 1's own shard is left alone


def test_prepared_writes_go_to_the_senders_slot(driver):
    peers = [torch.zeros(3 * 6) for _ in range(3)]
    gradients = torch.arange(12.0) + 1
    assert prepare_overwrite(window_of(1, peers), 4, 2).write(gradients.data_ptr())
    slot = slice(6 + 2, 6 + 2 + 4)
    assert [peer[slot].tolist() for peer in peers] == [[1, 2, 3, 4], [0] * 4, [9, 10, 11, 12]]
    assert sum(peer.count_nonzero().item() for peer in peers) == 8


@pytest.mark.parametrize(
    ("changes", "numel"),
    [({"device": torch.device("cpu")}, 4), ({"reaches_all": False}, 4), ({}, 0), ({"world_size": 1}, 4)],
)
def test_nothing_is_prepared_where_copies_do_not_go_in_batches(changes, numel):
    window = window_of(0, [torch.zeros(12), torch.zeros(12)], **changes)
    assert prepare(window, numel, 0) is None
    assert prepare_overwrite(window, numel, 0) is None


def test_small_shards_of_many_peers_are_left_to_the_kernel():
    window = window_of(0, [torch.zeros(64) for _ in range(8)])
    assert prepare(window, 8, 0) is None
    assert prepare_overwrite(window, 8, 0) is not None


def test_an_old_driver_and_the_default_stream_refuse_and_errors_are_raised(driver, monkeypatch):
    batch = copies.Batch([1], [0], 64, CUDA)
    driver.error = 1
    with pytest.raises(RuntimeError, match="cuMemcpyBatchAsync of 1 copies of 64 bytes: CUDA driver error 1"):
        batch.read(0)
    monkeypatch.setattr(copies, "current_stream", lambda device: 0)
    assert not batch.write(0)
    monkeypatch.setattr(copies, "current_stream", lambda device: 7)
    monkeypatch.setattr(copies, "_driver", lambda: None)
    assert not batch.read(0)
    assert driver.calls == 1


def test_a_units_gather_is_prepared_and_falls_back(driver, monkeypatch):
    peers = [torch.arange(8.0), torch.arange(8.0) + 100]
    unit = unit_of(4)
    gather = fsdp_comm.Gather(unit, 0, window_of(0, peers), 2, fsdp_comm.Drift([unit]), IDLE)
    others = []
    monkeypatch.setattr(fsdp_comm, "gather", lambda window, output, **options: others.append(options))
    group = SimpleNamespace(size=lambda: 2)
    for buffer in (torch.zeros(8), torch.zeros(8)):  # another buffer each time
        buffer[:4] = peers[0][2:6]
        gather(buffer, buffer[:4], group)
        assert buffer.tolist() == [2, 3, 4, 5, 102, 103, 104, 105]
    gather(torch.zeros(9), buffer[:4], group)  # of the wrong size: `gather` has the words for it
    monkeypatch.setattr(copies, "_driver", lambda: None)
    for _ in range(2):
        gather(buffer, buffer[:4], group)
    assert others == [{"offset": 2, "skip_self": True}] * 3
    assert driver.calls == 2


def test_a_units_first_push_is_prepared_and_later_ones_add(driver, monkeypatch):
    peers = [torch.full((2 * 8,), -1.0) for _ in range(2)]
    added = []
    monkeypatch.setattr(fsdp_comm, "scatter_accumulate", lambda window, whole, **options: added.append(options))
    push = fsdp_comm.Push(unit_of(4), window_of(1, peers), 2, IDLE, scale=0.5, deterministic=True, replicated=False)
    gradients = torch.arange(8.0)
    push(gradients[:4], gradients, None, None)
    assert [peer[10:14].tolist() for peer in peers] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert added == []
    push(gradients[:4], gradients, None, None)
    push.pushed = False
    push(gradients[:4], gradients.bfloat16(), None, None)  # a cast is no copy engine's
    expected = {"offset": 2, "scale": 1.0, "deterministic": True}
    lean, plain = {"overwrite": False, "lean": True}, {"overwrite": True, "lean": False}
    assert added == [expected | lean, expected | plain]
    assert driver.calls == 1


class Stream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)


def test_a_stream_waits_once_after_each_wait_for_the_others(monkeypatch):
    streams, current = {7: Stream(), 8: Stream()}, [7]
    monkeypatch.setattr(signals, "current_stream", lambda device: current[0])
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams[current[0]])
    window = SimpleNamespace(device=torch.device("cpu"))
    ours = signals.Signals(window, [0])
    assert ours.transfer() is None  # on a CPU there is no stream
    ours._on_gpu = True
    ours.transfer()
    assert streams[7].waited == []  # no wait has been
    for event in ("first", "second"):
        ours._passed_with(event)
        for handle in (7, 7, 8, 7, 8):
            current[0] = handle
            assert ours.transfer() is streams[handle]
    assert streams[7].waited == streams[8].waited == ["first", "second"]
