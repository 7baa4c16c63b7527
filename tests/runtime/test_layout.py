"""The interface of layouts: every backend keeps it."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from loopq.models.coded import Activations
from loopq.runtime.layout import Held, Layout, PackedLayer
from loopq.runtime.linear import LAYOUTS, QuantLinear
from tests.support.checkpoints import layer


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_methods_of_a_backend(name):
    backend = LAYOUTS[name]
    assert set(backend.devices) <= {"cpu", "cuda", "meta"}
    for method in ("fits", "pack", "unpack", "rows", "multiply"):
        expected = list(inspect.signature(getattr(Layout, method)).parameters)[1:]
        assert list(inspect.signature(getattr(backend, method)).parameters) == expected, method


def test_a_quantized_layer_has_what_a_layout_reads():
    module = QuantLinear.from_layer(layer(8, 64))
    assert all(hasattr(module, name) for name in PackedLayer.__annotations__)
    assert module.held == Held(8, 64, module.held.grid)
    assert module.activations in get_args(Activations)
