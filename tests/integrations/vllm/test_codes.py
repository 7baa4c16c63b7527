"""Native checkpoints over plain parts: each matrix of a layer keeps its own codes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import ConfigError
from loopq.formats.hf_folder import describe_layers
from tests.support.interop.models import rounded
from tests.support.vllm_parts import Head, Product


def test_matrices_of_one_layer_keep_their_own_codes(parts):
    codes = parts("codes")
    rng = np.random.default_rng(0)
    sizes = {"a.q_proj.weight": (16, 4), "a.k_proj.weight": (8, 2)}
    layers = [
        rounded(name, rng.normal(size=(n, 32)).astype(np.float32), bits=bits, group_size=16)
        for name, (n, bits) in sizes.items()
    ]
    config = codes.NativeConfig.from_config(describe_layers(layers, {}))
    config.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    layer = Product(32, 32, bias=False)
    method = config.get_quant_method(layer, "a.qkv_proj")
    with pytest.raises(ConfigError, match="qkv_proj: a native checkpoint is served by one process"):
        method.create_weights(layer, 32, [16, 8, 8], 64, 32, torch.float32)
    method.create_weights(layer, 32, [16, 8, 8], 32, 32, torch.float32)
    for shard, one in zip("qk", layers, strict=True):
        for name, tensor in one.tensors().items():
            place = getattr(layer, name.rpartition(".")[2])
            place.weight_loader(place, torch.from_numpy(tensor.array().copy()), shard)
    dense = torch.randn(8, 32)
    layer.weight.weight_loader(layer.weight, dense, "v")
    method.process_weights_after_loading(layer)
    x = torch.randn(5, 32)
    weight = torch.cat([*(torch.from_numpy(one.dequantize()) for one in layers), dense])
    torch.testing.assert_close(method.apply(layer, x), x @ weight.T, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(method.apply(layer, x, torch.ones(32)), x @ weight.T + 1, rtol=1e-4, atol=1e-4)
    assert isinstance(config.get_quant_method(layer, "b.o_proj"), codes.UnquantizedLinearMethod)
    assert config.get_quant_method(Head(4, 2), "b.head") is None
