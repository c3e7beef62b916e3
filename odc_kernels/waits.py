"""Compute that is only time: wait until so many seconds after a moment, on a CPU or on a GPU's current stream."""

import time
from collections.abc import Sequence
from typing import Protocol

import torch

SPIN_S = 2e-4
"""A sleeping process is woken about 0.1 ms late, so it looks at the clock itself for the last stretch."""


class Clock(Protocol):
    """Waits for one of several durations from a moment on. Both are enqueued, so on a GPU the host never blocks."""

    def durations(self, seconds: torch.Tensor) -> Sequence[float] | torch.Tensor:
        """What `wait` takes: fp64 [n], on the clock's device, made ready."""

    def note(self) -> None:
        """The moment is now."""

    def wait(self, durations: Sequence[float] | torch.Tensor, number: int) -> None:
        """Until `durations[number]` have passed since the moment; not at all if they already have."""


class HostClock:
    """Sleeps, so that many ranks may wait on few cores."""

    def __init__(self) -> None:
        self._moment_s = 0.0

    def durations(self, seconds: torch.Tensor) -> Sequence[float]:
        """Seconds."""
        values: list[float] = seconds.tolist()
        return values

    def note(self) -> None:
        """The moment is now."""
        self._moment_s = time.perf_counter()

    def wait(self, durations: Sequence[float] | torch.Tensor, number: int) -> None:
        """Until `durations[number]` seconds after the moment."""
        until_s = self._moment_s + float(durations[number])
        while (left_s := until_s - time.perf_counter()) > 0:
            if left_s > SPIN_S:
                time.sleep(left_s - SPIN_S / 2)


class DeviceClock:  # pragma: cuda-only
    """A kernel of one warp looks at the GPU's clock."""

    def __init__(self, device: torch.device) -> None:
        from odc_kernels import wait_kernels

        self._kernels = wait_kernels
        self._moment = torch.zeros(1, dtype=torch.int64, device=device)

    def durations(self, seconds: torch.Tensor) -> torch.Tensor:
        """Whole nanoseconds, int64 [n]."""
        return (seconds * 1e9).round().to(torch.int64)

    def note(self) -> None:
        """The moment is when the current stream gets here."""
        self._kernels.note_kernel[(1,)](self._moment, num_warps=1)

    def wait(self, durations: Sequence[float] | torch.Tensor, number: int) -> None:
        """The current stream gets no further until `durations[number]` nanoseconds after the moment."""
        self._kernels.wait_kernel[(1,)](self._moment, durations, number, num_warps=1)


def make_clock(device: torch.device) -> Clock:
    """The clock of a device."""
    return DeviceClock(device) if device.type == "cuda" else HostClock()
