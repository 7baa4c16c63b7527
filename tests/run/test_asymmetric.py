"""Asymmetric calibration: layer by layer on the inputs that each will get."""

from __future__ import annotations

import numpy as np
import pytest

import loopq
from loopq.calibrate.pairs import collect_pairs
from loopq.errors import ConfigError
from loopq.run import asymmetric
from loopq.run.asymmetric import AsymmetricInputs
from loopq.systems.declare import parameter_of
from tests.support.asymmetric import asked, prepared
from tests.support.kills import Kill, Killer, counting
from tests.support.runs import SETTINGS, digest, tensors_of


def open_loop(run):
    return run.solve_from(run.all_steps(), run.config.changed(inputs="open"))


def test_first_layer_is_the_open_loops_and_output_errors_fall(tiny, tokens):
    run = prepared(tiny, tokens)
    tasks, plain = run.tasks, open_loop(run)
    solved = {alpha: run.solve(AsymmetricInputs(alpha=alpha)) for alpha in (0.0, 1.0)}
    first = tasks[0].name
    for layers in solved.values():
        assert list(layers) == [t.name for t in tasks]
        np.testing.assert_array_equal(layers[first].codes, plain[first].codes)
    assert any(not solved[1.0][n].same_as(plain[n]) for n in plain)
    assert all(solved[0.0][n].report["target_shift"] == 0 for n in plain)
    assert all(
        solved[1.0][t.name].report["target_shift"] > 0 for t in tasks if t.input_group != tasks[0].input_group
    )

    def output_error(layers):
        """Squared error of every layer's output against full precision, inputs of the quantized rollout."""
        total = 0.0
        for input_group in run.job.selection.distinct_inputs:
            m = collect_pairs(run.job, [input_group.name], tensors_of(layers))[input_group.name].of([0, 1, 2])
            for t in tasks:
                if t.input_group == input_group.name:
                    w = parameter_of(tiny.system.model, t.parameter).detach().numpy().astype(np.float64)
                    d = layers[t.name].dequantize() - w
                    total += np.trace(d @ m.quantized @ d.T) - 2 * np.trace(d @ m.cross.T @ w.T)
                    total += np.trace(w @ (m.reference - m.cross - m.cross.T - m.quantized) @ w.T)
        return total

    assert output_error(solved[1.0]) < output_error(plain)


@pytest.mark.slow
def test_same_bytes_again_and_at_two_threads(tiny, tokens):
    one = prepared(tiny, tokens).solve(AsymmetricInputs(sweeps=2))
    two = prepared(tiny, tokens, threads=2).solve(AsymmetricInputs(sweeps=2))
    assert all(one[n].same_as(two[n]) for n in one)
    assert all(layer.report["sweep"] == 1 for layer in one.values())


def test_settings_that_cannot_be(tiny, tokens):
    for bad in ({"inputs": "both"}, {"alpha": 1.5}, {"alpha": 2.0}, {"sweeps": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            asked(**({"inputs": "asymmetric"} | bad))


@pytest.mark.slow
def test_step_weights_inside_asymmetric_calibration(tiny, tokens):
    """The first layers see the same inputs in both rollouts: there each weighting gives its open-loop codes."""
    for spec in ("alpha=1/4", "balanced"):
        run = prepared(tiny, tokens, step_weights=spec)
        plain, found = open_loop(run), run.solve(AsymmetricInputs())
        for task in run.tasks:
            report = found[task.name].report
            assert report["step_weighting"] == spec
            assert sum(report["step_weights"]) == pytest.approx(1.0)
            if task.input_group == run.tasks[0].input_group:
                np.testing.assert_array_equal(found[task.name].codes, plain[task.name].codes)
                assert report["step_weights"] == pytest.approx(plain[task.name].report["step_weights"])
    by_sum = prepared(tiny, tokens).solve(AsymmetricInputs())
    by_alpha = prepared(tiny, tokens, step_weights="alpha=1/3").solve(AsymmetricInputs())
    assert all(by_alpha[n].same_as(by_sum[n]) for n in by_sum)


@pytest.mark.slow
def test_a_killed_run_is_resumed(loaded, tokens, tmp_path, monkeypatch):
    asked = {"inputs": "asymmetric", "sweeps": 2, "batch_size": 3, "threads": 1, **SETTINGS}
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **asked)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(11), **asked)
    seen = []
    monkeypatch.setattr(asymmetric, "collect_pairs", counting(asymmetric.collect_pairs, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **asked)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    # Nine input groups, twice; twelve layers were solved when the kill came.
    assert len(seen) == 6
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "other", progress=Killer(11), **asked)
    seen.clear()
    loopq.quantize(loaded, tokens, out=tmp_path / "other", **(asked | {"alpha": 0.5}))
    assert len(seen) == 18
