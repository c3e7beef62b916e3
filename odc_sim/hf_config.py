"""Read a Hugging Face `config.json` into a `ModelSpec`: no download, no transformers, only fields that matter to costs.

Defaults are those of the configuration classes in transformers 4.57 (`LlamaConfig`, `Qwen2Config`, `Qwen3Config`,
`MistralConfig`), except that a width or count which decides parameters is never guessed: it must be in the file.

Ignored on purpose, as neither parameters nor FLOPs depend on them: rope scaling and theta, the activation, dtypes,
dropout, maximum positions. Sliding-window attention does change the cost of long samples, which is modelled as fully
causal: where a file switches it on it is refused rather than ignored.
"""

import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from odc_sim.errors import InputError
from odc_sim.header import read_json, show
from odc_sim.models import LARGEST, ModelSpec

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
QWEN3_HEAD_DIM = 128
"""`Qwen3Config`'s default, used there whatever hidden_size / num_attention_heads is."""
_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def read_hf_config(path: Path) -> ModelSpec:
    """The model described by `path`: a config.json, or a directory that holds one.

    Raises `InputError` naming the field for anything that is missing, malformed or not modelled.
    """
    file = path / "config.json" if path.is_dir() else path
    if not os.path.isfile(file):
        raise InputError(f"model directory {str(path)!r}: no config.json in it; give a Hugging Face model directory")
    config = read_json(file)
    if not isinstance(config, dict):
        raise InputError(f"model config {str(file)!r}: got a JSON {type(config).__name__}, expected an object")
    name = _folder_name(file) if file.name == "config.json" else file.stem
    return model_from_config(config, name=name, where=str(file))


def _folder_name(file: Path) -> str:
    """The model's name by the folder of its config.json; in the Hugging Face cache by the repository's.

    There folders are models--OWNER--NAME/snapshots/COMMIT, and the file is a link to elsewhere.
    """
    folder = Path(os.path.abspath(file)).parent
    repository = folder.parent.parent.name
    if folder.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.split("--")[-1]
    return folder.name


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelSpec:
    """`config` (the fields of a config.json) as a `ModelSpec` called `name`; `where` names the file in errors."""
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES:
        _refuse_type(config, model_type, where)
    _refuse_sliding_window(config, where)

    hidden = _positive(config, "hidden_size", "hidden", where)
    heads = _positive(config, "num_attention_heads", "heads", where)
    # Null means one key/value head a query head in every class; absent means that only for Llama (old files lack the
    # field).
    absent_is_heads = model_type == "llama" or "num_key_value_heads" in config
    kv_heads = _positive(config, "num_key_value_heads", "kv_heads", where, default=heads if absent_is_heads else None)
    if heads % kv_heads:
        raise InputError(
            f"model config {where!r}: num_attention_heads {heads} is not divisible by num_key_value_heads {kv_heads}"
        )
    # Llama and Qwen3 have one switch for the biases of q, k, v and o; Qwen2 always has q, k, v; Mistral never has any.
    attention_bias = model_type in ("llama", "qwen3") and _flag(config, "attention_bias", where)
    return ModelSpec(
        name=name,
        layers=_positive(config, "num_hidden_layers", "layers", where),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=_head_dim(config, str(model_type), hidden, heads, where),
        ffn=_positive(config, "intermediate_size", "ffn", where),
        vocab=_positive(config, "vocab_size", "vocab", where),
        tied_embeddings=_flag(config, "tie_word_embeddings", where),
        qkv_bias=model_type == "qwen2" or attention_bias,
        o_bias=attention_bias,
        mlp_bias=model_type == "llama" and _flag(config, "mlp_bias", where),
        qk_norm=model_type == "qwen3",
    )


def _refuse_type(config: Mapping[str, Any], model_type: object, where: str) -> None:
    known = ", ".join(MODEL_TYPES)
    if model_type is None:
        raise InputError(f"model config {where!r}: field 'model_type' is missing; expected one of {known}")
    experts = any(field in config for field in _EXPERT_FIELDS)
    if experts or "moe" in str(model_type) or model_type == "mixtral":
        raise InputError(
            f"model config {where!r}: model_type {model_type!r} is a mixture of experts, not modelled; known: {known}"
        )
    raise InputError(f"model config {where!r}: unknown model_type {show(model_type)}; known: {known}")


def _refuse_sliding_window(config: Mapping[str, Any], where: str) -> None:
    model_type = config["model_type"]
    if model_type == "mistral":
        active = config.get("sliding_window") is not None
    else:
        layer_types = config.get("layer_types")
        by_layer = isinstance(layer_types, list) and "sliding_attention" in layer_types
        active = model_type in ("qwen2", "qwen3") and (_flag(config, "use_sliding_window", where) or by_layer)
    if active:
        field = "sliding_window to null" if model_type == "mistral" else "use_sliding_window to false"
        raise InputError(
            f"model config {where!r}: sliding-window attention is on, but costs assume full causal attention; "
            f"set {field} in a copy to model it that way"
        )


def _head_dim(config: Mapping[str, Any], model_type: str, hidden: int, heads: int, where: str) -> int:
    if config.get("head_dim") is not None:
        return _positive(config, "head_dim", "head_dim", where)
    if model_type == "qwen3" and "head_dim" not in config:
        return QWEN3_HEAD_DIM
    if hidden % heads:
        raise InputError(
            f"model config {where!r}: hidden_size {hidden} is not divisible by num_attention_heads {heads}; "
            "give head_dim if that is meant"
        )
    return hidden // heads


def _positive(config: Mapping[str, Any], field: str, ours: str, where: str, default: int | None = None) -> int:
    """The whole number in `field`, which is `ours` of a `ModelSpec`."""
    value = config.get(field)
    if value is None:
        if default is None:
            raise InputError(
                f"model config {where!r}: field {field!r} is missing; expected a whole number of at least 1"
            )
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(
            f"model config {where!r}: field {field!r} is {show(value)}, expected a whole number of at least 1"
        )
    if value > LARGEST[ours]:
        raise InputError(
            f"model config {where!r}: field {field!r} is {show(value)}, expected at most {LARGEST[ours]:,}"
        )
    return value


def _flag(config: Mapping[str, Any], field: str, where: str) -> bool:
    value = config.get(field, False)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise InputError(f"model config {where!r}: field {field!r} is {show(value)}, expected true or false")
    return value
