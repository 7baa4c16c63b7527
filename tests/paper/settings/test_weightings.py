"""Step weights: the identities of the paper, and what spikes may not do."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

import loopq
from loopq.calibrate.collect import collect_rows
from loopq.calibrate.hessian_dump import collect_hessians
from loopq.cli import parse
from loopq.commands.options import quant_config
from loopq.errors import ConfigError, SolveError
from loopq.paper.settings.weightings import alpha_weights, balanced_weights
from loopq.run.asymmetric import AsymmetricInputs
from loopq.run.config import QuantConfig
from loopq.run.step_weights import relative
from loopq.settings.steps import Calibration, weigher_of
from tests.support.asymmetric import prepared
from tests.support.problems import accumulate, solve, step_rows
from tests.support.runs import SETTINGS, digest, job_of, run_of


def balanced_sum(sums):
    """The four steps' Hessians, added with equal shares of the channels."""
    chosen, scaled, _ = relative(range(4), balanced_weights(sums, range(4)))
    return sums.matrix(chosen, weights=scaled)


@pytest.mark.parametrize("method", ["gptq", "gptq-cd"])
def test_alpha_identities_hold_bit_for_bit(tiny, tokens, method):
    run = run_of(tiny, tokens)
    sums = run.all_steps()

    def solved(steps, weights):
        config = QuantConfig.of(
            method=method, bits=3, group_size=16, steps=steps, step_weights=weights, rank_threshold=None
        )
        return run.solve_from(sums, config)

    for alpha, steps in (("alpha=1/3", "all"), ("alpha=0", "1:"), ("alpha=1", "first")):
        weighed, plain = solved("all", alpha), solved(steps, "sum")
        assert all(weighed[n].same_as(plain[n]) for n in plain), alpha
    other, plain = solved("all", "alpha=0.9"), solved("all", "sum")
    assert any(not other[n].same_as(plain[n]) for n in plain)
    assert other[run.tasks[0].name].report["step_weights"] == pytest.approx([0.9, 0.05, 0.05])


def test_alpha_is_exact():
    assert alpha_weights(Fraction(1, 3), 3) == [Fraction(1, 3)] * 3
    assert alpha_weights(Fraction(1, 7), 1) == [1]


def test_weights_need_each_step_apart(tiny, tokens):
    config = QuantConfig.of(bits=3, group_size=16, step_weights="balanced", rank_threshold=None)
    run = run_of(tiny, tokens, config)
    sums = run.sums(per_step=False)
    sums.run_pass(list(sums.steps))
    with pytest.raises(ConfigError, match="need the Hessian of each step"):
        run.solver(sums).run(run.tasks)


def test_balanced_shares_are_equal_and_follow_scalings():
    rng = np.random.default_rng(0)
    rows = step_rows(rng)
    w = balanced_weights(accumulate(rows), range(4))
    diagonals = np.stack([np.square(r.astype(np.float32)).sum(0) for r in rows])
    shares = np.array(w)[:, None] * diagonals
    shares /= shares.sum(0)
    np.testing.assert_allclose(shares.sum(1), 24 / 4, rtol=1e-5)
    loud = [rows[0] * 64, *rows[1:]]
    np.testing.assert_allclose(
        balanced_weights(accumulate(loud), range(4))[0] * 64**2 / w[0],
        balanced_weights(accumulate(loud), range(4))[1] / w[1],
        rtol=1e-9,
    )
    channel = np.where(np.arange(24) == 5, 1024.0, 1.0)
    again = balanced_weights(accumulate([r * channel for r in rows]), range(4))
    np.testing.assert_allclose(np.array(again) / again[0], np.array(w) / w[0], rtol=1e-9)


@pytest.mark.parametrize("method", ["gptq", "gptq-cd"])
def test_a_spike_in_step_zero_changes_no_code(method):
    """All of step 0 is kappa times louder, as at the bottleneck of Ouro: normalised steps do not care."""
    rng = np.random.default_rng(1)
    rows, weight = step_rows(rng), rng.normal(size=(16, 24)).astype(np.float32)

    def codes(kappa, spec):
        acc = accumulate([rows[0] * np.sqrt(kappa), *rows[1:]])
        balanced = balanced_sum(acc)
        hessian = acc.matrix() if spec == "sum" else balanced
        return solve(method, weight, hessian, bits=3, group_size=8).codes

    plain = codes(1.0, "balanced")
    for kappa in (1e2, 1e4, 1e6):
        np.testing.assert_array_equal(codes(kappa, "balanced"), plain)
    assert (codes(1e6, "sum") != codes(1.0, "sum")).any(), "the spike is too weak to test anything"


def test_equivariant_damping_makes_codes_ignore_a_channel_spike():
    """A channel kappa times louder with a column kappa times smaller; from 100 on it rounds to nothing."""
    rng = np.random.default_rng(2)
    rows, weight = step_rows(rng), rng.normal(size=(16, 24)).astype(np.float32)

    def codes(kappa, kind):
        factor = np.where(np.arange(24) == 5, kappa, 1.0)
        acc = accumulate([r * factor for r in rows])
        hessian = balanced_sum(acc)
        turned = (weight / factor).astype(np.float32)
        settings = {"damping_kind": kind, "damping": 0.01}
        return solve("gptq-cd", turned, hessian, bits=3, group_size=8, **settings).codes

    plain = codes(1e2, "diagonal")
    for kappa in (1e4, 1e6):
        np.testing.assert_array_equal(codes(kappa, "diagonal"), plain)
    assert (codes(1e6, "mean") != codes(1e2, "mean")).any()


def test_steps_are_refused_if_none_has_activations():
    rows = [np.zeros((40, 24)), np.zeros((40, 24))]
    with pytest.raises(SolveError, match="every activation is zero at every step"):
        balanced_weights(accumulate(rows), range(2))


def test_a_value_is_read_exactly_and_strictly():
    sums = accumulate(step_rows(np.random.default_rng(0)))
    assert weigher_of("alpha=0.15")(sums, range(2)) == [Fraction(3, 20), Fraction(17, 20)]
    assert weigher_of("balanced")(sums, range(4)) == balanced_weights(sums, range(4))
    for bad in ("alpha=2", "alpha=-1", "alpha=", "alpha", "alpha=1/0", "balanced=1"):
        with pytest.raises(ConfigError, match=f"^step_weights '{bad}': write "):
            Calibration(step_weights=bad)


@pytest.mark.slow
def test_step_weights_inside_asymmetric_calibration(tiny, tokens):
    """The first layers see the same inputs in both rollouts: there each weighting gives its open-loop codes."""
    for spec in ("alpha=1/4", "balanced"):
        run = prepared(tiny, tokens, step_weights=spec)
        plain = run.solve_from(run.all_steps(), run.config.changed(inputs="open"))
        result = run.solve(AsymmetricInputs())
        for task in run.tasks:
            report = result[task.name].report
            assert report["step_weighting"] == spec
            assert sum(report["step_weights"]) == pytest.approx(1.0)
            if task.input_group == run.tasks[0].input_group:
                np.testing.assert_array_equal(result[task.name].codes, plain[task.name].codes)
                assert report["step_weights"] == pytest.approx(plain[task.name].report["step_weights"])
    by_sum = prepared(tiny, tokens).solve(AsymmetricInputs())
    by_alpha = prepared(tiny, tokens, step_weights="alpha=1/3").solve(AsymmetricInputs())
    assert all(by_alpha[n].same_as(by_sum[n]) for n in by_sum)


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["balanced", "alpha=1/4"])
def test_a_dump_of_rows_knows_each_step_apart(loaded, tokens, tmp_path, weights):
    settings = SETTINGS | {"step_weights": weights}
    loopq.quantize(loaded, tokens, out=tmp_path / "plain", batch_size=3, **settings)
    collect_rows(job_of(loaded, tokens, batch_size=3), tmp_path / "dump")
    loopq.solve(tmp_path / "dump", out=tmp_path / "solved", threads=1, **settings)
    assert digest(tmp_path / "solved") == digest(tmp_path / "plain")
    collect_hessians(job_of(loaded, tokens, batch_size=3), tmp_path / "summed")
    with pytest.raises(ConfigError, match="only their sum was collected"):
        loopq.solve(tmp_path / "summed", **settings)


def test_a_value_may_have_a_sign_of_equality_on_the_command_line():
    args = parse(["quantize", "model", "--out", "q", "--set", "step_weights=alpha=0.15"])
    assert quant_config(args).layer.calibration.step_weights == "alpha=0.15"
