"""Why a result says `extrapolated`, in words: what was asked for, and what was measured."""

from collections.abc import Mapping, Sequence

from odc_sim.inputs import Inputs
from odc_sim.plans import Plan
from odc_sim.results import Row


def beyond(inputs: Inputs, rows: Sequence[Row], plans: Mapping[str, Plan | str]) -> list[str]:
    """A note for each part whose numbers are extrapolated in some row."""
    return [*_compute(inputs, rows, plans), *_transfers(inputs, rows)]


def _compute(inputs: Inputs, rows: Sequence[Row], plans: Mapping[str, Plan | str]) -> list[str]:
    measured = inputs.compute.valid_tokens
    policies = dict.fromkeys(row.policy for row in rows if row.provenance.get("compute") == "extrapolated")
    found = [plan for name in policies if isinstance(plan := plans[name], Plan)]
    if measured is None or not found:
        return []
    tokens = [plan.tokens()[~plan.padding] for plan in found]
    shortest, longest = min(int(t.min()) for t in tokens), max(int(t.max()) for t in tokens)
    return [
        f"compute extrapolated: {', '.join(policies)} with microbatches of {shortest:,} to {longest:,} tokens, "
        f"measured from {measured[0]:,} to {measured[1]:,}"
    ]


def _transfers(inputs: Inputs, rows: Sequence[Row]) -> list[str]:
    calibration = inputs.machine.calibration
    if calibration is None or not any(row.provenance.get("transfers") == "extrapolated" for row in rows):
        return []
    worlds = sorted({row.world_size for row in calibration.transfers})
    if inputs.study.devices in worlds:
        return ["transfers extrapolated: shards of sizes beyond those measured"]
    over = ", ".join(map(str, worlds))
    return [f"transfers extrapolated: measured over {over} GPUs, here {inputs.study.devices}"]
