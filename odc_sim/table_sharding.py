"""Sharding strategies as text: one line each, with collectives and on demand, then what to use."""

from typing import TYPE_CHECKING

from odc_sim.sharding import SHOWN
from odc_sim.sharding_study import FREE_POLICY, LOCKSTEP_POLICY, STOCK, WORTH_IT, Row, ShardingResults
from odc_sim.transfers import weakest

if TYPE_CHECKING:
    from rich.console import Console


def print_sharding(results: ShardingResults, console: "Console") -> None:
    """Title, table, what it means, and the advice last. Plain text when piped."""

    def line(text: str = "", style: str = "") -> None:
        console.print(text, style=style or None, markup=False, highlight=False)

    symbols = console.encoding.lower().startswith("utf")
    study, inputs = results.inputs.study, results.inputs
    memory_gb = inputs.machine.cluster.device.memory_bytes / 1e9
    nodes = f"{results.nodes} node{'s' * (results.nodes > 1)}"
    line(
        f"{inputs.workload_name}, {inputs.model.name} on {study.devices} devices ({nodes}) of {inputs.machine.name}: "
        f"{study.minibatches} minibatches of {study.minibatch_size} samples a device, "
        f"max_tokens {inputs.max_tokens:,}, recipe {study.recipe}, seed {study.seed}",
        "bold",
    )
    line()
    for number, text in enumerate(lines(results, symbols)):
        line(text, "bold" if number < 2 else "")
    line()
    line("parameters, gradients, optimizer state: N not divided, I over the ranks of a node, G over all")
    line(
        f"speedup over GGG with collectives, {LOCKSTEP_POLICY} where ranks wait for others in every microbatch, else "
        f"{FREE_POLICY}; * fastest that fits"
    )
    no = "✗" if symbols else "!"
    line(f"memory: estimates against {memory_gb:.1f} GB, the larger of both transports; {no} does not fit")
    line(
        "network: GB that a node sends to others in a minibatch; sync: making nodes equal at its end, beyond what the "
        "last backward hides (nothing of gradients that were pushed on demand, or beside gathers over the network)"
    )
    provenance = weakest([row.provenance for row in results.rows])
    transfers = f"transfers {provenance}, between nodes once a minibatch analytic"
    line(f"sources: compute {inputs.compute.provenance}, {transfers}, memory analytic")
    if results.left_out:
        same = "on one node I is G" if results.nodes == 1 else "on nodes of one device I is N"
        line(f"left out: {', '.join(results.left_out)}: {same}")
    line()
    for text in advice(results):
        line(text, "bold")


def lines(results: ShardingResults, symbols: bool) -> list[str]:
    """The table, two lines of heading first."""
    found = [
        f"{'':8} {'':13} {'state':>6} {'peak':>7}  {'with collectives':^41}  {'on demand':^32}",
        f"{'sharding':8} {'known as':13} {'GB':>6} {'GB':>7}  {'wait for':9} {'network':>8} {'sync':>8} "
        f"{'speedup':>13}  {'network':>8} {'sync':>8} {'speedup':>14}",
    ]
    by_name: dict[str, list[Row]] = {}
    for row in results.rows:
        name = f"{row.strategy} deferred" if row.transport == "collective-deferred" else row.strategy
        by_name.setdefault(name, []).append(row)
    for name, rows in by_name.items():
        mark = " " if all(row.fits for row in rows) else "✗" if symbols else "!"
        letters, _, deferred = name.partition(" ")
        state_gb, peak_gb = max(row.state_bytes for row in rows) / 1e9, max(row.peak_bytes for row in rows) / 1e9
        text = f"{letters:8} {deferred or SHOWN.get(letters, ''):13} {state_gb:6.1f} {peak_gb:6.1f}{mark}"
        text += f"  {rows[0].meets:9}"
        for row in rows:
            text += f" {row.network_bytes / 1e9:8.1f} {1e3 * row.sync_s:5.0f} ms {_speedup(row, results, symbols):>13} "
        found.append(text.rstrip())
    return found


def _speedup(row: Row, results: ShardingResults, symbols: bool) -> str:
    low, high = row.speedup_ci95
    half = f"{(high - low) / 2:.2f}".removeprefix("0")
    return f"{row.speedup:.2f}x {'±' if symbols else '+-'}{half}{'*' if row is results.fastest() else ' '}"


def advice(results: ShardingResults) -> list[str]:
    """What to use, in words."""
    fastest, stock = results.fastest(), results.fastest(*STOCK)
    if fastest is None or stock is None:
        return ["No strategy fits: lower --max-tokens, use more devices, or a smaller model."]
    if fastest.speedup < 1 + WORTH_IT:
        return ["Keep GGG (ZeRO-3, FSDP) with collectives: nothing that fits gains 2 % here."]
    if stock.speedup >= fastest.speedup * (1 - WORTH_IT):
        return [f"Use {_use(results.advised(*STOCK))}. On-demand transfers add nothing worth it."]
    without = (
        f"the best that fits is {_use(results.advised(*STOCK))}"
        if stock.speedup >= 1 + WORTH_IT
        else "nothing gains 2 %"
    )
    return [f"Use {_use(results.advised())}.", f"Without on-demand transfers {without}."]


def _use(row: Row | None) -> str:
    assert row is not None  # there is a fastest one, and it is among those near it
    known = f" ({SHOWN[row.strategy]})" if row.strategy in SHOWN else ""
    how = {"odc": "on demand", "collective": "with collectives"}.get(row.transport, "deferred")
    return (
        f"{row.strategy}{known} {how} and {row.policy}: {100 * (row.speedup - 1):.0f} % more throughput than GGG with "
        f"collectives, {row.peak_bytes / 1e9:.0f} GB at the peak, {row.network_bytes / 1e9:.1f} GB a node to others"
    )
