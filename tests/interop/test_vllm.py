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

import loopq.runtime.vllm
from tests.support import vendors
from tests.support.interop import models, vllm
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


#: The smallest files, in fewer states than `--preset small` has.
SMALLEST = {
    "Ouro": {"method": "trellis", "state_bits": 8, "rotation": "hadamard", "bits": 3, "outside": 8},
    "Llama with a loop": {"preset": "fast", "levels": "uneven", "bits": 2, "exclude": ("*v_proj*",), "outside": 8},
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", SMALLEST)
def test_vllm_runs_the_codes_of_native_checkpoints(tmp_path, model):
    python = interpreter("vllm")
    codes = vllm.in_native(python, vllm.prepared(tmp_path), model, group_size=32, **SMALLEST[model])
    # Each product rounds its input to 2^-22 of the block's largest value (docs/cpu.md).
    assert abs(codes["prompt"]) < 1e-6
    assert abs(codes["generated"]) < 1e-6
    assert codes["agreement"] == 1.0


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
            getattr(loopq.runtime.vllm, name)


@pytest.fixture
def own_mapping(monkeypatch):
    """Registrations here stay here."""
    auto = pytest.importorskip("transformers.models.auto.configuration_auto")
    monkeypatch.setattr(auto.CONFIG_MAPPING, "_extra_content", dict(auto.CONFIG_MAPPING._extra_content))


@pytest.mark.parametrize("own", ["OuroForCausalLM", "DoryForCausalLM"])
def test_the_entry_point_registers_classes_that_there_are(own, monkeypatch, own_mapping):
    extended = loopq.runtime.vllm.EXTENDED
    known = {"LlamaForCausalLM", own}
    registered = {}
    registry = types.SimpleNamespace(
        get_supported_archs=lambda: known, register_model=lambda name, found: registered.update({name: found})
    )
    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(ModelRegistry=registry))
    # Its parts of vLLM are not here.
    monkeypatch.setitem(sys.modules, "loopq.runtime.vllm.codes", types.ModuleType("codes"))
    (entry,) = importlib.metadata.entry_points(group="vllm.general_plugins", name="loopq")
    entry.load()()
    # A version of vLLM that has the class keeps it, or a class of loopq extends it.
    assert set(registered) == set(loopq.runtime.vllm.MODELS) - (known - set(extended))
    chosen = loopq.runtime.vllm.MODELS | {arch: extended[arch] for arch in known & set(extended)}
    for arch, found in registered.items():
        module, _, name = chosen[arch].partition(":")
        assert found == f"loopq.runtime.vllm:{name}"
        path = (Path(loopq.runtime.vllm.__file__).parent / module).with_suffix(".py")
        assert name in {
            n.name for n in ast.parse(path.read_text("utf-8")).body if isinstance(n, ast.ClassDef)
        }


def test_vllms_own_dory_takes_packed_integers_too(monkeypatch):
    """The stand-in refuses tensors as the class of 0.33 does: by the rows of the projection that they are a part of."""

    class Refusing:
        @staticmethod
        def _check_weight_shape(name, weight, expected):
            if tuple(weight.shape) != expected:
                raise ValueError(name)

        def load_weights(self, weights, rows):
            for name, weight in weights:
                self._check_weight_shape(name, weight, (rows, *weight.shape[1:]))

    dory = types.ModuleType("vllm.model_executor.models.dory")
    dory.DoryForCausalLM = Refusing
    monkeypatch.setitem(sys.modules, dory.__name__, dory)
    monkeypatch.setattr(loopq.runtime.vllm, "packed", None, raising=False)
    served = loopq.runtime.vllm.PackedDory
    del sys.modules["loopq.runtime.vllm.packed"]
    layer = models.rounded(
        "q_proj.weight", np.eye(32, dtype=np.float32), bits=4, group_size=16, symmetric=False
    )
    tensors = [(name, tensor.array()) for name, tensor in layer.tensors().items()]
    assert "q_proj.weight_shape" in dict(tensors)
    with pytest.raises(ValueError, match=r"weight_(shape|zero_point)"):
        Refusing().load_weights(tensors, 32)
    served().load_weights(tensors, 32)
    with pytest.raises(ValueError, match="weight_packed"):
        served().load_weights(tensors, 16)


def test_configurations_are_read_without_code_of_the_checkpoint(tmp_path, own_mapping):
    transformers = pytest.importorskip("transformers")
    from loopq.runtime.vllm.configs import OuroConfig, RavenConfig

    for kind in (RavenConfig, OuroConfig):
        transformers.AutoConfig.register(kind.model_type, kind, exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(vllm.HUGINN))
    read = transformers.AutoConfig.from_pretrained(tmp_path)
    assert isinstance(read, RavenConfig)
    names = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings", "head_dim")
    assert [getattr(read, name) for name in names] == [256, 4, 4, 512, 64]
    assert read.mean_recurrence == 6
