"""Small models with something wrong."""

from __future__ import annotations

import loopq
import loopq.terminal.progress

IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def quantized(model, **settings):
    return loopq.quantize(model, IDS, threads=1, **({"method": "rtn", "group_size": 8} | settings))
