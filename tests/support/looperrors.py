"""A linear loop with errors in closed form."""

from __future__ import annotations

from loopq.quantizers.config import LayerConfig

INT4 = LayerConfig.of(bits=4, group_size=-1)


def state_dict(system):
    return {k: v.clone() for k, v in system.model.state_dict().items()}
