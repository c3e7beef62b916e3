"""What the compiled engine works on: a schedule as numbers, durations as contiguous arrays, and working memory."""

from typing import Any, NamedTuple

import numpy as np

from odc_sim.durations import Array, Durations
from odc_sim.schedules import Schedule


class Rules(NamedTuple):
    """A `Schedule` as numbers."""

    one_sided: bool
    deferred: bool
    local_sum: bool
    barrier_layer: bool
    barrier_microbatch: bool
    forward_prefetch: int
    backward_prefetch: int
    separate_reduce: bool
    overlap_tail: bool
    share_ports: bool
    host_forward_s: float
    host_backward_s: float
    host_lead_s: float
    copy_out_stretch: float
    end_s: float
    """Optimizer and publish."""


class Inputs(NamedTuple):
    """The arrays of a `Durations`."""

    counts: Any  # [B, D]
    forward_s: Array  # [B, M, K, D]
    backward_s: Array
    slot_class: Any  # [L + 2]
    unit_s: Array  # [7, U]
    gather_forward_stretch: Array  # [B, M, D]
    gather_backward_stretch: Array
    reduce_stretch: Array


class Scratch(NamedTuple):
    """Working arrays of one minibatch, made once. X: collectives of one microbatch."""

    state: Array  # [STATE_ROWS, D]
    ports: Array  # [D, PORT_COLUMNS]
    gate: Array  # [D]
    ready: Array  # [D]
    never: Array  # [D] of -inf
    copy_outs: Array  # [U, D]
    gather_end: Array  # [U, D]
    gather_extra: Array  # [U, D] what sharing ports added
    gather_issue: Array  # [U, D]
    gather_at: Any  # [U] position of the pending gather in the log of collectives, -1 if none is pending
    mb: Any  # [D]
    log_free: Array  # [X, D] from when on rank d and the communicator waited for peers only
    log_start: Array  # [X]
    log_cause: Any  # [X]
    log_communicator: Any  # [X]
    chain: Array  # [2] when each communicator is free
    reductions: Any  # [D]
    counter: Any  # [2] collectives logged, log position of the last reduction


def make_rules(t: Durations, schedule: Schedule) -> Rules:
    """The rules of `schedule` and the scalars of `t`."""
    share_ports = schedule.shares_ports and t.world_size > 1
    ahead = schedule.backward_prefetch
    if share_ports and ahead == 0 and t.host_backward_s == 0.0:
        # With the host ahead and no common communicator, when a gather is issued changes nothing; but transfers that
        # share ports have to be started in the order of time.
        ahead = 1
    return Rules(
        one_sided=schedule.one_sided,
        deferred=schedule.deferred,
        local_sum=schedule.local_sum,
        barrier_layer=schedule.one_sided and schedule.barrier == "layer",
        barrier_microbatch=schedule.one_sided and schedule.barrier != "minibatch",
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=ahead,
        separate_reduce=schedule.separate_reduce,
        overlap_tail=schedule.overlap_tail,
        share_ports=share_ports,
        host_forward_s=float(t.host_forward_s),
        host_backward_s=float(t.host_backward_s),
        host_lead_s=float(t.host_lead_s),
        copy_out_stretch=float(t.copy_out_stretch),
        end_s=float(t.optimizer_s + t.publish_s),
    )


def make_inputs(t: Durations) -> Inputs:
    """The arrays of `t`, contiguous."""
    return Inputs(
        counts=np.ascontiguousarray(t.counts, dtype=np.int64),
        forward_s=np.ascontiguousarray(t.forward_s, dtype=np.float64),
        backward_s=np.ascontiguousarray(t.backward_s, dtype=np.float64),
        slot_class=np.ascontiguousarray(t.slot_class, dtype=np.int64),
        unit_s=np.array(
            [t.gather_s, t.reduce_s, t.copy_in_s, t.copy_out_s, t.pack_s, t.add_s, t.hold_s], dtype=np.float64
        ),
        gather_forward_stretch=np.ascontiguousarray(t.gather_forward_stretch, dtype=np.float64),
        gather_backward_stretch=np.ascontiguousarray(t.gather_backward_stretch, dtype=np.float64),
        reduce_stretch=np.ascontiguousarray(t.reduce_stretch, dtype=np.float64),
    )


def make_scratch(ranks: int, units: int, state_rows: int, port_columns: int) -> Scratch:
    """Working memory for minibatches of `ranks` ranks; the kernel says how many rows and columns it names."""
    collectives = 3 * units + 2
    return Scratch(
        state=np.zeros((state_rows, ranks)),
        ports=np.zeros((ranks, port_columns)),
        gate=np.zeros(ranks),
        ready=np.zeros(ranks),
        never=np.full(ranks, -np.inf),
        copy_outs=np.zeros((units, ranks)),
        gather_end=np.zeros((units, ranks)),
        gather_extra=np.zeros((units, ranks)),
        gather_issue=np.zeros((units, ranks)),
        gather_at=np.zeros(units, dtype=np.int64),
        mb=np.zeros(ranks, dtype=np.int64),
        log_free=np.zeros((collectives, ranks)),
        log_start=np.zeros(collectives),
        log_cause=np.zeros(collectives, dtype=np.int64),
        log_communicator=np.zeros(collectives, dtype=np.int64),
        chain=np.zeros(2),
        reductions=np.zeros(ranks, dtype=np.int64),
        counter=np.zeros(2, dtype=np.int64),
    )
