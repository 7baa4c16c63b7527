"""Options that name a model, and the words that name it again."""

from __future__ import annotations

import pytest

from loopq.cli import parser
from loopq.commands.source import ModelOptions, loading
from loopq.errors import ConfigError


def test_words_of_a_source_name_the_same_model_again():
    given = ["diagnose", "owner/name", "--system", "raven", "--trust-remote-code", "--revision", "abc"]
    source = ModelOptions.of(parser().parse_args(given))
    words = source.words()
    assert words == ["owner/name", "--system", "raven", "--revision", "abc", "--trust-remote-code"]
    assert ModelOptions.of(parser().parse_args(["diagnose", *words])) == source


def test_several_depths_are_taken_one_by_one():
    for given, depths in (((), (None,)), (("--n-steps", "4"), (4,)), (("--n-steps", "2,1"), (2, 1))):
        source = ModelOptions.of(parser().parse_args(["evaluate", "huginn_small", *given]))
        assert (source.depths, source.depth) == (depths, depths[-1])


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
        ModelOptions.of(parser().parse_args(["diagnose", *words])).load()
