"""A rotated model computes what its folded weights compute, and full precision is unchanged by rotation."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.errors import CheckpointError
from loopq.evaluate.transformed import folded, installed
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.systems.replace import replaced
from tests.support.runs import run_of


def solved(tiny, tokens, *overrides, **changes):
    run = run_of(tiny, tokens, QuantConfig.of(*overrides, group_size=16, rank_threshold=None, **changes))
    return run.config.inputs.solve(run)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "gptq", "rotation": "hadamard:32"},
        {"method": "gptq-cd", "rotation": "random:24"},
        {"method": "awq", "symmetric": False},
    ],
)
def test_rotating_at_run_time_equals_folding_back(tiny, tokens, changes):
    layers = solved(tiny, tokens, Override("*adapter*", changes), bits=3)
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
    layers = solved(tiny, tokens, bits=8, rotation="hadamard:16")
    batch = next(tokens.batches(4))
    with installed(tiny.system, layers):
        turned = tiny.system.rollout(batch, 3)
    assert float((turned - tiny.system.rollout(batch, 3)).abs().max()) < 0.05


def test_a_layer_of_another_shape_is_refused(tiny, tokens):
    layers = solved(tiny, tokens, method="rtn", bits=4)
    first, second = list(layers)[:2]
    assert layers[first].shape != layers[second].shape
    with pytest.raises(CheckpointError, match="of shape"), installed(tiny.system, {first: layers[second]}):
        pass
    assert np.isfinite(tiny.system.rollout(next(tokens.batches(1)), 3).numpy()).all()
