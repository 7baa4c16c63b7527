"""An engine's process: its logits are compared, its errors are answers."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from loopq.formats.engines import ENGINES, llama_cpp
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


#: What llama.cpp wrote about a file of an unknown architecture (xllamacpp 2026.10).
LOG = """0.00.000.434 I srv          init: initializing ...
0.00.060.871 E llama_model_load: error loading model: unknown model architecture: 'dory'
0.00.060.875 E llama_model_load_from_file_impl: failed to load model
"""


def test_the_cause_in_the_log_of_a_native_engine_is_said(told, monkeypatch, capfd):
    def failed(self, *_):
        os.write(2, LOG.encode())
        raise RuntimeError("Failed to init server")

    engine = ENGINES.get("llama.cpp")
    monkeypatch.setattr(Made, "logits", failed)
    monkeypatch.setattr(Made, "cause", lambda self, said: engine.cause(said))
    problem = told(None).problem
    cause = "llama_model_load: error loading model: unknown model architecture: 'dory'"
    assert problem == f"RuntimeError: Failed to init server ({cause})"
    assert engine.cause("0.00.003 W srv init: no API key is set") == ""
    os.write(2, b"after")
    assert capfd.readouterr().err == "after"


@pytest.mark.parametrize(("silent", "positions"), [((), [0, 2, 4]), ((0, 4), [1, 2, 3])])
def test_llama_cpp_is_asked_elsewhere_after_a_part_of_a_character(monkeypatch, silent, positions):
    """It gives no probabilities where the most probable token is the first byte of a character."""

    class Server:
        def __init__(self, settings):
            assert settings.model.path == "f"

        def handle_completions(self, asked):
            n = len(asked["prompt"]) - 1
            likely = [{"id": i, "logprob": -float(n + i)} for i in (2, 0, 1)]
            given = None if n in silent else {"content": [{"top_logprobs": likely}]}
            return {"choices": [{"logprobs": given}]}

    def params():
        return SimpleNamespace(
            model=SimpleNamespace(), cpuparams=SimpleNamespace(), cpuparams_batch=SimpleNamespace()
        )

    package = SimpleNamespace(CommonParams=params, Server=Server)
    monkeypatch.setattr(llama_cpp, "require", lambda *_: package)
    monkeypatch.setattr(llama_cpp, "open_gguf", lambda path: None)
    monkeypatch.setattr(llama_cpp, "contents", lambda *_: ["a", "b", "c"])
    ids = np.zeros((2, 5), np.int64)
    logits, found, _ = ENGINES.get("llama.cpp").logits(Path("f"), ids, False, None)
    assert found == positions
    assert logits[1].tolist() == [[-n, -n - 1, -n - 2] for n in positions]
    silent = range(5)
    with pytest.raises(RuntimeError, match="part of a character"):
        ENGINES.get("llama.cpp").logits(Path("f"), ids, False, None)


def test_a_process_that_is_killed_says_its_last_line():
    question = Question(Path("f"), "gptq", np.zeros((2, 5), np.int64), LOGITS)
    program = ("-c", "import os; os.write(2, b'one\\nGGML_ASSERT failed\\n'); os.abort()")
    (reading,) = ask("made", [question], sys.executable, program)
    assert reading.problem == "its process ended with -6: GGML_ASSERT failed"


def test_engines_read_formats_that_the_table_names():
    for name, engine in ENGINES:
        assert set(engine.needs) <= set(READS[name])
        assert all(engine.missing(form) is not None for form in engine.needs)


def test_the_tolerance_is_a_part_of_the_largest_logit():
    centered = LOGITS - LOGITS.mean(-1, keepdims=True)
    reading = compared("e", LOGITS, LOGITS, "int8")
    assert reading.allowed == pytest.approx(TOLERANCE["int8"] * np.abs(centered).max(), rel=1e-5)
