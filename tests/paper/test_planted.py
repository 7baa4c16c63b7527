"""A planted outlier changes no output, and shows in the weight and in the input of its layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopq.calibrate.hooks import Observer
from loopq.errors import ConfigError
from loopq.paper import results
from loopq.paper.bench import CURE_GROUP, Bench
from loopq.paper.compared import RTN
from loopq.paper.models import OpenedModel, Sizes, open_source
from loopq.paper.planted import FACTORS, plant
from loopq.settings.execution import Execution
from loopq.systems.declare import parameter_of
from loopq.terminal.progress import Silent
from tests.support.paper import SMALL, bench, save


def inputs(source: OpenedModel, name: str, batch: Any) -> torch.Tensor:
    """Squared inputs of a layer by step, position and channel."""
    system, seen = source.loaded.system, []
    p = next(p for p in system.shared_parameters(system.n_steps) if p.name == name)
    with Observer(system, [p], lambda p, step, rows: seen.append(rows.square())) as observer:
        with observer.rollout(batch):
            system.rollout(batch, system.n_steps)
    return torch.stack(seen)


@pytest.mark.parametrize(("kind", "model"), [("outlier", "rllama"), ("spike", "ouro"), ("token", "ouro")])
def test_no_bit_of_the_output_moves(kind: str, model: str, tmp_path: Path) -> None:
    changes = {"rllama": {"mean_recurrence": 3, "n_heads": 4}, "ouro": {"n_layers": 2}}[model]
    folder = save(tmp_path / "tiny", model, **changes)
    plain, source = bench(folder), open_source(folder)
    tokens = plain.model.calibration
    planted = plant(source, kind, tokens, Execution(batch_size=4))
    (batch,) = tokens.batches(8)
    assert torch.equal(planted.loaded.system.rollout(batch, 3), plain.source.loaded.system.rollout(batch, 3))
    assert planted.name == f"tiny+{kind}"
    for name in planted.planted_in:
        before, after = (parameter_of(s.loaded.system.model, name).detach() for s in (plain.source, planted))
        ratio = (after / before).nan_to_num(1.0)
        (column,) = torch.unique((ratio != 1.0).nonzero()[:, 1]).tolist()
        assert torch.equal(after[:, column], FACTORS[kind] * before[:, column])
        quiet, loud = (inputs(s, name, batch)[..., column] for s in (plain.source, planted))
        assert torch.equal(loud, quiet / FACTORS[kind] ** 2)
        energy = inputs(plain.source, name, batch)
        if kind == "outlier":
            assert column == int(before.norm(dim=0).argmax())
        else:
            n = tokens.sequences[0].size
            here = energy[0] if kind == "spike" else energy[:, ::n].flatten(0, 1)
            there = here.sum(0)
            share = there / energy.flatten(0, 1).sum(0)
            assert share[column] == pytest.approx(float(share[there >= there.median()].max()), rel=1e-5)


def test_a_model_without_the_layer_is_refused(tmp_path: Path) -> None:
    source = bench(save(tmp_path / "tiny", "ouro", n_layers=1)).source
    with pytest.raises(ConfigError, match="tiny: no outlier can be planted, for it has no feedback-exposed"):
        plant(source, "outlier", source.prompts(Sizes(2, 1, 1, 24)).calibration)


@pytest.mark.slow
def test_the_plain_model_stands_beside_it_and_the_cure_is_judged(tmp_path: Path) -> None:
    plain = bench("huginn_small", SMALL.changed(n_evaluation=5))
    source = plant(open_source("huginn_small"), "outlier", plain.model.calibration)
    planted = Bench(source, plain.settings, plain.execution)
    assert plain.cures() == {}
    assert plain.key() != planted.key()
    measured = results.make("per-channel", [plain, planted], tmp_path, Silent())
    kl = {(row[0], row[1]): row[2] for row in measured.shown.tables[0].rows}
    cure = f"RTN, groups of {CURE_GROUP}"
    assert ("huginn_small", cure) not in kl
    assert float(str(kl["huginn_small+outlier", RTN])) > 10 * float(str(kl["huginn_small", RTN]))
    (claim,) = [c for c in measured.shown.claims if c.text == f"{cure} is closer than {RTN}"]
    assert claim.holds is True
