"""Names that a model's files have for its tensors; most have its own."""

from __future__ import annotations

from torch import nn

from loopq.storage.model_files import is_streamed, model_tensors, set_source
from loopq.storage.names import Names, names_of, set_names


class _Upper(Names):
    def in_file(self, name):
        return name.upper()

    def stored(self, model, state):
        return {name.upper(): tensor for name, tensor in state.items()}


def test_a_model_has_its_own_names_unless_others_are_set():
    model = nn.Linear(2, 3)
    assert set(model_tensors(model)[0]) == {"weight", "bias"}
    set_names(model, _Upper())
    assert names_of(model).in_file("weight") == "WEIGHT"
    assert set(model_tensors(model)[0]) == {"WEIGHT", "BIAS"}
    assert not is_streamed(model)
    set_source(model, {})
    assert is_streamed(model)
    assert model_tensors(model) == ({}, {})
