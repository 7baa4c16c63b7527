"""Stacks of experts in files of Inkling-2, in full precision and in NVFP4."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import CheckpointError
from loopq.formats.layouts import layout_of
from loopq.formats.layouts.inkling import stacked, unstacked
from loopq.storage.files import RawTensor
from tests.support.interop import models

STEM = "model.llm.layers.0.mlp.experts."
SHAPES = {"gate_proj": (6, 32), "up_proj": (6, 32), "down_proj": (32, 16)}


def experts(exponents=(0, 0), n=3):
    """Tensors of experts in NVFP4, whose gate and up have a power each, beside a norm."""
    rng, found = np.random.default_rng(0), {"norm.weight": RawTensor.of(np.ones(4, np.float32))}
    for e in range(n):
        for i, (part, shape) in enumerate(SHAPES.items()):
            weight = rng.normal(size=shape).astype(np.float32) * 0.1 * 4.0 ** exponents[min(i, 1)]
            name = f"{STEM}{e}.{part}.weight"
            layer = models.rounded(name, weight, bits=4, levels="nvfp4", group_size=16)
            found |= {k: t for k, t in layer.tensors().items() if not k.endswith("weight_shape")}
    return found


def dense(n=3):
    """Tensors of dense experts."""
    rng = np.random.default_rng(0)
    return {
        f"{STEM}{e}.{part}.weight": RawTensor.of(rng.normal(size=shape).astype(np.float32))
        for e in range(n)
        for part, shape in SHAPES.items()
    }


@pytest.mark.parametrize("make", [experts, dense])
def test_stacks_come_apart_into_the_same_tensors(make):
    tensors = make()
    found = stacked(tensors)
    assert not any(".experts.0." in name for name in found)
    again = unstacked(found)
    assert set(again) == set(tensors)
    for name, tensor in tensors.items():
        assert (again[name].dtype, again[name].shape) == (tensor.dtype, tensor.shape)
        assert np.array_equal(again[name].data, tensor.data)


def test_rows_of_gate_and_up_alternate():
    tensors = dense()
    both = stacked(tensors)[f"{STEM}w13_weight"].array()
    assert np.array_equal(both[2, 0::2], tensors[f"{STEM}2.gate_proj.weight"].array())
    assert np.array_equal(both[2, 1::2], tensors[f"{STEM}2.up_proj.weight"].array())


def test_transformers_own_loader_gives_the_dequantized_experts():
    loading = pytest.importorskip("transformers.core_model_loading")
    rng, name = np.random.default_rng(0), f"{STEM}0.down_proj.weight"
    layer = models.rounded(
        name, rng.normal(size=(32, 16)).astype(np.float32), bits=4, levels="nvfp4", group_size=16
    )
    found = stacked({f"{STEM}0.down_proj.{k.rpartition('.')[2]}": t for k, t in layer.tensors().items()})
    given = {}
    for end in ("", "_scale", "_amax", "_outer_scale_denominator"):
        value = torch.from_numpy(np.array(found[f"{STEM}w2_weight{end}"].array()))
        given[f"w{end}"] = value.view(torch.float8_e4m3fn) if end == "_scale" else value
    module = torch.nn.Module()
    module.register_parameter("x", torch.nn.Parameter(torch.zeros(1)))
    made = loading.Inkling2LoopDequantizeExperts().convert(given, list(given), ["x"], module, "x")["x"]
    assert np.array_equal(made[0].numpy(), layer.dequantize())


def test_experts_of_several_kinds_stay_apart():
    tensors = {**experts(), f"{STEM}1.up_proj.weight": dense()[f"{STEM}1.up_proj.weight"]}
    del tensors[f"{STEM}1.up_proj.weight_packed"]
    found = stacked(tensors)
    assert {
        f"{STEM}0.gate_proj.{k}" for k in ("weight_packed", "weight_scale", "weight_global_scale")
    } <= set(found)
    assert f"{STEM}w2_weight_scale" in found


def test_unlike_powers_of_gate_and_up_are_refused():
    with pytest.raises(CheckpointError, match="NVFP4 with different powers"):
        stacked(experts((0, 6)))


@pytest.mark.parametrize("broken", ["shape", "scale", "amax", "denominator"])
def test_broken_stacks_are_refused_by_name(broken):
    found = stacked(experts())
    key = f"{STEM}w13_weight"
    if broken == "shape":
        found[key] = RawTensor.of(found[key].array()[0])
    elif broken == "scale":
        del found[f"{key}_scale"]
    else:
        end = "_amax" if broken == "amax" else "_outer_scale_denominator"
        found[f"{key}{end}"] = RawTensor.of(np.zeros(3, np.float16))
    with pytest.raises(CheckpointError, match="w13_weight"):
        unstacked(found)


def test_both_models_have_the_layout():
    name = "model.llm.layers.1.controllers.attn.down_proj"
    for kind, inside in {"inkling2_loop_text": "model.", "inkling2_loop": "model.language_model."}.items():
        loaded = layout_of({"model_type": kind}).loaded([name])
        assert loaded == {name: f"{inside}layers.1.q_message_gate.down_proj"}
