"""Ranks meeting through the job's key-value store: every wait has a deadline and names the ranks it waited for.

torch's collectives either hang or say "timed out" without naming who is missing, and a rank that fails before one
leaves the others inside it. Here each rank leaves a note under its own key and waits for the notes of the others; a
rank that cannot go on says so in its note, so that all ranks stop with the same line.
"""

import json
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist


class WindowError(RuntimeError):
    """The ranks cannot go on together. The message is one line that names the ranks concerned."""


class Rendezvous:
    """One rank's end of the meetings of a group.

    Ranks are counted inside the group; messages also give the global rank where it differs. All ranks must meet in the
    same order. Nothing is kept in this process between two objects: how many a rank has made is counted in the store.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float) -> None:
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self.timeout_s = timeout_s
        self._global_ranks = dist.get_process_group_ranks(group)
        # The store torch.distributed itself meets through: reachable from every rank, on any number of hosts. torch
        # has no public way to it.
        self._store = dist.distributed_c10d._get_default_store()
        prefix = f"odc_kernels/{group.group_name}"
        try:
            self.sequence = self._store.add(f"{prefix}/opened/{self.rank}", 1)
        except RuntimeError as error:
            raise _store_lost(error) from None
        self._prefix = f"{prefix}/{self.sequence}"
        self._meetings = 0
        self._old_keys: list[str] = []

    def barrier(self, what: str, *, timeout_s: float | None = None) -> None:
        """Return once every rank has come to its call.

        Raises:
            WindowError: a rank did not come within `timeout_s` seconds (None: the default of this rendezvous).
        """
        self.exchange(what, None, timeout_s=timeout_s)

    def exchange(
        self, what: str, value: Any, *, problem: str | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Every rank's `value` [world_size], which must have a JSON form; `what` names the meeting in messages.

        A rank that cannot go on passes `problem`, a part of a sentence; then every rank raises it.

        Raises:
            WindowError: a rank passed a problem, or did not come within `timeout_s` seconds.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        keys = [f"{self._prefix}/{self._meetings}/{rank}" for rank in range(self.world_size)]
        own = keys[self.rank]
        try:
            self._store.set(own, json.dumps([value, problem]))
            self._wait(what, keys, timeout_s)
            notes = [json.loads(self._store.get(key)) for key in keys]
            # Everyone is here, so nobody still reads the notes of earlier meetings; those of this one may be in use.
            for key in self._old_keys:
                self._store.delete_key(key)
        except RuntimeError as error:
            if isinstance(error, WindowError):
                raise
            raise _store_lost(error) from None
        self._old_keys = [own]
        self._meetings += 1
        problems = [f"{self.name(rank)}: {text}" for rank, (_, text) in enumerate(notes) if text is not None]
        if problems:
            raise WindowError(f"{what}: " + "; ".join(problems))
        return [note for note, _ in notes]

    def name(self, rank: int) -> str:
        """`rank 1`, with the global rank where the group is a part of the job."""
        global_rank = self._global_ranks[rank]
        return f"rank {rank}" if rank == global_rank else f"rank {rank} (global rank {global_rank})"

    def names(self, ranks: Sequence[int]) -> str:
        """Several of them, separated by commas."""
        return ", ".join(self.name(rank) for rank in ranks)

    def _wait(self, what: str, keys: list[str], timeout_s: float) -> None:
        try:
            self._store.wait(keys, timedelta(seconds=timeout_s))
        except dist.DistStoreError:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            if missing:  # else the last note came just now
                raise WindowError(
                    f"{what}: {self.name(self.rank)} waited {timeout_s:g} s for {self.names(missing)}: "
                    "dead, stuck, or not calling the same windows in the same order"
                ) from None


def _store_lost(error: RuntimeError) -> WindowError:
    reason = str(error).splitlines()[0]
    return WindowError(f"the store of torch.distributed is gone, so the process that hosts it died: {reason}")
