"""What an engine executes: how long every compute unit and every transfer takes, for a batch of minibatches.

Letters: B minibatches, M most microbatches of a rank, D ranks, L layers, U = L + 1 FSDP units (0 the root, 1..L the
layers), K classes of compute. Compute slots of a microbatch are numbered 0 (embedding), 1..L (layers), L + 1 (head
and loss).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from odc_sim.topology import Traffic

Array = NDArray[np.float64]

CAUSES = (
    "imbalance_layer",
    "imbalance_microbatch",
    "imbalance_minibatch",
    "port_contention",
    "exposed_unshard",
    "exposed_reduce",
    "compute_slowdown",
    "host",
    "optimizer",
    "publish",
)
"""Why a rank is not busy; every idle second has exactly one cause. Their order is the column order of
`Outcome.idle_s`."""

CAUSE_WORDS = {
    "imbalance_layer": "layer",
    "imbalance_microbatch": "microbatch",
    "imbalance_minibatch": "minibatch",
    "port_contention": "ports",
    "exposed_unshard": "unshard",
    "exposed_reduce": "reduce",
    "compute_slowdown": "slowdown",
    "host": "host",
    "optimizer": "optimizer",
    "publish": "publish",
}
"""What tables call them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Durations:
    """Seconds of everything that happens in B minibatches. Arrays of transfers are per FSDP unit, [U]."""

    counts: NDArray[np.int64]
    """[B, D] microbatches of each rank."""
    forward_s: Array
    """[B, M, K, D] compute as executed: slowdown by a concurrent transfer and floor included."""
    backward_s: Array
    """[B, M, K, D]; recomputation included."""
    slot_class: NDArray[np.int64]
    """[L + 2] class (0..K-1) of each compute slot."""
    gather_s: Array
    """[U] all_gather, or the gather of one rank with free ports, beside no compute."""
    reduce_s: Array
    """[U] reduce_scatter, or the scatter_accumulate of one rank with free ports."""
    copy_in_s: Array
    """[U] cast and copy of the rank's own shard into the gather's buffer (copy-in stream)."""
    copy_out_s: Array
    """[U] gather buffer to parameters (compute stream)."""
    pack_s: Array
    """[U] gradients to the reduction's input (compute stream)."""
    add_s: Array
    """[U] reduced gradient added into `.grad`, from a rank's second reduction on (reduce stream)."""
    hold_s: Array
    """[U] an unreduced gradient cast or added into its fp32 sum (compute stream)."""
    gather_forward_stretch: Array
    """[B, M, D] how many times longer a layer's gather takes beside that microbatch's forward compute (>= 1)."""
    gather_backward_stretch: Array
    """[B, M, D] the same for gathers beside the backward."""
    reduce_stretch: Array
    """[B, M, D] the same for reductions."""
    host_forward_s: float
    """Seconds the host needs to enqueue one unit's forward; 0 when it is always ahead."""
    host_backward_s: float
    optimizer_s: float
    publish_s: float
    """Publishing the new parameters to the windows (one-sided schedules)."""
    busy_s: Array
    """[B, D] uncontended compute."""
    compute_slowdown_s: Array
    """[B, D] what `forward_s` and `backward_s` hold beyond that because of concurrent transfers."""
    floor_s: Array
    """[B, D] and because a launch-bound unit does not get shorter with its tokens."""
    copy_out_stretch: float = 1.0
    """How many times longer a layer's copy-out takes in a backward, where the reduction of the layer after it has just
    begun."""
    host_lead_s: float = 0.0
    """By which the host begins a minibatch before the device does, still at the end of the one before."""
    traffic: Traffic | None = None
    """The bytes behind the transfers and the ports they take; None: one node, every rank a port in and a port out."""

    @property
    def num_minibatches(self) -> int:
        """B."""
        return int(self.counts.shape[0])

    @property
    def world_size(self) -> int:
        """D."""
        return int(self.counts.shape[1])

    @property
    def layers(self) -> int:
        """L."""
        return int(self.slot_class.shape[0]) - 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What an engine found. `busy_s + idle_s.sum(causes) == makespan_s` for every minibatch and rank."""

    makespan_s: Array
    """[B] from the first start to the last end, optimizer and publish included."""
    idle_s: Array
    """[B, D, causes] in the order of `CAUSES`."""
    inter_node_bytes: Array | None = None
    """[B] sent between nodes by all ranks, as counted transfer by transfer; only the event engine counts."""


def no_stretch(minibatches: int, microbatches: int, ranks: int) -> Array:
    """[B, M, D] of ones: transfers that compute does not slow down."""
    return np.ones((minibatches, microbatches, ranks))
