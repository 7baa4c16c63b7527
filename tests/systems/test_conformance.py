"""What every looped system must show, on every tiny model there is; a new system is picked up by its name."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from loopq.calibrate.hooks import Observer
from loopq.diagnose.feedback import intervened
from loopq.diagnose.rollouts import trace
from loopq.diagnose.stepmap import final_state
from loopq.errors import CalibrationError, ConfigError, SystemContractError
from loopq.gradients.unroll import unroll
from loopq.systems import SYSTEMS
from loopq.systems.base import LoopedSystem, find_system

from .models import CASES, Case, build, prompts

# Systems whose depth cannot be chosen.
_BUILT_IN = ("control", "generic", "mamba", "trm", "zamba")

pytestmark = pytest.mark.filterwarnings(
    # transformers says so where its optional kernels are absent.
    "ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*"
)

each = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
each_depth = pytest.mark.parametrize(
    ("case", "n_steps"),
    [(case, n) for case in CASES.values() for n in case.depths],
    ids=[f"{name}, {n} steps" for name, case in CASES.items() for n in case.depths],
)

each_stepping = pytest.mark.parametrize(
    "case", [c for c in CASES.values() if c.steps], ids=[name for name, c in CASES.items() if c.steps]
)
each_stepping_depth = pytest.mark.parametrize(
    ("case", "n_steps"),
    [(case, n) for case in CASES.values() if case.steps for n in case.depths],
    ids=[f"{name}, {n} steps" for name, case in CASES.items() if case.steps for n in case.depths],
)


def _open(case: Case) -> LoopedSystem:
    model = build(case)
    return SYSTEMS.get(case.system)(model) if case.system == "generic" else find_system(model)


def _watch(system: LoopedSystem, n_steps: int, run_at: int, case: Case) -> dict[str, list[int]]:
    """Rows that each parameter saw at each step, declared for `n_steps` and run at `run_at`."""
    rows: dict[str, list[int]] = {}

    def sink(parameter: Any, step: int, values: torch.Tensor) -> None:
        assert values.shape[1] == parameter.in_features
        assert step == len(rows.setdefault(parameter.name, []))
        rows[parameter.name].append(values.shape[0])

    batch = prompts(case)
    with (
        Observer(system, system.shared_parameters(n_steps), sink) as observer,
        observer.rollout(batch),
    ):
        system.rollout(batch, run_at)
    return rows


def test_every_registered_system_has_a_model() -> None:
    assert {case.system for case in CASES.values()} == set(SYSTEMS.names())


@each
def test_system_is_found_by_structure(case: Case) -> None:
    system = _open(case)
    assert system.name == case.system
    assert system.n_steps == case.depths[0]
    assert system.summary
    assert system.has_steps == case.steps
    if not case.steps:
        with pytest.raises(SystemContractError, match=r"no single-step function"):
            system.step(torch.zeros(1, 1, 1), None, 0, system.n_steps)


@each_depth
def test_same_seed_gives_the_same_bits(case: Case, n_steps: int) -> None:
    system = _open(case)
    torch.manual_seed(1)
    first = system.rollout(prompts(case), n_steps)
    torch.manual_seed(2)
    again = system.rollout(prompts(case), n_steps)
    assert torch.equal(first, again)
    assert first.shape[:2] == (3, case.n_tokens)
    assert torch.isfinite(first).all()
    assert not first.requires_grad


@each
def test_global_generator_is_left_alone(case: Case) -> None:
    system = _open(case)
    torch.manual_seed(5)
    before = torch.get_rng_state()
    system.shared_parameters(case.depths[0])
    if system.has_steps:
        batch = prompts(case)
        system.initial_state(batch, system.embed(batch))
    assert torch.equal(before, torch.get_rng_state())


@each
def test_seed_matters_exactly_where_the_state_is_random(case: Case) -> None:
    system = _open(case)
    n_steps = case.depths[0]
    first = system.rollout(prompts(case, seed=0), n_steps)
    other = system.rollout(prompts(case, seed=1), n_steps)
    assert torch.equal(first, other) != system.state_is_random


@each_depth
def test_hooks_count_what_is_declared(case: Case, n_steps: int) -> None:
    system = _open(case)
    shared = system.shared_parameters(n_steps)
    rows = _watch(system, n_steps, n_steps, case)
    assert len(shared) == case.n_shared
    assert {p.name: p.invocations for p in shared} == {name: len(r) for name, r in rows.items()}
    assert all(r > 0 for steps in rows.values() for r in steps)


@each
def test_declared_order_is_that_of_the_first_calls(case: Case) -> None:
    system = _open(case)
    n_steps = case.depths[0]
    names = [p.name for p in system.shared_parameters(n_steps)]
    assert names == list(_watch(system, n_steps, n_steps, case))


@each
def test_parameters_exist_and_each_is_declared_once(case: Case) -> None:
    system = _open(case)
    shared = system.shared_parameters(case.depths[0])
    objects = [system.parameter(p) for p in shared]
    assert len({id(o) for o in objects}) == len(objects)
    for parameter, found in zip(shared, objects, strict=True):
        for owner in parameter.owners:
            assert system.model.get_submodule(owner).weight is found
        shape = (parameter.out_features, parameter.in_features)
        assert tuple(found.shape) == (shape if parameter.orientation == "out_in" else shape[::-1])
        assert (parameter.treatment == "gptq") == (parameter.reason == "")
    declared = {id(o) for o in objects}
    for name, reason in system.left_out().items():
        assert id(system.model.get_parameter(name)) not in declared
        assert reason


@each
def test_no_matrix_called_repeatedly_is_forgotten(case: Case) -> None:
    system = _open(case)
    n_steps = case.depths[0]
    known = {id(system.parameter(p)) for p in system.shared_parameters(n_steps)}
    known |= {id(system.model.get_parameter(name)) for name in system.left_out()}
    calls: dict[int, int] = {}
    names: dict[int, str] = {}

    def count(module: torch.nn.Module, *_: Any) -> None:
        calls[id(module.weight)] = calls.get(id(module.weight), 0) + 1

    handles = []
    for name, module in system.model.named_modules():
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and not isinstance(module, torch.nn.Embedding):
            names[id(weight)] = name
            handles.append(module.register_forward_hook(count))
    system.rollout(prompts(case), n_steps)
    for handle in handles:
        handle.remove()
    forgotten = [names[key] for key, n in calls.items() if n > 1 and key not in known]
    assert forgotten == []


@each_stepping_depth
def test_chained_steps_are_the_rollout(case: Case, n_steps: int) -> None:
    system = _open(case)
    batch = prompts(case)
    expected = system.rollout(batch, n_steps)
    with torch.no_grad():
        embedding = system.embed(batch)
        state = system.initial_state(batch, embedding)
        for t in range(system.n_updates(n_steps)):
            state = system.step(state, embedding, t, n_steps)
        got = system.predict(state, embedding)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@each_stepping_depth
def test_unrolled_and_diagnosed_rollouts_are_the_rollout(case: Case, n_steps: int) -> None:
    """Also where reading the state out is itself the last pass through the loop's weights."""
    system = _open(case)
    batch = prompts(case)
    expected = system.rollout(batch, n_steps)
    torch.testing.assert_close(unroll(system, batch, n_steps).detach(), expected, rtol=1e-5, atol=1e-5)
    run = trace(system, batch, n_steps)
    assert len(run.states) == system.n_updates(n_steps) + 1
    assert list(run.outputs) == list(range(1, n_steps + 1))
    torch.testing.assert_close(run.outputs[n_steps], expected.float(), rtol=1e-5, atol=1e-5)
    _, state = final_state(system, batch, n_steps)
    torch.testing.assert_close(state, run.states[-1], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(intervened(system, batch, n_steps, run, 1.0), run.states[-1], rtol=0, atol=0)


@each_stepping
def test_step_keeps_the_graph(case: Case) -> None:
    system = _open(case)
    batch = prompts(case, n_prompts=1)
    with torch.no_grad():
        embedding = system.embed(batch)
        start = system.initial_state(batch, embedding)
    state = start.clone().requires_grad_()
    after = system.step(state, embedding, 0, case.depths[0])
    assert after.shape == state.shape
    (gradient,) = torch.autograd.grad(after.square().sum(), state)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


@each_stepping
def test_initial_state_does_not_depend_on_the_batch(case: Case) -> None:
    system = _open(case)
    whole, part = prompts(case, 3), prompts(case, 2, first=1)
    with torch.no_grad():
        a = system.initial_state(whole, system.embed(whole))
        b = system.initial_state(part, system.embed(part))
    torch.testing.assert_close(a[1:], b, rtol=0, atol=0 if system.state_is_random else 1e-6)


@each
def test_output_does_not_depend_on_the_batch(case: Case) -> None:
    system = _open(case)
    n_steps = case.depths[0]
    whole = system.rollout(prompts(case, 3), n_steps)
    part = system.rollout(prompts(case, 2, first=1), n_steps)
    torch.testing.assert_close(whole[1:], part, rtol=1e-4, atol=1e-4)


@each
def test_wrong_depth_is_refused(case: Case) -> None:
    system = _open(case)
    for n_steps in (0, -1):
        with pytest.raises(ConfigError, match=r"n_steps"):
            system.rollout(prompts(case), n_steps)
    if system.name in _BUILT_IN:
        with pytest.raises(ConfigError, match=r"n_steps"):
            system.rollout(prompts(case), case.depths[0] + 1)
    for other in case.depths[1:]:
        with pytest.raises(CalibrationError, match=r"declares"):
            _watch(system, case.depths[0], other, case)


@each
def test_second_rollout_in_one_scope_is_refused(case: Case) -> None:
    """A cached generation is a rollout for every token: its calls must not be taken for further steps."""
    system = _open(case)
    batch = prompts(case)
    with (
        Observer(system, system.shared_parameters(case.depths[0]), lambda *_: None) as observer,
        pytest.raises(CalibrationError, match=r"invocation"),
        observer.rollout(batch),
    ):
        system.rollout(batch, case.depths[0])
        system.rollout(batch, case.depths[0])


@each
def test_writing_one_weight_reaches_every_owner_and_changes_the_output(case: Case) -> None:
    system = _open(case)
    n_steps = case.depths[0]
    batch = prompts(case)
    before = system.rollout(batch, n_steps)
    names = {name: p.clone() for name, p in system.model.named_parameters()}
    declared = system.shared_parameters(n_steps)
    for shared in declared[:: max(1, len(declared) // 6)]:
        weight = system.parameter(shared)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5)
        assert not torch.equal(system.rollout(batch, n_steps), before), shared.name
        changed = [n for n, p in system.model.named_parameters() if not torch.equal(p, names[n])]
        assert changed == [shared.name]
        with torch.no_grad():
            weight.copy_(kept)
    assert torch.equal(system.rollout(batch, n_steps), before)


@each
def test_training_mode_and_settings_are_left_as_they_were(case: Case) -> None:
    system = _open(case)
    config = getattr(system.model, "config", None)
    before = dict(vars(config)) if config is not None else {}
    attributes = set(vars(system.model))
    for n_steps in case.depths:
        system.rollout(prompts(case), n_steps)
    assert (dict(vars(config)) if config is not None else {}) == before
    assert set(vars(system.model)) == attributes
    assert not system.model.training
