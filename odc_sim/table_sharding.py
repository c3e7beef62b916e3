"""Sharding strategies as text: one line each, with collectives and on demand, then what to use."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from odc_sim.memory import TIGHT, TOO_TIGHT
from odc_sim.notes import BETWEEN_NODES
from odc_sim.sharding import SHOWN
from odc_sim.sharding_play import BASE_POLICY, TRIED, Row
from odc_sim.sharding_study import STOCK, WORTH_IT, ShardingResults
from odc_sim.study import Study
from odc_sim.transfers import weakest

if TYPE_CHECKING:
    from rich.console import Console

IN_TITLE = ("workload", "lengths", "column", "model", "hardware", "devices", "minibatch_size", "minibatches", "seed")
"""Fields of a study that the title tells; others are told where they are not the default."""
NEEDS = {
    "NNN": "DDP's no_sync()",
    "NNG": "ZeRO-1 with gradients summed on the rank",
    "III": "FSDP2's set_requires_all_reduce(False)",
}
"""What keeps the stock implementation from making nodes equal in every microbatch."""
HOMEMADE = ("NNI", "NII", "NIG", "INI", "ING", "IIG", "IGG", "GNG", "GIG")
"""Strategies that neither DDP nor FSDP2 has; some are in DeepSpeed, Megatron or PaRO's code."""
MUCH = 0.1
"""Of a device's memory: what is worth telling."""


def print_sharding(results: ShardingResults, console: "Console") -> None:
    """Title, table, what it means, and the advice last. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    symbols = console.encoding.lower().startswith("utf")
    line(title(results), "bold")
    line()
    for number, text in enumerate(lines(results, symbols)):
        line(text, "bold" if number < 2 else "")
    line()
    for text in notes(results, symbols):
        line(text)
    line()
    for text in advice(results):
        line(text, "bold")


def title(results: ShardingResults) -> str:
    """What was asked, in one line."""
    study, inputs = results.inputs.study, results.inputs
    nodes = f"{results.nodes} node{'s' * (results.nodes > 1)}"
    text = (
        f"{inputs.workload_name}, {inputs.model.name} on {study.devices} devices ({nodes}) of {inputs.machine.name}: "
    )
    text += f"{study.minibatches} minibatches of {study.minibatch_size} samples a device, seed {study.seed}"
    others = study.changed(*(name for name in Study.model_fields if name not in IN_TITLE))
    return ", ".join([text, *(f"{name.replace('_', ' ')} {value}" for name, value in others.items())])


def lines(results: ShardingResults, symbols: bool) -> list[str]:
    """The table, two lines of heading first."""
    found = [
        f"{'':8} {'':13} {'with collectives':^51} {'on demand':^41}",
        f"{'sharding':8} {'known as':13} {'wait for':9} {'network':>9} {'sync':>8} {'peak':>8} {'speedup':>13}  "
        f"{'network':>9} {'sync':>8} {'peak':>8} {'speedup':>13}",
    ]
    stars = recommended(results)
    by_name: dict[str, list[Row]] = {}
    for row in results.rows:
        name = f"{row.strategy} deferred" if row.transport == "collective-deferred" else row.strategy
        by_name.setdefault(name, []).append(row)
    for name, rows in by_name.items():
        letters, _, deferred = name.partition(" ")
        text = f"{letters:8} {deferred or SHOWN.get(letters, ''):13} {rows[0].meets:9}"
        for row in rows:
            mark = " " if row.fits else "✗" if symbols else "!"
            text += f" {row.network_bytes / 1e9:6.1f} GB {1e3 * row.sync_s:5.0f} ms {row.peak_bytes / 1e9:5.1f}{mark}GB"
            text += f" {_speedup(row, symbols, star=row in stars):>13} "
        found.append(text.rstrip())
    return found


def _speedup(row: Row, symbols: bool, *, star: bool) -> str:
    low, high = row.speedup_ci95
    half = f"{(high - low) / 2:.2f}".removeprefix("0")
    return f"{row.speedup:.2f}x {'±' if symbols else '+-'}{half}{'*' if star else ' '}"


def notes(results: ShardingResults, symbols: bool) -> Iterator[str]:
    """What a reader must know."""
    inputs = results.inputs
    memory_gb = inputs.machine.cluster.device.memory_bytes / 1e9
    tried = inputs.study.policy or TRIED
    yield "parameters, gradients, optimizer state: N not divided, I over the ranks of a node, G over all"
    yield (
        f"speedup over GGG with collectives dealt by {BASE_POLICY}; each row by the fastest of {', '.join(tried)} (of "
        "those with equal counts, where ranks wait for others in every microbatch), which is part of the gain"
    )
    for transport, how in (("collective", "with collectives"), ("odc", "on demand")):
        yield f"dealt {how}: {_dealt([row for row in results.rows if row.transport == transport])}"
    yield (
        f"* advised: of what fits (in {TOO_TIGHT:.0%} of memory, if anything does) and is within {WORTH_IT:.0%} of the "
        "fastest, it sends least between nodes, then takes least memory"
    )
    yield f"peak: estimated memory of {memory_gb:.1f} GB; {'✗' if symbols else '!'} does not fit"
    yield (
        "sync: once a minibatch nodes are made equal; what the last backward does not hide of it (it hides nothing of "
        "gradients that were pushed on demand, or beside gathers over the network)"
    )
    shown = {row.strategy for row in results.rows}
    needs = [f"{name} {how}" for name, how in NEEDS.items() if name in shown]
    if needs:
        yield f"once a minibatch, and unequal microbatch counts, need {'; '.join(needs)}"
    if shown & set(HOMEMADE):
        yield f"neither DDP nor FSDP2 has {', '.join(name for name in HOMEMADE if name in shown)}"
    if results.nodes > 1:
        ring = inputs.study.collectives == "ring"
        yield (
            f"network: GB that a node sends to others in a minibatch; collectives over all ranks are "
            f"{'flat rings, which send up to twice what --collectives two-level would' if ring else 'two-level'}"
        )
    provenance = weakest([row.provenance for row in results.rows])
    between = ", between nodes once a minibatch analytic" if results.nodes > 1 else ""
    compute = " or ".join(dict.fromkeys(row.compute for row in results.rows))
    yield f"sources: compute {compute}, transfers {provenance}{between}, memory analytic"
    if results.nodes > 1:
        yield BETWEEN_NODES
    if results.left_out:
        same = "on one node I is G" if results.nodes == 1 else "on nodes of one device I is N"
        yield f"left out: {', '.join(results.left_out)}: {same}"


def _dealt(rows: list[Row]) -> str:
    """all by lb-mini, or: NNN, NNG by lb-mini; III by cost-rows"""
    by_policy: dict[str, list[str]] = {}
    for row in rows:
        by_policy.setdefault(row.policy, []).append(row.strategy)
    if len(by_policy) == 1:
        return f"all by {rows[0].policy}"
    return "; ".join(f"{', '.join(names)} by {policy}" for policy, names in by_policy.items())


def recommended(results: ShardingResults) -> list[Row]:
    """What to use, and if that transfers on demand, what else without; nothing where nothing gains."""
    fastest, stock = results.fastest(), results.fastest(*STOCK)
    if fastest is None or fastest.speedup < 1 + WORTH_IT:
        return []
    enough = stock is not None and stock.speedup >= fastest.speedup * (1 - WORTH_IT)
    found = [] if enough else [results.advised()]
    if stock is not None and stock.speedup >= 1 + WORTH_IT:
        found.append(results.advised(*STOCK))
    return [row for row in found if row is not None]


def advice(results: ShardingResults) -> list[str]:
    """What to use, in words."""
    found = recommended(results)
    if results.fastest() is None:
        return ["No strategy fits: lower --max-tokens, use more devices, or a smaller model."]
    if not found:
        keep = "Keep GGG (ZeRO-3, FSDP) with collectives: nothing of these that fits gains 2 % here."
        return [keep + _too_tight(results, results.too_tight(), 1.0)]
    first = f"Use {_use(results, found[0])}."
    if found[0].transport != "odc":
        return [first, _as_fast_on_demand(results, found[0])]
    second = f"Without on-demand transfers {f'use {_use(results, found[1])}' if found[1:] else 'nothing gains 2 %'}."
    return [first, second + _too_tight(results, results.too_tight(*STOCK), found[1].speedup if found[1:] else 1.0)]


def _too_tight(results: ShardingResults, row: Row | None, other: float) -> str:
    if row is None or row.speedup < other * (1 + WORTH_IT):
        return ""
    return f" It fits, but too tightly to count on: {_use(results, row)}."


def _as_fast_on_demand(results: ShardingResults, stock: Row) -> str:
    most_bytes = stock.peak_bytes - MUCH * results.inputs.machine.cluster.device.memory_bytes
    rows = [row for row in results.rows if row.transport == "odc" and row.fits and row.peak_bytes <= most_bytes]
    near = [row for row in rows if row.speedup >= stock.speedup * (1 - WORTH_IT)]
    least = min(near, key=lambda row: (row.network_bytes, row.peak_bytes), default=None)
    if least is None:
        return "On-demand transfers add nothing worth it."
    return f"On-demand transfers are not faster; as fast with less memory is {_use(results, least)}."


def _use(results: ShardingResults, row: Row) -> str:
    known = f" ({SHOWN[row.strategy]})" if row.strategy in SHOWN else ""
    how = {"odc": "on demand", "collective": "with collectives"}.get(row.transport, "deferred")
    memory_bytes = results.inputs.machine.cluster.device.memory_bytes
    text = f"{row.strategy}{known} {how}, {row.policy}: {100 * (row.speedup - 1):.0f} % more throughput than the "
    text += f"baseline, {row.peak_bytes / 1e9:.0f} GB at the peak"
    if row.peak_bytes > TIGHT * memory_bytes:
        text += f" (tight: {row.peak_bytes / memory_bytes:.0%} of a device)"
    return text + (f", {row.network_bytes / 1e9:.1f} GB from each node to others" if row.network_bytes else "")
