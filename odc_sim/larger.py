"""What stock FSDP2 reaches if microbatches may be larger, tried as long as memory holds them.

With room for more samples in a microbatch, fewer plans need unequal counts, so collectives can balance better without
ODC. A comparison at one max_tokens alone would be unfair to them.
"""

from collections.abc import Callable

from odc_sim.advice import advised_row
from odc_sim.errors import InputError
from odc_sim.results import Larger, Results, Row
from odc_sim.study import Study

TIMES = (2, 4)
"""The study's max_tokens."""
SCHEDULES = ("collective", "collective-deferred")
POLICIES = ("lb-micro", "lb-mini", "cost-rows")
BASELINE = "collective/lb-micro"


def best_stock(results: Results, study: Study, run: Callable[[Study], Results]) -> Larger | None:
    """The fastest of what fits and needs no luck; None where ODC is not advised, or nothing larger can be tried.

    Args:
        results: of `study`.
        study: whose lengths do not depend on max_tokens, as they do where samples are clipped or dropped.
        run: simulates another study.
    """
    baseline = next(row for row in results.rows if row.label == results.baseline)
    chosen = advised_row(results.rows, baseline)
    if chosen is None or chosen.schedule in SCHEDULES or study.plan is not None or study.overlong != "error":
        return None
    found: list[Row] = []
    for times in TIMES:
        changes = {"max_tokens": times * chosen.max_tokens, "schedule": SCHEDULES, "policy": POLICIES}
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
        speedup=_throughput(best) / _throughput(baseline),
        peak_memory_bytes=best.peak_memory_bytes["total"],
        compute=best.provenance["compute"],
    )


def _throughput(row: Row) -> float:
    assert row.samples_per_s_per_device is not None
    return row.samples_per_s_per_device
