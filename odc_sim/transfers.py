"""Seconds of everything that moves bytes: unshards, reductions, the copies around them, optimizer and publish.

One unit (the root, or a decoder layer) of n parameters over W ranks has shards of ceil(n / W) elements. A gather moves
K = shard bytes from each of W - 1 peers; a reduction the same in its own dtype. Their times come from a calibration,
else from the cluster's links. Copies, optimizer and publish are bound by device memory: bytes read and written over
(vendor memory rate * the fraction of it that such kernels reached).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from odc_sim.calibration import Calibration, CopyOp, TransferSample
from odc_sim.hardware import Cluster
from odc_sim.topology import Collectives, Topology, Traffic, make_topology

Array = NDArray[np.float64]
Dtype = Literal["fp32", "bf16"]
Provenance = Literal["measured", "extrapolated", "analytic"]

ITEMSIZE_BYTES: dict[Dtype, int] = {"fp32": 4, "bf16": 2}

# Fractions of the vendor's memory rate that FSDP2's own kernels reached on H200 (4.8e12 bytes/s): two of them, torch
# 2.11.0, units of 93,847,552 elements, bf16 parameters, fp32 reduction, one run on 2026-11-29. Each is the bytes that
# `transfer_costs` counts, over the seconds measured, over 4.8e12.
COPY_IN_EFFICIENCY = 0.544  # 10 bytes an element of the shard in 0.1796 ms
COPY_OUT_EFFICIENCY = 0.700  # 4 bytes an element of the unit in 0.1117 ms
PACK_EFFICIENCY = 0.396  # 6 bytes an element of the unit in 0.2962 ms
ADD_EFFICIENCY = 0.865  # 12 bytes an element of the shard in 0.1356 ms
# Not timed on its own: the seconds a held unit must take (0.298 ms) for the measured step of three microbatches without
# reduction until the last (184.4 ms) to come out; 10 bytes an element of the unit.
HOLD_EFFICIENCY = 0.656
# Not measured: the optimizer step is elementwise over fp32 like the add; publishing casts the shard as the copy-in
# does.
OPTIMIZER_EFFICIENCY = ADD_EFFICIENCY
PUBLISH_EFFICIENCY = COPY_IN_EFFICIENCY

# Bytes an element that AdamW with clipping moves: norm pass 4; read p, g, m, v 16; write p, m, v 12; zero g 4.
OPTIMIZER_BYTES = 36
PUBLISH_BYTES = 6  # read fp32, write bf16


class ModelShape(Protocol):
    """What is needed of a model."""

    @property
    def layers(self) -> int:
        """Decoder layers, each an FSDP unit."""

    @property
    def layer_parameters(self) -> int:
        """Of one layer."""

    @property
    def root_parameters(self) -> int:
        """Of the root unit: embedding, final norm, head."""

    @property
    def parameters(self) -> int:
        """Of the whole model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TransferCosts:
    """Seconds per FSDP unit, arrays [layers + 1] with the root first, each beside no compute and with free ports."""

    gather_s: Array
    """all_gather, or one rank's gather."""
    reduce_s: Array
    """reduce_scatter, or one rank's scatter_accumulate."""
    copy_in_s: Array
    """Cast and copy of the rank's shard into the gather's buffer."""
    copy_out_s: Array
    """Gather buffer to parameters, and to bf16 where fp32 was gathered."""
    pack_s: Array
    """bf16 gradients to the reduction's input."""
    add_s: Array
    """The reduced shard added to the gradient; 0 one-sided, where a push adds and FSDP2 keeps no gradient."""
    hold_s: Array
    """A whole unit's gradient added to an unreduced fp32 sum."""
    optimizer_s: float
    """Clipping, AdamW and zeroing over a rank's shard of the model."""
    publish_s: float
    """fp32 shard to the bf16 window that peers read; 0 under collectives."""
    traffic: Traffic
    """The bytes behind gather_s and reduce_s, and how they divide over the topology."""
    provenance: Provenance
    """The weakest of gather_s, reduce_s and the copies."""
    optimizer_provenance: Provenance

    def free(self) -> "TransferCosts":
        """The same with everything taking no time: what is left of a schedule then is imbalance."""
        seconds = ("gather_s", "reduce_s", "copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")
        arrays = {name: np.zeros_like(getattr(self, name)) for name in seconds}
        return replace(self, optimizer_s=0.0, publish_s=0.0, **arrays)


def transfer_costs(
    model: ModelShape,
    cluster: Cluster,
    *,
    world_size: int,
    one_sided: bool,
    gather_dtype: Dtype,
    reduce_dtype: Dtype = "fp32",
    collectives: Collectives = "ring",
    calibration: Calibration | None = None,
) -> TransferCosts:
    """What this model's transfers and copies take on this cluster, sharded over all `world_size` ranks.

    One rank moves nothing, but FSDP2 copies all the same (torch 2.11, `_fsdp_param_group.py`, `_fsdp_collectives.py`):
    parameters to bf16 where they are used, as copy_in does with a shard, and gradients to where a reduction would have
    put them. One-sided schedules leave all of it to FSDP2 then.

    Raises InputError where `world_size` does not fit the cluster.
    """
    topology = make_topology(cluster, world_size, collectives)
    # Only two kinds of unit exist, so everything is computed for [root, layer] and then repeated.
    unit_elements = np.array([model.root_parameters, model.layer_parameters], dtype=np.float64)
    shard_elements = np.ceil(unit_elements / world_size)
    gather_bytes, reduce_bytes = ITEMSIZE_BYTES[gather_dtype], ITEMSIZE_BYTES[reduce_dtype]
    bf16 = gather_dtype == "bf16"
    alone = world_size == 1
    one_sided = one_sided and not alone

    def per_unit(pair_s: Array) -> Array:
        return np.concatenate([pair_s[:1], np.repeat(pair_s[1:], model.layers)])

    copy_provenances: list[Provenance] = []

    def copy_s(op: CopyOp, elements: Array, bytes_per_element: int, efficiency: float) -> Array:
        measured = _copies(calibration, op, gather_dtype) if reduce_dtype == "fp32" else []
        if not measured:
            copy_provenances.append("analytic")
            return per_unit(elements * bytes_per_element / (cluster.device.hbm_bytes_per_s * efficiency))
        seconds, inside = interpolate(*best_times(measured), elements)
        copy_provenances.append("measured" if inside else "extrapolated")
        return per_unit(seconds)

    links_provenance: Provenance = "analytic"
    if alone:
        copied_s = unit_elements * 2 * reduce_bytes / (cluster.device.hbm_bytes_per_s * ADD_EFFICIENCY)
        gather, reduce = _Times(*[np.zeros(2)] * 3), _Times(copied_s, copied_s, np.zeros(2))
    else:
        timed = _Timing(cluster, topology, one_sided, calibration)
        names = ("gather", "scatter_accumulate") if one_sided else ("all_gather", "reduce_scatter")
        gather, gather_provenance = timed.measure(names[0], shard_elements * gather_bytes)
        reduce, reduce_provenance = timed.measure(names[1], shard_elements * reduce_bytes)
        links_provenance = weakest([gather_provenance, reduce_provenance])
    optimizer_s, publish_s, optimizer_provenance = _optimizer(model, cluster, world_size, one_sided, calibration)
    # bf16: cast the fp32 shard (4 + 2), then copy it (2 + 2). fp32: copy only (4 + 4).
    copy_in_s = copy_s("copy_in", shard_elements, 10 if bf16 else 8, COPY_IN_EFFICIENCY)
    copies_s = {
        "copy_in_s": copy_in_s * (not alone),
        # bf16: 2 + 2. fp32: copy (4 + 4), then cast (4 + 2).
        "copy_out_s": copy_in_s if alone else copy_s("copy_out", unit_elements, 4 if bf16 else 14, COPY_OUT_EFFICIENCY),
        "pack_s": copy_s("pack", unit_elements, 2 + reduce_bytes, PACK_EFFICIENCY),
        "add_s": copy_s("add", shard_elements, 8 + reduce_bytes, ADD_EFFICIENCY) * (not one_sided),
        "hold_s": copy_s("hold", unit_elements, 2 + 4 + 4, HOLD_EFFICIENCY),
    }
    return TransferCosts(
        gather_s=per_unit(gather.seconds),
        reduce_s=per_unit(reduce.seconds),
        **copies_s,
        optimizer_s=optimizer_s,
        publish_s=publish_s,
        traffic=Traffic(
            topology=topology,
            gather_bytes=per_unit(shard_elements * gather_bytes),
            reduce_bytes=per_unit(shard_elements * reduce_bytes),
            gather_inside_s=per_unit(gather.inside_s),
            reduce_inside_s=per_unit(reduce.inside_s),
            gather_network_s=per_unit(gather.network_s),
            reduce_network_s=per_unit(reduce.network_s),
        ),
        provenance=weakest([links_provenance, *copy_provenances]),
        optimizer_provenance=optimizer_provenance,
    )


class _Times(NamedTuple):
    """[units] seconds of one operation."""

    seconds: Array
    """In all, the node's ranks at work at once."""
    inside_s: Array
    """Of that, over links inside the node."""
    network_s: Array
    """One rank's own part over the network, alone on its card; 0 for collectives and on one node."""


@dataclass(frozen=True, slots=True)
class _Timing:
    """Times one operation for several shard sizes, from measurements where there are any."""

    cluster: Cluster
    topology: Topology
    one_sided: bool
    calibration: Calibration | None

    def measure(self, op: str, shard_bytes: Array) -> tuple[_Times, Provenance]:
        """Seconds of `op` for shards of these sizes [units], and the weakest provenance among them."""
        world_size = self.topology.world_size
        samples = [] if self.calibration is None else [s for s in self.calibration.transfers if used(s, op)]
        samples = _nearest_world(samples, world_size)
        if not samples:
            return self._across(self._links_s(shard_bytes, self._inside_peers()), shard_bytes), "analytic"
        measured_world = samples[0].world_size
        sizes, times_s = best_times((s.bytes, s.p50_s) for s in samples)
        table_s, inside = interpolate(sizes, times_s, shard_bytes)
        if measured_world == world_size:
            return _Times(table_s, table_s, np.zeros_like(table_s)), "measured" if inside else "extrapolated"
        # A table measured inside one node knows nothing of the network: scale it to the peers reached over links inside
        # the node and leave the rest to `_across`.
        if measured_world > self.cluster.devices_per_node:
            scaled_s = table_s * (world_size - 1) / (measured_world - 1)
            return _Times(scaled_s, scaled_s, np.zeros_like(table_s)), "extrapolated"
        return self._across(table_s * self._inside_peers() / (measured_world - 1), shard_bytes), "extrapolated"

    def _inside_peers(self) -> int:
        """Shards that cross a rank's links inside the node.

        A ring passes all of them on, two-level collectives N times the node's, a gather only its node's.
        """
        topology = self.topology
        if topology.nodes == 1:
            return topology.world_size - 1
        if self.one_sided:
            return topology.group - 1
        return topology.nodes * (topology.group - 1) if topology.collectives == "two-level" else topology.world_size - 1

    def _links_s(self, shard_bytes: Array, peers: int) -> Array:
        link = self.cluster.intra
        if self.one_sided:
            return link.one_sided_latency_s + peers * shard_bytes / link.one_sided_bytes_per_s
        return link.collective_latency_s + peers * shard_bytes / link.collective_bytes_per_s

    def _across(self, inside_s: Array, shard_bytes: Array) -> _Times:
        """The whole transfer over several nodes. D ranks, G a node, N nodes, K shard bytes.

        A ring (arXiv 2601.19362, appendix D) brings (D - 1) K into each node over all its cards, links at work at the
        same time, so the slower of the two decides; a shard crosses N - 1 boundaries. Two-level (arXiv 2310.06003,
        section on PaRO-CC, not overlapped): first each rank collects (N - 1) K from its counterparts, then the node
        shares N (G
        - 1) K. One-sided, each rank moves (D - G) K over its share of the cards while it moves the node's own over
        links.
        """
        inter, topology = self.cluster.inter, self.topology
        if topology.nodes == 1 or inter is None:
            return _Times(inside_s, inside_s, np.zeros_like(inside_s))
        d, g, n = topology.world_size, topology.group, topology.nodes
        if self.one_sided:
            card_bytes_per_s = inter.node_bytes_per_s / g * topology.ranks_per_nic
            alone_s = (d - g) * shard_bytes / card_bytes_per_s
            seconds = inter.latency_s + np.maximum(inside_s, alone_s * topology.ranks_per_nic)
            return _Times(seconds, inside_s, inter.latency_s + alone_s)
        hops_s = (n - 1) * inter.latency_s
        if topology.collectives == "two-level":
            seconds = hops_s + g * (n - 1) * shard_bytes / inter.node_bytes_per_s + inside_s
        else:
            seconds = hops_s + np.maximum(inside_s, (d - 1) * shard_bytes / inter.node_bytes_per_s)
        return _Times(seconds, inside_s, np.zeros_like(inside_s))


def _optimizer(
    model: ModelShape, cluster: Cluster, world_size: int, one_sided: bool, calibration: Calibration | None
) -> tuple[float, float, Provenance]:
    """(optimizer_s, publish_s, provenance of both)."""
    elements = np.array([np.ceil(model.parameters / world_size)])
    hbm_bytes_per_s = cluster.device.hbm_bytes_per_s
    samples = () if calibration is None else calibration.optimizer

    def best_known(
        pairs: list[tuple[float, float]], bytes_per_element: int, efficiency: float
    ) -> tuple[float, Provenance]:
        if not pairs:
            return float(elements[0]) * bytes_per_element / (hbm_bytes_per_s * efficiency), "analytic"
        seconds, inside = interpolate(*best_times(pairs), elements)
        return float(seconds[0]), "measured" if inside else "extrapolated"

    steps = [(float(s.parameters), s.step_s) for s in samples if not s.flagged]
    step_s, step_provenance = best_known(steps, OPTIMIZER_BYTES, OPTIMIZER_EFFICIENCY)
    if not one_sided:
        return step_s, 0.0, step_provenance
    publishes = [(float(s.parameters), s.publish_s) for s in samples if s.publish_s]
    publish_s, publish_provenance = best_known(publishes, PUBLISH_BYTES, PUBLISH_EFFICIENCY)
    return step_s, publish_s, weakest([step_provenance, publish_provenance])


def used(sample: TransferSample, op: str) -> bool:
    """Whether training moves `op` this way: not by slots of the deterministic mode, nor from another dtype."""
    return sample.op == op and not any(part in sample.backend for part in ("deterministic", "overwrite", "from-bf16"))


def _copies(calibration: Calibration | None, op: CopyOp, gather_dtype: Dtype) -> list[tuple[float, float]]:
    """Pairs of elements and seconds that were measured."""
    samples = () if calibration is None else calibration.copies
    return [(float(s.elements), s.p50_s) for s in samples if (s.op, s.dtype, s.flagged) == (op, gather_dtype, False)]


def _nearest_world(samples: list[TransferSample], world_size: int) -> list[TransferSample]:
    """Those measured with the number of ranks nearest to `world_size` (the larger of two equally near)."""
    worlds = {s.world_size for s in samples if s.world_size > 1}
    if not worlds:
        return []
    nearest = min(worlds, key=lambda w: (abs(np.log(w / world_size)), -w))
    return [s for s in samples if s.world_size == nearest]


def best_times(pairs: Iterable[tuple[float, float]]) -> tuple[Array, Array]:
    """From pairs of size and seconds: the sizes, ascending, and the shortest time at each (over several backends)."""
    best: dict[float, float] = {}
    for size, time_s in pairs:
        best[size] = min(time_s, best.get(size, np.inf))
    sizes = sorted(best)
    return np.array(sizes, dtype=np.float64), np.array([best[size] for size in sizes])


def interpolate(sizes: Array, times_s: Array, wanted: Array) -> tuple[Array, bool]:
    """Seconds at the wanted sizes, straight lines in log-log; and whether all of them lie inside the table.

    Above the table the last size's rate holds. Below it the first size's time does: latency, not rate, decides there.
    """
    seconds = np.exp(np.interp(np.log(wanted), np.log(sizes), np.log(times_s)))
    seconds *= np.maximum(wanted / sizes[-1], 1.0)
    inside = bool(np.all((wanted >= sizes[0]) & (wanted <= sizes[-1])))
    return seconds, inside


def weakest(provenances: Sequence[Provenance]) -> Provenance:
    """What a result that rests on all of these may claim."""
    order: tuple[Provenance, ...] = ("analytic", "extrapolated", "measured")
    return min(provenances, key=order.index)
