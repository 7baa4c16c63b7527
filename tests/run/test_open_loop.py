"""Inputs of the full-precision rollout and its variants; memory limits and kills change no byte."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.errors import ConfigError
from tests.support.kills import Kill, Killer, counting
from tests.support.marks import slow_unless
from tests.support.runs import SETTINGS, digest


def test_memory_limit_means_more_passes_and_the_same_bytes(loaded, tokens, tmp_path, checkpoint_folder):
    out = tmp_path / "limited"
    loopq.quantize(loaded, tokens, out=out, batch_size=3, memory=140_000, threads=1, **SETTINGS)
    assert digest(out) == digest(checkpoint_folder)
    with pytest.raises(ConfigError, match=r"alone it takes 0\.10 MiB, above the limit"):
        loopq.quantize(loaded, tokens, batch_size=3, memory=1000, **SETTINGS)


@pytest.mark.parametrize(
    ("at", "rollouts"), slow_unless(lambda c: c[0] in (4, 14), [(0, 5), (4, 4), (9, 2), (11, 2), (14, 2)])
)
def test_a_killed_run_is_resumed(loaded, tokens, tmp_path, checkpoint_folder, monkeypatch, at, rollouts):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    out, seen = tmp_path / "killed", []
    # In both runs: the key of a run holds the code of the adapter.
    monkeypatch.setattr(type(loaded.system), "rollout", counting(type(loaded.system).rollout, seen))
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=out, batch_size=3, progress=Killer(at), **SETTINGS)
    assert not out.exists()
    seen.clear()
    loopq.quantize(loaded, tokens, out=out, batch_size=3, **SETTINGS)
    assert digest(out) == digest(checkpoint_folder)
    assert not list(tmp_path.glob(".killed*"))
    # Two of the estimate, and those of the four batches that no part on disk covers.
    assert len(seen) == rollouts


def test_choices_of_steps_really_differ(loaded, tokens):
    results = [loopq.quantize(loaded, tokens, steps=s, **SETTINGS) for s in ("first", "all", "1:")]
    name = "transformer.core_block.0.mlp.fc.weight"
    codes = [r.layers[name].codes for r in results]
    assert not np.array_equal(codes[0], codes[1])
    assert not np.array_equal(codes[1], codes[2])
