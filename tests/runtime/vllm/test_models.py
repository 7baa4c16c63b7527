"""Ouro, Huginn, R-Llama and dense decoders with a loop: over plain parts their logits are loopq's."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from loopq.errors import ConfigError
from tests.support.interop.vllm import HUGINN, LOOPED, OURO, RLLAMA
from tests.support.vllm_parts import Attention


def caches(model):
    """Names of the caches in the order of modules, and how often each was used."""
    calls = {m.prefix: m.calls for m in model.modules() if isinstance(m, Attention)}
    assert set(calls.values()) == {1}
    return sorted(calls)


@pytest.mark.parametrize("n_loops", [1, 3])
def test_ouro_computes_every_loop(parts, beside, n_loops):
    logits, expected, model = beside(parts("models").Ouro, OURO, total_ut_steps=n_loops)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    assert len(caches(model)) == 2 * n_loops
    assert [f"model.layers.{i}.self_attn.attn" in caches(model) for i in (0, 1)] == [True, True]
    # The third run of a layer has the cache after those of all layers.
    assert ("model.layers.2.attn" in caches(model)) == (n_loops > 1)
    assert len(model.model.layers) == 2 * n_loops


@pytest.mark.parametrize(("config", "kind"), [(HUGINN, "HuginnLayer"), (RLLAMA, "RLlamaBlock")])
@pytest.mark.parametrize("n_steps", [1, 3])
def test_raven_computes_every_step(parts, beside, config, kind, n_steps):
    module = parts("models")
    more = {"init_values": {"std": (2 / (5 * 32)) ** 0.5, "embed_scale": 1.0}} if config is RLLAMA else {}
    logits, expected, model = beside(module.RavenLM, config, mean_recurrence=n_steps, **more)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    inner = model.inner
    assert type(next(iter(inner.core_block))) is getattr(module, kind)
    # One block before the loop, two in it, one after it; the repeated ones have the caches behind them.
    assert caches(model) == [f"slots.{i}.attn" for i in range(2 + 2 * n_steps)]
    assert model.embedding is inner.wte
    assert (model.lm_head is inner.wte) == config["tie_word_embeddings"]
    assert inner.noise.shape == (48, 32)
    assert "transformer.noise" not in model.state_dict()


@pytest.mark.parametrize("loop", [[1, 3, 3], [0, 2, 1]])
def test_a_dense_decoder_runs_its_loop(parts, beside, loop):
    logits, expected, model = beside(parts("models").LoopedLlama, LOOPED, looped_layers=loop)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-5)
    n = 4 + (loop[1] - loop[0]) * (loop[2] - 1)
    assert (model.model.start_layer, model.model.end_layer, len(caches(model))) == (0, n, n)
    assert [f"model.layers.{i}.attn" in caches(model) for i in range(4, n)] == [True] * (n - 4)


def test_a_loop_is_not_divided_among_stages(parts, configured):
    config = LOOPED | {"hidden_size": 32, "vocab_size": 64, "intermediate_size": 64}
    module = parts("models")
    module.LoopedLlama(vllm_config=configured(config))
    with pytest.raises(ConfigError, match="not divided among pipeline stages"):
        module.LoopedLlama(vllm_config=configured(config, pipeline_parallel_size=2))
    bases = {module.LoopedMistral: "Mistral", module.LoopedQwen2: "Qwen2", module.LoopedQwen3: "Qwen3"}
    for cls, base in bases.items():
        assert cls.__mro__[2].__name__ == f"{base}ForCausalLM"


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"test_time_noise": 0.5}, "test_time_noise"),
        ({"state_init": "zero"}, "state_init"),
        ({"init_values": {"embed_scale": 1.0}, "auto_map": {"a": "olmo.B"}}, "Recurrent-OLMo-2"),
    ],
)
def test_other_kinds_of_raven_are_refused(parts, configured, more, match):
    with pytest.raises(ConfigError, match=match):
        parts("models").RavenLM(vllm_config=configured(HUGINN | {"n_embd": 32} | more))


def test_biases_of_queries_and_keys_are_added(parts, configured):
    module = parts("models")
    config = configured(HUGINN | {"n_embd": 32, "qk_bias": True})
    for bias in (True, False):
        config.model_config.hf_config.qk_bias = bias
        rotary = module.get_rope(8, 48, is_neox_style=True, rope_parameters={"rope_theta": 1e4})
        attention = module.RavenAttention(config, "a", "slots.0.attn", rotary)
        assert (attention.qk_bias is not None) == bias
        assert (attention.widths, attention.attn.impl.scale, attention.attn.prefix) == (
            [32] * 3,
            8**-0.5,
            "slots.0.attn",
        )
    x, positions = torch.randn(5, 32), torch.zeros(5, dtype=torch.long)
    plain = attention(positions, x)
    attention.qk_bias = nn.Parameter(torch.zeros(2, 1, 4, 8), requires_grad=False)
    torch.testing.assert_close(attention(positions, x), plain)
    stored = torch.randn(2, 1, 4, 8)
    module._load_own_heads(attention.qk_bias, stored)
    assert torch.equal(attention.qk_bias, stored)
    # Without rotation a bias of q and k is one of the product.
    output = attention(positions, x)
    attention.qk_bias, attention.Wqkv.bias = (
        None,
        nn.Parameter(torch.cat((stored.flatten(), torch.zeros(32)))),
    )
    torch.testing.assert_close(attention(positions, x), output)


def test_each_rank_loads_the_heads_of_its_own(parts, monkeypatch):
    module = parts("models")
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 1)
    parameter, stored = nn.Parameter(torch.zeros(2, 1, 2, 8), requires_grad=False), torch.randn(2, 1, 6, 8)
    module._load_own_heads(parameter, stored)
    assert torch.equal(parameter, stored[:, :, 2:4])
