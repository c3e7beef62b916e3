"""The language model that `odc calibrate` measures and `odc train` trains: transformers' own, over packed samples.

    lm = build_lm("qwen2.5-1.5b", device=device)
    shard(lm, mesh)
    loss = lm(pack(samples, weight_of_sample).to(device))

Its FSDP units are the decoder layers (1..L) and the root (0: embedding, final norm, head). The loss is computed in
chunks of tokens, each recomputed in the backward, so that logits never exist for all tokens at once.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy

from odc_kernels import varlen
from odc_kernels.recompute import recompute as run_again
from odc_kernels.recompute import recompute_forward
from odc_sim.errors import InputError, pip_install
from odc_sim.models import ModelSpec, load_model


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """Samples one after another, T tokens in all."""

    tokens: torch.Tensor
    """int64 [1, T]"""
    positions: torch.Tensor
    """int64 [1, T], from 0 in each sample."""
    starts: torch.Tensor
    """int32 [samples + 1]: where each sample begins, and T."""
    longest: int
    """Tokens of the longest sample."""
    weights: torch.Tensor
    """fp32 [T]: what guessing the token after this one counts in the loss; 0 for the last of a sample."""

    def to(self, device: torch.device) -> "PackedBatch":
        """The same on another device."""
        return PackedBatch(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            starts=self.starts.to(device),
            longest=self.longest,
            weights=self.weights.to(device),
        )

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.tokens.numel()


def pack(samples: Sequence[torch.Tensor], weight_of_sample: float) -> PackedBatch:
    """One microbatch of samples, int64 [s] each.

    A sample's loss is the mean over its s - 1 guesses, and counts `weight_of_sample`, so gradients do not depend on
    what it was packed with. A sample of one token has nothing to guess and counts nothing.

    Raises:
        InputError: no samples, or one without tokens.
    """
    lengths = [sample.numel() for sample in samples]
    if not lengths or min(lengths) < 1:
        raise InputError(f"a microbatch of samples of {lengths} tokens, expected at least one sample of at least one")
    weights = []
    for length in lengths:
        weight = torch.full((length,), weight_of_sample / max(length - 1, 1), dtype=torch.float32)
        weight[-1] = 0.0
        weights.append(weight)
    starts = torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)
    return PackedBatch(
        tokens=torch.cat(list(samples))[None],
        positions=torch.cat([torch.arange(length) for length in lengths])[None],
        starts=starts.to(torch.int32),
        longest=max(lengths),
        weights=torch.cat(weights),
    )


class CausalLm(nn.Module):
    """A causal language model of transformers with a chunked loss over packed samples."""

    def __init__(self, model: nn.Module, spec: ModelSpec, *, chunked_loss_tokens: int) -> None:
        super().__init__()
        self.model = model
        self.spec = spec
        self._chunked_loss_tokens = chunked_loss_tokens

    @property
    def layers(self) -> list[nn.Module]:
        """The decoder layers, FSDP units 1..L."""
        return list(self.model.get_decoder().layers)

    @property
    def embedding(self) -> nn.Module:
        """tokens [1, T] -> [1, T, hidden]."""
        found: nn.Module = self.model.get_input_embeddings()
        return found

    def hidden(self, batch: PackedBatch) -> torch.Tensor:
        """The last layer's output after the final norm [1, T, hidden]."""
        output: torch.Tensor = self.model.get_decoder()(
            input_ids=batch.tokens,
            position_ids=batch.positions,
            use_cache=False,
            starts=batch.starts,
            longest=batch.longest,
        ).last_hidden_state
        return output

    def loss(self, hidden: torch.Tensor, batch: PackedBatch) -> torch.Tensor:
        """The weighted sum of the losses, fp32 [], of `hidden` [1, T, hidden]."""
        # The last token of a sample guesses the first one of the next: its weight is 0.
        labels = batch.tokens[0].roll(-1)
        size = self._chunked_loss_tokens or hidden.shape[1]
        total = hidden.new_zeros((), dtype=torch.float32)
        for h, label, weight in zip(hidden[0].split(size), labels.split(size), batch.weights.split(size), strict=True):
            total = total + run_again(self._chunk_loss, h, label, weight)
        return total

    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """The weighted sum of the losses of all guesses, fp32 []."""
        return self.loss(self.hidden(batch), batch)

    def _chunk_loss(self, hidden: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        logits = self.model.get_output_embeddings()(hidden).float()
        return (cross_entropy(logits, labels, reduction="none") * weights).sum()


def build_lm(
    model: str,
    *,
    device: torch.device,
    seed: int = 0,
    recompute: bool = True,
    chunked_loss_tokens: int = 512,
    num_layers: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> CausalLm:
    """A model on `device`, whole.

    Args:
        model: a built-in name of `odc_sim.models` or a config.json, with random weights; or a directory of transformers
            with weights, which are loaded.
        device: where it is made; random weights are the device's own, so they differ between kinds of devices.
        seed: of random weights.
        recompute: layers keep only their inputs, and are computed again in the backward.
        chunked_loss_tokens: tokens whose logits exist at once; 0: all.
        num_layers: so many layers in place of the model's, as for timing one.
        dtype: of the parameters.

    Raises:
        InputError: transformers is not installed, or the model is not known or not supported.
    """
    try:
        import transformers
    except ImportError:
        raise InputError(f"transformers is not installed: {pip_install('train')}") from None
    spec = load_model(model)
    folder = _weights_folder(model)
    varlen.register()
    config = transformers.AutoConfig.from_pretrained(folder) if folder else _config(model, spec)
    if num_layers is not None:
        config.num_hidden_layers = num_layers
        if getattr(config, "layer_types", None):
            config.layer_types = (config.layer_types * num_layers)[:num_layers]
    config.attention_dropout = 0.0
    made: Any
    if folder:
        made = transformers.AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=varlen.NAME
        ).to(device)
    else:
        torch.manual_seed(seed)
        with device:
            made = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=varlen.NAME)
    lm = CausalLm(made.train(), spec, chunked_loss_tokens=chunked_loss_tokens)
    if recompute:
        for layer in lm.layers:
            recompute_forward(layer)
    return lm


def shard(
    lm: nn.Module,
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype | None = torch.bfloat16,
    reduce_dtype: torch.dtype | None = torch.float32,
) -> None:
    """`fully_shard` each of `lm.layers`, then the root."""
    # Inputs are not cast: the weights of a batch are its only floating-point input, and bf16 would change them.
    policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=False)
    for layer in lm.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(lm, mesh=mesh, mp_policy=policy)


def _weights_folder(model: str) -> Path | None:
    """The directory, if it has weights in it.

    Raises:
        InputError: it has them as pickles only, which are not read; random ones in their place would go unnoticed.
    """
    path = Path(model)
    if not path.is_dir():
        return None
    if any(path.glob("*.safetensors")):
        return path
    pickled = sorted(file.name for kind in ("*.bin", "*.pt", "*.pth") for file in path.glob(kind))
    if pickled:
        raise InputError(
            f"{model}: has its weights in {pickled[0]}, expected .safetensors: save it anew with transformers "
            "(save_pretrained), or name its config.json for random weights"
        )
    return None


def _config(model: str, spec: ModelSpec) -> Any:
    """transformers' configuration of a config.json, or of a built-in model, all of which are Llama, Qwen2 or Qwen3."""
    import transformers

    path = Path(model)
    if path.exists():
        file = path / "config.json" if path.is_dir() else path
        fields = json.loads(file.read_text(encoding="utf-8"))
        return transformers.AutoConfig.for_model(**fields)
    kind = "qwen2" if spec.qkv_bias else "qwen3" if spec.qk_norm else "llama"
    return transformers.AutoConfig.for_model(
        kind,
        vocab_size=spec.vocab,
        hidden_size=spec.hidden,
        intermediate_size=spec.ffn,
        num_hidden_layers=spec.layers,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=131_072,
        tie_word_embeddings=spec.tied_embeddings,
    )
