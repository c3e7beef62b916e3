"""The model that is calibrated and trained: packing changes neither loss nor gradients, and the shapes are ours."""

import inspect
import json
import math
import sys

import pytest

pytest.importorskip("torch", reason="torch is not installed; `make test-kernels` runs these")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from odc_kernels.lm import build_lm, pack
from odc_kernels.varlen import hf_attention, packed_attention, repeats_keys
from odc_sim.errors import InputError

CPU = torch.device("cpu")
LENGTHS = (5, 9, 1, 30)


@pytest.fixture(scope="module")
def lm():
    return build_lm("tiny", device=CPU)


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (length,), generator=generator) for length in LENGTHS]


def gradients(lm, batches):
    lm.zero_grad()
    loss = sum(lm(batch) for batch in batches)
    loss.backward()
    return loss.item(), [parameter.grad.clone() for parameter in lm.parameters()]


def test_a_batch_by_hand():
    batch = pack([torch.tensor([7, 8, 9]), torch.tensor([5])], weight_of_sample=0.5)
    assert batch.tokens.tolist() == [[7, 8, 9, 5]]
    assert batch.positions.tolist() == [[0, 1, 2, 0]]
    assert batch.starts.tolist() == [0, 3, 4]
    assert batch.starts.dtype == torch.int32
    assert batch.longest == 3
    assert batch.weights.tolist() == [0.25, 0.25, 0.0, 0.0]
    assert batch.num_tokens == 4


def test_packing_changes_neither_loss_nor_gradients(lm, samples):
    together, packed = gradients(lm, [pack(samples, 0.25)])
    apart, single = gradients(lm, [pack([sample], 0.25) for sample in samples])
    assert together == pytest.approx(apart, rel=1e-6)
    for one, other in zip(packed, single, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)


def test_the_loss_is_that_of_transformers_on_each_sample(lm, samples):
    expected = 0.0
    for sample in samples:
        if sample.numel() > 1:
            logits = lm.model(input_ids=sample[None], starts=torch.tensor([0, sample.numel()]), longest=0).logits[0]
            expected += 0.25 * cross_entropy(logits[:-1].float(), sample[1:]).item()
    assert lm(pack(samples, 0.25)).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("options", [{"recompute": False}, {"chunked_loss_tokens": 7}, {"chunked_loss_tokens": 0}])
def test_recomputation_and_chunks_change_nothing(lm, samples, options):
    other = build_lm("tiny", device=CPU, **options)
    loss, expected = gradients(lm, [pack(samples, 0.25)])
    loss_other, got = gradients(other, [pack(samples, 0.25)])
    assert loss == pytest.approx(loss_other, rel=1e-6)
    for one, two in zip(expected, got, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-7)


def test_attention_is_causal_attention_with_a_block_diagonal_mask():
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(14, 4, 8, generator=generator)
    k, v = (torch.randn(14, 2, 8, generator=generator) for _ in range(2))
    sample = torch.tensor([0] * 5 + [1] * 9)
    allowed = (sample[:, None] == sample[None]) & torch.ones(14, 14, dtype=torch.bool).tril()
    wide = [part.repeat_interleave(2, dim=1).transpose(0, 1) for part in (k, v)]
    expected = scaled_dot_product_attention(q.transpose(0, 1), *wide, attn_mask=allowed).transpose(0, 1)
    got = packed_attention(q, k, v, torch.tensor([0, 5, 14], dtype=torch.int32), 9)
    torch.testing.assert_close(got, expected)


def test_the_number_of_parameters_is_the_simulators(lm):
    assert sum(parameter.numel() for parameter in lm.parameters()) == lm.spec.parameters
    assert [sum(p.numel() for p in layer.parameters()) for layer in lm.layers] == [lm.spec.layer_parameters] * 4


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_a_config_file_is_built_as_transformers_would(tmp_path, kind):
    fields = {
        "model_type": kind,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 64,
        "tie_word_embeddings": True,
        "sliding_window": None,
    }
    (tmp_path / "config.json").write_text(json.dumps(fields))
    lm = build_lm(str(tmp_path), device=CPU)
    assert sum(parameter.numel() for parameter in lm.parameters()) == lm.spec.parameters
    assert math.isfinite(lm(pack([torch.arange(9)], 1.0)).item())


def test_a_checkpoint_is_loaded(tmp_path, lm, samples):
    lm.model.save_pretrained(tmp_path)
    loaded = build_lm(str(tmp_path), device=CPU, seed=5)
    assert loaded(pack(samples, 0.25)).item() == pytest.approx(lm(pack(samples, 0.25)).item(), rel=1e-6)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt"])
def test_weights_that_are_not_read_are_not_replaced_by_random_ones(tmp_path, name):
    fields = {"model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    fields |= {"intermediate_size": 64, "vocab_size": 50}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    build_lm(str(tmp_path), device=CPU)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(InputError, match=f"has its weights in {name}, expected .safetensors"):
        build_lm(str(tmp_path), device=CPU)


def test_one_layer_of_many():
    assert len(build_lm("tiny", device=CPU, num_layers=1).layers) == 1


def test_wrong_inputs():
    with pytest.raises(InputError, match="unknown model 'gpt-9'"):
        build_lm("gpt-9", device=CPU)
    with pytest.raises(InputError, match=r"a microbatch of samples of \[\] tokens, expected at least one sample"):
        pack([], 1.0)


def test_attention_that_is_not_plain_causal_is_refused():
    parts = [torch.ones(1, 2, 3, 4)] * 3
    where = {"starts": torch.tensor([0, 3], dtype=torch.int32), "longest": 3}
    with pytest.raises(InputError, match="the model has a sliding window, expected causal attention"):
        hf_attention(torch.nn.Module(), *parts, None, sliding_window=8, **where)
    with pytest.raises(InputError, match=r"got dropout 0\.1, expected 0"):
        hf_attention(torch.nn.Module(), *parts, None, dropout=0.1, **where)


def test_whether_keys_are_repeated_depends_on_what_torch_offers():
    from torch.nn.attention.varlen import varlen_attn

    assert repeats_keys() == ("enable_gqa" not in inspect.signature(varlen_attn).parameters)


def test_without_transformers_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"transformers is not installed: \S+ -m pip install 'odc-toolkit\[train\]'"):
        build_lm("tiny", device=CPU)
