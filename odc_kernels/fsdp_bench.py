"""Train the same model with fully_shard's collectives and on demand, and compare losses, speed, host time and memory.

    python -m odc_kernels.fsdp_bench --out reports/fsdp-h200     all GPUs of this host, one rank each
    python -m odc_kernels.fsdp_bench --ranks 2 --tiny --out /tmp/x    the same in small, on a CPU

Writes fsdp.json: every sample, per rank.
"""

import argparse
import datetime
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from odc_kernels.environment import describe
from odc_kernels.fsdp import OnDemand
from odc_kernels.fsdp_bench_models import SHAPES, Net, Shape
from odc_kernels.fsdp_deferred import collective_deferred
from odc_kernels.ranks import run_ranks
from odc_kernels.timing import Marks

WARMUP = 3


class Run:
    """One way to train one shape, on this rank."""

    def __init__(self, shape: Shape, mode: str, device: torch.device) -> None:
        self.shape, self.mode, self.device = shape, mode, device
        torch.manual_seed(0)
        with device:
            self.net = Net(shape)
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self.net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(self.net, mesh=mesh, mp_policy=policy)
        self.odc = None
        if mode.startswith("odc"):
            self.odc = OnDemand(self.net, deterministic=mode == "odc-deterministic")
        fused = device.type == "cuda"
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4, fused=fused)
        generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
        self.tokens = [
            torch.randint(0, shape.vocabulary, (1, shape.tokens), device=device, generator=generator)
            for _ in range(2 * shape.microbatches)
        ]

    def minibatch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(this rank's losses summed, the norm of all gradients)."""
        total = torch.zeros((), device=self.device)
        first = number % 2 * self.shape.microbatches
        for tokens in self._microbatches(self.tokens[first : first + self.shape.microbatches]):
            loss = self.net(tokens) / self.shape.microbatches
            loss.backward()
            total += loss.detach()
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        if self.odc is not None:
            self.odc.publish()
        else:
            self.optimizer.zero_grad()
        return total, norm

    def _microbatches(self, tokens: list[torch.Tensor]) -> Iterable[torch.Tensor]:
        if self.odc is not None:
            return self.odc.minibatch(tokens)
        return collective_deferred(self.net, tokens) if self.mode == "collective-deferred" else tokens

    def close(self) -> None:
        """Free everything, the windows too."""
        if self.odc is not None:
            self.odc.close()
            self.odc = None
        self.net = self.optimizer = self.tokens = None
        gc.collect()
        if self.device.type == "cuda":  # pragma: cuda-only
            torch.cuda.empty_cache()


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m odc_kernels.fsdp_bench", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument("--ranks", type=int, help="ranks to start; default: one per GPU, or 2 on a CPU")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=tuple(SHAPES), help="which to run; default: all")
    parser.add_argument("--tiny", action="store_true", help="small shapes, to see whether it runs")
    parsed = parser.parse_args(arguments)
    on_gpu = torch.cuda.is_available()
    world_size = parsed.ranks or (torch.cuda.device_count() if on_gpu else 2)
    shapes = {name: SHAPES[name] for name in parsed.shapes}
    if parsed.tiny:
        small = {"hidden": 64, "ffn": 96, "vocabulary": 128, "tokens": 32, "layers": 1, "minibatches": 2}
        shapes = {name: replace(shape, **small) for name, shape in shapes.items()}
    parsed.out.mkdir(parents=True, exist_ok=True)
    head = {
        "command": " ".join(["python -m odc_kernels.fsdp_bench", *(sys.argv[1:] if arguments is None else arguments)]),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "shapes": {name: asdict(shape) for name, shape in shapes.items()},
    }
    backend, kept = "nccl" if on_gpu else "gloo", parsed.out / "rank0.json"
    ranks = run_ranks(bench, world_size, shapes, kept, backend=backend, timeout_s=1000)
    (parsed.out / "fsdp.json").write_text(json.dumps(head | {"ranks": ranks}, indent=1) + "\n")
    kept.unlink()


def bench(rank: int, shapes: dict[str, Shape], kept: Path | None) -> dict[str, Any]:
    """One rank's results: shape -> mode -> samples. Rank 0 keeps its own in a file meanwhile, should the run be cut."""
    device = torch.device("cuda", rank) if torch.cuda.is_available() else torch.device("cpu")
    results: dict[str, Any] = {"environment": describe()} if rank == 0 else {}
    for name, shape in shapes.items():
        measure = {"equal": losses, "host-bound": host_time}.get(name, speed)
        results[name] = {}
        for found in (in_turn if shape.repeats > 1 else one_by_one)(shape, measure, device):
            results[name] |= found
            if rank == 0:
                for line in lines(name, results[name], found):
                    print(line, flush=True)
                if kept is not None:
                    kept.write_text(json.dumps(results))
    return results


Measure = Callable[[Run, int], dict[str, Any]]
"""(run, minibatches before the first one that counts): samples."""


def one_by_one(shape: Shape, measure: Measure, device: torch.device) -> Iterator[dict[str, Any]]:
    """mode -> samples and memory, of one mode after another; each model is alone."""
    for mode in shape.modes:
        with ExitStack() as stack:
            run = Run(shape, mode, device)
            stack.callback(run.close)
            _reset_peak(device)
            yield {mode: measure(run, WARMUP) | memory(run)}


def in_turn(shape: Shape, measure: Measure, device: torch.device) -> Iterator[dict[str, Any]]:
    """The same for all modes at once, a block of minibatches each in turn, again and again; what there is after each.

    `blocks` are the seconds of each time, `seconds` all of them. Peaks are without what the other models hold.
    """
    runs: dict[str, Run] = {}
    held: dict[str, int] = {}
    blocks: dict[str, list[list[float]]] = {mode: [] for mode in shape.modes}
    cores: dict[str, dict[str, list[float]]] = {mode: {} for mode in shape.modes}
    peaks: dict[str, dict[str, int]] = {}
    with ExitStack() as stack:
        for mode in shape.modes:
            before = _allocated(device)
            runs[mode] = Run(shape, mode, device)
            stack.callback(runs[mode].close)
            for number in range(WARMUP):
                runs[mode].minibatch(number)
            held[mode] = _allocated(device) - before
        for _ in range(shape.repeats):
            for mode, run in runs.items():
                _reset_peak(device)
                samples = measure(run, 1)
                blocks[mode].append(samples["seconds"])
                if "core_seconds" in samples:
                    cores[mode].setdefault("core_seconds", []).extend(samples["core_seconds"])
                found = memory(run, others_bytes=sum(held.values()) - held[mode])
                peaks[mode] = {name: max(value, peaks.get(mode, {}).get(name, 0)) for name, value in found.items()}
            yield {
                mode: {"seconds": list(chain(*blocks[mode])), "blocks": blocks[mode], **cores[mode], **peaks[mode]}
                for mode in runs
            }


def lines(shape: str, results: dict[str, Any], found: dict[str, Any]) -> Iterator[str]:
    """What `found` adds to the results of a shape, for people."""
    first = next(iter(results.values()))
    for mode, samples in found.items():
        text = f"{shape:15} {mode:20} median {statistics.median(samples.get('seconds') or samples['loss']):.6g}"
        if "blocks" in samples:
            pairs = zip(first["blocks"], samples["blocks"], strict=True)
            ratios = [statistics.median(theirs) / statistics.median(own) for theirs, own in pairs]
            text += f", {statistics.median(ratios):.4f}x the first ({min(ratios):.4f} to {max(ratios):.4f})"
            fast, first_fast = (statistics.quantiles(these["seconds"], n=5)[0] for these in (samples, first))
            text += f", fastest fifth under {fast:.6g}, {first_fast / fast:.4f}x"
        if "core_seconds" in samples:
            own, theirs = (statistics.median(these["core_seconds"]) for these in (samples, first))
            text += f", of all cores {own:.6g}, {theirs / own:.4f}x"
        if "peak_bytes" in samples:  # pragma: cuda-only
            beyond = samples["peak_bytes"] + samples["window_bytes"] - first["peak_bytes"]
            text += f", peak {samples['peak_bytes'] / 1e9:.2f} GB, with windows {beyond / 1e9:+.2f} GB"
        yield text


def losses(run: Run, warmup: int) -> dict[str, Any]:
    """The loss over all ranks, and the norm of the gradients, of each minibatch; all count."""
    found: dict[str, Any] = {"loss": [], "norm": []}
    for number in range(run.shape.minibatches):
        loss, norm = run.minibatch(number)
        dist.all_reduce(loss)
        found["loss"].append(loss.item())
        found["norm"].append(norm.full_tensor().item())
    return found


def speed(run: Run, warmup: int) -> dict[str, Any]:
    """Seconds of each minibatch on this rank's device, back to back."""
    for number in range(warmup):
        run.minibatch(number)
    _synchronize(run.device)
    marks = Marks(run.device)
    marks.mark()
    for number in range(run.shape.minibatches):
        run.minibatch(number)
        marks.mark()
    _synchronize(run.device)
    return {"seconds": [end - start for start, end in marks.intervals_s(marks)]}


def host_time(run: Run, warmup: int) -> dict[str, Any]:
    """Seconds of the host to enqueue one unit's forward and backward, in each microbatch of each minibatch.

    `seconds` by the clock, `core_seconds` of all cores that this process used, which others on the machine change less.
    """
    seconds: list[tuple[float, float]] = []
    units = sum(isinstance(module, FSDPModule) for module in run.net.modules())
    for number in range(warmup + run.shape.minibatches):
        if number == warmup:
            seconds.clear()
        for tokens in _timed(run._microbatches(run.tokens[: run.shape.microbatches]), seconds, run.device):
            run.net(tokens).backward()
        run.optimizer.step()
        if run.odc is not None:
            run.odc.publish()
        else:
            run.optimizer.zero_grad()
    clock, cores = zip(*seconds, strict=True)
    return {"seconds": [taken / units for taken in clock], "core_seconds": [taken / units for taken in cores]}


def _timed(items: Iterable[Any], seconds: list[tuple[float, float]], device: torch.device) -> Iterator[Any]:
    """Append what the loop's body took, by the clock and of cores, each time from an idle device on."""
    iterator = iter(items)
    while True:
        try:
            item = next(iterator)
        except StopIteration:
            return
        _synchronize(device)
        start, cores = time.perf_counter(), time.process_time()
        yield item
        seconds.append((time.perf_counter() - start, time.process_time() - cores))


def memory(run: Run, others_bytes: int | None = None) -> dict[str, int]:
    """Bytes: most ever allocated by torch, without `others_bytes`, and the windows, which are not among them."""
    windows = 0
    if run.odc is not None:
        windows = sum(run.odc.window_bytes.values())
    found = {"window_bytes": windows, "parameters": sum(p.numel() for p in run.net.parameters())}
    if run.device.type == "cuda":  # pragma: cuda-only
        found["peak_bytes"] = torch.cuda.max_memory_allocated(run.device) - (others_bytes or 0)
        if others_bytes is None:
            free, total = torch.cuda.mem_get_info(run.device)
            found["device_bytes"] = total - free
    return found


def _allocated(device: torch.device) -> int:
    _synchronize(device)
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _reset_peak(device: torch.device) -> None:
    if device.type == "cuda":  # pragma: cuda-only
        torch.cuda.reset_peak_memory_stats(device)


def _synchronize(device: torch.device) -> None:
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    wait()
    dist.barrier()
    wait()


if __name__ == "__main__":
    main()
