"""Token sets: packing rules, kinds of file, and refusals that name the place."""

from __future__ import annotations

import contextlib
import json
import os

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loopq.calibrate.data import TokenSet, check_vocabulary, from_ids, read_tokens, windows
from loopq.errors import CalibrationError, ConfigError
from loopq.models.load import encode_bytes


def test_windows_cut_the_text_and_drop_the_rest():
    made = windows("abcdefghij", encode_bytes, 4, None, "letters")
    assert [bytes(s.astype(np.uint8)) for s in made.sequences] == [b"abcd", b"efgh"]
    assert made.describe()["n_tokens"] == 8


def test_batches_keep_order_and_never_mix_lengths():
    made = from_ids([[1, 2], [3, 4], [5, 6, 7], [8, 9]])
    assert made.plan(8) == [[0, 1], [2], [3]]
    assert [tuple(b.prompts) for b in made.batches(1)] == [(0,), (1,), (2,), (3,)]


def test_kinds_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("hello world, hello")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "abc"}) + "\n\n" + json.dumps({"input_ids": [7, 8]})
    )
    np.save(tmp_path / "c.npy", np.arange(12).reshape(3, 4))
    assert len(read_tokens(tmp_path / "a.txt", encode_bytes, 6, None).sequences) == 3
    assert [s.tolist() for s in read_tokens(tmp_path / "b.jsonl", encode_bytes, 6, None).sequences] == [
        [97, 98, 99],
        [7, 8],
    ]
    assert read_tokens(tmp_path / "c.npy", encode_bytes, 3, 2).sequences[1].tolist() == [4, 5, 6]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "2.txt").write_text("second")
    (tmp_path / "texts" / "1.txt").write_text("first")
    assert (
        bytes(read_tokens(tmp_path / "texts", encode_bytes, 5, 1).sequences[0].astype(np.uint8)) == b"first"
    )


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b"abc", "3 tokens make no window of 8"),
        ("b.txt", b"\xff\xfe", "not UTF-8 text"),
        ("c.jsonl", b"{]", "line 1: not valid JSON"),
        (
            "k.jsonl",
            b'{"text": ' + b"[" * 9000 + b"]" * 9000 + b"}",
            "line 1: not valid JSON .more than 64 levels",
        ),
        ("l.jsonl", rb'{"text": "\ud800"}', "line 1: not valid JSON .*surrogates not allowed"),
        ("d.jsonl", b'{"body": "x"}', "no field 'text'"),
        ("e.jsonl", b"", "no token sequences"),
        ("f.jsonl", b'{"text": ""}', "prompt 0 is empty"),
        ("g.npy", b"nonsense", "cannot be read as an array"),
        ("h.jsonl", b'{"text": 5}', "line 1: field 'text' must be text; got 5"),
        ("i.jsonl", b'{"input_ids": [1, "a"]}', "line 1: 'input_ids' must be a list of whole numbers"),
        ("j.jsonl", b'{"input_ids": [[1], [2, 3]]}', "line 1: 'input_ids' must be a list of whole numbers"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, match):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=match):
        read_tokens(path, encode_bytes, 8, None)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"nowhere\.txt: missing"):
        read_tokens(tmp_path / "nowhere.txt", encode_bytes, 8, None)


def test_settings_are_checked():
    with pytest.raises(ConfigError, match="seq_len"):
        windows("abc", encode_bytes, 1, None, "x")
    with pytest.raises(ConfigError, match="batch_size"):
        from_ids([[1]]).plan(0)
    with pytest.raises(CalibrationError):
        TokenSet((), "nothing", "prompts")


def test_digest_tells_sequences_apart():
    assert from_ids([[1, 2], [3]]).digest() != from_ids([[1], [2, 3]]).digest()
    assert from_ids([[1, 2]]).digest() == from_ids([np.array([1, 2])]).digest()


def test_ids_that_the_model_does_not_have_are_named_with_their_place():
    made = from_ids([[1, 2], [3, 256]], "ids.npy")
    check_vocabulary(made, 257)
    with pytest.raises(CalibrationError, match=r"ids.npy: prompt 1, position 1: token id 256; .* 0 to 255"):
        check_vocabulary(made, 256)
    with pytest.raises(CalibrationError, match="token id -1"):
        check_vocabulary(from_ids([[-1]]), 256)


def test_no_prompts_are_not_too_little_text():
    with pytest.raises(ConfigError, match="n_prompts must be at least 1; got 0"):
        windows("abcdefgh", encode_bytes, 4, 0, "letters")


def test_an_array_whose_header_says_more_than_the_file_holds(tmp_path):
    path = tmp_path / "lie.npy"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000, 1000000)}\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(80))
    with pytest.raises(CalibrationError, match="cannot be read as an array"):
        read_tokens(path, list, 16, None)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.npy"])
def test_a_pipe_is_refused_where_a_file_is_wanted(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CalibrationError, match="not a plain file"):
        read_tokens(tmp_path / name, list, 16, None)


@given(
    header=st.binary(max_size=90)
    | st.text("{}()[]',:<>=-+*0123456789descrfortran_orderTFuels\\\"\n", max_size=90).map(str.encode),
    body=st.binary(max_size=64),
    version=st.sampled_from([1, 2, 3, 9]),
)
@example(header=b"{'descr': '<i8', 'fortran_order': False, 'shape': (-1, 4)}", body=b"", version=1)
@example(header=b"(" * 90, body=b"", version=1)
def test_any_array_header_is_read_or_refused(tmp_path_factory, header, body, version):
    path = tmp_path_factory.getbasetemp() / "any.npy"
    length = len(header).to_bytes(2 if version == 1 else 4, "little")
    path.write_bytes(b"\x93NUMPY" + bytes([version, 0]) + length + header + body)
    with contextlib.suppress(CalibrationError):
        read_tokens(path, list, 16, None)


@given(
    st.binary(max_size=200) | st.text('{}[]":,\\ud8 0123456789textinput_s\n', max_size=200).map(str.encode)
)
@example(b'{"text": "\\ud800"}')
@example(b'{"input_ids": [1, [2]]}')
@example(b'{"input_ids": [99999999999999999999]}')
def test_any_lines_are_read_or_refused(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    path.write_bytes(content)
    with contextlib.suppress(CalibrationError):
        read_tokens(path, lambda text: list(text.encode()), 16, None)
