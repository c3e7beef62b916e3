"""The last line of a simulation: what to use here and why, in words."""

from collections.abc import Sequence

from odc_sim.memory import TIGHT
from odc_sim.results import Rival, Row

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
    rivals: Sequence[Rival] = (),
    untried: str = "",
    *,
    longest_tokens: int = 0,
) -> str:
    """A few sentences: whether it takes ODC, the row to use, and what stock FSDP2 reaches instead.

    Args:
        rows: of the table.
        baseline: the one that they are compared with.
        bound_speedup: what no policy can beat, None if unknown.
        largest_sample_binds: the longest sample of a minibatch sets it.
        rivals: what else was tried.
        untried: said where ODC is advised, if rivals were not tried.
        longest_tokens: of the longest sample, which microbatches must hold.
    """
    running = [row for row in rows if row.runs]
    chosen = advised_row(rows, baseline)
    if chosen is None:
        return _nothing(running, rivals, longest_tokens)
    candidates = _candidates(rows)
    best = max(candidates, key=_gain)
    well = sorted((rival for rival in rivals if rival.fits_well), key=lambda rival: -rival.speedup)
    odc, keep = _takes_odc(chosen), chosen is baseline
    enough = [rival for rival in well if rival.speedup >= _gain(chosen) * (1.0 - WORTH_IT)] if odc else []
    more = [] if odc else [rival for rival in well if rival.speedup >= _gain(chosen) * (1.0 + WORTH_IT)]
    text = f"No ODC needed: {'; '.join(map(_told, enough))}. " if enough else ""
    if keep:
        where = "in this table" if enough or more else "that fits"
        keep_it = "Of this table keep" if enough else "Keep"
        text += f"{keep_it} {_name(baseline)}: nothing {where} gains {WORTH_IT:.0%} here."
    else:
        text += _use(chosen, best, baseline, shown=bool(enough or more))
        if not odc and any(map(_takes_odc, candidates)):
            text += " It is stock FSDP2: no ODC needed."
    text += _tight(chosen, [row for row in rows if row.usable and row not in candidates])
    if more:
        text += f" But {'; '.join(map(_told, more))}."
    if odc:
        text += _stock(rows, candidates) if not keep else ""
        text += _too_little([rival for rival in rivals if rival not in enough]) + (untried and f" {untried}")
        text += _deferred(running) if not keep else ""
    return text + _ceiling(bound_speedup, largest_sample_binds)


def advised_row(rows: Sequence[Row], baseline: Row) -> Row | None:
    """The row that `advise` speaks for: the baseline where nothing that fits gains enough; None where nothing can be
    counted on."""
    candidates = _candidates(rows)
    if not candidates:
        return None
    choice = _simplest(candidates, baseline)
    gains = _gain(choice) - 1.0 >= WORTH_IT
    saves_odc = _takes_odc(baseline) and not _takes_odc(choice)
    return choice if gains or saves_odc or baseline not in candidates else baseline


def _candidates(rows: Sequence[Row]) -> list[Row]:
    """Those that can be recommended: that fit well, or where none does, that fit."""
    usable = [row for row in rows if row.usable]
    return [row for row in usable if row.fits_well] or usable


def _tight(chosen: Row, others: Sequence[Row]) -> str:
    """What is said of memory: how full it is, and what is faster but hardly fits."""
    share = chosen.memory_share
    text = f" It takes {share:.0%} of a device's memory." if share is not None and share > TIGHT else ""
    fastest = max(others, key=_gain, default=None)
    if fastest is None or _gain(fastest) < _gain(chosen) * (1.0 + WORTH_IT):
        return text
    taken = f"{fastest.memory_share:.0%} of a device's memory, too much to count on"
    return f"{text} {_name(fastest)} reaches {_percent(_gain(fastest))}, but takes {taken}."


def _nothing(running: Sequence[Row], rivals: Sequence[Rival], longest_tokens: int) -> str:
    if not running:
        return "Nothing here can run: see the verdicts."
    if any(row.fits for row in running):
        also = "; ".join(_told(rival) for rival in rivals if rival.fits)
        told = f" But {also}." if also else ""
        return f"What fits here runs only by chance, nothing to count on: use --pad-microbatches, or odc.{told}"
    tokens = max((row.largest_max_tokens or 0 for row in running), default=0)
    if not tokens:
        remedy = "use more devices or a smaller model"
    elif tokens >= longest_tokens:
        remedy = f"lower --max-tokens to {tokens:,} or use more devices"
    else:
        remedy = (
            f"the longest sample has {longest_tokens:,} tokens, and memory holds {tokens:,} a microbatch. Use context "
            f"parallelism, a smaller model or more devices, or --max-tokens {tokens} with --overlong clip or drop"
        )
    return f"Nothing fits the device's memory: {remedy}."


def _use(choice: Row, best: Row, baseline: Row, *, shown: bool) -> str:
    gain = _gain(choice) - 1.0
    text = f"{'Of this table use' if shown else 'Use'} {_name(choice)}: "
    if not baseline.usable:
        why = "does not fit the device's memory" if not baseline.fits else "runs here only by chance"
        text += f"{_name(baseline)}, the baseline, {why}; "
    much = f"{abs(gain):.0%} {'more' if gain > 0 else 'less'}" if abs(gain) >= 0.005 else "as much"
    text += f"{much} throughput {'than' if abs(gain) >= 0.005 else 'as'} {_name(baseline)}"
    saved = choice.gpu_hours_saved_per_1000_steps
    if saved is not None and abs(saved) >= 0.05:  # less is shown as nothing
        text += f", {saved:,.1f} GPU-hours saved per 1,000 steps"
    if choice is best:
        return f"{text}."
    near = WORTH_IT if _takes_odc(best) and not _takes_odc(choice) else 0.5 * WORTH_IT
    return f"{text}; within {100 * near:.0f} % of the fastest, {_name(best)}, and simpler."


def _stock(rows: Sequence[Row], candidates: Sequence[Row]) -> str:
    stock = [row for row in candidates if not _takes_odc(row)]
    if not stock:
        return ""
    rival = max(stock, key=_gain)
    close = [row for row in stock if _gain(row) >= _gain(rival) - 0.005]
    rival = min(close, key=lambda row: (EFFORT.index(row.schedule), -_gain(row)))
    tried = {(row.schedule, row.policy) for row in rows} >= STOCK_BEST
    which = "best that stock FSDP2 reaches in it" if tried else "best stock FSDP2 among the rows simulated here"
    return f" The {which} is {_gain(rival) - 1.0:+.0%}, {_name(rival)}."


def _deferred(running: Sequence[Row]) -> str:
    deferred = [row for row in running if row.schedule == "collective-deferred"]
    if not deferred or any(row.fits for row in deferred):
        return ""
    need = min(row.peak_memory_bytes.get("total", 0) for row in deferred) / 1e9
    return f" collective-deferred would need {need:.0f} GB a device, which does not fit."


def _too_little(rivals: Sequence[Rival]) -> str:
    """Of rivals that are slower than ODC, or do not fit."""
    slower = [_told(rival) for rival in rivals if rival.fits]
    text = f" Without ODC {'; '.join(slower)}." if slower else ""
    for rival in rivals:
        if not rival.fits:
            text += f" {rival.kind} would need {rival.peak_memory_bytes / 1e9:.0f} GB a device, which does not fit."
    return text


def _told(rival: Rival) -> str:
    """stock FSDP2 with --max-tokens 131072, collective-deferred + lb-mini, reaches +35% in 33 GB a device"""
    what = (
        f"stock FSDP2 with {rival.flags}, {rival.schedule} + {rival.policy},"
        if rival.flags
        else f"{rival.kind} (odc sharding), {rival.policy},"
    )
    tight = f", {rival.memory_share:.0%} of it" if rival.memory_share > TIGHT else ""
    beyond = " (compute extrapolated)" if rival.compute == "extrapolated" else ""
    condition = ", if microbatches may be that large" if rival.kind == "larger" else ""
    gigabytes = f"{rival.peak_memory_bytes / 1e9:.0f} GB a device{tight}"
    return f"{what} reaches {_percent(rival.speedup)} in {gigabytes}{beyond}{condition}"


def _name(row: Row) -> str:
    return f"{row.schedule} + {row.policy}"


def _simplest(candidates: Sequence[Row], baseline: Row) -> Row:
    """The fastest, or what takes less effort: stock FSDP2 if ODC is not worth it, and within half of that the least."""
    best = max(candidates, key=_gain)
    stock = [row for row in candidates if not _takes_odc(row) and _gain(row) >= _gain(best) * (1.0 - WORTH_IT)]
    among = stock or candidates
    most = max(map(_gain, among))
    close = [row for row in among if _gain(row) >= most * (1.0 - 0.5 * WORTH_IT)]
    return min(close, key=lambda row: (EFFORT.index(row.schedule), row.policy != baseline.policy, -_gain(row)))


def _takes_odc(row: Row) -> bool:
    return row.schedule.startswith("odc")


def _gain(row: Row) -> float:
    assert row.speedup is not None
    return row.speedup


def _percent(speedup: float) -> str:
    """+33%; never -0%."""
    return f"{round(100.0 * (speedup - 1.0)) + 0:+d}%"


def _ceiling(bound_speedup: float | None, largest_sample_binds: bool) -> str:
    if largest_sample_binds and bound_speedup is not None:
        return (
            f" The longest sample of a minibatch alone caps any policy at {bound_speedup - 1.0:+.0%}:"
            " larger minibatches or context parallelism are needed to go beyond."
        )
    return ""
