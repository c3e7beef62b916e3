"""Ports that transfers share: a fluid model for the event engine.

A gather pulls from all peers at once, and a scatter_accumulate pushes to all at once, as our kernels do (every program
goes from peer to peer, tile by tile). So a transfer is a flow for each peer: from a rank's egress to a rank's ingress
inside a node, from a network card's egress to a card's ingress between nodes. A flow runs at the smaller of its equal
shares of the two ports.
"""

from collections.abc import Generator, Sequence
from typing import Any

import simpy

from odc_sim.topology import Topology

Process = Generator[simpy.Event, Any, None]


class _Flow:
    __slots__ = ("done", "left_s", "rate", "source", "target")

    def __init__(self, source: int, target: int, left_s: float, done: simpy.Event) -> None:
        self.source, self.target, self.left_s, self.done, self.rate = source, target, left_s, done, 1.0


class PortNetwork:
    """One egress and one ingress port a rank, behind a switch that never blocks, and the same for every network
    card."""

    def __init__(self, env: simpy.Environment, topology: Topology) -> None:
        self.env, self.topology = env, topology
        ports = topology.world_size * 2  # ranks, then cards
        self.egress, self.ingress = [0] * ports, [0] * ports
        self.flows: list[_Flow] = []
        self.updated_s = 0.0
        self.version = 0
        self.inter_node_bytes = 0.0

    def transfer(self, rank: int, inside_s: float, network_s: float, shard_bytes: float, *, pull: bool) -> Process:
        """Move one unit's shards between `rank` and all its peers.

        `inside_s` and `network_s` are what peers of the own node and of other nodes take with free ports; each of the
        latter has a shard of `shard_bytes`, which is counted when it has crossed.
        """
        near, far = self.topology.peers(rank)
        first_card = self.topology.world_size
        ends = [(rank, peer, inside_s) for peer in near or [rank]]
        ends += [(first_card + self.topology.nic(rank), first_card + self.topology.nic(p), network_s) for p in far]
        # seconds a port takes for all its flows, of which each has an equal share: so that is what is left of each
        shares = [len(near) or 1] * (len(near) or 1) + [len(far)] * len(far)
        yield self._start([((b, a) if pull else (a, b), s / n) for (a, b, s), n in zip(ends, shares, strict=True)])
        self.inter_node_bytes += len(far) * shard_bytes

    def shared(self, seconds: float) -> Process:
        """A collective on all ranks, which shares the one port that stands for all with the collective beside it."""
        yield self._start([((0, 0), seconds)])

    def _start(self, flows: Sequence[tuple[tuple[int, int], float]]) -> simpy.Event:
        """Start flows of ((source, target), seconds alone on both ports); the event of all having ended."""
        self._advance()
        started = [_Flow(*ends, seconds, self.env.event()) for ends, seconds in flows]
        for flow in started:
            self.egress[flow.source] += 1
            self.ingress[flow.target] += 1
        self.flows += started
        self._reschedule()
        return self.env.all_of([flow.done for flow in started])

    def _advance(self) -> None:
        elapsed_s = self.env.now - self.updated_s
        self.updated_s = self.env.now
        for flow in self.flows:
            flow.left_s -= elapsed_s * flow.rate

    def _reschedule(self) -> None:
        for flow in self.flows:
            flow.rate = 1.0 / max(self.egress[flow.source], self.ingress[flow.target])
        self.version += 1
        if self.flows:
            self.env.process(self._finish_next(self.version))

    def _finish_next(self, version: int) -> Process:
        first = min(self.flows, key=lambda flow: flow.left_s / flow.rate)
        yield self.env.timeout(max(first.left_s / first.rate, 0.0))
        if version != self.version:
            return  # the flows have changed in the meantime
        self._advance()
        finished = [flow for flow in self.flows if flow is first or flow.left_s <= 1e-15]
        self.flows = [flow for flow in self.flows if flow not in finished]
        for flow in finished:
            self.egress[flow.source] -= 1
            self.ingress[flow.target] -= 1
            flow.done.succeed()
        self._reschedule()
