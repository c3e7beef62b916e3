"""Who is in which node, and how many bytes each kind of transfer sends between nodes.

D ranks, G a node, N = D / G nodes, K bytes a shard. Totals over the whole cluster for one unit's unshard or reduce
(arXiv 2601.19362, appendix D, gives them per rank; arXiv 2310.06003 the two-level collective):

| transfer | between nodes, all ranks together |
|---|---|
| flat ring | N (D - 1) K: every node's boundary is crossed by all shards but one |
| two-level | D (N - 1) K: each rank exchanges with its counterparts, the rest stays inside |
| one-sided | D (D - G) K: each rank moves every remote shard itself |
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.errors import InputError
from odc_sim.schedules import Schedule

if TYPE_CHECKING:
    from odc_sim.hardware import Cluster

Array = NDArray[np.float64]
Collectives = Literal["ring", "two-level"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Ranks fill nodes one after another; each rank uses the network card(s) nearest to it."""

    world_size: int
    group: int
    """G: ranks in a node."""
    nics_per_node: int
    collectives: Collectives = "ring"

    @property
    def nodes(self) -> int:
        """N."""
        return self.world_size // self.group

    @property
    def ranks_per_nic(self) -> float:
        """How many ranks share a card (at least 1; a rank may also have several)."""
        return max(1.0, self.group / self.nics_per_node)

    def node(self, rank: int) -> int:
        """The node of a rank."""
        return rank // self.group

    def nic(self, rank: int) -> int:
        """The card, numbered over the cluster, that a rank's traffic leaves through."""
        cards = min(self.nics_per_node, self.group)
        return self.node(rank) * cards + (rank % self.group) * cards // self.group

    def peers(self, rank: int) -> tuple[list[int], list[int]]:
        """The others of its node, from the next one on; those of other nodes, from its counterpart in the next node on.

        In this order ranks that start together never meet at a port.
        """
        node, local = self.node(rank), rank % self.group
        turns = [(local + turn) % self.group for turn in range(self.group)]
        near = [node * self.group + other for other in turns[1:]]
        nodes = [(node + step) % self.nodes for step in range(1, self.nodes)]
        return near, [other * self.group + turn for other in nodes for turn in turns]

    def inter_node_bytes(self, shard_bytes: Array | float, one_sided: bool) -> Array:
        """Bytes [...] between nodes, over all ranks, of one unit's transfer with shards of `shard_bytes` [...]."""
        d, g, n = self.world_size, self.group, self.nodes
        factor = d * (d - g) if one_sided else d * (n - 1) if self.collectives == "two-level" else n * (d - 1) * (n > 1)
        return np.asarray(shard_bytes, dtype=np.float64) * factor

    def minibatch_bytes(
        self, counts: NDArray[np.int64], gather_bytes: Array, reduce_bytes: Array, schedule: Schedule
    ) -> Array:
        """Bytes [B] between nodes in each minibatch, for `counts` [B, D] microbatches and shard bytes [U] of the
        units."""
        layers = slice(1, None)
        gather = self.inter_node_bytes(gather_bytes, schedule.one_sided)
        reduce = self.inter_node_bytes(reduce_bytes, schedule.one_sided)
        once = np.minimum(counts, 1)
        # the root stays unsharded from forward to backward; layers are gathered for both
        microbatch_bytes = gather[0] + 2.0 * gather[layers].sum()
        if schedule.deferred:
            microbatch_bytes = gather.sum()
        gathers = once if schedule.deferred else counts
        reduces = np.ones_like(counts) if schedule.local_sum else once if schedule.deferred else counts
        # a rank's part of either is 1 / D of the cluster's
        total: Array = gathers.mean(axis=1) * microbatch_bytes + reduces.mean(axis=1) * reduce.sum()
        return total


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """What one unit's unshard and reduce move, arrays [U] with the root first."""

    topology: Topology
    gather_bytes: Array
    """K: a rank's shard as gathered."""
    reduce_bytes: Array
    """A rank's shard of the gradient."""
    gather_inside_s: Array
    """The part over links inside the node."""
    reduce_inside_s: Array
    gather_network_s: Array
    """One rank's part between nodes, alone on its card; 0 for collectives and on one node."""
    reduce_network_s: Array


def one_node(world_size: int) -> Topology:
    """All ranks in one node."""
    return Topology(world_size=world_size, group=max(world_size, 1), nics_per_node=1)


def make_topology(cluster: "Cluster", world_size: int, collectives: Collectives = "ring") -> Topology:
    """How `world_size` ranks lie on a cluster.

    Raises:
        InputError: more ranks than the described node holds, or a count that does not fill whole nodes.
    """
    if world_size < 1:
        raise InputError(f"got {world_size} devices, expected at least 1")
    size = cluster.devices_per_node
    if world_size > size and cluster.inter is None:
        raise InputError(
            f"got {world_size} devices, expected at most {size}: {cluster.name} describes one node; "
            f"to use more, add an [inter] section to its TOML (odc hardware {cluster.name} --toml > mine.toml; "
            "odc hardware h100-ib --toml shows one)"
        )
    if world_size > size and world_size % size:
        raise InputError(
            f"got {world_size} devices, expected a multiple of {size}, the devices of one node of {cluster.name}"
        )
    nics = cluster.inter.nics_per_node if cluster.inter else 1
    group = min(world_size, size)
    return Topology(world_size=world_size, group=group, nics_per_node=nics, collectives=collectives)
