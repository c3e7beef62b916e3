"""The stream program `fully_shard` enqueues on one rank in one minibatch: operations in host order, with their waits.

This is the readable form of the physics. It mirrors torch 2.11 (`torch/distributed/fsdp/_fully_shard/`:
`_fsdp_state.py`,
`_fsdp_param_group.py`, `_fsdp_collectives.py`) edge by edge; the numbers in the comments are those of
`docs/physics.md`. The event engine plays it; the fast engine computes the same times as recurrences, and tests hold
the two equal.
"""

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from odc_sim.durations import Durations
from odc_sim.schedules import Schedule

Stream = Literal["compute", "copy_in", "unshard", "reduce"]


@dataclass(eq=False, kw_only=True, slots=True)
class Op:
    """One operation of one stream. It starts when its stream reaches it, its `waits` are done and the host has issued
    it."""

    stream: Stream
    kind: str
    """forward | backward | head_loss | copy_in | unshard | copy_out | pack | reduce | add | hold | meet | finalize"""
    unit: int
    microbatch: int
    seconds: float = 0.0
    waits: list["Op"] = field(default_factory=list)
    issue_s: float = 0.0
    """Host clock at which it is enqueued."""
    key: Hashable = None
    """Names the collective or barrier at which ranks meet; None for what a rank does alone."""
    parties: int = 0
    """How many ranks meet there."""
    communicator: str = ""
    """Collectives of one communicator run one at a time, in host order."""
    cause: str = ""
    """What a peer's lateness at this meeting is called."""
    awaited: "Op | None" = None
    """The transfer that a compute-stream operation waits for: its gap is explained by it."""
    ready_s: float = 0.0
    start_s: float = 0.0
    end_s: float = 0.0


class _Builder:
    """Enqueues operations on a rank's streams as FSDP's hooks do."""

    def __init__(self, durations: Durations, schedule: Schedule, minibatch: int, rank: int) -> None:
        self.t, self.schedule, self.b, self.rank = durations, schedule, minibatch, rank
        self.ops: list[Op] = []
        self.clock_s = -durations.host_lead_s
        self.count = int(durations.counts[minibatch, rank])
        self.last: dict[str, Op | None] = dict.fromkeys(("compute", "copy_in", "unshard", "reduce"))
        self.stream_waits: dict[str, list[Op]] = {"copy_in": [], "unshard": []}
        self.last_reduce: Op | None = None
        self.reductions = 0
        self.pending: dict[int, Op] = {}
        self.gathered = False
        counts: NDArray[np.int64] = durations.counts[minibatch]
        self.most = int(counts.max(initial=0))
        self.running = [int((counts > m).sum()) for m in range(self.most)]

    def put(self, stream: Stream, kind: str, unit: int, m: int, seconds: float = 0.0, *waits: Op | None) -> Op:
        op = Op(stream=stream, kind=kind, unit=unit, microbatch=m, seconds=seconds)
        op.waits = [w for w in (*waits, *self.stream_waits.get(stream, ())) if w is not None]
        self.ops.append(op)
        self.last[stream] = op
        return op

    def streams_wait_for(self, op: Op | None) -> None:
        """copy-in and gather streams wait for `op`; later waits include earlier ones, so only the last is kept."""
        if op is not None:
            self.stream_waits = {"copy_in": [op], "unshard": [op]}

    def slot(self, table: NDArray[np.float64], slot: int, m: int) -> float:
        return float(table[self.b, m, self.t.slot_class[slot], self.rank])

    def transfer(
        self, kind: Literal["unshard", "reduce"], unit: int, m: int, seconds: float, key: Hashable, ready: Op
    ) -> Op:
        op = self.put(kind, kind, unit, m, seconds, ready)
        if not self.schedule.one_sided:
            op.key, op.parties = key, self.t.world_size
            separate = self.schedule.separate_reduce and kind == "reduce"
            op.communicator = "reduce" if separate else "shard"
            if self.schedule.deferred and kind == "reduce":
                op.cause = "imbalance_minibatch"
            elif unit == 0 and kind == "reduce":
                op.cause = "imbalance_microbatch"
            else:
                op.cause = "imbalance_layer"
        return op

    def gather(self, unit: int, m: int, backward: bool) -> Op:
        copy_in = self.put("copy_in", "copy_in", unit, m, float(self.t.copy_in_s[unit]))
        copy_in.issue_s = self.clock_s
        stretch = 1.0
        if backward:
            stretch = float(self.t.gather_backward_stretch[self.b, m, self.rank])
        elif unit >= 2:
            stretch = float(self.t.gather_forward_stretch[self.b, m, self.rank])
        key = ("unshard", 0 if self.schedule.deferred else m, unit, backward)
        op = self.transfer("unshard", unit, m, float(self.t.gather_s[unit]) * stretch, key, copy_in)
        op.issue_s = self.clock_s
        self.pending[unit] = op
        return op

    def copy_out(self, unit: int, m: int, stretch: float = 1.0) -> Op:
        gathered = self.pending.pop(unit)
        op = self.put("compute", "copy_out", unit, m, float(self.t.copy_out_s[unit]) * stretch, gathered)
        op.awaited = gathered
        return op

    def compute(self, kind: str, unit: int, m: int, seconds: float, host_s: float) -> None:
        self.clock_s += host_s
        if self.schedule.one_sided and self.schedule.barrier == "layer" and kind in ("forward", "backward"):
            self.meet(("layer", kind, m, unit), self.running[m], "imbalance_layer", unit, m, issue_s=self.clock_s)
        op = self.put("compute", kind, unit, m, seconds)
        op.issue_s = self.clock_s

    def meet(self, key: Hashable, parties: int, cause: str, unit: int, m: int, issue_s: float = 0.0) -> None:
        op = self.put("compute", "meet", unit, m)
        op.key, op.parties, op.cause, op.issue_s = key, parties, cause, issue_s

    def forward(self, m: int, gathers: bool) -> None:
        layers, copy_outs = self.t.layers, list[Op]()
        if gathers:  # edge 1: root pre-forward
            self.streams_wait_for(self.last["compute"])
        for unit in range(layers + 1):
            if gathers:
                lag = self.schedule.forward_prefetch
                if unit >= lag:  # edge 2
                    self.streams_wait_for(copy_outs[unit - lag])
                self.gather(unit, m, backward=False)
                copy_outs.append(self.copy_out(unit, m))  # edges 3, 4
            self.compute("forward", unit, m, self.slot(self.t.forward_s, unit, m), self.t.host_forward_s)
        self.put("compute", "head_loss", 0, m, self.slot(self.t.forward_s, layers + 1, m))
        if gathers:  # edge 5: root post-forward
            self.streams_wait_for(copy_outs[-1])

    def backward(self, m: int, gathers: bool, reduces: bool) -> None:
        layers = self.t.layers
        if gathers and layers:  # edge 6: root pre-backward
            self.gather(layers, m, backward=True)
        self.put("compute", "head_loss", 0, m, self.slot(self.t.backward_s, layers + 1, m))
        for unit in range(layers, 0, -1):
            if gathers:
                if unit not in self.pending:
                    self.gather(unit, m, backward=True)
                beside_reduce = reduces and unit < layers
                stretch = self.t.copy_out_stretch if beside_reduce else 1.0
                self.streams_wait_for(self.copy_out(unit, m, stretch))  # edge 7
                for ahead in range(unit - 1, max(unit - 1 - self.schedule.backward_prefetch, 0), -1):
                    if ahead not in self.pending:
                        self.gather(ahead, m, backward=True)
            self.compute("backward", unit, m, self.slot(self.t.backward_s, unit, m), self.t.host_backward_s)
            self.post_backward(unit, m, reduces)
        self.put("compute", "backward", 0, m, self.slot(self.t.backward_s, 0, m))
        self.post_backward(0, m, reduces)  # edge 11: the root is reduced last

    def post_backward(self, unit: int, m: int, reduces: bool) -> None:
        if not reduces or (self.schedule.deferred and m > 0):  # a sum kept earlier is added to before it is reduced
            self.put("compute", "hold", unit, m, float(self.t.hold_s[unit]))
        if not reduces:
            return
        pack = self.put("compute", "pack", unit, m, float(self.t.pack_s[unit]), self.last_reduce)  # edge 8
        pack.awaited = self.last_reduce
        stretch = float(self.t.reduce_stretch[self.b, m, self.rank]) if unit >= 2 else 1.0
        key = ("reduce", 0 if self.schedule.deferred else m, unit)
        self.last_reduce = self.transfer("reduce", unit, m, float(self.t.reduce_s[unit]) * stretch, key, pack)  # edge 9
        again = self.reductions > self.t.layers  # a first reduction sets .grad, later ones are added to it
        self.put("reduce", "add", unit, m, float(self.t.add_s[unit]) if again else 0.0)
        self.reductions += 1

    def finalize(self, m: int) -> None:
        """Edge 12: the compute stream waits for every reduction."""
        if self.last_reduce is not None:
            op = self.put("compute", "finalize", -1, m, 0.0, self.last["reduce"])
            op.awaited, self.last_reduce = self.last_reduce, None


def rank_program(durations: Durations, schedule: Schedule, minibatch: int, rank: int) -> Iterator[Op]:
    """All operations of `rank` in one minibatch up to the barrier at its end, in host order."""
    do = _Builder(durations, schedule, minibatch, rank)
    for m in range(do.most):
        if m < do.count:
            first, last = m == 0, m == do.count - 1
            do.forward(m, gathers=first or not schedule.deferred)
            do.backward(
                m,
                gathers=not schedule.deferred,
                reduces=not schedule.local_sum and (last or not schedule.deferred),
            )
            if last or not schedule.overlap_tail:
                do.finalize(m)
        if schedule.one_sided and schedule.barrier != "minibatch":
            do.meet(("microbatch", m), durations.world_size, "imbalance_microbatch", -1, m)
    yield from do.ops
