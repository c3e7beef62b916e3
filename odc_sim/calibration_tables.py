"""The tables of a calibration's report, and the numbers in them."""

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from odc_sim.calibration import Calibration, Fit, TransferSample
from odc_sim.costs_measured import fitted_unit, line_of, samples_of
from odc_sim.fits import Shapes, columns

LONG_TOKENS = 4096
"""Shorter microbatches are ruled by launches; errors are stated from here on, and apart from them."""
FIT_COLUMNS = (
    *("model", "unit", "c0, us", "c1, ns", "c2, ps", "floor, us", "tokens"),
    *("fitted", "held out by the line", "held out", "shorter", "repeats"),
)


def how_measured(calibration: Calibration) -> dict[str, Any]:
    """What `odc calibrate` noted about its run; empty for files of other origin."""
    about = calibration.environment.get("calibrate", {})
    return about if isinstance(about, dict) else {}


def simulated_s(calibration: Calibration, fit: Fit, shapes: Shapes) -> NDArray[np.float64]:
    """Seconds [shapes] that the simulator takes for a unit alone on `shapes`: corrected line and floor."""
    _, tokens, squares = columns(shapes).T
    return np.maximum(fit.floor_s, fitted_unit(calibration, fit)(tokens, squares))


def heldout_errors(
    calibration: Calibration, fit: Fit, *, long: bool, line_alone: bool = False
) -> dict[tuple[int, ...], float]:
    """(predicted - measured) / measured by sample lengths, of steady microbatches that no fit or correction saw.

    Predicted is what the simulator uses or, with `line_alone`, the fit without its correction.
    """
    samples = [
        s for s in samples_of(calibration, fit) if s.heldout and not s.flagged and (s.tokens >= LONG_TOKENS) == long
    ]
    shapes = [s.lengths for s in samples]
    predicted = line_of(fit)(shapes) if line_alone else simulated_s(calibration, fit, shapes)
    return {s.lengths: float(p / s.p50_s - 1.0) for s, p in zip(samples, predicted, strict=True)}


def rate(row: TransferSample) -> float:
    """Bytes received per rank and second."""
    return max(row.world_size - 1, 1) * row.bytes / row.p50_s


def size(num_bytes: int) -> str:
    """64 MiB."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= scale:
            return f"{num_bytes / scale:.4g} {unit}"
    return f"{num_bytes} B"


def transfer_sections(calibration: Calibration) -> list[str]:
    """Alone, beside compute, and between sizes."""
    rows = calibration.transfers
    if not rows:
        return ["None were measured."]
    sizes = sorted({row.bytes for row in rows})
    ways = list(dict.fromkeys((row.op, row.backend) for row in rows))
    first = {(row.op, row.backend, row.bytes): row for row in reversed(rows)}
    cells = [[first.get((*way, num_bytes)) for way in ways] for num_bytes in sizes]
    head = ["shard", *(f"{op} {backend}" for op, backend in ways)]
    parts = [
        "GB/s received per rank, alone (microseconds below 1 MiB); all ranks at once:",
        _table(
            head,
            [
                [size(num_bytes), *("" if row is None else _alone(row) for row in line)]
                for num_bytes, line in zip(sizes, cells, strict=True)
            ],
        ),
    ]
    beside = [row for row in rows if row.overlapped_p50_s is not None]
    if beside:
        parts += [
            "Beside matrix products that run back to back, and from the start of a layer on: how many times longer a "
            "transfer takes, and compute:",
            _table(
                ["transfer", "shard", "beside", "transfer alone", "beside it", "transfer", "compute", "copy out"],
                [
                    [
                        f"{row.op} {row.backend}",
                        size(row.bytes),
                        _beside_what(row),
                        f"{row.p50_s * 1e6:.0f} us",
                        f"{(row.overlapped_p50_s or 0) * 1e6:.0f} us",
                        f"x{row.slowdown_transfer or 1:.2f}",
                        f"x{row.slowdown_compute or 1:.3f}{star(row.flagged)}",
                        "" if row.slowdown_copy_out is None else f"x{row.slowdown_copy_out:.2f}",
                    ]
                    for row in beside
                ],
            ),
        ]
    checks = how_measured(calibration).get("interpolation", [])
    if checks:
        parts += [
            "Sizes of the models' own units, as interpolated between powers of two and as measured:",
            _table(
                ["transfer", "shard", "measured", "interpolated", "error"],
                [
                    [
                        check["op"],
                        size(check["bytes"]),
                        f"{check['measured_s'] * 1e6:.1f} us",
                        f"{check['interpolated_s'] * 1e6:.1f} us",
                        f"{check['rel_error']:+.1%}",
                    ]
                    for check in checks
                ],
            ),
        ]
    return parts


def _beside_what(row: TransferSample) -> str:
    if row.beside_layer is not None:
        return f"a layer of {row.beside_layer}"
    return "" if row.beside_gemm_s is None else f"products of {row.beside_gemm_s * 1e3:.2f} ms"


def compute_sections(calibration: Calibration) -> list[str]:
    """Fits, and every microbatch of a layer."""
    if not calibration.fits:
        return ["Nothing was measured."]
    parts = [
        "seconds = c0 + c1 * tokens + c2 * sum of squared sample lengths, at least the floor: the line. The simulator "
        "corrects it by what it leaves of the fitted microbatches, depending on shape (docs/calibration.md). Errors "
        "are relative. Fitted: the line's worst. Those held out are of microbatches that neither fit nor correction "
        f"saw, of {LONG_TOKENS:,} tokens and more (median, worst) by the line alone and as simulated, and shorter ones "
        "as simulated (worst). Repeats: two fits, each of one of two times that all was measured, are so far apart at "
        "most.",
        _table(
            FIT_COLUMNS,
            [
                [
                    fit.model,
                    f"{fit.unit} {fit.direction}",
                    f"{fit.c0_s * 1e6:.1f}",
                    f"{fit.c1_s_per_token * 1e9:.2f}",
                    f"{fit.c2_s_per_token2 * 1e12:.4f}",
                    f"{fit.floor_s * 1e6:.1f}",
                    f"{fit.valid_tokens[0]:,} to {fit.valid_tokens[1]:,}",
                    f"{fit.max_rel_error:.1%}",
                    percent(heldout_errors(calibration, fit, long=True, line_alone=True).values()),
                    percent(heldout_errors(calibration, fit, long=True).values()),
                    worst(heldout_errors(calibration, fit, long=False).values()),
                    spread(fit),
                ]
                for fit in calibration.fits
            ],
        ),
        "Every microbatch of a layer (held out: h, flagged and not used: *):",
    ]
    rows = []
    for fit in calibration.fits:
        if fit.unit == "layer":
            samples = samples_of(calibration, fit)
            simulated = simulated_s(calibration, fit, [s.lengths for s in samples])
            for sample, corrected in zip(samples, simulated, strict=True):
                expected = float(line_of(fit)([sample.lengths])[0])
                rows.append(
                    [
                        fit.model,
                        fit.direction,
                        in_words(sample.lengths),
                        f"{sample.tokens:,}",
                        f"{sample.p50_s * 1e3:.3f} ms",
                        f"{expected * 1e3:.3f} ms",
                        f"{expected / sample.p50_s - 1:+.1%}",
                        f"{corrected / sample.p50_s - 1:+.1%}{' h' if sample.heldout else ''}{star(sample.flagged)}",
                    ]
                )
    return [*parts, _table(["model", "layer", "samples", "tokens", "measured", "line", "error", "simulated"], rows)]


def other_sections(calibration: Calibration) -> list[str]:
    """Copies, optimizer, host and ceilings."""
    parts = []
    if calibration.copies:
        parts += [
            "FSDP2's own copies (elements of the shard for copy_in and add, else of the unit), and how many times "
            "slower a layer goes beside those that run on another stream:",
            _table(
                ["copy", "elements", "us", "elements/ns", "a layer beside it"],
                [
                    [
                        copy.op,
                        f"{copy.elements:,}",
                        f"{copy.p50_s * 1e6:.1f}{star(copy.flagged)}",
                        f"{copy.elements / copy.p50_s * 1e-9:.1f}",
                        "" if copy.slowdown_compute is None else f"x{copy.slowdown_compute:.2f} ({copy.beside_layer})",
                    ]
                    for copy in calibration.copies
                ],
            ),
        ]
    if calibration.optimizer:
        parts += [
            "Clipping and AdamW over a rank's shard, and publishing it (with the ranks' meeting):",
            _table(
                ["parameters", "step", "publish"],
                [
                    [
                        f"{sample.parameters:,}",
                        f"{sample.step_s * 1e3:.3f} ms",
                        "" if sample.publish_s is None else f"{sample.publish_s * 1e3:.3f} ms",
                    ]
                    for sample in calibration.optimizer
                ],
            ),
        ]
    host, ceilings = calibration.host, calibration.ceilings
    rows = []
    if host is not None:
        rows.append(["host, a unit forward", f"{host.seconds_per_unit_forward * 1e3:.3f} ms"])
        for schedule, seconds in (
            ("collective-deferred", host.seconds_per_unit_forward_deferred),
            ("odc", host.seconds_per_unit_forward_one_sided),
        ):
            if seconds is not None:
                rows.append([f"host, a unit forward under {schedule}", f"{seconds * 1e3:.3f} ms"])
        rows.append(["host, a unit backward", f"{host.seconds_per_unit_backward * 1e3:.3f} ms"])
    if ceilings is not None:
        rows.append(["matrix product", f"{ceilings.gemm_flops / 1e12:.4g} TFLOP/s"])
        rows.append(["memory, read and written", f"{giga(ceilings.hbm_bytes_per_s)} GB/s"])
        if ceilings.p2p_bytes_per_s is not None:
            rows.append(["from peers", f"{giga(ceilings.p2p_bytes_per_s)} GB/s"])
    return [*parts, *([_table(["what", "measured"], rows)] if rows else [])]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def _alone(row: TransferSample) -> str:
    if row.bytes < 1 << 20:
        return f"{row.p50_s * 1e6:.1f} us"
    return f"{rate(row) / 1e9:.1f}"


def percent(errors: Iterable[float]) -> str:
    """Median and worst, in words."""
    sizes = [abs(error) for error in errors]
    return f"{statistics.median(sizes):.1%}, {max(sizes):.1%}" if sizes else "none"


def worst(errors: Iterable[float]) -> str:
    """In words."""
    return f"{max(map(abs, errors), default=0.0):.1%}"


def spread(fit: Fit) -> str:
    """How far two fits of the same are apart, in words."""
    return "not known" if fit.repeat_rel_spread is None else f"{fit.repeat_rel_spread:.1%}"


def in_words(lengths: Sequence[int]) -> str:
    """3000 + 2500; 8 x 1021."""
    if len(lengths) > 1 and len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]}"
    return " + ".join(map(str, lengths))


def giga(number: float) -> str:
    """In units of 10^9."""
    return f"{number / 1e9:.4g}"


def star(flagged: bool) -> str:
    """What marks a flagged measurement."""
    return " *" if flagged else ""
