"""The reference engine: plays every rank's stream program in SimPy.

Each stream of each rank is a process that runs its operations in order; collectives start when the last rank has
arrived and their communicator is free; one-sided transfers can share ports (`ports.py`). About 10,000 to 30,000
device-layers a second: use it for small cases, timelines and as the yardstick of the fast engine.
"""

from collections.abc import Generator, Hashable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import simpy

from odc_sim.durations import CAUSES, Durations, Outcome
from odc_sim.idle import Span, account
from odc_sim.ports import PortNetwork
from odc_sim.program import Op, rank_program
from odc_sim.schedules import Schedule
from odc_sim.topology import one_node

Process = Generator[simpy.Event, Any, None]
STREAMS = ("compute", "copy_in", "unshard", "reduce")


@dataclass(slots=True)
class _Meeting:
    """Ranks that gather at one collective or barrier."""

    everyone: simpy.Event
    done: simpy.Event
    ops: list[Op] = field(default_factory=list)


class _World:
    """All ranks of one minibatch."""

    def __init__(self, durations: Durations, schedule: Schedule, minibatch: int) -> None:
        self.env = simpy.Environment()
        self.schedule = schedule
        ranks = range(durations.world_size)
        self.programs = [list(rank_program(durations, schedule, minibatch, rank)) for rank in ranks]
        self.done = {op: self.env.event() for ops in self.programs for op in ops}
        self.meetings: dict[Hashable, _Meeting] = {}
        self.traffic = durations.traffic
        self.topology = self.traffic.topology if self.traffic else one_node(durations.world_size)
        self.durations = durations
        self.ports = PortNetwork(self.env, self.topology) if schedule.shares_ports else None
        self.inter_node_bytes = 0.0
        for rank, ops in enumerate(self.programs):
            for name in STREAMS:
                self.env.process(self.stream(rank, [op for op in ops if op.stream == name]))
        for name in ("shard", "reduce"):
            # NCCL runs the collectives of one communicator in host order, which is the same on every rank
            keys = list(dict.fromkeys(op.key for ops in self.programs for op in ops if op.communicator == name))
            self.env.process(self.communicator(keys))
        self.env.run()
        unfinished = next((op for op, event in self.done.items() if not event.processed), None)
        assert unfinished is None, f"the program never finished: {unfinished}"

    def meeting(self, key: Hashable) -> _Meeting:
        return self.meetings.setdefault(key, _Meeting(self.env.event(), self.env.event()))

    def stream(self, rank: int, ops: list[Op]) -> Process:
        for op in ops:
            for other in op.waits:
                yield self.done[other]
            if op.issue_s > self.env.now:
                yield self.env.timeout(op.issue_s - self.env.now)
            op.ready_s = op.start_s = self.env.now
            if op.key is not None:
                meeting = self.meeting(op.key)
                meeting.ops.append(op)
                if len(meeting.ops) == op.parties:
                    meeting.everyone.succeed()
                yield meeting.done if op.communicator else meeting.everyone
                op.start_s = op.start_s if op.communicator else self.env.now
            elif op.kind in ("unshard", "reduce"):
                yield from self.move(rank, op)
            elif op.seconds > 0.0:
                yield self.env.timeout(op.seconds)
            op.end_s = self.env.now
            self.done[op].succeed()

    def move(self, rank: int, op: Op) -> Process:
        """One rank's own gather or scatter_accumulate."""
        pull, traffic = op.kind == "unshard", self.traffic
        shard_bytes, alone_s, inside_s, network_s = 0.0, op.seconds, op.seconds, 0.0
        if traffic is not None:
            shard_bytes = float((traffic.gather_bytes if pull else traffic.reduce_bytes)[op.unit])
            if self.topology.nodes > 1:
                alone_s = float((self.durations.gather_s if pull else self.durations.reduce_s)[op.unit])
                inside_s = float((traffic.gather_inside_s if pull else traffic.reduce_inside_s)[op.unit])
                network_s = float((traffic.gather_network_s if pull else traffic.reduce_network_s)[op.unit])
                stretch = op.seconds / alone_s if alone_s > 0.0 else 1.0
                inside_s, network_s = inside_s * stretch, network_s * stretch
        if self.ports is not None and op.seconds > 0.0:
            yield from self.ports.transfer(rank, inside_s, network_s, shard_bytes, pull=pull)
        else:
            yield self.env.timeout(op.seconds)
            if traffic is not None:
                self.inter_node_bytes += len(self.topology.peers(rank)[1]) * shard_bytes

    def cross(self, kind: str, unit: int) -> None:
        """Count what a collective sends from node to node, hop by hop."""
        if self.traffic is None:
            return
        topology = self.topology
        shard_bytes = float((self.traffic.gather_bytes if kind == "unshard" else self.traffic.reduce_bytes)[unit])
        for rank in range(topology.world_size):
            if topology.collectives == "ring":
                follower = (rank + 1) % topology.world_size
                if topology.node(follower) != topology.node(rank):
                    self.inter_node_bytes += (topology.world_size - 1) * shard_bytes
            else:
                counterparts = [p for p in topology.peers(rank)[1] if (p - rank) % topology.group == 0]
                self.inter_node_bytes += len(counterparts) * shard_bytes

    def communicator(self, keys: list[Hashable]) -> Process:
        for key in keys:
            meeting = self.meeting(key)
            yield meeting.everyone
            start_s = self.env.now
            seconds = max(op.seconds for op in meeting.ops)
            if self.ports is not None and seconds > 0.0:
                yield from self.ports.shared(seconds)
            else:
                yield self.env.timeout(seconds)
            self.cross(meeting.ops[0].kind, meeting.ops[0].unit)
            for op in meeting.ops:
                op.start_s, op.seconds = start_s, seconds
            meeting.done.succeed()


def play(durations: Durations, schedule: Schedule, minibatch: int) -> tuple[float, list[Span]]:
    """One minibatch: its makespan in seconds and every span of every stream, rank by rank, in time order."""
    return _play(_World(durations, schedule, minibatch), durations, schedule)


def _play(world: _World, durations: Durations, schedule: Schedule) -> tuple[float, list[Span]]:
    arrivals = [max((op.end_s for op in ops if op.stream == "compute"), default=0.0) for ops in world.programs]
    spans = [span for rank, ops in enumerate(world.programs) for span in account(rank, ops)]
    end_s = max(arrivals, default=0.0)
    for rank, arrival_s in enumerate(arrivals):
        clock_s = arrival_s
        pulls_s = float(durations.reduce_s.sum()) if schedule.local_sum else 0.0
        for kind, cause, seconds in (
            ("wait", "imbalance_minibatch", end_s - arrival_s),
            ("reduce", "exposed_reduce", pulls_s),
            ("optimizer", "optimizer", durations.optimizer_s),
            ("publish", "publish", durations.publish_s),
        ):
            if seconds > 0.0:
                spans.append(Span(rank, "compute", kind, cause, -1, -1, clock_s, clock_s + seconds))
                clock_s += seconds
    pulls_s = float(durations.reduce_s.sum()) if schedule.local_sum else 0.0
    return end_s + pulls_s + durations.optimizer_s + durations.publish_s, spans


def run_event(durations: Durations, schedule: Schedule) -> Outcome:
    """Every minibatch of `durations` under `schedule`."""
    minibatches, ranks = durations.counts.shape
    makespan_s = np.zeros(minibatches)
    idle_s = np.zeros((minibatches, ranks, len(CAUSES)))
    counted = np.zeros(minibatches)
    column = {cause: i for i, cause in enumerate(CAUSES)}
    for b in range(minibatches):
        world = _World(durations, schedule, b)
        makespan_s[b], spans = _play(world, durations, schedule)
        counted[b] = world.inter_node_bytes + (world.ports.inter_node_bytes if world.ports else 0.0)
        if schedule.local_sum and durations.traffic:  # the pulls at the end, every rank from every other
            topology = world.topology
            for rank in range(ranks):
                counted[b] += len(topology.peers(rank)[1]) * float(durations.traffic.reduce_bytes.sum())
        for span in spans:
            if span.stream == "compute" and span.cause:
                idle_s[b, span.rank, column[span.cause]] += span.end_s - span.start_s
    idle_s[:, :, column["compute_slowdown"]] += durations.compute_slowdown_s
    idle_s[:, :, column["host"]] += durations.floor_s
    return Outcome(makespan_s=makespan_s, idle_s=idle_s, inter_node_bytes=counted)
