"""Attention over packed samples: each token attends to its own sample's tokens up to itself.

Registered with transformers as the attention implementation `odc_varlen`. On GPUs it is torch's variable-length flash
attention, on CPUs one causal attention a sample.
"""

import inspect
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention

from odc_sim.errors import InputError

NAME = "odc_varlen"


def register() -> None:
    """Make `attn_implementation="odc_varlen"` known to transformers. Doing so again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, hf_attention)


def repeats_keys() -> bool:
    """Whether keys and values are copied for every query head on a GPU: torch's attention has no grouped ones there."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" not in inspect.signature(varlen_attn).parameters


def hf_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    starts: torch.Tensor,
    longest: int,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """As transformers calls it: query [1, heads, T, head_dim], key and value [1, kv_heads, T, head_dim].

    `starts` and `longest` come with the call of the model. Returns [1, T, heads, head_dim].

    Raises:
        InputError: the model wants a sliding window or dropout, which this does not have.
    """
    if kwargs.get("sliding_window") is not None:
        raise InputError("attention: the model has a sliding window, expected causal attention over whole samples")
    if kwargs.get("dropout"):
        raise InputError(f"attention: got dropout {kwargs['dropout']}, expected 0")
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    return packed_attention(q, k, v, starts, longest, scaling)[None], None


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    scale: float | None = None,
) -> torch.Tensor:
    """Causal attention within each sample.

    Args:
        query: [T, heads, head_dim].
        key: [T, kv_heads, head_dim], where kv_heads divides heads.
        value: as key.
        starts: int32 [samples + 1], where each sample begins, and T.
        longest: tokens of the longest sample.
        scale: of the scores; None: 1 / sqrt(head_dim).

    Returns:
        [T, heads, head_dim].
    """
    if query.device.type == "cuda":  # pragma: cuda-only
        return _flash(query, key, value, starts, longest, scale)
    parts = []
    edges = starts.tolist()
    for begin, end in pairwise(edges):
        q, k, v = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        out = scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, longest: int, scale: float | None
) -> torch.Tensor:  # pragma: cuda-only
    from torch.nn.attention.varlen import varlen_attn

    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"scale": scale}
    if "window_size" in known:
        options["window_size"] = (-1, 0)
    else:
        options["is_causal"] = True
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        if "enable_gqa" in known:
            options["enable_gqa"] = True
        else:  # older: every query head wants a key head of its own
            key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
    result: torch.Tensor = varlen_attn(query, key, value, starts, starts, longest, longest, **options)
    return result
