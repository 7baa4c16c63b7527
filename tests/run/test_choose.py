"""Runs that are made of several: chosen step weights, tuning; all of it on one command line."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

import loopq
import loopq.formats.native
from loopq.cli import main
from loopq.errors import ConfigError
from loopq.gradients.tuner import Tune
from loopq.quantizers.config import Override
from loopq.run.choose import split_held_out
from loopq.run.config import QuantConfig

FULL = QuantConfig.of(method="gptq-cd", bits=3, group_size=16, rank_threshold=None)


def test_prompts_are_held_out_once(tokens):
    kept, held = split_held_out(tokens, None)
    assert (len(kept.sequences), len(held.sequences)) == (8, 2)
    assert [s.tobytes() for s in (*kept.sequences, *held.sequences)] == [
        s.tobytes() for s in tokens.sequences
    ]
    for bad in (0, 10):
        with pytest.raises(ConfigError, match="held out"):
            split_held_out(tokens, bad)
    twice = type(tokens)((*tokens.sequences, tokens.sequences[0]), "twice", "prompts")
    with pytest.raises(ConfigError, match="without repeats"):
        split_held_out(twice, 1)


def test_prompts_are_not_held_out_for_nothing(tiny, tokens):
    with pytest.raises(ConfigError, match="n_held_out goes with tune"):
        loopq.quantize(tiny, tokens, FULL, n_held_out=3)


def test_tuning_starts_from_what_was_quantized(tiny, tokens):
    found = loopq.quantize(
        tiny,
        tokens,
        FULL,
        bits=2,
        tune=Tune(n_updates=30, every=10, scale_rate=1e-2),
        n_held_out=3,
        threads=1,
    )
    facts = found.settings["tuning"]
    assert facts["held_out_after"] < facts["held_out_before"]
    assert (facts["n_prompts"], facts["n_held_out"]) == (7, 3)
    plain = loopq.quantize(tiny, split_held_out(tokens, 3)[0], FULL, bits=2, threads=1)
    for name, layer in found.layers.items():
        np.testing.assert_array_equal(layer.codes, plain.layers[name].codes)
        assert layer.report["tier"] == "gradient, scales"


def test_tuning_refuses_scales_of_fewer_bits(tiny, tokens):
    some = dataclasses.replace(FULL, overrides=(Override("*adapter*", {"scale_bits": 5}),))
    with pytest.raises(ConfigError, match=r"adapter\.weight: tuned scales have all bits .* scale_bits = 5"):
        loopq.quantize(tiny, tokens, some, tune=Tune(n_updates=1), threads=1)


def test_command_line(tiny_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i % 9973) for i in range(600)))
    base = ["quantize", str(tiny_folder), "--calibration", str(text), "--n-prompts", "8", "--seq-len", "24",
            "--method", "gptq-cd", "--rank-threshold", "none", "--threads", "1"]  # fmt: skip
    extra = ["--metric", "loop", "--inputs", "asymmetric", "--alpha", "0.5", "--step-weights", "balanced",
             "--damping-kind", "diagonal", "--allocate", "3.5", "--allocate-score", "fisher",
             "--allocate-bits", "2,4", "--allocate-group-sizes", "16", "--tune", "codes",
             "--tune-n-updates", "2", "--n-held-out", "2"]  # fmt: skip
    assert main([*base, *extra, "--out", str(tmp_path / "q")]) == 0
    said = capsys.readouterr().out
    assert "bits: 3." in said
    assert "score fisher" in said
    assert "gradient tier, codes: 2 updates on 6 prompts" in said
    kept = json.loads((tmp_path / "q" / "loopq.json").read_text())
    settings = kept["settings"]
    assert settings["allocation"]["asked"]["bits"] == [2, 4]
    assert settings["tuning"]["asked"]["what"] == "codes"
    report = loopq.formats.native.read(tmp_path / "q").layers["transformer.adapter.weight"].report
    assert (report["metric"], report["inputs"], report["alpha"]) == ("loop", "asymmetric", 0.5)
    assert (report["step_weighting"], report["damping_kind"]) == ("balanced", "diagonal")
    assert main([*base, "--tune-n-updates", "3", "--out", str(tmp_path / "r")]) == 2
    assert "--tune-n-updates goes with --tune" in capsys.readouterr().err
