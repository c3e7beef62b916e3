"""What is measured: sizes of transfers, and packed microbatches that tell tokens from squared lengths.

One long sample and many short ones of the same number of tokens have the same matrix products and very different
attention; of mixtures, as real microbatches are, attention takes up to 10 % longer than of either. Lengths are mostly
odd, as real ones are.
"""

from dataclasses import dataclass

from odc_sim.models import ModelSpec

Lengths = tuple[int, ...]

CPU_TOKENS, QUICK_CPU_TOKENS = 8192, 2400
"""The most tokens in a microbatch on a CPU, where 64K would take minutes."""

FIT: tuple[Lengths, ...] = (
    (256,),
    (512,),
    (1000,),
    (2048,),
    (509,) * 4,
    (4100,),
    (8192,),
    (1021,) * 8,
    (16_300,),
    (2039,) * 8,
    (32_700,),
    (997,) * 33,
    (65_536,),
    (4093,) * 16,
    (5100, 2300, 900),
    (13_000, 6000, 1500),
    (24_000, 5000, 2500, 700),
    (34_000, 15_000, 2000),
)
HELD_OUT: tuple[Lengths, ...] = (
    (300, 500),
    (1500, 900),
    (3000, 2500, 700),
    (12_000,),
    (20_000, 4000, 300),
    (1500,) * 28,
    (40_000, 9000, 2000),
)
QUICK_FIT: tuple[Lengths, ...] = (
    (256,),
    (1000,),
    (4100,),
    (1021,) * 8,
    (16_300,),
    (2039,) * 16,
    (65_536,),
    (24_000, 5000, 2500, 700),
)
QUICK_HELD_OUT: tuple[Lengths, ...] = ((300, 500), (1500, 900), (3000, 2500, 700), (20_000, 4000, 300))

ROOT_FIT: tuple[Lengths, ...] = tuple((tokens,) for tokens in (256, 1000, 2048, 4100, 16_300, 65_536))
"""Embedding, head and loss know nothing of samples, only of tokens."""
ROOT_HELD_OUT: tuple[Lengths, ...] = ((800,), (6200,), (24_300,))

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Shapes:
    """Microbatches of one kind of unit, ascending in tokens."""

    fit: tuple[Lengths, ...]
    held_out: tuple[Lengths, ...]

    @property
    def all(self) -> tuple[Lengths, ...]:
        """Both, ascending in tokens, then in squared lengths."""
        return tuple(sorted(self.fit + self.held_out, key=lambda s: (sum(s), sum(n * n for n in s))))


def layer_shapes(quick: bool, on_gpu: bool) -> Shapes:
    """Of decoder layers."""
    if quick and on_gpu:
        return Shapes(fit=QUICK_FIT, held_out=QUICK_HELD_OUT)
    return _cut(FIT, HELD_OUT, quick, on_gpu)


def plain_shapes(quick: bool, on_gpu: bool) -> Shapes:
    """Of decoder layers that are not recomputed: fewer."""
    return Shapes(fit=QUICK_FIT, held_out=QUICK_HELD_OUT) if on_gpu else layer_shapes(quick, on_gpu)


def root_shapes(quick: bool, on_gpu: bool) -> Shapes:
    """Of embedding, head and loss."""
    return _cut(ROOT_FIT, ROOT_HELD_OUT, quick, on_gpu)


def _cut(fit: tuple[Lengths, ...], held_out: tuple[Lengths, ...], quick: bool, on_gpu: bool) -> Shapes:
    if on_gpu:
        return Shapes(fit=fit, held_out=held_out)
    most = QUICK_CPU_TOKENS if quick else CPU_TOKENS
    return Shapes(
        fit=tuple(lengths for lengths in fit if sum(lengths) <= most),
        held_out=tuple(lengths for lengths in held_out if sum(lengths) <= most),
    )


def flops(model: ModelSpec, lengths: Lengths) -> float:
    """Forward of one layer: twice its parameters a token, and causal attention."""
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    return 2.0 * model.layer_parameters * tokens + 2.0 * model.query_width * squares


def name(lengths: Lengths) -> str:
    """8 x 1021 tokens; 3000 + 2500 + 700 tokens."""
    if len(lengths) > 1 and len(set(lengths)) == 1:
        return f"{len(lengths)} x {lengths[0]} tokens"
    return " + ".join(str(length) for length in lengths) + " tokens"


def transfer_sizes(models: list[ModelSpec], world_size: int, *, quick: bool, on_gpu: bool) -> tuple[int, ...]:
    """Bytes of shards: powers of two (of four with `quick`) from 4 KiB to 1 GiB, or to the largest that a model has."""
    if not on_gpu:
        largest = max(unit_shards(models, world_size), default=MIB)
        return tuple(n for n in (4 * KIB << (2 * step) for step in range(8)) if n < 4 * max(largest, MIB))
    sizes = [4 * KIB << step for step in range(0, 19, 2 if quick else 1)]
    largest = max(unit_shards(models, world_size), default=0)
    while sizes[-1] < largest:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def unit_shards(models: list[ModelSpec], world_size: int) -> list[int]:
    """Bytes of the fp32 shards of all models' units: what a reduction moves, and twice what a bf16 gather does."""
    units = {n for model in models for n in (model.layer_parameters, model.root_parameters)}
    return sorted({shard_bytes(n, world_size) for n in units})


def shard_bytes(parameters: int, world_size: int) -> int:
    """Bytes of a unit's fp32 shard, in whole cache lines: places in the buffers follow each other."""
    return -(-parameters // (64 * world_size)) * 256


def layer_tensors(model: ModelSpec) -> list[tuple[int, ...]]:
    """Shapes of one layer's parameters, in FSDP's order of no consequence."""
    hidden, q, kv = model.hidden, model.query_width, model.kv_width
    shapes: list[tuple[int, ...]] = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q)]
    shapes += [(model.ffn, hidden), (model.ffn, hidden), (hidden, model.ffn), (hidden,), (hidden,)]
    if model.qkv_bias:
        shapes += [(q,), (kv,), (kv,)]
    if model.o_bias:
        shapes.append((hidden,))
    if model.mlp_bias:
        shapes += [(model.ffn,), (model.ffn,), (hidden,)]
    if model.qk_norm:
        shapes += [(model.head_dim,), (model.head_dim,)]
    return shapes


def root_tensors(model: ModelSpec) -> list[tuple[int, ...]]:
    """Shapes of embedding, final norm and, unless it is the embedding, head."""
    table = (model.vocab, model.hidden)
    return [table, (model.hidden,)] + ([] if model.tied_embeddings else [table])


def fewer_rows(shapes: list[tuple[int, ...]], part: int) -> list[tuple[int, ...]]:
    """The same tensors with one in `part` of their rows."""
    return [(max(1, shape[0] // part), *shape[1:]) for shape in shapes]
