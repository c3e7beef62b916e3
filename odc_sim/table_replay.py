"""A replay as text: seconds a minibatch at each kind of barrier, the ceilings, and what they rest on."""

from typing import TYPE_CHECKING

from odc_sim.durations import CAUSE_WORDS
from odc_sim.metrics import Speedup, rate
from odc_sim.replay import ASSUMPTIONS, Floats, Replay
from odc_sim.schedules import BARRIERS
from odc_sim.table import LEAST_CAUSE

if TYPE_CHECKING:
    from rich.console import Console


def print_replay(replay: Replay, console: "Console", name: str) -> None:
    """Title, table, what it assumes, notes, and the ceilings last. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    line(
        f"{name}: {replay.recorded_s.size} minibatch{'es' * (replay.recorded_s.size != 1)} of {replay.ranks} ranks, "
        f"{replay.layers} layers",
        "bold",
    )
    line()
    for number, row in enumerate(rows(replay)):
        line(row, "bold" if number == 0 else "")
    line()
    for text in ASSUMPTIONS:
        line(f"assumes: {text}", "dim")
    for text in replay.notes:
        line(f"note: {text}")
    line()
    for text in ceiling_lines(replay):
        line(text, "bold")


def rows(replay: Replay) -> list[str]:
    """The table's lines, heading first."""
    lines = [f"{'ranks meet':<22} {'s/minibatch':>11} {'recorded /':>10} {'idle %':>6}  waits"]

    def add(name: str, makespan_s: Floats, causes: dict[str, float]) -> None:
        named = ", ".join(
            f"{CAUSE_WORDS.get(cause, cause)} {100.0 * share:.0f} %"
            for cause, share in sorted(causes.items(), key=lambda item: -item[1])[:3]
            if share >= LEAST_CAUSE
        )
        lines.append(
            f"{name:<22} {makespan_s.mean():>11.4g} {rate(replay.recorded_s, makespan_s):>9.2f}x "
            f"{100.0 * replay.idle_rate(makespan_s):>6.1f}  {named}".rstrip()
        )

    total_s = replay.ranks * float(replay.recorded_s.sum())
    add("as recorded", replay.recorded_s, {cause: s / total_s for cause, s in replay.recorded_waits_s.items()})
    for barrier in BARRIERS:
        found = replay.barriers[barrier]
        if isinstance(found, str):
            lines.append(f"{'every ' + barrier:<22} {found.split(' (')[0]}")
        else:
            rank_s = replay.ranks * found.makespan_s
            add(f"every {barrier}", found.makespan_s, {c: rate(s, rank_s) for c, s in found.waits_s.items()})
    add("perfectly balanced", replay.balanced_s, {})
    return lines


def ceiling_lines(replay: Replay) -> list[str]:
    """What ODC can give at most, in words."""
    found = replay.ceilings()
    lines = []
    for suffix, base in (("", "layer barriers"), ("_recorded", "the job as recorded, its transfers saved too")):
        if f"placement{suffix}" in found:
            here, balanced = found[f"placement{suffix}"], found[f"balanced{suffix}"]
            lines.append(
                f"ODC gives at most {_times(here)} over {base}; perfectly balanced as well, {_times(balanced)}"
            )
    return lines


def _times(found: Speedup) -> str:
    half = (found.high - found.low) / 2.0
    return f"{found.value:.2f}x" + (f" ±{half:.2f}".replace("±0.", "±.") if half >= 0.005 else "")
