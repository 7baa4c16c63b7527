"""Operating points of a linear loop."""

from __future__ import annotations

from loopq.paper.diagnosis import stepmap
from loopq.quantizers.config import LayerConfig
from tests.support.looptoys import tokens

INT4 = LayerConfig.of(bits=4, group_size=-1)


def operating(system, n_tokens=3):
    (batch,) = tokens(n_prompts=1, n_tokens=n_tokens).batches(1)
    return batch, *stepmap.final_state(system, batch, 8)
