"""The default engine: the compiled recurrences of `fast_kernel.py`, minibatches spread over threads."""

import os
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from odc_sim.durations import CAUSES, Durations, Outcome
from odc_sim.fast_arrays import make_inputs, make_rules, make_scratch
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
    rules, inputs = make_rules(t, schedule), make_inputs(t)
    makespan_s = np.zeros(minibatches)
    idle_s = np.zeros((minibatches, ranks, len(CAUSES)))
    threads = threads or int(os.environ.get("NUMBA_NUM_THREADS", 0)) or os.cpu_count() or 1
    threads = min(threads, max(minibatches, 1))

    def work(first: int, last: int) -> None:
        scratch = make_scratch(ranks, units, kernel.STATE_ROWS, kernel.PORT_COLUMNS)
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
