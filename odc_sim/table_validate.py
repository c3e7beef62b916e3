"""A validation as text: differences first, then step times and speedups, then where the time goes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from odc_sim.durations import CAUSE_WORDS
from odc_sim.validate import (
    CAUSE_AIM_POINTS,
    MEMORY_AIM_PERCENT,
    SPEEDUP_TOLERANCE_POINTS,
    Order,
    SpeedupValidation,
    Validation,
)
from odc_sim.validate_predict import run_rows
from odc_sim.validate_run import DERIVED, IN_EXPOSED, Pair, RunValidation

if TYPE_CHECKING:
    from rich.console import Console

LEAST_SHARE = 0.0005
"""Causes below this share of GPU time on both sides are left out of the table."""
LEAST_PREDICTED_S = 1e-6
"""An error relative to less than this is told of nothing: a clock's tick is thousands of percent of it."""
SPEEDUP_NOTE = "points: hundredths, measured minus predicted; of gain: measured gain as a part of the predicted one"
DERIVED_NOTE = (
    "(d) derived: what compute spans take beyond the calibration's compute counts as host up to the predicted floors, "
    "then as slowdown; a measurement cannot tell these apart, so wrong compute costs show here too. "
    "Units are compared to see where an error comes from; they are not judged"
)
PORTS_NOTE = "ports: a measurement cannot tell sharing ports from exposed transfers; compare the line below it"


def print_validation(found: Validation, console: "Console") -> None:
    """All of it. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    for each in found.runs:
        line(title(each), "bold")
        for text in difference_lines(each, found):
            line(f"  {text}")
    for block in (step_lines(found.runs), speedup_lines(found)):
        line()
        for number, text in enumerate(block):
            line(text, "bold" if number == 0 else "")
    for each in found.runs:
        line()
        for number, text in enumerate(run_lines(each)):
            line(text, "bold" if number == 0 else "")
    line()
    if any(each.measured.covered.any() for each in found.runs):
        line(DERIVED_NOTE, "dim")
    for text in found.notes:
        line(f"note: {text}")
    if found.misses:
        aims = f"{CAUSE_AIM_POINTS:g} points for a cause, {MEMORY_AIM_PERCENT:g} % for memory"
        line(f"further off than aimed at ({aims}): {'; '.join(found.misses)}")
    line(verdict_line(found), "bold")


def title(each: RunValidation) -> str:
    """Which run, and with what it is compared."""
    config = each.run.config
    where = f"{config.world_size} rank{'s' * (config.world_size != 1)} on {config.device}"
    emulated = f", compute emulated at {config.time_scale:g} s a second" if config.compute == "emulated" else ""
    sources = ", ".join(f"{part} {word}" for part, word in each.prediction.provenance.items())
    return (
        f"{each.run.name}: {each.run.label}, {each.prediction.model.name}, {where}{emulated}, {len(each.run.steps)} "
        f"minibatches; predicted with {each.prediction.machine.name} ({sources})"
    )


def difference_lines(each: RunValidation, found: Validation) -> list[str]:
    """What is not the same in the run and in what it is compared with."""
    lines = [difference.line for difference in each.differences]
    lines = lines or ["nothing differs from plan and calibration"]
    return [*lines, *(difference.line for difference in found.between.get(each.run.name, ()))]


def step_lines(runs: Sequence[RunValidation]) -> list[str]:
    """Mean time of a minibatch, of each run; heading first."""
    width = max(len(each.run.name) for each in runs)
    lines = [f"{'a minibatch':<{width}} {'predicted':>10} {'measured':>10} {'error %':>8} {'95 % interval':>15}  each"]
    for each in runs:
        low, high = each.step_ci95_percent
        percent = each.minibatch_percent
        worst = int(np.abs(percent).argmax())
        lines.append(
            f"{each.run.name:<{width}} {_seconds(each.step.predicted)} {_seconds(each.step.measured)} "
            f"{_signed(each.step.percent):>8} {f'{low:+.1f} to {high:+.1f}':>15}  median {np.median(percent):+.1f} %, "
            f"worst {percent[worst]:+.1f} % (minibatch {run_rows(each.run)[worst]})"
        )
    for each in runs:
        between_s = each.measured.between_s
        if between_s is None:
            lines.append(f"{each.run.name}: time between minibatches was not recorded")
        elif between_s <= 0.0:  # two clocks a little apart
            lines.append(f"{each.run.name}: no time between minibatches")
        else:
            share = 100.0 * between_s / (each.step.measured or 1.0)
            lines.append(
                f"{each.run.name}: {_seconds(between_s).strip()} between minibatches, {share:.1f} % on top, "
                "in neither column: the simulator has none"
            )
    return lines


def speedup_lines(found: Validation) -> list[str]:
    """Runs over the same samples against each other; heading first."""
    if not found.speedups:
        return ["speedups: no two runs share minibatches" if len(found.runs) > 1 else "speedups: only one run"]
    width = max(len(each.run) for each in found.speedups)
    lines = [f"{'speedup':<{width}} {'predicted':>10} {'measured':>10} {'points':>7} {'of gain':>8}  over"]
    lines += [_speedup_line(each, width) for each in found.speedups]
    return [*lines, SPEEDUP_NOTE, order_line(found.orders)]


def _speedup_line(each: SpeedupValidation, width: int) -> str:
    share = "" if each.gain_share is None else f"{100.0 * each.gain_share:.0f} %"
    low, high = each.measured.low, each.measured.high
    return (
        f"{each.run:<{width}} {each.predicted:>9.3f}x {each.measured.value:>9.3f}x {each.points:>+7.1f} {share:>8}  "
        f"{each.baseline} in {each.minibatches} minibatches (measured {low:.3f} to {high:.3f})"
    )


def order_line(orders: Sequence[Order]) -> str:
    """Whether runs are as fast relative to each other as predicted."""
    wrong = [f"{each.slower} is faster than {each.faster}" for each in orders if each.kept is False]
    close = sum(each.kept is None for each in orders)
    if orders and close == len(orders):
        return f"order: too close to tell ({close} pair{'s' * (close != 1)})"
    text = f"order: not as predicted: {', '.join(wrong)}" if wrong else "order: as predicted"
    return text + (f"; {close} of {len(orders)} pairs too close to tell" if close else "")


def run_lines(each: RunValidation) -> list[str]:
    """Shares of GPU time, units and memory of one run; heading first."""
    if not each.measured.covered.any():
        lines = [f"{each.run.name}: no timeline, so neither idle time nor units are compared"]
        return lines + _memory_lines(each)
    lines = [f"{each.run.name:<26} {'predicted':>10} {'measured':>10} {'error':>8}"]
    lines.append(_share("idle, % of GPU time", each.idle))
    for cause, pair in each.idle_causes.items():
        if max(pair.predicted, pair.measured or 0.0) >= LEAST_SHARE:
            mark = " (d)" if cause in DERIVED else ""
            lines.append(_share(f"  {CAUSE_WORDS[cause]}{mark}", pair))
    if each.idle_causes[IN_EXPOSED].predicted >= LEAST_SHARE:
        lines.append(_share("  unshard, reduce, ports", each.exposed))
    lines.append(_share("between compute spans, %", each.gaps))
    lines.append(_time("compute spans, all ranks", each.compute))
    lines += [_time(f"  {name}", pair) for name, pair in each.units.items()]
    if each.idle_causes[IN_EXPOSED].predicted >= LEAST_SHARE:
        return [*lines, *_memory_lines(each), PORTS_NOTE]
    return lines + _memory_lines(each)


def _memory_lines(each: RunValidation) -> list[str]:
    if each.memory is None or each.memory.measured is None:
        return ["peak memory: not measured"]
    pair = each.memory
    return [
        f"{'peak memory, GB':<26} {pair.predicted / 1e9:>10.2f} {(pair.measured or 0.0) / 1e9:>10.2f} "
        f"{_signed(pair.percent):>8} %"
    ]


def verdict_line(found: Validation) -> str:
    """One line: within the tolerances, or what is not."""
    if found.failures:
        return "beyond tolerance: " + "; ".join(found.failures)
    speedups = f", speedups {SPEEDUP_TOLERANCE_POINTS:g} points" if found.speedups else ""
    return f"within tolerance: step times {found.tolerance_percent:g} %{speedups}"


def _share(name: str, pair: Pair) -> str:
    measured = "-" if pair.measured is None else f"{100.0 * pair.measured:.2f}"
    error = "" if pair.points is None else f"{pair.points:+.2f} points"
    return f"{name:<26} {100.0 * pair.predicted:>10.2f} {measured:>10} {error:>15}".rstrip()


def _time(name: str, pair: Pair) -> str:
    known = pair.percent is not None and pair.predicted >= LEAST_PREDICTED_S
    error = f"{_signed(pair.percent):>8} %" if known else f"{'-':>8}"
    return f"{name:<26} {_seconds(pair.predicted)} {_seconds(pair.measured)} {error}"


def _seconds(value: float | None) -> str:
    if value is None:
        return f"{'-':>10}"
    return f"{value:>8.4g} s" if value >= 1.0 else f"{1e3 * value:>7.4g} ms"


def _signed(value: float | None) -> str:
    return "-" if value is None else f"{value:+.1f}"
