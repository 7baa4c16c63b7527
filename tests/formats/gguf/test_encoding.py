"""Tokens for llama.cpp beside those of tokenizer.json: scores, spelled bytes, what stands around a text."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from loopq.errors import CheckpointError, require
from loopq.formats.gguf import encoding
from loopq.formats.gguf.tokenizer import CONTROL


def pieces(scores, prefix=False, more=()):
    """A tokenizer of scored pieces, numbered in order; `more` have no score."""
    texts = dict(enumerate([*scores, *more]))
    return SimpleNamespace(texts=texts, scores=dict(enumerate(scores.values())), prefix=prefix)


def test_the_pair_with_the_largest_score_is_joined_first():
    scores = {"a": 0.0, "b": 0.0, "c": 0.0, "ab": -2.0, "bc": -1.0, "abc": -3.0}
    encode = encoding._pieces(pieces(scores))
    assert encode("ab") == [3]
    # "bc" before "ab", then both become one.
    assert encode("abc") == [5]
    del scores["abc"]
    assert encoding._pieces(pieces(scores))("abc") == [0, 4]
    assert encoding._pieces(pieces(scores | {"ab": -1.0}))("abc") == [3, 2]
    assert encode("") == []


def test_the_first_of_equal_pairs_is_joined():
    assert encoding._best(["a", "a", "a"], {"aa": 1.0}) == 0
    assert encoding._best(["b", "a", "a"], {"aa": 1.0}) == 1
    assert encoding._best(["a", "b"], {"aa": 1.0}) is None
    assert encoding._best(["a", "b", "c", "d"], {"ab": 1.0, "cd": 2.0}) == 2


def test_spaces_are_marked_and_a_prefix_is_one():
    scores = {"\u2581": 0.0, "a": 0.0, "\u2581a": -1.0}
    assert encoding._pieces(pieces(scores))("a a") == [1, 2]
    assert encoding._pieces(pieces(scores, prefix=True))("a a") == [2, 2]


def test_what_is_no_token_is_spelled_in_bytes():
    ids = {"<0xC3>": 7, "<0xA9>": 8, "x": 9}
    assert encoding._spelled("x", ids) == [9]
    assert encoding._spelled("é", ids) == [7, 8]
    assert encoding._spelled("y", ids) == [-1]


def by_bytes(post=None):
    """A tokenizer of all bytes, as `tokenizers` stores it and as it is written for llama.cpp."""
    package = require("tokenizers")
    alphabet = sorted(package.pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "ll", "<s>", "</s>"])}
    tokenizer = package.Tokenizer(package.models.BPE(vocab=vocab, merges=[("l", "l")]))
    tokenizer.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    if post:
        tokenizer.post_processor = package.processors.TemplateProcessing(
            single=post, special_tokens=[("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
        )
    texts, kinds = {i: text for text, i in vocab.items()}, {vocab["<s>"]: CONTROL, vocab["</s>"]: CONTROL}
    written = SimpleNamespace(
        model="gpt2", texts=texts, kinds=kinds, merges=["l l"], pre="gpt-2", doubled=True
    )  # fmt: skip
    return written, tokenizer.to_str().encode(), vocab


@pytest.mark.parametrize(
    ("post", "before", "after"),
    [(None, (), ()), ("<s> $A", ("<s>",), ()), ("<s> $A </s>", ("<s>",), ("</s>",)), ("$A </s>", (), ("</s>",))],
)  # fmt: skip
def test_ends_are_those_around_a_text(post, before, after):
    written, data, vocab = by_bytes(post)
    ends = encoding.compare(written, data)
    assert dataclasses.astuple(ends) == (tuple(vocab[t] for t in before), tuple(vocab[t] for t in after))


def test_another_merge_or_special_token_is_seen():
    written, data, _ = by_bytes()
    written.merges = []
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: 'Hello world' gets ids .*, and in llama\.cpp"
    ):
        encoding.compare(written, data)
    written, data, _ = by_bytes()
    # As plain tokens they are cut into bytes.
    written.kinds = {}
    assert encoding.compare(written, data).before == ()
    changed = json.loads(data)
    changed["added_tokens"] = changed["added_tokens"][:1]
    written, _, _ = by_bytes()
    with pytest.raises(CheckpointError, match=r"'a</s>b' gets ids"):
        encoding.compare(written, json.dumps(changed).encode())


def test_a_file_that_is_no_tokenizer_is_refused():
    written, _, _ = by_bytes()
    with pytest.raises(CheckpointError, match=r"the package tokenizers does not read it"):
        encoding.compare(written, b"{}")
