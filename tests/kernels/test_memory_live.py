"""The memory estimate is what is alive in the real step: fully_shard, transformers' layers, recomputation, the loss."""

import json
from typing import get_args

import pytest

pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

from kernels.live_memory import peaks

from odc_sim.memory import peak_memory
from odc_sim.memory_moments import Place
from odc_sim.models import load_model

SHAPE = {
    "model_type": "qwen2",
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "max_position_embeddings": 131_072,
}
USUAL = {"world_size": 2, "recompute": True, "chunked_loss_tokens": 512, "repeated_keys": True}
QWEN3 = {"model_type": "qwen3", "tie_word_embeddings": True}
LARGE_VOCABULARY = {"vocab_size": 200_000}


@pytest.mark.parametrize(
    ("schedule", "tokens", "shape", "options"),
    [
        ("collective", 30_000, {}, {}),
        ("odc", 30_000, {}, {}),
        ("collective-deferred", 30_000, {}, {}),
        ("odc-local-sum", 30_000, {}, {}),
        ("collective", 3_000, {}, {"repeated_keys": False}),
        ("odc", 3_000, {}, {"world_size": 8}),
        ("collective-deferred", 3_000, {}, {}),
        ("collective", 100, LARGE_VOCABULARY, {}),
        ("odc", 100, LARGE_VOCABULARY, {}),
        ("collective", 5_000, QWEN3, {"recompute": False, "repeated_keys": False}),
        ("odc", 5_000, {}, {"chunked_loss_tokens": 0}),
        ("collective", 30_000, {}, {"world_size": 1}),
        ("collective-deferred", 30_000, {}, {"world_size": 1}),
    ],
)
def test_the_estimate_is_what_is_alive(tmp_path, schedule, tokens, shape, options):
    (tmp_path / "config.json").write_text(json.dumps(SHAPE | shape), encoding="utf-8")
    options = USUAL | options
    state_alive, found = peaks(str(tmp_path), schedule, [[tokens], [tokens] * 3], **options)
    model = load_model(str(tmp_path))
    for place, alive in zip(get_args(Place), found, strict=True):  # only; first, middle, last
        estimate = peak_memory(
            model,
            schedule=schedule,
            microbatch_tokens=tokens,
            place=place,
            reserved_bytes=0,
            **(options | {"chunked_loss_tokens": options["chunked_loss_tokens"] or None}),
        )
        state = estimate.categories["parameters"] + estimate.categories["optimizer"]
        assert state == pytest.approx(state_alive, rel=1e-4)
        windows = estimate.categories["published_window"]
        if schedule.startswith("odc"):
            windows += estimate.categories["gradients"]
        beside_state = estimate.total_bytes - windows - state
        assert beside_state == pytest.approx(alive - state_alive, rel=0.002), f"{place}: {estimate.moment}"
