"""The table of benchmarks."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.evaluation.metric import Metric
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN
from loopq.paper.models import open_source
from loopq.paper.tables import benchmarks
from loopq.paper.tables.components import TURNED
from loopq.paper.tasks import Scores
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.paper import SMALL


@pytest.mark.slow
def test_tasks_are_scored_on_the_same_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, lines in {
        "lambada/lambada_test.jsonl": [{"text": "The sun went down behind the hill"}] * 2,
        **dict.fromkeys(
            ("arc/arc_easy_test.jsonl", "arc/arc_challenge_test.jsonl"),
            [{"query": "Question: Two?", "choices": ["one", "two"], "gold": 1}] * 2,
        ),
    }.items():
        (tmp_path / place).parent.mkdir(exist_ok=True)
        (tmp_path / place).write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "hellaswag").mkdir()
    with lzma.open(tmp_path / "hellaswag" / "hellaswag_val.jsonl.xz", "wt") as out:
        out.write(json.dumps({"query": "He", "choices": ["runs.", "is a"], "gold": 0}))
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" = A = \n It was a long day . \n")
    one = Bench(open_source("huginn_small", tmp_path), SMALL, Execution(threads=1, batch_size=4))
    monkeypatch.setattr(benchmarks, "CAN", -1.0)
    scored = []
    plain = benchmarks.score
    monkeypatch.setattr(benchmarks, "score", lambda *a, **k: scored.append(a[1]) or plain(*a, **k))
    measured = results.make("benchmarks", [one], tmp_path / "work", Silent())
    assert not measured.refused
    rows = measured.shown.tables[0].rows
    assert [row[1] for row in rows] == [FULL, RTN, ONE, ALL, "GPTQ, all steps, adapter rotated"]
    assert len(measured.shown.claims) == 10
    # Of a run that was killed every variant's score on a task is there already.
    assert len(scored) == 5 * 5
    assert one.once("huginn_small lambada 0", lambda: pytest.fail("scored again"))["sizes"] is None
    assert "eight solved problems" in results.make("gsm8k", [one], None, Silent()).refused["huginn_small"]


def test_every_variant_is_scored_on_the_same_items(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lambada").mkdir()
    lines = [json.dumps({"text": f"The sun went down behind hill {number}"}) for number in range(5)]
    (tmp_path / "lambada" / "lambada_test.jsonl").write_text("\n".join(lines))
    scored = []

    def score(loaded: Any, task: str, items: Any, *_: Any, **__: Any) -> Scores:
        scored.append([item.choices for item in items])
        return Scores((Metric("acc", np.arange(len(items)) % 2.0),), 0)

    monkeypatch.setattr(benchmarks, "score", score)
    monkeypatch.setattr(Bench, "solve", lambda self, config: {})
    one = Bench(open_source("huginn_small", tmp_path), SMALL, Execution(threads=1))
    found = benchmarks.measure(one, ("lambada",))["variants"]
    assert list(found) == [FULL, RTN, ONE, ALL, TURNED]
    assert scored == [[("0",), ("1",), ("2",)]] * 5
    assert found[ALL] == {"lambada": {"values": [0.0, 1.0, 0.0], "sizes": None}}


def test_a_model_without_it_is_refused_with_the_reason(huginn: Bench, tmp_path: Path) -> None:
    measured = results.make("benchmarks", [huginn], tmp_path, Silent())
    assert "tasks need a data folder" in measured.refused["huginn_small"]


@pytest.mark.parametrize(("articles", "better", "holds"), [(6, 1.0, True), (2, 1.0, None), (6, 1e-5, None)])
def test_a_perplexity_is_decided_by_articles_and_resolution(
    articles: int, better: float, holds: bool | None
) -> None:
    def row(nll: float) -> dict[str, Any]:
        return {"wikitext": {"values": [nll * 100] * articles, "sizes": [100] * articles}}

    result = {
        "model": "m",
        "variants": {FULL: row(3.0), RTN: row(4.0), ONE: row(4.0), ALL: row(4.0 - better)},
    }
    assert [claim.holds for claim in benchmarks.show([result]).claims] == [holds] * 2


@pytest.mark.parametrize(
    ("n", "right", "verdicts"), [(500, 0.9, ["holds"] * 2), (500, 0.04, []), (499, 0.9, None)]
)
def test_a_score_needs_items_and_a_model_that_can_do_the_task(
    n: int, right: float, verdicts: list[str] | None
) -> None:
    def row(share: float) -> dict[str, Any]:
        hits = round(share * n)
        return {"lambada": {"values": [1.0] * hits + [0.0] * (n - hits), "sizes": None}}

    found = {"model": "m", "variants": {FULL: row(right), RTN: row(0.1), ONE: row(0.2), ALL: row(0.6)}}
    claims = benchmarks.show([found]).claims
    if verdicts is None:
        assert [c.asked for c in claims] == [False] * 2
    else:
        assert [c.verdict for c in claims] == verdicts
