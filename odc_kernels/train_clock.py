"""Moments of a device and of ranks on one clock: CLOCK_MONOTONIC of rank 0's host, in seconds.

All ranks of a host share that clock. A GPU's events are tied to it by an event whose moment the host sees; other hosts
by the midpoint of a message to rank 0 and back.
"""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

ROUND_TRIPS = 30
ANCHORS = 3

Stamp = torch.cuda.Event | float
"""A moment: of a GPU's stream, or seconds of the host's clock."""


class Exchange(NamedTuple):
    """A question to another clock: when it was sent and when the answer came, and what that clock said in between."""

    sent_s: float
    theirs_s: float
    received_s: float


def offset_s(exchanges: Iterable[Exchange]) -> float:
    """What to add to the own clock to get the other one, within half of the shortest round trip."""
    best = min(exchanges, key=lambda exchange: exchange.received_s - exchange.sent_s)
    return best.theirs_s - (best.sent_s + best.received_s) / 2


def offset_to_rank_0(store: dist.Store, rank: int, hosts: list[str]) -> float:
    """Seconds to add to this rank's clock. Collective; `hosts` [world_size] says on which host each rank is."""
    away = [other for other, host in enumerate(hosts) if host != hosts[0]]
    if rank == 0:
        for other in away:
            for number in range(ROUND_TRIPS):
                store.wait([f"odc_clock/{other}/{number}/asked"])
                store.set(f"odc_clock/{other}/{number}/said", repr(time.monotonic()))
        return 0.0
    if rank not in away:
        return 0.0
    exchanges = []
    for number in range(ROUND_TRIPS):
        sent_s = time.monotonic()
        store.set(f"odc_clock/{rank}/{number}/asked", "")
        theirs_s = float(store.get(f"odc_clock/{rank}/{number}/said"))
        exchanges.append(Exchange(sent_s, theirs_s, time.monotonic()))
        for key in ("asked", "said"):  # another run of the same ranks asks anew
            store.delete_key(f"odc_clock/{rank}/{number}/{key}")
    return offset_s(exchanges)


def host_name() -> str:
    """The same for all processes that share a clock."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else str(time.get_clock_info("monotonic"))


class Stamps:
    """Takes the moments at which the current stream of a device comes to a point, and tells them in seconds later."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._free: list[torch.cuda.Event] = []
        self._side = torch.cuda.Stream(device, priority=-1) if self._cuda else None

    def take(self) -> Stamp:
        """Now, or when the work enqueued so far on the current stream is done."""
        if self._cuda:  # pragma: cuda-only
            event = self._event()
            event.record()
            return event
        return time.monotonic()

    def times_s(self, first: Stamp, stamps: list[Stamp], last: Stamp) -> tuple[float, list[float]]:
        """When `first` was, and how long after it each of `stamps`. Waits for `last`; all of them are given back.

        A duration of a GPU is a float32 of milliseconds, so it is exact to some microseconds in a minute.
        """
        if not isinstance(first, float):  # pragma: cuda-only
            last.synchronize()
            times_s = [first.elapsed_time(stamp) * 1e-3 for stamp in stamps]
            anchor, anchor_s = self._anchor()
            start_s = anchor_s - first.elapsed_time(anchor) * 1e-3
            self._free.extend({id(event): event for event in (first, *stamps, last, anchor)}.values())
            return start_s, times_s
        return first, [stamp - first for stamp in stamps if isinstance(stamp, float)]

    def _anchor(self) -> tuple[torch.cuda.Event, float]:  # pragma: cuda-only
        """An event of an idle stream and its moment on the host: of several tries the one that took least."""
        tries = []
        for _ in range(ANCHORS):
            event = self._event()
            before_s = time.monotonic()
            event.record(self._side)
            event.synchronize()
            after_s = time.monotonic()
            tries.append((after_s - before_s, (before_s + after_s) / 2, event))
        tries.sort(key=lambda found: found[0])
        self._free.extend(event for _, _, event in tries[1:])
        _, moment_s, event = tries[0]
        return event, moment_s

    def _event(self) -> torch.cuda.Event:  # pragma: cuda-only
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
