"""The last line of a simulation: what to use here and why, in words."""

from collections.abc import Sequence

from odc_sim.results import Row

# From the least to the most that has to change in a training setup.
EFFORT = ("collective", "collective-deferred", "odc", "odc-local-sum")
WORTH_IT = 0.02
"""A gain below this is not worth a change: about what two runs of one setup differ by."""


def advise(rows: Sequence[Row], baseline: Row, bound_speedup: float, largest_sample_binds: bool) -> str:
    """One sentence on the fastest row that fits memory, or on a simpler one within 2 % of it.

    `bound_speedup`: what no policy can beat; `largest_sample_binds`: it is set by the longest sample of a minibatch.
    """
    running = [row for row in rows if row.speedup is not None]
    candidates = [row for row in running if row.fits]
    if not candidates:
        if not running:
            return "Nothing here can run: see the verdicts."
        tokens = max((row.largest_max_tokens or 0 for row in running), default=0)
        remedy = f"lower --max-tokens to {tokens:,}" if tokens else "use more devices or a smaller model"
        return f"Nothing fits the device's memory: {remedy}."
    choice = _simplest(candidates, baseline)
    gain = _gain(choice) - 1.0
    if gain < WORTH_IT:
        kept = f"Keep {baseline.schedule} + {baseline.policy}: nothing that fits gains {WORTH_IT:.0%} here."
        return kept + _ceiling(bound_speedup, largest_sample_binds)
    rival = f"{baseline.schedule} + {baseline.policy}"
    text = f"Use {choice.schedule} + {choice.policy}: {gain:.0%} more throughput than {rival}"
    if choice.gpu_hours_saved_per_1000_steps is not None:
        text += f", {choice.gpu_hours_saved_per_1000_steps:,.1f} GPU-hours saved per 1,000 steps"
    text += "."
    fastest = {s: max((r for r in running if r.schedule == s), key=_gain, default=None) for s in EFFORT}
    deferred, odc = fastest["collective-deferred"], fastest["odc"]
    if choice.schedule == "collective-deferred" and odc is not None:
        text += " It is stock FSDP2, as fast as odc here and fits: no ODC needed."
    elif choice.schedule in ("odc", "odc-local-sum") and deferred is not None:
        if not deferred.fits:
            need = deferred.peak_memory_bytes.get("total", 0) / 1e9
            text += f" collective-deferred would need {need:.0f} GB a device, which does not fit."
        elif _gain(deferred) < _gain(choice):
            text += f" collective-deferred + {deferred.policy} reaches {_gain(deferred) - 1.0:+.0%}."
    return text + _ceiling(bound_speedup, largest_sample_binds)


def advised_row(rows: Sequence[Row], baseline: Row) -> Row | None:
    """The row that `advise` speaks for: the baseline where nothing that fits gains enough; None where nothing fits."""
    candidates = [row for row in rows if row.runs and row.fits]
    if not candidates:
        return None
    choice = _simplest(candidates, baseline)
    return choice if _gain(choice) - 1.0 >= WORTH_IT else baseline


def _simplest(candidates: Sequence[Row], baseline: Row) -> Row:
    """The fastest, or what takes less effort among those close to it."""
    best = max(candidates, key=_gain)
    close = [row for row in candidates if _gain(row) >= _gain(best) * (1.0 - 0.5 * WORTH_IT)]
    return min(close, key=lambda row: (EFFORT.index(row.schedule), row.policy != baseline.policy, -_gain(row)))


def _gain(row: Row) -> float:
    assert row.speedup is not None
    return row.speedup


def _ceiling(bound_speedup: float, largest_sample_binds: bool) -> str:
    if largest_sample_binds:
        return (
            f" The longest sample of a minibatch alone caps any policy at {bound_speedup - 1.0:+.0%}:"
            " larger minibatches or context parallelism are needed to go beyond."
        )
    return ""
