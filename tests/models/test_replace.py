"""Weights that are replaced for a while."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from loopq.formats import native as store
from loopq.formats.checkpoint import weights_of
from loopq.models.replace import placed, replaced
from loopq.storage.weights import ModelWeights
from tests.support.accelerator import DEVICE, accelerator


def test_replaced_weights_come_back_also_after_an_error(loaded, checkpoint_folder):
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    with (
        pytest.raises(RuntimeError),
        replaced(loaded.system, weights_of(store.read(checkpoint_folder))),
    ):
        raise RuntimeError
    assert all(torch.equal(v, before[k]) for k, v in loaded.model.state_dict().items())


def test_the_memory_of_the_weights_is_not_written_to(loaded, checkpoint_folder):
    given = weights_of(store.read(checkpoint_folder))
    stored = ModelWeights.of_model(loaded.model)
    name = next(iter(given))
    parameter = loaded.model.get_parameter(name)
    place, before = parameter.data_ptr(), stored.raw(name).data.copy()
    with replaced(loaded.system, given):
        np.testing.assert_array_equal(parameter.detach().numpy(), given[name])
        np.testing.assert_array_equal(stored.raw(name).data, before)
        with torch.no_grad():
            parameter.zero_()
    assert parameter.data_ptr() == place
    assert np.any(given[name])
    with torch.no_grad():
        parameter.zero_()
    assert not stored.raw(name).data.any()
    with pytest.raises(ValueError, match="read-only"):
        stored.raw(name).data[0] = 1


def test_weights_that_are_placed_are_put_in_without_a_copy(tiny):
    name = "transformer.adapter.weight"
    given = {name: np.ones(tuple(tiny.model.get_parameter(name).shape), np.float32)}
    assert placed(tiny.system, given) is given
    with accelerator():
        tiny.model.to(DEVICE)
        before = tiny.model.get_parameter(name).detach().clone()
        there = placed(tiny.system, given)
        assert there[name].device.type == DEVICE
        with replaced(tiny.system, there):
            parameter = tiny.model.get_parameter(name)
            assert parameter.data_ptr() == there[name].data_ptr()
            assert bool((parameter == 1).all())
        assert torch.equal(tiny.model.get_parameter(name), before)
