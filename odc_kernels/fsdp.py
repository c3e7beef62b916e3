"""On-demand communication for a `fully_shard` model: three lines in a training loop.

    model = ...                                         # fully_shard applied to it
    odc = OnDemand(model)                               # 1
    for microbatches in minibatches:
        for microbatch in odc.minibatch(microbatches):  # 2: any number of them, a different one on each rank, also none
            loss(model, microbatch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        odc.publish()                                   # 3: in place of optimizer.zero_grad()

Each rank reads the parameters it needs from the others and adds its gradients to theirs, without their help; ranks meet
twice a minibatch. Hosts meet ahead of their devices, none waits for its own, and devices wait for each other: gradients
are there for what follows on the current stream. They are what `fully_shard` gives: summed over microbatches, divided
by the number of ranks. A rank that dies or stays away makes every other one raise, at the latest after `timeout_s`
seconds, with its name.

With torch.amp.GradScaler, call `scaler.scale(...)` once on every rank before the first step: it refuses to unscale on a
rank that had no microbatch yet. `publish()` also after a step that it skipped.
"""

from collections.abc import Callable, Iterable, Iterator
from types import TracebackType
from typing import Literal, Self, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from odc_kernels.fsdp_comm import Observe, StockGather, StockReduceScatter
from odc_kernels.fsdp_faults import Meeting
from odc_kernels.fsdp_layout import find_mesh, find_units
from odc_kernels.fsdp_units import Alone, Sharded
from odc_sim.errors import InputError

T = TypeVar("T")
Phase = Literal["training", "stepping", "failed", "closed"]


class OnDemand:
    """One-sided gathers and gradient pushes for a model that `fully_shard` was applied to, root included.

    All ranks of the model's mesh open it, publish and close it together, and end each minibatch together. In between
    each is on its own: forwards without backward may differ as well (an evaluation, say).

    Args:
        model: sharded over one mesh, of one dimension or (replicate, shard). It may be on a GPU or on a CPU.
        gradient_divide_factor: what sums of gradients are divided by; None: the number of ranks, as FSDP2 does. In
            place of FSDP2's own setting, which must not be used meanwhile.
        timeout_s: how long a rank waits for others before it raises. A rank's lead in a minibatch counts. A rank whose
            device waits that long for another's, which died or is stuck although its host had come, ends itself.
        deterministic: gradients are bitwise repeatable, for world_size times the memory of the accumulators. A unit's
            first push of a minibatch is then made by copy engines, which neither wait for the compute nor slow it.
        overlap: let the next forward of a minibatch run beside the last pushes of this backward.
        local_sum: keep gradients on each rank and push them once, in the last microbatch: 4 bytes a parameter a rank.
        observe: called with each unit's two transfers; what it returns is called in their place (to time them, say).

    Raises:
        InputError: the model is sharded in a way that this does not cover.
        WindowError: a rank did not come, or cannot go on; every rank raises.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        gradient_divide_factor: float | None = None,
        timeout_s: float = 60.0,
        deterministic: bool = False,
        overlap: bool = True,
        local_sum: bool = False,
        observe: Observe | None = None,
    ) -> None:
        mesh = find_mesh(model)
        self._overlap = overlap
        self._local_sum = local_sum
        self._modules = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self._roots = list(_roots(model))
        self._replicated = mesh.replicas is not None
        self._minibatch = 0
        self._phase: Phase = "training"
        self._parameters = [p for p in model.parameters() if isinstance(p, DTensor) and p.requires_grad]
        _refuse_hooks(model, self._parameters, allowed=0)
        divisor = float(
            dist.get_world_size(mesh.everyone) if gradient_divide_factor is None else gradient_divide_factor
        )
        if not divisor:
            raise InputError("OnDemand: got gradient_divide_factor 0, expected what sums of gradients are divided by")
        if mesh.world_size == 1 and self._replicated:
            raise InputError("OnDemand: got a mesh that shards over 1 rank; nothing is gathered, use DDP")
        self._model = model
        self._device = self._parameters[0].to_local().device if self._parameters else torch.device("cpu")
        self._meeting = Meeting(mesh.everyone, timeout_s=timeout_s)
        self._state: Sharded | Alone
        try:
            if mesh.world_size == 1:
                self._state = Alone(self._parameters, divisor=divisor)
            else:
                units = find_units(model, mesh, self._meeting)
                self._state = Sharded(
                    units,
                    mesh,
                    deterministic=deterministic,
                    divisor=divisor,
                    timeout_s=timeout_s,
                    observe=observe,
                )
                self._restrain(True)
            self._state.publish()
            self._meet_devices("open of OnDemand")
        except BaseException:
            self._abandon()
            raise

    def minibatch(self, microbatches: Iterable[T]) -> Iterator[T]:
        """Yield the microbatches of this rank, then end the minibatch.

        Knows which microbatch is the last, so one is drawn ahead. Leaving the loop early does not end the minibatch:
        call `end_of_minibatch` then.
        """
        self._expect("training", "minibatch()")
        if self._state.begin():
            self._reshard()
        iterator = iter(microbatches)
        try:
            current = next(iterator)
        except StopIteration:
            self.end_of_minibatch()
            return
        for following in iterator:
            self._mark(last=False)
            yield current
            current = following
        self._mark(last=True)
        yield current
        self.end_of_minibatch()

    def end_of_minibatch(self) -> None:
        """Wait until every rank comes here, and set `.grad` of every trained parameter, also without a microbatch.

        On GPUs gradients are filled on the current stream, once every rank's last push has ended.

        Raises:
            WindowError: a rank did not come, or a rank's parameters are not what it published.
        """
        self._expect("training", "end_of_minibatch()")
        self._mark(last=True)
        _refuse_hooks(self._model, self._parameters, allowed=self._state.num_hooks)
        self._minibatch += 1
        self._state.set_gradients()
        self._meet_devices(f"end of minibatch {self._minibatch}", self._state.problem, all_alive=True)
        self._phase = "stepping"
        self._meeting.watch.expose(f"optimizer step of minibatch {self._minibatch}", self._state.signals)
        self._state.drain()

    def publish(self) -> None:
        """Drop the gradients and show the parameters to the other ranks; returns when every rank has come here.

        After the optimizer's step, and after anything else that changes parameters (loading a checkpoint).

        Raises:
            InputError, WindowError: gradients would be lost, on this or another rank; a forward before had parameters
                that were not published; or a rank did not come.
        """
        if self._phase != "stepping":
            self._expect("training", "publish()")
            lost = "has gradients that no end_of_minibatch() has summed" if self._state.pushed() else None
            if self._device.type == "cuda":  # pragma: cuda-only
                torch.cuda.synchronize(self._device)
            self._meet("publish before the end of a minibatch", problem=lost or self._state.problem())
        self._reshard()
        self._state.publish()
        self._meet_devices(f"publish after minibatch {self._minibatch}")
        self._phase = "training"

    def close(self) -> None:
        """Give the model back to FSDP2's collectives, without gradients. Closing twice does nothing.

        Raises:
            WindowError: a rank did not come; the model is given back all the same.
        """
        if self._phase == "closed":
            return
        waiting = self._phase != "failed"
        try:
            self._restore()
            if waiting:
                self._state.close()
        finally:
            self._meeting.watch.close()

    @property
    def window_bytes(self) -> dict[str, int]:
        """Memory of this rank that torch's allocator does not count, by what it is for."""
        return self._state.window_bytes()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:  # Peers may not come any more; waiting for them would hide the error.
            self._abandon()

    def _mark(self, *, last: bool) -> None:
        self._state.forget_inputs()
        for root in self._roots:
            root.set_is_last_backward(last or not self._overlap)
            if self._local_sum:
                root.set_requires_gradient_sync(last)
                if self._replicated:
                    root.set_requires_all_reduce(False)

    def _meet_devices(
        self, what: str, problem: Callable[[], str | None] = lambda: None, *, all_alive: bool = False
    ) -> None:
        """What is enqueued from here on finds all ranks' work until here finished; hosts do not wait for devices."""
        signals = self._state.signals
        if signals is not None:
            signals.signal()
        self._meet(what, problem=problem(), all_alive=all_alive)
        if signals is not None:
            signals.wait()
        self._meeting.watch.expose(what, signals, until_passed=True)

    def _meet(self, what: str, *, problem: str | None = None, all_alive: bool = False) -> None:
        try:
            self._meeting.exchange(what, None, problem=problem)
            if all_alive:  # else collectives of the step would fail, or hang, without saying why
                self._meeting.require(what)
        except BaseException:
            self._phase = "failed"
            self._meeting.watch.expose(None)
            if self._state.signals is not None:
                self._state.signals.release()
            raise

    def _expect(self, phase: Phase, what: str) -> None:
        if self._phase != phase:
            now = {
                "training": "no minibatch has ended; call end_of_minibatch() first",
                "stepping": "a minibatch has ended; call publish() first",
                "failed": "ranks could not go on together",
                "closed": "it is closed",
            }[self._phase]
            raise InputError(f"OnDemand.{what}: {now}")

    def _reshard(self) -> None:
        for module in self._modules:
            module.reshard()  # a forward without backward leaves the root gathered

    def _abandon(self) -> None:
        self._phase = "failed"
        self.close()

    def _restrain(self, on: bool) -> None:
        """Whether FSDP2 leaves sums as they are, reduces nothing across replicas, and counts unused parameters in."""
        for module in self._modules:
            module.set_force_sum_reduction_for_comms(on)
            module.set_gradient_divide_factor(1.0 if on else None)
            if self._replicated:
                module.set_requires_all_reduce(not on, recurse=False)
            if hasattr(module, "set_reduce_scatter_unused_params"):  # torch 2.13
                module.set_reduce_scatter_unused_params(on, recurse=False)

    def _restore(self) -> None:
        self._phase = "closed"
        for root in self._roots:
            root.set_is_last_backward(True)
            if self._local_sum:
                root.set_requires_gradient_sync(True)
        for module in self._modules:
            module.set_custom_all_gather(StockGather())
            module.set_custom_reduce_scatter(StockReduceScatter())
        if hasattr(self, "_state"):
            self._state.uninstall()
        self._restrain(False)


def _roots(module: nn.Module) -> Iterator[FSDPModule]:
    """The outermost FSDP modules."""
    if isinstance(module, FSDPModule):
        yield module
        return
    for child in module.children():
        yield from _roots(child)


def _refuse_hooks(model: nn.Module, parameters: list[DTensor], *, allowed: int) -> None:
    """An optimizer that steps inside of backward would see gradients that are not there yet."""
    for parameter in parameters:
        if len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()) > allowed:
            name = next(name for name, other in model.named_parameters() if other is parameter)
            raise InputError(
                f"OnDemand: {name} has a post-accumulate-grad hook (an optimizer in backward, or a second OnDemand on "
                "the model?); gradients are complete only at the end of the minibatch"
            )
