"""The calibration file while it is being measured, written whole after every phase, and what is said meanwhile."""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from odc_kernels.environment import describe
from odc_sim.calibration import (
    Calibration,
    Ceilings,
    ComputeSample,
    CopySample,
    Fit,
    HostSample,
    OptimizerSample,
    TransferSample,
    write_calibration,
)
from odc_sim.header import header


@dataclasses.dataclass(kw_only=True, slots=True)
class Draft:
    """What has been measured so far. Every rank keeps one; the one with a path writes it."""

    path: Path | None
    head: dict[str, Any]
    settings: dict[str, Any]
    transfers: list[TransferSample] = dataclasses.field(default_factory=list)
    copies: list[CopySample] = dataclasses.field(default_factory=list)
    compute: list[ComputeSample] = dataclasses.field(default_factory=list)
    fits: list[Fit] = dataclasses.field(default_factory=list)
    optimizer: list[OptimizerSample] = dataclasses.field(default_factory=list)
    host: HostSample | None = None
    ceilings: Ceilings | None = None
    device_speed: tuple[float, ...] = ()
    left_out: list[str] = dataclasses.field(default_factory=list)
    failed: dict[str, str] = dataclasses.field(default_factory=dict)
    """Phase -> why."""
    phases_s: dict[str, float] = dataclasses.field(default_factory=dict)
    checks: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Sizes between those of the table: `interpolation_checks`."""
    beside_layers: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    """Every round of `calibrate_layers`."""

    @classmethod
    def start(cls, path: Path | None, command: str, settings: dict[str, Any]) -> "Draft":
        """An empty one, with the description of the machine where it will be written."""
        head = header(command, seed=None)
        if path is not None:
            head["environment"] |= describe()
        return cls(path=path, head=head, settings=settings)

    def calibration(self) -> Calibration:
        """What there is, as the file has it. How it was measured is told under environment.calibrate."""
        about = {
            **self.settings,
            "phases_s": {name: round(seconds, 2) for name, seconds in self.phases_s.items()},
            "failed": self.failed,
            "left_out": self.left_out,
            "interpolation": self.checks,
            "beside_layers": self.beside_layers,
        }
        return Calibration(
            **{**self.head, "environment": {**self.head["environment"], "calibrate": about}},
            transfers=tuple(self.transfers),
            copies=tuple(self.copies),
            compute=tuple(self.compute),
            fits=tuple(self.fits),
            optimizer=tuple(self.optimizer),
            host=self.host,
            ceilings=self.ceilings,
            device_speed=self.device_speed,
        )

    def write(self) -> None:
        """Replace the file by one with everything measured so far."""
        if self.path is not None:
            write_calibration(self.path, self.calibration())


class Talk:
    """What rank 0 is doing: a bar on a terminal, else a line for each phase. Other ranks are silent."""

    def __init__(self, phases: Sequence[str], *, loud: bool) -> None:
        self._start = time.monotonic()
        self._names = list(phases)
        self._loud = loud
        self._bar: Progress | None = None
        self._task = TaskID(0)
        self._phase = ""
        console = Console(stderr=True)
        if loud and console.is_terminal:
            columns = (TextColumn("{task.description:64}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
            self._bar = Progress(*columns, console=console, transient=True)
            self._task = self._bar.add_task("starting", total=len(self._names))
            self._bar.start()

    def phase(self, name: str) -> None:
        """A phase begins."""
        self._phase = name
        if self._bar is not None:
            self._bar.update(self._task, description=name, completed=self._names.index(name))
        elif self._loud:
            number = f"{self._names.index(name) + 1}/{len(self._names)}"
            self.line(f"[{time.monotonic() - self._start:4.0f} s] {number} {name}")

    def say(self, what: str) -> None:
        """What of the phase is being measured."""
        if self._bar is not None:
            self._bar.update(self._task, description=f"{self._phase}: {what}"[:64])

    def line(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        elif self._loud:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
