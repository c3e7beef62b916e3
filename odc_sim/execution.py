"""From a plan and costs to the durations an engine executes."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from odc_sim.costs import ComputeCosts
from odc_sim.durations import CAUSES, Array, Durations, Outcome
from odc_sim.hardware import Cluster
from odc_sim.overlap import beside, stretch, waiting
from odc_sim.plans import Plan
from odc_sim.schedules import Schedule
from odc_sim.transfers import TransferCosts


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What each rank has to compute, [B, M, D]: the part of a plan that engines need."""

    counts: NDArray[np.int64]
    """[B, D]"""
    tokens: Array
    squares: Array
    """Sum of squared sample lengths."""
    speed: Array
    """How fast each microbatch runs, relative to the cost model: device speed and jitter."""

    @classmethod
    def of(cls, plan: Plan, device_speed: tuple[float, ...] = (), jitter: float = 0.0, seed: int = 0) -> "Load":
        """`jitter` is the standard deviation of the log of a factor of mean 1 on each microbatch's compute time."""
        tokens = plan.padded(plan.tokens().astype(np.float64))
        speed = np.ones_like(tokens)
        if device_speed:
            speed *= np.asarray(device_speed)
        if jitter > 0.0:
            noise = np.random.default_rng([seed, 1]).standard_normal(tokens.shape)
            speed /= np.exp(jitter * noise - 0.5 * jitter * jitter)
        squares = plan.padded(plan.squares().astype(np.float64))
        return cls(counts=plan.counts(), tokens=tokens, squares=squares, speed=speed)

    def groups(self, size: int) -> "Load":
        """Every `size` ranks by themselves, as minibatches of their own: of each minibatch one a group, in order."""

        def apart(values: Array) -> Array:
            minibatches, most, ranks = values.shape
            grouped = values.reshape(minibatches, most, ranks // size, size)
            return grouped.swapaxes(1, 2).reshape(-1, most, size)

        return Load(
            counts=self.counts.reshape(-1, size),
            tokens=apart(self.tokens),
            squares=apart(self.squares),
            speed=apart(self.speed),
        )

    def part(self, rows: slice | NDArray[np.int64]) -> "Load":
        """Some of its minibatches: a slice, or their numbers."""
        counts = self.counts[rows]
        most = int(counts.max(initial=0))
        return Load(
            counts=counts,
            tokens=self.tokens[rows, :most],
            squares=self.squares[rows, :most],
            speed=self.speed[rows, :most],
        )


def build_durations(
    load: Load, compute: ComputeCosts, transfers: TransferCosts, cluster: Cluster, schedule: Schedule
) -> Durations:
    """Price every unit of `load`: compute with its slowdown beside transfers, transfers with theirs beside compute."""
    counts, most = load.counts, load.tokens.shape[1]
    index = np.arange(most)[None, :, None]
    exists = index < counts[:, None, :]
    last = index == counts[:, None, :] - 1
    first_unshard = (exists & (index == 0)) if schedule.deferred else exists
    backward_unshard = np.zeros_like(exists) if schedule.deferred else exists
    reduces = np.zeros_like(exists) if schedule.local_sum else exists & (last | (not schedule.deferred))

    def seconds(cost: str) -> tuple[Array, Array]:
        unit = getattr(compute, cost)
        pure = np.where(exists, unit(load.tokens, load.squares) / load.speed, 0.0)
        return pure, np.maximum(pure, np.where(exists, unit.floor_s, 0.0))

    names = ("embedding", "layer", "head")
    forward, backward = ([seconds(f"{n}_{way}") for n in names] for way in ("forward", "backward"))
    weights = np.array([1.0, compute.layers, 1.0])
    pure = sum(w * (f[0] + b[0]) for w, f, b in zip(weights, forward, backward, strict=True))
    floored = sum(w * (f[1] + b[1]) for w, f, b in zip(weights, forward, backward, strict=True))

    # one rank alone is FSDP2's under every schedule (transfers.py)
    overlap = cluster.overlap["odc" if schedule.one_sided and counts.shape[1] > 1 else "collective"]
    gather_s, reduce_s, copy_in_s, copy_out_s, add_s = (
        float(seconds[1]) if compute.layers else 0.0
        for seconds in (
            transfers.gather_s,
            transfers.reduce_s,
            transfers.copy_in_s,
            transfers.copy_out_s,
            transfers.add_s,
        )
    )
    layer_forward, layer_backward = forward[1][1], backward[1][1]
    forward_stretch = np.where(first_unshard, stretch(gather_s, layer_forward, overlap.unshard.transfer), 1.0)
    backward_stretch = np.where(backward_unshard, stretch(gather_s, layer_backward, overlap.unshard.transfer), 1.0)
    reduce_stretch = np.where(reduces, stretch(reduce_s, layer_backward, overlap.reduce.transfer), 1.0)
    adds = reduces & (np.cumsum(reduces, axis=1) > 1)  # a first reduction sets .grad
    slow_forward = beside(
        layer_forward,
        [
            (np.where(first_unshard, copy_in_s, 0.0), overlap.copy_in),
            (gather_s * forward_stretch * first_unshard, overlap.unshard.compute),
        ],
    )
    slow_backward = beside(
        layer_backward,
        [
            (np.where(backward_unshard, copy_in_s, 0.0), overlap.copy_in),
            (gather_s * backward_stretch * backward_unshard, overlap.unshard.compute),
            (reduce_s * reduce_stretch * reduces, overlap.reduce.compute),
            (np.where(adds, add_s, 0.0), overlap.add),
        ],
    )
    if not schedule.one_sided and gather_s > 0.0:
        # ranks are in lockstep wherever they meet at every layer: in these microbatches of each of them
        slow_forward = _in_step(slow_forward, overlap.waiting, first_unshard)
        slow_backward = _in_step(slow_backward, overlap.waiting, reduces)
    copy_out_stretch = float(stretch(copy_out_s, np.array(reduce_s), overlap.copy_out))
    slowdown = compute.layers * (slow_forward - layer_forward + slow_backward - layer_backward)

    return Durations(
        counts=counts,
        forward_s=np.stack([forward[0][1], slow_forward, forward[2][1]], axis=2),
        backward_s=np.stack([backward[0][1], slow_backward, backward[2][1]], axis=2),
        slot_class=np.array([0, *[1] * compute.layers, 2]),
        gather_s=transfers.gather_s,
        reduce_s=transfers.reduce_s,
        copy_in_s=transfers.copy_in_s,
        copy_out_s=transfers.copy_out_s,
        pack_s=transfers.pack_s,
        add_s=transfers.add_s,
        hold_s=transfers.hold_s,
        gather_forward_stretch=forward_stretch,
        gather_backward_stretch=backward_stretch,
        reduce_stretch=reduce_stretch,
        host_forward_s=cluster.host.forward_s(one_sided=schedule.one_sided, deferred=schedule.deferred),
        host_backward_s=cluster.host.seconds_per_unit_backward,
        optimizer_s=transfers.optimizer_s,
        publish_s=transfers.publish_s,
        copy_out_stretch=copy_out_stretch,
        # what of the last minibatch the host does not wait for
        host_lead_s=transfers.optimizer_s + transfers.publish_s,
        busy_s=np.asarray(pure.sum(axis=1)),
        compute_slowdown_s=slowdown.sum(axis=1),
        floor_s=np.asarray((floored - pure).sum(axis=1)),
        traffic=transfers.traffic,
    )


def _in_step(seconds: Array, slowdown: float, meets: NDArray[np.bool_]) -> Array:
    """`waiting` of compute [B, M, D] in each rank's n-th microbatch that `meets` the other ranks', for every n."""
    result = seconds.copy()
    ordinal = np.where(meets, np.cumsum(meets, axis=1) - 1, -1)
    for n in range(int(ordinal.max(initial=-1)) + 1):
        rows, _, ranks = nth = np.nonzero(ordinal == n)
        together = np.zeros((seconds.shape[0], seconds.shape[2]))
        present = np.zeros(together.shape, dtype=np.bool_)
        together[rows, ranks] = seconds[nth]
        present[rows, ranks] = True
        result[nth] = waiting(together, slowdown, present)[rows, ranks]
    return result


@dataclass(frozen=True, kw_only=True, slots=True)
class Executed:
    """One schedule's run over all minibatches, ranks summed."""

    makespan_s: Array
    """[B]"""
    busy_s: Array
    """[B] rank-seconds"""
    idle_s: Array
    """[B, causes] rank-seconds"""
    bubble_makespan_s: Array
    """[B] with transfers, host, optimizer and per-microbatch fixed costs free"""
    bubble_busy_s: Array
    """[B] rank-seconds"""
    inter_node_bytes: Array
    """[B] sent between nodes by all ranks"""


def _without_host(cluster: Cluster) -> Cluster:
    return replace(cluster, host=cluster.host.idle())


def _parts(load: Load) -> Iterator[slice]:
    """Slices of minibatches small enough that their durations take about 200 MB."""
    minibatches, most, ranks = load.tokens.shape
    size = max(1, 1_000_000 // max(most * ranks, 1))
    for start in range(0, minibatches, size):
        yield slice(start, min(start + size, minibatches))


def execute(
    load: Load,
    compute: ComputeCosts,
    transfers: TransferCosts,
    cluster: Cluster,
    schedule: Schedule,
    *,
    engine: str = "fast",
) -> Executed:
    """Run every minibatch of `load` under `schedule`, and once more compute-only for the bubble rate."""
    from odc_sim.engine_fast import run_fast

    def run(durations: Durations) -> Outcome:
        if engine == "event":
            from odc_sim.engine_event import run_event

            return run_event(durations, schedule)
        return run_fast(durations, schedule)

    variable = compute.without_fixed()
    columns: list[tuple[Array, ...]] = []
    for rows in _parts(load):
        part = load.part(rows)
        durations = build_durations(part, compute, transfers, cluster, schedule)
        outcome = run(durations)
        bare = build_durations(part, variable, transfers.free(), _without_host(cluster), schedule)
        bubble = run(bare)
        columns.append(
            (
                outcome.makespan_s,
                durations.busy_s.sum(axis=1),
                outcome.idle_s.sum(axis=1),
                bubble.makespan_s,
                bare.busy_s.sum(axis=1),
            )
        )
    makespan_s, busy_s, idle_s, bubble_makespan_s, bubble_busy_s = (
        np.concatenate(c) for c in zip(*columns, strict=True)
    )
    assert idle_s.shape[1] == len(CAUSES)
    return Executed(
        makespan_s=makespan_s,
        busy_s=busy_s,
        idle_s=idle_s,
        bubble_makespan_s=bubble_makespan_s,
        bubble_busy_s=bubble_busy_s,
        inter_node_bytes=transfers.traffic.topology.minibatch_bytes(
            load.counts, transfers.traffic.gather_bytes, transfers.traffic.reduce_bytes, schedule
        ),
    )
