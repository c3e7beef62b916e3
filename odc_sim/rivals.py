"""What does without ODC besides the rows of a table: padding, larger microbatches, ZeRO-1, and HSDP between nodes.

Collectives can run unequal counts if the fewer are padded with empty microbatches. With room for more samples in a
microbatch, fewer plans need unequal counts, so stock FSDP2 can balance better. Where a device holds all parameters and
gradients, ranks of ZeRO-1 meet once a minibatch anyhow. And between nodes HSDP sends less. A comparison at one
max_tokens, with full sharding only, would be unfair to all of them.
"""

from collections.abc import Callable

from odc_sim.advice import WORTH_IT, advised_row
from odc_sim.errors import InputError
from odc_sim.inputs import Inputs
from odc_sim.memory import TOO_TIGHT
from odc_sim.parts import largest_of
from odc_sim.policies import POLICIES
from odc_sim.results import Results, Rival, RivalKind, Row
from odc_sim.sharding import Strategy
from odc_sim.sharding_play import SETTLED, UNUSED, prepare
from odc_sim.study import Study

Run = Callable[[Study], Results]

TIMES = (2, 3, 4)
"""The study's max_tokens; besides, what memory holds well, if it is between LEAST_TIMES and the last of these."""
LEAST_TIMES = 1.25
SCHEDULES = ("collective", "collective-deferred")
DEALT_BY = ("lb-micro", "lb-mini", "cost-rows")
BASELINE = "collective/lb-micro"
ABOUT = 0.005
"""A gain below this is no reason for larger microbatches than another one's."""
SHARDINGS: dict[RivalKind, Strategy] = {"ZeRO-1": Strategy("N", "N", "G"), "HSDP": Strategy("I", "I", "I")}


def odc_is_advised(results: Results) -> bool:
    """Whether there is anything to be compared with these."""
    chosen = advised_row(results.rows, results.baseline_row)
    several = results.rows[0].devices > 1
    return several and chosen is not None and chosen.schedule not in SCHEDULES


def rivals_of(results: Results, inputs: Inputs, run: Run) -> tuple[Rival, ...]:
    """What is worth trying: padding where collectives lack it, HSDP on several nodes, the rest before ODC is advised.

    Nothing for a given plan, which is not theirs.

    Args:
        results: of the study in `inputs`.
        inputs: its machine and model.
        run: simulates another study.
    """
    study = inputs.study
    if study.plan is not None or study.devices < 2:
        return ()
    odc = odc_is_advised(results)
    padded = _padded(results, study, run)
    larger = _larger(results, inputs, run) if odc else []
    several_nodes = study.devices > inputs.machine.cluster.devices_per_node
    wanted: dict[RivalKind, bool] = {"ZeRO-1": odc, "HSDP": several_nodes}
    kinds = [kind for kind, worth_it in wanted.items() if worth_it]
    return (*([padded] if padded else []), *larger, *_shardings(results, study, kinds))


def _padded(results: Results, study: Study, run: Run) -> Rival | None:
    """The fastest of the table's policies that collectives need padding for, if it beats the stock rows."""
    rows = [row for row in results.rows if row.schedule == "collective"]
    policies = tuple(row.policy for row in rows if row.policy in POLICIES and not POLICIES[row.policy].equal_counts)
    if study.pad_microbatches or not policies:
        return None
    changes = {"pad_microbatches": True, "schedule": ("collective",), "policy": policies, "baseline": BASELINE}
    fitting = [row for row in _fitting(study, changes, run) if row.policy in policies]
    best = max(fitting, key=_throughput, default=None)
    stock = [_throughput(row) for row in results.rows if row.usable and row.schedule in SCHEDULES]
    if best is None or _throughput(best) <= (1.0 + ABOUT) * max(stock, default=0.0):
        return None
    return _rival("padded", "--pad-microbatches", best, results)


def _larger(results: Results, inputs: Inputs, run: Run) -> list[Rival]:
    """The fastest of stock FSDP2 with a larger max_tokens, of about equally fast ones the smallest: of what fits well,
    and of what hardly fits, if that is faster."""
    now = inputs.max_tokens
    limits = [largest_of(inputs, schedule, TOO_TIGHT) or 0 for schedule in SCHEDULES]
    sizes = {times * now for times in TIMES}
    sizes |= {limit for limit in limits if LEAST_TIMES * now <= limit < TIMES[-1] * now}
    found: list[Row] = []
    for tokens in sorted(sizes):
        changes = {"max_tokens": tokens, "schedule": SCHEDULES, "policy": DEALT_BY, "baseline": BASELINE}
        found += _fitting(inputs.study, changes, run, same_as=results)
    best = _least_of_the_fastest([row for row in found if row.fits_well])
    tight = _least_of_the_fastest([row for row in found if not row.fits_well])
    if best and tight and _throughput(tight) < (1.0 + WORTH_IT) * _throughput(best):
        tight = None
    return [_rival("larger", f"--max-tokens {row.max_tokens}", row, results) for row in (best, tight) if row]


def _least_of_the_fastest(rows: list[Row]) -> Row | None:
    most = max(map(_throughput, rows), default=0.0)
    close = [row for row in rows if _throughput(row) >= (1.0 - ABOUT) * most]
    return min(close, key=lambda row: (row.max_tokens, -_throughput(row)), default=None)


def _fitting(study: Study, changes: dict[str, object], run: Run, same_as: Results | None = None) -> list[Row]:
    """What can be recommended of the changed study; nothing if its baseline cannot run, or its samples are others than
    `same_as`'s, because max_tokens clips or drops some."""
    try:
        found = run(study.model_copy(update={**changes, "stability": 0}))
    except InputError:
        return []
    if same_as is not None and found.lengths | {"max_tokens": 0} != same_as.lengths | {"max_tokens": 0}:
        return []
    return [row for row in found.rows if row.usable]


def _rival(kind: RivalKind, flags: str, row: Row, results: Results) -> Rival:
    assert row.memory_share is not None
    return Rival(
        kind=kind,
        flags=flags,
        schedule=row.schedule,
        policy=row.policy,
        speedup=_throughput(row) / _throughput(results.baseline_row),
        peak_memory_bytes=row.peak_memory_bytes["total"],
        memory_share=row.memory_share,
        compute=row.provenance["compute"],
    )


def _shardings(results: Results, study: Study, kinds: list[RivalKind]) -> list[Rival]:
    """As `odc sharding` has them with collectives, whether they fit or not."""
    if not kinds:
        return []
    # how ODC meets, how often a study is repeated, and so on: none of it is theirs
    fields = ("policy", *SETTLED, *UNUSED)
    others = {name: Study.model_fields[name].get_default(call_default_factory=True) for name in fields}
    game = prepare(study.model_copy(update=others))
    memory_bytes = game.inputs.machine.cluster.device.memory_bytes
    found = []
    for kind in kinds:
        row, _ = game.best(SHARDINGS[kind], "collective")
        found.append(
            Rival(
                kind=kind,
                flags="",
                schedule=row.transport,
                policy=row.policy,
                speedup=results.baseline_row.makespan_s["mean"] / row.minibatch_s,
                peak_memory_bytes=row.peak_bytes,
                memory_share=row.peak_bytes / memory_bytes,
                compute=row.compute,
            )
        )
    return found


def _throughput(row: Row) -> float:
    assert row.samples_per_s_per_device is not None
    return row.samples_per_s_per_device
