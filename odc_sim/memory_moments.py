"""What one rank holds at each moment of a microbatch that can be its peak, besides the sharded parameters.

Read from fully_shard (torch 2.11 and 2.13, `_fsdp_param_group.py`, `_fsdp_collectives.py`) and `odc_kernels`, and
checked on the live tensors of the real step (tests/kernels/test_memory_live.py). n is a layer's parameters, n0 the
root's, P all, W the ranks, e the head's weight.

| moment | alive besides what the layers saved |
|---|---|
| first layer | root 2 n0 and still the buffer it was gathered in, 2 n0; layer 2n and its buffer |
| loss | root 2 n0; last layer gathered ahead; final norm; logits of one chunk; head gradient 2e of earlier chunks |
| head gradient | the same with less of the logits, and the chunk's head gradient 2e beside that of earlier ones |
| backward of a layer | root 2 n0; layer 2n and the next one's buffer; its working set; its and the head's gradient |
| root reduce | root gradients 2 n0 and what is reduced, 4 n0; the root's parameters are sharded again |
| root reduced | what is reduced, 4 n0; the result, 4 n0 / W; the head's gradient 2e |

In a layer's backward most is alive when, of its own gradients, only the down projection's is there; beside it is the
reduction, 4n, of the layer before. A loop variable of fully_shard keeps a reduced unit's last gradient, which is the
head's if embeddings are not tied.

A backward frees what layers saved and fills gradients, each evenly, so of all layers only the last two and the first
two can be the peak. The rest of forward, the optimizer's step (fused AdamW) and publish hold less; so does a layer's
own reduction, unless a microbatch has less than about h/3 tokens. Gradients come and go as this says:

- `collective`: a layer's sharded gradient is what its reduction returned, until the step frees it. So in a rank's first
  microbatch of a minibatch they only come as saved activations go; in later ones all are there.
- `odc`: they are added up in a window, always there. No result is allocated (`Push`).
  The root's reduction, which FSDP2 would keep until the next microbatch's backward, is given back before that one's
  forward (`Push.forget_input`); torch counts it as free at once, and reuses it when the push has ended.
- `collective-deferred`, `odc-local-sum`: a rank's only microbatch is as above. With more, bf16 gradients become fp32
  sums after each backward but the last, 4 P in all, which the last one reduces away. `collective-deferred` has all
  parameters, 2 P, and gathers nothing ahead; the last backward shards them again.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from odc_sim.memory_activations import (
    HEAD_GRADIENT_LOGIT_BYTES,
    LOSS_LOGIT_BYTES,
    final_norm_bytes,
    input_bytes,
    saved_bytes,
    transient_bytes,
)
from odc_sim.models import ModelSpec

Place = Literal["only", "first", "middle", "last"]
"""Which of a rank's microbatches in a minibatch: of several the first, the last, or one between."""

BF16_BYTES = 2
FP32_BYTES = 4


def place_of(number: int, count: int) -> Place:
    """Of a rank's microbatch `number`, from 0, of `count` in a minibatch."""
    if count == 1:
        return "only"
    return "first" if number == 0 else "last" if number == count - 1 else "middle"


@dataclass(frozen=True, kw_only=True, slots=True)
class Alive:
    """Bytes, but for `gradients`."""

    moment: str
    unsharded: int
    """Parameters and bf16 gradients of units, and what is gathered ahead."""
    gathered: int
    """The parameters of that."""
    staging: int
    """What is reduced, and what the reduction returned beside the gradient it is added to."""
    local_gradients: int
    gradients: int
    """Elements of the whole model whose sharded gradient there is."""
    activations: int = 0
    logits: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Microbatch:
    """One microbatch of a rank; `moments` says what is alive in it."""

    model: ModelSpec
    world_size: int
    schedule: str
    place: Place
    tokens: int
    gather_bytes: int
    """Of an element that is gathered ahead."""
    recompute: bool
    chunked_loss_tokens: int | None
    repeated_keys: bool

    def moments(self) -> Iterator[Alive]:
        """Those that can be the peak."""
        layers = self.model.layers
        if not self._deferred:
            yield self._first_layer()
        yield from self._loss()
        # The first one has no reduction beside it, the last one nothing gathered ahead; between them all is even.
        for done in sorted({0, min(1, layers - 1), max(layers - 2, 0), layers - 1}):
            yield self._layer_backward(done)
        yield from self._root()

    @property
    def _before(self) -> bool:
        """Whether the rank has run a microbatch of this minibatch before."""
        return self.place in ("middle", "last")

    @property
    def _deferred(self) -> bool:
        return self.schedule == "collective-deferred"

    @property
    def _one_sided(self) -> bool:
        return self.schedule in ("odc", "odc-local-sum")

    @property
    def _sums(self) -> bool:
        """Whether gradients of several microbatches are summed on the rank."""
        return self.schedule in ("collective-deferred", "odc-local-sum")

    @property
    def _reduces(self) -> bool:
        """Whether this microbatch's backward reduces gradients."""
        return not self._sums or self.place in ("only", "last")

    @property
    def _head_elements(self) -> int:
        return self.model.vocab * self.model.hidden

    def _sharded_gradients(self, done: int) -> int:
        """Elements, when `done` parameters have been through this backward."""
        if self._one_sided or (self._before and not self._sums):
            return self.model.parameters
        return done if self._reduces else 0

    def _local(self, done: int) -> int:
        """Bytes of local sums then."""
        if not self._sums:
            return 0
        if self._before:
            return FP32_BYTES * (self.model.parameters - (done if self._reduces else 0))
        return 0 if self._reduces else FP32_BYTES * done

    def _saved(self, layers: int) -> int:
        a_layer = saved_bytes(self.model, recompute=self.recompute, repeated_keys=self.repeated_keys)
        return self.tokens * (layers * a_layer + input_bytes(self.model))

    def _first_layer(self) -> Alive:
        """In its forward, before its parameters are used."""
        model = self.model
        gathered = (BF16_BYTES + self.gather_bytes) * (model.root_parameters + model.layer_parameters)
        return Alive(
            moment="first layer",
            unsharded=gathered,
            gathered=gathered,
            staging=0,
            local_gradients=self._local(0),
            gradients=self._sharded_gradients(0),
            activations=self.tokens * (input_bytes(model) + BF16_BYTES * model.hidden),
        )

    def _loss(self) -> Iterator[Alive]:
        model, tokens = self.model, self.tokens
        chunk = tokens if self.chunked_loss_tokens is None else min(self.chunked_loss_tokens, tokens)
        parameters = BF16_BYTES * (model.parameters if self._deferred else model.root_parameters)
        ahead = 0 if self._deferred else self.gather_bytes * model.layer_parameters
        of_chunks_before = BF16_BYTES * self._head_elements if tokens > chunk else 0
        hidden = tokens * final_norm_bytes(model) + (tokens - chunk) * BF16_BYTES * model.hidden
        for moment, logit_bytes, of_this_chunk in (
            ("loss", LOSS_LOGIT_BYTES, 0),
            ("head gradient", HEAD_GRADIENT_LOGIT_BYTES, BF16_BYTES * self._head_elements),
        ):
            yield Alive(
                moment=moment,
                unsharded=parameters + ahead + of_chunks_before + of_this_chunk,
                gathered=parameters + ahead,
                staging=0,
                local_gradients=self._local(0),
                gradients=self._sharded_gradients(0),
                activations=self._saved(model.layers) + hidden,
                logits=chunk * model.vocab * logit_bytes,
            )

    def _layer_backward(self, done: int) -> Alive:
        """When `done` layers after it have been through backward."""
        model, n = self.model, self.model.layer_parameters
        if self._deferred:
            parameters = BF16_BYTES * (model.parameters - (done * n if self._reduces else 0))
        else:
            ahead = self.gather_bytes * n if done < model.layers - 1 else 0
            parameters = BF16_BYTES * (model.root_parameters + n) + ahead
        layer_before = FP32_BYTES * n if self._reduces else 0
        transient = transient_bytes(model, recompute=self.recompute, repeated_keys=self.repeated_keys)
        return Alive(
            moment=f"backward of layer {model.layers - done}",
            unsharded=parameters + BF16_BYTES * (model.hidden * model.ffn + self._head_elements),
            gathered=parameters,
            staging=layer_before if done else 0,
            local_gradients=self._local(done * n),
            gradients=self._sharded_gradients(done * n),
            activations=self._saved(model.layers - done) + self.tokens * transient,
        )

    def _root(self) -> Iterator[Alive]:
        """After the layers' backward, when the root's gradients are complete."""
        model = self.model
        total, root = model.parameters, model.root_parameters
        layers = total - root
        inputs = self.tokens * input_bytes(model)
        if not self._reduces:
            # In place where there is a sum; else the sum is made of each parameter in turn, of the head's last.
            beside = root if self._before else self._head_elements
            yield Alive(
                moment="root sum",
                unsharded=BF16_BYTES * ((total if self._deferred else 0) + beside),
                gathered=BF16_BYTES * total if self._deferred else 0,
                staging=0,
                local_gradients=FP32_BYTES * total,
                gradients=self._sharded_gradients(0),
                activations=inputs,
            )
            return
        summed = self._sums and self._before
        yield Alive(
            moment="root reduce",
            unsharded=0 if summed else BF16_BYTES * root,
            gathered=0,
            staging=FP32_BYTES * root,
            local_gradients=FP32_BYTES * root if summed else 0,
            gradients=self._sharded_gradients(layers),
            activations=inputs,
        )
        if not self._one_sided:
            added = 0 if self._sums or not self._before else -(-FP32_BYTES * root // self.world_size)
            yield Alive(
                moment="root reduced",
                unsharded=0 if summed else BF16_BYTES * model.head_parameters,
                gathered=0,
                staging=FP32_BYTES * root + added,
                local_gradients=FP32_BYTES * model.head_parameters if summed else 0,
                gradients=self._sharded_gradients(total),
                activations=inputs,
            )
