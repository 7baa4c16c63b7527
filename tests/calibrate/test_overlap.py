"""Prompts of an evaluation that were calibration prompts."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.calibrate.data import TokenSet, from_ids, windows
from loopq.calibrate.overlap import Overlap
from loopq.errors import CheckpointError

IDS = np.random.default_rng(0).integers(0, 256, (8, 96))
TEXT = bytes(np.random.default_rng(1).integers(32, 127, 4096).astype(np.uint8)).decode()


def cut(
    seq_len: int, n_prompts: int | None = None, text: str = TEXT, first: tuple[int, ...] = ()
) -> TokenSet:
    """Cut windows of a text of bytes."""
    return windows(text, lambda t: list(t.encode()), seq_len, n_prompts, "a text", first)


def shared(evaluated: TokenSet, calibration: TokenSet) -> int:
    """Count the shared prompts."""
    seen = evaluated.overlap(calibration.describe())
    assert seen is not None
    assert (seen.sha256, seen.calibration_sha256) == (evaluated.digest(), calibration.digest())
    assert seen.n_prompts == len(evaluated.sequences)
    return seen.n_shared


def test_the_same_prompts_are_all_found_and_others_are_not():
    assert shared(from_ids(IDS), from_ids(IDS)) == 8
    assert shared(from_ids(IDS + 1), from_ids(IDS)) == 0
    assert shared(from_ids([*IDS[3:], *(IDS + 1)]), from_ids(IDS)) == 5
    ragged = [ids[: 40 + n] for n, ids in enumerate(IDS)]
    assert shared(from_ids([*ragged[:2], IDS[5] + 1]), from_ids(ragged)) == 2
    assert shared(from_ids([ids[::-1] for ids in IDS]), from_ids(IDS)) == 0


@pytest.mark.parametrize("first", [(), (7,)])
@pytest.mark.parametrize(("seq_len", "least"), [(128, 32), (128 + 64, 21), (512, 8)])
def test_a_text_is_found_in_windows_of_other_lengths(seq_len, least, first):
    calibration = cut(128, first=first)
    assert shared(cut(seq_len, first=first), calibration) >= least - 3
    assert shared(cut(seq_len, text=TEXT[::-1], first=first), calibration) == 0


def test_a_text_is_found_although_random_tokens_replaced_some():
    calibration = cut(128).with_random_tokens(0.05, np.arange(256))
    assert calibration.digest() != cut(128).digest()
    assert shared(cut(128, 4), calibration) == 4
    assert shared(cut(128), calibration.take(0, 4)) == 4


def test_the_parts_of_a_merged_dump_are_compared():
    parts = [from_ids(IDS[:4]).describe(), from_ids(IDS[4:]).describe()]
    seen = from_ids(IDS).overlap({"source": "merged", "parts": parts})
    assert seen == Overlap(from_ids(IDS).digest(), None, 8, 8)


def test_the_line_says_how_many():
    assert Overlap("a", "b", 8, 0).warning == ""
    assert Overlap("a", "b", 8, 5).warning.startswith("5 of 8 prompts")
    assert Overlap("a", "b", 8, 8).warning.startswith("these prompts")
    assert "warning" not in Overlap("a", "b", 8, 0).to_json()


def test_settings_of_other_tools_and_damaged_ones():
    assert from_ids(IDS).overlap(None) is None
    assert from_ids(IDS).overlap({"source": "x"}) is None
    facts = from_ids(IDS).describe()
    assert from_ids(IDS).overlap({k: v for k, v in facts.items() if k != "prompt_hashes"}).n_shared == 8
    for bad in ({"sha256": 3}, {"prompt_hashes": {"length": 4, "hashes": "xy"}}, {"prompt_hashes": [1]}):
        with pytest.raises(CheckpointError, match="calibration"):
            from_ids(IDS).overlap(facts | bad)
