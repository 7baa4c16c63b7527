"""Architectures of llama.cpp by config.json: what a file needs of it, and the places of tensors."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.formats.gguf.shape import Shape


def test_loops_follow_the_adapter_and_other_models_are_refused(tmp_path):
    base = {"architectures": ["NanbeigeForCausalLM"]}
    assert Shape.of({**base, "loop_loss_weights": [0.1, 0.2], "num_loops": 2}).n_loops == 3
    with pytest.raises(CheckpointError, match=r"loopq writes GGUF for DoryForCausalLM, HrmText"):
        Shape.of({"architectures": ["RavenForCausalLM"]})
    with pytest.raises(CheckpointError, match=r"only plain rotary positions"):
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
