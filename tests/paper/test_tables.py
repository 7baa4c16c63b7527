"""Every table of the paper: measured on small models, resumed, shown, written; and what its claims are judged by."""

from __future__ import annotations

import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import benches.zoo.models
from benches import paper
from benches.pages import within
from benches.zoo.store import save_model
from loopq.cli import main
from loopq.errors import ConfigError
from loopq.models.load import load_model
from loopq.paper import compared, run
from loopq.paper.bench import Bench, BenchSettings
from loopq.paper.compared import ALL, FULL, ONE, RTN, answers, below, closed
from loopq.paper.models import open_source
from loopq.paper.shown import TABLES, find
from loopq.paper.tables import awq, closed_loop
from loopq.paper.tables.horizon import horizons
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent

SMALL = BenchSettings().changed(n_calibration=4, n_evaluation=3, n_prompts=2, seq_len=40, n_seeds=1)
TINY = {"n_embd": 32, "n_heads": 2, "intermediate_size": 48, "block_size": 64}
# Figures 1a to 5, Tables 1 to 26, and Algorithm 1.
LABELS = [f"Figure {n}" for n in ("1a", "1b", "2", "3", "4", "5")] + [f"Table {n}" for n in range(1, 27)]
LABELS.append("Algorithm 1")
REFUSED = {"mamba": "no selective-scan layer", "benchmarks": "tasks need a data folder"}
SLOW = {"perturbation"}


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(compared, "N_RESAMPLES", 200)


def save(folder: Path, kind: str, **changes: Any) -> str:
    """Save a tiny untrained model and return its folder."""
    torch.manual_seed(0)
    save_model(benches.zoo.models.build({"model_type": f"loopq-zoo-{kind}", **TINY, **changes}), folder)
    return str(folder)


def bench(name: str, settings: BenchSettings = SMALL) -> Bench:
    return Bench(open_source(name), settings, Execution(threads=1, batch_size=4))


@pytest.fixture(scope="module")
def huginn() -> Bench:
    return bench("huginn_small")


def test_every_table_and_figure_has_one_home() -> None:
    owners = {label: name for name, entry in TABLES for label in entry.labels}
    assert [label for label in LABELS if label not in owners] == []
    assert sum(len(entry.labels) for _, entry in TABLES) == len(owners), "two files claim one table"
    assert find("table-6") == find("figure-3") == find("horizon")
    with pytest.raises(ConfigError, match=r"no table 'table-99'.*horizon.*figure-1a"):
        find("table-99")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in run.in_order()]
)
def test_a_table_is_measured_on_the_embedded_model(name: str, huginn: Bench, tmp_path: Path) -> None:
    made = run.make(name, [huginn], tmp_path, Silent())
    if name in REFUSED:
        assert REFUSED[name] in made.refused["huginn_small"]
        return
    assert not made.refused
    json.dumps(made.to_json(), allow_nan=False)
    for table in made.shown.tables:
        assert table.rows
        assert {len(row) for row in table.rows} == {len(table.header)}
    assert all("nan" not in line for line in made.lines())
    assert "<svg" in "".join(p.svg() for p in made.shown.pictures()) or not made.shown.pictures()
    # A second run reads what the first one saved.
    assert run.make(name, [huginn], tmp_path, Silent()).to_json() == made.to_json()


@pytest.mark.parametrize("kind", ["ouro", "mamba", "coconut", "control"])
def test_a_model_has_the_tables_that_it_can_have(kind: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"coconut": {"vocab_size": 259}}.get(kind, {})
    one = bench(save(tmp_path / kind, kind, **changes))
    names = ("rank", "depth-curve", "components", "mamba", "horizon", "algorithm")
    made = {name: run.make(name, [one], None, Silent()) for name in names}
    refused = {name for name, m in made.items() if m.refused}
    expected = (
        {"components", "mamba"}
        if kind in ("ouro", "coconut")
        else {"components", "mamba", "horizon", "depth-curve"}
    )
    assert refused == expected - ({"mamba"} if kind == "mamba" else set())
    for m in made.values():
        assert len(m.found) + len(m.refused) == 1


def test_what_is_saved_belongs_to_weights_prompts_and_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, work = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2), tmp_path / "work"
    first = run.make("rank", [bench(folder)], work, Silent())
    monkeypatch.setattr(Bench, "sums", property(lambda self: pytest.fail("collected again")))
    assert run.make("rank", [bench(folder)], work, Silent()).to_json() == first.to_json()
    for other in (
        bench(folder, SMALL.changed(n_calibration=3)),
        Bench(open_source(folder), SMALL, Execution(seed=1)),
    ):
        with pytest.raises(pytest.fail.Exception, match="collected again"):
            run.make("rank", [other], work, Silent())
    model = load_model(folder).model
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    save_model(model, Path(folder))
    with pytest.raises(pytest.fail.Exception, match="collected again"):
        run.make("rank", [bench(folder)], work, Silent())


def found(**variants: Any) -> dict[str, Any]:
    rows = {
        name: {"kl": kl, "agreement": kl, "nll": kl, "answered": right, "n_bytes": 1}
        for name, (kl, right) in variants.items()
    }
    return {"model": "m", "output": "logits", "bytes_per_token": 1.0, "variants": rows}


def test_the_document_lists_what_the_registry_holds() -> None:
    assert within(paper.DOCUMENT, paper.MARK) == paper.table(), "run python -m benches.paper"


def test_claims_are_judged_by_paired_intervals() -> None:
    rng = np.random.default_rng(0)
    base = rng.uniform(0.5, 2.0, 40)
    right = [1.0] * 30 + [0.0] * 10
    wrong = [0.0] * 30 + [1.0] * 10
    given = found(
        a=((0.5 * base).tolist(), right),
        b=(base.tolist(), wrong),
        c=((base + rng.normal(0, 0.3, 40)).tolist(), right),
    )
    assert below(given, "a", "b").holds is True
    assert below(given, "b", "a").holds is False
    assert below(given, "c", "b").holds is None
    assert "KL ratio 0.500" in below(given, "a", "b").found
    better = answers(given, "a", "b")
    assert better is not None
    # 30 against 10 discordant answers: p = 0.0022 in any table of the binomial distribution.
    assert better.holds is True
    assert "p = 0.0022" in better.found
    assert "+50.0 points" in better.found
    same = answers(given, "a", "c")
    assert same is not None
    assert same.holds is None


@pytest.mark.parametrize(
    ("factor", "noise", "holds"),
    [(1.01, 0.01, True), (1.01, 0.9, None), (1.5, 0.01, False), (0.5, 0.01, False)],
)
def test_closed_loop_is_alike_only_within_the_margin(factor: float, noise: float, holds: bool | None) -> None:
    base = np.linspace(0.5, 2.0, 40)
    spread = factor * (1 + noise * np.cos(np.arange(40)))
    kl = {RTN: 3 * base, ALL: base, closed_loop.CLOSED: base * spread}
    given = found(**{name: (values.tolist(), [1.0] * 40) for name, values in kl.items()})
    claim = closed_loop.claims(given)[0]
    assert claim is not None
    assert claim.holds is holds, claim.found


@pytest.mark.parametrize(("gptq", "holds"), [(2.0, True), (1.0, False), (1.3, None)])
def test_the_steps_of_awq_and_gptq_are_compared_by_an_interval(gptq: float, holds: bool | None) -> None:
    base = np.linspace(0.5, 2.0, 40)
    wave = 1.3 + 0.9 * np.cos(np.arange(40))
    kl = {name: base * (wave if name == awq.AWQ[0] else 1.0) for name in awq.AWQ}
    kl |= {ONE: gptq * base, awq.LAST: base, ALL: base, awq.ASYMMETRIC: base}
    claim = awq.claims(found(**{name: (values.tolist(), [1.0] * 40) for name, values in kl.items()}))[0]
    assert claim is not None
    assert claim.holds is holds, claim.found


def test_gap_closed_is_the_share_of_the_kl_of_rounding() -> None:
    given = {"variants": {RTN: {"kl": [2.0, 4.0]}, ALL: {"kl": [1.0, 0.5]}, ONE: {"kl": [4.0, 5.0]}}}
    assert closed(given, ALL) == pytest.approx(0.75)
    assert closed(given, ONE) == pytest.approx(-0.5)


@pytest.mark.parametrize(
    ("depth", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (32, [1, 2, 4, 8, 16, 32])]
)
def test_horizons_double_up_to_the_depth(depth: int, expected: list[int]) -> None:
    assert horizons(depth) == expected


def test_the_last_token_counts_as_the_answer(huginn: Bench) -> None:
    measured = huginn.measure({RTN: huginn.rtn()})
    batch = next(huginn.model.evaluation.batches(8))
    with torch.no_grad():
        logits = huginn.system.rollout(batch, huginn.depth)
    expected = (logits[:, -2].argmax(-1) == batch.input_ids[:, -1]).double().tolist()
    assert measured["variants"][FULL]["answered"] == expected


def test_the_command_lists_makes_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert "Figure 3, Table 6, Table 7" in listed
    sizes = ["--n-calibration", "2", "--n-evaluation", "2", "--seq-len", "24", "--threads", "1"]
    text = tmp_path / "own.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 8)
    places = ["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o"), "--text", str(text)]
    assert (
        main(
            [
                "reproduce",
                "table-11",
                "huginn_small",
                *sizes,
                *places,
                "--n-steps",
                "3",
                "--dtype",
                "bfloat16",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "Table 11" in out
    assert "The paper: Seven checkpoints" in out
    record = json.loads(next((tmp_path / "o").glob("bits-per-byte-*.json")).read_text())
    assert record["tables"]["bits-per-byte"]["models"][0]["n_steps"] == 3
    assert main(["reproduce", "table-20"]) == 0
    assert "24 of 24" in capsys.readouterr().out
    assert main(["reproduce", "table-99"]) == 2


def test_tasks_are_scored_on_the_same_items(tmp_path: Path) -> None:
    for place, lines in {
        "lambada/lambada_test.jsonl": [{"text": "The sun went down behind the hill"}] * 2,
        "arc/arc_challenge_test.jsonl": [{"query": "Question: Two?", "choices": ["one", "two"], "gold": 1}]
        * 2,
    }.items():
        (tmp_path / place).parent.mkdir()
        (tmp_path / place).write_text("\n".join(map(json.dumps, lines)))
    (tmp_path / "hellaswag").mkdir()
    with lzma.open(tmp_path / "hellaswag" / "hellaswag_val.jsonl.xz", "wt") as out:
        out.write(json.dumps({"query": "He", "choices": ["runs.", "is a"], "gold": 0}))
    (tmp_path / "wikitext2").mkdir()
    (tmp_path / "wikitext2" / "wiki.test.raw").write_text(" = A = \n It was a long day . \n")
    one = Bench(open_source("huginn_small", tmp_path), SMALL, Execution(threads=1, batch_size=4))
    made = run.make("benchmarks", [one], None, Silent())
    assert not made.refused
    rows = made.shown.tables[0].rows
    assert [row[1] for row in rows] == [FULL, RTN, ONE, ALL, "GPTQ, all steps, adapter rotated"]
    assert len(made.shown.claims) == 8


def test_one_model_that_fails_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, bad = (bench(save(tmp_path / n, "ouro", n_layers=1, total_ut_steps=2)) for n in ("good", "bad"))
    plain: Callable[..., Any] = Bench.measure

    def measure(self: Bench, variants: Any) -> Any:
        if self is bad:
            raise ConfigError("no")
        return plain(self, variants)

    monkeypatch.setattr(Bench, "measure", measure)
    made = run.make("bits-per-byte", [bad, good], None, Silent())
    assert made.refused == {"bad": "no"}
    assert [f["model"] for f in made.found] == ["good"]
