"""Recomputation gives the gradients of an ordinary backward, alone and inside of `fully_shard`, for less host time."""

import time

import pytest

pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from odc_kernels.lm import build_lm, pack, shard
from odc_kernels.ranks import run_ranks
from odc_kernels.recompute import recompute, recompute_forward

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
        self.runs = 0

    def forward(self, x, scale=1.0):
        self.runs += 1
        return torch.tanh(self.inner(x)) * scale


@pytest.mark.parametrize("wants_gradient", [True, False])
def test_gradients_of_input_and_parameters(wants_gradient):
    block, x = Block(), torch.randn(3, 4)
    plain, again = (x.clone().requires_grad_(wants_gradient) for _ in range(2))
    block(plain, scale=2.0).sum().backward()
    expected = [p.grad.clone() for p in block.parameters()]
    block.zero_grad()
    block.runs = 0
    recompute(block, again, scale=2.0).sum().backward()
    assert block.runs == 2
    for parameter, gradient in zip(block.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)
    if wants_gradient:
        torch.testing.assert_close(again.grad, plain.grad)


def test_what_is_frozen_through_and_through_gets_no_gradient():
    first, second, third = Block(), Block().requires_grad_(False), Block()
    first.requires_grad_(False)
    x = torch.randn(3, 4)
    hidden = recompute(second, recompute(first, x))
    recompute(third, hidden).sum().backward()
    assert all(parameter.grad is None for block in (first, second) for parameter in block.parameters())
    expected = torch.autograd.grad(third(second(first(x))).sum(), list(third.parameters()))
    for parameter, gradient in zip(third.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_nothing_is_kept_without_gradients():
    with torch.no_grad():
        assert recompute(Block(), torch.randn(3, 4)).grad_fn is None


@pytest.mark.parametrize("by_name", [True, False])
def test_a_module_is_called_as_before(by_name):
    block, x = Block(), torch.randn(3, 4)
    expected = block(x)

    class Named(Block):
        def forward(self, hidden_states, scale=1.0):
            return super().forward(hidden_states, scale)

    named = Named()
    named.load_state_dict(block.state_dict())
    recompute_forward(named)
    torch.testing.assert_close(named(hidden_states=x) if by_name else named(x), expected)


def samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator) for length in (5, 12, 30, 7)]


def sharded_gradients(rank):
    lm = build_lm("tiny", device=CPU)
    shard(lm, init_device_mesh("cpu", (dist.get_world_size(),)), param_dtype=None, reduce_dtype=None)
    for sample in samples()[2 * rank : 2 * rank + 2]:
        lm(pack([sample], 0.5)).backward()
    whole = {n: p.grad.full_tensor() for n, p in lm.named_parameters() if isinstance(p, DTensor)}
    return {name: gradient.numpy() for name, gradient in whole.items()}


def test_inside_of_fully_shard_the_gradients_are_those_of_one_process():
    lm = build_lm("tiny", device=CPU, recompute=False)
    lm(pack(samples(), 0.25)).backward()
    got = run_ranks(sharded_gradients, 2)[0]
    assert got.keys() == {name for name, _ in lm.named_parameters()}
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(torch.from_numpy(got[name]), parameter.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.bench
def test_host_time_against_torchs_checkpoint(capsys):
    own, stock = (build_lm("tiny", device=CPU, recompute=recompute) for recompute in (True, False))
    stock.model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    batch, found = pack([torch.arange(16)], 1.0), []
    for lm in (own, stock):
        seconds = []
        for _ in range(30):
            start = time.process_time()
            lm(batch).backward()
            seconds.append(time.process_time() - start)
        found.append(min(seconds))
    with capsys.disabled():
        print(f"\nhost time of forward and backward: {found[0] / found[1]:.2f} of torch.utils.checkpoint's")
