"""Ranks that die or stay away: every wait ends, and says who is missing.

`Meeting` is a rendezvous that Ctrl-C interrupts and that a death on this host ends at once. `Watch` looks after the one
stretch in which this package does not wait itself: between two meetings the user's own collectives run (the norm of the
gradients, say), and devices wait for each other; with a dead rank both can hang far beyond any deadline of ours.
"""

import os
import select
import sys
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from odc_kernels.rendezvous import Rendezvous, WindowError
from odc_kernels.signals import Signals

NOTICE_S = 0.2
"""A connection may end a moment before the process it belonged to."""
DEVICE_POLL_SHARE = 0.05
"""Of the deadline: how often to look whether the device waits for another one."""
POLL_S = 0.01
POLL_SHARE = 0.01
"""Of the time waited so far: what a sleep between two looks may add to the wait."""


class Watch:
    """Knows which ranks of this host have died, and ends this process if it is stuck because of one.

    Ranks on other hosts, or in other containers of this host, are not seen; then only deadlines help.
    """

    def __init__(self, people: list[dict[str, Any]], names: list[str], *, timeout_s: float) -> None:
        """`people` is what each rank says of itself (`identify`), in order."""
        self._timeout_s = timeout_s
        self._names = names
        self._lock = threading.Lock()
        self._died_s: dict[int, float] = {}
        self._exposed: _Exposed | None = None
        self._waits_since_s: float | None = None
        """Since when the device has been seen waiting for another one."""
        self._handles: dict[int, int] = {}
        own = identify()
        for rank, person in enumerate(people):
            if person["place"] == own["place"] and person["pid"] != own["pid"]:
                try:
                    self._handles[os.pidfd_open(person["pid"])] = rank
                except (AttributeError, OSError):  # not Linux, or it is gone already: the next meeting says so
                    continue
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="odc-watch", daemon=True)
        self._thread.start()

    def dead(self) -> list[int]:
        """Ranks whose process has ended, the first to die first."""
        with self._lock:
            return sorted(self._died_s, key=self._died_s.__getitem__)

    def expose(self, what: str | None, signals: Signals | None = None, *, until_passed: bool = False) -> None:
        """Say that this rank now runs `what`, which cannot be finished without all ranks; None: no longer.

        With `signals` its device may also wait for another's; `until_passed`: it is over when the device is through.
        """
        with self._lock:
            self._exposed = None if what is None else _Exposed(what, time.monotonic(), signals, until_passed)
            self._waits_since_s = None
        os.write(self._waker, b".")

    def close(self) -> None:
        """Stop looking."""
        os.write(self._waker, b"x")
        self._thread.join()
        for handle in (*self._handles, self._wake, self._waker):
            os.close(handle)

    def _run(self) -> None:
        poll = select.poll()
        for handle in (*self._handles, self._wake):
            poll.register(handle, select.POLLIN)
        while True:
            for handle, _ in poll.poll(self._end_if_stuck()):
                if handle == self._wake:
                    if b"x" in os.read(self._wake, 64):
                        return
                    continue
                poll.unregister(handle)
                with self._lock:
                    self._died_s[self._handles[handle]] = time.monotonic()

    def _end_if_stuck(self) -> float | None:
        """Milliseconds after which to look again; None: when something happens."""
        with self._lock:
            exposed, died_s = self._exposed, dict(self._died_s)
        if exposed is None:
            return None
        signals, now_s = exposed.signals, time.monotonic()
        if exposed.until_passed and (signals is None or signals.passed()):
            return None
        if signals is not None and signals.waiting():
            self._waits_since_s = self._waits_since_s or now_s
        else:
            self._waits_since_s = None
        again_s = self._timeout_s * DEVICE_POLL_SHARE if signals is not None else None
        if died_s:
            left_s = max(exposed.since_s, min(died_s.values())) + self._timeout_s - now_s
            if left_s <= 0:
                names = ", ".join(self._names[rank] for rank in self.dead())
                self._end(f"{exposed.what}: {names} died, and this rank was still in it {self._timeout_s:g} s later")
            again_s = min(left_s, again_s or left_s)
        if self._waits_since_s is not None and now_s - self._waits_since_s >= self._timeout_s:
            assert signals is not None
            names = ", ".join(self._names[rank] for rank in signals.missing())
            self._end(f"{exposed.what}: the device of this rank waited {self._timeout_s:g} s for that of {names}")
        return None if again_s is None else again_s * 1e3 + 1

    def _end(self, message: str) -> None:
        print(f"{message}: ending it", file=sys.stderr, flush=True)
        os._exit(1)


class _Exposed(NamedTuple):
    what: str
    since_s: float
    signals: Signals | None
    until_passed: bool


class Meeting(Rendezvous):
    """A rendezvous whose waits Ctrl-C interrupts, and that does not wait for the dead."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        super().__init__(group, timeout_s=timeout_s)
        names = [self.name(rank) for rank in range(self.world_size)]
        people = [identify()] * self.world_size  # until the others have said who they are
        self.watch = Watch(people, names, timeout_s=timeout_s)
        people = self.exchange("start of OnDemand", identify())
        self.watch.close()
        self.watch = Watch(people, names, timeout_s=timeout_s)

    def exchange(
        self, what: str, value: Any, *, problem: str | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """As of a rendezvous; the error also names ranks of this host that have died, such as the one with the store.

        Raises:
            WindowError: a rank passed a problem, died, or did not come within `timeout_s` seconds.
        """
        try:
            return super().exchange(what, value, problem=problem, timeout_s=timeout_s)
        except WindowError as error:
            if "store of torch.distributed is gone" not in str(error):
                raise
            time.sleep(NOTICE_S)
            dead = self.watch.dead()
            died = f"{self.names(dead)} died, and with it the store: " if dead else ""
            raise WindowError(f"{what}: {died}{error}") from None

    def require(self, what: str) -> None:
        """Raise if a rank of this host has died, also one that had come to the last meeting."""
        if dead := self.watch.dead():
            raise WindowError(f"{what}: {self.name(self.rank)} cannot go on without {self.names(dead)}, which died")

    def _wait(self, what: str, keys: list[str], timeout_s: float) -> None:
        start = time.monotonic()
        # The store's own wait cannot be interrupted.
        while not self._store.check(keys):
            waited_s = time.monotonic() - start
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if dead := [rank for rank in self.watch.dead() if rank in missing]:
                raise WindowError(f"{what}: {self.name(self.rank)} waits for {self.names(dead)}, which died")
            if missing and waited_s >= timeout_s:
                raise WindowError(
                    f"{what}: {self.name(self.rank)} waited {timeout_s:g} s for {self.names(missing)}: "
                    "dead, stuck, late, or not calling the same methods in the same order"
                )
            time.sleep(min(POLL_S, waited_s * POLL_SHARE))


def identify() -> dict[str, Any]:
    """What lets another process of this host find this one."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    place = boot.read_text().strip() if boot.exists() else ""
    namespace = Path("/proc/self/ns/pid")
    return {"place": f"{place} {os.readlink(namespace) if namespace.exists() else ''}", "pid": os.getpid()}
