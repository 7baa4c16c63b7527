"""Runs that calibrate layer by layer."""

from __future__ import annotations

from loopq.run.config import QuantConfig
from tests.support.runs import run_of


def asked(**changes):
    return QuantConfig.of(
        **({"preset": "fast", "bits": 3, "group_size": 16, "rank_threshold": None} | changes)
    )


def prepared(tiny, tokens, threads=1, **changes):
    return run_of(tiny, tokens, asked(**changes), batch_size=5, threads=threads)
