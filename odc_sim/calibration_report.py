"""What a calibration says, for people: a summary for the terminal, and a folder with tables and plots beside the file.

Everything comes from the file alone, so a report can be made again anywhere, without torch and without the machine.
"""

from collections.abc import Sequence
from pathlib import Path

from odc_sim.calibration import Calibration, CopySample, TransferSample, load_calibration
from odc_sim.calibration_tables import (
    LONG_TOKENS,
    compute_sections,
    giga,
    heldout_errors,
    how_measured,
    other_sections,
    percent,
    rate,
    simulated_s,
    size,
    spread,
    star,
    transfer_sections,
)
from odc_sim.header import write_bytes

SHOWN_BYTES = 64 << 20


def write_calibration_report(path: str | Path) -> list[Path]:
    """Write report.md and its plots into the folder NAME-report beside NAME.json; what was written.

    Raises InputError where the file is no calibration, or the folder cannot be written.
    """
    from odc_sim.calibration_plots import bandwidth_figure, cost_figure
    from odc_sim.plots_style import save_png
    from odc_sim.report import make_directory

    path = Path(path)
    calibration = load_calibration(path)
    folder = path.with_name(f"{path.stem}-report")
    make_directory(folder)
    written = [folder / "report.md"]
    plots = []
    if calibration.transfers:
        plots.append(("bandwidth.png", "Bandwidth by size", bandwidth_figure(calibration)))
    if calibration.fits:
        plots.append(
            (
                "cost.png",
                "Time of a layer by tokens, and how far the simulator and the line are from it",
                cost_figure(calibration),
            )
        )
    for name, _, figure in plots:
        save_png(figure, folder / name)
        written.append(folder / name)
    text = markdown(calibration, path.name, [(name, caption) for name, caption, _ in plots])
    write_bytes(folder / "report.md", text.encode())
    return written


def summary(calibration: Calibration) -> list[str]:
    """A few lines for the terminal."""
    lines = [_title(calibration)]
    ceilings, host = calibration.ceilings, calibration.host
    if ceilings is not None:
        peer = f", peer copy {giga(ceilings.p2p_bytes_per_s)} GB/s" if ceilings.p2p_bytes_per_s else ""
        lines.append(
            f"products {ceilings.gemm_flops / 1e12:.3g} TFLOP/s, memory {giga(ceilings.hbm_bytes_per_s)} GB/s{peer}"
        )
    for row in _near(calibration.transfers, SHOWN_BYTES):
        lines.append(
            f"{row.op} {row.backend}, {size(row.bytes)}: {giga(rate(row))} GB/s"
            + (f", {_beside(row)} beside compute" if row.overlapped_p50_s else "")
        )
    lines += [
        f"beside a layer of {model}: {', '.join(costs)}" for model, costs in _costs_of_layers(calibration).items()
    ]
    if calibration.device_speed:
        speeds = ", ".join(f"{speed:.3f}" for speed in calibration.device_speed)
        lines.append(f"layers' speed by rank, relative to the ranks' mean: {speeds}")
    for fit in calibration.fits:
        if fit.unit == "layer":
            tokens = fit.valid_tokens[1]
            errors = [abs(error) for error in heldout_errors(calibration, fit, long=True).values()]
            median_and_worst = f"held out from {LONG_TOKENS:,} tokens {percent(errors)} (median, worst)"
            checked = median_and_worst if errors else "no long microbatch held out"
            lines.append(
                f"{fit.model} layer {fit.direction}, one sample of {tokens:,} tokens: "
                f"{simulated_s(calibration, fit, [[tokens]])[0] * 1e3:.3g} ms; {checked}; repeats {spread(fit)}"
            )
    if host is not None:
        lines.append(
            f"host: {host.seconds_per_unit_forward * 1e3:.2f} ms a unit forward, "
            f"{host.seconds_per_unit_backward * 1e3:.2f} ms backward"
        )
    for optimizer in calibration.optimizer[-1:]:
        publish = f", publish {optimizer.publish_s * 1e3:.3g} ms" if optimizer.publish_s else ""
        lines.append(
            f"optimizer, {optimizer.parameters / 1e6:,.3g}M parameters: step {optimizer.step_s * 1e3:.3g} ms{publish}"
        )
    flagged, total = _flagged(calibration)
    lines.append(f"{flagged} of {total} measurements flagged: noisy, or different when repeated")
    about = how_measured(calibration)
    lines += [f"left out: {reason}" for reason in about.get("left_out", [])]
    lines += [f"FAILED: {phase}: {reason}" for phase, reason in failed(calibration).items()]
    return lines


def _costs_of_layers(calibration: Calibration) -> dict[str, list[str]]:
    """For each model what its layer loses beside each copy and transfer."""
    rows: list[tuple[CopySample | TransferSample, float]] = [(copy, copy.p50_s) for copy in calibration.copies]
    rows += [(row, row.overlapped_p50_s or row.p50_s) for row in calibration.transfers]
    found: dict[str, list[str]] = {}
    for row, seconds in rows:
        if row.beside_layer and row.lost_s is not None:
            text = f"{row.op} of {seconds * 1e6:.0f} us costs it {row.lost_s * 1e6:.0f}{star(row.flagged)}"
            found.setdefault(row.beside_layer, []).append(text)
    return found


def failed(calibration: Calibration) -> dict[str, str]:
    """The phases that could not be measured, and why."""
    found = how_measured(calibration).get("failed", {})
    return dict(found) if isinstance(found, dict) else {}


def markdown(calibration: Calibration, name: str, plots: Sequence[tuple[str, str]]) -> str:
    """report.md: every table, and the plots by name and caption."""
    captions = {file: f"![{caption}]({file})" for file, caption in plots}
    sections = [
        f"# {_title(calibration)}",
        f"`{calibration.command}`, {calibration.created}. Made from `{name}` alone; again with "
        f"`odc calibrate --report {name}`.",
        *_problems(calibration),
        "## Transfers",
        captions.get("bandwidth.png", ""),
        *transfer_sections(calibration),
        "## Compute",
        captions.get("cost.png", ""),
        *compute_sections(calibration),
        "## Copies, optimizer, host, ceilings",
        *other_sections(calibration),
        "## What will be extrapolated",
        *[f"- {line}" for line in limits(calibration)],
    ]
    return "\n\n".join(section for section in sections if section).replace("\n\n- ", "\n- ") + "\n"


def limits(calibration: Calibration) -> list[str]:
    """Where the simulator, asked with this file, will label its answer `extrapolated`, or use no measurement at all."""
    lines = []
    worlds = sorted({row.world_size for row in calibration.transfers})
    for op in dict.fromkeys(row.op for row in calibration.transfers):
        sizes = [row.bytes for row in calibration.transfers if row.op == op]
        lines.append(f"{op}: shards outside {size(min(sizes))} to {size(max(sizes))}")
    if worlds:
        lines.append(f"transfers of any number of devices but {', '.join(map(str, worlds))}")
    else:
        lines.append("all transfers: none were measured, so the built-in links are used")
    for model in dict.fromkeys(fit.model for fit in calibration.fits):
        fits = [fit for fit in calibration.fits if fit.model == model]
        low, high = max(f.valid_tokens[0] for f in fits), min(f.valid_tokens[1] for f in fits)
        lines.append(f"{model}: microbatches outside {low:,} to {high:,} tokens")
    lines.append("compute of any other model: not measured, so FLOPs over the device's peak are used (`analytic`)")
    if calibration.optimizer:
        counts = [sample.parameters for sample in calibration.optimizer]
        lines.append(f"the optimizer's step outside {min(counts):,} to {max(counts):,} parameters a rank")
    if calibration.host is None:
        lines.append("the host's time to enqueue a unit: not measured")
    return lines


def _title(calibration: Calibration) -> str:
    gpu = calibration.environment.get("gpu")
    name = gpu.get("name", "a GPU") if isinstance(gpu, dict) else "a CPU"
    ranks = how_measured(calibration).get("ranks")
    seconds = sum(how_measured(calibration).get("phases_s", {}).values())
    return (
        f"Calibration of {name}"
        + (f", {ranks} ranks" if ranks else "")
        + (f", measured in {seconds:.0f} s" if seconds else "")
    )


def _problems(calibration: Calibration) -> list[str]:
    flagged, total = _flagged(calibration)
    lines = [
        f"{flagged} of {total} measurements are flagged (*): noisy, different when repeated, or a slowdown below 1."
    ]
    lines += [f"- **{phase} failed**: {reason}" for phase, reason in failed(calibration).items()]
    lines += [f"- left out: {reason}" for reason in how_measured(calibration).get("left_out", [])]
    return ["\n\n".join(lines)]


def _near(rows: Sequence[TransferSample], num_bytes: int) -> list[TransferSample]:
    """Of each way the size nearest to `num_bytes`, the first of several."""
    found: dict[tuple[str, str], TransferSample] = {}
    for row in sorted(rows, key=lambda row: abs(row.bytes - num_bytes)):
        found.setdefault((row.op, row.backend), row)
    return list(found.values())


def _beside(row: TransferSample) -> str:
    return f"x{row.slowdown_transfer or 1:.2f} (compute x{row.slowdown_compute or 1:.3f}{star(row.flagged)})"


def _flagged(calibration: Calibration) -> tuple[int, int]:
    flags = [row.flagged for rows in (calibration.transfers, calibration.copies) for row in rows]
    flags += [row.flagged for row in calibration.compute]
    return sum(flags), len(flags)
