"""Hooks: they see what they should, change nothing, and are gone afterwards."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from loopq.calibrate.hessian_set import HessianSet
from loopq.calibrate.hooks import Observer, find_input_groups
from loopq.calibrate.rollouts import Collection
from loopq.calibrate.select import select
from loopq.errors import CalibrationError, NonFiniteError


def _batch(tokens, n=2):
    return next(iter(tokens.take(0, n).batches(n)))


def _n_hooks(model):
    return sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())


def test_steps_are_invocations_and_logits_are_untouched(tiny, tokens):
    batch = _batch(tokens)
    before = tiny.system.rollout(batch, 3)
    seen = []
    parameters = tiny.system.shared_parameters(3)
    with Observer(
        tiny.system, parameters, lambda p, t, x: seen.append((p.name, t, tuple(x.shape)))
    ) as observer:
        for _ in range(2):
            with observer.rollout(batch):
                during = tiny.system.rollout(batch, 3)
    assert torch.equal(before, during)
    per_rollout = [(p.name, t, (48, p.in_features)) for t in range(3) for p in parameters]
    assert seen == per_rollout * 2
    assert _n_hooks(tiny.model) == 0


def test_hooks_are_gone_after_an_error(tiny, tokens):
    def fail(parameter, step, rows):
        raise RuntimeError("sink is full")

    with pytest.raises(RuntimeError, match="sink is full"):
        with (
            Observer(tiny.system, tiny.system.shared_parameters(3), fail) as observer,
            observer.rollout(_batch(tokens)),
        ):
            tiny.system.rollout(_batch(tokens), 3)
    assert _n_hooks(tiny.model) == 0


def test_calls_outside_a_rollout_belong_to_no_step(tiny, tokens):
    seen = []
    with Observer(tiny.system, tiny.system.shared_parameters(3), lambda p, t, x: seen.append(t)):
        tiny.system.rollout(_batch(tokens), 3)
    assert seen == []


@pytest.mark.parametrize("fixed", [True, False])
def test_a_rollout_of_fixed_depth_ends_with_its_last_row(tiny, tokens, fixed, monkeypatch):
    for name in () if fixed else ("look", "missed"):  # A system that discovers its loop.
        monkeypatch.setattr(type(tiny.system), name, lambda *_: None, raising=False)
    parameters, seen = tiny.system.shared_parameters(3), []
    with Observer(tiny.system, parameters, lambda p, t, x: seen.append((p.name, t)), ends=True) as observer:
        for _ in range(2):
            out = None
            with observer.rollout(_batch(tokens)):
                out = tiny.system.rollout(_batch(tokens), 3)
            assert (out is None) is fixed
    assert seen == [(p.name, t) for t in range(3) for p in parameters] * 2


@pytest.mark.parametrize(("declared", "run", "match"), [(4, 3, "called 3 times"), (2, 3, "invocation 2")])
def test_wrong_depth_is_refused(tiny, tokens, declared, run, match):
    batch = _batch(tokens)
    with pytest.raises(CalibrationError, match=match):
        with Observer(tiny.system, tiny.system.shared_parameters(declared), lambda *a: None) as observer:
            with observer.rollout(batch):
                tiny.system.rollout(batch, run)


def test_a_layer_that_is_never_called_is_an_error(tiny, tokens):
    tiny.model.spare = torch.nn.Linear(32, 32, bias=False)
    spare = dataclasses.replace(
        tiny.system.shared_parameters(3)[0], name="spare.weight", owners=("spare",), in_features=32
    )
    batch = _batch(tokens)
    with pytest.raises(CalibrationError, match=r"spare\.weight: selected but never observed"):
        with Observer(tiny.system, [spare], lambda *a: None) as observer, observer.rollout(batch):
            tiny.system.rollout(batch, 3)


def test_one_module_under_two_names_counts_once(tiny, tokens):
    tiny.model.alias = tiny.model.transformer["adapter"]
    adapter = tiny.system.shared_parameters(3)[0]
    assert set(adapter.owners) == {"transformer.adapter", "alias"}
    seen = []
    batch = _batch(tokens)
    with (
        Observer(tiny.system, [adapter], lambda p, t, x: seen.append(t)) as observer,
        observer.rollout(batch),
    ):
        tiny.system.rollout(batch, 3)
    assert seen == [0, 1, 2]


def test_nan_is_named_by_layer_step_and_row(tiny, tokens):
    fc = tiny.model.transformer["core_block"][1].mlp.fc
    calls = []

    def poison(module, args):
        calls.append(1)
        if len(calls) == 2:
            x = args[0].clone()
            x[1, 5, 7] = float("nan")
            return (x,)
        return None

    handle = fc.register_forward_pre_hook(poison)
    try:
        job = Collection(tiny.system, tokens, select_without(tiny, tokens, handle, fc, poison))
        sums = HessianSet(job, {p.name: [0, 1, 2] for p in job.selection.distinct_inputs})
        calls.clear()
        with pytest.raises(
            NonFiniteError, match=r"core_block\.1\.mlp\.fc\.weight, step 1, row 29 \(prompt 1, position 5\)"
        ):
            sums.run_pass(list(sums.steps))
    finally:
        handle.remove()
    assert _n_hooks(tiny.model) == 0


def select_without(tiny, tokens, handle, module, hook):
    """Select with the poison taken off for the probe rollout, and put back after it."""
    handle.remove()
    selection = select(tiny.system, tokens)
    again = module.register_forward_pre_hook(hook)
    handle.id, handle.hooks_dict_ref = again.id, again.hooks_dict_ref
    return selection


@pytest.mark.parametrize("declared", ["qko", "okq"])
def test_an_input_group_has_the_name_of_the_layer_that_is_called_first(tokens, declared):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.o = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

        def forward(self, x):
            return self.o(self.q(x) + self.k(x))

    from loopq.systems.base import LoopedSystem
    from loopq.systems.declare import declare

    class System(LoopedSystem):
        name = "made"
        n_steps = 2

        @classmethod
        def matches(cls, model):
            return False

        def shared_parameters(self, n_steps):
            return declare(self.model, [(m, {"role": "attention"}) for m in declared], n_steps)

        def rollout(self, batch, n_steps):
            x = batch.input_ids.float()[..., None].expand(-1, -1, 4).contiguous()
            with torch.no_grad():
                for _ in range(n_steps):
                    x = self.model(x)
            return x

    system = System(Model())
    groups, _, _ = find_input_groups(system, system.shared_parameters(2), _batch(tokens, 1), 2)
    assert groups == {"q.weight": "q.weight", "k.weight": "q.weight", "o.weight": "o.weight"}


def test_initial_states_do_not_depend_on_the_batch(tiny, tokens):
    together = tiny.system.initial_state(_batch(tokens, 3), None)
    alone = [tiny.system.initial_state(b, None) for b in tokens.take(0, 3).batches(1)]
    assert torch.equal(together, torch.cat(alone))
    before = torch.random.get_rng_state()
    tiny.system.rollout(_batch(tokens), 3)
    assert torch.equal(before, torch.random.get_rng_state())


def test_an_observer_outside_its_block_is_refused(tiny, tokens):
    observer = Observer(tiny.system, tiny.system.shared_parameters(2), lambda *_: None)
    with pytest.raises(CalibrationError, match="used outside its block"), observer.rollout(tokens.first()):
        pass
