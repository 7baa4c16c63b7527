"""Data that files hold: JSON, types, seals."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError
from loopq.layers.shared import SharedParameter
from loopq.storage.schema import checked, parse_json, sealed


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("[" * 100_000, "not valid JSON"),
        ("[" * 65 + "]" * 65, "more than 64 levels"),
        ('{"a": 1, "a": 1}', "'a' stands twice"),
        ("[NaN]", "NaN is not a finite number"),
        ("[-Infinity]", "-Infinity is not a finite number"),
        ("[1e999]", "1e999 is not a finite number"),
        ("1" * 5000, "a whole number of 5000 digits"),
        (r'["\ud800"]', "surrogates not allowed"),
        (r'{"\udfff": 1}', "surrogates not allowed"),
        (b"\xff", "can't decode byte 0xff"),
        (b"\xef\xbb\xbf{}", "BOM"),
    ],
)
def test_json_that_is_refused(text, match):
    with pytest.raises(CheckpointError, match=f"^file: not valid JSON .*{match}|^file: {match}"):
        parse_json(text, "file")
    assert parse_json("[1e999, -Infinity]", "file", finite=False) == [float("inf"), float("-inf")]


def test_the_message_stays_short(tmp_path):
    with pytest.raises(CheckpointError) as refused:
        checked(SharedParameter, {"name": ["x" * 10_000] * 10_000}, "file")
    assert len(str(refused.value)) < 500
    with pytest.raises(CheckpointError) as refused:
        checked(dict[str, int], {"\n" * 10_000: "\n" * 10_000}, "file")
    assert len(str(refused.value)) < 500
    assert "\n" not in str(refused.value)


def test_what_is_sealed_says_so():
    data = sealed("loopq-x", {"b": {10: 1, 9: 2}, "a": [1.5, "é"]})
    assert list(data) == ["format", "version", "b", "a", "sha256"]
    assert data == sealed("loopq-x", {"a": [1.5, "é"], "b": {"9": 2, "10": 1}})
