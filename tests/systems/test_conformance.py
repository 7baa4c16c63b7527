"""Requirements on every looped system, tested on each of its tiny models: all that the registry has.

`loopq check` tests repeatability, counts of calls, single steps and initial states, as users check their models. The
other tests cover the rest.
"""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from loopq.analysis.diagnosis.rollouts import trace
from loopq.analysis.diagnosis.sections.feedback import intervened
from loopq.calibrate.data import TokenSet
from loopq.calibrate.hooks import Observer
from loopq.errors import CalibrationError, ConfigError, LoopqError, SystemContractError
from loopq.gradients.backward import Backward
from loopq.gradients.unroll import unroll
from loopq.models.check import check_model
from loopq.models.experts import unfuse
from loopq.models.stream import Stream, layers_of
from loopq.quantizers.config import LayerConfig
from loopq.quantizers.task import Task
from loopq.storage.model_files import raw
from loopq.systems import SYSTEMS
from loopq.systems.base import LoopedSystem, differentiable
from loopq.systems.capabilities import Discovers
from loopq.systems.declare import parameter_of
from loopq.systems.stepwise import single_steps, steps_of
from tests.support.accelerator import DEVICE, accelerator
from tests.support.exact_metric import Noted
from tests.support.systems import CASES, Case, as_loaded, build, open_system, prompts

# Systems with a fixed depth.
_BUILT_IN = ("control", "generic", "mamba", "trm", "zamba")


def _watch(system: LoopedSystem, n_steps: int, run_at: int, case: Case) -> dict[str, dict[int, int]]:
    """Rows that each parameter saw at each step, declared for `n_steps` and run at `run_at`."""
    rows: dict[str, dict[int, int]] = {}

    def sink(parameter: Any, step: int, values: torch.Tensor) -> None:
        assert values.shape[1] == parameter.in_features
        by_step = rows.setdefault(parameter.name, {})
        # An expert may be left out by any step; no other weight is.
        assert step > max(by_step, default=-1) if parameter.routed_in else step == len(by_step)
        by_step[step] = values.shape[0]

    batch = prompts(case)
    with (
        Observer(system, system.shared_parameters(n_steps), sink) as observer,
        observer.rollout(batch),
    ):
        assert not system.rollout(batch, run_at).requires_grad
    return rows


def _gradients(
    system: LoopedSystem, ids: torch.Tensor, n_steps: int, at_once: int
) -> list[tuple[str, float]]:
    side, tokens = Noted(), TokenSet(tuple(ids.numpy()), "test", "prompts")
    tasks = [Task(p, LayerConfig(), (), None) for p in system.shared_parameters(n_steps)]
    for _ in Backward(system, tokens, n_steps, 2, 0, at_once).run(side, tasks, 0, len(ids)):
        pass
    return side.found


# transformers says so where its optional kernels are absent.
pytestmark = pytest.mark.filterwarnings("ignore:.*(mamba_ssm|causal_conv1d|fast path|kernels).*")

#: Models that are no variant of another of their system.
_CORE = {
    name: case
    for name, case in CASES.items()
    if not case.variant or all(other.variant for other in CASES.values() if other.system == case.system)
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give each test the models that it asks for: every `case`, each `core`, or those that have a single step."""
    if "n_steps" in metafunc.fixturenames:
        each = [(f"{name}, {n} steps", case, n) for name, case in CASES.items() for n in case.depths]
        names = [name for name, _, _ in each]
        metafunc.parametrize(("case", "n_steps"), [(case, n) for _, case, n in each], ids=names)
        return
    stepping = {name: case for name, case in _CORE.items() if case.steps}
    for argument, of in (("case", CASES), ("core", _CORE), ("stepping", stepping)):
        if argument in metafunc.fixturenames:
            metafunc.parametrize(argument, of.values(), ids=of.keys())


def test_every_registered_system_has_a_model() -> None:
    assert {case.system for case in CASES.values()} == set(SYSTEMS.names())


def test_the_checks_of_loopq_check_pass(case: Case, n_steps: int) -> None:
    system = open_system(case)
    report = check_model(as_loaded(system), n_steps=n_steps)
    assert report.ok, "\n".join(report.lines())
    verdicts = {v.check: v.ok for v in report.verdicts}
    assert len(verdicts) == 9
    assert verdicts["initial state"] == (True if system.state_is_random else None)
    assert verdicts["single steps"] == (True if case.steps else None)


def test_a_rollout_follows_the_models_device(case: Case) -> None:
    system, batch = open_system(case), prompts(case)
    expected = system.rollout(batch, system.n_steps)
    # A class may take another operation where it does not see the processor, which the processor lacks.
    with accelerator(), contextlib.suppress(NotImplementedError):
        system.model.to(DEVICE)
        output = system.rollout(batch, system.n_steps)
        assert output.device.type == DEVICE
        torch.testing.assert_close(output.cpu(), expected, rtol=1e-3, atol=1e-3)


def test_the_checks_pass_in_bfloat16(core: Case) -> None:
    system = open_system(core)
    system.model.to(torch.bfloat16)
    strict = getattr(system.model, "_keep_in_fp32_modules_strict", None) or ()
    for name, tensor in system.model.state_dict(keep_vars=True).items():
        if any(part in name for part in strict):
            tensor.data = tensor.data.float()
    report = check_model(as_loaded(system))
    assert report.ok, "\n".join(report.lines())


def test_system_is_found_by_structure(case: Case) -> None:
    system = open_system(case)
    assert system.name == case.system
    assert system.n_steps == case.depths[0]
    assert system.summary
    assert (steps_of(system) is not None) == case.steps
    if not case.steps:
        with pytest.raises(SystemContractError, match=r"no single-step function"):
            single_steps(system).step(torch.zeros(1, 1, 1), None, 0, system.n_steps)


def test_hooks_see_what_is_declared_in_its_order(case: Case) -> None:
    system = open_system(case)
    n_steps = case.depths[0]
    shared = system.shared_parameters(n_steps)
    rows = _watch(system, n_steps, n_steps, case)
    assert len(shared) == case.n_shared
    experts = {p.name: p.invocations for p in shared if p.routed_in}
    assert [(p.name, p.invocations) for p in shared if not p.routed_in] == [
        (name, len(r)) for name, r in rows.items() if name not in experts
    ]
    assert all(r > 0 for steps in rows.values() for r in steps.values())
    assert all(step < n for name, n in experts.items() for step in rows.get(name, ()))
    whole = prompts(case).input_ids.numel()
    assert all(r <= whole for name in experts for r in rows.get(name, {}).values())


def test_declarations_fit_the_parameters(case: Case) -> None:
    system = open_system(case)
    shared = system.shared_parameters(case.depths[0])
    objects = [parameter_of(system.model, p) for p in shared]
    assert len({id(o) for o in objects}) == len(objects)
    for parameter, tensor in zip(shared, objects, strict=True):
        shape = (parameter.out_features, parameter.in_features)
        assert tuple(tensor.shape) == (shape if parameter.orientation == "out_in" else shape[::-1])
        assert (parameter.treatment == "gptq") == (parameter.reason == "")
    declared = {id(o) for o in objects}
    for name, reason in system.left_out().items():
        assert id(system.model.get_parameter(name)) not in declared
        assert reason


def test_settings_and_global_generator_are_left_as_they_were(case: Case) -> None:
    system = open_system(case)
    config = getattr(system.model, "config", None)
    before = dict(vars(config)) if config is not None else {}
    attributes = set(vars(system.model))
    for n_steps in case.depths:
        system.rollout(prompts(case), n_steps)
    torch.manual_seed(5)
    state = torch.get_rng_state()
    system.shared_parameters(case.depths[0])
    if steps_of(system):
        system.initial_state(prompts(case), system.embed(prompts(case)))
    assert torch.equal(state, torch.get_rng_state())
    assert (dict(vars(config)) if config is not None else {}) == before
    assert set(vars(system.model)) == attributes
    assert not system.model.training


def test_seed_matters_exactly_where_the_state_is_random(core: Case) -> None:
    system = open_system(core)
    n_steps = core.depths[0]
    first = system.rollout(prompts(core, seed=0), n_steps)
    other = system.rollout(prompts(core, seed=1), n_steps)
    assert torch.equal(first, other) != system.state_is_random


def test_output_does_not_depend_on_the_batch(core: Case) -> None:
    system = open_system(core)
    n_steps = core.depths[0]
    whole = system.rollout(prompts(core, 3), n_steps)
    part = system.rollout(prompts(core, 2, first=1), n_steps)
    torch.testing.assert_close(whole[1:], part, rtol=1e-3, atol=1e-3)


def test_wrong_depth_and_a_second_rollout_in_a_scope_are_refused(core: Case) -> None:
    """A cached generation is a rollout for every token: its calls must not be taken for further steps."""
    system = open_system(core)
    batch, n_steps = prompts(core), core.depths[0]
    with pytest.raises(ConfigError, match=r"n_steps"):
        system.rollout(batch, -1)
    if system.name in _BUILT_IN:
        with pytest.raises(ConfigError, match=r"n_steps"):
            system.rollout(batch, n_steps + 1)
    if isinstance(system, Discovers):
        # A loop that a run showed may end by itself, so its calls are summed, however many.
        return
    for other in core.depths[1:]:
        with pytest.raises(CalibrationError, match=r"declares"):
            _watch(system, n_steps, other, core)
    with (
        Observer(system, system.shared_parameters(n_steps), lambda *_: None) as observer,
        pytest.raises(CalibrationError, match=r"invocation"),
        observer.rollout(batch),
    ):
        system.rollout(batch, n_steps)
        system.rollout(batch, n_steps)


def test_writing_a_weight_reaches_all_owners_and_the_output(core: Case) -> None:
    system = open_system(core)
    n_steps = core.depths[0]
    batch = prompts(core)
    before = system.rollout(batch, n_steps)
    names = {name: p.clone() for name, p in system.model.named_parameters()}
    declared = system.shared_parameters(n_steps)
    for shared in declared[:: max(1, len(declared) // 3)]:
        weight = parameter_of(system.model, shared)
        kept = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5)
        assert not torch.equal(system.rollout(batch, n_steps), before), shared.name
        changed = [n for n, p in system.model.named_parameters() if not torch.equal(p, names[n])]
        assert changed == [shared.name]
        with torch.no_grad():
            weight.copy_(kept)
    assert torch.equal(system.rollout(batch, n_steps), before)


def test_layers_are_read_for_visits_of_prompts_in_turns(core: Case) -> None:
    """A model larger than memory gives the outputs and gradients of one in memory.

    Last bits may move with the place of a weight in memory.
    """
    model, n_steps, batch = build(core), core.depths[0], prompts(core)
    plain = open_system(core)
    unfuse(plain.model)
    if not layers_of(model):
        return
    Stream(model, {name: raw(tensor) for name, tensor in model.state_dict().items()}, renamed=False)
    system = type(plain)(model)
    outputs = system.rollout(batch, n_steps), plain.rollout(batch, n_steps)
    torch.testing.assert_close(*outputs, rtol=1e-5, atol=1e-5)
    try:
        expected = _gradients(plain, batch.input_ids, n_steps, 1)
    except LoopqError:  # Its rollout passes no gradient.
        return
    assert len(expected) >= len(batch.prompts)
    if core.system == "coconut":
        # A second visit reads the cache that the first one filled. Metric auto then takes the inputs' and says so.
        with pytest.raises(CalibrationError, match="gradient of prompt 0"):
            _gradients(system, batch.input_ids, n_steps, 1)
        return
    for at_once in (1, 3):
        streamed = _gradients(system, batch.input_ids, n_steps, at_once)
        assert [name for name, _ in streamed] == [name for name, _ in expected]
        sizes = [size for _, size in expected]
        assert [size for _, size in streamed] == pytest.approx(sizes, rel=1e-4, abs=1e-5)


def test_unrolled_and_diagnosed_rollouts_are_the_rollout(stepping: Case) -> None:
    """Also where reading the state out is itself the last pass through the loop's weights."""
    system, n_steps = open_system(stepping), stepping.depths[0]
    batch = prompts(stepping)
    expected = system.rollout(batch, n_steps)
    torch.testing.assert_close(unroll(system, batch, n_steps).detach(), expected, rtol=1e-5, atol=1e-5)
    run = trace(system, batch, n_steps)
    assert len(run.states) == system.n_updates(n_steps) + 1
    assert list(run.outputs) == list(range(1, n_steps + 1))
    torch.testing.assert_close(run.outputs[n_steps], expected.float(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(intervened(system, batch, n_steps, run, 1.0), run.states[-1], rtol=0, atol=0)


def test_step_keeps_the_graph(stepping: Case) -> None:
    system = open_system(stepping)
    batch = prompts(stepping, n_prompts=1)
    with torch.no_grad():
        embedding = system.embed(batch)
        start = system.initial_state(batch, embedding)
        if system.grows:  # From an empty state.
            start = system.step(start, embedding, 0, stepping.depths[0])
    state = start.clone().requires_grad_()
    after = system.step(state, embedding, int(system.grows), stepping.depths[0])
    assert after[:, system.grows :].shape == state.shape
    (gradient,) = torch.autograd.grad(after[:, -1].square().sum(), state)
    assert torch.isfinite(gradient).all()
    assert gradient.abs().sum() > 0


@pytest.mark.parametrize("name", ["Huginn", "Parcae", "R-Llama"])
def test_gradients_of_a_rollout_are_those_of_the_unrolled_loop(name: str) -> None:
    """Of a class that runs a depth which is one number without gradient."""
    system = open_system(CASES[name])
    batch, shared = prompts(CASES[name]), system.shared_parameters(3)
    weights = [parameter_of(system.model, p) for p in shared]
    with differentiable(system):
        gradients = torch.autograd.grad(system.rollout(batch, 3).square().sum(), weights, allow_unused=True)
    expected = torch.autograd.grad(unroll(system, batch, 3).square().sum(), weights, allow_unused=True)
    for parameter, a, b in zip(shared, gradients, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3, msg=parameter.name)
