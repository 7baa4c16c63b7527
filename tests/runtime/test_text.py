"""Text of a model: its token ids, and what continues it."""

from __future__ import annotations

import dataclasses

import pytest

import loopq
from loopq.errors import CheckpointError, ConfigError
from loopq.models.load import load_model
from loopq.models.text import decode
from loopq.runtime.generate import Generation
from loopq.runtime.text import Continuation, prompt_ids
from tests.support.looped import save_dense
from tests.support.systems import CASES, as_loaded, open_system


def test_text_of_bytes_and_of_other_ids():
    assert decode(load_model("huginn_small"), list("é".encode())) == "é"
    case = CASES["COCONUT"]
    assert decode(as_loaded(open_system(case)), [300, 2]) == " 300 2"


@pytest.fixture(scope="module")
def embedded():
    return load_model("huginn_small")


def test_pieces_join_to_the_text_of_all_tokens(embedded):
    text = Continuation(embedded, "The sea was", 2, Generation(n_tokens=12, temperature=1.5, seed=3))
    whole = "".join(text)
    assert len(text.ids) == 12
    assert whole == decode(embedded, text.ids)
    assert len(text.times) == 13
    assert text.decoder.depths == [2] * 12
    # Again from the start.
    assert "".join(text) == whole


def test_two_iterations_are_independent(embedded):
    text = Continuation(embedded, "The sea was", 2, Generation(n_tokens=6, temperature=1.5, seed=3))
    whole = "".join(text)
    first = iter(text)
    begun = next(first)
    assert "".join(text) == whole
    assert begun + "".join(first) == whole
    assert len(text.ids) == 6


def test_token_ids_of_a_prompt_are_checked(embedded):
    assert prompt_ids(embedded, [84, 104]) == prompt_ids(embedded, "Th")
    for wrong, match in (
        ([256], "token id 256; the model's ids are 0 to 255"),
        ([3, -1], "id -1"),
        ([], "no tokens"),
    ):
        with pytest.raises(ConfigError, match=match):
            prompt_ids(embedded, wrong)


def test_a_text_gives_a_text_and_token_ids_give_token_ids(embedded):
    text = loopq.generate(embedded, "The sea was", n_tokens=6, n_steps=2)
    ids = loopq.generate(embedded, list(b"The sea was"), n_tokens=6, n_steps=2)
    assert isinstance(text, str)
    assert decode(embedded, ids) == text
    drawn = [
        loopq.generate(embedded, "The", n_tokens=8, n_steps=2, temperature=2.0, seed=s) for s in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2]
    with pytest.raises(ConfigError, match=r"unknown setting n_token \(did you mean n_tokens"):
        loopq.generate(embedded, "The", n_token=3)


def test_a_checkpoint_in_codes_gives_the_text_of_its_weights(solved, monkeypatch):
    runners = []
    monkeypatch.setattr(
        "loopq.runtime.api.Continuation", lambda *args: runners.append(Continuation(*args)) or runners[-1]
    )
    by_codes = loopq.generate(solved, "abc", n_tokens=6)
    assert runners[0].decoder.backend.name == "runner"
    assert loopq.generate(loopq.load(solved), "abc", n_tokens=6) == by_codes
    assert runners[1].decoder.backend.name != "runner"


class _Broken:
    """A tokenizer whose code raises, or gives no ids."""

    def __init__(self, ids):
        self.ids = ids

    def __call__(self, text):
        if self.ids is None:
            raise KeyError("a\nb")
        return type("Encoded", (), {"input_ids": self.ids})

    def decode(self, ids, skip_special_tokens):
        raise OverflowError(f"id {ids[0]}")


@pytest.mark.parametrize("ids", [None, ["x"], [[1]], 5])
def test_a_tokenizer_that_raises_is_refused_in_one_line(embedded, ids):
    broken = dataclasses.replace(embedded, tokenizer=_Broken(ids))
    with pytest.raises(CheckpointError, match=r"^prompt: the tokenizer raises [^\n]*$"):
        prompt_ids(broken, "abc")
    with pytest.raises(CheckpointError, match=r"^text of 1 tokens: the tokenizer raises OverflowError: id 7"):
        decode(broken, [7])


@pytest.mark.parametrize("prompt", ["9" * 23, "5 " + "9" * 5000, "-1", "1.5", "²", "256"])
def test_ids_that_no_model_has_are_refused_in_one_line(tmp_path, prompt):
    loaded = load_model(f"looped:{save_dense(tmp_path / 'bare')}[1:3]x2")
    with pytest.raises(ConfigError, match=r"^(no tokenizer beside the model|the prompt has token id)[^\n]*$"):
        prompt_ids(loaded, prompt)
