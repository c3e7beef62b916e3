"""What gaps between compute spans consist of where host and device are one, as on a CPU: see `emulation.on_one_stream`.

Nothing runs beside compute, so a gap is what happens in it, one thing after another: transfers, each with the copies
and the Python before it, and at the end the copy-out of what is computed next.
"""

from collections.abc import Iterator, Sequence

from odc_sim.idle import Span

EXPOSED = {"unshard": "exposed_unshard", "reduce": "exposed_reduce"}


def parts_on_one_stream(
    transfers: Sequence[Span], after: Span | None, start_s: float, end_s: float, arrived_s: float | None
) -> Iterator[tuple[float, str, Span | None]]:
    """(end, cause, transfer in it) of each part of a gap from `start_s` to `end_s`, in order.

    Args:
        transfers: of the rank, in time order.
        after: the compute span that ends the gap; None: the minibatch ends.
        start_s: in seconds, as all times.
        end_s: when the gap ends.
        arrived_s: when the last rank has finished its microbatches, if this rank waits for that here.
    """
    for transfer in transfers:
        if start_s <= transfer.start_s < end_s:
            yield min(transfer.end_s, end_s), EXPOSED[transfer.kind], transfer
    if arrived_s is not None:
        yield min(arrived_s, end_s), "imbalance_minibatch", None
    computes = after is not None and after.microbatch >= 0
    yield end_s, "exposed_unshard" if computes else "host", None
