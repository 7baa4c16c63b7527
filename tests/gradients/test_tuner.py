"""Tuning by gradient, on the tiny model."""

from __future__ import annotations

import numpy as np
import pytest

from loopq.errors import ConfigError, NonFiniteError
from loopq.evaluate.compare import compare
from loopq.gradients.tuner import Tune, tune
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.storage.journal import Journal
from tests.support.kills import Counter, Kill, Killer
from tests.support.runs import run_of, tensors_of


@pytest.fixture
def layers(tiny, tokens):
    config = QuantConfig.of(method="gptq-cd", bits=2, group_size=16, rank_threshold=None)
    run = run_of(tiny, tokens, config)
    return run.config.inputs.solve(run)


@pytest.mark.parametrize("what", ["scales", "codes"])
def test_tuning_lowers_the_divergence_and_keeps_the_format(tiny, tokens, layers, what):
    train, held_out = tokens.take(0, 7), tokens.take(7)
    config = Tune(
        what=what, n_updates=60, every=20, patience=9, scale_rate=1e-2, code_rate=2e-2, batch_size=7
    )
    found = tune(tiny.system, layers, (train, held_out), config)
    assert min(v for _, v in found.history) < found.history[0][1]
    assert found.history[0][0] == 0
    variants = {"before": tensors_of(layers), "after": tensors_of(found.layers)}
    _, before, after = compare(tiny.system, variants, held_out)
    assert after.kl.mean() < before.kl.mean()
    for name, layer in found.layers.items():
        assert layer.n_bytes == layers[name].n_bytes
        assert layer.codes.min() >= -2
        assert layer.codes.max() <= 1
        np.testing.assert_array_equal(layer.scales, layer.scales.astype(np.float16).astype(np.float32))
        assert layer.report["tier"] == f"gradient, {what}"
    assert (found.flipped > 0) == (what == "codes")
    again = tune(tiny.system, layers, (train, held_out), config)
    assert all(again.layers[n].same_as(found.layers[n]) for n in layers)


def test_refuses_to_stop_early_on_what_it_tuned_on(tiny, tokens, layers):
    with pytest.raises(ConfigError, match="held-out"):
        tune(tiny.system, layers, (tokens, tokens.take(2, 3)))
    for bad in ({"what": "all"}, {"n_updates": 0}, {"every": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Tune(**bad)


def test_a_rate_that_is_too_large_is_told_and_an_input_transform_refused(tiny, tokens, layers):
    train, held_out = tokens.take(0, 2), tokens.take(7)
    with pytest.raises(NonFiniteError, match=r"update \d+: the loss is .*; lower scale_rate and code_rate"):
        tune(tiny.system, layers, (train, held_out), Tune(n_updates=20, scale_rate=1e30))
    name = "transformer.adapter.weight"
    config = QuantConfig.of(group_size=16, rotation="hadamard:16")
    run = run_of(tiny, tokens, config)
    turned = run.config.inputs.solve(run)
    with pytest.raises(ConfigError, match=rf"layer {name}: has an input transform"):
        tune(tiny.system, {name: turned[name]}, (train, held_out))


@pytest.mark.parametrize("what", ["scales", "codes"])
def test_a_killed_run_goes_on_to_the_same_result(tiny, tokens, layers, what, tmp_path):
    train, held_out = tokens.take(0, 7), tokens.take(7)
    config = Tune(what=what, n_updates=9, every=3, scale_rate=1e-2, code_rate=2e-2, batch_size=4)
    whole = tune(tiny.system, layers, (train, held_out), config)
    journal, seen = Journal(tmp_path, "key"), []
    with pytest.raises(Kill):
        tune(
            tiny.system,
            layers,
            (train, held_out),
            config,
            journal=journal,
            execution=Execution(progress=Killer(5)),
        )
    again = tune(
        tiny.system,
        layers,
        (train, held_out),
        config,
        journal=journal,
        execution=Execution(progress=Counter(seen)),
    )
    assert sum(seen) == 3 + 6
    assert seen[0] == 3
    assert again.history == whole.history
    assert again.flipped == whole.flipped
    for name, layer in whole.layers.items():
        assert layer.same_as(again.layers[name])
        assert layer.report == again.layers[name].report
