"""Models with other weights in place of some."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from loopq.errors import CheckpointError
from loopq.formats import native as store
from loopq.formats.checkpoint import weights_of
from loopq.models.replace import Replaced, placed
from loopq.models.systems.generic import Generic
from loopq.storage.weights import ModelWeights
from tests.support.accelerator import DEVICE, accelerator


def test_other_weights_are_in_another_model_alone(loaded, checkpoint_folder):
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    given = weights_of(store.read(checkpoint_folder))
    with Replaced(loaded.system, given) as other:
        for name, parameter in other.model.named_parameters():
            if name in given:
                np.testing.assert_array_equal(parameter.detach().numpy(), given[name])
            else:
                assert parameter is loaded.model.get_parameter(name)
    assert all(torch.equal(v, before[k]) for k, v in loaded.model.state_dict().items())


def test_neither_memory_of_weights_is_written_to(loaded, checkpoint_folder):
    given = weights_of(store.read(checkpoint_folder))
    name = next(iter(given))
    parameter, before = loaded.model.get_parameter(name), loaded.model.get_parameter(name).detach().clone()
    with Replaced(loaded.system, given) as other, torch.no_grad():
        other.model.get_parameter(name).zero_()
    assert np.any(given[name])
    assert torch.equal(parameter, before)
    stored = ModelWeights.of_model(loaded.model)
    with pytest.raises(ValueError, match="read-only"):
        stored.raw(name).data[0] = 1


def test_modules_outside_of_tables_are_those_of_the_other_model():
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False)
            self.plain = (self.linear,)
            self.run = self.linear.forward
            self.embed_in = nn.Embedding(4, 3)

        def forward(self, ids):
            return self.run(self.plain[0](self.embed_in(ids)))

    system = Generic(Held())
    with Replaced(system, {"linear.weight": np.zeros((3, 3), np.float32)}) as other:
        assert not other.model(torch.arange(4)[None]).any()
    assert system.model(torch.arange(4)[None]).any()


def test_weights_that_are_placed_are_put_in_without_a_copy(tiny):
    name = "transformer.adapter.weight"
    given = {name: np.ones(tuple(tiny.model.get_parameter(name).shape), np.float32)}
    assert placed(tiny.system, given) is given
    with accelerator():
        tiny.model.to(DEVICE)
        there = placed(tiny.system, given)
        assert there[name].device.type == DEVICE
        with Replaced(tiny.system, there) as other:
            parameter = other.model.get_parameter(name)
            assert parameter.data_ptr() == there[name].data_ptr()
            assert bool((parameter == 1).all())


def test_weights_of_another_shape_are_refused(tiny):
    name = next(iter(tiny.system.shared_parameters(2))).name
    with pytest.raises(CheckpointError, match=r"weights of shape \[2, 3\], the model has"):
        Replaced(tiny.system, {name: np.zeros((2, 3), np.float32)})
