"""Ports that transfers share: a fluid model for the event engine.

A gather visits its peers one after another, starting at the next rank, and so does a scatter_accumulate (as our kernels
do, so that ranks that start together never meet at a port). Peers of the own node and of other nodes are visited at the
same time, the ones over links, the others over network cards. Each visit is a flow from one port to another: a rank's
egress to a rank's ingress inside a node, a card's egress to a card's ingress between nodes. A flow runs at the smaller
of its equal shares of the two ports.
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

        `inside_s` and `network_s` are what peers of the own node and of other nodes take with free ports; each of
        these has a shard of `shard_bytes`, which is counted when it has crossed.
        """
        near, far = self.topology.peers(rank)
        parts = [self.env.process(self._visit(rank, near or [rank], inside_s, pull))]
        if far:
            parts.append(self.env.process(self._visit_far(rank, far, network_s, shard_bytes, pull)))
        yield self.env.all_of(parts)

    def shared(self, seconds: float) -> Process:
        """A collective on all ranks, which shares the one port that stands for all with the collective beside it."""
        yield from self._flow(0, 0, seconds)

    def _visit(self, rank: int, peers: Sequence[int], seconds: float, pull: bool) -> Process:
        for peer in peers:
            source, target = (peer, rank) if pull else (rank, peer)
            yield from self._flow(source, target, seconds / len(peers))

    def _visit_far(self, rank: int, peers: Sequence[int], seconds: float, shard_bytes: float, pull: bool) -> Process:
        first_card = self.topology.world_size
        own = first_card + self.topology.nic(rank)
        for peer in peers:
            other = first_card + self.topology.nic(peer)
            yield from self._flow(*((other, own) if pull else (own, other)), seconds / len(peers))
            self.inter_node_bytes += shard_bytes

    def _flow(self, source: int, target: int, seconds: float) -> Process:
        flow = _Flow(source, target, seconds, self.env.event())
        self._advance()
        self.flows.append(flow)
        self.egress[source] += 1
        self.ingress[target] += 1
        self._reschedule()
        yield flow.done

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
