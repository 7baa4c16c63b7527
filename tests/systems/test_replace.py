"""Weights that are replaced for a while."""

from __future__ import annotations

import pytest
import torch

from loopq.api import weights_of
from loopq.checkpoint import native as store
from loopq.systems.replace import replaced


def test_replaced_weights_come_back_also_after_an_error(loaded, checkpoint_folder):
    before = {k: v.clone() for k, v in loaded.model.state_dict().items()}
    with (
        pytest.raises(RuntimeError),
        replaced(loaded.system, weights_of(store.read(checkpoint_folder))),
    ):
        raise RuntimeError
    assert all(torch.equal(v, before[k]) for k, v in loaded.model.state_dict().items())
