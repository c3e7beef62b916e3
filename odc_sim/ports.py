"""Ports that transfers share: a fluid model for the event engine.

A gather visits its peers one after another, starting at the next rank, and so does a scatter_accumulate (as our
kernels do, so that ranks that start together never meet at a port). Each visit is a flow from one rank's egress to
another's ingress. A flow runs at the smaller of its equal shares of the two ports.
"""

from collections.abc import Generator
from typing import Any

import simpy


class _Flow:
    __slots__ = ("done", "left_s", "rate", "source", "target")

    def __init__(self, source: int, target: int, left_s: float, done: simpy.Event) -> None:
        self.source, self.target, self.left_s, self.done, self.rate = source, target, left_s, done, 1.0


class PortNetwork:
    """One egress and one ingress port a rank, behind a switch that never blocks."""

    def __init__(self, env: simpy.Environment, world_size: int) -> None:
        self.env, self.world_size = env, world_size
        self.flows: list[_Flow] = []
        self.updated_s = 0.0
        self.version = 0

    def transfer(self, rank: int, seconds: float, *, pull: bool) -> Generator[simpy.Event, Any, None]:
        """Move one unit's shards between `rank` and all its peers; `seconds` is what that takes with free ports."""
        peers = [(rank + k) % self.world_size for k in range(1, self.world_size)] or [rank]
        for peer in peers:
            source, target = (peer, rank) if pull else (rank, peer)
            flow = _Flow(source, target, seconds / len(peers), self.env.event())
            self._advance()
            self.flows.append(flow)
            self._reschedule()
            yield flow.done

    def _advance(self) -> None:
        elapsed_s = self.env.now - self.updated_s
        self.updated_s = self.env.now
        for flow in self.flows:
            flow.left_s -= elapsed_s * flow.rate

    def _reschedule(self) -> None:
        egress, ingress = [0] * self.world_size, [0] * self.world_size
        for flow in self.flows:
            egress[flow.source] += 1
            ingress[flow.target] += 1
        for flow in self.flows:
            flow.rate = 1.0 / max(egress[flow.source], ingress[flow.target])
        self.version += 1
        if self.flows:
            self.env.process(self._finish_next(self.version))

    def _finish_next(self, version: int) -> Generator[simpy.Event, Any, None]:
        first = min(self.flows, key=lambda flow: flow.left_s / flow.rate)
        yield self.env.timeout(max(first.left_s / first.rate, 0.0))
        if version != self.version:
            return  # the flows have changed in the meantime
        self._advance()
        finished = [flow for flow in self.flows if flow is first or flow.left_s <= 1e-15]
        self.flows = [flow for flow in self.flows if flow not in finished]
        for flow in finished:
            flow.done.succeed()
        self._reschedule()
