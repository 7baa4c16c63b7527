"""The text that ships for models with a tokenizer: any first prompts are a mix, of any length and number."""

from __future__ import annotations

import json

import numpy as np
import pytest

from loopq import zoo
from loopq.calibrate import mixed as module
from loopq.calibrate.mixed import mixed
from loopq.calibrate.read import Served, json_lines
from loopq.errors import CalibrationError
from loopq.models.load import encode_bytes

BYTES = Served(encode_bytes)


def _text_of(ids) -> str:
    return bytes(ids.astype(np.uint8)).decode("utf-8", errors="ignore")


@pytest.mark.parametrize("use", ["calibration", "evaluation"])
def test_kinds_take_turns_and_first_tokens_begin_each_window(use):
    records = [record for _, record in json_lines(zoo.mixed_text(use), CalibrationError)][:6]
    tokens = mixed(use, Served(encode_bytes, first=(300, 301)), 66, 14)
    assert [s.size for s in tokens.sequences] == [66] * 14
    assert all(s[:2].tolist() == [300, 301] for s in tokens.sequences)
    assert (tokens.n_first, tokens.packing) == (2, "windows")
    for record, ids in zip(records, tokens.sequences, strict=False):
        assert _text_of(ids[2:]) in record["text"]
    for number in range(6):
        one, after = tokens.sequences[number][2:], tokens.sequences[(number + 6) % 14][2:]
        joined = _text_of(np.concatenate([one, after])) if number + 6 < 12 else _text_of(one)
        assert joined in records[number]["text"]


def test_fewer_prompts_are_the_first_of_more():
    many = mixed("calibration", BYTES, 128, 40)
    for count in (1, 5, 13):
        few = mixed("calibration", BYTES, 128, count)
        assert few.digest() == many.take(0, count).digest()


def test_a_kind_that_ends_leaves_its_turns_to_the_others(monkeypatch, tmp_path):
    path = tmp_path / "text.jsonl"
    records = [{"kind": kind, "text": kind * n} for kind, n in (("a", 8), ("b", 64))]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    monkeypatch.setattr(module.zoo, "mixed_text", lambda use: path)
    tokens = mixed("calibration", BYTES, 8, 6)
    assert [_text_of(s)[0] for s in tokens.sequences] == list("abbbbb")
    assert len(mixed("calibration", BYTES, 8, None).sequences) == 9
    with pytest.raises(CalibrationError, match="8 tokens make no window of 9"):
        mixed("calibration", BYTES, 9, 1)
