"""Hidden states read by a probe."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from loopq.calibrate.data import from_ids
from loopq.paper import main_text
from loopq.paper.bench import Bench
from loopq.paper.main_text import GRIDS
from loopq.paper.models import OpenedModel, PreparedModel
from loopq.paper.probe import MASK_ID, fit_probe, masked, measure_states
from loopq.paper.tables.main import measure
from loopq.settings.execution import Execution
from tests.support.paper import SMALL
from tests.support.systems import CASES, as_loaded, open_system


def encoder() -> PreparedModel:
    """A tiny model that returns hidden states."""
    case = CASES["transformers ALBERT"]
    torch.manual_seed(0)
    loaded = as_loaded(open_system(case))
    rng = np.random.default_rng(0)
    text = [from_ids(rng.integers(1, 50, (n, 12))) for n in (4, 8, 5)]
    return PreparedModel("tiny", loaded, *text)


@pytest.mark.filterwarnings("ignore")
def test_hidden_states_are_measured_by_step_and_by_probe() -> None:
    model = encoder()
    result = measure(Bench(OpenedModel("tiny", model.loaded), SMALL, Execution(threads=1), prompts=model))
    assert result["output"] == "hidden"
    assert result["full_precision"] is None
    assert all(variant["nll"] is None for variant in result["variants"])
    depth = result["n_steps"]
    exact = result["states"]["full precision"]
    assert exact["error"] == [0.0] * depth
    assert exact["same"] == exact["masked"]
    coarse, fine = (result["states"][f"INT{b} g{g}, RTN"] for b, g in ((3, 32), (4, 128)))
    assert coarse["error"][-1] > fine["error"][-1] > 0
    assert 0 < fine["cosine"][-1] < 1
    assert sum(fine["same"]) <= sum(fine["masked"])
    tables = main_text.tables(main_text.summarize([result]))
    assert tables[-1].title == "tiny: hidden states by step, and a probe"
    assert len(tables[-1].rows) == 1 + len(GRIDS) * 3


def test_masks_belong_to_a_prompt_not_to_its_batch() -> None:
    tokens = from_ids(np.arange(1, 10 * 20 + 1).reshape(10, 20))
    whole = masked(tokens)
    ids = np.concatenate([batch.input_ids.numpy() for batch, _ in whole])
    truth = np.concatenate([t for _, t in whole])
    assert ((ids == MASK_ID) == (truth >= 0)).all()
    assert (np.where(truth >= 0, truth, ids) == np.stack(tokens.sequences)).all()
    assert 0.1 < (truth >= 0).mean() < 0.3
    alone = masked(tokens.take(0, 3))[0][1]
    assert (alone == truth[:3]).all()


def test_the_probe_finds_what_the_states_tell() -> None:
    prepared = encoder()
    system = prepared.loaded.system
    plain = system.rollout
    # States that spell the masked token's own number: what a probe can read, it must read.
    answers = {b.prompts: t for b, t in masked(prepared.evaluation)}

    def telling(batch: Any, n_steps: int) -> Any:
        return torch.nn.functional.one_hot(torch.from_numpy(answers[batch.prompts]).clamp_min(0), 64).float()

    system.rollout = telling  # type: ignore[method-assign]
    probe = fit_probe(system, prepared.evaluation)
    system.rollout = plain  # type: ignore[method-assign]
    truth = np.concatenate([t for _, t in masked(prepared.evaluation)])
    states = np.eye(64)[truth[truth >= 0]]
    assert (probe.predict(states) == truth[truth >= 0]).all()


def test_states_are_those_of_the_rollout() -> None:
    prepared = encoder()
    system = prepared.loaded.system
    probe = fit_probe(system, prepared.tuning_held_out)
    name = system.shared_parameters(system.n_steps)[0].name
    weight = system.model.get_parameter(name).detach().numpy() * 1.01
    states = measure_states(system, {"bent": {name: weight}}, prepared.evaluation, probe)["bent"]
    with torch.no_grad():
        ids = torch.cat([b.input_ids for b, _ in masked(prepared.evaluation)])
        exact = system.model(ids).last_hidden_state.double()
        system.model.get_parameter(name).copy_(torch.from_numpy(weight))
        bent = system.model(ids).last_hidden_state.double()
    error = ((exact - bent).flatten(1).norm(dim=1) / exact.flatten(1).norm(dim=1)).mean()
    assert states["error"][-1] == pytest.approx(float(error), rel=1e-4)
