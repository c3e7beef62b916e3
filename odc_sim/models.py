"""Model shapes, exact parameter counts and model FLOPs of dense decoder-only transformers (Llama, Qwen2/3, Mistral).

The unit is what FSDP gathers at once: one decoder layer, or the root (embedding, final norm, head).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from odc_sim.errors import InputError, unknown_name
from odc_sim.header import show, show_path

LARGEST: Mapping[str, int] = MappingProxyType(
    {
        "layers": 10_000,
        "hidden": 1_000_000,
        "heads": 10_000,
        "kv_heads": 10_000,
        "head_dim": 10_000,
        "ffn": 10_000_000,
        "vocab": 100_000_000,
    }
)
"""Of each field: well beyond any model, and small enough that no count overflows."""
LARGEST_PARAMETERS = 10**15


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSpec:
    """The shape of one dense decoder-only model. All parameter counts are exact and in elements."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    """Width of the gated MLP: gate and up are [ffn, hidden], down is [hidden, ffn]."""
    vocab: int
    tied_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    """An RMSNorm of width head_dim on queries and one on keys (Qwen3)."""

    def __post_init__(self) -> None:
        for field, most in LARGEST.items():
            value = getattr(self, field)
            if value < 1:
                raise InputError(f"model {self.name!r}: {field} is {show(value)}, expected at least 1")
            if value > most:
                raise InputError(f"model {self.name!r}: {field} is {show(value)}, expected at most {most:,}")
        if self.heads % self.kv_heads:
            raise InputError(
                f"model {self.name!r}: {self.heads} heads are not divisible by {self.kv_heads} key/value heads"
            )
        if self.parameters > LARGEST_PARAMETERS:
            raise InputError(
                f"model {self.name!r} has {self.parameters:,} parameters, expected at most {LARGEST_PARAMETERS:,}"
            )

    @property
    def query_width(self) -> int:
        """heads * head_dim: the width of all queries, and of the attention output, of one token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """kv_heads * head_dim: the width of all keys (or all values) of one token."""
        return self.kv_heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """One decoder layer: q, k, v, o, gate, up, down, two RMSNorms, and the biases and norms the model has."""
        weights = 2 * self.hidden * (self.query_width + self.kv_width) + 3 * self.hidden * self.ffn
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        biases = (
            (self.query_width + 2 * self.kv_width if self.qkv_bias else 0)
            + (self.hidden if self.o_bias else 0)
            + (2 * self.ffn + self.hidden if self.mlp_bias else 0)
        )
        return weights + norms + biases

    @property
    def embedding_parameters(self) -> int:
        """The embedding table [vocab, hidden]."""
        return self.vocab * self.hidden

    @property
    def head_parameters(self) -> int:
        """The head's own weight [vocab, hidden]; 0 when it is the embedding table."""
        return 0 if self.tied_embeddings else self.vocab * self.hidden

    @property
    def root_parameters(self) -> int:
        """The FSDP root unit: embedding, final norm and head."""
        return self.embedding_parameters + self.hidden + self.head_parameters

    @property
    def parameters(self) -> int:
        """Every parameter, each once."""
        return self.layers * self.layer_parameters + self.root_parameters

    @property
    def matmul_parameters(self) -> int:
        """Layers plus head weight (also when tied): what a token is multiplied with, so the count behind all FLOPs."""
        return self.layers * self.layer_parameters + self.vocab * self.hidden

    def same_shape(self, other: "ModelSpec") -> bool:
        """Whether both are the same model but for the name."""
        return replace(self, name=other.name) == other


def short_count(number: float) -> str:
    """Three digits and K, M or B: 7.62 B."""
    for letter, size in (("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if number >= 0.9995 * size:
            value = number / size
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {letter}"
    return f"{number:.0f}"


def model_flops(model: ModelSpec, lengths: npt.ArrayLike) -> float:
    """FLOPs one forward and backward needs for samples of these `lengths` [n] (tokens), summed; recompute not counted.

    6 FLOPs a token and parameter (embedding left out, head kept) plus causal attention, 6 * layers * heads * head_dim *
    s^2 a sample: PaLM (arXiv 2204.02311) appendix B, which has 12 * layers * heads * head_dim * s a token, not halved.
    """
    tokens = np.asarray(lengths, dtype=np.float64)
    attention = 6.0 * model.layers * model.query_width
    return float(6.0 * model.matmul_parameters * tokens.sum() + attention * np.square(tokens).sum())


def _qwen(name: str, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int) -> ModelSpec:
    """A model of deepseek-ai/DeepSeek-R1-Distill-Qwen-*, from its config.json; embeddings are untied in all of them."""
    return ModelSpec(
        name=name,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        ffn=ffn,
        vocab=vocab,
        qkv_bias=True,
    )


def _llama(name: str, layers: int, hidden: int, heads: int, ffn: int) -> ModelSpec:
    """LLaMA 1 (arXiv 2302.13971, table 2), with the vocabulary and MLP widths of its released checkpoints."""
    return ModelSpec(
        name=name, layers=layers, hidden=hidden, heads=heads, kv_heads=heads, head_dim=128, ffn=ffn, vocab=32_000
    )


BUILT_IN: tuple[ModelSpec, ...] = (
    # The paper's models (arXiv 2601.19362, section 5). Benchmarks in its code repository use layers of 46,799,360,
    # 233,061,376, 275,273,728 and 487,610,368 elements: each exactly one vector of `hidden` more than a layer here, as
    # if o_proj had a bias, which it has not. The published totals, such as 1,777,088,000, come out only without that
    # vector.
    _qwen("qwen2.5-1.5b", 28, 1536, 12, 2, 8960, 151_936),
    _qwen("qwen2.5-7b", 28, 3584, 28, 4, 18_944, 152_064),
    _qwen("qwen2.5-14b", 48, 5120, 40, 8, 13_824, 152_064),
    _qwen("qwen2.5-32b", 64, 5120, 40, 8, 27_648, 152_064),
    _llama("llama-7b", 32, 4096, 32, 11_008),
    _llama("llama-65b", 80, 8192, 64, 22_016),
    # For tests and demonstrations on a CPU: a Qwen2 in everything but size.
    ModelSpec(name="tiny", layers=4, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=256, qkv_bias=True),
)


SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "qwen": "config.json of deepseek-ai/DeepSeek-R1-Distill-Qwen, the paper's models: embeddings are untied in all "
        "of them (Qwen's own of 1.5B ties them, and has 1.54 B parameters)",
        "llama": "LLaMA 1, arXiv 2302.13971, table 2, with the vocabulary and MLP widths of its released checkpoints",
        "tiny": "ours, for tests and demonstrations on a CPU: a Qwen2 in everything but size",
    }
)
"""Of built-in models, by what their names begin with."""


def source_of(name: str, path: str) -> str:
    """Where the shape of the model that is called so comes from; `path`: what it was asked for by."""
    if name not in builtin_models() or Path(path).exists():
        return path
    return next(text for start, text in SOURCES.items() if name.startswith(start))


def builtin_models() -> list[str]:
    """Names of the built-in models."""
    return [model.name for model in BUILT_IN]


def load_model(name_or_path: str) -> ModelSpec:
    """A built-in model by name, or the model described by a Hugging Face config.json (the file, or its directory).

    Raises `InputError` for an unknown name, a missing file, or a configuration that is not understood.
    """
    from odc_sim.hf_config import read_hf_config

    for model in BUILT_IN:
        if model.name == name_or_path:
            return model
    path = Path(name_or_path)
    known = {model.name: model for model in BUILT_IN}.get(name_or_path.lower().rpartition("/")[2])
    if known is not None and not path.exists():  # Qwen/Qwen2.5-7B, as Hugging Face has it
        return known
    try:
        exists = path.exists()
    except OSError as error:
        raise InputError(
            f"model {show_path(path)}: {error.strerror}; expected a config.json, its directory or a built-in name"
        ) from None
    if exists:
        return read_hf_config(path)
    if path.suffix == ".json":
        raise InputError(
            f"model config {name_or_path!r}: no such file; expected a config.json, its directory or a built-in name"
        )
    raise unknown_name("model", name_or_path, builtin_models())
