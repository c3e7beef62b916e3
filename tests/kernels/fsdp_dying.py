"""Ranks that die at a given moment, and what the others then do. Run in each rank, or as a script."""

import os
import signal
import sys
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from kernels.fsdp_models import Case, draw, loss_of, mesh_of

from odc_kernels import fsdp_comm
from odc_kernels.fsdp import OnDemand

TIMEOUT_S = 4.0
MOMENTS = ("forward", "push", "end", "publish")


def die(*_, **__) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train(odc: OnDemand, net, *, minibatches: int = 3, late_s: float = 0.0) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for number in range(minibatches):
        for microbatch in odc.minibatch(draw(number, 1)[0][:1]):
            loss_of(net, microbatch).backward()
            time.sleep(late_s)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        odc.publish()


def after_the_other(dying: bool, where: str) -> None:
    """Who is to die waits until the other has left the last meeting, so that the next is the one it misses."""
    store = dist.distributed_c10d._get_default_store()
    if dying:
        store.wait([where])
    else:
        store.set(where, "")


def die_at(moment: str, net, odc: OnDemand) -> None:
    """Arrange this process's death in the second minibatch."""
    if moment == "forward":
        net.blocks[1].register_forward_hook(die)
    elif moment == "push":
        fsdp_comm.scatter_accumulate = die
    elif moment == "end":  # it has come to the barrier, and waits
        exchange = odc._meeting.exchange

        def come(*arguments, **options):
            threading.Timer(0.3, die).start()
            return exchange(*arguments, **options)

        odc._meeting.exchange = come
    else:
        odc._state.publish = die


def pairs(rank: int, folder: str, moments: Sequence[str]) -> None:
    """Pairs of ranks, each with a model of its own; of each the second dies, at a moment of its own."""
    mesh = mesh_of(len(moments), 2)["shard"]
    moment = moments[rank // 2]
    case = Case()
    net = case.shard(case.build(), mesh=mesh)
    odc = OnDemand(net, timeout_s=TIMEOUT_S)
    train(odc, net, minibatches=1)
    after_the_other(rank % 2 == 1, f"pair {rank // 2}")
    if rank % 2:
        die_at(moment, net, odc)
    start = time.monotonic()
    try:
        train(odc, net, minibatches=1, late_s=1.0 if moment == "end" and rank % 2 == 0 else 0.0)
    except Exception as error:
        with open(os.path.join(folder, moment), "w") as file:
            print(time.monotonic() - start, error, file=file)
    os._exit(0)  # the default group has dead ranks in it


def in_the_step(rank: int) -> None:
    """Rank 1 dies when the minibatch has ended; rank 0 goes on to a collective, and that never ends."""
    net = Case().shard(Case().build())
    odc = OnDemand(net, timeout_s=2.0)
    train(odc, net, minibatches=1)
    odc.end_of_minibatch()
    after_the_other(rank == 1, "minibatch 2 has ended")
    if rank == 1:
        die()
    time.sleep(0.5)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor().item()


def with_a_busy_device(rank: int) -> None:
    """Rank 1's host comes to the end of the minibatch, its device does not for ten seconds or so."""
    net = Case().shard(Case().build())
    odc = OnDemand(net, timeout_s=2.0)
    train(odc, net, minibatches=1)
    if rank == 1:
        torch.cuda._sleep(20_000_000_000)
    odc.end_of_minibatch()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0).full_tensor().item()


def script(what: str) -> None:
    """Two ranks, started by hand; nothing catches anything."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    net = Case().shard(Case().build())
    odc = OnDemand(net, timeout_s=1.5 if what == "hang" else TIMEOUT_S)
    train(odc, net, minibatches=1)
    print("ready", flush=True)
    if what == "hang":  # as a collective of NCCL would
        odc.end_of_minibatch()
        after_the_other(rank == 1, "minibatch 2 has ended")
        if rank == 1:
            die()
        time.sleep(60)
    if what == "interrupt" and rank == 1:
        time.sleep(60)
    if what in ("die", "die with the store"):
        dying = rank == (0 if what == "die with the store" else 1)
        after_the_other(dying, "minibatch 1 is published")
        if dying:
            die_at("push", net, odc)
    train(odc, net, minibatches=1)


if __name__ == "__main__":
    script(sys.argv[1])
