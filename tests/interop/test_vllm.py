"""vLLM runs looped models by loopq's plugin; the plugin's entry point names what there is."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest

import loopq.integrations.vllm
from tests.support import vendors
from tests.support.interop import vllm
from tests.support.interop.environments import interpreter

GRIDS = ({"bits": 4, "group_size": 32}, {"levels": "nvfp4", "group_size": 16})


@pytest.mark.slow
@pytest.mark.parametrize("model", vllm.MODELS)
def test_vllm_computes_every_loop(tmp_path, model):
    python = interpreter("vllm")
    work = vllm.prepared(tmp_path)
    full = vllm.in_full(python, work, model)
    # float32 against float32, over all tokens of a prompt at once and one by one from the caches.
    assert abs(full["prompt"]) < 1e-6
    assert abs(full["generated"]) < 1e-6
    assert full["agreement"] == 1.0
    if model in vllm.DEPTHS:
        other = vllm.at_depth(python, work, model)
        assert abs(other["prompt"]) < 1e-6
        assert abs(other["generated"]) < 1e-6
    for grid in GRIDS:
        codes = vllm.in_codes(python, work, model, grid)
        # vLLM computes in bfloat16 here, loopq in float32.
        assert codes["prompt"] < 5e-3
        assert codes["generated"] < 5e-3


def test_inkling_is_refused_with_the_version_that_it_needs(tmp_path):
    python = interpreter("vllm")
    vendors.inkling().save_pretrained(tmp_path / "inkling")
    np.save(tmp_path / "prompts.npy", np.ones((1, 4), np.int64))
    with pytest.raises(AssertionError, match="it needs a vLLM that knows Inkling2LoopForCausalLM"):
        vllm.served(python, tmp_path / "inkling", tmp_path / "prompts.npy", "float32", {})


def test_a_vllm_without_the_parts_is_told_the_version(monkeypatch):
    # No package, so it has no modules.
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": "0.29.0"}.__getitem__)
    for name in ("Ouro", "Dory"):
        with pytest.raises(
            ImportError, match=rf"loopq serves {name} with vLLM 0.32; vLLM 0.29.0 is installed"
        ):
            getattr(loopq.integrations.vllm, name)


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
    for arch, found in registered.items():
        module, _, name = loopq.integrations.vllm.MODELS[arch].partition(":")
        assert found == f"loopq.integrations.vllm:{name}"
        path = (Path(loopq.integrations.vllm.__file__).parent / module).with_suffix(".py")
        assert name in {
            n.name for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.ClassDef)
        }


def test_configurations_are_read_without_code_of_the_checkpoint(tmp_path, own_mapping):
    transformers = pytest.importorskip("transformers")
    from loopq.integrations.vllm.configs import OuroConfig, RavenConfig

    for kind in (RavenConfig, OuroConfig):
        transformers.AutoConfig.register(kind.model_type, kind, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(vllm.HUGINN))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, RavenConfig)
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "head_dim")
    assert [getattr(read, name) for name in names] == [256, 4, 4, 512, 64]
    assert read.mean_recurrence == 6
