"""Durations made by hand or at random, for tests of engines; results made by hand, for tests of tables and plots."""

import numpy as np

from odc_sim.durations import Durations, no_stretch
from odc_sim.results import Results, Row

COPIES = ("copy_in_s", "copy_out_s", "pack_s", "add_s", "hold_s")


def make_durations(
    forward_s,
    backward_s,
    *,
    counts=None,
    gather_s=0.0,
    reduce_s=0.0,
    host_s=(0.0, 0.0),
    optimizer_s=0.0,
    publish_s=0.0,
    stretch=None,
    copy_out_stretch=1.0,
    host_lead_s=0.0,
    **copies,
):
    """One minibatch from forward_s and backward_s [M, L + 2, D]; transfers and copies a number or [L + 1] each."""
    forward_s, backward_s = (np.asarray(x, dtype=float)[None] for x in (forward_s, backward_s))
    _, microbatches, slots, ranks = forward_s.shape
    counts = np.full((1, ranks), microbatches) if counts is None else np.asarray(counts).reshape(1, ranks)
    exists = np.arange(microbatches)[None, :, None] < counts[:, None, :]
    forward_s, backward_s = (x * exists[:, :, None, :] for x in (forward_s, backward_s))

    def unit(x):
        return np.broadcast_to(np.asarray(x, dtype=float), (slots - 1,)).copy()

    ones = no_stretch(1, microbatches, ranks)
    gather_forward, gather_backward, reduce = stretch if stretch is not None else (ones, ones, ones)
    return Durations(
        counts=counts,
        forward_s=forward_s,
        backward_s=backward_s,
        slot_class=np.arange(slots),
        gather_s=unit(gather_s),
        reduce_s=unit(reduce_s),
        **{name: unit(copies.get(name, 0.0)) for name in COPIES},
        gather_forward_stretch=gather_forward,
        gather_backward_stretch=gather_backward,
        reduce_stretch=reduce,
        copy_out_stretch=copy_out_stretch,
        host_lead_s=host_lead_s,
        host_forward_s=host_s[0],
        host_backward_s=host_s[1],
        optimizer_s=optimizer_s,
        publish_s=publish_s,
        busy_s=(forward_s + backward_s).sum(axis=(1, 2)),
        compute_slowdown_s=np.zeros((1, ranks)),
        floor_s=np.zeros((1, ranks)),
    )


def random_durations(rng, *, equal_counts, ranks, layers, microbatches, host, zeros):
    """A minibatch of random times; with `zeros` about a third of the transfers and units take none."""

    def times(scale, *shape):
        return rng.exponential(scale, shape) * (rng.random(shape) > (0.3 if zeros else 0.0))

    counts = np.full(ranks, microbatches) if equal_counts else rng.integers(1, microbatches + 1, ranks)
    unit = {name: times(0.1, layers + 1) for name in COPIES}
    return make_durations(
        times(1.0, microbatches, layers + 2, ranks),
        times(2.0, microbatches, layers + 2, ranks),
        counts=counts,
        gather_s=times(0.5, layers + 1),
        reduce_s=times(0.9, layers + 1),
        host_s=(0.7, 1.1) if host else (0.0, 0.0),
        optimizer_s=0.3,
        publish_s=0.2,
        stretch=[1.0 + rng.random((1, microbatches, ranks)) for _ in range(3)],
        copy_out_stretch=1.0 + 3.0 * rng.random(),
        host_lead_s=rng.random() if host else 0.0,
        **unit,
    )


def make_row(schedule, policy, **fields):
    """A row of a study of LongAlign; with a `speedup` it ran, and it fits unless told otherwise."""
    study = {
        "workload": "longalign",
        "model": "qwen2.5-1.5b",
        "hardware": "a100-nvswitch-roce",
        "devices": 8,
        "minibatch_size": 4,
        "minibatches": 100,
        "sharding": "zero3",
        "gather_dtype": "bf16",
        "seed": 0,
        "max_tokens": 65536,
        "fits": True,
    }
    return Row(schedule=schedule, policy=policy, **(study | fields))


def make_results(rows, **fields):
    """Results of these rows, with the usual baseline and nothing else in them."""
    empty = {"bounds": {}, "baseline": "collective/lb-micro", "advice": "", "notes": (), "study": {}, "lengths": {}}
    return Results(rows=tuple(rows), **(empty | fields))
