"""The default engine: the compiled recurrences of `fast_kernel.py`, minibatches spread over threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from odc_sim.durations import CAUSES, Durations, Outcome
from odc_sim.schedules import Schedule


def run_fast(durations: Durations, schedule: Schedule, threads: int | None = None) -> Outcome:
    """Every minibatch of `durations` under `schedule`; equal to `engine_event.run_event` to rounding while ports are
    uncontended.

    With contended ports each rank's own gather and scatter_accumulate share its links, peers being taken to behave as
    this rank does; the event engine models every flow. `threads`: default one a core (the kernel releases the
    interpreter lock), or NUMBA_NUM_THREADS, which whoever starts one process a core sets (joblib does).
    """
    from odc_sim import fast_kernel as kernel

    t = durations
    minibatches, ranks, units = t.num_minibatches, t.world_size, t.layers + 1
    rules = kernel.Rules(
        one_sided=schedule.one_sided,
        deferred=schedule.deferred,
        local_sum=schedule.local_sum,
        barrier_layer=schedule.one_sided and schedule.barrier == "layer",
        barrier_microbatch=schedule.one_sided and schedule.barrier != "minibatch",
        forward_prefetch=schedule.forward_prefetch,
        backward_prefetch=schedule.backward_prefetch,
        separate_reduce=schedule.separate_reduce,
        overlap_tail=schedule.overlap_tail,
        share_ports=schedule.shares_ports and ranks > 1,
        host_forward_s=float(t.host_forward_s),
        host_backward_s=float(t.host_backward_s),
        end_s=float(t.optimizer_s + t.publish_s),
    )
    inputs = kernel.Inputs(
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
    makespan_s = np.zeros(minibatches)
    idle_s = np.zeros((minibatches, ranks, len(CAUSES)))
    threads = threads or int(os.environ.get("NUMBA_NUM_THREADS", 0)) or os.cpu_count() or 1
    threads = min(threads, max(minibatches, 1))

    def work(first: int, last: int) -> None:
        collectives = 3 * units + 2
        scratch = kernel.Scratch(
            state=np.zeros((kernel.STATE_ROWS, ranks)),
            ports=np.zeros((ranks, kernel.PORT_COLUMNS)),
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
        kernel.run_minibatches(first, last, inputs, scratch, rules, makespan_s, idle_s)

    edges = np.linspace(0, minibatches, threads + 1).astype(int)
    with ThreadPoolExecutor(threads) as pool:
        for done in [pool.submit(work, int(a), int(b)) for a, b in pairwise(edges) if b > a]:
            done.result()
    idle_s[:, :, CAUSES.index("optimizer")] += t.optimizer_s
    idle_s[:, :, CAUSES.index("publish")] += t.publish_s
    idle_s[:, :, CAUSES.index("compute_slowdown")] += t.compute_slowdown_s
    idle_s[:, :, CAUSES.index("host")] += t.floor_s
    return Outcome(makespan_s=makespan_s, idle_s=idle_s)
