"""Bytes of activations a token takes in a Llama, Qwen or Mistral layer run by PyTorch in bf16, term by term.

Flash attention (no score matrix), RMSNorm as transformers writes it (computed in fp32, unfused), gated MLP (unfused).
Fused norms or MLPs save less. h = hidden, q = heads * head_dim, k = kv_heads * head_dim, f = ffn.

| saved by a layer for its backward | bytes a token |
|---|---|
| each of 2 norms: fp32 copy of its input 4h, normalised 2h, output (input of the products) 2h | 16h |
| query and key norms (Qwen3), where present: fp32 copy 4, normalised 2, of q and k | 6(q + k) |
| attention: rotated q, rotated k, v, output; fp32 log-sum-exp | 4q + 4k + 4 heads |
| MLP: gate 2f, its activation 2f, up 2f, product 2f | 8f |

While a layer's backward runs, most is alive at the MLP's product: the down projection has freed the product (-2f) and
left its gradient (+2f), the product's backward makes the gradients of both factors (+4f), and the residual branch holds
the gradient of the layer's output (+2h). Later, without the MLP's 12f, neither the norms' nor attention's backward
takes as much, as long as f is at least h.
"""

from odc_sim.models import ModelSpec

LOGIT_BYTES = 2 + 4 + 4 + 4
"""Per logit, in the backward of an unfused loss: bf16 logit, fp32 log-probability, and the fp32 gradients of both, as
torch's nll_loss and log_softmax each return a full tensor. A fused loss takes less."""


def _layer_saved_bytes(model: ModelSpec) -> int:
    query_key_norms = 6 * (model.query_width + model.kv_width) if model.qk_norm else 0
    attention = 4 * model.query_width + 4 * model.kv_width + 4 * model.heads
    return 16 * model.hidden + query_key_norms + attention + 8 * model.ffn


def saved_bytes(model: ModelSpec, *, recompute: bool) -> int:
    """Bytes a token that all layers together keep for backward: with `recompute`, each only its bf16 input."""
    return model.layers * (2 * model.hidden if recompute else _layer_saved_bytes(model))


def transient_bytes(model: ModelSpec, *, recompute: bool) -> int:
    """Bytes a token that one layer's backward takes beyond `saved_bytes`: with `recompute`, also all that it saves."""
    gradients = 4 * model.ffn + 2 * model.hidden
    return gradients + (_layer_saved_bytes(model) if recompute else 0)


def final_norm_bytes(model: ModelSpec) -> int:
    """Bytes a token around the loss, by the final norm.

    It saves 8h; the gradient of its output takes 2h, and as much again a chunk's share of it, which slicing pads.
    """
    return 12 * model.hidden
