"""The four schedules, as the handful of rules in which they differ.

`fully_shard` (torch 2.11, `torch/distributed/fsdp/_fully_shard/`) is the common frame: the root and every layer are
unsharded before use and their gradients reduced after it. What differs is who waits for whom.

| schedule | transfers | unshard | reduce | ranks meet |
|---|---|---|---|---|
| collective | collective | each forward and backward | each backward | at every unit |
| collective-deferred | collective | first forward of a minibatch | last backward of a minibatch | at those |
| odc | one-sided | each forward and backward | each backward | once a minibatch |
| odc-local-sum | one-sided | each forward and backward | once, after the last backward | once a minibatch |

Sources: `collective` and `collective-deferred` are FSDP2's own settings (`set_requires_gradient_sync`,
`set_reshard_after_forward`,
`set_reshard_after_backward`); `odc` is arXiv 2601.19362 section 3; `odc-local-sum` is the port in AMD-AGI/Primus pull
request 864.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from odc_sim.errors import InputError, unknown_name
from odc_sim.plans import Plan, unequal_counts

Barrier = Literal["layer", "microbatch", "minibatch"]
BARRIERS: tuple[Barrier, ...] = ("layer", "microbatch", "minibatch")


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """The rules of one schedule; see the module's table."""

    name: str
    summary: str
    one_sided: bool
    """Transfers involve one rank only; otherwise every transfer is a collective, at which all ranks meet."""
    deferred: bool = False
    """Unshard only in each rank's first forward, reduce only in its last backward."""
    local_sum: bool = False
    """Gradients are summed on each rank and reduced once, after all ranks have finished."""
    barrier: Barrier = "minibatch"
    """Where one-sided ranks meet. Collectives meet at every layer by nature."""
    forward_prefetch: int = 2
    """The gather of unit j waits for the copy-out of unit j - forward_prefetch (FSDP2: 2)."""
    backward_prefetch: int = 1
    """How many units ahead backward gathers are issued (FSDP2: 1)."""
    separate_reduce: bool = False
    """reduce_scatter on a communicator of its own, so that it no longer queues with all_gather (torch 2.13 option)."""
    overlap_tail: bool = False
    """The next microbatch's forward overlaps the last reductions (`set_is_last_backward(False)`); no use under
    collectives."""
    port_contention: bool = True
    """Transfers that run at once share ports: a rank's gather and scatter_accumulate, or two communicators'
    collectives."""

    @property
    def needs_equal_counts(self) -> bool:
        """Whether ranks with different numbers of microbatches would wait for each other forever."""
        return not self.one_sided and not self.deferred

    @property
    def shares_ports(self) -> bool:
        """Whether two transfers of a rank can run at once at all, and are to slow each other down."""
        return self.port_contention and (self.one_sided or self.separate_reduce)


SCHEDULES: tuple[Schedule, ...] = (
    Schedule(
        name="collective",
        summary="FSDP2's default: all_gather and reduce_scatter for every unit of every microbatch (the baseline)",
        one_sided=False,
        barrier="layer",
    ),
    Schedule(
        name="collective-deferred",
        summary="FSDP2 with unshard in the first and reduce in the last microbatch only; 6 bytes a parameter a rank",
        one_sided=False,
        deferred=True,
        barrier="layer",
    ),
    Schedule(
        name="odc",
        summary="one-sided gather and scatter_accumulate; ranks meet once a minibatch",
        one_sided=True,
        overlap_tail=True,
    ),
    Schedule(
        name="odc-local-sum",
        summary="one-sided gather, gradients summed locally and pulled once at the end; 4 bytes a parameter a rank",
        one_sided=True,
        local_sum=True,
        overlap_tail=True,
    ),
)


def make_schedule(
    name: str,
    *,
    barrier: Barrier | None = None,
    forward_prefetch: int = 2,
    backward_prefetch: int = 1,
    separate_reduce: bool = False,
    port_contention: bool = True,
) -> Schedule:
    """The schedule called `name`, with the given options.

    Raises `InputError` for an unknown name, a prefetch depth FSDP cannot have, or a barrier coarser than collectives
    allow.
    """
    found = next((s for s in SCHEDULES if s.name == name), None)
    if found is None:
        raise unknown_name("schedule", name, (s.name for s in SCHEDULES))
    if forward_prefetch < 1:
        raise InputError(f"forward_prefetch: got {forward_prefetch}, expected at least 1 (FSDP2's default is 2)")
    if backward_prefetch < 0:
        raise InputError(f"backward_prefetch: got {backward_prefetch}, expected at least 0 (FSDP2's default is 1)")
    if barrier is not None and barrier not in BARRIERS:
        raise unknown_name("barrier", barrier, BARRIERS)
    return replace(
        found,
        barrier=found.barrier if barrier is None or not found.one_sided else barrier,
        forward_prefetch=forward_prefetch,
        backward_prefetch=backward_prefetch,
        separate_reduce=separate_reduce,
        port_contention=port_contention,
    )


def obstacle(schedule: Schedule, plan: Plan) -> str | None:
    """Why `schedule` cannot run `plan`, or None."""
    counts = plan.counts()
    if schedule.deferred and not counts.all():
        b, rank = np.argwhere(counts == 0)[0]
        return f"hangs: rank {rank} runs no microbatch in minibatch {b}, so it never joins the unshard and the reduce"
    if not schedule.needs_equal_counts:
        return None
    found = unequal_counts(plan)
    if found is None:
        return None
    uneven = int((counts.max(axis=1) != counts.min(axis=1)).sum())
    return (
        f"hangs: rank {found.rank_a} runs {found.count_a} microbatches, rank {found.rank_b} runs {found.count_b}"
        f" in minibatch {found.minibatch} (counts differ in {uneven} of {plan.num_minibatches} minibatches)"
    )
