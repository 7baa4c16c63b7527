"""Checkpoints that were changed, by accident or on purpose: one line each, and nothing read or written outside."""

from __future__ import annotations

import json

import pytest

from loopq.errors import CheckpointError, LoopqError
from loopq.formats.convert import read_any, write_as
from loopq.formats.record import RECORD
from loopq.storage.files import (
    read_json,
    read_tensors,
)

from ..soak.files import FINE, campaign, checkpoints
from ..support.checkpoints import checkpoint, layer


@pytest.mark.parametrize("n", [60, pytest.param(1500, marks=pytest.mark.slow)])
def test_campaign(n):
    counts = campaign([checkpoints], range(n))
    assert counts.failures == []
    assert counts.outcomes.pop("ms at most") > 0
    assert sum(counts.outcomes.values()) == n
    assert counts.outcomes["refused"] > n // 2
    assert set(counts.outcomes) <= set(FINE)
    assert n < 1500 or set(counts.outcomes) == set(FINE)


def test_shards_outside_the_folder_are_refused(tmp_path):
    write_as(tmp_path / "g", checkpoint(layer(8, 32)), "gptq")
    (tmp_path / "g" / RECORD).unlink()
    names = read_tensors(tmp_path / "g" / "model.safetensors")
    (tmp_path / "g" / "model.safetensors").rename(tmp_path / "x.safetensors")
    (tmp_path / "g" / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "../x.safetensors")})
    )
    with pytest.raises(
        CheckpointError, match=r"weight_map\.\S+: '\.\./x\.safetensors'; allowed: a plain name"
    ):
        read_any(tmp_path / "g")


@pytest.mark.parametrize(
    ("version", "match"),
    [(2, "altered: its sha256 is not that of its content"), (1, "version 1; this loopq reads version 2")],
)
def test_an_index_without_its_sum_is_refused_in_any_version(tmp_path, version, match):
    write_as(tmp_path / "q", checkpoint(layer(8, 32)), "native")
    index = tmp_path / "q" / "loopq.json"
    data = read_json(index)
    assert (data["version"], len(data.pop("sha256"))) == (2, 64)
    index.write_text(json.dumps(data | {"version": version}))
    with pytest.raises(CheckpointError, match=match):
        read_any(tmp_path / "q")


def test_every_change_of_one_bit_of_the_index_is_noticed(tmp_path):
    write_as(tmp_path / "q", checkpoint(layer(8, 32)), "native")
    path = tmp_path / "q" / "loopq.json"
    original = path.read_bytes()
    for place in range(len(original)):
        changed = bytearray(original)
        changed[place] ^= 1 << (place % 7)
        path.write_bytes(changed)
        try:
            same = read_json(path) == json.loads(original)
        except LoopqError:
            continue
        if not same:  # white space of another kind is the same content
            with pytest.raises(CheckpointError):
                read_any(tmp_path / "q")
