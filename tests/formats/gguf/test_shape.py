"""Architectures of llama.cpp by config.json: what a file needs of it, and the places of tensors."""

from __future__ import annotations

import dataclasses

import pytest

from loopq.errors import CheckpointError
from loopq.formats.gguf.shape import ARCHITECTURES, Shape

#: Fields of published classes that the header, the shapes of tensors or the tokenizer have, or that change no logit.
KEPT = {
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "attention_bias",
    "mlp_bias", "tie_word_embeddings", "initializer_range", "use_cache", "attention_dropout", "pretraining_tp",
    "bos_token_id", "eos_token_id", "pad_token_id", "embedding_scale", "prefix_lm", "L_bp_cycles", "sliding_window",
    "layer_types", "ngpt_alpha_init", "recurrent_kv_cache_mode",
}  # fmt: skip


@pytest.mark.parametrize("kind", ["llama", "hrm_text", "dory"])
def test_each_field_of_a_published_class_is_read_or_has_one_meaning(kind):
    transformers = pytest.importorskip("transformers")
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}")
    of_all = {f.name for f in dataclasses.fields(transformers.PretrainedConfig)}
    fields = {f.name for f in dataclasses.fields(transformers.CONFIG_MAPPING[kind])} - of_all
    shape = ARCHITECTURES.get(kind)
    assert fields - KEPT - {*shape.fixed, *shape.needed} == set()


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; llama.cpp computes llama with 'silu' or 'swish'"),
        ({"model_type": "mistral"}, "model_type is 'mistral'"),
        ({"model_type": "loopq_looped", "looped_base": "qwen2"}, "looped_base is 'qwen2'"),
        (
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn"}}},
            "full_attention: rope_type is 'yarn'",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_scaling: type is 'linear'"),
        ({"rope_scaling": [2]}, "rope_scaling is .*allowed: an object"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor is 0.25"),
        ({"use_qk_norm": True}, "use_qk_norm is True"),
        (
            {"final_logit_softcapping": 30.0},
            "final_logit_softcapping is 30.0; llama.cpp computes llama with no value",
        ),
    ],
)
def test_a_setting_that_llama_cpp_would_not_read_is_refused(given, match):
    Shape.of({"architectures": ["LlamaForCausalLM"], "model_type": "llama", **dict.fromkeys(given)})
    with pytest.raises(CheckpointError, match=match):
        Shape.of({"architectures": ["LlamaForCausalLM"], **given})


def test_a_variant_of_an_architecture_is_refused():
    with pytest.raises(CheckpointError, match="enable_depth_attention is True"):
        Shape.of({"architectures": ["NanbeigeForCausalLM"], "enable_depth_attention": True})
    kinds = ["full_attention", "sliding_attention"]
    with pytest.raises(
        CheckpointError, match=r"layer_types is .*; llama\.cpp computes ouro with 'full_attention'"
    ):
        Shape.of({"architectures": ["OuroForCausalLM"], "layer_types": kinds})


@pytest.mark.parametrize(
    ("config", "theta"),
    [
        ({"rope_theta": 700.0}, 700.0),
        ({"rope_theta": 700.0, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0),
        (
            {
                "rope_scaling": {"rope_type": "default", "rope_theta": 300.0},
                "rope_parameters": {"rope_theta": 5},
            },
            300.0,
        ),
        ({}, 10000.0),
    ],
)
def test_the_base_of_positions_is_the_one_that_transformers_takes(config, theta):
    transformers = pytest.importorskip("transformers")
    if transformers.__version__.startswith("4."):
        pytest.skip("version 4 does not read rope_parameters")
    shape = Shape.of({"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-6, **config})
    assert shape.header()["rope.freq_base"] == theta
    assert transformers.LlamaConfig.from_dict(config).rope_parameters["rope_theta"] == theta


def test_loops_follow_the_adapter_and_other_models_are_refused(tmp_path):
    base = {"architectures": ["NanbeigeForCausalLM"]}
    assert Shape.of({**base, "loop_loss_weights": [0.1, 0.2], "num_loops": 2}).n_loops == 3
    with pytest.raises(CheckpointError, match=r"loopq writes GGUF for DoryForCausalLM, HrmText"):
        Shape.of({"architectures": ["RavenForCausalLM"]})
    with pytest.raises(
        CheckpointError, match=r"rope_scaling: type is 'yarn'; llama\.cpp computes nanbeige with 'default'"
    ):
        Shape.of({**base, "rope_scaling": {"type": "yarn"}})
    with pytest.raises(CheckpointError, match=r"'model\.gate\.weight': has no place"):
        Shape.of(base).tensors("model.gate.weight")
    with pytest.raises(CheckpointError, match=r"config\.json: the whole: \[\]; allowed: an object"):
        Shape.read({"config.json": b"[]"})


def test_what_the_file_cannot_do_without_is_asked_of_the_config():
    whole = {
        "architectures": ["NanbeigeForCausalLM"], "vocab_size": 96, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    assert Shape.of(whole).check_whole().n_loops == 1
    for broken in ({"vocab_size": "96"}, {"rms_norm_eps": None}, {"hidden_size": True}):
        with pytest.raises(CheckpointError, match=rf"config\.json: {next(iter(broken))} is"):
            Shape.of({**whole, **broken}).check_whole()
    with pytest.raises(CheckpointError, match="66 rows are no pairs in each of 4 heads"):
        Shape.of(whole).rows("model.layers.0.self_attn.q_proj.weight", 66)
