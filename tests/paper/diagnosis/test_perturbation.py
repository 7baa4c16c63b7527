"""Perturbations other than rounding."""

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import weights
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.errors import ConfigError
from loopq.paper.diagnosis import perturbation
from loopq.paper.diagnosis.sections import perturbation as section
from loopq.quantizers.config import LayerConfig
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens, under

INT4 = LayerConfig.of(bits=4, group_size=-1)
GROUPED = LayerConfig.of(bits=4, group_size=4)


@pytest.fixture
def system():
    return LinearSystem(LinearLoop(width=8))


def test_random_update_has_its_rank_and_norm():
    updates = perturbation.random_low_rank({"a": (12, 9), "b": (7, 20)}, 8.59, rank=4, seed=1)
    for update in updates.values():
        values = np.linalg.svd(update, compute_uv=False)
        assert values[3] > 1e-6 * values[0]
        assert values[4] < 1e-12 * values[0]
        assert np.linalg.norm(update) == pytest.approx(8.59 / np.sqrt(2), rel=1e-12)
    assert np.sqrt(sum(np.sum(u**2) for u in updates.values())) == pytest.approx(8.59)
    with pytest.raises(ConfigError, match="rank 4 does not fit"):
        perturbation.random_low_rank({"a": (3, 9)}, 1.0)
    with pytest.raises(ConfigError, match="all updates are zero"):
        perturbation.scaled_to({"a": np.zeros((3, 9))}, 1.0)


def test_trained_update_lowers_the_loss_and_has_rank_and_norm(system):
    data = tokens(n_prompts=2, n_tokens=12)
    before = {k: v.clone() for k, v in system.model.state_dict().items()}
    size = 0.5
    update = perturbation.trained_low_rank(
        Context(system, data, 4), ["adapter.weight"], size, rank=2, n_updates=60, learning_rate=1e-2
    )["adapter.weight"]
    assert all((before[k] == v).all() for k, v in system.model.state_dict().items())
    assert not system.model.adapter.weight.requires_grad or system.model.adapter.weight.grad is None
    values = np.linalg.svd(update, compute_uv=False)
    assert values[2] < 1e-9 * values[0]
    assert np.linalg.norm(update) == pytest.approx(size)

    def loss(system):
        with torch.no_grad():
            total = 0.0
            for batch in data.batches(1):
                logits = system.rollout(batch, 4)
                total += torch.nn.functional.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:]).item()
        return total

    plain = loss(system)
    new = (weights.weight_of(system, system.shared_parameters(4)[0]) + update).astype(np.float32)
    with under(system, {"adapter.weight": new}) as other:
        assert loss(other) < plain


def test_weight_gradient_matches_a_finite_difference(system):
    (batch,) = tokens(n_prompts=1, n_tokens=6).batches(1)
    p = system.shared_parameters(3)[0]
    gradient = perturbation._weight_gradients(system, batch, 3, [p])[p.name]

    def loss(step):
        with torch.no_grad():
            system.model.adapter.weight[2, 3] += step
            logits = system.rollout(batch, 3)
            system.model.adapter.weight[2, 3] -= step
            return torch.nn.functional.cross_entropy(logits[0, :-1], batch.input_ids[0, 1:]).item()

    assert gradient[2, 3].item() == pytest.approx((loss(1e-6) - loss(-1e-6)) / 2e-6, rel=1e-5)


def test_noise_matched_in_output_error():
    rng = np.random.default_rng(0)
    w = rng.normal(size=(20, 30)).astype(np.float32)
    q = numpy_rounder(w, INT4)
    noise, target = perturbation.output_matched_noise(w, q, n_rows=4000)
    # For white inputs the output error of a matrix has the norm of the matrix.
    assert target == pytest.approx(np.linalg.norm(q - w), rel=0.05)
    assert np.linalg.norm(noise) == pytest.approx(np.linalg.norm(q - w), rel=0.05)


def test_perturbation_study_compares_places_at_one_norm(system):
    study = perturbation.perturbation_study(
        Context(system, tokens(), 4, rounder=numpy_rounder, train=tokens(seed=5)),
        INT4,
        GROUPED,
        seeds=(0, 1),
        n_updates=3,
    )
    assert study["locations"] == {"exposed": ["adapter.weight"], "core": ["core.weight"]}
    low_rank = [r for r in study["rows"] if "rank" in r["perturbation"]]
    assert len(low_rank) == 2 * (2 + 1)
    assert all(r["norm"] == pytest.approx(study["norm"]) for r in low_rank)
    assert all(0 <= r["agreement"] <= 1 for r in study["rows"])
    with pytest.raises(ConfigError, match="needs an exposed layer"):
        perturbation.perturbation_study(
            Context(BlindSystem(LinearLoop()), tokens(), 4, rounder=numpy_rounder), INT4, GROUPED
        )
    with pytest.raises(ConfigError, match="single-step"):
        perturbation.trained_low_rank(Context(BlindSystem(LinearLoop()), tokens(), 4), ["core.weight"], 1.0)
    with pytest.raises(ConfigError, match="name shared parameters"):
        perturbation.trained_low_rank(Context(system, tokens(), 4), ["head.weight"], 1.0)


def test_noise_in_its_place_has_the_output_error_of_groups(system, monkeypatch):
    given = {}
    run = perturbation.run_variants

    def watch(context, variants, **options):
        given.update(variants)
        return run(context, variants, **options)

    monkeypatch.setattr(perturbation, "run_variants", watch)
    context = Context(system, tokens(), 4, rounder=numpy_rounder)
    perturbation.perturbation_study(context, INT4, GROUPED, seeds=(0,))
    parameters = {p.name: p for p in context.parameters}
    for place, name in (("exposed", "adapter.weight"), ("core", "core.weight")):
        (changed,) = given[f"output-matched noise/{place}/0"].items()
        assert changed[0] == name
        plain = weights.weight_of(system, parameters[name])
        errors = {c: numpy_rounder(plain, c) - plain for c in (INT4, GROUPED)}
        x = np.random.default_rng(0).normal(size=(5 * 64, plain.shape[1]))
        sizes = {c: np.linalg.norm(x @ e.T) for c, e in errors.items()}
        assert abs(sizes[INT4] / sizes[GROUPED] - 1) > 0.05, "the roundings do not differ here"
        assert np.linalg.norm(x @ (changed[1] - plain).T) == pytest.approx(sizes[GROUPED], rel=0.02)
        assert set(given[f"random rank 4/{place}/0"]) == {name}


def test_a_diagnosis_trains_on_no_prompt_that_it_measures(system, monkeypatch):
    seen = {}

    def study(context, *args, **options):
        seen.update(measured=context.tokens.sequences, trained=context.train)
        return {}

    monkeypatch.setattr(section, "perturbation_study", study)
    config = DiagnoseConfig(n_prompts=2)
    section.perturbations(Context(system, tokens(n_prompts=5), 4, config))
    ids = {id(s) for s in seen["measured"]}
    assert len(ids) == 2
    assert len(seen["trained"].sequences) == 3
    assert not ids & {id(s) for s in seen["trained"].sequences}
    section.perturbations(Context(system, tokens(n_prompts=2), 4, config))
    assert seen["trained"] is None
