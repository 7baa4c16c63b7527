"""Which way a run takes: open, closed, layer by layer."""

from __future__ import annotations

import loopq
from loopq.run.asymmetric import Asymmetric
from tests.support.asymmetric import asked, prepared


def test_the_public_function_runs_layer_by_layer(tiny, tokens):
    found = loopq.quantize(tiny, tokens, asked(), inputs="asymmetric", batch_size=5, threads=1)
    expected = prepared(tiny, tokens).solve(Asymmetric())
    assert all(found.layers[n].same_as(expected[n]) for n in expected)
