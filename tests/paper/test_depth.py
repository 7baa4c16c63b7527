"""The frontier of a looped block: its graphs, its training, and the record that the page shows."""

from __future__ import annotations

import json
from collections import deque

import numpy as np
import pytest

from benches import pages

pytest.importorskip("matplotlib")
torch = pytest.importorskip("torch")
from benches.quality import depth  # noqa: E402  it draws, and has a module of torch


@pytest.fixture(scope="module")
def record():
    newest = max(pages.RECORD.glob("depth-20??-??-??.json"))
    return json.loads(newest.read_text("utf-8"))


def distance(seen, start, end):
    """Hops from start to end, found breadth first; None if no way leads there."""
    hops, waiting = {start: 0}, deque([start])
    while waiting:
        node = waiting.popleft()
        for other in np.flatnonzero(seen[:, node]):
            if int(other) not in hops:
                hops[int(other)] = hops[node] + 1
                waiting.append(int(other))
    return hops.get(end)


def test_a_way_has_the_hops_that_were_asked_for_or_is_cut():
    asked = np.tile([1, 2, 5, 10], 50)
    batch, answers = depth.graphs(asked, 13, np.random.default_rng(0))
    found = [
        distance(seen, *ends)
        for seen, ends in zip(batch["edges"].numpy(), batch["ends"].tolist(), strict=True)
    ]
    wanted = [
        hops if reached else None for hops, reached in zip(asked.tolist(), answers.tolist(), strict=True)
    ]
    assert found == wanted
    assert answers.sum() == 100
    # The kinds differ by the cut alone: there are edges beside the way in both.
    assert (batch["edges"].sum((1, 2)) > 13 + 2).float().mean() > 0.9


def test_the_end_learns_of_the_start_after_as_many_loops_as_hops():
    model, at = depth.load(0), torch.arange(40)
    batch, _ = depth.graphs(np.full(40, 8), 14, np.random.default_rng(1))
    start = batch["ends"][:, 0]
    # The head reads the start too, which must not learn by a way back to itself.
    batch["edges"][at, start] = 0
    batch["edges"][at, start, start] = 1
    unseen = batch | {"edges": batch["edges"].clone()}
    unseen["edges"][at, :, start] = 0
    unseen["edges"][at, start, start] = 1
    with torch.no_grad():
        seven, twenty = ((model(**batch, n_loops=n) - model(**unseen, n_loops=n)).abs() for n in (7, 20))
    assert seven.max() < 1e-4
    # Every second way is cut.
    assert 0.4 < (twenty > 1).float().mean() < 0.6


def test_a_stopped_training_goes_on_as_if_it_had_not(tmp_path, monkeypatch):
    monkeypatch.setattr(depth, "BATCH", 4)
    whole = depth.train(3, 4, tmp_path / "whole")
    with monkeypatch.context() as stop:

        def stopped(*_, **__):
            raise KeyboardInterrupt

        saved = torch.save

        def saves_once(*args):
            saved(*args)
            stop.setattr(torch, "save", stopped)

        stop.setattr(torch, "save", saves_once)
        with pytest.raises(KeyboardInterrupt):
            depth.train(3, 4, tmp_path, save_every=2)
    again = depth.train(3, 4, tmp_path, save_every=2)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), again.parameters(), strict=True))


def test_the_shipped_weights_have_the_recorded_frontier(record, monkeypatch):
    monkeypatch.setattr(depth, "HOPS", (8,))
    right = depth.answered(depth.load(0)).sum(2)[0]
    held = record["rows"][0]["right"][record["hops"].index(8)]
    assert record["n_graphs"] == depth.N_GRAPHS >= 500
    # Another processor may turn a few answers.
    assert np.abs(right - held).max() <= 5
    assert held[6] < 0.6 * depth.N_GRAPHS < 0.95 * depth.N_GRAPHS < held[19]


def test_a_run_counts_what_quantization_loses_and_wins(monkeypatch):
    monkeypatch.setattr(depth, "HOPS", (1, 6))
    monkeypatch.setattr(depth, "N_GRAPHS", 20)
    monkeypatch.setattr(depth, "KEPT", ("rounding", "loopq"))
    few = depth.calibration
    monkeypatch.setattr(depth, "calibration", lambda draw: few(draw, n_batches=4))
    rows = depth.run(0, {2: 2})
    assert [(r["bits"], r["variant"], r["draw"]) for r in rows] == [
        (32, "float32", 0), (2, "rounding", 0), (2, "loopq", 0), (2, "loopq", 1),
    ]  # fmt: skip
    full = np.array(rows[0]["right"])
    assert full.shape == (2, depth.MAX_LOOPS)
    for row in rows[1:]:
        assert np.array_equal(full - row["lost"] + row["won"], row["right"])
    assert np.array(rows[1]["lost"]).any() or np.array(rows[1]["won"]).any()


def test_the_table_has_the_frontier_and_its_range():
    assert depth.needed([5, 9, 8, 10], 10) == 2
    assert depth.needed([5, 8], 10) is None
    assert depth.spread([9, 7, 8]) == "7 to 9"
    assert depth.spread([20, None]) == "20 to > 20"
    assert depth.spread([None]) == "> 20"


def test_pictures_have_a_line_for_each_way_of_quantizing(record):
    drawn = depth.pictures(record)
    assert sorted(drawn) == ["depth-dark.svg", "depth-light.svg"]
    for text in drawn.values():
        assert all(f"<!-- {name} -->" in text for name in depth.HUES)
