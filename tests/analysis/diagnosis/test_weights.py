"""Weights that replace a system's own: refusals, orientation, parts."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.sections import feedback
from loopq.errors import ConfigError, NonFiniteError
from tests.support.looperrors import INT4, state_dict
from tests.support.looptoys import LinearSystem, numpy_rounder, under


def test_the_model_keeps_its_weights_while_another_has_new_ones(system):
    before = state_dict(system)
    with under(system, {"adapter.weight": np.zeros((6, 12), np.float32)}) as other:
        assert (other.model.adapter.weight == 0).all()
        assert other.model.table.weight is system.model.table.weight
        assert all((before[k] == v).all() for k, v in system.model.state_dict().items())
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_bad_weights_are_refused_before_anything_is_changed(system):
    before = state_dict(system)
    good = np.zeros((6, 12), np.float32)
    bad = np.zeros((6, 6), np.float32)
    bad[2, 3] = np.nan
    for new, error, text in [
        ({"adapter.weight": good, "head.weight": good}, ConfigError, "head.weight is not a shared parameter"),
        ({"adapter.weight": good, "core.weight": good}, ConfigError, r"shape \(6, 6\) is needed"),
        ({"adapter.weight": good, "core.weight": bad}, NonFiniteError, r"weight\[2, 3\]"),
    ]:
        with pytest.raises(error, match=text), under(system, new):
            pass
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())


def test_transposed_storage_is_written_transposed():
    class Conv1D(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.arange(18.0).reshape(6, 3))

    class Transposed(LinearSystem):
        def shared_parameters(self, n_steps):
            from loopq.systems.declare import declare

            return declare(self.model, [("conv", {"role": "mlp"})], n_steps)

    model = torch.nn.Module()
    model.conv = Conv1D()
    system = Transposed(model)
    (p,) = system.shared_parameters(1)
    assert (p.out_features, p.in_features) == (3, 6)
    np.testing.assert_array_equal(weights.weight_of(system, p), model.conv.weight.detach().numpy().T)
    new = np.random.default_rng(0).normal(size=(3, 6)).astype(np.float32)
    with under(system, {"conv.weight": new}, 1) as other:
        np.testing.assert_array_equal(other.model.conv.weight.detach().numpy(), new.T)
        np.testing.assert_array_equal(weights.weight_of(other, p), new)


def test_split_columns_partition_the_error(system):
    variants = feedback.split_weights(system, 8, INT4, numpy_rounder)
    assert set(variants) == {"all columns", "state columns", "embedding columns"}
    weight = weights.weight_of(system, system.shared_parameters(8)[0])
    parts = [variants[f"{b} columns"]["adapter.weight"] - weight for b in ("state", "embedding")]
    np.testing.assert_array_equal(parts[0][:, 6:], 0)
    np.testing.assert_array_equal(parts[1][:, :6], 0)
    np.testing.assert_allclose(sum(parts), variants["all columns"]["adapter.weight"] - weight, atol=1e-7)
