"""A rotated model computes what its folded weights compute, and full precision is unchanged by rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.config import LayerConfig, Override, QuantConfig
from loopq.errors import CheckpointError
from loopq.evaluate.transformed import folded, installed
from loopq.quantizers.arms import collect_all_steps, solve_arm
from loopq.systems.replace import replaced


def solved(tiny, tokens, layer, overrides=()):
    sums, selection = collect_all_steps(tiny.system, tokens)
    config = QuantConfig(layer, overrides=overrides, rank_threshold=None)
    return solve_arm(sums, selection, tiny.system, config, 1)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gptq", "rotation": "hadamard:32"},
        {"method": "full", "rotation": "random:24"},
        {"method": "awq", "symmetric": False},
    ],
)
def test_rotating_at_run_time_equals_folding_back(tiny, tokens, changes):
    layer = LayerConfig(method="gptq", bits=3, group_size=16)
    layers = solved(tiny, tokens, layer, (Override("*adapter*", changes),))
    adapter = "transformer.adapter.weight"
    assert all((x.transform is not None) == (n == adapter) for n, x in layers.items())
    batch = next(tokens.batches(4))
    own = tiny.system.rollout(batch, 3)
    with replaced(tiny.system, folded(layers)):
        plain = tiny.system.rollout(batch, 3)
    with installed(tiny.system, layers):
        turned = tiny.system.rollout(batch, 3)
    torch.testing.assert_close(turned, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(plain, own, atol=1e-3)
    torch.testing.assert_close(tiny.system.rollout(batch, 3), own, rtol=0, atol=0)


def test_rotation_at_eight_bits_leaves_the_model_as_it_was(tiny, tokens):
    layer = LayerConfig(method="gptq", bits=8, group_size=16, rotation="hadamard:16")
    layers = solved(tiny, tokens, layer)
    batch = next(tokens.batches(4))
    with installed(tiny.system, layers):
        turned = tiny.system.rollout(batch, 3)
    assert float((turned - tiny.system.rollout(batch, 3)).abs().max()) < 0.05


def test_a_layer_of_another_shape_is_refused(tiny, tokens):
    layers = solved(tiny, tokens, LayerConfig(method="rtn", bits=4, group_size=16))
    first, second = list(layers)[:2]
    assert layers[first].shape != layers[second].shape
    with pytest.raises(CheckpointError, match="of shape"), installed(tiny.system, {first: layers[second]}):
        pass
    assert np.isfinite(tiny.system.rollout(next(tokens.batches(1)), 3).numpy()).all()
