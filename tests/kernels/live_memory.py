"""Live bytes of the real training step, without its values: fake tensors on a CPU, in one process of a fake group.

The model is the real one, sharded by fully_shard; transfers move nothing. A tensor counts from when an operation
returned it until Python drops it, as torch's allocator counts on a GPU, where frees do not wait for the device either.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from odc_kernels import varlen
from odc_kernels.fsdp_comm import Push
from odc_kernels.fsdp_deferred import collective_deferred
from odc_kernels.lm import PackedBatch, build_lm, pack, shard


class Live(TorchDispatchMode):
    """Counts bytes of storages that operations return under it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0
        self._peak = 0
        self._known: dict[int, tuple[int, weakref.ref[Any]]] = {}

    def take_peak(self) -> int:
        """The most since the last call."""
        peak, self._peak = self._peak, self.now
        return peak

    def resized(self, storage: torch.UntypedStorage) -> None:
        """FSDP frees and allocates unsharded parameters by resizing them."""
        number = storage._cdata
        if number in self._known:
            before, reference = self._known[number]
            self._known[number] = storage.nbytes(), reference
            self._add(storage.nbytes() - before)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, DTensor):
                self._see(leaf.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        number = storage._cdata
        if number in self._known:
            return

        def gone(_: Any) -> None:
            num_bytes, _reference = self._known.pop(number)
            self._add(-num_bytes)

        self._known[number] = storage.nbytes(), weakref.ref(storage, gone)
        self._add(storage.nbytes())

    def _add(self, num_bytes: int) -> None:
        self.now += num_bytes
        self._peak = max(self._peak, self.now)


class _Flash(torch.autograd.Function):
    """What flash attention saves, [T, heads, head_dim] queries; its backward's fp32 sum of dq included."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        ctx.save_for_backward(q, k, v, out, q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, _gradient: torch.Tensor) -> Any:  # type: ignore[override]
        q, k, v, _out, _sums = ctx.saved_tensors
        accumulated = torch.empty_like(q, dtype=torch.float32)
        gradients = tuple(torch.empty_like(part, memory_format=torch.contiguous_format) for part in (q, k, v))
        del accumulated
        return gradients


class _NoGather:
    """Moves nothing."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None: ...


class _NoPush(Push):
    """Allocates and forgets as the real one, but adds nothing to a window."""

    def __init__(self, world_size: int) -> None:
        nothing: Any = SimpleNamespace(name="", trained=(), world_size=world_size)
        super().__init__(nothing, nothing, 0, nothing, scale=1.0, deterministic=False, replicated=False)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, **__: Any) -> None:
        self._sent = weakref.ref(input_tensor)


def peaks(
    config: str,
    schedule: str,
    minibatches: Sequence[Sequence[int]],
    *,
    world_size: int,
    recompute: bool,
    chunked_loss_tokens: int,
    repeated_keys: bool,
) -> tuple[int, list[int]]:
    """(bytes of the sharded parameters and moments, the peak of each microbatch); minibatches of microbatches' tokens.

    Accumulators of one-sided schedules are in windows, which are not counted.
    """
    live = Live()
    with _fake_group(world_size) as mesh, _counted(live), _attention(repeated_keys), _fake(), live:
        lm = build_lm(config, device=torch.device("cpu"), recompute=recompute, chunked_loss_tokens=chunked_loss_tokens)
        shard(lm, mesh)
        parameters = list(lm.parameters())
        moments = [torch.zeros_like(p.to_local()) for p in parameters for _ in range(2)]
        pushes = _one_sided(lm, parameters, world_size) if schedule.startswith("odc") else []
        state, found = live.now, []
        for microbatches in minibatches:
            batches = [pack([torch.zeros(tokens, dtype=torch.int64)], 1.0) for tokens in microbatches]
            live.take_peak()
            for batch in _in_turn(lm, schedule, batches, pushes):
                lm(batch).backward()
                found.append(live.take_peak())
            lm.zero_grad()
        del moments
    return state, found


def _in_turn(
    lm: nn.Module, schedule: str, batches: Sequence[PackedBatch], pushes: Sequence[Push]
) -> Iterable[PackedBatch]:
    """As `odc_kernels.train_modes` runs them."""
    if schedule == "collective-deferred":
        return collective_deferred(lm, batches)
    return _marked(lm, schedule, batches, pushes)


def _marked(lm: Any, schedule: str, batches: Sequence[PackedBatch], pushes: Sequence[Push]) -> Iterator[PackedBatch]:
    """As `OnDemand` does."""
    for number, batch in enumerate(batches, 1):
        last = number == len(batches)
        for push in pushes:
            push.forget_input()
        if schedule.startswith("odc"):
            lm.set_is_last_backward(last)
        if schedule == "odc-local-sum":
            lm.set_requires_gradient_sync(last)
        yield batch


def _one_sided(lm: nn.Module, parameters: Sequence[nn.Parameter], world_size: int) -> list[Push]:
    pushes: list[Push] = []
    for module in lm.modules():
        if isinstance(module, FSDPModule):
            pushes.append(_NoPush(world_size))
            module.set_custom_all_gather(_NoGather())
            module.set_custom_reduce_scatter(pushes[-1])
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(1.0)
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(_drop)
    return pushes


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


@contextmanager
def _fake_group(world_size: int) -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    try:
        yield init_device_mesh("cpu", (world_size,))
    finally:
        dist.destroy_process_group()


@contextmanager
def _counted(live: Live) -> Iterator[None]:
    resize: Callable[[torch.UntypedStorage, int], Any] = torch.UntypedStorage.resize_

    def counted(storage: torch.UntypedStorage, num_bytes: int) -> Any:
        result = resize(storage, num_bytes)
        live.resized(storage)
        return result

    torch.UntypedStorage.resize_ = counted  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]


@contextmanager
def _attention(repeated_keys: bool) -> Iterator[None]:
    """`varlen.packed_attention` as it is on a GPU."""
    original = varlen.packed_attention

    def flash(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any) -> torch.Tensor:
        if repeated_keys:
            k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        result: torch.Tensor = _Flash.apply(q, k, v)
        return result

    varlen.packed_attention = flash
    try:
        yield
    finally:
        varlen.packed_attention = original
