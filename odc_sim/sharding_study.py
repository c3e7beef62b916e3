"""The same minibatches under every sharding strategy, with collectives and on demand.

Where parameters or gradients are divided over all ranks, all ranks wait for each other in every microbatch, as in
`odc simulate`. Where they are divided within nodes, each node is run by itself; where neither is, each rank. One-sided
transfers have nobody wait in any of them. All meet at the end of the minibatch, where the nodes are made equal.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.api import peak_of, plan_of, schedule_of
from odc_sim.errors import InputError
from odc_sim.execution import Load, execute
from odc_sim.inputs import BOOTSTRAP_STREAM, Inputs, load_inputs
from odc_sim.metrics import Speedup, speedup
from odc_sim.plans import Plan, unequal_counts
from odc_sim.progress import Progress
from odc_sim.sharding import Granularity, Strategy
from odc_sim.sharding_costs import Costs
from odc_sim.study import Study
from odc_sim.topology import make_topology
from odc_sim.transfers import Provenance, transfer_costs, weakest

WORTH_IT = 0.02
"""Of speedup; less is not worth traffic or memory."""
Floats = NDArray[np.float64]
Transport = Literal["collective", "odc"]
BASELINE = ("GGG", "collective")
LOCKSTEP_POLICY, FREE_POLICY = "lb-micro", "lb-mini"
"""Where ranks wait for each other in every microbatch, and where they do not."""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingResults:
    """Every strategy that makes sense on this many nodes."""

    inputs: Inputs
    nodes: int
    rows: tuple[Row, ...]
    provenance: Provenance
    """Of transfers in microbatches, the weakest."""
    left_out: tuple[str, ...]
    """Strategies that are another one where there is one node."""

    @property
    def best(self) -> Row | None:
        """The fastest that fits."""
        return max((row for row in self.rows if row.fits), key=lambda row: row.speedup, default=None)

    def advised(self, *transports: Transport) -> Row | None:
        """Of those that fit and are about as fast as the fastest of them, the one that sends least to other nodes; of
        those, the one that takes least memory."""
        rows = [row for row in self.rows if row.fits and row.transport in transports]
        fastest = max((row.speedup for row in rows), default=0.0)
        near = [row for row in rows if row.speedup >= fastest - WORTH_IT]
        return min(near, key=lambda row: (row.network_bytes, row.peak_bytes), default=None)

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
        study = self.inputs.study
        inputs = self.inputs
        about = {"model": inputs.model.name, "hardware": inputs.machine.name, "workload": inputs.workload_name}
        sizes = {"devices": study.devices, "nodes": self.nodes, "minibatch_size": study.minibatch_size}
        return about | sizes | {"recipe": study.recipe, "rows": [asdict(row) for row in self.rows]}


def refuse_fields(flags: Iterable[str]) -> None:
    """Refuse what one may ask `odc simulate`, and what would change nothing here.

    Raises:
        InputError: one of these was given.
    """
    for flag in flags:
        field = flag.removeprefix("--").replace("-", "_")
        if field == "sharding":
            raise InputError(f"{flag}: every strategy is run here; choose some with --strategy")
        if field in ("policy", "schedule", "baseline", "pad_microbatches"):
            raise InputError(
                f"{flag}: here it is {LOCKSTEP_POLICY} where ranks wait for others in every microbatch, else "
                f"{FREE_POLICY}, over GGG with collectives; odc simulate compares policies and schedules"
            )
        if field in ("stability", "calibration_error", "plan", "engine", "barrier"):
            raise InputError(f"{flag}: not for odc sharding; leave it out, or use odc simulate")


def shard(study: Study, strategies: tuple[Strategy, ...], progress: Progress) -> ShardingResults:
    """Run every strategy; on one node those that divide nothing over nodes and ranks differently.

    Raises:
        InputError: whatever is wrong with the study.
    """
    inputs = load_inputs(study)
    cluster, model = inputs.machine.cluster, inputs.model
    topology = make_topology(cluster, study.devices, study.collectives)
    chosen = [s for s in strategies if topology.nodes > 1 or not s.divides_nodes]
    left_out = tuple(s.name for s in strategies if s not in chosen)
    over: dict[Granularity, int] = {"N": 1, "I": topology.group, "G": study.devices}

    def costs_of(one_sided: bool) -> dict[Granularity, Any]:
        return {
            granularity: transfer_costs(
                model,
                cluster,
                world_size=world_size,
                one_sided=one_sided,
                gather_dtype=study.gather_dtype,
                collectives=study.collectives,
                calibration=inputs.machine.calibration,
            )
            for granularity, world_size in over.items()
        }

    costs = Costs(
        collective=costs_of(False),
        one_sided=costs_of(True),
        cluster=cluster,
        topology=topology,
        parameters=model.parameters,
    )
    plans: dict[str, Plan] = {name: plan_of(inputs, name) for name in (LOCKSTEP_POLICY, FREE_POLICY)}
    makespans_s: dict[tuple[str, str], Floats] = {}
    partial: dict[tuple[str, str], Row] = {}
    cells = [(s, t) for s in chosen for t in ("collective", "odc") if t == "collective" or s.meets != "nobody"]
    for number, (strategy, transport) in enumerate(cells):
        progress(f"{strategy.name} {transport}", number, len(cells))
        key = strategy.name, transport
        partial[key], makespans_s[key] = _run(inputs, costs, plans, strategy, transport)
    used = (*costs.collective.values(), *costs.one_sided.values())
    provenance = weakest([each.provenance for each in used])
    rng = np.random.default_rng([study.seed, BOOTSTRAP_STREAM])
    rows = []
    for key, row in partial.items():
        found: Speedup = speedup(makespans_s[BASELINE], makespans_s[key], 1, rng)
        rows.append(_compared(row, found))
    return ShardingResults(
        inputs=inputs, nodes=topology.nodes, rows=tuple(rows), provenance=provenance, left_out=left_out
    )


def _compared(row: Row, found: Speedup) -> Row:
    return replace(row, speedup=found.value, speedup_ci95=(found.low, found.high))


def _run(
    inputs: Inputs, costs: Costs, plans: Mapping[str, Plan], strategy: Strategy, transport: str
) -> tuple[Row, Floats]:
    study, topology = inputs.study, costs.topology
    one_sided = transport == "odc"
    free = one_sided or strategy.meets == "nobody"
    policy = FREE_POLICY if free else LOCKSTEP_POLICY
    plan = plans[policy]
    assert free or unequal_counts(plan) is None
    load = Load.of(plan, study.device_speed, study.jitter, study.seed)
    schedule = schedule_of(study, "odc" if free else "collective")
    transfers = costs.of(strategy, one_sided=one_sided)
    size = study.devices if strategy.meets == "all ranks" else topology.group
    makespan_s = np.zeros(study.minibatches)
    for first in range(0, study.devices, size):
        run = execute(load.ranks(first, first + size), inputs.compute, transfers, inputs.machine.cluster, schedule)
        makespan_s = np.maximum(makespan_s, run.makespan_s)
    sync = costs.sync(strategy)
    backward_s = inputs.compute.layer_backward(load.tokens, load.squares)[load.tokens > 0].mean()
    exposed_s = sync.exposed_s(inputs.model.layers, float(backward_s))
    makespan_s = makespan_s + exposed_s
    state_bytes = strategy.state_bytes(
        inputs.model.parameters,
        study.recipe,
        node=topology.group,
        world_size=study.devices,
        published=one_sided,
    )
    peak = peak_of(inputs, plan, "odc" if one_sided else "collective")
    sharded = ("parameters", "gradients", "optimizer", "published_window")
    peak_bytes = state_bytes + sum(b for name, b in peak.categories.items() if name not in sharded)
    per_microbatch = costs.microbatch_bytes(strategy, one_sided=one_sided)
    row = Row(
        strategy=strategy.name,
        transport="odc" if one_sided else "collective",
        policy=policy,
        meets="nobody" if free else strategy.meets,
        state_bytes=state_bytes,
        peak_bytes=peak_bytes,
        fits=peak_bytes <= inputs.machine.cluster.device.memory_bytes,
        network_bytes=float(load.counts.mean()) * per_microbatch + sync.gradients_bytes + sync.parameters_bytes,
        sync_s=exposed_s,
        minibatch_s=float(makespan_s.mean()),
        samples_per_s_per_device=study.minibatch_size / float(makespan_s.mean()),
        speedup=1.0,
        speedup_ci95=(1.0, 1.0),
    )
    return row, makespan_s
