"""An engine's process: its logits are compared, its errors are answers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from loopq.formats.engines import ENGINES
from loopq.formats.engines.__main__ import answer
from loopq.formats.engines.base import TOLERANCE, Engine, Question, ask, compared
from loopq.formats.support import READS

LOGITS = np.random.default_rng(0).normal(size=(2, 5, 7)).astype(np.float32)


class Made(Engine):
    """Returns given values."""

    name = "made"
    needs = {"gptq": ("numpy",)}  # noqa: RUF012

    def __init__(self, said):
        self.said = said

    def logits(self, path, ids, trust_remote_code, states):
        if isinstance(self.said, Exception):
            raise self.said
        return self.said[:, [0, 4]], (0, 4), "float32"


@pytest.fixture
def told(tmp_path, monkeypatch):
    """The answer of an engine that says something."""

    def ask_made(said):
        monkeypatch.setattr(ENGINES, "get", lambda name: Made(said))
        place = tmp_path / str(len(list(tmp_path.iterdir())))
        Question(Path("f"), "gptq", np.zeros((2, 5), np.int64), LOGITS).put(place, "made")
        return answer(place)

    return ask_made


def test_equal_logits_up_to_a_constant_are_the_same_model(told):
    reading = told(LOGITS + 3)
    assert reading.same
    assert reading.engine == f"numpy {np.__version__}"
    assert "read it: largest difference" in reading.line()


@pytest.mark.parametrize("part", [2.0, 0.5])
def test_a_difference_beyond_rounding_is_another_model(told, part):
    other = LOGITS.copy()
    other[1, 4, 3] += part * TOLERANCE["float32"] * np.abs(LOGITS).max()
    assert told(other).same == (part < 1)


@pytest.mark.parametrize("said", [LOGITS[..., :5], LOGITS * np.nan])
def test_logits_of_another_shape_or_not_finite_are_a_problem(told, said):
    reading = told(said)
    assert not reading.same
    assert reading.problem
    assert not reading.skipped


def test_an_error_of_the_engine_is_an_answer(told):
    assert told(KeyError("q_proj")).problem == "KeyError: 'q_proj'"
    assert not told(KeyError("q_proj")).skipped
    for word in ("set trust_remote_code=True", "unexpected keyword argument 'input_states'"):
        assert told(ValueError(word)).skipped


def test_a_process_that_ends_says_so():
    question = Question(Path("f"), "gptq", np.zeros((2, 5), np.int64), LOGITS)
    (reading,) = ask("no such engine", [question])
    assert "process ended with" in reading.problem
    assert not reading.same
    json.dumps(dataclasses.asdict(reading))


def test_engines_read_formats_that_the_table_names():
    for name, engine in ENGINES:
        assert set(engine.needs) <= set(READS[name])
        assert all(engine.missing(form) is not None for form in engine.needs)


def test_the_tolerance_is_a_part_of_the_largest_logit():
    centered = LOGITS - LOGITS.mean(-1, keepdims=True)
    reading = compared("e", LOGITS, LOGITS, "int8")
    assert reading.allowed == pytest.approx(TOLERANCE["int8"] * np.abs(centered).max(), rel=1e-5)
