"""Loop metrics: against sums written out, that the solver gains by them, and that a killed collection is resumed."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch
from threadpoolctl import threadpool_limits

import loopq
from loopq import zoo
from loopq.calibrate.data import windows
from loopq.errors import CalibrationError, ConfigError, SolveError, SystemContractError
from loopq.evaluate.compare import compare
from loopq.gradients import collect_metrics as module
from loopq.gradients.collect_metrics import collect_metrics, draws, metric_cost
from loopq.gradients.scores import loop_fisher
from loopq.models.load import load_model
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from tests.support.kills import Kill, Killer, counting
from tests.support.runs import digest, run_of, tensors_of

BEST = {"preset": "best", "bits": 3, "group_size": 16, "batch_size": 3, "threads": 1}


def asked(**changes):
    return QuantConfig.of(
        **(
            {"method": "gptq-cd", "bits": 3, "group_size": 16, "metric": "loop", "rank_threshold": None}
            | changes
        )
    )


def prepared(tiny, tokens, **changes):
    """A run that asks for loop metrics, and the Hessians of all its steps."""
    run = run_of(tiny, tokens, asked(**changes))
    return run, run.all_steps()


def collected(run, sums, tokens, n_draws):
    """Metrics of that many draws for each prompt."""
    tasks = run.with_config(run.config.changed(metric_draws=n_draws)).tasks
    return collect_metrics(sums, run.job.system, tokens, tasks, 3, Execution(), Journal(None))


def test_is_one_round_of_the_alternation_written_out(tiny, tokens):
    run, sums = prepared(tiny, tokens)
    few = tokens.take(0, 3)
    found = collected(run, sums, few, 2)
    gradients = list(draws(tiny.system, few, [t.name for t in run.tasks], 3, 0, 2))
    assert len(gradients) == 6
    for task in run.tasks:
        name = task.name
        g = [x[name].double().numpy() for x in gradients]
        h = np.asarray(sums.accumulator(task.input_group, task.steps).matrix(list(task.steps)))
        left = sum(x @ np.linalg.inv(h + 0.01 * np.diag(np.diag(h))) @ x.T for x in g)
        left = left + 0.1 * np.diag(np.diag(left))
        right = sum(x.T @ np.linalg.inv(left) @ x for x in g)
        np.testing.assert_allclose(found[name].left[0], left, rtol=1e-7, atol=1e-9 * left.max())
        np.testing.assert_allclose(found[name].right, right, rtol=1e-7, atol=1e-9 * right.max())
        assert found[name].n_gradients == 6
        combined = found[name].combined(h)
        ratio = np.median(np.diag(right) / np.diag(h))
        np.testing.assert_allclose(combined, h * ratio + right, rtol=1e-7, atol=1e-9 * right.max())


def test_gradients_computed_twice_are_those_that_are_kept(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens)
    few = tokens.take(0, 2)
    kept = collected(run, sums, few, 2)
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    again = collected(run, sums, few, 2)
    monkeypatch.setattr(module, "BLOCK", 20)
    cut = collected(run, sums, few, 2)
    for name, one in kept.items():
        np.testing.assert_array_equal(one.left[0], again[name].left[0])
        np.testing.assert_array_equal(one.right, again[name].right)
        rows = len(one.left[0])
        assert [len(a) for a in cut[name].left] == [min(20, rows - i) for i in range(0, rows, 20)]


def test_gradients_are_of_the_likelihood_and_average_to_nothing(tiny, tokens):
    """The expected score is zero: the mean over many draws is far below the size of one."""
    name = "transformer.adapter.weight"
    found = [x[name].numpy() for x in draws(tiny.system, tokens.take(0, 2), [name], 3, 0, 60)]
    mean = np.linalg.norm(np.mean(found, axis=0))
    size = np.mean([np.linalg.norm(x) for x in found])
    assert mean < 0.35 * size


def other_logits_before(system, first):
    """A hook: the readout says something else, of the same weights, before a position."""

    def changed(module, inputs, out):
        return torch.cat([3.0 * out[:, :first], out[:, first:]], 1)

    return system.model.get_submodule("lm_head").register_forward_hook(changed)


def test_what_is_not_scored_has_no_part(tiny, tokens):
    """Gradients of metric and scores are of the answers alone: those of the question fooled INT2 of a chain."""
    few = dataclasses.replace(tokens.take(0, 6), scored_from=20)
    run = run_of(tiny, few, asked())
    layers = run.solve_from(run.all_steps())
    names = [t.name for t in run.tasks]
    candidates = {(n, "q"): w for n, w in tensors_of(layers).items()}

    def results(data):
        metric = next(iter(draws(tiny.system, data, names, 3, 0, 1)))
        scores = loop_fisher(tiny.system, candidates, data)
        return [*(g.numpy() for g in metric.values()), [*scores.values()]]

    answers, everything = results(few), results(tokens.take(0, 6))
    hook = other_logits_before(tiny.system, 20)
    same, other = results(few), results(tokens.take(0, 6))
    hook.remove()
    for a, b, c, d in zip(answers, same, everything, other, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not np.array_equal(c, d)
    assert few.digest() != tokens.take(0, 6).digest()
    with pytest.raises(CalibrationError, match="prompt 0 has 24 tokens, none of them scored"):
        dataclasses.replace(few, scored_from=24)


def test_threads_of_numpy_change_no_bit():
    loaded = load_model("huginn_small")
    text = windows(zoo.calibration_text().decode(), loaded.encode, 64, 2, "text")
    run = run_of(loaded, text, QuantConfig.of(preset="best"))
    sums, found = run.all_steps(), []
    for n in (1, 2):
        with threadpool_limits(n, user_api="blas"):
            tasks = run.with_config(run.config.changed(metric_draws=2)).tasks
            n_steps = run.job.selection.n_steps
            found.append(
                collect_metrics(sums, loaded.system, text, tasks, n_steps, Execution(), Journal(None))
            )
    for name, one in found[0].items():
        for a, b in zip((*one.left, one.right), (*found[1][name].left, found[1][name].right), strict=True):
            np.testing.assert_array_equal(a, b)


def test_lowers_the_divergence(tiny, tokens):
    run, sums = prepared(tiny, tokens, bits=2, metric_draws=8)
    variants = {"inputs": tensors_of(run.solve_from(sums, asked(bits=2, metric="inputs")))}
    assert not run.source.metrics
    layers = run.solve_from(sums)
    variants["loop"] = tensors_of(layers)
    for layer in layers.values():
        assert layer.report["metric"] == "loop"
        assert layer.report["metric_gradients"] == 80
        assert layer.report["coupled_settled"] <= layer.report["coupled_swept"]
    _, inputs, loop = compare(tiny.system, variants, tokens)
    assert loop.kl.mean() < 0.95 * inputs.kl.mean()


def test_other_steps_and_other_draws_have_other_metrics(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens.take(0, 3), metric_draws=2)
    seen = []
    monkeypatch.setattr(module, "unroll", counting(module.unroll, seen))
    found = {
        (steps, n_draws): run.solve_from(sums, asked(steps=steps, metric_draws=n_draws))
        for steps in ("all", "1:")
        for n_draws in (2, 3)
    }
    assert len(seen) == 3 * 4
    for (_, n_draws), layers in found.items():
        assert {x.report["metric_gradients"] for x in layers.values()} == {3 * n_draws}
    alone, its_sums = prepared(tiny, tokens.take(0, 3), metric_draws=3, steps="1:")
    expected = alone.solve_from(its_sums)
    assert all(found["1:", 3][n].same_as(x) for n, x in expected.items())
    # Bits, damping and step weights do not enter: nothing is collected again.
    run.solve_from(sums, asked(metric_draws=2, bits=2, damping=0.1, step_weights="balanced"))
    assert len(seen) == 3 * 4 + 3


def test_refuses_what_has_no_gradients(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens)
    with pytest.raises(SolveError, match="none were collected"):
        run.solver(sums).run(run.tasks)
    with pytest.raises(ConfigError, match="metric goes with method gptq-cd"):
        asked(method="gptq")
    with pytest.raises(ConfigError, match="metric_draws"):
        asked(metric_draws=0)
    mixed = QuantConfig(
        layer=asked(metric_draws=2).layer, overrides=(Override("*adapter*", {"metric_draws": 3}),)
    )
    with pytest.raises(ConfigError, match="metric_prompts and metric_draws must be the same for all layers"):
        run.with_config(mixed).solve_from(sums)
    monkeypatch.setattr(type(tiny.system), "has_steps", False)
    monkeypatch.setattr(type(tiny.system), "differentiable", lambda self: contextlib.nullcontext())
    with pytest.raises(SystemContractError, match="lets no gradient through"):
        run.solve_from(sums)


def test_a_layer_that_no_gradient_reaches_is_named(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens)
    some = draws

    def without(*args):
        return ({n: g for n, g in found.items() if "adapter" not in n} for found in some(*args))

    monkeypatch.setattr(module, "draws", without)
    with pytest.raises(SystemContractError, match=r"no gradient reaches transformer\.adapter\.weight: use"):
        run.solve_from(sums)


def test_what_it_takes_is_said_before(tiny, tokens, monkeypatch):
    tasks = run_of(tiny, tokens, asked(metric_draws=4)).tasks
    assert metric_cost(run_of(tiny, tokens).tasks, 10) == module.MetricCost(0, 1, 0.0, 0)
    n_weights = sum(t.parameter.in_features * t.parameter.out_features for t in tasks)
    kept = metric_cost(tasks, 10)
    monkeypatch.setattr(module, "KEPT_BYTES", 0)
    twice = metric_cost(tasks, 10)
    assert (kept.n_gradients, twice.n_gradients) == (40, 80)
    assert kept.memory - twice.memory == 4 * 40 * n_weights
    assert kept.multiply_adds == twice.multiply_adds > 0


@pytest.mark.parametrize("kappa", [4.0**7, 4.0**10])
def test_a_spike_that_changes_no_function_changes_no_code(tiny, tokens, kappa):
    """One hidden unit kappa times louder, its outgoing column smaller: every other code stays."""
    from benches.zoo.planted import plant_kappa_spike

    ids = torch.from_numpy(np.stack(tokens.sequences))
    found = {}
    # From about 100 on the planted column rounds to nothing, and its group has the scale of the others.
    for value in (256.0, kappa):
        model, units = plant_kappa_spike(tiny.model, ids, value)
        planted = dataclasses.replace(tiny, model=model, system=type(tiny.system)(model))
        # A row 10^6 times larger has a scale beyond float16.
        run, sums = prepared(planted, tokens, damping_kind="diagonal", scale_dtype="float32", metric_draws=2)
        found[value] = run.solve_from(sums)
    one, other = found.values()
    for name, layer in one.items():
        keep = np.ones(layer.codes.shape[1], dtype=bool)
        for mlp, unit in units.items():
            if name == f"{mlp}.proj.weight":
                keep[unit] = False
        changed = (layer.codes[:, keep] != other[name].codes[:, keep]).mean()
        assert changed == 0, (name, changed)


# Ten prompts collected, two rounds of forty gradients, nine layers; kept in memory, one round.
@pytest.mark.parametrize(
    ("kept", "at", "prompts"),
    [(0, 9, 20), (0, 26, 16), (0, 49, 10), (0, 75, 4), (0, 91, 0), (1 << 30, 30, 10), (1 << 30, 51, 0)],
)
def test_a_killed_collection_is_resumed(loaded, tokens, tmp_path, monkeypatch, kept, at, prompts):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    monkeypatch.setattr(module, "KEPT_BYTES", kept)
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **BEST)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(at), **BEST)
    seen = []
    monkeypatch.setattr(module, "unroll", counting(module.unroll, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **BEST)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert len(seen) == prompts
    assert not list(tmp_path.glob(".killed*"))


def test_metrics_ahead_of_asymmetric_calibration_are_not_collected_again(
    loaded, tokens, tmp_path, monkeypatch
):
    """Killed while layers are solved one after the other: Hessians and gradients of the pass before are there."""
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    settings = BEST | {"inputs": "asymmetric"}
    few = tokens.take(0, 3)
    loopq.quantize(loaded, few, out=tmp_path / "whole", **settings)
    with pytest.raises(Kill):
        loopq.quantize(loaded, few, out=tmp_path / "killed", progress=Killer(3 + 12 + 4), **settings)
    seen = []
    monkeypatch.setattr(module, "unroll", counting(module.unroll, seen))
    loopq.quantize(loaded, few, out=tmp_path / "killed", **settings)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert seen == []
