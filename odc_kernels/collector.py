"""Python's garbage collector, when it is convenient.

Left alone, it looks through every object of the process, the model's included, in the middle of a minibatch: half a
second in which nothing is enqueued, once in some dozen minibatches of half a second each.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def collected_between() -> Iterator[Callable[[], None]]:
    """No collection but when the function it yields is called; objects that exist already are never looked at."""
    was_on = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield _collect
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def _collect() -> None:
    gc.collect()  # quick: what there was before is frozen
