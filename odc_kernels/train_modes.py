"""How each schedule runs the microbatches of a minibatch, and what it does after the optimizer's step."""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc_kernels.fsdp import OnDemand
from odc_kernels.fsdp_comm import Observe, StockGather, StockReduceScatter
from odc_kernels.fsdp_deferred import collective_deferred

T = TypeVar("T")


class Mode(Protocol):
    """A schedule at work on a sharded model."""

    publishes: bool
    """Whether the new parameters have to be shown to other ranks."""

    def microbatches(self, batches: Sequence[T]) -> Iterator[T]:
        """Yield each; after the last one, gradients are complete on every rank."""
        ...

    def publish(self) -> None:
        """Drop the gradients and show the parameters."""
        ...

    def close(self) -> None:
        """With all ranks, after the last minibatch."""
        ...

    def abandon(self) -> None:
        """Without the others, after an error."""
        ...


class Collective:
    """`fully_shard` as it is, or with its collectives once a minibatch."""

    publishes = False

    def __init__(self, model: nn.Module, observe: Observe, *, deferred: bool) -> None:
        self._model = model
        self._deferred = deferred
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_all_gather(observe("unshard", [module], StockGather()))
                module.set_custom_reduce_scatter(observe("reduce", [module], StockReduceScatter()))

    def microbatches(self, batches: Sequence[T]) -> Iterator[T]:
        """Yield each."""
        return collective_deferred(self._model, batches) if self._deferred else iter(batches)

    def publish(self) -> None:
        """Drop the gradients."""
        self._model.zero_grad()

    def close(self) -> None:
        """Nothing is open."""

    def abandon(self) -> None:
        """Nothing is open."""


class OneSided:
    """`OnDemand`."""

    publishes = True

    def __init__(self, model: nn.Module, observe: Observe, *, local_sum: bool, timeout_s: float) -> None:
        self._odc = OnDemand(model, local_sum=local_sum, timeout_s=timeout_s, observe=observe)

    def microbatches(self, batches: Sequence[T]) -> Iterator[T]:
        """Yield each; then ranks meet."""
        return self._odc.minibatch(batches)

    def publish(self) -> None:
        """Ranks meet again."""
        self._odc.publish()

    def close(self) -> None:
        """Give the model back."""
        self._odc.close()

    def abandon(self) -> None:
        """Give the model back, without waiting."""
        self._odc.__exit__(RuntimeError, None, None)


def make_mode(schedule: str, model: nn.Module, observe: Observe, *, timeout_s: float) -> Mode:
    """A schedule by its name, on a sharded model. Collective."""
    makers: dict[str, Callable[[], Mode]] = {
        "collective": lambda: Collective(model, observe, deferred=False),
        "collective-deferred": lambda: Collective(model, observe, deferred=True),
        "odc": lambda: OneSided(model, observe, local_sum=False, timeout_s=timeout_s),
        "odc-local-sum": lambda: OneSided(model, observe, local_sum=True, timeout_s=timeout_s),
    }
    return makers[schedule]()
