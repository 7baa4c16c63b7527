"""The plugin's names: each has a class, and registering leaves to vLLM what it has."""

from __future__ import annotations

import importlib.metadata
import sys
import types

import pytest
import transformers

from loopq.runtime import vllm
from loopq.runtime.vllm.configs import CONFIGS

PREFIX = "loopq.runtime.vllm:"


@pytest.mark.parametrize("name", vllm.MODELS)
def test_each_architecture_has_a_class_behind_its_name(parts, name):
    module, _, cls = vllm.MODELS[name].partition(":")
    assert getattr(vllm, cls) is getattr(parts(module), cls)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"module 'loopq\.runtime\.vllm' has no attribute 'Other'"):
        _ = vllm.Other


def test_a_missing_part_names_both_versions(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm", types.ModuleType("vllm"))
    monkeypatch.setattr(importlib.metadata, "version", {"vllm": "0.29.0"}.__getitem__)
    with pytest.raises(
        ImportError, match=rf"loopq serves Ouro with vLLM {vllm.VLLM}; vLLM 0\.29\.0 is installed"
    ):
        _ = vllm.Ouro


@pytest.mark.parametrize(
    ("known", "missing", "extended"),
    [
        ((), (), ()),
        (("OuroForCausalLM",), ("OuroForCausalLM",), ()),
        (("DoryForCausalLM",), (), ("DoryForCausalLM",)),
    ],
)
def test_what_vllm_has_is_left_to_it(monkeypatch, known, missing, extended):
    registered, configured = {}, []
    registry = types.SimpleNamespace(get_supported_archs=lambda: known, register_model=registered.__setitem__)
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    # Its parts of vLLM are not here.
    monkeypatch.setitem(sys.modules, f"{vllm.__name__}.codes", types.ModuleType("codes"))
    monkeypatch.setattr(
        transformers.AutoConfig,
        "register",
        lambda kind, config, exist_ok: configured.append((kind, exist_ok)),
    )
    vllm.register()
    expected = {
        name: PREFIX + path.partition(":")[2] for name, path in vllm.MODELS.items() if name not in missing
    }
    assert registered == expected | dict.fromkeys(extended, f"{PREFIX}PackedDory")
    kinds = [c.model_type for name, configs in CONFIGS.items() if name not in known for c in configs]
    assert configured == [(kind, True) for kind in kinds]
