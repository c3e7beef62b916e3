"""What `--hardware` names: built-in hardware, a cluster TOML, or a calibration.json measured on the machine itself."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from odc_sim.calibration import Calibration, CopySample, HostSample, TransferSample, load_calibration
from odc_sim.datafiles import data_dir
from odc_sim.hardware import (
    Cluster,
    Host,
    Overlap,
    Slowdown,
    Transport,
    builtin_hardware,
    hardware_file,
    load_cluster,
)
from odc_sim.transfers import used

Row = TypeVar("Row", TransferSample, CopySample)

# A slowdown is a rate, so it is read where transfers are long enough not to be all latency: shards of a layer's size,
# or the largest that there are.
LEAST_BYTES_FOR_SLOWDOWN = 16 << 20
LEAST_SLOWDOWN = 0.95
"""What noise can make of a slowdown of 1: reports/kernels-h200 trusts the method to 3 to 4 %."""
OPS: dict[Transport, tuple[str, str]] = {
    "collective": ("all_gather", "reduce_scatter"),
    "odc": ("gather", "scatter_accumulate"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A cluster and, where one was given, the calibration that overrides its numbers."""

    name: str
    cluster: Cluster
    calibration: Calibration | None
    note: str = ""
    """What a reader must know about where the numbers come from."""

    @property
    def one_stream(self) -> bool:
        """Whether a CPU was calibrated, on which nothing runs beside anything."""
        return self.calibration is not None and "gpu" not in self.calibration.environment


def load_machine(name_or_path: str) -> Machine:
    """The machine of `--hardware`.

    Raises:
        InputError: unknown name, or a file that is neither a cluster TOML nor a calibration.
    """
    if not name_or_path.endswith(".json"):
        cluster = load_cluster(name_or_path)
        # a user's file goes by its own name: the one inside is often that of the file it was copied from
        name = cluster.name if name_or_path in builtin_hardware() else Path(name_or_path).stem
        if cluster.calibration is None:
            return Machine(name=name, cluster=cluster, calibration=None)
        calibration = load_calibration(_named_calibration(cluster.calibration))
        measured = replace(_put_in(calibration, cluster), name=cluster.name)
        when = calibration.created[:10]
        note = f"calibration: {cluster.calibration}, measured {when}; `odc calibrate` measures your machine"
        return Machine(name=name, cluster=measured, calibration=calibration, note=note)
    calibration = load_calibration(name_or_path)
    cluster = _calibrated(calibration)
    device, like = cluster.device, cluster.name.removesuffix(", calibrated")
    note = (
        f"calibration of {device.name}; memory {device.memory_bytes / 1e9:.1f} GB, peak {device.peak_flops / 1e12:.0f} "
        f"TFLOP/s and network are those of {like}"
    )
    return Machine(name=Path(name_or_path).stem, cluster=cluster, calibration=calibration, note=note)


def machine_files(name_or_path: str) -> list[Path]:
    """What the numbers of `--hardware` are read from.

    Raises:
        InputError: as `load_machine`.
    """
    if name_or_path.endswith(".json"):
        return [Path(name_or_path)]
    calibration = load_cluster(name_or_path).calibration
    return [hardware_file(name_or_path), *([_named_calibration(calibration)] if calibration else [])]


def _named_calibration(name: str) -> Path:
    return data_dir("traces") / "calibration" / name


def of_model(machine: Machine, model: str) -> Machine:
    """The same with what transfers and copies cost this model's layers, where that was measured beside them."""
    if machine.calibration is None:
        return machine
    found = _overlaps(machine.calibration, machine.cluster, model)
    overlap = {name: replace(found[name], source=general.source) for name, general in machine.cluster.overlap.items()}
    return replace(machine, cluster=replace(machine.cluster, overlap=overlap))


def replaced(calibration: Calibration | None) -> dict[str, str]:
    """What is simulated with instead of a cluster's own numbers, by its section and in words."""
    if calibration is None:
        return {}
    moved = [op for ops in OPS.values() for op in ops if any(used(row, op) for row in calibration.transfers)]
    timed = ["copies"] * bool(calibration.copies) + ["optimizer"] * bool(calibration.optimizer)
    models = sorted({fit.model for fit in calibration.fits})
    found = {
        "device": f"the calibration's times of {' and '.join(timed)}, not hbm_bytes_per_s" if timed else "",
        "intra": f"the calibration's times of {', '.join(moved)}" if moved else "",
        "efficiency": f"the calibration's times of {', '.join(models)}" if models else "",
    }
    return {section: text for section, text in found.items() if text}


def _calibrated(calibration: Calibration) -> Cluster:
    """The built-in cluster of the same GPU with what was measured put in."""
    return _put_in(calibration, load_cluster(_built_in_like(gpu_name(calibration.environment))))


def gpu_name(environment: Mapping[str, Any]) -> str:
    """Of what an `environment` describes; empty for a CPU."""
    return str(_gpu(environment).get("name", ""))


def _gpu(environment: Mapping[str, Any]) -> dict[str, Any]:
    recorded = environment.get("gpu", "")
    return recorded if isinstance(recorded, dict) else {"name": recorded}


def _put_in(calibration: Calibration, base: Cluster) -> Cluster:
    """`base` with what was measured in place of its own numbers; links and the network stay."""
    gpu = gpu_name(calibration.environment)
    memory_bytes = _gpu(calibration.environment).get("memory_bytes")
    if not isinstance(memory_bytes, int) or memory_bytes <= 0:
        memory_bytes = base.device.memory_bytes
    source = "the calibration"
    host = calibration.host
    return replace(
        base,
        name=f"{base.name}, calibrated",
        source=source,
        device=replace(
            base.device,
            name=gpu or base.device.name,
            memory_bytes=memory_bytes,
        ),
        overlap=_overlaps(calibration, base),
        host=base.host if host is None else host_of(host, source),
    )


def host_of(sample: HostSample, source: str) -> Host:
    """The host that was measured."""
    return Host(**asdict(sample), source=source)


def _built_in_like(gpu: str) -> str:
    """The built-in hardware whose first word (a100, h200) is a word of the GPU's name; else the generic one.

    PCIe boards are other machines than the built-in ones, in memory and in links.
    """
    words = set(re.split(r"[^a-z0-9]+", gpu.lower()))
    if "pcie" in words:
        return "generic"
    return next((name for name in builtin_hardware() if name.split("-")[0] in words), "generic")


def _fastest(rows: list[TransferSample]) -> list[TransferSample]:
    """Of each large size the way that is fastest, as in `transfers.py`; else of the largest size."""
    large = [row for row in rows if row.bytes >= LEAST_BYTES_FOR_SLOWDOWN]
    most = max((row.bytes for row in rows), default=0)
    best: dict[int, TransferSample] = {}
    for row in large or [row for row in rows if row.bytes == most]:
        if row.bytes not in best or row.p50_s < best[row.bytes].p50_s:
            best[row.bytes] = row
    return list(best.values())


def _plausible(row: TransferSample) -> bool:
    """Whether it was timed beside compute, and neither got much faster by it."""
    slowdowns = (row.slowdown_transfer, row.slowdown_compute)
    return all(slowdown is not None and slowdown >= LEAST_SLOWDOWN for slowdown in slowdowns)


def _overlaps(calibration: Calibration, base: Cluster, model: str = "") -> dict[Transport, Overlap]:
    return {transport: _overlap(calibration, transport, default, model) for transport, default in base.overlap.items()}


def _overlap(calibration: Calibration, transport: Transport, default: Overlap, model: str) -> Overlap:
    """A slowdown a little below 1 is one of about 1, seen through noise: it counts as 1, not as unknown.

    What was measured beside a layer of `model` comes first, then what was beside other models' layers.
    """
    slowdowns: list[Slowdown] = []
    lacks: list[str] = []
    beside: list[str] = []
    for op, fallback in zip(OPS[transport], (default.unshard, default.reduce), strict=True):
        mine = [row for row in calibration.transfers if used(row, op)]
        # what training does, where it was measured; else matrix products
        rows = _of_layers(mine, model) or _fastest([row for row in mine if not row.beside_layer and _plausible(row)])
        lacks += [] if rows else [op]
        beside += ["layers" if rows[0].beside_layer else "matrix products"] if rows else []
        slowdowns.append(
            Slowdown(
                transfer=_median_or([row.slowdown_transfer for row in rows], fallback.transfer),
                compute=_lost([row.slowdown_compute for row in rows], fallback.compute),
            )
        )
    of_transport = [row for row in calibration.transfers if row.op in OPS[transport]]
    reduces = _of_layers([row for row in of_transport if row.op == OPS[transport][1]], model)
    copies: dict[str, list[CopySample]] = {}
    for name, op in zip(("copy_in", "add"), OPS[transport], strict=True):
        # Measured together with the transfer: how what is lost divides is less certain than the sum.
        known = {row.beside_layer for row in of_transport if row.op == op and not row.flagged}
        copies[name] = _of_layers(
            [row for row in calibration.copies if row.op == name and row.beside_layer in known], model
        )
    source = f"the calibration, median of large transfers beside {' and '.join(dict.fromkeys(beside))}"
    if not beside:
        source = "the calibration"
    if lacks:
        source = f"{source}; {' and '.join(lacks)} not measured beside compute: {default.source}"
    return Overlap(
        unshard=slowdowns[0],
        reduce=slowdowns[1],
        source=source,
        waiting=_median_or([row.slowdown_waiting for row in of_transport], default.waiting),
        copy_out=_median_or([row.slowdown_copy_out for row in reduces], default.copy_out),
        copy_in=_lost([row.slowdown_compute for row in copies["copy_in"]], default.copy_in),
        add=_lost([row.slowdown_compute for row in copies["add"]], default.add),
    )


def _of_layers(rows: Sequence[Row], model: str) -> list[Row]:
    """Those measured beside layers: of `model`, or else of any."""
    of_layers = [row for row in rows if row.beside_layer and not row.flagged]
    return [row for row in of_layers if row.beside_layer == model] or of_layers


def _lost(slowdowns: list[float | None], default: float) -> float:
    """What compute loses is 1 - 1 / slowdown of the other's time: the middle one of these."""
    rates = [1.0 / slowdown for slowdown in slowdowns if slowdown is not None]
    return max(1.0, 1.0 / median(rates)) if rates else default


def _median_or(slowdowns: list[float | None], default: float) -> float:
    seen = [slowdown for slowdown in slowdowns if slowdown is not None]
    return max(1.0, median(seen)) if seen else default
