"""What a sharding strategy moves and when: in every microbatch, and once a minibatch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from odc_sim.hardware import Cluster
from odc_sim.memory_moments import FP32_BYTES
from odc_sim.schedules import Schedule
from odc_sim.sharding import Granularity, Strategy
from odc_sim.topology import Topology
from odc_sim.transfers import Provenance, TransferCosts, weakest

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sync:
    """What makes nodes equal once a minibatch. Bytes are what one node sends to others."""

    gradients_s: float
    root_share: float
    """Of them, the root's, which are complete last."""
    gradients_bytes: float
    parameters_s: float
    parameters_bytes: float

    def exposed_s(self, layers: int, layer_backward_s: Array, *, hides: bool) -> Array:
        """What of it [...] no compute hides, for a layer's last backward [...] of so long.

        With `hides` gradients are made equal layer by layer in the last backward, as FSDP2's hybrid sharding and DDP
        do; so only the root's remain, or what does not keep up. Parameters come after the optimizer's step.
        """
        last_s = self.gradients_s * self.root_share
        behind_s = self.gradients_s - max(layers - 1, 0) * layer_backward_s * hides
        exposed: Array = np.maximum(last_s, behind_s) + self.parameters_s
        return exposed


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Transfers of units divided over one rank, over a node and over all ranks, in either transport."""

    collective: Mapping[Granularity, TransferCosts]
    one_sided: Mapping[Granularity, TransferCosts]
    cluster: Cluster
    topology: Topology
    """Of all ranks."""
    parameters: int
    parameter_bytes: int
    """Of each as it is gathered."""
    units: int
    """In each of which gradients are made equal by themselves."""
    root_share: float
    """Of the parameters."""
    hides: bool
    """Whether anything runs beside anything, as on GPUs."""

    def hides_sync(self, strategy: Strategy, *, one_sided: bool) -> bool:
        """Whether gradients are made equal behind the last backward.

        Not on demand, where a node's sum of a layer is whole only when every rank of it has pushed its last one, which
        ranks learn at the end of the minibatch (so does `OnDemand`); nor where that backward's gathers have the
        network.
        """
        return self.hides and strategy.parameters != "G" and not (one_sided and strategy.gradients != "N")

    def of(self, strategy: Strategy, *, one_sided: bool, copies: bool) -> TransferCosts:
        """As an engine takes them: gathers as parameters are divided, reductions as gradients are.

        Parameters that are not divided are there already; where `copies` says so, bf16 ones are written once a
        minibatch. Gradients that are not are added up in place, which costs what FSDP2's unreduced ones do, in every
        microbatch.
        """
        costs = self.one_sided if one_sided else self.collective
        gather, reduce = costs[strategy.parameters], costs[strategy.gradients]
        optimizer = costs[strategy.optimizer]
        whole = max((gather, reduce), key=lambda each: each.traffic.topology.world_size)
        nothing = np.zeros_like(gather.gather_s)
        if strategy.parameters == "N":
            gather = replace(gather, copy_out_s=nothing)  # one rank alone has no other cost
        if strategy.gradients == "N":
            reduce = replace(reduce, pack_s=reduce.hold_s, reduce_s=nothing, add_s=nothing)
        return replace(
            gather,
            reduce_s=reduce.reduce_s,
            pack_s=reduce.pack_s,
            add_s=reduce.add_s,
            hold_s=reduce.hold_s,
            optimizer_s=optimizer.optimizer_s,
            publish_s=self._publish_s(strategy.optimizer) if one_sided or copies else 0.0,
            optimizer_provenance=optimizer.optimizer_provenance,
            traffic=replace(
                whole.traffic,
                gather_bytes=gather.traffic.gather_bytes,
                gather_inside_s=gather.traffic.gather_inside_s,
                gather_network_s=gather.traffic.gather_network_s,
                reduce_bytes=reduce.traffic.reduce_bytes,
                reduce_inside_s=reduce.traffic.reduce_inside_s if strategy.gradients != "N" else nothing,
                reduce_network_s=reduce.traffic.reduce_network_s,
            ),
        )

    def _publish_s(self, optimizer: Granularity) -> float:
        """Of writing bf16 parameters where the optimizer's shard is; one rank alone publishes nothing by itself."""
        if optimizer == "N":
            return self.topology.world_size * self.one_sided["G"].publish_s
        return self.one_sided[optimizer].publish_s

    def sync(self, strategy: Strategy) -> Sync:
        """By collectives, whatever microbatches use: all ranks are there anyway."""
        gradients, parameters = FP32_BYTES * self.parameters, self.parameter_bytes * self.parameters
        reduce_s = {over: float(costs.reduce_s.sum()) for over, costs in self.collective.items()}
        gather_s = {over: float(costs.gather_s.sum()) for over, costs in self.collective.items()}
        between_s, between_bytes = self._between(gradients, calls=self.units)
        global_bytes = self._all(gradients)
        # by the tables in sharding.py
        found: dict[tuple[Granularity, Granularity], tuple[float, float]] = {
            ("N", "N"): (2 * reduce_s["G"], 2 * global_bytes),
            ("N", "I"): (reduce_s["I"] + 2 * between_s, 2 * between_bytes),
            ("N", "G"): (reduce_s["G"], global_bytes),
            ("I", "I"): (2 * between_s, 2 * between_bytes),
            ("I", "G"): (between_s, between_bytes),
        }
        gradients_s, gradients_bytes = found.get((strategy.gradients, strategy.optimizer), (0.0, 0.0))
        between_s, between_bytes = self._between(parameters, calls=1)
        found = {
            ("N", "I"): (gather_s["I"], 0.0),
            ("N", "G"): (gather_s["G"], self._all(parameters)),
            ("I", "G"): (between_s, between_bytes),
        }
        parameters_s, parameters_bytes = found.get((strategy.parameters, strategy.optimizer), (0.0, 0.0))
        return Sync(
            gradients_s=gradients_s,
            root_share=self.root_share,
            gradients_bytes=gradients_bytes,
            parameters_s=parameters_s,
            parameters_bytes=parameters_bytes,
        )

    def provenance(self, strategy: Strategy, *, one_sided: bool) -> Provenance:
        """Of what is moved over links, the weakest."""
        costs = self.one_sided if one_sided else self.collective
        moved = {*strategy.letters} - {"N"} or {"G"}
        return weakest([costs[granularity].provenance for granularity in moved])

    def microbatches_bytes(self, strategy: Strategy, counts: NDArray[np.int64], schedule: Schedule) -> float:
        """What one node sends to others in a minibatch's microbatches, `counts` [B, D] of each rank; the mean of B."""
        traffic = (self.one_sided if schedule.one_sided else self.collective)["G"].traffic
        gather_bytes = traffic.gather_bytes * (strategy.parameters == "G")
        reduce_bytes = traffic.reduce_bytes * (strategy.gradients == "G")
        sent_bytes = self.topology.minibatch_bytes(counts, gather_bytes, reduce_bytes, schedule)
        return float(sent_bytes.mean()) / self.topology.nodes

    def _between(self, num_bytes: float, *, calls: int) -> tuple[float, float]:
        """(seconds, bytes of a node) of reduce_scatters or all_gathers between counterparts of so many bytes in all."""
        nodes, inter = self.topology.nodes, self.cluster.inter
        if nodes == 1 or inter is None:
            return 0.0, 0.0
        sent = num_bytes * (nodes - 1) / nodes
        return calls * (nodes - 1) * inter.latency_s + sent / inter.node_bytes_per_s, sent

    def _all(self, num_bytes: float) -> float:
        """Bytes of a node of a collective over all ranks."""
        shard = num_bytes / self.topology.world_size
        return float(self.topology.inter_node_bytes(shard, one_sided=False)) / self.topology.nodes
