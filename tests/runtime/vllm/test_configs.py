"""Configurations of looped models under vLLM's names."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.runtime.vllm.configs import CONFIGS, DoryConfig, OuroConfig, RavenConfig


def test_types_are_those_of_the_published_files():
    types = {name: [config.model_type for config in configs] for name, configs in CONFIGS.items()}
    assert types == {
        "OuroForCausalLM": ["ouro"], "RavenForCausalLM": ["huginn_raven"], "DoryForCausalLM": ["dory"],
        "LoopedLlamaForCausalLM": ["loopq_looped"], "Inkling2LoopForCausalLM": ["inkling2_loop_text", "inkling2_loop"],
    }  # fmt: skip
    assert OuroConfig(total_ut_steps=3).total_ut_steps == 3


def test_huginn_has_its_class_sizes_where_its_file_has_none():
    config = RavenConfig()
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (96, 55, 4096)
    sizes = {"n_embd": 64, "n_heads": 4, "n_layers": 8, "block_size": 128}
    config = RavenConfig(**sizes)
    assert (config.head_dim, config.num_key_value_heads, config.max_position_embeddings) == (16, 4, 128)
    assert (config.hidden_size, config.num_attention_heads, config.num_hidden_layers) == (64, 4, 8)
    config = RavenConfig(**sizes, num_key_value_heads=2, max_position_embeddings=32)
    assert (config.num_key_value_heads, config.max_position_embeddings) == (2, 32)


def test_a_layer_of_dory_is_two_of_its_file():
    config = DoryConfig(
        num_hidden_layers=8, n_input_layers=2, n_recurrent_layers=4, n_output_layers=2, hidden_size=16,
        layer_types=["full_attention", "mlp", "sliding_attention", "mlp"] * 2,
    )  # fmt: skip
    counts = (
        config.num_hidden_layers,
        config.n_input_layers,
        config.n_recurrent_layers,
        config.n_output_layers,
    )
    assert counts == (4, 1, 2, 1)
    assert config.layer_types == ["full_attention", "sliding_attention"] * 2
    assert (config.n_recurrent_loops, config.recurrent_kv_cache_mode, config.tie_word_embeddings) == (
        2,
        "per_loop",
        False,
    )
    other = DoryConfig(n_recurrent_loops=3, recurrent_kv_cache_mode="shared", tie_word_embeddings=True)
    assert (other.n_recurrent_loops, other.recurrent_kv_cache_mode, other.tie_word_embeddings) == (
        3,
        "shared",
        True,
    )
    assert (other.num_hidden_layers, other.layer_types) == (0, [])


@pytest.mark.parametrize("config", CONFIGS["Inkling2LoopForCausalLM"])
def test_inkling_is_refused(config):
    with pytest.raises(ConfigError, match="Inkling-2 is not served"):
        config()
