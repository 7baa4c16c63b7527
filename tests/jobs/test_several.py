"""Runs that are made of several: chosen step weights, bits under a budget, tuning; and their command line."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
from loopq.config import VALIDATED, AllocateConfig, LayerConfig, Override, QuantConfig
from loopq.jobs.run import Run
from loopq.jobs.several import held_back, on_top
from loopq.tune.tuner import TuneConfig

import loopq
import loopq.api
import loopq.checkpoint.native
from loopq.cli import main
from loopq.errors import ConfigError
from loopq.evaluate.compare import compare

FULL = QuantConfig(LayerConfig(method="full", bits=3, group_size=16), rank_threshold=None)


def test_prompts_are_held_back_once(tokens):
    kept, held = held_back(tokens, None)
    assert (len(kept.sequences), len(held.sequences)) == (8, 2)
    assert [s.tobytes() for s in (*kept.sequences, *held.sequences)] == [
        s.tobytes() for s in tokens.sequences
    ]
    for bad in (0, 10):
        with pytest.raises(ConfigError, match="held back"):
            held_back(tokens, bad)
    twice = type(tokens)((*tokens.sequences, tokens.sequences[0]), "twice", "prompts")
    with pytest.raises(ConfigError, match="without repeats"):
        held_back(twice, 1)


def test_validated_weights_are_the_best_on_what_was_held_back(tiny, tokens):
    found = loopq.quantize(tiny, tokens, FULL, step_weights="validated", n_held_out=3, threads=1)
    facts = found.settings["validation"]
    kept, held = held_back(tokens, 3)
    kl = {}
    for spec in VALIDATED:
        one = loopq.quantize(tiny, kept, FULL, step_weights=spec, threads=1)
        weights = {n: x.in_model_orientation() for n, x in one.layers.items()}
        kl[spec] = float(compare(tiny.system, {"q": weights}, held)[1].kl.mean())
        if spec == facts["chosen"]:
            assert all(found.layers[n].same_as(x) for n, x in one.layers.items())
    assert facts["kl"] == pytest.approx(kl)
    assert facts["chosen"] == min(kl, key=kl.__getitem__)
    assert found.settings["quantization"]["layer"]["step_weights"] == facts["chosen"]
    assert found.settings["calibration"]["n_prompts"] == 7
    assert all(x.report["step_weights_asked"] == "validated" for x in found.layers.values())


@pytest.mark.parametrize("score", ["ablation", "fisher"])
def test_mixed_bits_reach_the_file_and_come_back(tiny_folder, tiny, tokens, tmp_path, score):
    asked = AllocateConfig(3.6, score, bits=(2, 3, 4, 8), group_sizes=(16, 32), n_prompts=4)
    found = loopq.quantize(tiny_folder, tokens, FULL, allocate=asked, out=tmp_path / "q", threads=1)
    facts = found.settings["allocation"]
    n_weights = sum(x.codes.size for x in found.layers.values())
    n_bytes = sum(x.n_bytes for x in found.layers.values())
    assert n_bytes == facts["n_bytes"] <= facts["budget_bytes"] == int(3.6 * n_weights / 8)
    assert facts["bits_a_weight"] == pytest.approx(8 * n_bytes / n_weights)
    # No layer could be widened within what is left of the budget.
    assert facts["budget_bytes"] - n_bytes < max(x.codes.size for x in found.layers.values()) * 4
    assert len({x.bits for x in found.layers.values()}) > 1
    again = loopq.checkpoint.native.read(tmp_path / "q")
    for name, layer in found.layers.items():
        assert facts["layers"][name] == {"bits": layer.bits, "group_size": layer.group_size}
        assert again.layers[name].same_as(layer)
    loaded = loopq.load(tmp_path / "q")
    name = "transformer.adapter.weight"
    np.testing.assert_array_equal(
        loaded.model.get_parameter(name).detach().numpy(), found.layers[name].in_model_orientation()
    )
    assert loopq.api.evaluate(tiny_folder, [tmp_path / "q"], tokens)[1].kl.mean() > 0


def test_what_an_override_fixes_stays_as_it_is(tiny, tokens):
    name = "transformer.adapter.weight"
    fixed = dataclasses.replace(FULL, overrides=(Override(name, {"bits": 8, "group_size": 8}),))
    asked = AllocateConfig(4.5, bits=(2, 3), group_sizes=(16, 32), n_prompts=2)
    found = loopq.quantize(tiny, tokens, fixed, allocate=asked, threads=1)
    layer = found.layers[name]
    assert (layer.bits, layer.group_size) == (8, 8)
    facts = found.settings["allocation"]
    assert facts["layers"][name] == {"bits": 8, "group_size": 8}
    assert facts["n_bytes"] == sum(x.n_bytes for x in found.layers.values())
    assert {x.bits for n, x in found.layers.items() if n != name} <= {2, 3}


def test_scored_bits_beat_the_same_bytes_spent_the_other_way_round(tiny, tokens):
    """The layers that got two bits get four here, as far as the bytes reach."""
    asked = AllocateConfig(3.5, bits=(2, 4), group_sizes=(16,), n_prompts=10)
    found = loopq.quantize(tiny, tokens, FULL, allocate=asked, threads=1)
    bits = {n: x.bits for n, x in found.layers.items()}
    assert set(bits.values()) == {2, 4}
    budget = sum(x.n_bytes for x in found.layers.values())
    two = loopq.quantize(tiny, tokens, FULL, bits=2, threads=1).layers
    four = loopq.quantize(tiny, tokens, FULL, bits=4, threads=1).layers
    other, used = dict(two), sum(x.n_bytes for x in two.values())
    for n in bits:
        more = four[n].n_bytes - two[n].n_bytes
        if used + more <= budget and bits[n] == 2:
            other[n], used = four[n], used + more
    assert used > sum(x.n_bytes for x in two.values())
    variants = {
        k: {n: x.in_model_orientation() for n, x in v.items()}
        for k, v in {"scored": found.layers, "other": other}.items()
    }
    _, scored, reverse = compare(tiny.system, variants, tokens)
    assert scored.kl.mean() < reverse.kl.mean()


def test_budget_in_bytes_and_settings_that_cannot_be(tiny, tokens):
    least = AllocateConfig(10, bits=(2,), group_sizes=(16,))
    with pytest.raises(ConfigError, match="the budget is 10 bytes"):
        loopq.quantize(tiny, tokens, FULL, allocate=least, threads=1)
    for bad in ({"budget": 0.0}, {"score": "size"}, {"bits": (5,)}, {"n_prompts": 0}, {"bits": ()}):
        with pytest.raises(ConfigError):
            AllocateConfig(**({"budget": 3.0} | bad))


def test_tuning_starts_from_what_was_quantized(tiny, tokens):
    found = loopq.quantize(
        tiny,
        tokens,
        FULL,
        bits=2,
        tune=TuneConfig(n_updates=30, every=10, scale_rate=1e-2),
        n_held_out=3,
        threads=1,
    )
    facts = found.settings["tuning"]
    assert facts["held_out_after"] < facts["held_out_before"]
    assert (facts["n_prompts"], facts["n_held_out"]) == (7, 3)
    plain = loopq.quantize(tiny, held_back(tokens, 3)[0], FULL, bits=2, threads=1)
    for name, layer in found.layers.items():
        np.testing.assert_array_equal(layer.codes, plain.layers[name].codes)
        assert layer.report["tier"] == "gradient, scales"


def test_tuning_refuses_scales_of_fewer_bits(tiny, tokens):
    some = dataclasses.replace(FULL, overrides=(Override("*adapter*", {"scale_bits": 5}),))
    with pytest.raises(ConfigError, match=r"adapter\.weight: tuned scales have all bits .* scale_bits = 5"):
        loopq.quantize(tiny, tokens, some, tune=TuneConfig(n_updates=1), threads=1)


def test_command_line(tiny_folder, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text(" ".join(str(i * i % 9973) for i in range(600)))
    base = ["quantize", str(tiny_folder), "--calibration", str(text), "--n-prompts", "8", "--seq-len", "24",
            "--method", "full", "--no-rank", "--threads", "1"]  # fmt: skip
    extra = ["--metric", "loop", "--inputs", "asymmetric", "--alpha", "0.5", "--step-weights", "balanced",
             "--damping-kind", "diagonal", "--allocate", "3.5", "--score", "fisher", "--widths", "2,4",
             "--group-sizes", "16", "--tune", "codes", "--tune-updates", "2", "--held-out", "2"]  # fmt: skip
    assert main([*base, *extra, "--out", str(tmp_path / "q")]) == 0
    said = capsys.readouterr().out
    assert "bits: 3." in said
    assert "score fisher" in said
    assert "gradient tier, codes: 2 updates on 6 prompts" in said
    kept = json.loads((tmp_path / "q" / "loopq.json").read_text())
    settings = kept.get("settings", kept)
    assert settings["allocation"]["asked"]["bits"] == [2, 4]
    assert settings["tuning"]["asked"]["what"] == "codes"
    report = loopq.checkpoint.native.read(tmp_path / "q").layers["transformer.adapter.weight"].report
    assert (report["metric"], report["inputs"], report["alpha"]) == ("loop", "asymmetric", 0.5)
    assert (report["step_weighting"], report["damping_kind"]) == ("balanced", "diagonal")
    assert main([*base, "--tune-updates", "3", "--out", str(tmp_path / "r")]) == 2
    assert "go with --tune" in capsys.readouterr().err


def test_what_choosing_bits_and_tuning_take_is_said_before(tiny, tokens):
    run = Run.prepare(tiny, tokens, QuantConfig(), None, 8, 0, 1)
    run.probe_seconds = 0.5
    layers = len(run.tasks)
    assert on_top(run, None, None) == ""
    measured = on_top(run, AllocateConfig(3.25, bits=(3, 4), group_sizes=(16,), n_prompts=4), None)
    assert measured == f"; on top, about: bits by ablation {4 * 2 * layers * 0.5:.0f} s"
    both = on_top(
        run, AllocateConfig(3.25, "fisher", n_prompts=4), TuneConfig("scales", n_updates=3, batch_size=2)
    )
    assert both == "; on top, about: bits by fisher 6 s, tuning at most 12 s"
