"""Scales of few significant bits: what is stored, and that codes were computed with it."""

from __future__ import annotations

import numpy as np
import pytest

import loopq._native as native
from loopq.errors import ConfigError
from loopq.quantizers.grid import GridSettings
from loopq.storage.files import float_to_raw
from tests.support import core

RNG = np.random.default_rng(5)
WEIGHT = RNG.standard_t(4, (48, 96)).astype(np.float32)
HESSIAN = np.cov(RNG.normal(size=(300, 96)) @ RNG.normal(size=(96, 96)), rowvar=False)


def shortened(values, bits):
    """Rounded to significant bits in double precision, half to even, by another way than the core's."""
    mantissa, exponent = np.frexp(values.astype(np.float64))
    return np.ldexp(np.round(np.ldexp(mantissa, bits)), exponent - bits)


@pytest.mark.parametrize(
    ("kind", "bits"),
    [("bfloat16", 5), ("bfloat16", 8), ("bfloat16", 1), ("float16", 8), ("float16", 11), ("float32", 3)],
)
def test_scales_keep_as_many_bits_as_asked(kind, bits):
    full = core.rtn(WEIGHT, bits=4, group_size=32, scale_dtype="float32")["scales"]
    short = core.rtn(WEIGHT, bits=4, group_size=32, scale_dtype=kind, scale_bits=bits)["scales"]
    np.testing.assert_array_equal(short, shortened(full, bits))


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize(("kind", "name", "width"), [("bfloat16", "BF16", 8), ("float16", "F16", 11)])
@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_code_times_scale_is_exact_in_sixteen_bits(bits, kind, name, width, method):
    settings = {"bits": bits, "group_size": 32, "scale_dtype": kind, "scale_bits": width + 1 - bits}
    if method == "rtn":
        result = core.rtn(WEIGHT, **settings)
    else:
        mu = np.full(len(HESSIAN), 0.01 * np.diag(HESSIAN).mean())
        result = core.gptq(WEIGHT, native.DampedFactor(HESSIAN, mu), **settings)
    values = core.dequantize(result["codes"], result["scales"], None, 32)
    np.testing.assert_array_equal(float_to_raw(values, name).float32(), values)
    # One bit more makes some product round, so the bound is tight.
    settings["scale_bits"] = width + 2 - bits
    more = core.rtn(WEIGHT, **settings)
    values = core.dequantize(more["codes"], more["scales"], None, 32)
    assert bits == 2 or not np.array_equal(float_to_raw(values, name).float32(), values)


def test_codes_are_the_nearest_for_the_stored_scales():
    result = core.rtn(WEIGHT, bits=4, group_size=32, scale_dtype="bfloat16", scale_bits=5)
    scales = np.repeat(result["scales"].astype(np.float64), 32, axis=1)
    nearest = np.clip(np.round(WEIGHT.astype(np.float64) / scales), -8, 7)
    np.testing.assert_array_equal(result["codes"], nearest)


def test_settings():
    with pytest.raises(ConfigError, match="between 1 and 8, the significant bits of bfloat16"):
        GridSettings(scale_dtype="bfloat16", scale_bits=9)
    for kind, wrong, match in (
        ("bfloat16", 9, "scale_bits"),
        ("bfloat16", 0, "scale_bits"),
        ("int8", 3, "scale_dtype"),
    ):
        with pytest.raises(ConfigError, match=match):
            core.rtn(WEIGHT, bits=4, group_size=32, scale_dtype=kind, scale_bits=wrong)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("search", ["max", "mse"])
def test_a_short_last_group_has_the_scale_of_its_real_columns(symmetric, search):
    settings = {"bits": 4, "symmetric": symmetric, "scale_search": search}
    whole = core.rtn(np.ascontiguousarray(WEIGHT[:, :80]), group_size=32, **settings)
    last = core.rtn(np.ascontiguousarray(WEIGHT[:, 64:80]), group_size=-1, **settings)
    np.testing.assert_array_equal(whole["scales"][:, 2:], last["scales"])
    np.testing.assert_array_equal(whole["codes"][:, 64:], last["codes"])
    if not symmetric:
        np.testing.assert_array_equal(whole["zeros"][:, 2:], last["zeros"])
