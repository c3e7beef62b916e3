"""The last line of a simulation: what to use here and why, in words."""

from collections.abc import Sequence

from odc_sim.memory import TIGHT
from odc_sim.results import Larger, Row, Zero1

# From the least to the most that has to change in a training setup.
EFFORT = ("collective", "collective-deferred", "odc", "odc-local-sum")
WORTH_IT = 0.02
"""A gain below this is not worth a change: about what two runs of one setup differ by."""
STOCK_BEST = {("collective", "cost-rows"), ("collective-deferred", "cost-rows")}
"""Without these rows nothing is known of how far stock FSDP2 gets."""


def advise(
    rows: Sequence[Row],
    baseline: Row,
    bound_speedup: float | None,
    largest_sample_binds: bool,
    larger: Larger | None = None,
    zero1: Zero1 | None = None,
) -> str:
    """A few sentences: the fastest usable row or a simpler one within 1 % of it, and what stock FSDP2 reaches instead.

    `bound_speedup`: what no policy can beat, None if unknown; `largest_sample_binds`: the longest sample of a minibatch
    sets it; `larger` and `zero1`: what stock FSDP2 reaches with larger microbatches, and ZeRO-1, if that was tried.
    """
    running = [row for row in rows if row.runs]
    candidates = [row for row in running if row.usable]
    if not candidates:
        if not running:
            return "Nothing here can run: see the verdicts."
        tokens = max((row.largest_max_tokens or 0 for row in running), default=0)
        remedy = (
            f"lower --max-tokens to {tokens:,} or use more devices" if tokens else "use more devices or a smaller model"
        )
        return f"Nothing fits the device's memory: {remedy}."
    ceiling = _ceiling(bound_speedup, largest_sample_binds)
    choice, best = _simplest(candidates, baseline), max(candidates, key=_gain)
    gain = _gain(choice) - 1.0
    if gain < WORTH_IT and baseline.usable:
        without = _without_odc(larger, zero1, 1.0) if baseline.schedule.startswith("odc") else ""
        where = "in this table" if without else "that fits"
        return f"Keep {_name(baseline)}: nothing {where} gains {WORTH_IT:.0%} here.{without}{ceiling}"
    rivals = [*([larger.speedup] if larger else []), *([zero1.speedup] if zero1 and zero1.fits else [])]
    alone = not any(_as_much(speedup, _gain(choice)) for speedup in rivals)
    text = f"{'Use' if alone else 'Of this table use'} {_name(choice)}: "
    if not baseline.usable:
        why = "does not fit the device's memory" if not baseline.fits else "runs here only by chance"
        text += f"{_name(baseline)}, the baseline, {why}; "
    text += f"{abs(gain):.0%} {'more' if gain >= 0 else 'less'} throughput than {_name(baseline)}"
    saved = choice.gpu_hours_saved_per_1000_steps
    if saved is not None and abs(saved) >= 0.05:  # less is shown as nothing
        text += f", {saved:,.1f} GPU-hours saved per 1,000 steps"
    text += "." if choice is best else f"; within 1 % of the fastest, {_name(best)}, and simpler."
    odc = [row for row in candidates if row.schedule.startswith("odc")]
    if not choice.schedule.startswith("odc"):
        return text + (" It is stock FSDP2, as fast as odc here and fits: no ODC needed." if odc else "") + ceiling
    stock = [row for row in candidates if not row.schedule.startswith("odc")]
    if stock:
        rival = max(stock, key=_gain)
        close = [row for row in stock if _gain(row) >= _gain(rival) - 0.005]
        rival = min(close, key=lambda row: (EFFORT.index(row.schedule), -_gain(row)))
        tried = {(row.schedule, row.policy) for row in rows} >= STOCK_BEST
        which = "best that stock FSDP2 reaches" if tried else "best stock FSDP2 among the rows simulated here"
        text += f" The {which} is {_gain(rival) - 1.0:+.0%}, {_name(rival)}."
    text += _without_odc(larger, zero1, _gain(choice))
    deferred = [row for row in running if row.schedule == "collective-deferred"]
    if deferred and not any(row.fits for row in deferred):
        need = min(row.peak_memory_bytes.get("total", 0) for row in deferred) / 1e9
        text += f" collective-deferred would need {need:.0f} GB a device, which does not fit."
    return text + ceiling


def advised_row(rows: Sequence[Row], baseline: Row) -> Row | None:
    """The row that `advise` speaks for: the baseline where nothing that fits gains enough; None where nothing fits."""
    candidates = [row for row in rows if row.usable]
    if not candidates:
        return None
    choice = _simplest(candidates, baseline)
    return choice if _gain(choice) - 1.0 >= WORTH_IT or not baseline.usable else baseline


def _name(row: Row) -> str:
    return f"{row.schedule} + {row.policy}"


def _simplest(candidates: Sequence[Row], baseline: Row) -> Row:
    """The fastest, or what takes less effort among those close to it."""
    best = max(candidates, key=_gain)
    close = [row for row in candidates if _gain(row) >= _gain(best) * (1.0 - 0.5 * WORTH_IT)]
    return min(close, key=lambda row: (EFFORT.index(row.schedule), row.policy != baseline.policy, -_gain(row)))


def _gain(row: Row) -> float:
    assert row.speedup is not None
    return row.speedup


def _as_much(speedup: float, gain: float) -> bool:
    return speedup >= gain * (1.0 - 0.5 * WORTH_IT)


def _without_odc(larger: Larger | None, zero1: Zero1 | None, gain: float) -> str:
    text = "" if larger is None else _with_larger_microbatches(larger, gain)
    return text if zero1 is None else text + _zero1(zero1, gain)


def _percent(speedup: float) -> str:
    """+33%; never -0%."""
    return f"{round(100.0 * (speedup - 1.0)) + 0:+d}%"


def _with_larger_microbatches(larger: Larger, gain: float) -> str:
    beyond = ", compute extrapolated" if larger.compute == "extrapolated" else ""
    text = (
        f" With --max-tokens {larger.max_tokens} stock FSDP2 reaches {_percent(larger.speedup)}, "
        f"{larger.schedule} + {larger.policy} ({_gigabytes(larger)}{beyond})"
    )
    as_much = ": as much without ODC, if microbatches may be that large."
    return text + (as_much if _as_much(larger.speedup, gain) else ".")


def _zero1(zero1: Zero1, gain: float) -> str:
    if not zero1.fits:
        return f" ZeRO-1 would need {_gigabytes(zero1)}, which does not fit."
    text = f" ZeRO-1 (odc sharding) reaches {_percent(zero1.speedup)} in {_gigabytes(zero1)}"
    return text + (": as much without ODC." if _as_much(zero1.speedup, gain) else ".")


def _gigabytes(rival: Larger | Zero1) -> str:
    text = f"{rival.peak_memory_bytes / 1e9:.0f} GB a device"
    share = rival.memory_share
    return text if share is None or not TIGHT < share <= 1.0 else f"{text}, {share:.0%} of it"


def _ceiling(bound_speedup: float | None, largest_sample_binds: bool) -> str:
    if largest_sample_binds and bound_speedup is not None:
        return (
            f" The longest sample of a minibatch alone caps any policy at {bound_speedup - 1.0:+.0%}:"
            " larger minibatches or context parallelism are needed to go beyond."
        )
    return ""
