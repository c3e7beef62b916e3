"""The same minibatches under every sharding strategy, with collectives and on demand.

Where parameters or gradients are divided over all ranks, all ranks wait for each other in every microbatch, as in
`odc simulate`. Where they are divided within nodes, each node is run by itself; where neither is, each rank. One-sided
transfers have nobody wait in any of them. All meet at the end of the minibatch, where the nodes are made equal. Stock
FSDP2's other way to wait less, `collective-deferred`, is among them with full sharding.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from odc_sim.inputs import BOOTSTRAP_STREAM, Inputs
from odc_sim.memory import fits_well
from odc_sim.metrics import speedup
from odc_sim.parts import resampled_together
from odc_sim.progress import Progress
from odc_sim.sharding import STRATEGIES, Strategy
from odc_sim.sharding_play import BASE_POLICY, Floats, Row, Transport, prepare
from odc_sim.study import Study

WORTH_IT = 0.02
"""A smaller part of the throughput is worth neither traffic nor memory."""
FULL = Strategy("G", "G", "G")
STOCK: tuple[Transport, ...] = ("collective", "collective-deferred")
"""What needs no transfers of ours."""


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
        of_these = [row for row in self.rows if not transports or row.transport in transports]
        tight = [row for row in of_these if row.fits and row not in well]
        return max(tight, key=lambda row: row.speedup, default=None)

    def _fitting(self, transports: tuple[Transport, ...]) -> list[Row]:
        fitting = [row for row in self.rows if row.fits and (not transports or row.transport in transports)]
        memory_bytes = self.inputs.machine.cluster.device.memory_bytes
        return [row for row in fitting if fits_well(row.peak_bytes / memory_bytes)] or fitting

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
            "left_out": list(self.left_out),
            "rows": [asdict(row) for row in self.rows],
        }


def _silent(what: str, done: int, total: int) -> None:
    """The default progress: none."""


def shard(study: Study, strategies: tuple[Strategy, ...] = STRATEGIES, progress: Progress = _silent) -> ShardingResults:
    """Run every strategy that is not another one on these nodes, and GGG, which they are compared with.

    >>> shard(Study(minibatches=5, devices=16)).row("IIG", "odc").speedup > 1.1
    True

    Raises:
        InputError: whatever is wrong with the study, or a field that is not for this.
    """
    game = prepare(study)
    wanted = dict.fromkeys((*strategies, FULL))
    chosen = [s for s in wanted if s.differs(node=game.costs.topology.group, nodes=game.costs.topology.nodes)]
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
        ran.append(game.best(strategy, transport))
    _, baseline_s = game.run(FULL, "collective", BASE_POLICY)
    rng = np.random.default_rng([game.inputs.study.seed, BOOTSTRAP_STREAM])
    rows = []
    for row, own_s in ran:
        found = speedup(baseline_s, own_s, resampled_together(game.inputs.study, row.policy), rng)
        rows.append(replace(row, speedup=found.value, speedup_ci95=(found.low, found.high)))
    left_out = tuple(s.name for s in wanted if s not in chosen)
    return ShardingResults(inputs=game.inputs, nodes=game.costs.topology.nodes, rows=tuple(rows), left_out=left_out)
