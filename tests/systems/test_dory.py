"""Dory: elastic depth, both kinds of cache, the names of whichever files it came from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import loopq
from loopq.models.check import check_model
from loopq.models.load import load_model
from loopq.runtime.generate import Decoder, Generation, generate
from loopq.systems.base import Batch
from tests.support import vendors
from tests.support.marks import slow_unless
from tests.support.vendors import check_round_trip, dory, logits, rename, tokens


@pytest.mark.parametrize("paired", slow_unless(bool, [True, False]))
def test_round_trip_keeps_the_files_names(paired: bool, tmp_path: Path) -> None:
    model = dory()
    model.save_pretrained(tmp_path / "dory")
    if paired:
        rename(tmp_path / "dory", vendors.paired)
    result = check_round_trip(tmp_path / "dory", tmp_path, levels="even")
    assert len(result.layers) == 4 * 8
    first = "backbone.layers.2.mixer.g_proj.weight" if paired else "backbone.layers.1.self_attn.g_proj.weight"
    assert first in result.layers
    written = loopq.export(result, tmp_path / "ct", "compressed-tensors", verify=False)
    assert written.difference == 0.0


def test_the_head_can_be_rounded_too(tmp_path: Path) -> None:
    dory(hidden_size=64).save_pretrained(tmp_path / "dory")
    result = check_round_trip(tmp_path / "dory", tmp_path, method="rtn", metric=None, descent=None, outside=8)
    assert {result.layers[n].grid.bits for n in ("lm_head.weight", "backbone.embeddings.weight")} == {8}


def test_every_depth_is_declared_and_run(tmp_path: Path) -> None:
    dory().save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    for depth in (1, 2, 4):
        report = check_model(loaded, n_steps=depth)
        assert report.ok, report.lines()
        assert {p.invocations for p in loaded.system.shared_parameters(depth)} == {1, depth}
    assert loaded.model.config.n_recurrent_loops == 3
    assert not torch.equal(logits(loaded), loaded.system.rollout(_batch(), 2))


def _batch() -> Batch:
    return Batch(torch.from_numpy(tokens(1)), (0,))


@pytest.mark.parametrize("mode", ["per_loop", "last_loop"])
def test_text_is_that_of_the_models_own_cache(mode: str, tmp_path: Path) -> None:
    model = dory(recurrent_kv_cache_mode=mode)
    model.save_pretrained(tmp_path)
    loaded = load_model(tmp_path)
    settings = Generation(n_tokens=8)
    decoder = Decoder(loaded.system, 3, settings)
    assert decoder.backend.name == "cache"
    prompt = tokens(1)[0].tolist()
    written = list(generate(loaded, prompt, decoder, settings))
    with torch.no_grad():
        expected = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)
    assert written == expected[0, len(prompt) :].tolist()
