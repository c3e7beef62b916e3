"""What OnDemand must do, run in each rank; `CHECKS` share one set of ranks."""

import time
import traceback
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from kernels.conformance import raises
from kernels.fsdp_models import (
    VOCABULARY,
    Case,
    device_type,
    draw,
    loss_of,
    mesh_of,
    on_device,
    reference_step,
    relative_error,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, distribute_module, distribute_tensor

from odc_kernels.fsdp import OnDemand
from odc_kernels.fsdp_deferred import collective_deferred
from odc_kernels.rendezvous import WindowError
from odc_sim.errors import InputError


def gradient_errors(case: Case, *, minibatches: int = 3, **options) -> list[float]:
    """Against one process, over minibatches with random counts."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = case.shard(case.build()), case.reference()
    errors = []
    with OnDemand(net, timeout_s=20, **options) as odc:
        for number in range(minibatches):
            plan = draw(number, world_size)
            for microbatch in odc.minibatch(plan[rank]):
                loss_of(net, microbatch).backward()
            reference_step(reference, plan, bf16=case.bf16)
            errors.append(relative_error(net, reference))
            odc.publish()
            assert all(p.grad is None for p in net.parameters())
    return errors


def most_error(case: Case) -> float:
    """bf16 too is the same to fp32 rounding; a GPU may choose other kernels for parameters that lie elsewhere."""
    return 1e-2 if case.bf16 and device_type() == "cuda" else 1e-5


CASES = {
    "plain": Case(),
    "tied": Case(tied=True),
    "frozen": Case(frozen=True),
    "checkpointed": Case(checkpointed=True, tied=True, frozen=True),
    "together": Case(together=True),
    "bf16": Case(bf16=True),
    "bf16, checkpointed": Case(bf16=True, checkpointed=True, frozen=True),
}


def gradients_are_those_of_one_process() -> None:
    few = ("tied", "bf16, checkpointed") if dist.get_world_size() == 4 else CASES
    for name in few:
        case = CASES[name]
        errors = gradient_errors(case)
        assert max(errors) < most_error(case), (name, errors)


def gradients_are_those_of_one_process_with_replicas() -> None:
    for case, options in (
        (Case(replicate=2, checkpointed=True), {}),
        (Case(replicate=2), {"deterministic": True}),
        (Case(replicate=2), {"local_sum": True}),
        (Case(replicate=2, tied=True, frozen=True, bf16=True), {}),
    ):
        errors = gradient_errors(case, **options)
        assert max(errors) < most_error(case), (case, options, errors)


def options_change_no_gradient() -> None:
    for options in ({"deterministic": True}, {"overlap": False}, {"local_sum": True}):
        errors = gradient_errors(Case(frozen=True), **options)
        assert max(errors) < 1e-5, (options, errors)


def deterministic_gradients_repeat_bitwise() -> None:
    def once() -> list[torch.Tensor]:
        net = Case().shard(Case().build())
        with OnDemand(net, deterministic=True) as odc:
            for microbatch in odc.minibatch(draw(5, dist.get_world_size(), most=6)[dist.get_rank()]):
                loss_of(net, microbatch).backward()
            return [p.grad.to_local().clone() for p in net.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(once(), once(), strict=True))


def slots_of_ranks_without_a_push_are_empty() -> None:
    """In every other minibatch a rank has no microbatch; what its slots held of the one before must not count."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = Case().shard(Case().build()), Case().build()
    with OnDemand(net, deterministic=True) as odc:
        for number in range(4):
            plan = [part if (number + peer) % 2 else [] for peer, part in enumerate(draw(number, world_size, most=3))]
            for microbatch in odc.minibatch(plan[rank]):
                loss_of(net, microbatch).backward()
            if any(plan):
                reference_step(reference, plan)
                assert relative_error(net, reference) < 1e-5, number
            odc.publish()


def gradients_have_the_parameters_dtype() -> None:
    """Parameters that are bf16 themselves, not only in compute: their gradients are made from the fp32 sums."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    case = Case(bf16=True)
    net, reference = case.shard(case.build().bfloat16()), case.build().bfloat16().float()
    plan = draw(7, world_size)
    with OnDemand(net) as odc:
        for microbatch in odc.minibatch(plan[rank]):
            loss_of(net, microbatch).backward()
        assert {p.grad.dtype for p in net.parameters()} == {torch.bfloat16}
        reference_step(reference, plan, bf16=True)
        assert relative_error(net, reference) < 2e-2


def a_divide_factor_takes_the_place_of_the_number_of_ranks() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = Case().shard(Case().build()), Case().build()
    plan = draw(1, world_size)
    with OnDemand(net, gradient_divide_factor=2.0) as odc:
        for microbatch in odc.minibatch(plan[rank]):
            loss_of(net, microbatch).backward()
        reference_step(reference, plan)
        for p in reference.parameters():
            p.grad *= world_size / 2
        assert relative_error(net, reference) < 1e-5


def a_minibatch_without_microbatches_gives_zeros() -> None:
    net = Case(frozen=True).shard(Case(frozen=True).build())
    with OnDemand(net) as odc:
        odc.end_of_minibatch()
        for p in net.parameters():
            assert p.grad is None if not p.requires_grad else not p.grad.full_tensor().any()
        odc.publish()


def training_follows_one_process() -> None:
    """20 steps of AdamW with clipping and a schedule of learning rates, on a mesh and with replicas."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    case = Case(replicate=2) if world_size == 4 else Case(tied=True)
    net, reference = case.shard(case.build()), case.reference()
    states = []
    for model in (net, reference):
        optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        states.append((model, optimizer, schedule))
    odc = OnDemand(net)
    for number in range(20):
        plan = draw(number, world_size)
        total = on_device(torch.zeros(1))
        for microbatch in odc.minibatch(plan[rank]):
            loss = loss_of(net, microbatch)
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        expected = reference_step(reference, plan)
        assert abs(total.item() - expected) <= 1e-4 * abs(expected), number
        norms = []
        for model, optimizer, schedule in states:
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05))
            optimizer.step()
            schedule.step()
        torch.testing.assert_close(norms[0].full_tensor(), norms[1], rtol=1e-4, atol=0)
        odc.publish()
    odc.close()
    for p, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), other, rtol=1e-3, atol=1e-4)


def a_gradient_scaler_works_and_may_skip_a_step() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = Case().shard(Case().build()), Case().build()
    scaler = torch.amp.GradScaler(device_type(), init_scale=8.0)
    scaler.scale(on_device(torch.zeros(1)))  # else it refuses to go on on a rank without microbatches
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, reference))
    with OnDemand(net) as odc:
        for number in range(3):
            plan = draw(number, world_size)
            for microbatch in odc.minibatch(plan[rank]):
                scaler.scale(loss_of(net, microbatch)).backward()
            if number == 1 and rank == 0:
                next(net.parameters()).grad.to_local()[:1].fill_(torch.inf)
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            odc.publish()
            if number != 1:
                reference_step(reference, plan)
                other.step()
    assert scaler.get_scale() == 4.0
    for p, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def several_models_in_one_process() -> None:
    """Two open at once, in turn within a minibatch, as an actor and a critic would be."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    nets = [Case().shard(Case().build(seed)) for seed in (1, 2)]
    references = [Case().build(seed) for seed in (1, 2)]
    plan = draw(3, world_size)
    handles = [OnDemand(net) for net in nets]
    for microbatch in plan[rank]:
        for net in nets:
            loss_of(net, microbatch).backward()
    for odc, net, reference in zip(handles, nets, references, strict=True):
        odc.end_of_minibatch()
        reference_step(reference, plan)
        assert relative_error(net, reference) < 1e-5
    for odc in reversed(handles):
        odc.publish()
    for odc in handles:
        odc.close()


def a_closed_model_is_fully_shards_again_and_may_be_opened_again() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for case in (Case(), *([Case(replicate=2)] if world_size == 4 else [])):
        net, reference = case.shard(case.build()), case.build()
        for number in range(3):
            plan = draw(number, world_size)
            if number == 1:  # the collectives need equal counts
                plan = [draw(number, 1)[0][:1] for _ in range(world_size)]
                for microbatch in plan[rank]:
                    loss_of(net, microbatch).backward()
                reference_step(reference, plan)
                assert relative_error(net, reference) < 1e-5
                net.zero_grad()
                continue
            odc = OnDemand(net)
            for microbatch in odc.minibatch(plan[rank]):
                loss_of(net, microbatch).backward()
            reference_step(reference, plan)
            assert relative_error(net, reference) < 1e-5
            odc.close()
            odc.close()
            assert all(p.grad is None for p in net.parameters())
            with raises(InputError, "OnDemand.publish(): it is closed"):
                odc.publish()


def the_root_may_lie_inside_of_a_plain_module() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = torch.nn.Sequential(Case().shard(Case().build())), torch.nn.Sequential(Case().build())
    plan = draw(4, world_size)
    with OnDemand(net) as odc:
        assert (sum(odc.window_bytes.values()) > 0) == (world_size > 1)
        for microbatch in odc.minibatch(plan[rank]):
            loss_of(net, microbatch).backward()
        reference_step(reference, plan)
        assert relative_error(net, reference) < 1e-5


def evaluation_needs_no_equal_counts() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    net, reference = Case().shard(Case().build()), Case().build()
    optimizer, other = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (net, reference))
    with OnDemand(net) as odc:
        for number in range(3):
            plan = draw(number, world_size)
            if rank == 0:  # it leaves the root gathered
                with torch.no_grad():
                    loss = loss_of(net, plan[-1][0]) if plan[-1] else None
                    assert loss is None or abs(loss - loss_of(reference, plan[-1][0])) < 1e-4
            plan[0] = [] if number == 1 else plan[0]
            for microbatch in odc.minibatch(plan[rank]):
                loss_of(net, microbatch).backward()
            optimizer.step()
            odc.publish()
            reference_step(reference, plan)
            other.step()
    for p, expected in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), expected, rtol=1e-4, atol=1e-5)


def run_one(odc: OnDemand, net: torch.nn.Module, *, seed: int = 1) -> None:
    """One minibatch with a microbatch on each rank, up to its end."""
    for microbatch in odc.minibatch([draw(seed, 1)[0][0]]):
        loss_of(net, microbatch).backward()


def calls_in_the_wrong_order_are_refused() -> None:
    net = Case().shard(Case().build())
    microbatch = draw(1, 1)[0][0]
    with OnDemand(net) as odc:
        odc.publish()
        run_one(odc, net)
        with raises(InputError, "end_of_minibatch()", "call publish() first"):
            odc.end_of_minibatch()
        with raises(InputError, "minibatch()", "call publish() first"):
            next(odc.minibatch([microbatch]))
        if dist.get_world_size() > 1:
            with raises(InputError, "got a forward between end_of_minibatch() and publish(); publish first"):
                net(microbatch[0])
    if dist.get_world_size() == 1:
        return
    net = Case().shard(Case().build())
    with raises(WindowError, "rank 0: has gradients that no end_of_minibatch() has summed"), OnDemand(net) as odc:
        if dist.get_rank() == 0:
            loss_of(net, microbatch).backward()
        odc.publish()
    with raises(InputError, "it is closed"):
        odc.end_of_minibatch()


def what_cannot_work_is_refused() -> None:
    world_size = dist.get_world_size()
    with raises(InputError, "got a model without sharded parameters; call fully_shard on it first"):
        OnDemand(Case().build())
    net = Case().shard(Case().build())
    handle = net.head.weight.register_post_accumulate_grad_hook(lambda p: None)
    with raises(InputError, "head.weight has a post-accumulate-grad hook (an optimizer in backward"):
        OnDemand(net)
    handle.remove()
    with raises(InputError, "got gradient_divide_factor 0"):
        OnDemand(net, gradient_divide_factor=0.0)
    if world_size == 1:
        return
    with OnDemand(net) as odc:
        with raises(InputError, "embedding.weight has a post-accumulate-grad hook", "a second OnDemand"):
            OnDemand(net)
        net.norm.weight.register_post_accumulate_grad_hook(lambda p: None)
        with raises(InputError, "norm.weight has a post-accumulate-grad hook"):
            odc.end_of_minibatch()
        odc._abandon()

    net = Case().build()
    fully_shard(net.head, mesh=mesh_of(world_size))
    fully_shard(net, mesh=mesh_of(1, world_size))
    with raises(InputError, "head.weight", "different meshes; expected one for all"):
        OnDemand(net)
    net = Case().build()
    fully_shard(net, mesh=mesh_of(world_size, 1))
    with raises(InputError, "shards over 1 rank; nothing is gathered, use DDP"):
        OnDemand(net)
    net = Case().build()
    distribute_module(net, mesh_of(world_size))
    with raises(InputError, "call fully_shard on it first"):
        OnDemand(net)
    mesh = mesh_of(world_size)
    net = Case().build()
    whole = torch.nn.Parameter(distribute_tensor(net.embedding.weight.detach(), mesh, [Replicate()]))
    net.embedding.weight = whole
    fully_shard(net, mesh=mesh, ignored_params={whole})
    with raises(InputError, "embedding.weight is placed as [Replicate()]", "expected a mesh of one dimension"):
        OnDemand(net)
    if world_size == 4:  # two ranks of four
        net = Case().build()
        mesh = init_device_mesh(device_type(), (2, 2, 1), mesh_dim_names=("a", "b", "c"))["b", "c"]
        fully_shard(net, mesh=mesh)
        with raises(InputError, "shards over 1 rank"):
            OnDemand(net)

    net = Case().build()
    net.norm.weight = torch.nn.Parameter(net.norm.weight.bfloat16(), requires_grad=False)
    Case().shard(net)
    with raises(WindowError, "the root is gathered as torch.uint8; expected parameters of one floating-point dtype"):
        OnDemand(net)
    loss_of(Case().shard(Case().build()), draw(1, 1)[0][0]).backward()  # a failed opening leaves nothing behind

    net = Case().build()
    fully_shard(net, mesh=Case().mesh(), mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float16))
    with raises(InputError, "the root: got reduce_dtype torch.float16, expected fp32 or bf16"), OnDemand(net) as odc:
        run_one(odc, net)
    if world_size == 4:
        net = Case().shard(Case().build(), reshard_after_forward=2)
        with raises(InputError, "gathered over 2 ranks, expected 4", "use True or False"), OnDemand(net) as odc:
            run_one(odc, net)


def a_refused_model_is_given_back() -> None:
    if dist.get_world_size() == 1:
        return
    net, reference = Case().build(), Case().build()
    net.norm.unused = torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16), requires_grad=False)
    Case().shard(net)
    with raises(WindowError, "torch.uint8"):
        OnDemand(net)
    microbatch = draw(1, 1)[0][0]
    loss_of(net, microbatch).backward()
    reference_step(reference, [[microbatch]])
    torch.testing.assert_close(net.head.weight.grad.full_tensor(), reference.head.weight.grad)


def evaluate(net: torch.nn.Module, microbatch: tuple[torch.Tensor, torch.Tensor]) -> None:
    with torch.no_grad():
        net(microbatch[0])


def layout_drift_is_not_silent() -> None:
    if dist.get_world_size() == 1:
        return
    microbatch = draw(1, 1)[0][0]
    net = Case().shard(Case().build())
    with raises(InputError, "head.weight was replaced after OnDemand was opened"), OnDemand(net) as odc:
        run_one(odc, net)
        odc.publish()
        net.head.weight = torch.nn.Parameter(net.head.weight.detach().clone())
        net(microbatch[0])
    net = Case().shard(Case().build())
    message = "end of minibatch 1: rank 0: parameters of blocks.1 are not what was published"
    with raises(WindowError, message), OnDemand(net) as odc:
        if dist.get_rank() == 0:
            with torch.no_grad():
                net.blocks[1].gain.to_local().mul_(1 + 1e-6)
        run_one(odc, net)
    net = Case().shard(Case().build())
    with OnDemand(net) as odc:  # the same change, shown
        with torch.no_grad():
            net.blocks[1].gain.to_local().mul_(1 + 1e-6)
        odc.publish()
        run_one(odc, net)
    for name in ("blocks.1", "the root"):  # which an evaluation leaves gathered
        net = Case().shard(Case().build())
        changed = net.blocks[1].gain if name == "blocks.1" else net.head.weight
        with (
            raises(WindowError, f"end of minibatch 1: rank 0: parameters of {name} are not what"),
            OnDemand(net) as odc,
        ):
            evaluate(net, microbatch)  # stands for no minibatch's forward
            if dist.get_rank() == 0:
                with torch.no_grad():
                    changed.to_local().mul_(1 + 1e-2)
            run_one(odc, net)
    net = Case().shard(Case().build())
    message = "publish before the end of a minibatch: rank 0: parameters of blocks.1 are not what was published"
    with raises(WindowError, message), OnDemand(net) as odc:
        if dist.get_rank() == 0:
            with torch.no_grad():
                net.blocks[1].gain.to_local().mul_(1 + 1e-6)
        evaluate(net, microbatch)  # of a mixture
        odc.publish()
    net = Case().shard(Case().build())
    with raises(WindowError, "end of minibatch 1: rank 0: parameters of blocks.1 are not what"), OnDemand(net) as odc:
        with torch.no_grad():
            gain = net.blocks[1].gain.to_local()
            kept = gain.clone()
            if dist.get_rank() == 0:
                gain.mul_(2)
            evaluate(net, microbatch)
            gain.copy_(kept)  # as it was, but too late for the evaluation
        run_one(odc, net)
    net = Case().shard(Case().build())
    with raises(InputError, "blocks.0: got gradients of", "requires_grad changed"), OnDemand(net) as odc:
        net.blocks[0].up.weight.requires_grad_(False)
        run_one(odc, net)
    net = Case().shard(Case().build())
    with raises(InputError, "the root: got a shard of", "replaced or sharded anew"), OnDemand(net) as odc:
        net.blocks[2].set_custom_all_gather(odc._state._gathers[0])  # as if this were another unit now
        run_one(odc, net)


def a_parameter_without_gradient_counts_as_zero() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if not hasattr(FSDPModule, "set_reduce_scatter_unused_params") and world_size > 1:
        net = Case().build()
        net.norm.unused = torch.nn.Parameter(torch.ones(5))
        Case().shard(net)
        with raises(InputError, "the root: got gradients of", "a parameter got none"), OnDemand(net) as odc:
            run_one(odc, net)
        return
    net, reference = Case().build(), Case().build()
    for model in (net, reference):
        model.norm.unused = torch.nn.Parameter(on_device(torch.ones(5)))
    Case().shard(net)
    plan = draw(1, world_size)
    with OnDemand(net) as odc:
        for microbatch in odc.minibatch(plan[rank]):
            loss_of(net, microbatch).backward()
        reference_step(reference, plan)
        assert relative_error(net, reference) < 1e-5


def units_of_very_many_parameters_are_laid_out_right() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()

    class Many(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ParameterList(torch.nn.Parameter(torch.full((3,), 0.5)) for _ in range(450))
            self.head = torch.nn.Linear(3, VOCABULARY)

        def forward(self, tokens):
            weights = torch.stack([part.sin() * (1 + number) for number, part in enumerate(self.parts)])
            return self.head(weights[tokens * 30 % 450])

    net, reference = on_device(Many()), on_device(Many())
    reference.load_state_dict(net.state_dict())
    for p in (*net.parameters(), *reference.parameters()):
        dist.broadcast(p.detach(), 0)
    fully_shard(net, mesh=Case(bf16=True).mesh())
    plan = draw(2, world_size)
    with OnDemand(net) as odc:
        for microbatch in odc.minibatch(plan[rank]):
            loss_of(net, microbatch).backward()
        reference_step(reference, plan)
        assert relative_error(net, reference) < 1e-5


def a_late_rank_is_named_within_the_deadline() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    if world_size == 1:
        return
    dist.barrier()
    odc = OnDemand(Case().shard(Case().build()), timeout_s=1.5)
    dist.barrier()
    if rank == world_size - 1:
        time.sleep(3)  # stuck
    else:
        start = time.monotonic()
        with raises(
            WindowError, f"end of minibatch 1: rank {rank} waited 1.5 s for rank {world_size - 1}: dead, stuck"
        ):
            odc.end_of_minibatch()
        assert 1.4 < time.monotonic() - start < 2.5
        with raises(InputError, "ranks could not go on together"):
            odc.end_of_minibatch()
    dist.barrier()
    odc._abandon()


def collectives_may_be_deferred_to_once_a_minibatch() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    for case in (Case(bf16=True), Case(checkpointed=True, replicate=2 if world_size == 4 else 1)):
        net, reference = case.shard(case.build()), case.reference()
        for number in range(3):
            plan = [[*microbatches, *draw(9, 1)[0][:1]] for microbatches in draw(number, world_size)]
            for microbatch in collective_deferred(net, plan[rank]):
                loss_of(net, microbatch).backward()
            reference_step(reference, plan, bf16=case.bf16)
            assert relative_error(net, reference) < most_error(case)
            net.zero_grad()
        for _ in range(2):  # and the default again
            loss_of(net, plan[0][-1]).backward()
        reference_step(reference, [plan[0][-1:] * 2] * world_size, bf16=case.bf16)
        assert relative_error(net, reference) < most_error(case)
    with raises(InputError, "collective_deferred: got no microbatches", "use OnDemand"):
        next(collective_deferred(net, []))
    with raises(InputError, "root is not sharded"):
        next(collective_deferred(Case().build(), []))


EACH = [
    gradients_are_those_of_one_process,
    training_follows_one_process,
    a_closed_model_is_fully_shards_again_and_may_be_opened_again,
    calls_in_the_wrong_order_are_refused,
    what_cannot_work_is_refused,
    the_root_may_lie_inside_of_a_plain_module,
    a_divide_factor_takes_the_place_of_the_number_of_ranks,
    a_minibatch_without_microbatches_gives_zeros,
    collectives_may_be_deferred_to_once_a_minibatch,
]
CHECKS = [
    *EACH,
    options_change_no_gradient,
    deterministic_gradients_repeat_bitwise,
    gradients_have_the_parameters_dtype,
    slots_of_ranks_without_a_push_are_empty,
    a_gradient_scaler_works_and_may_skip_a_step,
    several_models_in_one_process,
    evaluation_needs_no_equal_counts,
    a_refused_model_is_given_back,
    layout_drift_is_not_silent,
    a_parameter_without_gradient_counts_as_zero,
    units_of_very_many_parameters_are_laid_out_right,
    a_late_rank_is_named_within_the_deadline,
]


def run_checks(rank: int, checks: Sequence[Callable[[], None]]) -> dict[str, str | None]:
    """What went wrong in each. The first failure is the last: the ranks may no longer be together."""
    outcomes: dict[str, str | None] = {}
    for check in checks:
        outcomes[check.__name__] = None
        start = time.monotonic()
        try:
            check()
        except Exception:
            outcomes[check.__name__] = traceback.format_exc()
            break
        if rank == 0:
            print(f"{check.__name__}: {time.monotonic() - start:.1f} s")
    return outcomes
