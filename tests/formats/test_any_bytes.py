"""Any bytes to the readers of files: read, or refused in one line. `make soak` gives them many more."""

from __future__ import annotations

import contextlib
import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from loopq.calibrate.dump import Manifest
from loopq.errors import LoopqError
from loopq.formats.native import Index, read_report
from loopq.run.config import QuantConfig
from loopq.storage.files import read_header, read_tensors
from loopq.storage.schema import checked, parse_json

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9)
KEYS = st.text(max_size=9) | st.sampled_from(
    [f.name for kind in (Index, Manifest) for f in dataclasses.fields(kind)]
)
DATA = st.recursive(
    SCALARS, lambda x: st.lists(x, max_size=4) | st.dictionaries(KEYS, x, max_size=6), max_leaves=25
)


@contextlib.contextmanager
def refused():
    """Let a refusal of one line pass, and nothing else."""
    said = ""
    try:
        yield
    except LoopqError as error:
        said = str(error)
    assert "\n" not in said
    assert len(said) < 2000


@given(st.binary(max_size=200))
def test_json(content):
    with refused():
        parse_json(content, "f")


@given(DATA, st.sampled_from([Index, Manifest]))
def test_data_of_another_kind(data, kind):
    with refused():
        checked(kind, data, "f")


@given(DATA)
def test_settings_of_another_kind(data):
    with refused():
        QuantConfig.from_json(data)


@given(
    st.binary(max_size=120) | DATA.map(lambda data: repr(data).encode(errors="replace")),
    st.binary(max_size=40),
)
def test_safetensors(tmp_path_factory, header, body):
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    for content in (header + body, len(header).to_bytes(8, "little") + header + body):
        path.write_bytes(content)
        with refused():
            read_header(path)
            read_tensors(path)


@given(st.binary(max_size=200))
def test_reports(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "report.jsonl"
    path.write_bytes(content)
    with refused():
        read_report(path)
