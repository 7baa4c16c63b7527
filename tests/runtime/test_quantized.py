"""`install`: quantized modules in a model compute what the dequantized weights compute."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import CheckpointError, ConfigError, KernelError
from loopq.formats.checkpoint import Checkpoint
from loopq.layers.grids import even
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import Rotation
from loopq.models.replace import Replaced
from loopq.quantizers.config import Override
from loopq.runtime.linear import QuantLinear
from loopq.runtime.quantized import QuantEmbedding, install
from tests.support.linear import linear_of

ON_TRELLIS = OnTrellis(3, 8, "float16", Trellis(8, 512))


def layer(name="a.weight", symmetric=True):
    """A layer of 6 outputs and 20 inputs on a grid of 3 bits."""
    rng = np.random.default_rng(0)
    codes, zeros = rng.integers(0, 8, (6, 20)), rng.integers(0, 8, (6, 3)).astype(np.uint8)
    scales = rng.uniform(0.01, 0.2, (6, 3)).astype(np.float16).astype(np.float32)
    stored = (codes - 4).astype(np.int8) if symmetric else codes.astype(np.uint8)
    grid = even(bits=3, group_size=8, symmetric=symmetric, scale_dtype="float16")
    return QuantizedLayer(name, grid, stored, scales, None if symmetric else zeros)


def checkpoint(*layers):
    return Checkpoint({x.name: x for x in layers}, {}, {}, {})


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("rotated", [False, True])
def test_a_module_takes_the_place_of_a_linear_layer(symmetric, rotated):
    given = layer(symmetric=symmetric)
    if rotated:
        given = dataclasses.replace(given, transform=Rotation(20, "hadamard", 4))
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 6)})
    bias = model["a"].bias
    assert install(model, checkpoint(given)) == {}
    assert isinstance(model["a"], QuantLinear)
    x = torch.randn(4, 20, generator=torch.Generator().manual_seed(2))
    expected = torch.nn.functional.linear(x, torch.from_numpy(given.dequantize()), bias)
    torch.testing.assert_close(model["a"](x), expected, rtol=1e-4, atol=1e-4)


def test_a_module_is_replaced_under_all_its_names_only():
    inner = torch.nn.Linear(20, 6, bias=False)
    model = torch.nn.ModuleDict({"a": inner, "b": inner, "c": torch.nn.Embedding(6, 20)})
    assert install(model, checkpoint(layer())) == {}
    assert model["a"] is model["b"]
    assert isinstance(model["a"], QuantLinear)
    model["d"] = torch.nn.EmbeddingBag(6, 20)
    assert install(model, checkpoint(layer("d.weight"))) == {
        "d.weight": "held by EmbeddingBag, which is not nn.Linear"
    }


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_table_gives_rows_of_its_codes_in_the_models_type(symmetric, tied):
    given = layer("c.weight", symmetric)
    model = torch.nn.ModuleDict({"c": torch.nn.Embedding(6, 20), "head": torch.nn.Linear(20, 6, bias=False)})
    ties = {"head.weight": "c.weight"} if tied else {}
    assert install(model, dataclasses.replace(checkpoint(given), ties=ties)) == {}
    table = model["c"]
    assert isinstance(table, QuantEmbedding)
    assert (table.table is model["head"]) == tied
    values, ids = torch.from_numpy(given.dequantize()), torch.tensor([[5, 0, 5], [2, 3, 1]])
    assert torch.equal(table(ids), values[ids])
    assert torch.equal(table(ids.int()), values[ids])
    assert torch.equal(table.weight, values)
    assert table(ids[:, :0]).shape == (2, 0, 20)
    assert torch.equal(model.bfloat16()["c"](ids), values.bfloat16()[ids])
    with pytest.raises(ConfigError, match="a row's number: expected 0 to 5, got 6"):
        table(torch.tensor([6]))


def test_a_table_beside_a_kernels_head_has_its_own_codes():
    codes = np.random.default_rng(1).integers(-8, 8, (32, 64)).astype(np.int8)
    head = linear_of(codes, np.full((32, 2), 0.1, np.float32), 32, 4, layout="lq-w4")
    with pytest.raises(KernelError, match="have no rows"):
        QuantEmbedding(head, torch.float32)(torch.tensor([3]))
    table = QuantEmbedding(head, torch.float32).to(torch.bfloat16)
    assert head.layout == "lq-w4"
    assert torch.equal(table(torch.tensor([31, 3])), head.dequantize()[[31, 3]].bfloat16())


def test_tables_that_are_more_than_rows_keep_their_weights():
    model = torch.nn.ModuleDict({"c": torch.nn.Embedding(6, 20)})
    trellis = dataclasses.replace(layer("c.weight"), grid=ON_TRELLIS)
    reason = "rows of a table are read from codes on a plain grid, without a transform"
    assert install(model, checkpoint(trellis)) == {"c.weight": reason}
    assert type(model["c"]) is torch.nn.Embedding


def test_trellis_codes_are_multiplied_on_the_processor_alone():
    given = dataclasses.replace(layer(), grid=ON_TRELLIS)
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 6)})
    assert install(model, checkpoint(given)) == {}
    linear = model["a"]
    assert isinstance(linear, QuantLinear)
    assert np.array_equal(linear.dequantize().numpy(), given.dequantize())
    x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ torch.from_numpy(given.dequantize()).double().t() + linear.bias.double()
    torch.testing.assert_close(linear(x).double(), expected, rtol=1e-5, atol=1e-5)
    with pytest.raises(ConfigError, match="of INT3 on a trellis run on the processor, not on 'meta'"):
        linear.to("meta")

    elsewhere = torch.nn.ModuleDict({"a": torch.nn.Linear(20, 6, device="meta")})
    assert install(elsewhere, checkpoint(given)) == {
        "a.weight": "codes of INT3 on a trellis, whose products run on the processor"
    }
    assert isinstance(elsewhere["a"], torch.nn.Linear)


def test_an_unknown_or_misshapen_layer_is_refused():
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(24, 6)})
    with pytest.raises(CheckpointError, match=r"layer d\.weight: the model has no module"):
        install(model, checkpoint(layer("d.weight")))
    with pytest.raises(
        CheckpointError, match=r"layer a\.weight: of shape \[6, 20\], the model has \[6, 24\]"
    ):
        install(model, checkpoint(layer()))
    assert isinstance(model["a"], torch.nn.Linear)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gptq", "rotation": "hadamard:32"},
        {"method": "gptq-cd", "rotation": "random:24"},
        {"method": "awq", "symmetric": False},
    ],
)
def test_transforming_at_run_time_equals_folding_back(tiny, tokens, changes):
    overrides = (Override("*adapter*", changes),)
    result = loopq.quantize(tiny, tokens, method="gptq", bits=3, group_size=16, overrides=overrides)
    adapter = "transformer.adapter.weight"
    assert all((x.transform is not None) == (n == adapter) for n, x in result.layers.items())
    batch = next(tokens.batches(4))
    logits = tiny.system.rollout(batch, 3)
    with Replaced(tiny.system, {n: x.in_model_orientation() for n, x in result.layers.items()}) as other:
        folded = other.rollout(batch, 3)
    torch.testing.assert_close(rolled_out(tiny, result, batch), folded, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(folded, logits, atol=1e-3)


def test_a_rotation_at_eight_bits_leaves_the_model_as_it_was(tiny, tokens):
    result = loopq.quantize(tiny, tokens, bits=8, group_size=16, rotation="hadamard:16")
    batch = next(tokens.batches(4))
    difference = rolled_out(tiny, result, batch) - tiny.system.rollout(batch, 3)
    assert float(difference.abs().max()) < 0.05


def rolled_out(tiny, result, batch):
    """Three steps of a copy of the model that holds codes."""
    model = copy.deepcopy(tiny.model)
    assert install(model, result) == {}
    return type(tiny.system)(model).rollout(batch, 3)
