"""The models that `fsdp_bench` trains."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy, rms_norm, scaled_dot_product_attention, silu
from torch.utils.checkpoint import checkpoint

ALL_MODES = ("fsdp2", "odc", "odc-deterministic", "collective-deferred", "fsdp2-again")
IN_TURN = ("fsdp2", "odc", "odc-deterministic")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A model and what a rank does in a minibatch."""

    layers: int
    hidden: int
    ffn: int
    vocabulary: int
    tokens: int
    """In a microbatch."""
    microbatches: int
    minibatches: int = 20
    decoder: bool = True
    """Attention and an MLP of three matrices, recomputed; else an MLP of two, so that the host is fast."""
    modes: tuple[str, ...] = ALL_MODES
    repeats: int = 1
    """More than one: all modes are built at once and measured in turn, `minibatches` each time, so that what the
    machine does meanwhile hits all alike."""


SHAPES = {
    "equal": Shape(layers=4, hidden=1024, ffn=2816, vocabulary=8192, tokens=512, microbatches=2),
    "compute-bound": Shape(
        layers=4,
        hidden=3072,
        ffn=8192,
        vocabulary=8192,
        tokens=8192,
        microbatches=4,
        minibatches=7,
        modes=IN_TURN,
        repeats=4,
    ),
    "host-bound": Shape(
        layers=8,
        hidden=256,
        ffn=512,
        vocabulary=1024,
        tokens=64,
        microbatches=2,
        minibatches=2,  # the machine's host is at one speed for about that long
        modes=IN_TURN[:2],
        repeats=20,
    ),
    "transfer-bound": Shape(
        layers=6,
        hidden=8192,
        ffn=32768,
        vocabulary=1024,
        tokens=64,
        microbatches=2,
        minibatches=5,
        decoder=False,
        modes=IN_TURN,
        repeats=3,
    ),
}


class Block(nn.Module):
    """A decoder layer, recomputed in backward."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.hidden // 64
        self.norms = nn.ParameterList(nn.Parameter(torch.ones(shape.hidden)) for _ in range(2))
        self.qkv = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.gate = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, tokens, hidden] -> the same."""
        return checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        h = rms_norm(x, x.shape[-1:], self.norms[0])
        q, k, v = (part.unflatten(-1, (self.heads, 64)).transpose(1, 2) for part in self.qkv(h).chunk(3, -1))
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        h = rms_norm(x, x.shape[-1:], self.norms[1])
        return x + self.down(silu(self.gate(h)) * self.up(h))


class Mlp(nn.Module):
    """Two matrices."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up = nn.Linear(shape.hidden, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[1, tokens, hidden] -> the same."""
        return x + self.down(silu(self.up(x)))


class Net(nn.Module):
    """Embedding, layers, head; its loss in pieces of 2,048 tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.blocks = nn.ModuleList((Block if shape.decoder else Mlp)(shape) for _ in range(shape.layers))
        self.head = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """[1, tokens] -> the mean loss of guessing each token from itself and those before it."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        labels = tokens[0].roll(-1)

        def loss(part: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.head(part).float(), label, reduction="sum")

        pieces = zip(x[0].split(2048), labels.split(2048), strict=True)
        return sum(checkpoint(loss, *piece, use_reentrant=False) for piece in pieces) / tokens.numel()
