"""What a folder holds of a checkpoint: tied layers at each module, and a note of all that was done."""

from __future__ import annotations

import pytest

from loopq.errors import ConfigError
from loopq.formats.arrangement import arranged
from loopq.formats.fitting import StoredLayer

from ..support.checkpoints import checkpoint, layer


def test_a_tied_layer_is_there_for_each_of_its_modules():
    whole = checkpoint(layer(32, 32), layer(32, 64, name="c.weight"), ties={"head.weight": "a.b.weight"})

    def prepare(layers):
        return {name: StoredLayer(layer, ("cut",)) for name, layer in layers.items()}

    held = arranged(whole, prepare, {}, None)
    assert list(held.layers) == ["a.b", "head", "c"]
    assert held.layers["head"] is held.layers["a.b"] is whole.layers["a.b.weight"]
    assert held.notes == {"a.b.weight": ("cut", "tied: stored again for head"), "c.weight": ("cut",)}
    assert (held.joined, dict(held.dense)) == ([], dict(whole.dense))
    with pytest.raises(ConfigError, match="'published' is for"):
        arranged(whole, prepare, {"model_type": "made"}, "published")
