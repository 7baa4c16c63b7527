"""What `loopq export --engine` refuses, and the page that prints it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats.rules import READS, RULES, RUNS, WHY_NOT, check_engine
from loopq.systems import SYSTEMS
from tests.support.interop import models

_DOCS = Path(__file__).parents[2] / "docs"


def layers(**grids):
    """Layers of 64 columns by name, each of its own grid."""
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    found = {}
    for name, grid in grids.items():
        full = f"model.layers.0.{name.replace('__', '.')}.weight"
        rows = grid.pop("rows", 64)
        found[full] = models.rounded(full, weight[:rows], **{"bits": 4, "group_size": 32, **grid})
    return found


ODD = {
    "vllm 3-bit": ("vllm", "gptq", {"mlp__down_proj": {"bits": 3}}, "GPTQ of 2 or 3 bits"),
    "vllm siblings": (
        "vllm",
        "compressed-tensors",
        {"mlp__gate_proj": {}, "mlp__up_proj": {"bits": 8}},
        "q, k and v, or gate and up, of unlike bits",
    ),
    "sglang dense sibling": ("sglang", "gptq", {"self_attn__q_proj": {}}, "some of them dense"),
    "transformers mixed": (
        "transformers",
        "compressed-tensors",
        {"a": {}, "b": {"symmetric": False}},
        "symmetric and asymmetric layers in one file",
    ),
    "transformers asymmetric": (
        "transformers",
        "compressed-tensors",
        {"a": {"symmetric": False}},
        "asymmetric layers",
    ),
    "optimum mixed": ("transformers", "gptq", {"a": {}, "b": {"bits": 8}}, "optimum knows one setting"),
    "optimum groups": ("transformers", "gptq", {"a": {"group_size": 16}}, "not 32, 64, 128 or 256"),
    "3 bits, odd outputs": ("gptqmodel", "gptq", {"a": {"bits": 3, "rows": 20}}, "no multiple of 32"),
    "small groups": ("gptqmodel", "gptq_v2", {"a": {"group_size": 8}}, "groups of fewer than 16"),
}


@pytest.mark.parametrize("name", ODD)
def test_each_rule_names_the_layer_and_what_to_do(name):
    engine, form, grids, match = ODD[name]
    with pytest.raises(CheckpointError, match=match) as error:
        check_engine(engine, form, layers(**{k: dict(v) for k, v in grids.items()}), None)
    assert "layer model.layers.0." in str(error.value)
    assert "Instead: " in str(error.value)


def test_a_layer_outside_numbered_blocks_is_refused_for_gptqmodel():
    (layer,) = layers(a={}).values()
    with pytest.raises(CheckpointError, match=r"outside numbered blocks.* \(layer adapter\.weight, 1 in all"):
        check_engine("gptqmodel", "gptq", {"adapter.weight": layer}, None)


def test_a_rule_of_one_system_is_no_rule_of_another():
    plain = layers(mlp__down_proj={})
    check_engine("vllm", "gptq", plain, "nanbeige")
    check_engine("vllm", "compressed-tensors", plain, "iquest")
    with pytest.raises(CheckpointError, match="GPTQ of IQuest-Coder-Loop"):
        check_engine("vllm", "gptq", plain, "iquest")


def test_what_no_rule_speaks_of_is_taken():
    names = ("self_attn__q_proj", "self_attn__k_proj", "self_attn__v_proj", "mlp__down_proj")
    for engine, formats in READS.items():
        for form in formats:
            grid = {"levels": "nvfp4", "group_size": 16} if form == "modelopt" else {}
            plain = layers(**{name: dict(grid) for name in names})
            check_engine(engine, form, plain, None)
            check_engine(engine, form, plain, next(iter(RUNS[engine])))


def test_systems_and_formats_that_an_engine_does_not_have_are_refused():
    plain = layers(mlp__down_proj={})
    with pytest.raises(
        CheckpointError, match=r"sglang does not run ouro: its fallback to transformers breaks"
    ):
        check_engine("sglang", "gptq", plain, "ouro")
    with pytest.raises(CheckpointError, match=r"llama\.cpp does not run huginn: no support is known"):
        check_engine("llama.cpp", "gguf", plain, "huginn")
    with pytest.raises(CheckpointError, match=r"vllm reads compressed-tensors, gptq, modelopt, not marlin"):
        check_engine("vllm", "marlin", plain, None)


def test_the_tables_name_systems_engines_and_formats_that_there_are():
    names = set(SYSTEMS.names())
    assert {s for systems in RUNS.values() for s in systems} | {s for _, s in WHY_NOT} <= names
    assert set(RUNS) == set(READS)
    for rule in RULES:
        assert all(set(rule.formats) & set(READS[engine]) for engine in rule.engines)


def test_the_page_is_what_the_rules_print():
    spec = importlib.util.spec_from_file_location("engines_page", _DOCS / "engines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (_DOCS / "formats" / "engines.md").read_text("utf-8") == module.page()
