"""Names of pre-tokenizers: patterns of tokenizer.json, in turn, and what has no form in llama.cpp."""

from __future__ import annotations

import pytest

from loopq.errors import CheckpointError, require
from loopq.formats.gguf import pretokens

BYTES = {"type": "ByteLevel", "add_prefix_space": False}


def split(pattern, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": behavior, "invert": invert}


def test_each_name_has_patterns_of_its_own():
    assert len(set(pretokens.NAMES.values())) == len(pretokens.NAMES) == 7
    for (patterns, whole_words), name in pretokens.NAMES.items():
        assert pretokens.patterns_of(name) == (patterns, whole_words)
        steps = [*map(split, patterns), BYTES | {"use_regex": False}]
        part = {"type": "Sequence", "pretokenizers": steps}
        assert pretokens.name_of(part, whole_words=whole_words) == name


def test_bytes_alone_have_the_pattern_of_gpt2():
    assert pretokens.name_of(BYTES, whole_words=False) == "gpt-2"
    digits = {"pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTES]}
    assert pretokens.name_of(digits, whole_words=False) == "smollm"
    (patterns, _) = pretokens.patterns_of("gpt-2")
    assert pretokens.name_of(split(patterns[0], "Removed", True), whole_words=False) == "gpt-2"


@pytest.mark.parametrize(
    ("part", "match"),
    [
        (None, "llama.cpp's name of no pattern is not known"),
        (BYTES | {"use_regex": False}, "name of no pattern"),
        (split("a"), r"name of .*a.* is not known"),
        ({"type": "Digits"}, r"is not known"),
        (BYTES | {"add_prefix_space": True}, "no form for"),
        ({"type": "ByteLevel"}, "no form for"),
        ({"type": "Whitespace"}, "no form for"),
        (split("a", "Removed", False), "no form for"),
        (split("a", "Isolated", True), "no form for"),
        ({"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated"}, "no form for"),
        ({"type": "Split", "pattern": "a", "behavior": "Isolated"}, "no form for"),
    ],
)
def test_other_steps_are_refused(part, match):
    with pytest.raises(CheckpointError, match=match):
        pretokens.name_of(part, whole_words=False)


def test_llama3_and_smaug_differ_by_whole_words():
    patterns, whole = pretokens.patterns_of("llama-bpe")
    assert (pretokens.patterns_of("smaug-bpe"), whole) == ((patterns, False), True)


def test_steps_are_gone_through_in_order_and_depth():
    nested = {"normalizers": [{"n": 1}, {"pretokenizers": [{"n": 2}, {"n": 3}]}, {"n": 4}]}
    assert [step["n"] for step in pretokens.steps(nested)] == [1, 2, 3, 4]
    assert list(pretokens.steps(None)) == []
    odd = {"pretokenizers": [1, {}]}
    assert list(pretokens.steps(odd)) == [odd]


@pytest.mark.parametrize(
    ("name", "text", "cut"),
    [
        ("gpt-2", "it's 1234  ab!", ["it", "'s", " 1234", " ", " ab", "!"]),
        ("smollm", "a12", ["a", "1", "2"]),
        ("llama-bpe", "It'S 1234!\n x", ["It", "'S", " ", "123", "4", "!\n", " x"]),
        ("qwen2", "It'S 1234!\n x", ["It", "'S", " ", "1", "2", "3", "4", "!\n", " x"]),
        ("qwen35", "नमस्ते", ["नमस्ते"]),
        ("granite-embed-multi-97m", "camelCase it's", ["camel", "Case", " it's"]),
    ],
)
def test_patterns_cut_words_digits_and_signs(name, text, cut):
    package = require("tokenizers")
    patterns, _ = pretokens.patterns_of(name)
    steps = [package.pre_tokenizers.Split(package.Regex(p), "isolated") for p in patterns]
    cuts = package.pre_tokenizers.Sequence(steps).pre_tokenize_str(text)
    assert [piece for piece, _ in cuts] == cut
