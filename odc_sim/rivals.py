"""What does without ODC, tried before ODC is advised: larger microbatches, and ZeRO-1.

With room for more samples in a microbatch, fewer plans need unequal counts, so stock FSDP2 can balance better. And
where a device holds all parameters and gradients, ranks of ZeRO-1 meet once a minibatch anyhow. A comparison at one
max_tokens, with full sharding only, would be unfair to both.
"""

from collections.abc import Callable

from odc_sim.advice import advised_row
from odc_sim.errors import InputError
from odc_sim.results import Larger, Results, Row, Zero1
from odc_sim.sharding import Strategy
from odc_sim.sharding_study import SETTLED, UNUSED, shard
from odc_sim.study import Study

TIMES = (2, 4)
"""The study's max_tokens."""
SCHEDULES = ("collective", "collective-deferred")
POLICIES = ("lb-micro", "lb-mini", "cost-rows")
BASELINE = "collective/lb-micro"
ZERO1 = Strategy("N", "N", "G")


def odc_is_advised(results: Results) -> bool:
    """Whether there is anything to be compared with these."""
    chosen = advised_row(results.rows, results.baseline_row)
    several = results.rows[0].devices > 1
    return several and chosen is not None and chosen.schedule not in SCHEDULES


def larger_microbatches(
    results: Results, study: Study, memory_bytes: int, run: Callable[[Study], Results]
) -> Larger | None:
    """The fastest of stock FSDP2 with a larger max_tokens that fits and needs no luck; None if there is none.

    Args:
        results: of `study`.
        memory_bytes: of a device.
        study: where it is a plan, or its lengths depend on max_tokens (clipped or dropped), nothing else is comparable.
        run: simulates another study.
    """
    if study.plan is not None or study.overlong != "error":
        return None
    found: list[Row] = []
    for times in TIMES:
        changes = {"max_tokens": times * results.rows[0].max_tokens, "schedule": SCHEDULES, "policy": POLICIES}
        try:
            other = run(study.model_copy(update={**changes, "baseline": BASELINE, "stability": 0}))
        except InputError:  # the baseline cannot run there
            break
        fitting = [row for row in other.rows if row.usable]
        if not fitting:
            break
        found += fitting
    best = max(found, key=_throughput, default=None)
    if best is None:
        return None
    return Larger(
        max_tokens=best.max_tokens,
        schedule=best.schedule,
        policy=best.policy,
        speedup=_throughput(best) / _throughput(results.baseline_row),
        peak_memory_bytes=best.peak_memory_bytes["total"],
        compute=best.provenance["compute"],
        memory_share=best.peak_memory_bytes["total"] / memory_bytes,
    )


def zero1(results: Results, study: Study) -> Zero1 | None:
    """ZeRO-1 as `odc sharding` has it; None for a given plan, which may not be its own."""
    if study.plan is not None:
        return None
    # how ODC meets, how often a study is repeated, and so on: none of it is ZeRO-1's
    others = {name: Study.model_fields[name].get_default(call_default_factory=True) for name in (*SETTLED, *UNUSED)}
    found = shard(study.model_copy(update=others), (ZERO1,))
    row = found.row(ZERO1.name, "collective")
    return Zero1(
        speedup=results.baseline_row.makespan_s["mean"] / row.minibatch_s,
        peak_memory_bytes=float(row.peak_bytes),
        fits=row.fits,
        memory_share=row.peak_bytes / found.inputs.machine.cluster.device.memory_bytes,
    )


def _throughput(row: Row) -> float:
    assert row.samples_per_s_per_device is not None
    return row.samples_per_s_per_device
