"""Peak memory of one rank, by category: model state by recipe, FSDP's buffers by schedule, activations by tokens.

Full sharding over `world_size` ranks, bf16 compute, fp32 reduction. A microbatch has three moments that can be the
peak, and the estimate is the largest of them (adding everything would count logits and a layer's activations together,
which never meet):

| moment | alive besides model state and windows |
|---|---|
| loss | what the layers saved; one chunk of logits |
| layer backward | what the layers saved; one layer's working set; its gradients and the reduction before it |
| root reduce | no activations; the gradients and reduction of the root, with a large vocabulary the largest unit |

Forward and optimizer step are never the peak: forward holds less of each than the last layer's backward (2n + 4n of
buffers against 2n + 2n + 2n + 4n), and the step holds model state only (fused AdamW has no temporaries).

FSDP's buffers are those of fully_shard in torch 2.11 (`_fsdp_param_group.py`, `_fsdp_collectives.py`): parameters of
the unit in use, one gathered ahead, gradients, and one reduction's input at a time, as compute waits for a reduction
before it packs the next.
"""

from dataclasses import dataclass
from typing import Literal, get_args

from odc_sim.errors import InputError, unknown_name
from odc_sim.memory_activations import LOGIT_BYTES, final_norm_bytes, saved_bytes, transient_bytes
from odc_sim.models import ModelSpec

Recipe = Literal["paper", "mixed"]
GatherDtype = Literal["fp32", "bf16"]
ScheduleName = Literal["collective", "collective-deferred", "odc", "odc-local-sum"]

BF16_BYTES = 2
FP32_BYTES = 4
DEFAULT_RESERVED_BYTES = 2_000_000_000
"""Assumed, not measured: CUDA context and kernels, NCCL's buffers, the caching allocator's fragments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeBytes:
    """Bytes a parameter of the sharded state. The unsharded unit is bf16 in either recipe."""

    parameters: int
    gradients: int
    optimizer: int


RECIPES: dict[Recipe, RecipeBytes] = {
    # fp32 master, gradient and two moments: sail-sg/odc, and FSDP2 with a bf16 MixedPrecisionPolicy.
    "paper": RecipeBytes(parameters=4, gradients=4, optimizer=8),
    # bf16 parameter and gradient; fp32 master and two moments: DeepSpeed (arXiv 1910.02054, section 3.1), PaRO.
    "mixed": RecipeBytes(parameters=2, gradients=2, optimizer=12),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """What one rank holds at its peak."""

    categories: dict[str, int]
    """Bytes at the peak moment. Always all of parameters, gradients, optimizer, unsharded, staging, published_window,
    local_gradients, activations, logits, reserved; 0 where nothing is alive then."""
    moment: str
    """Which moment is the peak: "loss", "layer backward", "root reduce" or (deferred only) "root sum"."""
    recipe: Recipe

    @property
    def total_bytes(self) -> int:
        """The sum of the categories."""
        return sum(self.categories.values())


def peak_memory(
    model: ModelSpec,
    *,
    world_size: int,
    schedule: str,
    microbatch_tokens: int,
    recipe: Recipe = "paper",
    gather_dtype: GatherDtype = "bf16",
    recompute: bool = True,
    chunked_loss_tokens: int | None = 512,
    reserved_bytes: int = DEFAULT_RESERVED_BYTES,
) -> MemoryEstimate:
    """Peak of a rank whose largest microbatch has `microbatch_tokens`, which may come anywhere in the minibatch.

    n is a layer's parameters, n0 the root's, P all, W = world_size. Bytes:

    - unsharded: root parameters 2 n0 throughout. Loss: a layer gathered ahead and two gradients of the head's weight
      (the sum and the chunk's). Layer backward: parameters 2n, one gather buffer, gradients 2n, reduction input 4n,
      head gradient. Root reduce: gradients 2 n0, reduction input 4 n0. A gather buffer is 2n in bf16 and 4n in fp32.
    - staging: the reduced shard (4n/W, 4 n0/W) before it is added to the gradient; with one-sided schedules one zero
      buffer of the largest unit's shard, which stands in for it.
    - `collective-deferred`: unsharded 2 P and local_gradients 4 P instead of gathers and resharding; sharded gradients
      appear only as the local ones are reduced away in the last microbatch, so never beside all of them.
    - `odc`: published_window, one copy of the shard in the gather's dtype (2 P/W in bf16); the accumulator is the
      sharded gradient. `odc-local-sum`: the same and local_gradients 4 P, which the other ranks pull from at the end.

    `recompute`: only the layers' inputs are saved. `chunked_loss_tokens=None`: the logits of all tokens exist at once.
    Shards are rounded up to whole bytes; FSDP's padding of each parameter to a multiple of W rows is left out.

    Raises `InputError` for unknown names or counts that make no sense.
    """
    _check(world_size, schedule, recipe, gather_dtype, microbatch_tokens, chunked_loss_tokens, reserved_bytes)
    state = RECIPES[recipe]
    gather_bytes = FP32_BYTES if gather_dtype == "fp32" else BF16_BYTES
    total, layer, root = model.parameters, model.layer_parameters, model.root_parameters
    head_weight = model.vocab * model.hidden
    deferred, one_sided = schedule == "collective-deferred", schedule in ("odc", "odc-local-sum")

    def shard(elements: int, bytes_each: int) -> int:
        return -(-elements * bytes_each // world_size)

    def moment(
        *, unsharded: int, reduced: int, sharded_gradients: bool, local: int, activations: int = 0, logits: int = 0
    ) -> dict[str, int]:
        return {
            "parameters": shard(total, state.parameters),
            "gradients": shard(total, state.gradients) if sharded_gradients else 0,
            "optimizer": shard(total, state.optimizer),
            "unsharded": unsharded,
            "staging": shard(max(layer, root) if one_sided else reduced, FP32_BYTES),
            "published_window": shard(total, gather_bytes) if one_sided else 0,
            "local_gradients": FP32_BYTES * local,
            "activations": activations,
            "logits": logits,
            "reserved": reserved_bytes,
        }

    tokens = microbatch_tokens
    saved = tokens * saved_bytes(model, recompute=recompute)
    logit_tokens = tokens if chunked_loss_tokens is None else min(chunked_loss_tokens, tokens)
    whole_sum = total if deferred or schedule == "odc-local-sum" else 0
    if deferred:
        resident = BF16_BYTES * total
        gathered_ahead = in_backward = 0
    else:
        resident = BF16_BYTES * root
        gathered_ahead = gather_bytes * layer
        in_backward = (BF16_BYTES + gather_bytes) * layer
    moments = {
        "loss": moment(
            unsharded=resident + gathered_ahead + 2 * BF16_BYTES * head_weight,
            reduced=0,
            sharded_gradients=not deferred,
            local=whole_sum,
            activations=saved + tokens * final_norm_bytes(model),
            logits=logit_tokens * model.vocab * LOGIT_BYTES,
        ),
        "layer backward": moment(
            unsharded=resident + in_backward + (BF16_BYTES + FP32_BYTES) * layer + BF16_BYTES * head_weight,
            reduced=layer,
            sharded_gradients=not deferred,
            local=whole_sum,
            activations=saved + tokens * transient_bytes(model, recompute=recompute),
        ),
        # Deferred, this is the last microbatch: the layers are resharded and their local gradients reduced away.
        "root reduce": moment(
            unsharded=(2 * BF16_BYTES + FP32_BYTES) * root,
            reduced=root,
            sharded_gradients=True,
            local=root if deferred else whole_sum,
        ),
    }
    if deferred:
        # In the others the root's gradients join the local sum while everything is still unsharded.
        moments["root sum"] = moment(
            unsharded=resident + BF16_BYTES * root, reduced=0, sharded_gradients=False, local=whole_sum
        )
    name, categories = max(moments.items(), key=lambda item: sum(item[1].values()))
    return MemoryEstimate(categories=categories, moment=name, recipe=recipe)


def largest_max_tokens(
    model: ModelSpec,
    *,
    memory_bytes: int,
    world_size: int,
    schedule: str,
    recipe: Recipe = "paper",
    gather_dtype: GatherDtype = "bf16",
    recompute: bool = True,
    chunked_loss_tokens: int | None = 512,
    reserved_bytes: int = DEFAULT_RESERVED_BYTES,
) -> int | None:
    """The most tokens a microbatch may have for `peak_memory` to be at most `memory_bytes`; None if not even 0 fit.

    Exact: the peak never falls with tokens, and a token takes more than a byte, so bisection over 0..memory_bytes finds
    it.
    """
    if memory_bytes < 1:
        raise InputError(f"memory_bytes: got {memory_bytes}, expected at least 1")

    def peak_bytes(tokens: int) -> int:
        return peak_memory(
            model,
            world_size=world_size,
            schedule=schedule,
            microbatch_tokens=tokens,
            recipe=recipe,
            gather_dtype=gather_dtype,
            recompute=recompute,
            chunked_loss_tokens=chunked_loss_tokens,
            reserved_bytes=reserved_bytes,
        ).total_bytes

    fits, too_many = -1, memory_bytes + 1
    while too_many - fits > 1:
        tokens = (fits + too_many) // 2
        if peak_bytes(tokens) <= memory_bytes:
            fits = tokens
        else:
            too_many = tokens
    return fits if fits >= 0 else None


def _check(
    world_size: int,
    schedule: str,
    recipe: str,
    gather_dtype: str,
    microbatch_tokens: int,
    chunked_loss_tokens: int | None,
    reserved_bytes: int,
) -> None:
    if world_size < 1:
        raise InputError(f"world_size: got {world_size}, expected at least 1")
    if schedule not in get_args(ScheduleName):
        raise unknown_name("schedule", schedule, get_args(ScheduleName))
    if recipe not in RECIPES:
        raise unknown_name("precision recipe", recipe, RECIPES)
    if gather_dtype not in get_args(GatherDtype):
        raise unknown_name("gather_dtype", gather_dtype, get_args(GatherDtype))
    if microbatch_tokens < 0:
        raise InputError(f"microbatch_tokens: got {microbatch_tokens}, expected at least 0")
    if chunked_loss_tokens is not None and chunked_loss_tokens < 1:
        raise InputError(f"chunked_loss_tokens: got {chunked_loss_tokens}, expected at least 1, or None for no chunks")
    if reserved_bytes < 0:
        raise InputError(f"reserved_bytes: got {reserved_bytes}, expected at least 0")
