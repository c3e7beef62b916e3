"""The same minibatches under every sharding strategy, with collectives and on demand.

Where parameters or gradients are divided over all ranks, all ranks wait for each other in every microbatch, as in
`odc simulate`. Where they are divided within nodes, each node is run by itself; where neither is, each rank. One-sided
transfers have nobody wait in any of them. All meet at the end of the minibatch, where the nodes are made equal. Stock
FSDP2's other way to wait less, `collective-deferred`, is among them with full sharding.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.costs import ComputeCosts
from odc_sim.errors import InputError
from odc_sim.execution import Load, execute
from odc_sim.inputs import BOOTSTRAP_STREAM, Inputs, load_inputs
from odc_sim.memory import TOO_TIGHT
from odc_sim.memory_moments import Alive
from odc_sim.metrics import speedup
from odc_sim.models import ModelSpec
from odc_sim.parts import peak_of, plan_of, schedule_of, transfers_of
from odc_sim.plans import Plan
from odc_sim.progress import Progress
from odc_sim.sharding import STRATEGIES, Granularity, Strategy
from odc_sim.sharding_costs import Costs
from odc_sim.study import Study
from odc_sim.topology import make_topology
from odc_sim.transfers import ITEMSIZE_BYTES, Provenance, TransferCosts

WORTH_IT = 0.02
"""A smaller part of the throughput is worth neither traffic nor memory."""
Floats = NDArray[np.float64]
Transport = Literal["collective", "collective-deferred", "odc"]
FULL = Strategy("G", "G", "G")
STOCK: tuple[Transport, ...] = ("collective", "collective-deferred")
"""What needs no transfers of ours."""
LOCKSTEP_POLICY, FREE_POLICY = "lb-micro", "lb-mini"
"""Where ranks wait for each other in every microbatch, and where they do not."""


SETTLED = ("policy", "schedule", "baseline", "pad_microbatches", "batch_minibatches")
"""Fields of a study that strategies settle."""
UNUSED = ("stability", "calibration_error", "plan", "engine", "barrier")
"""Those that are not for this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One strategy in one transport."""

    strategy: str
    transport: Transport
    policy: str
    meets: str
    """Whom a rank waits for in every microbatch."""
    state_bytes: int
    """Parameters, gradients and optimizer state on a rank."""
    peak_bytes: int
    fits: bool
    network_bytes: float
    """What a node sends to others in a minibatch."""
    sync_s: float
    """What making nodes equal takes at the end of a minibatch, beyond what the last backward hides."""
    minibatch_s: float
    samples_per_s_per_device: float
    speedup: float
    """Over ZeRO-3 with collectives."""
    speedup_ci95: tuple[float, float]
    provenance: Provenance
    """Of transfers; between nodes, once a minibatch, always analytic."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingResults:
    """Every strategy that makes sense on this many nodes."""

    inputs: Inputs
    nodes: int
    rows: tuple[Row, ...]
    left_out: tuple[str, ...]
    """Strategies that are another one on these nodes."""

    def fastest(self, *transports: Transport) -> Row | None:
        """Of those that fit well; of all transports where none is named."""
        return max(self._fitting(transports), key=lambda row: row.speedup, default=None)

    def advised(self, *transports: Transport) -> Row | None:
        """Of those about as fast as the fastest, the one that sends least to other nodes; of those, the one that takes
        least memory."""
        fastest = self.fastest(*transports)
        if fastest is None:
            return None
        near = [row for row in self._fitting(transports) if row.speedup >= fastest.speedup * (1 - WORTH_IT)]
        return min(near, key=lambda row: (row.network_bytes, row.peak_bytes), default=None)

    def too_tight(self, *transports: Transport) -> Row | None:
        """The fastest of what fits, but hardly, where other rows fit well."""
        well = self._fitting(transports)
        tight = [row for row in self.rows if row.fits and row not in well and row.transport in transports]
        return max(tight, key=lambda row: row.speedup, default=None)

    def _fitting(self, transports: tuple[Transport, ...]) -> list[Row]:
        fitting = [row for row in self.rows if row.fits and (not transports or row.transport in transports)]
        well_bytes = TOO_TIGHT * self.inputs.machine.cluster.device.memory_bytes
        return [row for row in fitting if row.peak_bytes <= well_bytes] or fitting

    def row(self, strategy: str, transport: Transport) -> Row:
        """One of them.

        Raises:
            KeyError: it is not among them.
        """
        for row in self.rows:
            if (row.strategy, row.transport) == (strategy, transport):
                return row
        raise KeyError((strategy, transport))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        inputs = self.inputs
        return {
            "study": inputs.study.model_dump(mode="json"),
            "model": inputs.model.name,
            "hardware": inputs.machine.name,
            "workload": inputs.workload_name,
            "nodes": self.nodes,
            "max_tokens": inputs.max_tokens,
            "memory_bytes": inputs.machine.cluster.device.memory_bytes,
            "compute": inputs.compute.provenance,
            "left_out": list(self.left_out),
            "rows": [asdict(row) for row in self.rows],
        }


def _check(study: Study) -> None:
    for field in study.changed(*SETTLED, *UNUSED):
        settled = f", which deals by {LOCKSTEP_POLICY} where ranks wait for others in every microbatch, else by "
        settled = f"{settled}{FREE_POLICY}" if field in SETTLED else ""
        flag = f"--{field.replace('_', '-')}"
        raise InputError(f"{flag}: not for odc sharding{settled}; leave it out, or use odc simulate")
    if study.devices < 2:
        raise InputError(f"--devices: got {study.devices}, expected at least 2 to divide anything over")


def _silent(what: str, done: int, total: int) -> None:
    """The default progress: none."""


def shard(study: Study, strategies: tuple[Strategy, ...] = STRATEGIES, progress: Progress = _silent) -> ShardingResults:
    """Run every strategy that is not another one on these nodes, and GGG, which they are compared with.

    >>> shard(Study(minibatches=5, devices=16)).row("IIG", "odc").speedup > 1.1
    True

    Raises:
        InputError: whatever is wrong with the study, or a field that is not for this.
    """
    _check(study)
    inputs = load_inputs(study)
    cluster, model = inputs.machine.cluster, inputs.model
    topology = make_topology(cluster, study.devices, study.collectives)
    wanted = dict.fromkeys((*strategies, FULL))
    chosen = [s for s in wanted if s.differs(node=topology.group, nodes=topology.nodes)]
    left_out = tuple(s.name for s in wanted if s not in chosen)
    over: dict[Granularity, int] = {"N": 1, "I": topology.group, "G": study.devices}

    def costs_of(one_sided: bool) -> dict[Granularity, TransferCosts]:
        return {
            granularity: transfers_of(inputs, one_sided=one_sided, world_size=world_size)
            for granularity, world_size in over.items()
        }

    costs = Costs(
        collective=costs_of(False),
        one_sided=costs_of(True),
        cluster=cluster,
        topology=topology,
        parameters=model.parameters,
        parameter_bytes=ITEMSIZE_BYTES[study.gather_dtype],
        units=model.layers + 1,
        root_share=model.root_parameters / model.parameters,
        hides=not inputs.machine.one_stream,
    )
    dealt: dict[str, tuple[Plan, Load]] = {}
    for name in (LOCKSTEP_POLICY, FREE_POLICY):
        plan = plan_of(inputs, name)
        dealt[name] = plan, Load.of(plan, study.device_speed, study.jitter, study.seed)
    cells: list[tuple[Strategy, Transport]] = []
    for strategy in chosen:
        cells.append((strategy, "collective"))
        if strategy == FULL:
            cells.append((strategy, "collective-deferred"))
        if strategy.meets != "nobody":
            cells.append((strategy, "odc"))
    ran: list[tuple[Row, Floats]] = []
    for number, (strategy, transport) in enumerate(cells):
        progress(f"{strategy.name} {transport}", number, len(cells))
        ran.append(_run(inputs, costs, dealt, strategy, transport))
    (baseline_s,) = (own_s for row, own_s in ran if (row.strategy, row.transport) == (FULL.name, "collective"))
    rng = np.random.default_rng([study.seed, BOOTSTRAP_STREAM])
    rows = []
    for row, own_s in ran:
        found = speedup(baseline_s, own_s, 1, rng)
        rows.append(replace(row, speedup=found.value, speedup_ci95=(found.low, found.high)))
    return ShardingResults(inputs=inputs, nodes=topology.nodes, rows=tuple(rows), left_out=left_out)


def _run(
    inputs: Inputs, costs: Costs, dealt: Mapping[str, tuple[Plan, Load]], strategy: Strategy, transport: Transport
) -> tuple[Row, Floats]:
    study, topology, cluster = inputs.study, costs.topology, inputs.machine.cluster
    one_sided, deferred = transport == "odc", transport == "collective-deferred"
    alone = one_sided or strategy.meets == "nobody"
    policy = FREE_POLICY if alone or deferred else LOCKSTEP_POLICY
    plan, load = dealt[policy]
    schedule = schedule_of(study, "odc" if alone else transport)
    copies = strategy.copies("paper", published=one_sided)  # `odc simulate` charges nothing for those of `mixed`
    transfers = costs.of(strategy, one_sided=one_sided, copies=copies)
    size = study.devices if strategy.meets == "all ranks" else topology.group
    run = execute(load.groups(size), inputs.compute, transfers, cluster, schedule)
    slowest_s = run.makespan_s.reshape(study.minibatches, -1).max(axis=1)
    sync, hides = costs.sync(strategy), costs.hides_sync(strategy, one_sided=one_sided)
    in_step = 1 if alone else size
    backward_s = _last_backward_s(load, inputs.compute, together=in_step)
    exposed_s = sync.exposed_s(inputs.model.layers, backward_s, hides=hides)
    makespan_s = slowest_s + exposed_s
    state = strategy.state(
        inputs.model.parameters,
        study.recipe,
        node=topology.group,
        world_size=study.devices,
        window_bytes=costs.parameter_bytes * one_sided,
        copy_bytes=costs.parameter_bytes,
    )
    peak_bytes = peak_of(inputs, plan, transport, partial(_divided, strategy, state, inputs.model)).total_bytes
    network_bytes = costs.microbatches_bytes(strategy, load.counts, schedule)
    row = Row(
        strategy=strategy.name,
        transport=transport,
        policy=policy,
        meets="nobody" if alone or deferred else strategy.meets,
        state_bytes=sum(state.values()),
        peak_bytes=peak_bytes,
        fits=peak_bytes <= cluster.device.memory_bytes,
        network_bytes=network_bytes + sync.gradients_bytes + sync.parameters_bytes,
        sync_s=float(exposed_s.mean()),
        minibatch_s=float(makespan_s.mean()),
        samples_per_s_per_device=study.minibatch_size / float(makespan_s.mean()),
        speedup=1.0,
        speedup_ci95=(1.0, 1.0),
        provenance=costs.provenance(strategy, one_sided=one_sided),
    )
    return row, makespan_s


def _divided(
    strategy: Strategy, state: Mapping[str, int], model: ModelSpec, alive: Alive, of_full_sharding: dict[str, int]
) -> dict[str, int]:
    """The memory of a moment: parameters that are not divided are not gathered, gradients that are not are not reduced
    in a microbatch, and of gradients there are those that full sharding has by then."""
    found = {**of_full_sharding, **state}
    found["gradients"] = -(-state["gradients"] * alive.gradients // model.parameters)
    if strategy.parameters == "N":
        found["unsharded"] -= alive.gathered
    if strategy.gradients == "N":
        found["staging"] = 0
    return found


def _last_backward_s(load: Load, compute: ComputeCosts, *, together: int) -> Floats:
    """[B] of a layer, in the last microbatch of whoever ends last, for which all wait: a rank, or (`together` of them)
    ranks that take every microbatch in step, at the pace of the slowest."""
    units = (compute.layer_forward, compute.layer_backward)
    forward, backward = (unit(load.tokens, load.squares) / load.speed for unit in units)
    minibatches, most, ranks = load.tokens.shape
    exists = np.arange(most)[None, :, None] < load.counts[:, None, :]
    shape = (minibatches, most, ranks // together, together)
    both_s, backward_s = (
        np.where(exists, each, 0.0).reshape(shape).max(axis=3) for each in (forward + backward, backward)
    )
    counts = load.counts.reshape(minibatches, -1, together).max(axis=2)
    rows, slowest = np.arange(minibatches), both_s.sum(axis=1).argmax(axis=1)
    last = np.maximum(counts[rows, slowest] - 1, 0)
    found: Floats = backward_s[rows, last, slowest]
    return found
