"""Whether a minibatch runs on the parameters that were published."""

from collections.abc import Sequence

import torch

from odc_kernels.fsdp_layout import Unit
from odc_sim.errors import InputError

PARTS, BLOCK_BYTES = 8, 8192
"""In seven of eight minibatches every eighth block is compared. All of it cost a layer of qwen2.5-1.5b 80 us in its
first forward of each minibatch, more than the gather (reports/validation-h200)."""


class Drift:
    """Whether what FSDP gathers is what was published: compared in every unit's first gather of a minibatch.

    All of it in every eighth minibatch, from the first one on, and in others an eighth, spread over the unit, another
    one each time: an optimizer's step that was not published shows at once, as do other values of a whole parameter of
    64 KiB a rank; anything at all within eight minibatches.
    The results stay on the device until the end of the minibatch, so no gather waits for the host.
    """

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        device = units[0].device
        self._differs = torch.zeros(len(units), dtype=torch.bool, device=device)
        self._compared = [False] * len(units)
        self._minibatch = 0
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._last: torch.cuda.Event | None = None
        """Behind the last comparison."""

    def compare(self, number: int, shard: torch.Tensor, published: torch.Tensor) -> None:
        """Check unit `number`, and enqueue the comparison bit by bit, unless done in this minibatch.

        Raises:
            InputError: a module has another parameter than when OnDemand was opened. (FSDP would use the old one.)
        """
        if self._compared[number]:
            return
        self._compared[number] = True
        for known in self._units[number].shards:
            if known.owner._parameters.get(known.attribute) is not known.parameter:
                raise InputError(
                    f"{known.name} was replaced after OnDemand was opened; close it, and open it again after"
                )
        # As integers NaN is equal to itself; wide ones are read at full speed.
        bits = torch.int64
        if shard.nbytes % 8:
            bits = torch.int16 if shard.dtype.itemsize == 2 else torch.int32
        differs = self._part(shard.view(bits)) != self._part(published.view(bits))
        torch.any(differs.view(-1), dim=0, out=self._differs[number])
        if self._aside is not None:  # pragma: cuda-only
            self._last = torch.cuda.current_stream(shard.device).record_event()

    def problem(self) -> str | None:
        """Which units differ. Waits for the last comparison, not for what the device does since."""
        if not any(self._compared):
            return None
        if self._aside is not None:  # pragma: cuda-only
            assert self._last is not None
            self._aside.wait_event(self._last)
        with torch.cuda.stream(self._aside):
            differs = self._differs.tolist()
        names = [unit.name for unit, unit_differs in zip(self._units, differs, strict=True) if unit_differs]
        if not names:
            return None
        return (
            f"parameters of {', '.join(names)} are not what was published: replaced, sharded anew, or changed without "
            "publish()"
        )

    def restart(self) -> None:
        """A new minibatch."""
        self._compared = [False] * len(self._units)
        self._minibatch += 1
        self._differs.zero_()

    def _part(self, words: torch.Tensor) -> torch.Tensor:
        """What is compared in this minibatch: [words], or [blocks, words of a block]."""
        size, part = BLOCK_BYTES // words.itemsize, self._minibatch % PARTS
        blocks = words.numel() // size
        if part == 0 or blocks < PARTS:
            return words
        # blocks part, part + PARTS, ...
        return words.as_strided(
            (-(-(blocks - part) // PARTS), size), (PARTS * size, 1), words.storage_offset() + part * size
        )
