"""`fully_shard` with its own collectives, once a minibatch: the rival of on-demand communication that needs none of it.

Parameters are gathered in a rank's first forward and gradients reduced in its last backward. In between ranks are on
their own, so their numbers of microbatches may differ. It costs 6 bytes a parameter a rank: the whole model in bf16,
and its gradients in fp32.
"""

from collections.abc import Iterable, Iterator
from typing import TypeVar

from torch import nn
from torch.distributed.fsdp import FSDPModule

from odc_sim.errors import InputError

T = TypeVar("T")


def collective_deferred(model: nn.Module, microbatches: Iterable[T]) -> Iterator[T]:
    """Yield a rank's microbatches of one minibatch, with FSDP2 set for each. One is drawn ahead, to know the last.

    Afterwards all units are sharded again, and reshard as `fully_shard` sets them by default.

    Args:
        model: sharded, the root included. Every rank must have at least one microbatch.
        microbatches: whatever the loop needs.

    Raises:
        InputError: the model is not sharded, or there are no microbatches.
    """
    if not isinstance(model, FSDPModule):
        raise InputError("collective_deferred: got a model whose root is not sharded; call fully_shard on it too")
    iterator = iter(microbatches)
    try:
        current = next(iterator)
    except StopIteration:
        raise InputError(
            "collective_deferred: got no microbatches; the other ranks' collectives would wait for this one: give it "
            "at least one, or use OnDemand"
        ) from None
    # What reshards after forward is gathered in backward again, when other ranks may be elsewhere.
    model.set_reshard_after_forward(False)
    for following in iterator:
        _set_last(model, False)
        yield current
        current = following
    _set_last(model, True)
    yield current
    model.set_reshard_after_forward(True)
    model.set_reshard_after_forward(False, recurse=False)  # the root stays gathered from forward to backward


def _set_last(model: FSDPModule, last: bool) -> None:
    model.set_requires_gradient_sync(last)
    model.set_reshard_after_backward(last)
