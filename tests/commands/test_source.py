"""Options that name a model, and the words that name it again."""

from __future__ import annotations

import pytest

from loopq.cli import parser
from loopq.commands.source import load, loading, source_words
from loopq.errors import ConfigError


def test_words_of_a_source_name_the_same_model_again():
    given = ["diagnose", "owner/name", "--system", "raven", "--trust-remote-code", "--revision", "abc"]
    args = parser().parse_args(given)
    words = source_words(args)
    assert words == ["owner/name", "--system", "raven", "--revision", "abc", "--trust-remote-code"]
    assert loading(parser().parse_args(["diagnose", *words])) == loading(args)


def test_a_rank_of_torchrun_gets_its_own_device(monkeypatch):
    args = parser().parse_args(["diagnose", "huginn_small", "--device", "cuda"])
    assert loading(args)["device"] == "cuda"
    monkeypatch.setenv("LOCAL_RANK", "2")
    assert loading(args)["device"] == "cuda:2"


@pytest.mark.parametrize(
    ("words", "match"), [((), "name a model"), (("huginn_small", "--python", "a.py:f"), "give one of them")]
)
def test_one_model_is_named(words, match):
    with pytest.raises(ConfigError, match=match):
        load(parser().parse_args(["diagnose", *words]))
