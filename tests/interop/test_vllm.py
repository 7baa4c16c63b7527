"""vLLM runs looped models by loopq's plugin; the plugin's entry point names what there is."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import pytest

import loopq.integrations.vllm
from tests.support.interop import vllm
from tests.support.interop.environments import interpreter


@pytest.mark.parametrize("model", vllm.MODELS)
def test_vllm_computes_every_loop(tmp_path, model):
    python = interpreter("vllm")
    work = vllm.prepared(tmp_path)
    full = vllm.in_full(python, work, model)
    # float32 against float32, over all tokens of a prompt at once and one by one from the caches.
    assert abs(full["prompt"]) < 1e-6
    assert abs(full["generated"]) < 1e-6
    assert full["agreement"] == 1.0
    codes = vllm.in_int4(python, work, model)
    # vLLM computes in bfloat16 here, loopq in float32.
    assert codes["prompt"] < 5e-3
    assert codes["generated"] < 5e-3


@pytest.fixture
def own_mapping(monkeypatch):
    """What is registered here stays here."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    monkeypatch.setattr(auto.CONFIG_MAPPING, "_extra_content", dict(auto.CONFIG_MAPPING._extra_content))


def test_the_entry_point_registers_classes_that_there_are(monkeypatch, own_mapping):
    known = {"LlamaForCausalLM", "OuroForCausalLM"}
    registered = {}
    registry = types.SimpleNamespace(
        get_supported_archs=lambda: known, register_model=lambda name, found: registered.update({name: found})
    )
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="loopq")
    entry.load()()
    # A version of vLLM that has the class keeps it.
    assert set(registered) == set(loopq.integrations.vllm.MODELS) - known
    tree = ast.parse((Path(loopq.integrations.vllm.__file__).parent / "models.py").read_text("utf-8"))
    classes = {node.name for node in tree.body if isinstance(node, ast.ClassDef)}
    for found in registered.values():
        module, _, name = found.partition(":")
        assert module == "loopq.integrations.vllm.models"
        assert name in classes


def test_configurations_are_read_without_code_of_the_checkpoint(tmp_path, own_mapping):
    transformers = pytest.importorskip("transformers")
    from loopq.integrations.vllm.configs import HuginnConfig, OuroConfig

    for kind in (HuginnConfig, OuroConfig):
        transformers.AutoConfig.register(kind.model_type, kind, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(vllm.HUGINN))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, HuginnConfig)
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "head_dim")
    assert [getattr(read, name) for name in names] == [256, 4, 4, 512, 64]
    assert read.mean_recurrence == 6
