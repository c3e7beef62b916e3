"""Bytes of activations a token takes in a Llama, Qwen or Mistral layer run by PyTorch in bf16, term by term.

Flash attention (no score matrix), RMSNorm as transformers writes it (computed in fp32, unfused), gated MLP (unfused).
Fused norms or MLPs save less. h = hidden, q = heads * head_dim, k = kv_heads * head_dim, f = ffn.

| saved by a layer for its backward | bytes a token |
|---|---|
| each of 2 norms: fp32 copy of its input 4h, normalised 2h, output (input of the products) 2h | 16h |
| query and key norms (Qwen3), where present: fp32 copy 4, normalised 2, of q and k | 6(q + k) |
| attention: rotated q, rotated k, v, output; fp32 log-sum-exp | 4q + 4k + 4 heads |
| the same where keys and values are repeated for every query head | 8q + 4 heads |
| MLP: gate 2f, its activation 2f, up 2f, product 2f | 8f |

While a layer's backward runs, most is alive at the MLP's product: the down projection has freed the product (-2f) and
left its gradient (+2f), the product's backward makes the gradients of both factors (+4f), and the residual branch holds
the gradient of the layer's output (+2h). Later, without the MLP's 12f, neither the norms' nor attention's backward
takes as much, as long as f is at least h and q at most f.

Checked on the live tensors of the real step: tests/kernels/test_memory_live.py.
"""

from odc_sim.models import ModelSpec

LOSS_LOGIT_BYTES = 4 + 4 + 4
"""Per logit, in the backward of an unfused loss: fp32 log-probability, and the fp32 gradients of it and of the logit,
as torch's nll_loss and log_softmax each return a full tensor. A fused loss takes less."""
HEAD_GRADIENT_LOGIT_BYTES = 2
"""Per logit, when the head's gradient is computed: the logit's gradient in bf16."""


def _layer_saved_bytes(model: ModelSpec, repeated_keys: bool) -> int:
    query_key_norms = 6 * (model.query_width + model.kv_width) if model.qk_norm else 0
    keys = model.query_width if repeated_keys else model.kv_width
    attention = 4 * model.query_width + 4 * keys + 4 * model.heads
    return 16 * model.hidden + query_key_norms + attention + 8 * model.ffn


def saved_bytes(model: ModelSpec, *, recompute: bool, repeated_keys: bool = False) -> int:
    """Bytes a token that a layer keeps for backward: with `recompute` only its bf16 input."""
    return 2 * model.hidden if recompute else _layer_saved_bytes(model, repeated_keys)


def transient_bytes(model: ModelSpec, *, recompute: bool, repeated_keys: bool = False) -> int:
    """Bytes a token that a layer's backward takes beyond `saved_bytes`.

    With `recompute`, also all that it saves, and its output 2h, which the second run returns.
    """
    gradients = 4 * model.ffn + 2 * model.hidden
    return gradients + (_layer_saved_bytes(model, repeated_keys) + 2 * model.hidden if recompute else 0)


def final_norm_bytes(model: ModelSpec) -> int:
    """Bytes a token that the final norm saves: fp32 copy of its input 4h, normalised 2h, output 2h."""
    return 8 * model.hidden


def input_bytes(model: ModelSpec) -> int:
    """Bytes a token that every layer shares: cos and sin of its position in bf16; token, position and label in int64,
    and its weight in the loss in fp32."""
    return 4 * model.head_dim + 28
