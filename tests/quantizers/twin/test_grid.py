"""Values of codes, types of scales and their search in torch, against the core's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from loopq.errors import SolveError
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.twin import grid
from loopq.quantizers.twin.grid import Codes, refuse_scales

CPU = torch.device("cpu")


def codes_of(columns=32, signed=True, search="mse", **settings):
    grid_settings = LayerConfig.of(method="gptq", **settings).grid
    return Codes.of(grid_settings.make(), columns, search, signed, grid_settings.scale_bits, CPU)


@pytest.mark.parametrize("settings", [{"bits": 3}, {"bits": 3, "levels": "uneven"}])
def test_a_step_gives_its_code_and_ties_fall_as_in_the_core(settings):
    codes = codes_of(**settings)
    every = torch.arange(8.0)
    zero = torch.full((8,), float(codes.middle))
    steps = codes.step(every, zero)
    assert torch.equal(codes.code_of(steps, zero), every.to(torch.uint8))
    half = (steps[1:] + steps[:-1]).double() / 2
    code = codes.code(half, zero[1:].double())
    if codes.table is None:
        # To the even step.
        assert torch.equal(codes.step(code, zero[1:]), half.round())
    else:
        assert torch.equal(code, every[1:].double())


def test_the_code_on_the_other_side_is_missing_at_the_ends():
    codes = codes_of(bits=2)
    near, other, none = codes.two(torch.tensor([-2.4, -0.4, 0.4, 1.2]), torch.tensor(2.0))
    assert near.tolist() == [0, 2, 2, 3]
    assert none.tolist() == [True, False, False, True]
    assert other[~none].tolist() == [1, 3]


@pytest.mark.parametrize("bits", [None, 5, 1])
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "float32"])
def test_scales_are_rounded_half_to_even_to_the_kept_bits(kind, bits):
    codes = codes_of(scale_dtype=kind, scale_bits=bits)
    values = torch.tensor([1.0 + 2.0**-5, 1.0 + 3 * 2.0**-5, -0.3, 0.0, 7e-6], dtype=torch.float64)
    rounded = codes.rounded(values)
    kept = {"float16": 11, "bfloat16": 8, "float32": 24}[kind] if bits is None else bits
    mantissa, exponent = np.frexp(values.numpy())
    wanted = np.ldexp(np.round(mantissa * 2.0**kept) / 2.0**kept, exponent)
    small = kind == "float16"
    np.testing.assert_allclose(rounded[: 4 if small else 5], wanted[: 4 if small else 5], rtol=1e-7)


def test_candidates_that_are_tried_in_parts_give_the_same_scales(monkeypatch):
    codes = codes_of(bits=3, group_size=8)
    lines = codes.groups(torch.randn(2, 3, 32, dtype=torch.float64))
    weights = codes.groups(torch.rand(1, 1, 32, dtype=torch.float64))
    whole = codes.fit(lines, weights)
    monkeypatch.setattr(grid, "AT_ONCE", 1)
    parts = codes.fit(lines, weights)
    assert all(map(torch.equal, whole, parts))


def test_a_zero_group_has_a_scale_and_a_too_large_one_is_named():
    codes = codes_of(columns=4, group_size=2)
    lines = codes.groups(torch.tensor([[[0.0, 0.0, 1.0, 1e9]]], dtype=torch.float64))
    scale, zero = codes.fit(lines, torch.ones(1, 1, 2, 2, dtype=torch.float64))
    assert scale.tolist() == [[[1.0, math.inf]]]
    assert zero.tolist() == [[[8.0, 8.0]]]
    with pytest.raises(SolveError, match=r"layer a: the scale of row 0, group 1 .*float16"):
        refuse_scales(scale, ["a"], codes)
