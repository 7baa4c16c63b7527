"""Refusals of `loopq export --engine`, and the page that prints them."""

from __future__ import annotations

import importlib.util
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.rules import check_engine, readers, rules
from loopq.formats.support import ENTRIES, KNOWN, NOWHERE, READS, entry_of
from loopq.systems import SYSTEMS
from tests.support.interop import models

_DOCS = Path(__file__).parents[2] / "docs"


def layers(**grids):
    """Layers of 64 columns by name, each with another grid."""
    weight = np.random.default_rng(0).normal(size=(64, 64)).astype(np.float32)
    rounded = {}
    for name, grid in grids.items():
        full = f"model.layers.0.{name.replace('__', '.')}.weight"
        rows = grid.pop("rows", 64)
        rounded[full] = models.rounded(full, weight[:rows], **{"bits": 4, "group_size": 32, **grid})
    return rounded


ODD = {
    "vllm 3-bit": ("vllm", "gptq", {"mlp__down_proj": {"bits": 3}}, "GPTQ of 2 or 3 bits"),
    "vllm siblings": (
        "vllm", "compressed-tensors",
        {"mlp__gate_proj": {}, "mlp__up_proj": {"bits": 8}},
        "q, k and v, or gate and up, of unlike bits",
    ),
    "sglang dense sibling": ("sglang", "gptq", {"self_attn__q_proj": {}}, "some of them dense"),
    "transformers mixed": (
        "transformers", "compressed-tensors",
        {"a": {}, "b": {"symmetric": False}},
        "symmetric and asymmetric layers in one file",
    ),
    "transformers asymmetric": (
        "transformers", "compressed-tensors", {"a": {"symmetric": False}}, "asymmetric layers",
    ),
    "optimum mixed": ("transformers", "gptq", {"a": {}, "b": {"bits": 8}}, "optimum knows one setting"),
    "optimum groups": ("transformers", "gptq", {"a": {"group_size": 16}}, "not 32, 64, 128 or 256"),
    "3 bits, odd outputs": ("gptqmodel", "gptq", {"a": {"bits": 3, "rows": 20}}, "no multiple of 32"),
    "experts in loopq's plugin": ("vllm", "native", {"experts__0__up": {"bits": 2}}, "experts in codes"),
    "small groups": ("gptqmodel", "gptq_v2", {"a": {"group_size": 8}}, "groups of fewer than 16"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_each_rule_names_the_layer_and_what_to_do(name):
    engine, form, grids, match = ODD[name]
    with pytest.raises(CheckpointError, match=match) as error:
        check_engine(engine, form, layers(**{k: dict(v) for k, v in grids.items()}), None)
    assert "layer model.layers.0." in str(error.value)
    assert "Instead: " in str(error.value)


def test_gptqmodel_refuses_a_layer_outside_numbered_blocks():
    (layer,) = layers(a={}).values()
    with pytest.raises(CheckpointError, match=r"outside numbered blocks.* \(layer adapter\.weight, 1 in all"):
        check_engine("gptqmodel", "gptq", {"adapter.weight": layer}, None)


@pytest.mark.parametrize(
    ("form", "grids", "match"),
    [
        ("compressed-tensors", {"experts__0__up": {}, "experts__1__up": {"bits": 8}}, "experts of unlike grids"),
        ("compressed-tensors", {"experts__0__up": {}, "experts__1__up": {}}, ""),
        (
            "compressed-tensors",
            {f"experts__{i}__up": {"levels": "nvfp4", "group_size": 16} for i in (0, 1)},
            "experts in NVFP4",
        ),
        ("gptq", {"experts__0__up": {}, "experts__1__up": {}}, "quantized experts: it stacks them"),
        ("gptq", {"o_proj": {}}, ""),
    ],
)  # fmt: skip
def test_stacked_experts_have_one_grid_or_are_refused(form, grids, match):
    experts = layers(**grids)
    if not match:
        check_engine("transformers", form, experts, None, {"model_type": "olmoe"})
        return
    with pytest.raises(CheckpointError, match=match):
        check_engine("transformers", form, experts, None, {"model_type": "olmoe"})


@pytest.mark.parametrize("quantized", ["experts.0.up", "o_proj"])
@pytest.mark.parametrize(
    "dense", ["layers.0.mlp.experts.1.up.weight", "layers.1.mlp.experts.0.up.weight", "mlp.x.weight"]
)
@pytest.mark.parametrize(
    ("keys", "stacks"), [((), True), (("auto_map",), False), (("looped_layers", "auto_map"), True)]
)  # fmt: skip
def test_a_dense_expert_is_refused_in_any_layer(quantized, dense, keys, stacks):
    config = {"model_type": "olmoe", **dict.fromkeys(keys)}
    experts = layers(**{quantized.replace(".", "__"): {}})
    if not stacks or "experts" not in dense:
        check_engine("transformers", "compressed-tensors", experts, None, config, dense=[f"model.{dense}"])
        return
    with pytest.raises(
        CheckpointError, match=rf"dense experts, all or some of them.* \(layer model\.{dense}"
    ):
        check_engine("transformers", "compressed-tensors", experts, None, config, dense=[f"model.{dense}"])


@pytest.mark.parametrize(("kind", "filled"), [("gpt_oss", False), ("olmoe", True), ("qwen3_moe", True)])
def test_stacks_of_a_looped_mixture_are_filled_or_refused(kind, filled):
    config = {"model_type": "loopq_looped", "looped_base": kind, "looped_layers": [1, 3, 2]}
    check = partial(check_engine, "transformers", "compressed-tensors", system=None, config=config)
    if filled:
        check(layers(experts__0__up={}))
        return
    for quantized, dense in (("experts__0__up", []), ("o_proj", ["model.layers.0.mlp.experts.0.up.weight"])):
        with pytest.raises(CheckpointError, match="stacks"):
            check(layers(**{quantized: {}}), dense=dense)
    check(layers(o_proj={}))


def test_a_file_read_wrong_without_an_error_needs_a_named_engine():
    experts = layers(experts__0__up={}, experts__1__up={})
    with pytest.raises(CheckpointError, match="gptqmodel can read gptq of this model: name the one"):
        readers("gptq", experts, "generic", {"model_type": "olmoe"})


def test_a_rule_of_one_system_is_no_rule_of_another():
    plain = layers(mlp__down_proj={})
    check_engine("vllm", "gptq", plain, "nanbeige")
    check_engine("vllm", "compressed-tensors", plain, "iquest")
    with pytest.raises(CheckpointError, match="GPTQ of IQuest-Coder-Loop"):
        check_engine("vllm", "gptq", plain, "iquest")


@pytest.mark.parametrize("form", READS["vllm"])
@pytest.mark.parametrize(
    ("system", "config", "match"),
    [
        ("huginn", {"state_init": "zero"}, "another state_init than like-init"),
        ("huginn", {"test_time_noise": 0.1}, "test_time_noise"),
        (
            "rllama",
            {"init_values": {"embed_scale": 1.0}, "auto_map": {"AutoConfig": "olmo.C"}},
            "Recurrent-OLMo-2",
        ),
        ("dory", {"recurrent_kv_cache_mode": "last_loop"}, "another recurrent_kv_cache_mode"),
    ],
)
def test_settings_that_the_plugin_refuses_are_known(form, system, config, match):
    grid = {"levels": "nvfp4", "group_size": 16} if form == "modelopt" else {}
    plain, config = layers(mixer__o_proj=grid), {"model_type": "made", **config}
    check_engine("vllm", form, plain, system, {"model_type": "made"})
    with pytest.raises(CheckpointError, match=match):
        check_engine("vllm", form, plain, system, config)


def test_native_files_for_vllm_are_those_of_the_plugin():
    unlike = layers(self_attn__q_proj={"bits": 2, "levels": "uneven"}, self_attn__k_proj={"symmetric": False})
    looped = {"model_type": "loopq_looped", "looped_base": "llama"}
    check_engine("vllm", "native", unlike, "looped", looped)
    check_engine("vllm", "native", unlike, "ouro", {"model_type": "ouro"})
    check_engine("vllm", "native", layers(mixer__q_proj={}), "dory", {"model_type": "dory"})
    with pytest.raises(
        CheckpointError, match=r"Dory under transformers' names \(layer model\.layers\.0\.self_attn"
    ):
        check_engine("vllm", "native", unlike, "dory", {"model_type": "dory"})
    with pytest.raises(CheckpointError, match=r"looped \(olmoe\): no support is known"):
        check_engine("vllm", "native", unlike, "looped", {"model_type": "olmoe"})
    for system in ("iquest", "nanbeige", "mamba", "zamba", "hrm_text", "inkling"):
        with pytest.raises(CheckpointError, match=f"vllm does not run {system}"):
            check_engine("vllm", "native", unlike, system, {"model_type": "made"})


def test_what_no_rule_speaks_of_is_taken():
    names = ("self_attn__q_proj", "self_attn__k_proj", "self_attn__v_proj", "mlp__down_proj")
    for engine, formats in READS.items():
        for form in formats:
            grid = {"levels": "nvfp4", "group_size": 16} if form == "modelopt" else {}
            plain = layers(**{name: dict(grid) for name in names})
            systems = {s for e in ENTRIES if e.engine == engine for s in e.systems}
            of = {"model_type": "made"}
            runs = [s for s in sorted(systems) if (entry := entry_of(engine, s, form, of)) and entry.runs]
            assert runs
            # Dory's names are others.
            check_engine(engine, form, plain, runs[-1], of)


def test_systems_and_formats_unknown_to_an_engine_are_refused():
    plain = layers(mlp__down_proj={})
    with pytest.raises(
        CheckpointError, match=r"sglang does not run ouro: its fallback to transformers breaks"
    ):
        check_engine("sglang", "gptq", plain, "ouro")
    with pytest.raises(CheckpointError, match=r"llama\.cpp does not run huginn: no support is known"):
        check_engine("llama.cpp", "gguf", plain, "huginn")
    with pytest.raises(
        CheckpointError, match=r"vllm reads native, compressed-tensors, gptq, modelopt, not gguf"
    ):
        check_engine("vllm", "gguf", plain, None)


def test_the_tables_name_known_systems_engines_and_formats():
    systems = {name for name, system in SYSTEMS if system.__module__.startswith("loopq.")}
    assert systems == KNOWN
    assert not set(NOWHERE) & {system for entry in ENTRIES for system in entry.systems}
    assert all(set(entry.formats) <= set(READS[entry.engine]) for entry in ENTRIES)
    for rule in rules():
        assert all(set(rule.formats) & set(READS[engine]) for engine in rule.engines)


@pytest.mark.parametrize("test", sorted({entry.test for entry in ENTRIES if entry.test}))
def test_an_entry_names_a_test_that_there_is(test):
    file, _, name = test.partition("::")
    assert f"def {name}(" in (_DOCS.parent / file).read_text("utf-8")


def test_what_no_engine_reads_right_is_refused_with_every_reason():
    plain = layers(mlp__down_proj={})
    assert readers("compressed-tensors", plain, "dory", {"model_type": "dory"}) == ("transformers", "vllm")
    with pytest.raises(CheckpointError) as error:
        readers("compressed-tensors", plain, "looped", {"model_type": "olmoe"})
    for engine in ("transformers", "vllm", "sglang"):
        assert f"{engine} does not run looped (olmoe)" in str(error.value)
    assert "--force" in str(error.value)
    looped = {"model_type": "loopq_looped", "looped_base": "llama"}
    assert "vllm" in readers("compressed-tensors", plain, "looped", looped)
    with pytest.raises(CheckpointError, match=r"as initialised.* without an error\. vllm can read gptq"):
        readers("gptq", plain, "dory", {"model_type": "dory"})
    with pytest.raises(CheckpointError, match="no engine reads gptq"):
        readers("gptq", plain, "parcae", {"model_type": "parcae"})


def test_a_model_without_a_type_is_opened_by_no_engine():
    with pytest.raises(CheckpointError, match="vllm opens a model by the model_type"):
        readers("compressed-tensors", layers(mlp__down_proj={}), "generic", {})


def test_a_format_that_no_engine_opens_is_refused(monkeypatch):
    monkeypatch.setitem(FORMATS._entries, "mine", FORMATS.get("gptq"))
    plain = layers(mlp__down_proj={})
    with pytest.raises(
        CheckpointError, match="no engine reads mine of this model right: none opens the format"
    ):
        readers("mine", plain, "generic", {"model_type": "llama"})


def test_embedded_models_are_loopqs_own():
    plain = layers(mlp__down_proj={})
    assert readers("native", plain, "parcae", {}) == ()
    embedded = {"model_type": "loopq-zoo-parcae"}
    assert readers("gptq", plain, "parcae", embedded) == readers("modelopt", plain, "parcae", embedded) == ()
    with pytest.raises(CheckpointError, match=r"vllm does not run huginn \(loopq-zoo-huginn\): no support"):
        check_engine("vllm", "native", plain, "huginn", {"model_type": "loopq-zoo-huginn"})
    # loopq does not read GGUF.
    with pytest.raises(CheckpointError, match=r"llama\.cpp does not run parcae"):
        readers("gguf", plain, "parcae", embedded)
    # Another package's system is tried by the engines themselves.
    assert readers("gptq", plain, "mine", {"model_type": "mine"}) == (
        "transformers",
        "vllm",
        "sglang",
        "gptqmodel",
    )


def test_the_page_is_what_the_rules_print():
    spec = importlib.util.spec_from_file_location("engines_page", _DOCS / "engines.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert (_DOCS / "formats" / "engines.md").read_text("utf-8") == module.page()


@pytest.mark.parametrize(
    ("engine", "form", "config", "match"),
    [
        (
            "transformers",
            "compressed-tensors",
            {"looped_base": "gpt_bigcode"},
            "weights that packed layers do",
        ),
        (
            "transformers",
            "compressed-tensors",
            {"looped_base": "llava", "text_config": {}},
            "multimodal model",
        ),
        ("gptqmodel", "gptq", {"looped_base": "phi3"}, "other names of fused layers"),
        ("gptqmodel", "gptq_v2", {"looped_base": "gpt_oss"}, "other ones, or not finite"),
    ],
)
def test_loops_of_classes_that_an_engine_reads_wrong_are_refused(engine, form, config, match):
    plain = layers(mlp__down_proj={})
    known = {"model_type": "loopq_looped", "looped_layers": [1, 2, 2], "auto_map": {}, **config}
    with pytest.raises(CheckpointError, match=match):
        check_engine(engine, form, plain, "looped", known)
    llama = {**known, "looped_base": "llama"}
    llama.pop("text_config", None)
    check_engine(engine, form, plain, "looped", llama)
