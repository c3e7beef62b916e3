"""Devices that wait for each other's work, while their hosts have long gone on.

A barrier of a window makes the host wait for its device, and then the device for the host to come back with new work.
Here a rank enqueues a signal behind its work, and a wait for the others' signals before what depends on theirs:

    signals.signal()        # on the device, after all that was enqueued so far
    (all ranks meet on their hosts)
    signals.wait()          # what is enqueued from here on finds every rank's work before its signal finished

The hosts' meeting in between is what keeps this from hanging: a wait is enqueued only when every signal is, so that no
device waits for what a host has yet to do. It takes the hosts' time only, beside what the devices are still doing.
"""

from collections.abc import Sequence

import torch

from odc_kernels import launch
from odc_kernels.copies import current_stream
from odc_kernels.window import Window

RELEASED = 2**31 - 1
"""A count that no one reaches: whoever waits goes on."""


class Signals:
    """One rank's end of the signals between the ranks of a window of int32 [world_size], one flag for each rank."""

    def __init__(self, window: Window, ranks: Sequence[int]) -> None:
        """`ranks`: what `missing` calls the window's ranks."""
        self._window = window
        self._ranks = ranks
        self.device = window.device
        self._count = 0
        self._on_gpu = window.device.type == "cuda"
        self._streams: dict[int, torch.cuda.Stream] = {}
        """That transfers were on, by the driver's handle."""
        self._ordered: set[int] = set()
        """Those of them that are behind the last wait."""
        self._signalled: torch.cuda.Event | None = None
        self._passed: torch.cuda.Event | None = None
        self._aside = torch.cuda.Stream(self.device) if self._on_gpu else None

    def transfer(self) -> torch.cuda.Stream | None:
        """Before a transfer on the current stream, which it returns: put between the last wait and the next signal."""
        if not self._on_gpu:
            return None
        handle = current_stream(self.device)
        if handle not in self._ordered:
            stream = self._streams.setdefault(handle, torch.cuda.current_stream(self.device))
            if self._passed is not None:
                stream.wait_event(self._passed)
            self._ordered.add(handle)
        return self._streams[handle]

    def signal(self) -> None:
        """Enqueue the signal on the current stream, behind it and all streams that transfers were on."""
        self._count += 1
        if self._on_gpu:  # pragma: cuda-only
            stream = torch.cuda.current_stream(self.device)
            for other in self._streams.values():
                stream.wait_stream(other)
        elif not launch.interpreted():
            for flags in self._window.peers:
                assert flags is not None
                flags[self._window.rank] = self._count
            return
        world_size = self._window.world_size
        launch.kernels().signal_kernel[(world_size,)](
            self._window.addresses, self._window.rank, self._count, num_warps=1
        )
        if self._on_gpu:  # pragma: cuda-only
            self._passed, self._signalled = None, torch.cuda.current_stream(self.device).record_event()

    def wait(self) -> None:
        """Enqueue the wait on the current stream. All ranks' hosts must have come back from `signal`."""
        if not self._on_gpu and not launch.interpreted():
            assert not self.missing(), "a rank came to the meeting without its signal"
            return
        launch.kernels().wait_kernel[(self._window.world_size,)](self._window.local, self._count, num_warps=1)
        if self._on_gpu:  # pragma: cuda-only
            self._passed_with(torch.cuda.current_stream(self.device).record_event())

    def _passed_with(self, event: torch.cuda.Event) -> None:
        self._passed = event
        self._ordered.clear()

    def passed(self) -> bool:
        """Whether the device is through the last wait; False between a signal and its wait. From any thread."""
        passed = self._passed
        return not self._on_gpu or (passed is not None and passed.query())

    def waiting(self) -> bool:
        """Whether this rank's device has done its part and now waits for another. From any thread."""
        signalled, passed = self._signalled, self._passed
        if signalled is None or passed is None:
            return False
        return signalled.query() and not passed.query()  # pragma: cuda-only

    def missing(self) -> list[int]:
        """Ranks whose last signal has not come. From any thread."""
        with torch.cuda.stream(self._aside):
            flags = self._window.local.tolist()
        return [rank for rank, count in zip(self._ranks, flags, strict=True) if count < self._count]

    def release(self) -> None:
        """Let a waiting device go on without the others: ranks cannot go on together, and it is not to hang."""
        with torch.cuda.stream(self._aside):
            self._window.local.fill_(RELEASED)

    def close(self) -> None:
        """Close the window, with all ranks."""
        self._window.close()
