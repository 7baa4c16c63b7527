"""The training script: stopping and going on ends at the same bits as going through."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

BENCH = Path(__file__).resolve().parents[2] / "benches" / "zoo"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):  # type: ignore[no-untyped-def]
    """Import the script with a tiny recipe and a made-up corpus."""
    monkeypatch.syspath_prepend(str(BENCH))
    import card
    import recipes
    import train

    config = {"n_embd": 32, "n_heads": 2, "intermediate_size": 32, "n_steps": 3}
    tiny = recipes.Recipe(
        "huginn", "ZooHuginn", config, depth=(2, 4), steps=20, batch=2, seq_len=16, warmup=5, margin=9.0
    )
    monkeypatch.setitem(recipes.RECIPES, "tiny", tiny)
    monkeypatch.setattr(card, "N_SEQUENCES", 8)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    text = np.random.default_rng(0).integers(97, 123, 4000).astype(np.uint8)
    np.save(corpus / "train.npy", text)
    np.save(corpus / "held_out.npy", text[:2000])
    (corpus / "held_out.json").write_text('["made-up"]')
    torch.set_num_threads(1)
    return train


def test_a_stopped_run_goes_on_to_the_same_bits(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    through = bench.Run("tiny", tmp_path)
    through.finish(1e9)
    through.path.unlink()
    stopped = bench.Run("tiny", tmp_path)
    while stopped.step < 7:
        bench.train_step(stopped.model, stopped.optimiser, stopped.recipe, stopped.data, stopped.step)
        stopped.step += 1
    stopped.save()
    taken_up = bench.Run("tiny", tmp_path)
    assert taken_up.step == 7
    cost = taken_up.finish(1e9)
    assert cost["resumed"] == 1
    assert cost["n_tokens"] == 20 * 2 * 16
    for a, b in zip(through.model.parameters(), taken_up.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_model_that_does_not_use_its_loop_is_not_published(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = bench.Run("tiny", tmp_path)
    cost = run.finish(1e9)
    out = tmp_path / "out"
    # A margin that no model reaches stands for one that does not use its loop.
    assert not bench.publish(run, cost, out, tmp_path)
    assert not out.exists()
    assert "made-up" in (run.folder / "latest" / "README.md").read_text()


def test_another_recipes_checkpoint_is_refused(bench, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    run = bench.Run("tiny", tmp_path)
    run.recipe = dataclasses.replace(run.recipe, seed=9)
    run.save()
    with pytest.raises(SystemExit, match="another recipe"):
        bench.Run("tiny", tmp_path)
