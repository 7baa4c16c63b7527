"""A dump of the tiny model."""

from __future__ import annotations

import pytest

from loopq.calibrate.collect import collect_rows
from tests.support.runs import job_of


@pytest.fixture
def dump(loaded, tokens, tmp_path):
    out = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), out, shard_batches=1)
    return out
