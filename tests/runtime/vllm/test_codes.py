"""Native checkpoints over plain parts: each matrix of a layer keeps its own codes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from loopq.errors import CheckpointError, ConfigError
from loopq.formats.native import describe_layers
from loopq.layers.grids.trellis import OnTrellis, Trellis
from loopq.layers.layer import QuantizedLayer
from loopq.layers.transforms import Rotation
from tests.support.interop.models import rounded
from tests.support.vllm_parts import Head, Product, Table

ROWS = {"q": 16, "k": 8, "v": 8}


def _layer(name, n, bits=4, **more):
    weight = np.random.default_rng(n).normal(size=(n, 32)).astype(np.float32)
    return rounded(name, weight, **{"bits": bits, "group_size": 16, **more})


def _trellis(name, n):
    on = OnTrellis(2, 32, "float16", Trellis(6, 8))
    codes = np.random.default_rng(n).integers(-2, 2, (n, 32)).astype(np.int8)
    layer = QuantizedLayer(name, on, codes, np.full((n, 1), 0.25, np.float32), None)
    return layer.with_transform(Rotation(32, "hadamard", 4))


@pytest.fixture
def method(parts):
    """What loads the codes of some layers into one layer of vLLM, and that layer."""

    def take(layer, prefix, layers, ties=None, dtype=torch.float32, rows=(16, 8, 8)):
        codes = parts("codes")
        config = codes.NativeConfig.from_config(describe_layers(layers, ties or {}))
        config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
        found = config.get_quant_method(layer, prefix)
        found.create_weights(layer, 32, list(rows), 32, sum(rows), dtype)
        return found

    return take


def _load(layer, tensors, shard=None):
    for name, tensor in tensors.items():
        place = getattr(layer, name.rpartition(".")[2])
        place.weight_loader(
            place, torch.from_numpy(tensor.array().copy()), *([] if shard is None else [shard])
        )


def _fused(method, kinds, dtype=torch.float32):
    """A loaded matrix of q, k and v, and its weight."""
    layer = Product(32, 32, bias=False)
    coded = {s: make(f"a.{s}_proj.weight", ROWS[s]) for s, make in kinds.items()}
    taken = method(layer, "a.qkv_proj", [*coded.values()], dtype=dtype)
    weights = []
    for shard, n in ROWS.items():
        if shard in coded:
            _load(layer, coded[shard].tensors(), shard)
            weights.append(torch.from_numpy(coded[shard].dequantize()))
        else:
            weights.append(torch.randn(n, 32).to(dtype).float())
            layer.weight.weight_loader(layer.weight, weights[-1].to(dtype), shard)
    taken.process_weights_after_loading(layer)
    return taken, layer, torch.cat(weights)


MIXED = {
    "bits, and one dense": {"q": _layer, "k": lambda name, n: _layer(name, n, 2)},
    "formats": {
        "q": lambda name, n: _layer(name, n, 2, levels="uneven"),
        "k": lambda name, n: _layer(name, n, 3, symmetric=False),
        "v": _trellis,
    },
    "trellis settings": {
        "q": _trellis,
        "k": lambda name, n: dataclasses.replace(_trellis(name, n), transform=None),
        "v": lambda name, n: _trellis(name, n).with_transform(Rotation(32, "random", 8)),
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kinds", MIXED)
def test_matrices_of_one_layer_keep_their_own_codes(method, kinds, dtype):
    taken, layer, weight = _fused(method, MIXED[kinds], dtype)
    x, within = torch.randn(5, 32).to(dtype), {"rtol": 0.02, "atol": 0.05}
    within = within if dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    out = taken.apply(layer, x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), x.float() @ weight.T, **within)
    more = taken.apply(layer, x, torch.ones(32, dtype=dtype))
    torch.testing.assert_close(more.float(), x.float() @ weight.T + 1, **within)


def test_a_file_may_hold_the_matrices_of_a_layer_as_one(method):
    layer, coded = Product(32, 32, bias=False), _layer("a.Wqkv.weight", 32)
    taken = method(layer, "a.Wqkv", [coded])
    _load(layer, coded.tensors())
    taken.process_weights_after_loading(layer)
    x, weight = torch.randn(5, 32), torch.from_numpy(coded.dequantize())
    torch.testing.assert_close(taken.apply(layer, x), x @ weight.T, rtol=1e-4, atol=1e-4)


def test_layers_without_codes_are_vllms_own(parts):
    codes = parts("codes")
    config = codes.NativeConfig.from_config(describe_layers([_layer("a.q_proj.weight", 16)], {}))
    config.packed_modules_mapping = {}
    assert isinstance(config.get_quant_method(Product(32, 32), "b.o_proj"), codes.UnquantizedLinearMethod)
    assert config.get_quant_method(Head(4, 2), "b.head") is None
    assert config.get_quant_method(nn.Module(), "b.attn") is None


def test_a_layer_that_is_divided_is_refused_by_name(method):
    taken = method(Product(32, 32, bias=False), "a.qkv_proj", [_layer("a.q_proj.weight", 16)])
    for part, rows in ((16, [16, 8, 8]), (32, [8, 4, 4])):
        with pytest.raises(ConfigError, match="qkv_proj: a native checkpoint is served by one process"):
            taken.create_weights(Product(32, 32), part, rows, 32, 32, torch.float32)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("make", [lambda name, n: _layer(name, n, 8, orientation="table"), "trellis"])
@pytest.mark.parametrize("prefix", ["model.embed_tokens", ""])
def test_a_table_gives_rows_and_the_logits_of_a_tied_head(method, tied, make, prefix):
    name = "model.embed_tokens.weight"
    trellis = dataclasses.replace(_trellis(name, 24), orientation="table")
    coded = trellis if make == "trellis" else make(name, 24)
    layer = Table(24, 32)
    # vLLM pads its tables, and Llama's class does not name its table.
    taken = method(layer, prefix, [coded], {"lm_head.weight": name} if tied else {}, rows=(64,))
    _load(layer, coded.tensors())
    taken.process_weights_after_loading(layer)
    ids, weight = torch.tensor([3, 0, 23]), torch.from_numpy(coded.dequantize())
    torch.testing.assert_close(taken.embedding(layer, ids), weight[ids], rtol=1e-5, atol=1e-5)
    if tied:
        x = torch.randn(5, 32)
        assert taken.tie_weights(Head(24, 32), layer) is layer
        torch.testing.assert_close(taken.apply(layer, x), x @ weight.T, rtol=1e-4, atol=1e-4)


def _without(last):
    return lambda tensors: {n: t for n, t in tensors.items() if not n.endswith(last)}


def _nan(tensors):
    changed = {n: t.array().copy() for n, t in tensors.items()}
    next(v for n, v in changed.items() if n.endswith("weight_scale"))[0, 0] = np.nan
    return {n: SimpleNamespace(array=lambda v=v: v) for n, v in changed.items()}


def _cut(tensors):
    return {
        n: SimpleNamespace(array=lambda t=t, n=n: t.array()[: 8 if n.endswith("weight_packed") else None])
        for n, t in tensors.items()
    }


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (_without("weight_scale"), r"a\.q_proj\.weight_scale' is missing"),
        (_without("weight_shape"), r"a\.q_proj\.weight_shape' is missing"),
        (_without("weight_packed"), r"a\.q_proj\.weight_packed' is missing"),
        (_nan, r"a\.q_proj\.weight_scale' holds a scale that is zero or not finite"),
        (_cut, r"a\.q_proj\.weight_packed' is I32 \[8, 4\]"),
        (lambda _: _layer("a.q_proj.weight", 24).tensors(), r"a\.q_proj\.weight: of shape \[24, 32\]"),
    ],
)
def test_damaged_tensors_are_refused_by_name(method, change, match):
    layer, coded = Product(32, 32, bias=False), _layer("a.q_proj.weight", 16)
    taken = method(layer, "a.qkv_proj", [coded])
    _load(layer, change(coded.tensors()), "q")
    for shard in "kv":
        layer.weight.weight_loader(layer.weight, torch.randn(8, 32), shard)
    with pytest.raises(CheckpointError, match=match):
        taken.process_weights_after_loading(layer)


@pytest.mark.parametrize(
    ("dense", "match"), [(None, "'a.k_proj.weight' is missing"), (torch.randn(4, 32), r"F32 \[4, 32\]")]
)
def test_a_dense_part_is_refused_by_name(method, dense, match):
    layer, coded = Product(32, 32, bias=False), _layer("a.q_proj.weight", 16)
    taken = method(layer, "a.qkv_proj", [coded])
    _load(layer, coded.tensors(), "q")
    if dense is not None:
        layer.weight.weight_loader(layer.weight, dense, "k")
    with pytest.raises(CheckpointError, match=match):
        taken.process_weights_after_loading(layer)


def test_codes_without_a_place_in_vllm_are_refused(method, parts):
    layer = Product(32, 16, bias=False)
    coded = [_layer(f"a.{name}.weight", 16) for name in ("o_proj", "gate")]
    taken = method(layer, "a.o_proj", coded, rows=(16,))
    _load(layer, coded[0].tensors())
    with pytest.raises(ConfigError, match=r"layer a\.gate\.weight: vLLM's class of the model has no place"):
        taken.process_weights_after_loading(layer)
    experts = [_layer(f"mlp.experts.{i}.up_proj.weight", 16) for i in (0, 1)]
    config = parts("codes").NativeConfig.from_config(describe_layers(experts, {}))
    with pytest.raises(ConfigError, match=r"layer mlp\.experts\.0\.up_proj\.weight: vLLM's class"):
        config.get_quant_method(nn.Module(), "mlp.experts")


def test_names_of_vllm_are_taken_over(method, parts):
    config = parts("codes").NativeConfig.from_config(
        describe_layers([_layer("a.q_proj.weight", 16)], {"b.weight": "a.q_proj.weight"})
    )
    rename = {"a.q_proj.weight": "c.q_proj.weight", "b.weight": "d.weight"}
    config.apply_vllm_mapper(
        SimpleNamespace(
            apply_dict=lambda x: {rename[k]: v for k, v in x.items()},
            apply_list=lambda x: [rename[k] for k in x],
        )
    )
    assert config.left == {"c.q_proj.weight"}
    assert {*config.grids} == {"c.q_proj.weight", "d.weight"}


@pytest.mark.parametrize("loop", [None, [1, 3, 2]])
@pytest.mark.parametrize("name", ["Qwen2ForCausalLM", "LoopedQwen2ForCausalLM"])
def test_a_loop_that_a_class_would_run_once_is_refused(parts, loop, name):
    config = parts("codes").NativeConfig({})
    config.maybe_update_config("m")
    read = SimpleNamespace(architectures=[name], looped_layers=loop)
    if loop and name == "Qwen2ForCausalLM":
        with pytest.raises(ConfigError, match="looped_layers beside the architectures"):
            config.maybe_update_config("m", read)
    else:
        config.maybe_update_config("m", hf_config=read)
