"""Files that no engine reads right are refused before the work; the engines that are here read the others."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.convert import read_any, verify, write_as
from loopq.formats.engines.base import Reading
from loopq.formats.record import RECORD
from loopq.models.load import load_model
from loopq.models.restore import load_checkpoint
from tests.support import pairs

GRID = {"method": "rtn", "bits": 4, "group_size": 32, "threads": 1}
PROMPTS = pairs.IDS.tolist()


def _checkpoint(folder, name):
    pairs.save(name, folder / "m")
    loopq.quantize(folder / "m", PROMPTS, out=folder / "q", **GRID)
    return folder / "q"


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory):
    """A looped OLMoE, which every engine runs without its loop, and its checkpoint."""
    return _checkpoint(tmp_path_factory.mktemp("olmoe"), "looped OLMoE, an expert left out").parent / "m"


@pytest.fixture(scope="module")
def dory(tmp_path_factory):
    """Dory's checkpoint."""
    return _checkpoint(tmp_path_factory.mktemp("dory"), "Dory")


@pytest.fixture(scope="module")
def looped(tmp_path_factory):
    """A looped Llama's checkpoint."""
    return _checkpoint(tmp_path_factory.mktemp("looped"), "looped Llama")


@pytest.fixture
def engine(monkeypatch):
    """An installed transformers that says what the test tells it."""

    def says(*readings):
        asked = []
        monkeypatch.setattr(
            "loopq.run.gate.ask", lambda name, questions: asked.append((name, questions)) or readings
        )
        return asked

    return says


def test_a_file_that_no_engine_reads_right_is_refused_early(olmoe, tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match="no engine reads compressed-tensors of this model right"):
        loopq.export(olmoe.parent / "q", tmp_path / "ct", "compressed-tensors")
    monkeypatch.setattr("loopq.api._Quantization._prepared", lambda *a: pytest.fail("ran"))
    with pytest.raises(CheckpointError, match="it runs every layer once"):
        loopq.quantize(olmoe, PROMPTS, out=tmp_path / "ct", write="compressed-tensors", **GRID)
    assert not list(tmp_path.iterdir())


def test_loopqs_own_format_is_checked_for_a_named_engine(olmoe, looped, tmp_path, monkeypatch, engine):
    asked = engine(Reading("vllm 0", 0.5, 1e-4))
    given = {**GRID, "levels": "uneven", "bits": 2}
    loopq.quantize(looped.parent / "m", PROMPTS, out=tmp_path / "q", write="native", engine="vllm", **given)
    loopq.export(tmp_path / "q", tmp_path / "again", "native", engine="vllm")
    # loopq itself reads it in an engine.
    assert not asked
    monkeypatch.setattr("loopq.api._Quantization._prepared", lambda *a: pytest.fail("ran"))
    with pytest.raises(CheckpointError, match=r"vllm does not run looped \(loopq_looped\)"):
        loopq.quantize(olmoe, PROMPTS, out=tmp_path / "o", write="native", engine="vllm", **given)
    assert not (tmp_path / "o").exists()
    # transformers reads it by loopq's integration (tests/formats/engines/test_pairs.py).
    with pytest.raises(pytest.fail.Exception, match="ran"):
        loopq.quantize(olmoe, PROMPTS, out=tmp_path / "o", write="native", engine="transformers", **given)


def test_a_forced_file_says_so(olmoe, tmp_path):
    done = loopq.export(olmoe.parent / "q", tmp_path / "ct", "compressed-tensors", force=True)
    assert any(line.startswith("forced: no engine reads") for line in done.lines())
    record = json.loads((tmp_path / "ct" / RECORD).read_text("utf-8"))
    assert record["forced"].startswith("no engine reads")
    target = FORMATS.get("compressed-tensors")
    assert target.describe(target.facts(tmp_path / "ct"))[-1] == f"forced: {record['forced']}"
    loopq.export(tmp_path / "ct", tmp_path / "n", "native")
    assert (tmp_path / "n" / "model.safetensors").read_bytes() == (
        olmoe.parent / "q" / "model.safetensors"
    ).read_bytes()


def test_a_forced_gguf_says_so(dory, tmp_path):
    pytest.importorskip("gguf", reason="NOT RUN: gguf is not installed")
    for name, given in (("forced.gguf", {"force": True}), ("model.gguf", {})):
        if given:
            loopq.export(dory, tmp_path / name, "gguf", vocabulary="none", **given)
        else:
            write_as(tmp_path / name, read_any(dory), "gguf", vocabulary="none")
        facts = FORMATS.get("gguf").facts(tmp_path / name)
        lines = FORMATS.get("gguf").describe(facts)
        assert (facts["forced"] or "").startswith("no engine reads gguf" if given else "")
        assert lines[-1].startswith("forced: no engine reads gguf") == bool(given)


def test_code_of_the_loop_makes_transformers_a_reader(looped, tmp_path, engine):
    asked = engine(Reading("transformers 5", 1e-7, 1e-4))
    with pytest.raises(CheckpointError, match="--remote-code puts the code of the loop into the folder"):
        loopq.export(looped, tmp_path / "plain", "compressed-tensors", engine="transformers")
    with pytest.raises(CheckpointError, match="--remote-code"):
        loopq.quantize(
            looped.parent / "m",
            PROMPTS,
            out=tmp_path / "q",
            write="compressed-tensors",
            engine="transformers",
            **GRID,
        )
    assert not list(tmp_path.iterdir())
    loopq.export(looped, tmp_path / "ct", "compressed-tensors", engine="transformers", remote_code=True)
    ((name, (question,)),) = asked
    assert (name, question.trust_remote_code) == ("transformers", True)
    # As after a kill behind the last write.
    assert verify(tmp_path / "ct", read_any(looped))


def test_the_engine_that_read_a_file_is_named(dory, tmp_path, engine):
    asked = engine(Reading("transformers 5", 1e-7, 1e-4))
    done = loopq.export(dory, tmp_path / "ct", "compressed-tensors")
    assert done.lines()[-2] == "transformers 5 read it: largest difference 1e-07 (allowed 0.0001)"
    ((name, (question,)),) = asked
    assert name == "transformers"
    assert question.expected.shape == (*question.ids.shape, 64)
    assert "forced" not in json.loads((tmp_path / "ct" / RECORD).read_text("utf-8"))


@pytest.mark.parametrize("reading", [Reading("e 1", 0.5, 1e-4), Reading("e 1", problem="KeyError")])
def test_a_file_that_an_engine_reads_wrong_is_removed(dory, tmp_path, engine, reading):
    engine(reading)
    with pytest.raises(
        CheckpointError, match=r"e 1 (read it: largest difference 0\.5|cannot read it: KeyError)"
    ):
        loopq.export(dory, tmp_path / "ct", "compressed-tensors")
    assert not list(tmp_path.iterdir())
    loopq.export(dory, tmp_path / "ct", "compressed-tensors", force=True)
    assert (tmp_path / "ct").is_dir()


def test_without_an_engine_only_loopq_read_it(dory, tmp_path, engine, monkeypatch):
    asked = engine(Reading("e 1", 0.5, 1e-4))
    done = loopq.export(dory, tmp_path / "a", "compressed-tensors", verify=False)
    assert not any("read it" in line for line in done.lines())
    monkeypatch.setattr("loopq.formats.engines.base.Engine.missing", lambda self, form: ["a package"])
    lines = loopq.export(dory, tmp_path / "b", "compressed-tensors").lines()
    assert lines[-2] == "only loopq read it: none of transformers, vllm is installed here"
    assert not asked


def test_a_model_beyond_the_free_memory_is_not_shown(dory, tmp_path, engine, monkeypatch):
    asked = engine()
    monkeypatch.setattr("loopq.run.gate.available_bytes", lambda: 1000)
    assert (
        "only loopq read it: an engine needs"
        in loopq.export(dory, tmp_path / "a", "compressed-tensors").lines()[-2]
    )
    assert not asked


def test_an_engine_begins_with_the_first_states_of_loopq(tmp_path, engine):
    asked = engine(Reading("transformers 5", 1e-7, 1e-4))
    pairs.save("R-Llama", tmp_path / "m")
    loaded = load_model(tmp_path / "m", trust_remote_code=True)
    result = loopq.quantize(loaded, PROMPTS, **GRID)
    done = loopq.export(
        result, tmp_path / "ct", "compressed-tensors", engine="transformers", trust_remote_code=True
    )
    assert done.lines()[-2].startswith("transformers 5 read it")
    ((_, (question,)),) = asked
    assert question.states.shape == (*question.ids.shape, 64)
    # Those that vLLM's plugin draws: by position, alike in every prompt.
    assert np.array_equal(question.states[0], question.states[1])
    assert not np.array_equal(question.states[0, 0], question.states[0, 1])
    system = load_checkpoint(result, trust_remote_code=True).system
    states, ids = (torch.from_numpy(array) for array in (question.states, question.ids))
    given = system.model(ids, num_steps=system.n_steps, input_states=states, use_cache=False).logits
    assert torch.equal(given, torch.from_numpy(question.expected))


def test_a_first_state_that_no_system_tells_is_not_compared(tmp_path, engine, monkeypatch):
    asked = engine()
    pairs.save("R-Llama", tmp_path / "m")
    result = loopq.quantize(load_model(tmp_path / "m", trust_remote_code=True), PROMPTS, **GRID)
    monkeypatch.setattr("loopq.run.export.expected_of", lambda *a: None)
    done = loopq.export(
        result, tmp_path / "ct", "compressed-tensors", engine="transformers", trust_remote_code=True
    )
    assert done.lines()[-2].startswith("only loopq read it: the model draws its first state")
    assert not asked
