"""Loop metrics: against sums written out, that the solver gains by them, and that a killed collection is resumed."""

from __future__ import annotations

import contextlib
import dataclasses

import numpy as np
import pytest
import torch

import loopq
from loopq.errors import CalibrationError, ConfigError, SolveError, SystemContractError
from loopq.evaluation.compare import compare
from loopq.gradients import backward, sketch
from loopq.gradients import collect_metrics as module
from loopq.gradients.collect_metrics import collect_metrics, metric_cost
from loopq.quantizers.config import Override
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from tests.support.accelerator import DEVICE, accelerator
from tests.support.exact_metric import exact_metrics
from tests.support.kills import Kill, Killer, counting
from tests.support.marks import slow_unless
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


def collected(run, sums, tokens, n_draws, n_prompts=None):
    """Metrics of that many draws for each prompt, and the tasks that ask for them."""
    tasks = run.with_config(run.config.changed(metric_draws=n_draws, metric_prompts=n_prompts)).tasks
    return collect_metrics(sums, run.job.system, tokens, tasks, 3, Execution(), Journal(None)), tasks


def assert_close(metrics, expected, rtol):
    assert metrics.keys() == expected.keys()
    for name, one in expected.items():
        for a, b in zip((*metrics[name].left, metrics[name].right), (*one.left, one.right), strict=True):
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max(), err_msg=name)


def test_narrow_layers_have_the_exact_metric(tiny, tokens):
    """Where a thin matrix has all columns, the sums are those of whole gradients."""
    run, sums = prepared(tiny, tokens)
    few = tokens.take(0, 3)
    metrics, tasks = collected(run, sums, few, 2)
    assert max(max(t.parameter.in_features, t.parameter.out_features) for t in tasks) <= module.rank_of(3)
    expected = exact_metrics(sums, tiny.system, few, tasks, 3)
    assert_close(metrics, expected, 1e-4)
    for task in tasks:
        h = np.asarray(sums.accumulator(task.input_group, task.steps).matrix(list(task.steps)))
        right = metrics[task.name].right
        ratio = np.median(np.diag(right) / np.diag(h))
        np.testing.assert_allclose(metrics[task.name].combined(h), h * ratio + right, rtol=1e-12)
        assert metrics[task.name].n_gradients == 6


def test_thin_matrices_are_right_on_average(tiny, tokens, monkeypatch):
    """Few columns and several blocks of outputs: the mean over seeds is near the exact sums, one seed is not."""
    run, sums = prepared(tiny, tokens)
    few = tokens.take(0, 4)
    monkeypatch.setattr(module, "BLOCK", 20)
    monkeypatch.setattr("tests.support.exact_metric.BLOCK", 20)
    monkeypatch.setattr(module, "MOST", 4)
    # Sums alone: couplings are shrunk by their noise, of which thin matrices have more.
    monkeypatch.setattr(sketch.Both, "finish", lambda self, n_gradients: None)
    monkeypatch.setattr("tests.support.exact_metric.shrunk", lambda each, scale: sum(each))
    tasks = [t for t in run.tasks if "mlp" in t.name]
    exact = exact_metrics(sums, tiny.system, few, tasks, 3)
    seed_of, draws = sketch.seed_of, []
    for more in range(24):
        monkeypatch.setattr(sketch, "seed_of", lambda *asked, more=more: [*seed_of(*asked), more])
        draws.append(collect_metrics(sums, tiny.system, few, tasks, 3, Execution(), Journal(None)))
    for name, one in exact.items():
        for i, block in enumerate(one.left):
            each = [m[name].left[i] for m in draws]
            off = [np.linalg.norm(x - block) / np.linalg.norm(block) for x in (np.mean(each, 0), each[0])]
            assert off[0] < 0.2 < off[1]


def test_activations_computed_again_give_the_same_metric(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens)
    few = tokens.take(0, 2)
    kept, _ = collected(run, sums, few, 2)
    monkeypatch.setattr("loopq.gradients.unroll.ACTIVATION_BYTES", 0)
    assert_close(collected(run, sums, few, 2)[0], kept, 1e-4)


def test_a_run_leaves_the_model_as_it_was(tiny, tokens):
    run, sums = prepared(tiny, tokens)
    tiny.model.get_parameter("transformer.adapter.weight").requires_grad_(True)
    before = [p.requires_grad for p in tiny.model.parameters()]
    collected(run, sums, tokens.take(0, 1), 1)
    assert [p.requires_grad for p in tiny.model.parameters()] == before
    assert not any(m._forward_hooks for m in tiny.model.modules())
    assert all(p.grad is None for p in tiny.model.parameters())


def other_logits_before(system, first):
    """A hook: the readout says something else, of the same weights, before a position."""

    def changed(module, inputs, out):
        return torch.cat([3.0 * out[:, :first], out[:, first:]], 1)

    return system.model.get_submodule("lm_head").register_forward_hook(changed)


def test_what_is_not_scored_has_no_part(tiny, tokens):
    """Gradients of the metric are of the answers alone: those of the question fooled INT2 of a chain."""
    few = dataclasses.replace(tokens.take(0, 6), scored_from=20)
    run, sums = prepared(tiny, few)

    def results(data):
        metric, _ = collected(run, sums, data, 1, n_prompts=1)
        return [m.right for m in metric.values()]

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
    monkeypatch.setattr(backward, "unroll", counting(backward.unroll, seen))
    by_case = {
        (steps, n_draws): run.solve_from(sums, asked(steps=steps, metric_draws=n_draws))
        for steps in ("all", "1:")
        for n_draws in (2, 3)
    }
    assert len(seen) == (1 + 3) * 4
    for (_, n_draws), layers in by_case.items():
        assert {x.report["metric_gradients"] for x in layers.values()} == {3 * n_draws}
    alone, its_sums = prepared(tiny, tokens.take(0, 3), metric_draws=3, steps="1:")
    expected = alone.solve_from(its_sums)
    assert all(by_case["1:", 3][n].same_as(x) for n, x in expected.items())
    # Bits and damping do not matter here, so a second run collects nothing.
    run.solve_from(sums, asked(metric_draws=2, bits=2, damping=0.1))
    assert len(seen) == (1 + 3) * (4 + 1)


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
    monkeypatch.setattr("loopq.gradients.unroll.differentiable", contextlib.nullcontext)
    with pytest.raises(SystemContractError, match="lets no gradient through"):
        run.solve_from(sums)


def test_a_layer_that_no_gradient_reaches_is_named(tiny, tokens, monkeypatch):
    run, sums = prepared(tiny, tokens)
    take = sketch.Side.take

    def without(self, name, *args):
        if "adapter" not in name:
            take(self, name, *args)

    monkeypatch.setattr(sketch.Side, "take", without)
    with pytest.raises(SystemContractError, match=r"no gradient reaches transformer\.adapter\.weight: use"):
        run.solve_from(sums)


def test_what_it_takes_is_said_before(tiny, tokens):
    tasks = run_of(tiny, tokens, asked(metric_draws=4)).tasks
    assert metric_cost(run_of(tiny, tokens).tasks, tokens) == module.MetricCost(0, 1, 0.0, 0, 0)
    cost = metric_cost(tasks, tokens)
    assert (cost.n_gradients, cost.n_draws) == (4 * (2 + len(tokens.sequences)), 4)
    half = metric_cost(tasks, dataclasses.replace(tokens, sequences=tokens.sequences[:5]))
    assert half.n_gradients == 4 * (1 + 5)
    # The thin matrices of wide layers grow narrower as prompts become more; no more than that is held.
    assert half.memory >= cost.memory >= cost.kept
    # Four bytes for each entry of A's blocks and of S.
    p = [t.parameter for t in tasks]
    assert cost.kept == 4 * sum(q.in_features**2 + q.out_features * min(512, q.out_features) for q in p)
    # Layers of one input have one root.
    first, *others = [t for t in tasks if t.input_group == tasks[0].input_group]
    apart = [first, *(dataclasses.replace(t, input_group=t.name) for t in others)]
    wide = first.parameter.in_features
    more = metric_cost(apart, tokens).memory - metric_cost([first, *others], tokens).memory
    assert more == len(others) * 4 * wide**2


@pytest.mark.parametrize("kappa", [4.0**7, 4.0**10])
def test_a_spike_that_changes_no_function_changes_no_code(tiny, tokens, kappa):
    """One hidden unit kappa times louder, its outgoing column smaller: every other code stays."""
    from benches.zoo.planted import plant_kappa_spike

    ids = torch.from_numpy(np.stack(tokens.sequences))
    by_value = {}
    # From about 100 on the planted column rounds to nothing, and its group has the scale of the others.
    for value in (256.0, kappa):
        model, units = plant_kappa_spike(tiny.model, ids, value)
        planted = dataclasses.replace(tiny, model=model, system=type(tiny.system)(model))
        # A row 10^6 times larger has a scale beyond float16.
        # No level of a table is zero.
        even = {"levels": "even", "scale_dtype": "float32"}
        run, sums = prepared(planted, tokens, damping_kind="diagonal", metric_draws=2, **even)
        by_value[value] = run.solve_from(sums)
    one, other = by_value.values()
    for name, layer in one.items():
        keep = np.ones(layer.codes.shape[1], dtype=bool)
        for mlp, unit in units.items():
            if name == f"{mlp}.proj.weight":
                keep[unit] = False
        changed = (layer.codes[:, keep] != other[name].codes[:, keep]).mean()
        assert changed == 0, (name, changed)


# Ten prompts collected, eight gradients of two of them ahead, forty of all, nine layers. One more is the estimate's.
@pytest.mark.parametrize(
    ("at", "prompts"), slow_unless(lambda c: c[0] == 26, [(9, 13), (14, 12), (26, 9), (49, 3), (59, 1)])
)
def test_a_killed_collection_is_resumed(loaded, tokens, tmp_path, monkeypatch, at, prompts):
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    loopq.quantize(loaded, tokens, out=tmp_path / "whole", **BEST)
    with pytest.raises(Kill):
        loopq.quantize(loaded, tokens, out=tmp_path / "killed", progress=Killer(at), **BEST)
    seen = []
    monkeypatch.setattr(backward, "unroll", counting(backward.unroll, seen))
    loopq.quantize(loaded, tokens, out=tmp_path / "killed", **BEST)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert len(seen) == prompts
    assert not list(tmp_path.glob(".killed*"))


def test_metrics_are_kept_for_asymmetric_calibration(loaded, tokens, tmp_path, monkeypatch):
    """Killed while layers are solved one after the other: Hessians and gradients of the pass before are there."""
    monkeypatch.setattr("loopq.storage.journal.Snapshots.due", lambda _: True)
    settings = BEST | {"inputs": "asymmetric"}
    few = tokens.take(0, 3)
    loopq.quantize(loaded, few, out=tmp_path / "whole", **settings)
    with pytest.raises(Kill):
        loopq.quantize(loaded, few, out=tmp_path / "killed", progress=Killer(3 + 16 + 4), **settings)
    seen = []
    monkeypatch.setattr(backward, "unroll", counting(backward.unroll, seen))
    loopq.quantize(loaded, few, out=tmp_path / "killed", **settings)
    assert digest(tmp_path / "killed") == digest(tmp_path / "whole")
    assert len(seen) == 1, "the estimate times one"


def test_a_metric_is_made_where_the_model_is(tiny, tokens):
    few = tokens.take(0, 3)
    run, sums = prepared(tiny, few)
    expected, _ = collected(run, sums, few, 2)
    with accelerator():
        tiny.model.to(DEVICE)
        metrics, _ = collected(run, sums, few, 2)
    assert_close(metrics, expected, 1e-6)
