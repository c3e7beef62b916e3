import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from odc_sim.errors import InputError
from odc_sim.models import ModelSpec, builtin_models, load_model, model_flops, short_count

LLAMA3_8B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "rope_scaling": {"factor": 8.0},
}
QWEN3_06B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "attention_bias": False,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
}
MISTRAL_7B = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 32000,
    "sliding_window": None,
}
QWEN2_1_5B = {
    "model_type": "qwen2",
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "intermediate_size": 8960,
    "vocab_size": 151936,
    "sliding_window": 4096,
    "use_sliding_window": False,
}


def write_config(folder: Path, config: Any) -> str:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("name", "layer", "total"),
    [
        # Totals as published with the checkpoints; layers are (total - root) / layers.
        ("qwen2.5-1.5b", 46_797_824, 1_777_088_000),
        ("qwen2.5-7b", 233_057_792, 7_615_616_512),
        ("qwen2.5-14b", 275_268_608, 14_770_033_664),
        ("qwen2.5-32b", 487_605_248, 32_763_876_352),
        ("llama-7b", 202_383_360, 6_738_415_616),
        ("llama-65b", 809_517_056, 65_285_660_672),
    ],
)
def test_parameter_counts_are_exact(name: str, layer: int, total: int) -> None:
    model = load_model(name)
    assert model.layer_parameters == layer
    assert model.parameters == total
    assert model.layers * model.layer_parameters + model.root_parameters == total


@pytest.mark.parametrize(
    ("name", "quoted"),
    [
        ("qwen2.5-1.5b", 46_799_360),
        ("qwen2.5-7b", 233_061_376),
        ("qwen2.5-14b", 275_273_728),
        ("qwen2.5-32b", 487_610_368),
    ],
)
def test_layer_sizes_in_the_papers_benchmarks_hold_one_vector_too_many(name: str, quoted: int) -> None:
    model = load_model(name)
    assert quoted - model.layer_parameters == model.hidden


def test_tiny_by_hand() -> None:
    tiny = load_model("tiny")
    q_k_v_o = 64 * 64 + 64 + 2 * (64 * 32 + 32) + 64 * 64
    mlp = 3 * 64 * 128
    assert tiny.layer_parameters == q_k_v_o + mlp + 2 * 64 == 37_120
    assert tiny.root_parameters == 256 * 64 + 64 + 256 * 64 == 32_832
    assert tiny.parameters == 4 * 37_120 + 32_832
    assert tiny.matmul_parameters == 4 * 37_120 + 256 * 64
    # 6 FLOPs a parameter and token; attention 6 * layers * (heads * head_dim) * s^2
    assert model_flops(tiny, [3, 5]) == 6 * tiny.matmul_parameters * 8 + 6 * 4 * 64 * (9 + 25)


def test_model_flops_do_not_overflow() -> None:
    big = model_flops(load_model("llama-65b"), np.full(10_000, 1_000_000, dtype=np.int32))
    assert big == pytest.approx(1e4 * (6 * 65e9 * 1e6 + 6 * 80 * 8192 * 1e12), rel=1e-2)


@pytest.mark.parametrize(
    ("config", "total"),
    [(LLAMA3_8B, 8_030_261_248), (QWEN3_06B, 596_049_920), (MISTRAL_7B, 7_241_732_096), (QWEN2_1_5B, 1_777_088_000)],
)
def test_hf_configs_give_published_totals(tmp_path: Path, config: dict[str, Any], total: int) -> None:
    folder = write_config(tmp_path / "some-model", config)
    by_folder, by_file = load_model(folder), load_model(f"{folder}/config.json")
    assert by_folder == by_file
    assert by_folder.name == "some-model"
    assert by_folder.parameters == total


def test_a_config_in_the_hugging_face_cache_goes_by_its_repository(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen2.5-1.5B" / "snapshots" / "8faed761d45a263340a0528343f099c05c9a4323"
    blob = tmp_path / "models--Qwen--Qwen2.5-1.5B" / "blobs" / "0123abc"
    for folder in (snapshot, blob.parent):
        folder.mkdir(parents=True)
    blob.write_text(json.dumps(QWEN2_1_5B))
    (snapshot / "config.json").symlink_to(blob)
    assert load_model(str(snapshot)).name == load_model(f"{snapshot}/config.json").name == "Qwen2.5-1.5B"


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (12, "12"),
        (32_832, "32.8 K"),
        (999_600, "1.00 M"),
        (99_960_000, "100 M"),
        (233_057_792, "233 M"),
        (7_615_616_512, "7.62 B"),
    ],
)
def test_counts_have_three_digits(number: int, text: str) -> None:
    assert short_count(number) == text


def test_a_config_of_a_builtin_has_its_shape_but_its_own_name(tmp_path: Path) -> None:
    model = load_model(write_config(tmp_path / "mine", QWEN2_1_5B))
    assert model.same_shape(load_model("qwen2.5-1.5b"))
    assert model != load_model("qwen2.5-1.5b")
    assert not model.same_shape(load_model("qwen2.5-7b"))


def test_tied_head_counts_once_but_is_multiplied_with(tmp_path: Path) -> None:
    tied = load_model(write_config(tmp_path / "tied", QWEN3_06B))
    untied = load_model(write_config(tmp_path / "untied", QWEN3_06B | {"tie_word_embeddings": False}))
    assert tied.head_parameters == 0
    assert untied.parameters - tied.parameters == 151936 * 1024
    assert tied.matmul_parameters == untied.matmul_parameters


def test_defaults_of_absent_fields(tmp_path: Path) -> None:
    old_llama = {k: v for k, v in LLAMA3_8B.items() if k != "num_key_value_heads"}
    assert load_model(write_config(tmp_path / "a", old_llama)).kv_heads == 32
    null_kv = load_model(write_config(tmp_path / "b", MISTRAL_7B | {"num_key_value_heads": None}))
    assert null_kv.kv_heads == 32
    no_head_dim = {k: v for k, v in QWEN3_06B.items() if k != "head_dim"}
    assert load_model(write_config(tmp_path / "c", no_head_dim)).head_dim == 128
    assert load_model(write_config(tmp_path / "d", LLAMA3_8B)).head_dim == 128


def test_bias_switches(tmp_path: Path) -> None:
    plain = load_model(write_config(tmp_path / "plain", LLAMA3_8B))
    biased = load_model(write_config(tmp_path / "biased", LLAMA3_8B | {"attention_bias": True, "mlp_bias": True}))
    attention, mlp = 4096 + 2 * 1024 + 4096, 2 * 14336 + 4096
    assert biased.layer_parameters - plain.layer_parameters == attention + mlp
    qwen2 = load_model(write_config(tmp_path / "qwen2", QWEN2_1_5B | {"attention_bias": False}))
    assert qwen2.qkv_bias
    assert not qwen2.o_bias


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "qwen2_moe"}, "model_type 'qwen2_moe' is a mixture of experts, not modelled; known: llama, "),
        ({"model_type": "mixtral"}, "model_type 'mixtral' is a mixture of experts"),
        ({"model_type": "gpt2"}, "unknown model_type 'gpt2'; known: llama, mistral, qwen2, qwen3"),
        ({"hidden_size": 1}, "field 'model_type' is missing; expected one of llama, mistral, qwen2, qwen3"),
        ({"model_type": "llama"}, "field 'hidden_size' is missing; expected a whole number of at least 1"),
        (LLAMA3_8B | {"vocab_size": 3.5}, "field 'vocab_size' is 3.5, expected a whole number of at least 1"),
        (LLAMA3_8B | {"vocab_size": True}, "field 'vocab_size' is True, expected a whole number"),
        (LLAMA3_8B | {"num_hidden_layers": 0}, "field 'num_hidden_layers' is 0, expected a whole number of at least 1"),
        (LLAMA3_8B | {"num_key_value_heads": 5}, "num_attention_heads 32 is not divisible by num_key_value_heads 5"),
        (
            LLAMA3_8B | {"num_attention_heads": 24},
            "hidden_size 4096 is not divisible by num_attention_heads 24; give head",
        ),
        (LLAMA3_8B | {"tie_word_embeddings": "no"}, "field 'tie_word_embeddings' is 'no', expected true or false"),
        (MISTRAL_7B | {"sliding_window": 4096}, "sliding-window attention is on, .* set sliding_window to null"),
        (
            QWEN2_1_5B | {"use_sliding_window": True},
            "sliding-window attention is on, .* set use_sliding_window to false",
        ),
        (
            {k: v for k, v in QWEN2_1_5B.items() if k != "num_key_value_heads"},
            "field 'num_key_value_heads' is missing",
        ),
        ([1, 2], "got a JSON list, expected an object"),
        (
            LLAMA3_8B | {"hidden_size": 10**400},
            "field 'hidden_size' is a whole number of about 401 digits, expected at most 1,000,000",
        ),
        (
            LLAMA3_8B | {"num_hidden_layers": 10**12},
            "field 'num_hidden_layers' is 1000000000000, expected at most 10,000",
        ),
        ({"model_type": "x" * 90}, "unknown model_type a str of 92 characters; known: llama"),
    ],
)
def test_configs_that_are_not_understood_are_refused(tmp_path: Path, config: Any, message: str) -> None:
    with pytest.raises(InputError, match=message) as error:
        load_model(write_config(tmp_path / "m", config))
    assert "config.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_that_cannot_be_read_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in it"):
        load_model(str(tmp_path))
    broken = tmp_path / "broken.json"
    broken.write_text('{"model_type": ')
    with pytest.raises(InputError, match="not valid JSON"):
        load_model(str(broken))
    for text, message in (
        ("[" * 100_000, "cannot be read as JSON: maximum recursion depth"),
        ('{"hidden_size": ' + 5000 * "7" + "}", "cannot be read as JSON: Exceeds the limit"),
        ('{"x": "NaN",\n "y": [NaN]}', "not valid JSON at line 2, column 8: got NaN, expected a finite number"),
        ('{"x": -1e999}', "not valid JSON at line 1, column 7: got -1e999, expected a finite number"),
    ):
        broken.write_text(text)
        with pytest.raises(InputError, match=message) as error:
            load_model(str(broken))
        assert "\n" not in str(error.value)
    with pytest.raises(
        InputError, match=r"^model x{60}\.\.\. \(5000 characters\): File name too long; expected a config"
    ):
        load_model("x" * 5000)
    with pytest.raises(InputError, match=r"no such file; expected a config\.json, its directory or a built-in name"):
        load_model(str(tmp_path / "none.json"))


def test_names_as_hugging_face_has_them_are_the_built_in_models(tmp_path, monkeypatch) -> None:
    assert load_model("Qwen/Qwen2.5-7B") is load_model("qwen2.5-7b")
    assert load_model("QWEN2.5-7B") is load_model("qwen2.5-7b")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "Tiny").mkdir()  # what is there is what is meant
    with pytest.raises(InputError, match=r"config\.json"):
        load_model("Tiny")


def test_unknown_names_suggest_the_closest() -> None:
    with pytest.raises(InputError, match=r"unknown model 'qwen2.5-7': did you mean 'qwen2.5-7b'\?"):
        load_model("qwen2.5-7")
    assert {"tiny", "qwen2.5-32b", "llama-65b"} <= set(builtin_models())


def test_impossible_shapes_are_refused() -> None:
    shape: dict[str, Any] = {
        "layers": 1,
        "hidden": 8,
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 2,
        "ffn": 8,
        "vocab": 8,
    }
    assert ModelSpec(name="ok", **shape).parameters > 0
    with pytest.raises(InputError, match="model 'x': layers is 0, expected at least 1"):
        ModelSpec(name="x", **(shape | {"layers": 0}))
    with pytest.raises(InputError, match="model 'x': 4 heads are not divisible by 3 key/value heads"):
        ModelSpec(name="x", **(shape | {"kv_heads": 3}))
    with pytest.raises(InputError, match="model 'x': layers is 10001, expected at most 10,000"):
        ModelSpec(name="x", **(shape | {"layers": 10_001}))
    large = {"layers": 10_000, "hidden": 1_000_000, "ffn": 10_000_000}
    with pytest.raises(InputError, match=r"model 'x' has [\d,]+ parameters, expected at most 1,000,000,000,000,000"):
        ModelSpec(name="x", **(shape | large))
