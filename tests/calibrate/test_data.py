"""Token sets: packing rules, batches, and refusals."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.calibrate.data import TokenSet, check_vocabulary, from_ids, windows
from loopq.errors import CalibrationError, ConfigError
from loopq.models.load import encode_bytes


def test_windows_cut_the_text_and_drop_the_rest():
    tokens = windows("abcdefghij", encode_bytes, 4, None, "letters")
    assert [bytes(s.astype(np.uint8)) for s in tokens.sequences] == [b"abcd", b"efgh"]
    assert tokens.describe()["n_tokens"] == 8


def test_batches_keep_order_and_never_mix_lengths():
    tokens = from_ids([[1, 2], [3, 4], [5, 6, 7], [8, 9]])
    assert tokens.plan(8) == [[0, 1], [2], [3]]
    assert [tuple(b.prompts) for b in tokens.batches(1)] == [(0,), (1,), (2,), (3,)]


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


def test_unknown_token_ids_are_named_with_their_place():
    tokens = from_ids([[1, 2], [3, 256]], "ids.npy")
    check_vocabulary(tokens, 257)
    with pytest.raises(CalibrationError, match=r"ids.npy: prompt 1, position 1: token id 256; .* 0 to 255"):
        check_vocabulary(tokens, 256)
    with pytest.raises(CalibrationError, match="token id -1"):
        check_vocabulary(from_ids([[-1]]), 256)


def test_no_prompts_are_not_too_little_text():
    with pytest.raises(ConfigError, match="n_prompts must be at least 1; got 0"):
        windows("abcdefgh", encode_bytes, 4, 0, "letters")


def test_windows_begin_with_special_tokens_within_their_length():
    tokens = windows("abcdefgh", encode_bytes, 4, None, "letters", (1, 2))
    assert [s.tolist() for s in tokens.sequences] == [[1, 2, 97 + i, 98 + i] for i in range(0, 8, 2)]
    random = tokens.with_random_tokens(0.5, np.array([7]))
    assert all(s[:2].tolist() == [1, 2] for s in random.sequences)
    assert any(7 in s for s in random.sequences)
    with pytest.raises(ConfigError, match="seq_len must be at least 4; got 3"):
        windows("abcdefgh", encode_bytes, 3, None, "letters", (1, 2))


def test_a_prompt_without_a_scored_token_is_refused():
    with pytest.raises(CalibrationError, match="prompt 1 has 2 tokens, none of them scored"):
        TokenSet((np.arange(3), np.arange(2)), "made", "prompts", scored_from=2)
