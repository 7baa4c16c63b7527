"""A model built from config files alone."""

from __future__ import annotations

import json

import pytest

from loopq.errors import CheckpointError, ConfigError
from loopq.models.build import build_model
from loopq.models.load import load_model


def test_the_configs_model_has_the_shapes_of_the_saved_one(saved_model):
    side = {"config.json": (saved_model / "config.json").read_bytes()}
    built, loaded = build_model(side), load_model(saved_model)
    assert built.system.name == loaded.system.name == "huginn"
    assert built.side_files == side
    assert not built.model.training
    assert {n: p.shape for n, p in built.model.named_parameters()} == {
        n: p.shape for n, p in loaded.model.named_parameters()
    }


def test_a_class_of_transformers_is_built_with_its_ties():
    config = {
        "model_type": "albert", "architectures": ["AlbertForMaskedLM"], "vocab_size": 64, "embedding_size": 16,
        "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 3,
    }  # fmt: skip
    model = build_model({"config.json": json.dumps(config).encode()}).model
    assert model.predictions.decoder.weight is model.albert.embeddings.word_embeddings.weight


def test_without_a_config_or_leave_for_its_code_nothing_is_built():
    with pytest.raises(CheckpointError, match=r"carries no config\.json"):
        build_model({})
    config = {"model_type": "own", "auto_map": {"AutoModelForCausalLM": "own.Model"}}
    with pytest.raises(ConfigError, match=r"trust.remote.code"):
        build_model({"config.json": json.dumps(config).encode()})
