"""The training script: stopping and going on ends at the same bits as going through."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from benches.zoo import card, recipes, train
from benches.zoo.chains import chains
from loopq.models.load import load_model
from loopq.systems import find_system
from tests.support.systems import small


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Make a tiny recipe and a made-up corpus, and return the folder to train in."""
    config = {"n_embd": 32, "n_heads": 2, "intermediate_size": 32, "mean_recurrence": 3}
    tiny = recipes.Recipe(
        "loopq-zoo-huginn", config, depth=(2, 4), steps=20, batch=2, seq_len=16, warmup=5, margin=9.0
    )
    monkeypatch.setitem(recipes.RECIPES, "tiny", tiny)
    monkeypatch.setattr(card, "N_SEQUENCES", 8)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
    np.save(corpus / "train.npy", text)
    np.save(corpus / "held_out.npy", text[:2000])
    (corpus / "held_out.json").write_text('["made-up"]')
    return tmp_path


@pytest.mark.parametrize("growth", [None, 0.9])
def test_a_stopped_run_goes_on_to_the_same_bits(
    work: Path, growth: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(recipes.RECIPES, "tiny", dataclasses.replace(recipes.RECIPES["tiny"], growth=growth))
    through = train.Run("tiny", work)
    through.finish(1e9)
    through.path.unlink()
    stopped = train.Run("tiny", work)
    while stopped.step < 7:
        train.train_step(stopped.system, stopped.optimiser, stopped.recipe, stopped.data, stopped.step)
        stopped.step += 1
    stopped.save()
    taken_up = train.Run("tiny", work)
    assert taken_up.step == 7
    cost = taken_up.finish(1e9)
    assert cost["resumed"] == 1
    assert cost["n_tokens"] == 20 * 2 * 16
    for a, b in zip(through.model.parameters(), taken_up.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_that_does_not_use_its_loop_is_not_published(work: Path) -> None:
    run = train.Run("tiny", work)
    cost = run.finish(1e9)
    out = work / "out"
    # A margin that no model reaches stands for one that does not use its loop.
    assert not train.publish(run, cost, out, work)
    assert not out.exists()
    assert "made-up" in (run.folder / "latest" / "README.md").read_text()


def test_another_recipes_checkpoint_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train.Run("tiny", work).save()
    monkeypatch.setitem(train.RECIPES, "tiny", dataclasses.replace(train.RECIPES["tiny"], seed=9))
    with pytest.raises(SystemExit, match="another recipe"):
        train.Run("tiny", work)


def test_a_run_can_begin_at_a_shipped_model() -> None:
    system = train.untrained(train.RECIPES["huginn_boundary"])
    shipped = load_model("huginn_small").model.state_dict()
    assert system.n_steps == 16
    assert all(torch.equal(value, shipped[name]) for name, value in system.model.state_dict().items())


def test_the_boundary_loss_is_the_loss_of_the_text_and_a_penalty() -> None:
    system = train.untrained(train.RECIPES["huginn_boundary"])
    rows = np.random.default_rng(0).integers(97, 123, (2, 17))
    text, off = train.boundary_loss(system, rows, 3, 5, 0.98)
    plain = train.text_loss(system, rows, 3, 5)
    assert float(text.detach()) == pytest.approx(float(plain.detach()), rel=1e-5)
    assert float(off.detach()) > 0
    off.backward()
    assert system.model.transformer["adapter"].weight.grad is not None


def test_the_letter_task_reaches_every_pass_and_parameter() -> None:
    torch.manual_seed(0)
    system = find_system(small("coconut", vocab_size=259, block_size=64)())
    rows = chains(2, 0)
    for n_steps in (1, 2, 4):
        system.model.zero_grad()
        train.chain_loss(system, rows, n_steps).backward()
        idle = [n for n, p in system.model.named_parameters() if p.grad is None or not p.grad.any()]
        assert idle == []
    # An exact model spends nothing: the loss is over the twelve hops in their order.
    hops = torch.from_numpy(rows[:, 32:])
    seen: list[torch.Size] = []

    def exact(ids: torch.Tensor) -> object:
        logits = torch.zeros(*ids.shape, 259)
        n_latents = int((ids[0] == 258).sum())
        places = [32 + t for t in range(n_latents)] + list(range(32 + n_latents + 1, ids.shape[1]))
        for hop, place in enumerate(places):
            logits[torch.arange(2), place, hops[:, hop]] = 100.0
        seen.append(ids.shape)
        return type("Out", (), {"logits": logits})

    system.model.forward = exact
    for n_steps in (1, 3):
        assert float(train.chain_loss(system, rows, n_steps)) == 0.0
    assert seen == [(2, 32 + 2 + 11), (2, 32 + 4 + 9)]
