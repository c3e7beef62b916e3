"""Small sharded models, their data, and the same computed by one process."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy, layer_norm
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH = 13, 7  # neither is a multiple of the ranks

Microbatch = tuple[torch.Tensor, torch.Tensor]


class Block(nn.Module):
    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 10)
        self.down = nn.Linear(10, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.other_gain = nn.Parameter(torch.ones(WIDTH))  # the same values, so that only the order tells them apart
        self.one = nn.Parameter(torch.zeros(1))  # no elements on most ranks
        self.checkpointed = checkpointed

    def forward(self, x):
        def inner(x):
            h = layer_norm(x, (WIDTH,)) * self.gain
            return x + self.other_gain * self.down(torch.tanh(self.up(h))) * (1 + self.one)

        return checkpoint(inner, x, use_reentrant=False) if self.checkpointed else inner(x)


class Net(nn.Module):
    def __init__(
        self, *, tied: bool = False, frozen: bool = False, checkpointed: bool = False, layers: int = 3
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(checkpointed) for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.blocks[0].up.weight.requires_grad_(False)
            self.blocks[1].requires_grad_(False)
            self.norm.bias.requires_grad_(False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def device_type() -> str:
    return "cuda" if dist.get_backend() == "nccl" else "cpu"


def on_device(movable):
    return movable.cuda() if device_type() == "cuda" else movable


def mesh_of(*sizes: int):
    return init_device_mesh(device_type(), sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])


@dataclass(frozen=True, kw_only=True)
class Case:
    tied: bool = False
    frozen: bool = False
    checkpointed: bool = False
    bf16: bool = False
    together: bool = False
    """norm and head are one unit."""
    replicate: int = 1

    def mesh(self):
        world_size = dist.get_world_size()
        if self.replicate == 1:
            return mesh_of(world_size)
        return mesh_of(self.replicate, world_size // self.replicate)

    def build(self, seed: int = 0) -> Net:
        torch.manual_seed(seed)
        return on_device(Net(tied=self.tied, frozen=self.frozen, checkpointed=self.checkpointed))

    def reference(self, seed: int = 0) -> Net:
        """The same parameters for one process. Recomputing changes no value."""
        return replace(self, checkpointed=False).build(seed)

    def shard(self, net: Net, *, mesh=None, **options) -> Net:
        mesh = mesh or self.mesh()
        policy = MixedPrecisionPolicy()
        if self.bf16:
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in net.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, **options)
        if self.together:
            fully_shard([net.norm, net.head], mesh=mesh, mp_policy=policy, **options)
        fully_shard(net, mesh=mesh, mp_policy=policy)
        return net


def loss_of(net: nn.Module, microbatch: Microbatch) -> torch.Tensor:
    tokens, labels = microbatch
    return cross_entropy(net(tokens).float().flatten(0, 1), labels.flatten())


def draw(seed: int, world_size: int, *, most: int = 3) -> list[list[Microbatch]]:
    """Microbatches of every rank, a random number of them, also none."""
    order = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    counts = [order.randint(0, most) for _ in range(world_size)]
    if not any(counts):
        counts[-1] = 1

    def tokens():
        return torch.randint(0, VOCABULARY, (order.randint(1, 3), 5), generator=generator)

    def microbatch():
        first = tokens()
        return on_device(first), on_device(torch.randint(0, VOCABULARY, first.shape, generator=generator))

    return [[microbatch() for _ in range(count)] for count in counts]


def reference_step(net: Net, plan: Sequence[Sequence[Microbatch]], *, bf16: bool = False) -> float:
    """One process on all samples: sets `.grad` of `net`, returns the loss summed over all."""
    total = 0.0
    sums = {name: torch.zeros_like(p) for name, p in net.named_parameters() if p.requires_grad}
    for microbatches in plan:
        for microbatch in microbatches:
            net.zero_grad()
            if bf16:
                copy = {
                    name: p.detach().bfloat16().requires_grad_(p.requires_grad) for name, p in net.named_parameters()
                }
                tokens, labels = microbatch
                logits = torch.func.functional_call(net, copy, (tokens,), tie_weights=True)
                loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten())
                loss.backward()
                gradients = {name: p.grad for name, p in copy.items()}
            else:
                loss = loss_of(net, microbatch)
                loss.backward()
                gradients = {name: p.grad for name, p in net.named_parameters()}
            total += loss.item()
            for name, total_gradient in sums.items():
                if gradients[name] is not None:
                    total_gradient += gradients[name].float()
    for name, p in net.named_parameters():
        p.grad = sums[name] / len(plan) if p.requires_grad else None
    return total


def relative_error(net: nn.Module, reference: nn.Module) -> float:
    """||gradient - reference|| / ||reference|| over all parameters."""
    difference, size = 0.0, 0.0
    for (name, p), (other_name, other) in zip(net.named_parameters(), reference.named_parameters(), strict=True):
        assert name == other_name
        assert (p.grad is None) == (other.grad is None), name
        if p.grad is not None:
            whole = p.grad.full_tensor()
            assert whole.dtype == p.dtype
            difference += (whole - other.grad).double().square().sum().item()
            size += other.grad.double().square().sum().item()
    return (difference / size) ** 0.5
