"""Types of GGUF: bytes equal llama.cpp's for codes of any solver; scales are whole numbers of units."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grids.blocks import KINDS, Blocks
from loopq.layers.grids.planes import Half
from loopq.layers.layer import QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.quantizers.base import Problem
from loopq.quantizers.gptq import GPTQ
from loopq.quantizers.gptq_cd import GPTQCD, MetricSettings
from loopq.quantizers.grid import GridSettings
from loopq.quantizers.rtn import RTN
from loopq.runtime.linear import QuantLinear
from loopq.storage.files import RawTensor

gguf = pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
over_kinds = pytest.mark.parametrize("kind", KINDS)


def by_package(grid, data):
    """The values of blocks by llama.cpp's own package."""
    return gguf.quants.dequantize(data, gguf.GGMLQuantizationType[grid.gguf.name])


def problem(kind, rows=12, columns=512):
    """A weight of heavy tails and inputs of low rank."""
    rng = np.random.default_rng(7)
    weight = (rng.standard_t(4, (rows, columns)) * 0.03).astype(np.float32)
    inputs = rng.normal(size=(600, columns // 8)) @ rng.normal(size=(columns // 8, columns))
    inputs += rng.normal(size=inputs.shape)
    return Problem("a.weight", weight, inputs.T @ inputs, GridSettings(levels=kind), threads=1)


def loss(asked, layer):
    """The loss of a layer."""
    error = layer.dequantize().astype(np.float64) - asked.target
    return float(np.einsum("ij,jk,ik->", error, asked.hessian, error))


@over_kinds
def test_every_solver_gives_blocks_that_stand_for_its_weights(kind):
    asked, losses = problem(kind), []
    for method in (RTN(), GPTQ(), GPTQCD(metric=MetricSettings("inputs"), beam=4)):
        layer = method.quantize(asked)
        layer.grid.check(layer.codes, layer.scales, layer.zeros)
        data = layer.grid.gguf_data(layer.codes, layer.scales, layer.zeros)
        assert np.array_equal(by_package(layer.grid, data), layer.dequantize())
        losses.append(loss(asked, layer))
    assert layer.report["proxy_settled"] < layer.report["proxy_swept"]
    assert losses[2] < 0.95 * losses[1] < 0.7 * losses[0]


@over_kinds
def test_any_blocks_are_read_as_by_the_package_and_written_again(kind):
    grid, rng = GridSettings(levels=kind).make(), np.random.default_rng(1)
    facts = grid.facts
    data = rng.integers(0, 256, (5, 4, facts.n_bytes), dtype=np.uint8)
    at = 0
    for what, plane in facts.parts:
        if isinstance(plane, Half):
            unit = (rng.uniform(0.001, 0.1, (5, 4, 1)) * rng.choice([-1, 1], (5, 4, 1))).astype("<f2")
            data[:, :, at : at + 2] = unit.view(np.uint8)
        at += plane.size(facts.count(what))
    data = data.reshape(5, -1)
    layer = QuantizedLayer("a.weight", grid, *grid.from_gguf(data))
    assert np.array_equal(layer.dequantize(), by_package(grid, data))
    again = grid.gguf_data(layer.codes, layer.scales, layer.zeros)
    assert np.array_equal(by_package(grid, again), layer.dequantize())
    # Products of float32 add in another order.
    x = torch.randn(3, layer.shape[1], generator=torch.Generator().manual_seed(0))
    expected = x.double().numpy() @ layer.dequantize().astype(np.float64).T
    product = QuantLinear.from_layer(layer)(x).numpy()
    np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())
    if grid.panels:
        product = QuantLinear.from_layer(layer, layout="lq-cpu")(x).numpy()
        np.testing.assert_allclose(product, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("kind", ["q4_1", "q5_0", "q5_1"])
def test_rounding_loses_less_than_the_package_does(kind):
    asked = problem(kind)
    layer = RTN().quantize(asked)
    theirs = gguf.quants.quantize(asked.target, gguf.GGMLQuantizationType[layer.grid.gguf.name])
    error = [np.square(x - asked.target).sum() for x in (layer.dequantize(), by_package(layer.grid, theirs))]
    assert error[0] < 0.95 * error[1]


@over_kinds
def test_weights_that_need_no_scale_and_those_too_large_for_one(kind):
    grid = GridSettings(levels=kind).make()
    weight = np.zeros((3, 256), np.float32)
    weight[1] = 0.25
    weight[2, ::7] = -1e-9
    solved = native.rtn(weight, grid.core())
    layer = QuantizedLayer("a.weight", grid, solved["codes"], solved["scales"], solved["zeros"])
    assert np.abs(layer.dequantize()[[0, 2]]).max() < 1e-8
    assert np.abs(layer.dequantize()[1] - 0.25).max() < 1e-3
    assert np.array_equal(
        by_package(grid, grid.gguf_data(layer.codes, layer.scales, layer.zeros)), layer.dequantize()
    )
    with pytest.raises(Exception, match="float16"):
        native.rtn(weight + np.float32(3e9) * (np.arange(256) % 3 - 1).astype(np.float32), grid.core())


def test_what_is_not_of_a_type_is_refused():
    grid = GridSettings(levels="q4_k").make()
    layer = RTN().quantize(problem("q4_k"))
    with pytest.raises(ConfigError, match=r"Q4_K has blocks of 256 weights, and 576 columns.*--layer"):
        grid.check_columns(576)
    with pytest.raises(CheckpointError, match="no whole numbers of a float16"):
        grid.gguf_data(layer.codes, layer.scales * np.float32(1.001), layer.zeros)
    with pytest.raises(ConfigError, match="offsets are uint8"):
        grid.check(layer.codes, layer.scales, layer.zeros.astype(np.uint8))
    with pytest.raises(ConfigError, match=r"leave --set scale_bits=\.\.\. out"):
        grid.core(scale_bits=4)
    with pytest.raises(ConfigError, match="leave --set symmetric=false out"):
        GridSettings(levels="q4_k", symmetric=False)
    with pytest.raises(
        ConfigError, match="'q4_k' has 4 bits and groups of 32; got bits 3: leave --bits away"
    ):
        GridSettings(3, levels="q4_k")
    with pytest.raises(ConfigError, match="Q4_K has 4 bits"):
        dataclasses.replace(grid, bits=3)
    data = layer.tensors()["a.weight_packed"].array().copy()
    data[0, 1] = 0xFC
    with pytest.raises(CheckpointError, match="not finite"):
        grid.read(TensorReader("f", {"a.weight_packed": RawTensor.of(data)}), "a", *layer.shape)
    assert isinstance(grid, Blocks)
