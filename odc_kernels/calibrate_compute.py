"""Seconds of a model's units over packed microbatches: one decoder layer, the embedding, and the head with its loss.

The model has one layer, in bf16 as FSDP2's mixed precision computes, so that also a layer of a model too large for the
device is measured. The layer is called with the very arguments that the model calls it with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from odc_kernels.calibrate_shapes import Lengths, Shapes, flops
from odc_kernels.calibrate_shapes import name as shape_name
from odc_kernels.calibrate_timing import Effort, Item, Pace, Step, Timed, measure
from odc_kernels.lm import CausalLm, PackedBatch, build_lm, pack
from odc_kernels.recompute import recompute as run_again
from odc_sim.calibration import ComputeSample, ComputeUnit, Direction, Fit
from odc_sim.errors import InputError
from odc_sim.fits import Line, fit_line, spread

Part = tuple[ComputeUnit, Direction]

LAYER_STEPS: tuple[Part, ...] = (("layer", "forward"), ("layer", "backward_recompute"))
PLAIN_STEPS: tuple[Part, ...] = (("layer", "forward"), ("layer", "backward"))
ROOT_STEPS: tuple[Part, ...] = (
    ("embedding", "forward"),
    ("embedding", "backward"),
    ("head_loss", "forward"),
    # the loss always computes its chunks again
    ("head_loss", "backward_recompute"),
)
LONG_TOKENS = 4096
"""Shorter microbatches are ruled by the floor; two fits are compared from here on."""
LEAD_ELEMENTS = 24_000 * 1536
"""Tokens times width of the layer that gives the host its lead: 11 to 17 ms of an H200, whatever the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One microbatch of one unit in one direction."""

    part: Part
    lengths: Lengths
    held_out: bool
    timed: Timed


def measure_model(
    model: str,
    pace: Pace,
    effort: Effort,
    *,
    layer: Shapes,
    plain: Shapes,
    root: Shapes,
    say: Callable[[str], None],
) -> tuple[list[Found], list[str]]:
    """Every unit and direction of one model, and in words what was left out. Collective.

    `plain` is for layers that are not recomputed, which is not training's default.
    """
    say("building one layer")
    lm = build_lm(model, device=pace.device, num_layers=1, recompute=False, dtype=torch.bfloat16)
    groups: list[tuple[str, Shapes, tuple[Part, ...], Callable[[Lengths], list[Step]]]] = [
        ("layer", layer, LAYER_STEPS, partial(_layer_steps, lm, pace.device, recompute=True)),
        ("layer without recompute", plain, PLAIN_STEPS, partial(_layer_steps, lm, pace.device, recompute=False)),
        ("embedding and head", root, ROOT_STEPS, partial(_root_steps, lm, pace.device)),
    ]
    lead = _lead(lm, pace.device) if pace.device.type == "cuda" else None
    found: list[Found] = []
    left_out: list[str] = []
    for name, shapes, parts, make in groups:
        items = [
            Item(
                name=f"{name}, {shape_name(lengths)}",
                make=partial(make, lengths),
                work=flops(lm.spec, lengths) if parts is not ROOT_STEPS else sum(lengths),
            )
            for lengths in shapes.all
        ]
        with pace.leading_with(lead):
            timed, left = measure(items, pace, effort, how="mean", say=say)
        left_out += [f"{model} {reason}" for reason in left]
        for lengths, item in zip(shapes.all, items, strict=True):
            for part, step in zip(parts, timed.get(item.name, ()), strict=False):
                if parts is PLAIN_STEPS and part == ("layer", "forward"):
                    continue  # counted with recompute, as training's default has it
                found.append(Found(part=part, lengths=lengths, held_out=lengths in shapes.held_out, timed=step))
    return found, left_out


def samples_of(model: str, found: Sequence[Found]) -> list[ComputeSample]:
    """As calibration.json has them."""
    return [
        ComputeSample(
            model=model,
            unit=each.part[0],
            direction=each.part[1],
            lengths=each.lengths,
            tokens=sum(each.lengths),
            flagged=each.timed.flagged,
            heldout=each.held_out,
            **each.timed.percentiles,
        )
        for each in found
    ]


def fits_of(model: str, found: Sequence[Found]) -> tuple[list[Fit], list[str]]:
    """A fit for each unit and direction, from the steady microbatches that are not held out; and what is wrong.

    Where too few are steady, all are used, and that is a problem; where all are too few, there is no fit.
    """
    fits, problems = [], []
    for part in dict.fromkeys(each.part for each in found):
        mine = [each for each in found if each.part == part]
        try:
            fits.append(_fit(model, part, mine, steady_only=True))
        except InputError as error:
            try:
                fits.append(_fit(model, part, mine, steady_only=False))
                problems.append(f"{part[0]} {part[1]}: {error}; until then all are used")
            except InputError as none:
                problems.append(f"{part[0]} {part[1]}: {none}; until then it has no fit")
    return fits, problems


def _fit(model: str, part: Part, found: Sequence[Found], *, steady_only: bool) -> Fit:
    quadratic = part[0] == "layer"
    steady = [each for each in found if not (steady_only and each.timed.flagged)]
    fitted = [each for each in steady if not each.held_out]
    held_out = [each for each in found if each.held_out]
    # shorter ones are the host's floor's business
    held_out = [each for each in held_out if sum(each.lengths) >= LONG_TOKENS] or held_out
    checked = [each for each in held_out if not each.timed.flagged] or held_out
    shapes = [each.lengths for each in fitted]
    line = fit_line(shapes, [_median(each) for each in fitted], quadratic=quadratic)
    passes = [fit_line(shapes, [each.timed.passes_s[k] for each in fitted], quadratic=quadratic) for k in (0, 1)]
    long = [lengths for lengths in shapes if sum(lengths) >= LONG_TOKENS] or shapes
    tokens = [sum(lengths) for lengths in shapes]
    return Fit(
        model=model,
        unit=part[0],
        direction=part[1],
        c0_s=line.c0_s,
        c1_s_per_token=line.c1_s_per_token,
        c2_s_per_token2=line.c2_s_per_token2,
        floor_s=line.floor_s,
        valid_tokens=(min(tokens), max(tokens)),
        max_rel_error=_worst_error(line, fitted),
        heldout_max_rel_error=_worst_error(line, checked) if checked else None,
        repeat_rel_spread=spread(passes[0], passes[1], long),
    )


def _worst_error(line: Line, found: Sequence[Found]) -> float:
    errors = line.rel_errors([each.lengths for each in found], [_median(each) for each in found])
    return float(abs(errors).max())


def _median(each: Found) -> float:
    return float(each.timed.percentiles["p50_s"])


def _batch(lengths: Lengths, vocabulary: int, device: torch.device) -> PackedBatch:
    generator = torch.Generator().manual_seed(sum(lengths))
    samples = [torch.randint(0, vocabulary, (length,), generator=generator) for length in lengths]
    return pack(samples, 1.0 / len(samples)).to(device)


class _CalledError(Exception):
    """The layer was called; nothing more is needed."""


def layer_arguments(lm: CausalLm, batch: PackedBatch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the model calls its first layer with."""
    caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def catch(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        caught.append((args, kwargs))
        raise _CalledError

    handle = lm.layers[0].register_forward_pre_hook(catch, with_kwargs=True)
    try:
        with torch.no_grad():
            lm.hidden(batch)
    except _CalledError:
        pass
    finally:
        handle.remove()
    return caught[0]


def layer_steps(model: str, lengths: Lengths, device: torch.device) -> list[Step]:
    """[forward, backward with recomputation] of one layer of `model` on a microbatch."""
    lm = build_lm(model, device=device, num_layers=1, recompute=False, dtype=torch.bfloat16)
    return _layer_steps(lm, device, lengths, recompute=True)


def _layer_steps(lm: CausalLm, device: torch.device, lengths: Lengths, *, recompute: bool) -> list[Step]:
    """[forward, backward] of the layer."""
    layer = lm.layers[0]
    args, kwargs = layer_arguments(lm, _batch(lengths, lm.spec.vocab, device))
    if "hidden_states" in kwargs:
        args = (kwargs.pop("hidden_states"), *args)
    x = args[0].detach().requires_grad_()
    gradient = torch.randn_like(x)
    outputs: list[torch.Tensor] = []

    def call(*arguments: Any, **options: Any) -> torch.Tensor:
        return _first(layer(*arguments, **options))

    def forward() -> None:
        outputs.append(run_again(call, x, *args[1:], **kwargs) if recompute else call(x, *args[1:], **kwargs))

    def backward() -> None:
        outputs.pop().backward(gradient)
        _drop_gradients(layer, x)

    return [forward, backward]


def _lead(lm: CausalLm, device: torch.device) -> Step:
    """A layer's forward that keeps a GPU busy for much longer than the host takes to enqueue it."""
    layer = lm.layers[0]
    args, kwargs = layer_arguments(lm, _batch((LEAD_ELEMENTS // lm.spec.hidden,), lm.spec.vocab, device))

    @torch.no_grad()
    def lead() -> None:
        layer(*args, **kwargs)

    return lead


def _root_steps(lm: CausalLm, device: torch.device, lengths: Lengths) -> list[Step]:
    """[embedding forward, embedding backward, head and loss forward, head and loss backward]."""
    batch = _batch(lengths, lm.spec.vocab, device)
    norm = lm.model.get_decoder().norm
    with torch.no_grad():
        embedded = lm.embedding(batch.tokens)
    gradient = torch.randn_like(embedded)
    x = torch.randn_like(embedded).requires_grad_()
    outputs: list[torch.Tensor] = []

    def embed() -> None:
        outputs.append(lm.embedding(batch.tokens))

    def embed_backward() -> None:
        outputs.pop().backward(gradient)
        _drop_gradients(lm, x)

    def head() -> None:
        outputs.append(lm.loss(norm(x), batch))

    def head_backward() -> None:
        # Where the head is the embedding, the embedding's backward adds to this gradient, here the next one in turn.
        outputs.pop().backward()

    return [embed, embed_backward, head, head_backward]


def _first(output: Any) -> torch.Tensor:
    """A layer's hidden states, which some versions of transformers return in a tuple."""
    tensor: torch.Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def _drop_gradients(module: torch.nn.Module, x: torch.Tensor) -> None:
    """FSDP2 takes each gradient away when it reduces it, so none is ever added to."""
    x.grad = None
    for parameter in module.parameters():
        parameter.grad = None
