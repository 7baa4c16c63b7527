"""The public functions: what they refuse, and that they leave nothing behind."""

from __future__ import annotations

import dataclasses
import pkgutil
import warnings

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.errors import CheckpointError, ConfigError, DumpError
from loopq.formats import native as store
from loopq.formats.checkpoint import Checkpoint, weights_of
from loopq.models.replace import Replaced
from loopq.storage.files import RawTensor
from tests.support.runs import SETTINGS, digest, job_of


def test_load_gives_the_dequantized_model(loaded, tokens, checkpoint_folder):
    again = loopq.load(checkpoint_folder)
    checkpoint = store.read(checkpoint_folder)
    parameters = dict(again.model.state_dict())
    for name, weight in weights_of(checkpoint).items():
        assert torch.equal(parameters[name], torch.from_numpy(weight))
    for name, tensor in loaded.model.state_dict().items():
        if name not in checkpoint.layers:
            assert torch.equal(parameters[name], tensor)
    batch = next(iter(tokens.batches(2)))
    with Replaced(loaded.system, weights_of(checkpoint)) as other:
        expected = other.rollout(batch, 3)
    assert torch.equal(again.system.rollout(batch, 3), expected)
    assert again.model.lm_head.weight is again.model.transformer["wte"].weight


def test_all_that_a_file_of_another_tool_changed_is_measured(loaded, tokens):
    result = loopq.quantize(loaded, tokens, **SETTINGS)
    plain = {name: RawTensor.of(weight) for name, weight in weights_of(result).items()}
    other = Checkpoint({}, {**result.dense, **plain}, result.ties, {"system": None})
    _, ours, theirs = loopq.evaluate(loaded, {"own": result, "other": other}, tokens)
    assert ours.kl.mean() > 0
    assert np.array_equal(ours.kl, theirs.kl)
    more = dataclasses.replace(other, dense={**other.dense, "lm_head.extra": next(iter(plain.values()))})
    with pytest.raises(CheckpointError, match=r"tensor 'lm_head\.extra': the model has none of this name"):
        loopq.evaluate(loaded, {"other": more}, tokens)


def test_nothing_is_overwritten(loaded, tokens, tmp_path, checkpoint_folder):
    dump = tmp_path / "dump"
    collect_rows(job_of(loaded, tokens), dump, shard_batches=1)
    before = digest(checkpoint_folder)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        loopq.quantize(loaded, tokens, out=checkpoint_folder, **SETTINGS)
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        loopq.solve(dump, out=checkpoint_folder, **SETTINGS)
    with pytest.raises(DumpError, match="finished dump"):
        collect_rows(job_of(loaded, tokens), dump)
    assert digest(checkpoint_folder) == before


def test_a_full_disk_leaves_nothing_behind(loaded, tokens, tmp_path, monkeypatch):
    monkeypatch.setattr("loopq.storage.folders.free_bytes", lambda path: 1000)
    with pytest.raises(CheckpointError, match="the disk has"):
        loopq.quantize(loaded, tokens, out=tmp_path / "out", **SETTINGS)
    assert not (tmp_path / "out").exists()


def test_settings_are_refused_before_the_model_is_looked_for(tmp_path):
    for settings, match in [
        ({"bitz": 3}, "unknown setting bitz.*; known: act_order"),
        ({"method": "gptk"}, "did you mean gptq"),
        ({"threads": -1}, "threads must be .*; got -1"),
        ({"preset": "good"}, "preset must be one of best"),
        ({"n_prompts": 0}, "n_prompts must be at least 1"),
        (
            {"method": "rtn", "damping": 0.1},
            "damping goes with method gptq or gptq-cd or trellis; method rtn would not read",
        ),
        ({"alpha": 0.5}, "alpha goes with inputs asymmetric; inputs open would not read it"),
        ({"fit_bits": (3,)}, "fit_bits goes with fit"),
        ({"inputs": "all"}, "unknown inputs 'all'"),
    ]:
        with pytest.raises(ConfigError, match=match):
            loopq.quantize(tmp_path / "nowhere", **settings)


def test_settings_are_objects_or_keywords(loaded, tokens):
    few = tokens.take(0, 2)
    config = loopq.QuantConfig.of(method="gptq", bits=2, group_size=16, damping=0.05)
    by_object = loopq.quantize(loaded, few, config)
    by_name = loopq.quantize(loaded, few, method="gptq", bits=2, group_size=16, damping=0.05)
    both = loopq.quantize(loaded, few, config.changed(bits=8), bits=2)
    part = loopq.quantize(loaded, few, layer=config.layer)
    for other in (by_name, both, part):
        assert other.settings["quantization"] == by_object.settings["quantization"]
        assert all(other.layers[n].same_as(x) for n, x in by_object.layers.items())


def test_keywords_that_a_function_does_not_read_are_refused(loaded):
    for wrong in ({"bits": 3}, {"preset": "best"}, {"random_tokens": 0.1}):
        for call in (lambda: loopq.evaluate(loaded, [], **wrong), lambda: loopq.diagnose(loaded, **wrong)):  # noqa: B023
            with pytest.raises(ConfigError, match=f"unknown setting {next(iter(wrong))}"):
                call()
    with pytest.raises(ConfigError, match="unknown setting n_prompts"):
        loopq.solve("nowhere", n_prompts=3)


@pytest.mark.parametrize("value", [("*adapter*",), ["*adapter*"], "*adapter*"], ids=["tuple", "list", "text"])
def test_lists_and_texts_are_taken_where_several_are_asked(loaded, tokens, value, checkpoint_folder):
    few = tokens.take(0, 1)
    result = loopq.quantize(loaded, few, exclude=value, method="rtn", group_size=16)
    assert result.settings["quantization"]["exclude"] == ["*adapter*"]
    assert result.layers
    assert not any("adapter" in name for name in result.layers)
    with pytest.raises(ConfigError, match="exclude must be a list with text in every place; got 3"):
        loopq.quantize(loaded, few, exclude=3)


def test_a_text_is_one_pattern_of_tensors_to_keep(saved_model):
    with pytest.raises(ConfigError, match=r"keep '\*nothing\*' matches no"):
        loopq.quantize(saved_model, [[1, 2, 3]], keep="*nothing*", method="rtn", group_size=16)


def test_one_path_is_evaluated(loaded, tokens, checkpoint_folder):
    _, measured = loopq.evaluate(loaded, str(checkpoint_folder), tokens.take(0, 1))
    assert measured.name == str(checkpoint_folder)


def test_prompts_of_the_calibration_give_a_warning(loaded, tokens):
    result = loopq.quantize(loaded, tokens.take(0, 2), **SETTINGS)
    with pytest.warns(UserWarning, match="q: these prompts were used for calibration"):
        full, measured = loopq.evaluate(loaded, {"q": result}, tokens.take(0, 2))
    said = measured.summary()
    assert said["prompts_sha256"] == said["calibration_sha256"] == tokens.take(0, 2).digest()
    assert "warning" not in full.summary()
    with pytest.warns(UserWarning, match="1 of 2 prompts were used"):
        loopq.evaluate(loaded, {"q": result}, tokens.take(1, 3))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        measured = loopq.evaluate(loaded, {"q": result}, tokens.take(2, 4))[1]
    assert not seen
    assert measured.overlap.n_shared == 0


def test_a_checkpoint_of_another_system_is_not_evaluated(loaded, tokens, checkpoint_folder):
    checkpoint = store.read(checkpoint_folder)
    checkpoint.settings["system"] = "ouro"
    with pytest.raises(CheckpointError, match="other: a checkpoint of system 'ouro'; the model is 'huginn'"):
        loopq.evaluate(loaded, {"other": checkpoint}, tokens)


def test_no_public_function_hides_a_package():
    packages = {module.name for module in pkgutil.iter_modules(loopq.__path__)}
    assert {"analysis", "evaluation"} <= packages
    assert not packages - {"api"} & set(loopq.__all__)


def test_several_processes_need_a_folder_to_meet_in():
    with pytest.raises(ConfigError, match="several processes meet in one folder: give out"):
        loopq.solve("dump", several=True)
