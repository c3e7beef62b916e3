"""The windows behind a model: what is published, what is summed, and the gradients that come of it."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from odc_kernels.fsdp_comm import Drift, Gather, Observe, Push
from odc_kernels.fsdp_layout import Mesh, Unit
from odc_kernels.scatter_accumulate import accumulator_numel, drain
from odc_kernels.signals import Signals
from odc_kernels.window import Window, open_window

ALIGNMENT = 64
"""Elements between units' beginnings: at least 16 for wide accesses."""


class Sharded:
    """Windows and gradients of a model's units, sharded over two or more ranks. Opening it is collective."""

    num_hooks = 1
    """A parameter's post-accumulate-grad hooks that are ours."""

    def __init__(
        self,
        units: Sequence[Unit],
        mesh: Mesh,
        *,
        deterministic: bool,
        divisor: float,
        timeout_s: float,
        observe: Observe | None = None,
    ) -> None:
        self._units = units
        self._replicas = mesh.replicas
        self._deterministic = deterministic
        self._divisor = divisor
        self._remove: list[Callable[[], None]] = []
        self._drift = Drift(units)
        open_ = partial(open_window, group=mesh.group, timeout_s=timeout_s, backend=_backend(units))

        sizes: dict[torch.dtype, int] = {}
        starts = []
        for unit in units:
            starts.append(sizes.get(unit.dtype, 0))
            sizes[unit.dtype] = _aligned(starts[-1] + unit.numel)
        self._windows: dict[torch.dtype, Window] = {
            dtype: open_(numel, dtype, name=f"parameters, {str(dtype).removeprefix('torch.')}")
            for dtype, numel in sorted(sizes.items(), key=str)
        }
        self._numel = 0
        offsets = []
        for unit in units:
            offsets.append(self._numel)
            self._numel = _aligned(self._numel + sum(shard.numel for shard in unit.trained))
        numel = accumulator_numel(self._numel, mesh.world_size, deterministic=deterministic)
        self._accumulators = open_(numel, torch.float32, name="gradients")
        everyone = dist.get_process_group_ranks(mesh.everyone)
        ranks = [everyone.index(rank) for rank in dist.get_process_group_ranks(mesh.group)]
        self.signals = Signals(open_(mesh.world_size, torch.int32, name="signals"), ranks)

        self._gathers = [
            Gather(unit, number, self._windows[unit.dtype], start, self._drift, self.signals)
            for number, (unit, start) in enumerate(zip(units, starts, strict=True))
        ]
        replicated = mesh.replicas is not None
        self._pushes = [
            Push(
                unit,
                self._accumulators,
                offset,
                self.signals,
                scale=1 / divisor,
                deterministic=deterministic,
                replicated=replicated,
            )
            for unit, offset in zip(units, offsets, strict=True)
        ]
        self._casts: list[tuple[torch.Tensor, int]] = []
        """Buffers for gradients that are not a view of the accumulators, and where those begin."""
        self._gradients: list[tuple[DTensor, DTensor]] = []
        self._shown: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        """Where parameters are shown, and their values, by dtype: many small copies in one call."""
        with torch.no_grad():
            for unit, gather, offset in zip(units, self._gathers, offsets, strict=True):
                self._add_shown(unit, gather)
                self._add_gradients(unit, offset)

        self._install(observe or (lambda kind, modules, transfer: transfer))

    def uninstall(self) -> None:
        """Let go of everything in the windows; gradients are gone."""
        while self._remove:
            self._remove.pop()()
        self._clear()
        self._gradients.clear()
        self._shown.clear()
        self._casts.clear()
        self._gathers.clear()
        self._pushes.clear()

    def problem(self) -> str | None:
        """Why what was computed since the last publish cannot be used."""
        return self._drift.problem()

    def begin(self) -> bool:
        """A minibatch. Whether something has been gathered since the last publish, for evaluation."""
        return self._drift.again()

    def pushed(self) -> bool:
        """Whether this rank pushed since the last publish."""
        return any(push.pushed for push in self._pushes)

    def forget_inputs(self) -> None:
        """Between microbatches: give back what FSDP keeps of the last backward."""
        for push in self._pushes:
            push.forget_input()

    def set_gradients(self) -> None:
        """Set every gradient, for `drain` to fill: done before ranks meet, it hides behind the device's last work."""
        for gather in self._gathers:
            gather.allowed = False
        for push in self._pushes:
            push.fill_slots()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient

    @torch.no_grad()
    def drain(self) -> None:
        """Fill the gradients; all ranks' pushes are finished."""
        if self._deterministic:
            scale = 1 / self._divisor
            total = drain(self._accumulators, self._numel, deterministic=True, scale=scale, in_place=True)
        else:
            total = drain(self._accumulators, self._numel)
        if self._replicas is not None:
            dist.all_reduce(total, group=self._replicas)
        for buffer, offset in self._casts:
            buffer.copy_(total[offset : offset + buffer.numel()])

    @torch.no_grad()
    def publish(self) -> None:
        """Drop gradients, show parameters; ranks must meet before and after."""
        self._clear()
        if not self._deterministic:  # there the first push overwrites
            self._accumulators.local.zero_()
        for targets, sources in self._shown.values():
            torch._foreach_copy_(targets, sources)
        self._drift.restart()
        for push in self._pushes:
            push.pushed = False
        for gather in self._gathers:
            gather.allowed = True

    def window_bytes(self) -> dict[str, int]:
        """Of each window."""
        named = {"gradients": self._accumulators}
        named |= {f"parameters, {str(dtype).removeprefix('torch.')}": window for dtype, window in self._windows.items()}
        return {name: window.local.nbytes for name, window in named.items()}

    def close(self) -> None:
        """Free the windows, with all ranks."""
        for window in (*self._windows.values(), self._accumulators, self.signals):
            window.close()

    def _install(self, observe: Observe) -> None:
        for unit, gather, push in zip(self._units, self._gathers, self._pushes, strict=True):
            unshard, reduce = observe("unshard", unit.modules, gather), observe("reduce", unit.modules, push)
            for module in unit.modules:
                module.set_custom_all_gather(unshard)
                module.set_custom_reduce_scatter(reduce)
        for parameter, _ in self._gradients:
            self._remove.append(parameter.register_post_accumulate_grad_hook(_drop_gradient).remove)

    def _clear(self) -> None:
        for parameter, _ in self._gradients:
            parameter.grad = None

    def _add_shown(self, unit: Unit, gather: Gather) -> None:
        targets, sources = self._shown.setdefault(unit.dtype, ([], []))
        for shard in unit.shards:
            local = shard.local()
            targets.append(gather.published[shard.offset : shard.offset + local.numel()])
            sources.append(local)

    def _add_gradients(self, unit: Unit, offset: int) -> None:
        trained = unit.trained
        if not trained:
            return
        dtype, numel = trained[0].parameter.dtype, sum(shard.numel for shard in trained)
        if dtype == torch.float32:
            buffer = self._accumulators.local[offset : offset + numel]
        else:
            buffer = torch.empty(numel, dtype=dtype, device=unit.device)
            self._casts.append((buffer, offset))
        start = 0
        for shard in trained:
            parameter = shard.parameter
            local = parameter.to_local()
            gradient = DTensor.from_local(
                buffer[start : start + local.numel()].view(local.shape),
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
            self._gradients.append((parameter, gradient))
            start += shard.numel


class Alone:
    """The same of a model on one rank, where FSDP2 calls no transfer."""

    num_hooks = 0
    signals = None

    def __init__(self, parameters: Sequence[DTensor], *, divisor: float) -> None:
        self._parameters = parameters
        self._divisor = divisor

    def uninstall(self) -> None:
        """Gradients are gone."""
        self.publish()

    def problem(self) -> str | None:
        """Never one."""
        return None

    def begin(self) -> bool:
        """Nothing is ever gathered."""
        return False

    def pushed(self) -> bool:
        """Whether there are gradients."""
        return any(parameter.grad is not None for parameter in self._parameters)

    def forget_inputs(self) -> None:
        """None are kept."""

    def set_gradients(self) -> None:
        """FSDP has."""

    @torch.no_grad()
    def drain(self) -> None:
        """Scale every gradient; zeros where there was no microbatch."""
        for parameter in self._parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif self._divisor != 1:
                parameter.grad.mul_(1 / self._divisor)

    def publish(self) -> None:
        """Drop gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def window_bytes(self) -> dict[str, int]:
        """None."""
        return {}

    def close(self) -> None:
        """Nothing to free."""


def _aligned(numel: int) -> int:
    return -(-numel // ALIGNMENT) * ALIGNMENT


def _backend(units: Sequence[Unit]) -> str:
    return "cuda" if units[0].device.type == "cuda" else "cpu"


def _drop_gradient(parameter: torch.Tensor) -> None:
    """What FSDP calls after it has set a gradient from its own output, which holds nothing."""
    parameter.grad = None
