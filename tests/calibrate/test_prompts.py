"""Prompts in every accepted form."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import pytest
import torch

import loopq
from loopq import Override, QuantConfig
from loopq.calibrate.prompts import (
    RANDOM_TOKENS,
    CalibrationTake,
    Take,
    calibration_tokens,
    evaluation_tokens,
    register_prompts,
)
from loopq.errors import CalibrationError, ConfigError
from loopq.formats.convert import read_any


def test_evaluation_takes_its_own_number_of_prompts(loaded, tokens, tmp_path, checkpoint_folder, monkeypatch):
    monkeypatch.setattr("loopq.calibrate.prompts.EVALUATION_PROMPTS", 3)
    text = tmp_path / "text.txt"
    text.write_text("What is said here is said once, and what is meant is left open. " * 8)
    for given, n_prompts, count in (
        (None, None, 3),
        (text, None, 3),
        (text, 5, 5),
        (tokens, None, 10),
        (tokens, 4, 4),
    ):
        measured = loopq.evaluate(loaded, [checkpoint_folder], given, n_prompts=n_prompts, seq_len=24)
        assert measured[0].kl.shape == (1, count)
    with pytest.raises(ConfigError, match="n_prompts must be at least 1; got 0"):
        loopq.evaluate(loaded, [checkpoint_folder], text, n_prompts=0, seq_len=24)


def test_text_that_ships_with_loopq_is_cut_into_windows(loaded):
    calibration = calibration_tokens(loaded, None, Take(seq_len=16))
    evaluation = evaluation_tokens(loaded, None, Take(n_prompts=4, seq_len=16))
    assert (len(calibration.sequences), len(evaluation.sequences)) == (128, 4)
    assert {s.size for s in (*calibration.sequences, *evaluation.sequences)} == {16}
    assert "calibration" in calibration.source
    assert "evaluation" in evaluation.source
    seen = {s.tobytes() for s in calibration.sequences}
    assert not any(s.tobytes() in seen for s in evaluation.sequences)


def test_ids_are_taken_as_they_are_and_must_be_the_models(loaded):
    ids = [[1, 2, 3], [4, 5]]
    assert [s.tolist() for s in calibration_tokens(loaded, ids).sequences] == ids
    assert [s.tolist() for s in calibration_tokens(loaded, ids, Take(n_prompts=1)).sequences] == ids[:1]
    with pytest.raises(CalibrationError, match="token id 70000"):
        calibration_tokens(loaded, [[1, 70000]])


def test_a_share_of_a_text_is_drawn_from_the_whole_vocabulary(loaded, tokens):
    size = Take(n_prompts=64, seq_len=32)
    plain = np.stack(calibration_tokens(loaded, None, size).sequences)
    drawn = calibration_tokens(loaded, None, CalibrationTake(n_prompts=64, seq_len=32, random_tokens=0.2))
    changed = np.stack(drawn.sequences)
    assert changed.shape == plain.shape
    assert 0.16 < (changed != plain).mean() < 0.22
    # English has fewer than a third of the bytes.
    assert len(np.unique(plain)) < 80 < 150 < len(np.unique(changed)) <= 256
    assert drawn.source.endswith("20 % of its tokens random")
    again = calibration_tokens(loaded, None, CalibrationTake(n_prompts=64, seq_len=32, random_tokens=0.2))
    assert again.digest() == drawn.digest()
    with pytest.raises(
        ConfigError, match="random_tokens is for text that is cut in windows; token ids has prompts"
    ):
        calibration_tokens(loaded, [[1, 2, 3]], CalibrationTake(random_tokens=0.1))
    no_size = dataclasses.replace(loaded, config={}, model=object())
    with pytest.raises(ConfigError, match="random_tokens: the model's config has no vocab_size"):
        calibration_tokens(no_size, tokens, CalibrationTake(random_tokens=0.1))
    with pytest.raises(ConfigError, match=r"random_tokens must be between 0 and 0\.5; got 0\.6"):
        CalibrationTake(random_tokens=0.6)


def test_texts_get_random_tokens_by_default_and_given_ids_do_not(loaded, tokens, tmp_path):
    file = tmp_path / "text.txt"
    file.write_text("What is said here is said once, and what is meant is left open. " * 8)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "What is said here"}\n{"text": "is said once."}\n')
    size = {"n_prompts": 2, "seq_len": 200}
    for text in (None, file):
        asked = calibration_tokens(loaded, text, CalibrationTake(random_tokens=RANDOM_TOKENS, **size))
        assert calibration_tokens(loaded, text, CalibrationTake(**size)).digest() == asked.digest()
        plain = calibration_tokens(loaded, text, Take(**size))
        assert (
            plain.digest()
            == calibration_tokens(loaded, text, CalibrationTake(random_tokens=0.0, **size)).digest()
        )
        assert 0.02 < np.mean(np.stack(plain.sequences) != np.stack(asked.sequences)) < 0.09
    take = CalibrationTake()
    assert calibration_tokens(loaded, tokens, take) is tokens
    assert calibration_tokens(loaded, [[1, 2, 3]], take).sequences[0].tolist() == [1, 2, 3]
    assert calibration_tokens(loaded, prompts, take).digest() == calibration_tokens(loaded, prompts).digest()
    no_size = dataclasses.replace(loaded, config={}, model=object())
    assert calibration_tokens(no_size, None, take).digest() == calibration_tokens(loaded, None).digest()


def test_special_and_unused_tokens_are_never_drawn(loaded, tmp_path):
    class Tokenizer:
        all_special_ids = (0, 2)
        added_tokens_decoder: ClassVar[dict[int, str]] = {2: "<end>", 199: "<latent>"}

        def __len__(self) -> int:
            return 200

    file = tmp_path / "text.txt"
    file.write_text("a" * 4096)
    tokens = calibration_tokens(
        dataclasses.replace(loaded, tokenizer=Tokenizer()), file, CalibrationTake(random_tokens=0.5)
    )
    assert set(np.unique(tokens.sequences)) == set(range(199)) - {0, 2}


def test_random_tokens_reach_the_calibration_of_a_run_only(loaded, checkpoint_folder, command, tmp_path):
    size = {"n_prompts": 4, "seq_len": 24, "group_size": 16, "threads": 1}

    def quantized(**more):
        return loopq.quantize(loaded, **size, **more)

    def same(one, other):
        return all(other.layers[n].same_as(layer) for n, layer in one.layers.items())

    plain, usual, many = (
        quantized(preset="fast", **s) for s in ({"random_tokens": 0.0}, {}, {"random_tokens": 0.3})
    )
    assert not same(plain, usual)
    assert not same(usual, many)
    paper = quantized(preset="paper")
    assert same(paper, quantized(preset="paper", random_tokens=0.0))
    assert not same(paper, quantized(preset="paper", random_tokens=0.05))
    options = [f"--set={name}={value}" for name, value in size.items()]
    for preset, result in (("fast", usual), ("paper", paper)):
        code, _, _ = command(
            "quantize", loaded.folder, "--out", tmp_path / preset, "--preset", preset, *options
        )
        assert code == 0
        assert same(result, read_any(tmp_path / preset))
    with pytest.raises(ConfigError, match="unknown setting random_tokens"):
        loopq.evaluate(loaded, [checkpoint_folder], random_tokens=0.1)
    with pytest.raises(ConfigError, match="unknown setting random_tokens"):
        loopq.diagnose(loaded, random_tokens=0.1)


@pytest.mark.parametrize("several", [False, True])
def test_what_solves_a_dump_refuses_settings_of_prompts(several, tmp_path):
    for name in ("n_prompts", "seq_len", "random_tokens"):
        with pytest.raises(ConfigError, match=f"unknown setting {name}"):
            loopq.solve(tmp_path / "dump", out=tmp_path / "out", several=several, **{name: 2})


def test_models_with_a_tokenizer_take_the_mixed_texts(loaded):
    with_tokenizer = dataclasses.replace(loaded, tokenizer=object())
    take = Take(n_prompts=7, seq_len=16)
    calibration, evaluation = (
        read(with_tokenizer, None, take) for read in (calibration_tokens, evaluation_tokens)
    )
    assert len(calibration.sequences) == len(evaluation.sequences) == 7
    assert calibration.source != evaluation.source
    assert calibration.digest() != calibration_tokens(loaded, None, take).digest()


def test_a_text_with_fewer_prompts_than_asked_says_so(loaded, tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a" * 64)
    short = calibration_tokens(loaded, path, Take(seq_len=16))
    assert "128" in short.shortage
    assert "4" in short.shortage
    assert not calibration_tokens(loaded, path, Take(n_prompts=4, seq_len=16)).shortage
    assert not short.take(0, 2).shortage


def test_any_prompt_suffices_if_nothing_depends_on_the_text(loaded):
    """Rounding needs to know which layers the loop calls, and no more."""
    with_tokenizer = dataclasses.replace(loaded, tokenizer=object())
    tokens = calibration_tokens(with_tokenizer, None, Take(seq_len=16), matters=False)
    assert [s.size for s in tokens.sequences] == [16]
    rounded = loopq.quantize(with_tokenizer, method="rtn", bits=4, group_size=16)
    ids = [[1, 2, 3, 4]]
    for name, layer in loopq.quantize(loaded, ids, method="rtn", bits=4, group_size=16).layers.items():
        assert rounded.layers[name].same_as(layer)
    one_layer = Override(next(iter(rounded.layers)), {"method": "gptq"})
    partly = loopq.quantize(
        with_tokenizer, None, QuantConfig.of(one_layer, method="rtn"), group_size=16, n_prompts=2, seq_len=16
    )
    assert partly.layers[one_layer.pattern].report["method_done"] == "gptq"


@pytest.mark.parametrize("bad", [{"n_prompts": 0}, {"seq_len": 1}, {"seq_len": 2.5}])
def test_how_much_is_taken_is_checked(bad):
    with pytest.raises(ConfigError, match=next(iter(bad))):
        Take(**bad)


def test_ids_in_one_row_are_one_text_for_both(loaded):
    ids = np.arange(40) % 32
    for read in (calibration_tokens, evaluation_tokens):
        for given in (ids, ids.tolist(), torch.from_numpy(ids)):
            tokens = read(loaded, given, Take(seq_len=16))
            assert [s.tolist() for s in tokens.sequences] == [ids[:16].tolist(), ids[16:32].tolist()]
            assert read(loaded, given, Take()).sequences[0].tolist() == ids.tolist()


def test_prompts_of_a_type_are_registered_once(monkeypatch):
    monkeypatch.setattr("loopq.calibrate.prompts._SOURCES", {})
    register_prompts("made", lambda *_: None)
    with pytest.raises(ConfigError, match="'made' are registered twice"):
        register_prompts("made", lambda *_: None)


def test_a_model_of_unknown_vocabulary_writes_no_prompts(tiny):
    tiny.config.pop("vocab_size", None)
    tiny.model.config.vocab_size = None
    with pytest.raises(ConfigError, match="calibration 'self': the model's config has no vocab_size"):
        calibration_tokens(tiny, "self")
