"""Experts in lists, and the modules that route rows to them."""

from __future__ import annotations

from torch import nn

from loopq.systems.routing import gates, routing_module
from tests.support.experts import routed_loop


def test_a_module_stands_in_the_list_nearest_to_it() -> None:
    model = routed_loop()
    assert routing_module(model, "block.experts.1.up_proj") == "block"
    assert routing_module(model, "block.mix") is None
    assert routing_module(model, "block.experts.1.up_proj", "block.experts") is None
    whole = nn.ModuleList([model])
    assert routing_module(whole, "0.block.mix", "0") is None
    assert gates(model, ["block"]).keys() == {"block.gate.weight"}
