"""Laws of every kind of grid: one suite over all of them. A new kind adds an entry to `MORE`."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import json

import numpy as np
import pytest
import torch

import loopq._native as native
from loopq.errors import CheckpointError, ConfigError
from loopq.layers.grid import Grid
from loopq.layers.grids import GRIDS, grid_of, without_kind
from loopq.layers.grids.table import UNEVEN
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.runtime.layout import Held
from loopq.runtime.linear import LAYOUTS, QuantLinear
from loopq.storage.files import RawTensor
from loopq.storage.schema import checked

ANY = ((-1, 8, 32), ("float16", "float32"))
ON_TRELLIS = {"state_bits": 8, "stream_rows": 5, "function": "1mad"}
#: Fields of a grid of a kind besides bits, groups and scales; the bits, groups and scales that it has.
MORE = {
    "integer": ({}, (2, 3, 4, 8), *ANY),
    "asymmetric": ({}, (2, 3, 4, 8), *ANY),
    "trellis": ({"trellis": ON_TRELLIS}, (2, 3, 4), *ANY),
    "table": ({"table": list(UNEVEN[4])}, (4,), *ANY),
    "mxfp4": ({}, (4,), (32,), ("float8_e8m0fnu",)),
    "nvfp4": ({"exponent": -11}, (4,), (16,), ("float8_e4m3fn",)),
    "gguf": ({"block": "q4_1"}, (4,), (32,), ("float16",)),
}
#: Kinds with zero points or offsets.
ASYMMETRIC = ("asymmetric", "gguf")
#: Entries of layers in files of before the kind was stored, besides bits, groups and scales.
BEFORE = {
    "integer": {"symmetric": True},
    "asymmetric": {"symmetric": False},
    "trellis": {"symmetric": True, "trellis": ON_TRELLIS},
    "table": {"symmetric": True, "levels": list(UNEVEN[4])},
    "mxfp4": {"symmetric": True, "mxfp4": {}},
    "nvfp4": {"symmetric": True, "nvfp4": {"exponent": -11}},
    "gguf": {"symmetric": False, "gguf": "q4_1"},
}
CASES = [(name, *case) for name, (_, *possible) in MORE.items() for case in itertools.product(*possible)]
over_grids = pytest.mark.parametrize(("name", "bits", "group_size", "scale_dtype"), CASES)
ROWS, COLUMNS = 13, 37


def columns_of(name):
    """Columns of a layer of a kind: types of GGUF have whole blocks."""
    return 64 if name == "gguf" else COLUMNS


def made(name, bits, group_size, scale_dtype):
    """A layer with codes at the outermost values."""
    description = {"bits": bits, "group_size": group_size, "scale_dtype": scale_dtype, **MORE[name][0]}
    grid = grid_of({"kind": name, "symmetric": name not in ASYMMETRIC, **description})
    rng = np.random.default_rng(bits)
    low, high = grid.limits
    columns = columns_of(name)
    codes = rng.integers(low, high + 1, (ROWS, columns)).astype(grid.dtype)
    codes.flat[:2] = low, high
    levels = (ROWS, grid.n_groups(columns))
    scales = rng.uniform(0.01, 0.2, levels).astype(np.float16).astype(np.float32)
    if scale_dtype == "float8_e4m3fn":
        mantissa, power = rng.integers(8, 16, levels), rng.integers(-20, -5, levels)
        scales = np.ldexp(mantissa.astype(np.float32), power)
    elif scale_dtype == "float8_e8m0fnu":
        scales = np.exp2(rng.integers(-9, 3, levels)).astype(np.float32)
    zeros = None if grid.symmetric else rng.integers(0, high + 1, levels).astype(grid.zeros_dtype)
    return QuantizedLayer("a.weight", grid, codes, scales, zeros)


def state_value(codes, row, column, grid):
    """The value of an entry on a trellis: docs/formats/trellis.md."""
    bits, (state_bits, stream) = grid.bits, (grid.trellis.state_bits, grid.trellis.stream_rows)
    first = row // stream * stream
    n, state = min(stream, ROWS - first), 0
    for back in range(-(-state_bits // bits) - 1, -1, -1):
        code = int(codes[first + (row - first - back) % n, column]) + grid.offset
        state = (state << bits | code) % 2**state_bits
    mixed = (34038481 * state + 76625530) % 2**32
    return (sum(mixed >> 8 * i & 255 for i in range(4)) - 510) / 128


def entry(layer, row, column):
    """The value of one code in float32."""
    group = column // layer.grid.width(layer.shape[1])
    scale = layer.scales[row, group]
    if not layer.grid.plain:
        return np.float32(state_value(layer.codes, row, column, layer.grid)) * scale
    if layer.grid.levels is not None:
        return layer.grid.levels[int(layer.codes[row, column]) + layer.grid.offset] * scale
    zero = 0 if layer.zeros is None else int(layer.zeros[row, group])
    if layer.grid.zeros_dtype is np.float32:
        return np.float32(int(layer.codes[row, column])) * scale + np.float32(zero)
    return np.float32(int(layer.codes[row, column]) - zero) * scale


def read(layer, tensors):
    """A layer from its description, as JSON gives it back, and tensors."""
    settings = checked(LayerSettings, json.loads(json.dumps(layer.settings())), "file")
    return QuantizedLayer.from_tensors(settings, TensorReader("file", tensors), {})


def test_every_kind_is_in_this_suite():
    assert {name for name, _ in GRIDS} == set(MORE)
    assert all(kind.name == name and not inspect.isabstract(kind) for name, kind in GRIDS)


def test_a_later_kind_is_always_named():
    description = {"name": "a.weight", "kind": "later", "bits": 4, "symmetric": True, "shade": 3}
    assert without_kind(description) == description


def test_no_field_of_a_kind_has_the_name_of_a_layers_entry():
    entries = {f.name for f in dataclasses.fields(LayerSettings)} | {"layers"}
    for name, kind in GRIDS:
        fields = {f.name for f in dataclasses.fields(kind)} - {f.name for f in dataclasses.fields(Grid)}
        assert not fields & entries, name


@pytest.mark.parametrize(
    ("name", "bits", "group_size", "scale_dtype"), [case for case in CASES if case[0] in BEFORE]
)
def test_files_without_a_kind_are_read(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    kept = ("name", "bits", "group_size", "scale_dtype", "orientation", "shape")
    # config.json has this form still.
    assert without_kind(layer.settings()) == {key: layer.settings()[key] for key in kept} | BEFORE[name]
    description = {key: layer.settings()[key] for key in kept} | BEFORE[name]
    again = QuantizedLayer.from_tensors(
        checked(LayerSettings, description, "file"), TensorReader("file", layer.tensors()), {}
    )
    assert again.grid == layer.grid
    assert again.same_as(layer)


@over_grids
def test_values_are_those_of_the_definition(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    expected = np.array(
        [[entry(layer, i, j) for j in range(layer.shape[1])] for i in range(ROWS)], np.float32
    )
    np.testing.assert_array_equal(layer.dequantize(), expected)


@over_grids
def test_a_file_gives_the_layer_back_in_the_counted_bytes(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    tensors = layer.tensors()
    again = read(layer, tensors)
    assert again.grid == layer.grid
    assert type(again.grid) is type(layer.grid)
    assert again.codes.dtype == layer.codes.dtype
    assert layer.same_as(again)
    assert layer.n_bytes == sum(t.data.size for n, t in tensors.items() if not n.endswith("weight_shape"))


@over_grids
def test_layouts_hold_codes_and_multiply_by_their_values(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    x = torch.randn(3, layer.shape[1], generator=torch.Generator().manual_seed(0))
    expected = x.double().numpy() @ layer.dequantize().astype(np.float64).T
    held = Held(*layer.shape, layer.grid)
    fitting = [layout for layout in LAYOUTS if LAYOUTS[layout].fits(held)]
    assert ("codes" in fitting) == layer.grid.plain
    assert ("lq-cpu" in fitting) == layer.grid.panels
    for layout in fitting:
        module = QuantLinear.from_layer(layer, layout=layout)
        assert torch.equal(module.codes(), torch.from_numpy(layer.codes))
        np.testing.assert_array_equal(module.dequantize().numpy(), layer.dequantize())
        np.testing.assert_allclose(module(x).numpy(), expected, rtol=1e-5, atol=1e-4)


@over_grids
def test_arrays_that_do_not_fit_are_refused(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    grid, (low, high) = layer.grid, layer.grid.limits
    grid.check(layer.codes, layer.scales, layer.zeros)
    wide = layer.codes.astype(np.int16)
    changes = [
        (wide, layer.scales, layer.zeros, "codes are int16"),
        (layer.codes[0], layer.scales, layer.zeros, rf"of shape \({layer.shape[1]},\)"),
        (layer.codes, layer.scales[:-1], layer.zeros, "scales of shape"),
        (
            layer.codes,
            layer.scales,
            None if layer.zeros is not None else np.zeros((1, 1), np.uint8),
            "zero points|offsets",
        ),
    ]
    if bits < 8:
        wide[0, 0] = high + 1
        changes.append((wide.astype(grid.dtype), layer.scales, layer.zeros, rf"lie in {low}\.\.{high}"))
    for codes, scales, zeros, match in changes:
        with pytest.raises(ConfigError, match=match):
            grid.check(codes, scales, zeros)


@over_grids
def test_a_file_of_another_grid_is_refused(name, bits, group_size, scale_dtype):
    layer = made(name, bits, group_size, scale_dtype)
    shape = RawTensor.of(np.array((ROWS, 5), dtype=np.int64))
    with pytest.raises(CheckpointError, match="weight_packed"):
        read(
            dataclasses.replace(layer, codes=layer.codes[:, :5]), layer.tensors() | {"a.weight_shape": shape}
        )


@over_grids
def test_solvers_of_plain_grids_refuse_the_others(name, bits, group_size, scale_dtype):
    grid, weight = made(name, bits, group_size, scale_dtype).grid, np.ones((2, 64), np.float32)
    if grid.plain:
        solved = native.rtn(weight, grid.core())
        grid.check(solved["codes"], solved["scales"], solved["zeros"])
    else:
        with pytest.raises(ConfigError, match="codes of a plain grid"):
            native.rtn(weight, grid.core())


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"bits": 5}, "bits must be one of"),
        ({"group_size": 0}, "group_size must be positive"),
        ({"scale_dtype": "int8"}, "scale_dtype must be one of"),
        ({"kind": "trellis", "symmetric": False, "trellis": ON_TRELLIS}, "symmetric is False"),
        ({"kind": "trellis", "bits": 8, "trellis": ON_TRELLIS | {"state_bits": 12}}, "Trellis.* for 8 bits"),
        ({"kind": "trellis", "trellis": ON_TRELLIS | {"state_bits": 5}}, "Trellis.* for 4 bits"),
        ({"kind": "trellis"}, "grid trellis: 'trellis' is missing"),
        ({"kind": "table", "table": [-8, 8]}, "4 bits, symmetric: true"),
        ({"kind": "table", "table": [-8, 8, 3]}, "ascending"),
        ({"kind": "table", "table": [-8, "8"]}, "grid table: table.*'8'"),
        ({"kind": "table", "bits": 3, "table": list(UNEVEN[4])}, "4 bits, symmetric"),
        ({"kind": "nvfp4", "exponent": 0}, "give --bits 4 --group-size 16"),
        ({"kind": "nvfp4", "exponent": 200}, "exponent: 200"),
        ({"kind": "mxfp4", "exponent": 0}, "grid mxfp4: 'exponent' is unknown"),
        ({"kind": "made_up"}, "unknown grid 'made_up'; known: asymmetric"),
        ({"kind": "gguf", "block": "q9_k"}, "block: 'q9_k'.*q4_k"),
        ({"kind": "gguf", "block": "q4_k", "symmetric": False}, "Q4_K has 4 bits, groups of 32"),
        ({"kind": "gguf", "block": "q4_k", "group_size": 32}, "symmetric is True; allowed: False"),
        # Of files without a kind.
        ({"made_up": 3}, "no grid has {'made_up': 3}; known: asymmetric"),
        ({"levels": [-8, 8, 3], "gguf": "q4_k"}, "no grid has"),
        ({"nvfp4": 3}, "nvfp4: .*an object"),
    ],
)
def test_grids_that_do_not_exist_are_refused(changes, match):
    given = {"bits": 4, "group_size": 8, "symmetric": True, "scale_dtype": "float16"} | changes
    with pytest.raises(ConfigError, match=match):
        grid_of(given)
