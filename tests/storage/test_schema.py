"""Data that files hold: JSON, types, seals."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from loopq.errors import CheckpointError, ConfigError, DumpError
from loopq.layers.shared import SharedParameter
from loopq.storage.schema import (
    Count,
    Depth,
    Name,
    Object,
    Positive,
    Seed,
    Sha256,
    between,
    checked,
    parse_json,
    plain_name,
    sealed,
    shown,
    unsealed,
)  # fmt: skip


@dataclass(frozen=True)
class Inner:
    """A part of a file."""

    n: Positive

    def __post_init__(self) -> None:
        if self.n == 13:
            raise ConfigError("13 is not allowed")


@dataclass(frozen=True)
class File:
    """A file."""

    name: Name
    inner: Inner
    kind: Literal["a", "b"] = "a"
    pair: tuple[int, str] = (1, "x")
    many: tuple[Inner, ...] = ()
    by_step: dict[int, float] = field(default_factory=dict)
    maybe: bool | None = None
    more: Object = field(default_factory=dict, metadata={"others": True})


WHOLE = {"name": "f", "inner": {"n": 1}}


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


@pytest.mark.parametrize(
    ("kind", "low", "high"),
    [
        (Count, 0, 2**62),
        (Positive, 1, 2**31 - 1),
        (Depth, 1, 2**20),
        (Seed, -(2**63), 2**64 - 1),
        (Annotated[int, between(-2, 5)], -2, 5),
    ],
)
def test_whole_numbers_have_two_ends(kind, low, high):
    assert (checked(kind, low, "f"), checked(kind, high, "f")) == (low, high)
    for value in (low - 1, high + 1):
        with pytest.raises(
            CheckpointError, match=rf"f: the whole: {value}; allowed: ({low} to {high}|a whole number)"
        ):
            checked(kind, value, "f")
    for value in (True, 1.0, "1", None):
        with pytest.raises(CheckpointError, match="allowed: "):
            checked(kind, value, "f")


def test_a_checksum_has_64_hexadecimal_digits():
    assert checked(Sha256, "0123456789abcdef" * 4, "f")
    for text in ("0" * 63, "0" * 65, "A" * 64, "g" * 64):
        with pytest.raises(CheckpointError, match="64 hexadecimal digits"):
            checked(Sha256, text, "f")


def test_a_name_stays_in_its_folder():
    assert all(map(plain_name, ("a", "a.b", "größe", "x" * 200, "a b")))
    assert not any(map(plain_name, ("", ".", "..", ".a", "a/b", "a\\b", "C:", "a\n", "x" * 201, "ß" * 101)))


def test_a_whole_file_is_read():
    data = WHOLE | {
        "kind": "b", "pair": [2, "y"], "many": [{"n": 3}, {"n": 4}], "by_step": {"0": 0.5, "10": 1.0}, "maybe": True,
        "other": [1], "and": None,
    }  # fmt: skip
    value = checked(File, data, "f")
    assert value == File(
        "f",
        Inner(1),
        "b",
        (2, "y"),
        (Inner(3), Inner(4)),
        {0: 0.5, 10: 1.0},
        True,
        {"other": [1], "and": None},
    )
    assert checked(File, WHOLE, "f") == File("f", Inner(1))
    assert checked(File, WHOLE | {"maybe": None}, "f").maybe is None
    assert checked(Any, {"x": [1]}, "f") == {"x": [1]}


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"name": "a/b"}, "name: 'a/b'; allowed: a plain name"),
        ({"kind": "c"}, "kind: 'c'; allowed: "),
        ({"pair": [1]}, r"pair: \[1\]; allowed: a list of 2"),
        ({"pair": [1, 2]}, r"pair\[1\]: 2; allowed"),
        ({"many": {}}, r"many: \{\}; allowed: a list$"),
        ({"many": [{"n": 1}, {"n": 0}]}, r"many\[1\]\.n: 0; allowed: 1 to"),
        ({"many": [3]}, r"many\[0\]: 3; allowed: an object of n"),
        ({"inner": {}}, "inner: 'n' is missing; known: n"),
        ({"inner": {"n": 1, "m": 2}}, "inner: 'm' is unknown; known: n"),
        ({"inner": {"n": 13}}, "inner: 13 is not allowed"),
        ({"by_step": []}, r"by_step: \[\]; allowed: an object"),
        ({"by_step": {"01": 1.0}}, "by_step.01: '01'; allowed: a whole number as key"),
        ({"by_step": {"1000000000": 1.0}}, ".*allowed: a whole number as key"),
        ({"by_step": {"1": "x"}}, "by_step.1: 'x'; allowed"),
        ({"maybe": 1}, "maybe: 1; allowed"),
    ],
)
def test_each_place_of_a_file_is_checked(change, match):
    with pytest.raises(CheckpointError, match=f"^file: {match}"):
        checked(File, WHOLE | change, "file")
    with pytest.raises(DumpError, match=match):
        checked(File, WHOLE | change, "file", DumpError)


def test_missing_and_unknown_keys_are_named():
    with pytest.raises(CheckpointError, match=r"^f: 'inner' is missing; known: name, inner, kind"):
        checked(File, {"name": "f"}, "f")
    with pytest.raises(CheckpointError, match=r"^f: the whole: \[\]; allowed: an object of name, inner"):
        checked(File, [], "f")
    with pytest.raises(CheckpointError, match=r"^f: 'm' is unknown; known: n"):
        checked(Inner, {"n": 1, "m": 2}, "f")
    assert checked(Inner, {"n": 1, "m": 2}, "f", others=True) == Inner(1)
    with pytest.raises(CheckpointError, match="'n' is missing"):
        checked(Inner, {"m": 2}, "f", others=True)


def test_limits_of_json_are_met():
    assert parse_json("[" * 64 + "]" * 64, "f") is not None
    assert parse_json("1" * 40, "f") == int("1" * 40)
    with pytest.raises(CheckpointError, match="41 digits"):
        parse_json("1" * 41, "f")
    assert parse_json(b'{"a": {"a": 1.5}}', "f") == {"a": {"a": 1.5}}


def test_a_shown_value_is_one_line_of_limited_length():
    assert shown("a") == "'a'"
    assert shown("\n") == r"'\n'"
    assert len(shown("x" * 1000)) <= 120
    assert len(shown({f"key{i}" * 9: "y" * 90 for i in range(9)})) <= 123


def test_a_seal_is_checked_with_its_format_and_version():
    data = sealed("loopq-x", {"a": [1, 2]})
    assert unsealed(dict(data), "loopq-x", "f") == {"a": [1, 2]}
    for changed, match in (
        (data | {"a": [1, 3]}, "altered: its sha256 is not that of its content"),
        ({k: v for k, v in data.items() if k != "sha256"}, "altered"),
        (data | {"version": 1}, "version 1; this loopq reads version 2"),
        (data | {"version": 2.0}, "version 2.0; this loopq"),
        (data | {"format": "loopq-y"}, "its format is not 'loopq-x'"),
        ([data], "its format is not"),
    ):
        with pytest.raises(DumpError, match=f"^f: {match}"):
            unsealed(changed, "loopq-x", "f", DumpError)
