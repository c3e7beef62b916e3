"""Sharding strategies as text: one line each, with collectives and on demand, then what to use."""

from typing import TYPE_CHECKING

from odc_sim.sharding import SHOWN
from odc_sim.sharding_study import FREE_POLICY, LOCKSTEP_POLICY, WORTH_IT, Row, ShardingResults

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
    line("network: GB that a node sends to others in a minibatch; sync: the end of a minibatch, beyond what is hidden")
    transfers = f"transfers {results.provenance}, between nodes analytic"
    line(f"sources: compute {inputs.compute.provenance}, {transfers}, memory analytic")
    if results.left_out:
        line(f"left out: {', '.join(results.left_out)}: on one node I is G")
    line()
    for text in advice(results):
        line(text, "bold")


def lines(results: ShardingResults, symbols: bool) -> list[str]:
    """The table, two lines of heading first."""
    found = [
        f"{'':8} {'':13} {'state':>6} {'peak':>7}  {'with collectives':^41}  {'on demand':^26}",
        f"{'sharding':8} {'known as':13} {'GB':>6} {'GB':>7}  {'wait for':9} {'network':>8} {'sync':>8} "
        f"{'speedup':>13}  {'network':>8} {'speedup':>17}",
    ]
    best = results.best
    names = list(dict.fromkeys(row.strategy for row in results.rows))
    for name in names:
        one, other = (
            next((row for row in results.rows if (row.strategy, row.transport) == (name, transport)), None)
            for transport in ("collective", "odc")
        )
        assert one is not None
        rows = [row for row in (one, other) if row is not None]
        fits = all(row.fits for row in rows)
        peak_gb = max(row.peak_bytes for row in rows) / 1e9
        mark = " " if fits else "✗" if symbols else "!"
        text = (
            f"{name:8} {SHOWN.get(name, ''):13} {max(row.state_bytes for row in rows) / 1e9:6.1f} {peak_gb:6.1f}{mark}"
        )
        text += f"  {one.meets:9} {one.network_bytes / 1e9:8.1f} {1e3 * one.sync_s:5.0f} ms"
        text += f" {_speedup(one, best, symbols):>13}"
        if other is not None:
            text += f"  {other.network_bytes / 1e9:8.1f} {_speedup(other, best, symbols):>17}"
        found.append(text.rstrip())
    return found


def _speedup(row: Row, best: Row | None, symbols: bool) -> str:
    low, high = row.speedup_ci95
    half = f"{(high - low) / 2:.2f}".removeprefix("0")
    return f"{row.speedup:.2f}x {'±' if symbols else '+-'}{half}{'*' if row is best else ' '}"


def advice(results: ShardingResults) -> list[str]:
    """What to use, in words."""
    best, stock = results.advised("collective", "odc"), results.advised("collective")
    if best is None or stock is None:
        return ["No strategy fits: lower --max-tokens, use more devices, or a smaller model."]
    if best.speedup < 1 + WORTH_IT:
        return ["Keep GGG (ZeRO-3, FSDP) with collectives: nothing that fits gains 2 % here."]
    if stock.speedup >= best.speedup - WORTH_IT:
        return [f"Use {_use(stock)}. On-demand transfers add nothing to it."]
    others = f"With collectives the best that fits is {_use(stock)}." if stock.speedup >= 1 + WORTH_IT else ""
    return [f"Use {_use(best)}.", others or "With collectives nothing that fits gains 2 %."]


def _use(row: Row) -> str:
    known = f" ({SHOWN[row.strategy]})" if row.strategy in SHOWN else ""
    how = "on demand" if row.transport == "odc" else "with collectives"
    return (
        f"{row.strategy}{known} {how} and {row.policy}: {100 * (row.speedup - 1):.0f} % more throughput than GGG with "
        f"collectives, {row.peak_bytes / 1e9:.0f} GB at the peak, {row.network_bytes / 1e9:.1f} GB a node to others"
    )
