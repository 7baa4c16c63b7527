"""A quantized layer and its tensors."""

from __future__ import annotations

import numpy as np

from loopq.layers.layer import LayerSettings, QuantizedLayer, TensorReader
from loopq.layers.transforms import ChannelScale
from loopq.storage.schema import checked
from tests.support.problems import correlated, solve


def test_layers_keep_their_transform_on_disk():
    rng = np.random.default_rng(2)
    weight, hessian = rng.normal(size=(8, 48)).astype(np.float32), correlated(rng, 48)
    turned = solve("gptq", weight, hessian, bits=3, group_size=16, rotation="random:32", rotation_seed=4)
    hessian[5] *= 100
    hessian[:, 5] *= 100
    scaled = solve("awq", weight, hessian, bits=3, group_size=16, symmetric=False)
    assert isinstance(scaled.transform, ChannelScale)
    for layer in (turned, scaled):
        settings = checked(LayerSettings, layer.settings(), "file")
        again = QuantizedLayer.from_tensors(settings, TensorReader("file", layer.tensors()), {})
        assert again.same_as(layer)
        np.testing.assert_array_equal(again.dequantize(), layer.dequantize())
        assert not again.same_as(solve("rtn", weight, None, bits=3, group_size=16))
