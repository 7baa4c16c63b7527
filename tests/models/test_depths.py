"""Several depths at once: sums, gradients and records are those of all of them together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import loopq
from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import ConfigError
from loopq.models.depths import Depths
from tests.support.systems import CASES, build, prompts


def _hessians(system, tokens, n_steps=None):
    selection = select(system, tokens, n_steps=n_steps)
    steps = {p.name: range(p.invocations) for p in selection.distinct_inputs}
    sums = HessianSet(Collection(system, tokens, selection), steps)
    sums.run_pass(list(steps))
    return {name: sums.accumulators[name].matrix(list(steps[name])) for name in steps}


def test_hessians_are_those_of_the_depths_together(tiny, tokens):
    few = tokens.take(0, 2)
    both = _hessians(Depths(tiny.system, (1, 3)), few)
    one, three = (_hessians(tiny.system, few, n) for n in (1, 3))
    assert both.keys() == one.keys()
    for name, h in both.items():
        np.testing.assert_allclose(h, one[name] + three[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["Ouro", "transformers ALBERT"])
def test_outputs_stand_one_after_another_and_calls_add_up(name):
    case = CASES[name]
    system = load_system(build(case))
    batch = prompts(case)
    deep = Depths(system, (2, 1))
    expected = torch.cat([system.rollout(batch, n) for n in (2, 1)], dim=1)
    assert torch.equal(deep.rollout(batch, 2), expected)
    calls = {p.name: p.invocations for p in deep.shared_parameters(2)}
    assert calls == {
        p.name: p.invocations + q.invocations
        for p, q in zip(system.shared_parameters(2), system.shared_parameters(1), strict=True)
    }


def load_system(model):
    from loopq.models.from_python import wrap

    return wrap(model).system


def test_a_checkpoint_of_several_depths_says_so_and_serves_each():
    ids = [list(range(i, i + 24)) for i in range(4)]
    result = loopq.quantize("huginn_small", ids, n_steps=(1, 2), bits=3, group_size=32, threads=1)
    assert (result.settings["n_steps"], result.settings["depths"]) == (2, [1, 2])
    kl = [
        loopq.evaluate("huginn_small", {"q": result}, ids, n_steps=n, threads=1)[1].kl.mean() for n in (1, 2)
    ]
    assert all(0 < k < 1 for k in kl)
    with pytest.raises(ConfigError, match="different ones"):
        loopq.quantize("huginn_small", ids, n_steps=(2, 2), threads=1)


def test_another_depth_than_the_largest_is_refused(tiny):
    with pytest.raises(ConfigError, match="several depths run at once: 2, 3; got 2"):
        Depths(tiny.system, (2, 3)).check_depth(2)
