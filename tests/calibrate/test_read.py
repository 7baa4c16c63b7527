"""Files of prompts: kinds, fields, templates, special tokens, and refusals that name the place."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from loopq.calibrate.read import Served, check_source, read_tokens
from loopq.errors import CalibrationError, CheckpointError, ConfigError
from loopq.models.load import encode_bytes

BYTES = Served(encode_bytes)


def test_kinds_of_file(tmp_path):
    (tmp_path / "a.txt").write_text("hello world, hello")
    (tmp_path / "b.jsonl").write_text(
        json.dumps({"text": "abc"}) + "\n\n" + json.dumps({"input_ids": [7, 8]})
    )
    np.save(tmp_path / "c.npy", np.arange(12).reshape(3, 4))
    assert len(read_tokens(tmp_path / "a.txt", BYTES, 6, None).sequences) == 3
    assert [s.tolist() for s in read_tokens(tmp_path / "b.jsonl", BYTES, 6, None).sequences] == [
        [97, 98, 99],
        [7, 8],
    ]
    assert read_tokens(tmp_path / "c.npy", BYTES, 3, 2).sequences[1].tolist() == [4, 5, 6]
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "2.txt").write_text("second")
    (tmp_path / "texts" / "1.txt").write_text("first")
    assert bytes(read_tokens(tmp_path / "texts", BYTES, 5, 1).sequences[0].astype(np.uint8)) == b"first"


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
        ("d.jsonl", b'{"n": 1}', "no field 'text' .*its fields: 'n'"),
        ("e.jsonl", b"", "no token sequences"),
        ("f.jsonl", b'{"text": ""}', "prompt 0 is empty"),
        ("g.npy", b"nonsense", "cannot be read as an array"),
        ("h.jsonl", b'{"text": 5}', "line 1: field 'text' must be text; got 5"),
        ("i.jsonl", b'{"input_ids": [1, "a"]}', "line 1: 'input_ids': token ids are whole numbers"),
        ("j.jsonl", b'{"input_ids": [[1], [2, 3]]}', "line 1: 'input_ids': token ids are whole numbers"),
    ],
)
def test_bad_files_are_refused(tmp_path, name, content, match):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CalibrationError, match=match):
        read_tokens(path, BYTES, 8, None)


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_a_folder_may_hold_records(tmp_path, suffix):
    for name, texts in (("2", ["cc"]), ("1", ["a", "bb"])):
        path = tmp_path / f"{name}.{suffix}"
        if suffix == "jsonl":
            path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        else:
            parquet = pytest.importorskip("pyarrow.parquet")
            parquet.write_table(pytest.importorskip("pyarrow").table({"text": texts}), path)
    tokens = read_tokens(tmp_path, BYTES, 8, None)
    assert [bytes(s.astype(np.uint8)) for s in tokens.sequences] == [b"a", b"bb", b"cc"]
    assert len(read_tokens(tmp_path, BYTES, 8, 2).sequences) == 2
    check_source(tmp_path, "", False)
    (tmp_path / "3.txt").write_text("text")
    for read in (lambda: check_source(tmp_path, "", False), lambda: read_tokens(tmp_path, BYTES, 8, None)):
        with pytest.raises(CalibrationError, match="texts and records"):
            read()


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("a.txt", b" \n", "the text is empty"),
        ("b.txt", b"\xff\xfe", "not UTF-8 text"),
        ("c.jsonl", b"", "no token sequences"),
        ("d.jsonl", b'{"n": 1}', "no field 'text'"),
        ("e.jsonl", b"{]", "line 1: not valid JSON"),
        ("g.npy", b"nonsense", "cannot be read as an array"),
        ("h.npy", None, "missing"),
    ],
)
def test_files_without_prompts_are_refused_without_a_tokenizer(tmp_path, name, content, match):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(CalibrationError, match=match):
        check_source(tmp_path / name, "", False)
    (tmp_path / "good.txt").write_text("text")
    with pytest.raises(ConfigError, match="template and field are for records"):
        check_source(tmp_path / "good.txt", "question", False)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(CalibrationError, match=r"nowhere\.txt: missing"):
        read_tokens(tmp_path / "nowhere.txt", BYTES, 8, None)


def test_an_array_whose_header_says_more_than_the_file_holds(tmp_path):
    path = tmp_path / "lie.npy"
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000, 1000000)}\n"
    path.write_bytes(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + bytes(80))
    with pytest.raises(CalibrationError, match="cannot be read as an array"):
        read_tokens(path, Served(list), 16, None)


@pytest.mark.parametrize("name", ["pipe.txt", "pipe.jsonl", "pipe.npy"])
def test_a_pipe_is_refused_where_a_file_is_wanted(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with pytest.raises(CalibrationError, match="not a plain file"):
        read_tokens(tmp_path / name, Served(list), 16, None)


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
        read_tokens(path, Served(list), 16, None)


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
        read_tokens(path, Served(lambda text: list(text.encode())), 16, None)


class _Tokenizer:
    """A tokenizer of bytes with marks around a text, and a template."""

    all_special_ids: ClassVar[list[int]] = [1, 2]
    chat_template: str | None = "made"

    def __call__(self, text: str) -> Any:
        return type("Encoded", (), {"input_ids": [1, *text.encode(), 2]})

    def apply_chat_template(self, messages: Any, *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        turns = "".join(f"<{m['role'][0]}>{m['content']}" for m in messages)
        return turns + "<a>" * add_generation_prompt


def _texts(path: Any, **settings: Any) -> list[str]:
    served = Served.of(encode_bytes, _Tokenizer(), **settings)
    tokens = read_tokens(path, served, 64, None).sequences
    return [bytes(s.astype(np.uint8)).decode() for s in tokens]


def test_a_text_has_special_tokens_where_engines_put_them(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "abc"}')
    (tmp_path / "a.txt").write_text("abcdef")
    served = Served.of(encode_bytes, _Tokenizer())
    assert _texts(tmp_path / "a.jsonl") == ["\x01abc\x02"]
    assert [s.tolist() for s in read_tokens(tmp_path / "a.txt", served, 4, None).sequences] == [
        [1, 97, 98, 99], [1, 100, 101, 102]
    ]  # fmt: skip


_RECORDS = [{"n": 7, "question": "q?", "answer": "a!"}, {"question": "Q", "answer": "A", "n": 8}]
_CASES = [
    ({}, ["\x01q?\na!\x02", "\x01Q\nA\x02"]),
    ({"field": "answer, question"}, ["\x01a!\nq?\x02", "\x01A\nQ\x02"]),
    ({"template": True}, ["<u>q?<a>a!", "<u>Q<a>A"]),
    ({"template": True, "field": "question"}, ["<u>q?<a>", "<u>Q<a>"]),
]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize(("settings", "texts"), _CASES)
def test_any_fields_of_a_record_are_its_text(tmp_path, kind, settings, texts):
    path = tmp_path / f"train.{kind}"
    if kind == "jsonl":
        path.write_text("\n".join(map(json.dumps, _RECORDS)))
    else:
        arrow = pytest.importorskip("pyarrow")
        pytest.importorskip("pyarrow.parquet").write_table(arrow.Table.from_pylist(_RECORDS), path)
    assert _texts(path, **settings) == texts


def test_messages_take_the_template(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(
        json.dumps({"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]})
    )
    assert _texts(path) == _texts(path, template=True) == ["<s>s<u>u<a>"]
    check_source(path, "", False)
    with pytest.raises(CalibrationError, match=r"line 1: has messages, .* no chat template"):
        read_tokens(path, BYTES, 64, None)
    with pytest.raises(CalibrationError, match=r"line 1: no field 'text'"):
        _texts(path, field="text")
    both = tmp_path / "both.jsonl"
    both.write_text('{"text": "t", "messages": [{"role": "user", "content": "u"}]}')
    assert _texts(both) == ["\x01t\x02"]


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        ([0, 1, 0, 1], "has a 0 between ones"),
        ([1, 1, 1], "must have a 0 or a 1 for each of the 4 ids"),
        ([1, 2, 1, 1], "must have a 0 or a 1"),
        ([0, 0, 0, 0], "prompt 0 is empty"),
    ],
)
def test_only_padding_is_left_out(tmp_path, mask, said):
    path = tmp_path / "a.jsonl"
    rows = [([0, 0, 5, 6], [0, 0, 1, 1]), ([7, 8, 9, 0], [1, 1, 1, 0]), ([1, 2, 3, 4], None)]
    path.write_text("\n".join(json.dumps({"input_ids": i, "attention_mask": m}) for i, m in rows))
    assert [s.tolist() for s in read_tokens(path, BYTES, 8, None).sequences] == [
        [5, 6],
        [7, 8, 9],
        [1, 2, 3, 4],
    ]
    path.write_text(json.dumps({"input_ids": [1, 2, 3, 4], "attention_mask": mask}))
    with pytest.raises(CalibrationError, match=said):
        read_tokens(path, BYTES, 8, None)


@pytest.mark.parametrize("size", [2**30 + 1, 2**40])
@pytest.mark.parametrize("within", [False, True])
def test_a_text_is_refused_by_its_size_before_it_is_read(tmp_path, monkeypatch, size, within):
    path = tmp_path / "a.txt"
    with path.open("wb") as file:
        file.truncate(size)
    monkeypatch.setattr(Path, "open", lambda *_, **__: pytest.fail("read"))
    for read in (
        lambda given: read_tokens(given, Served(encode_bytes), 16, 2),
        lambda given: check_source(given, "", False),
    ):
        with pytest.raises(CalibrationError, match=rf"{size} bytes of text; allowed: {2**30}"):
            read(tmp_path if within else path)


@pytest.mark.parametrize("within", [False, True])
@pytest.mark.parametrize("n_prompts", [1, 40, 600, None])
def test_only_as_much_of_a_text_is_read_as_prompts_need(tmp_path, monkeypatch, within, n_prompts):
    text = "".join(f"é{n}\r\n" for n in range(2000))
    for name in ("a.txt", "b.txt")[: 1 + within]:
        (tmp_path / name).write_bytes(text.encode())
    path = tmp_path if within else tmp_path / "a.txt"
    whole = read_tokens(path, Served(encode_bytes), 16, n_prompts)
    lengths = []

    def encode(given):
        lengths.append(len(given))
        return encode_bytes(given)

    monkeypatch.setattr("loopq.calibrate.read._LONG", 1001)
    monkeypatch.setattr(Path, "read_bytes", lambda *_: pytest.fail("read as a whole"))
    part = read_tokens(path, Served(encode), 16, n_prompts)
    assert part.digest() == whole.digest()
    check_source(path, "", False)
    if n_prompts == 1:
        assert lengths == [len(text.encode()[:1001].decode(errors="ignore").replace("\r\n", "\n"))]
    if n_prompts is None:
        assert len(lengths) == 1


def _records(path, texts):
    if path.suffix == ".parquet":
        parquet, arrow = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
        parquet.write_table(arrow.table({"text": texts}), path)
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_of_a_long_record_only_the_start_is_encoded(tmp_path, name):
    text = "The sea was calm. " * 60_000
    path = _records(tmp_path / name, [text, "The end"])
    lengths = []

    def encode(given):
        lengths.append(len(given))
        return encode_bytes(given)

    part = read_tokens(path, Served(encode), 24, 2)
    assert max(lengths) <= 1 << 16
    assert [bytes(ids.tolist()).decode() for ids in part.sequences] == [text[:24], "The end"]
    # More tokens than the start has.
    part = read_tokens(path, Served(lambda given: encode(given)[::8]), 20_000, 1)
    assert part.sequences[0].size == 20_000


def test_a_table_whose_records_are_too_long_is_refused_unread(tmp_path, monkeypatch):
    path = _records(tmp_path / "a.parquet", ["x" * 4096, "y" * 4096])
    file = pytest.importorskip("pyarrow.parquet").ParquetFile
    monkeypatch.setattr("loopq.calibrate.read.MAX_SIZE", 16_000)
    assert len(_texts(path)) == 2
    monkeypatch.setattr("loopq.calibrate.read.MAX_SIZE", 4000)
    monkeypatch.setattr(file, "iter_batches", lambda *_, **__: pytest.fail("read"))
    with pytest.raises(
        CalibrationError, match=r"row group 0: unpacks to \d+ bytes in 2 rows; .* at most 4000"
    ):
        _texts(path)


_DAMAGED = """
import sys
from pathlib import Path
from loopq.calibrate.read import Served, check_source, read_tokens
from loopq.models.load import encode_bytes
from loopq.errors import LoopqError
path = Path(sys.argv[1])
data = path.read_bytes()
read = refused = 0
for i in range(len(data) - 8 - int.from_bytes(data[-8:-4], "little"), len(data) - 8):
    for value in {0, 3, 0xFF, data[i] ^ 1} - {data[i]}:
        path.with_name("b.parquet").write_bytes(data[:i] + bytes([value]) + data[i + 1 :])
        try:
            read_tokens(path.with_name("b.parquet"), Served(encode_bytes), 24, 2)
            read += 1
        except LoopqError as error:
            assert "\\n" not in str(error), error
            refused += 1
print(read, refused)
"""


def test_a_table_with_damaged_metadata_is_read_or_refused(tmp_path):
    """In a process of its own, because pyarrow ends it where a column's metadata is damaged and its size is asked."""
    path = _records(tmp_path / "a.parquet", ["The sea was calm.", "The end."])
    done = subprocess.run([sys.executable, "-c", _DAMAGED, path], capture_output=True, text=True)
    assert not done.returncode, done.stderr[-500:]
    read, refused = map(int, done.stdout.split())
    assert read > 100
    assert refused > 100


def test_a_text_that_begins_with_blanks_is_read_further(tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.calibrate.read._LONG", 100)
    (tmp_path / "a.txt").write_text(" " * 1000 + "x")
    check_source(tmp_path / "a.txt", "", False)
    (tmp_path / "a.txt").write_text(" " * 1000)
    with pytest.raises(CalibrationError, match="the text is empty"):
        check_source(tmp_path / "a.txt", "", False)


def test_what_cannot_be_served_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"question": "q"}')
    (tmp_path / "a.txt").write_text("abcdef")
    (tmp_path / "a.parquet").write_text("abcdef")
    with pytest.raises(CalibrationError, match=r"line 1: no field 'answer' .*its fields: 'question'"):
        _texts(tmp_path / "a.jsonl", field="question,answer")
    with pytest.raises(ConfigError, match=r"a\.txt: template and field are for records"):
        _texts(tmp_path / "a.txt", template=True)
    with pytest.raises(ConfigError, match="no chat template"):
        Served.of(encode_bytes, None, template=True)

    def odd(text):
        # A file beside the tokenizer says that it takes "x" tokens.
        return len(text) > "x"

    odd.all_special_ids = []
    with pytest.raises(CheckpointError, match="the tokenizer raises TypeError"):
        Served.of(encode_bytes, odd)
    pytest.importorskip("pyarrow")
    with pytest.raises(CalibrationError, match=r"a\.parquet: cannot be read as parquet"):
        _texts(tmp_path / "a.parquet")


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("a.txt", b"ab\xff", "not UTF-8 text (byte 2)"),
        ("a.npy", np.zeros(3), "token ids are integers (n_prompts, n_tokens); got float64 (3,)"),
        ("a.npy", np.zeros((2, 2)), "got float64 (2, 2)"),
        ("a.jsonl", b'{"text": "' + b"x" * 40 + b'"}', "line 1: longer than 32 bytes"),
        ("empty", None, "the folder has no *.txt, *.jsonl or *.parquet"),
    ],
)
def test_files_of_another_content_are_refused(tmp_path, monkeypatch, name, content, why):
    monkeypatch.setattr("loopq.calibrate.read.MAX_SIZE", 32)
    path = tmp_path / name
    if content is None:
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    else:
        np.save(path, content)
    with pytest.raises(CalibrationError, match=re.escape(why)):
        read_tokens(path, Served(encode_bytes), 4, None)
