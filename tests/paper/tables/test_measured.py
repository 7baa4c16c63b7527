"""What a table measures is what it names."""

from __future__ import annotations

import json
import lzma
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loopq.analysis.diagnosis import exposure, rollouts
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import run_variants
from loopq.analysis.diagnosis.weights import rounded
from loopq.evaluation.metric import Metric
from loopq.layers.grid import PER_CHANNEL
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.compared import ALL, FULL, ONE, RTN
from loopq.paper.models import open_source
from loopq.paper.planted import plant
from loopq.paper.tables import benchmarks, components, feedback
from loopq.paper.tables.depth_curve import depth_curve, show
from loopq.paper.tables.rank_survey import layer_class, rank_survey
from loopq.paper.tasks import Scores
from loopq.quantizers.config import LayerConfig
from loopq.run.config import QuantConfig
from loopq.settings.execution import Execution
from loopq.systems.declare import parameter_of
from loopq.terminal.progress import Silent
from tests.support.looptoys import BlindSystem, LinearLoop, LinearSystem, numpy_rounder, tokens
from tests.support.paper import SMALL, bench, save

# Table 12: components left out one by one.


def test_each_row_is_the_variant_that_it_names(huginn: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, QuantConfig] = {}
    monkeypatch.setattr(Bench, "measure", lambda self, variants: given.update(variants) or {})
    components.measure(huginn)
    (adapter,) = huginn.adapters
    every = tuple(range(huginn.depth))

    def treated(config: QuantConfig) -> dict[str, set[tuple[object, ...]]]:
        """Method, steps and rotation of the adapter, and of the others, as the plan of a run has them."""
        treatments: dict[str, set[tuple[object, ...]]] = {"adapter": set(), "core": set()}
        for task in huginn.collected.plan(config).tasks:
            place = "adapter" if task.parameter.name == adapter else "core"
            method, turned = task.config.method.name, task.config.rotation != plain
            treatments[place].add(
                (method, tuple(task.steps), turned) if method == "gptq" else (method, turned)
            )
        return treatments

    plain = huginn.rtn().layer.rotation
    one, all_ = ("gptq", (0,), False), ("gptq", every, False)
    assert {name: treated(config) for name, config in given.items()} == {
        RTN: {"adapter": {("rtn", False)}, "core": {("rtn", False)}},
        components.TURNED_ONE: {"adapter": {("gptq", (0,), True)}, "core": {one}},
        components.KEPT: {"adapter": set(), "core": {("rtn", False)}},
        components.MIXED: {"adapter": {("gptq", every, True)}, "core": {one}},
        ALL: {"adapter": {all_}, "core": {all_}},
        components.TURNED: {"adapter": {("gptq", every, True)}, "core": {all_}},
    }
    # The label says how the adapter is treated.
    for name, config in given.items():
        assert (config.for_layer(adapter).rotation != plain) == ("rotated" in name), name


# Figure 1b: agreement and KL by the number of recurrences.


INT4 = LayerConfig.of(bits=4, group_size=-1)


def test_no_step_function_is_needed():
    curve = depth_curve(Context(BlindSystem(LinearLoop()), tokens(), 8, rounder=numpy_rounder), (1, 4), INT4)
    assert [r["depth"] for r in curve] == [1, 4]
    assert all(0 <= r["agreement"] <= 1 and r["kl"] > 0 for r in curve)


def test_depths_are_compared_as_variants_are():
    system, data = LinearSystem(LinearLoop()), tokens(n_prompts=4, n_tokens=12)
    whole = exposure.injection_weights(system, 8, INT4, rounder=numpy_rounder)["all"]
    curve = depth_curve(
        Context(system, data, 8, rounder=numpy_rounder, execution=Execution(seed=3)), (2, 8), INT4
    )
    for row in curve:
        run = rollouts.run_variants(
            Context(system, data, row["depth"], execution=Execution(seed=3)), {"a": whole}
        )["a"]
        assert row["agreement"] == run.curve("agreement")[-1]
        assert row["kl"] == run.curve("kl")[-1]
        assert row["output_error"] == run.curve("output_error")[-1]


def test_agreement_and_kl_have_a_verdict_each() -> None:
    def row(depth: int, agreement: float, kl: float) -> dict[str, object]:
        last = {"agreement": [agreement] * 6, "kl": [kl] * 6}
        return {"depth": depth, "agreement": agreement, "kl": kl, "last": last}

    claims = show([{"model": "m", "rows": [row(1, 0.4, 2.0), row(8, 0.3, 1.0)]}]).claims
    assert [c.holds for c in claims] == [False, True]
    assert "-10.0 points of agreement" in claims[0].found
    # One prediction of each of six prompts is a score of six items.
    (kl,) = show([{"model": "m", "rows": [row(1, 0.0, 2.0), row(8, 1.0, 1.0)]}]).claims
    assert "KL" in kl.text


# Figure 2 and Table 18: rank survey and recovery.


def test_ranks_are_those_of_the_inputs(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2)
    one = bench(folder, SMALL.changed(n_calibration=2, seq_len=24))
    survey = rank_survey(one.sums, one.collected.job.selection)
    assert survey["threshold"] == 1e-3
    by_class = {row["class"]: row for row in survey["layers"]}
    assert set(by_class) == {
        "self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj",
    }  # fmt: skip
    rows: list[Any] = []
    hook = one.source.loaded.model.get_submodule("model.layers.0.mlp.down_proj").register_forward_pre_hook(
        lambda _, args: rows.append(args[0].flatten(0, 1).double())
    )
    batch = next(one.model.calibration.batches(8))
    one.system.rollout(batch, 2)
    hook.remove()
    ranks = []
    for x in (rows[0], rows[1], torch.cat(rows)):
        values = torch.linalg.eigvalsh(x.T @ x)
        ranks.append(int((values > 1e-3 * values.max()).sum()))
    row = by_class["mlp.down_proj"]
    assert [row["first"], row["last"], row["all"]] == ranks
    assert row["gain"] == pytest.approx(ranks[2] / ranks[0])
    assert row["n_rows"] == 48
    lowest = min(survey["layers"], key=lambda r: r["first"] / r["n_inputs"])
    assert survey["bottleneck"] == lowest["layer"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.adapter.weight", "adapter"),
        ("transformer.core_block.12.attn.Wqkv.weight", "attn.Wqkv"),
        ("encoder.albert_layer_groups.0.albert_layers.0.ffn_output.weight", "ffn_output"),
    ],
)
def test_layers_are_classed_without_their_numbers(name: str, expected: str) -> None:
    assert layer_class(name) == expected


# Section 3.1 and Appendix E: damage by the strength of feedback, and each layer with a planted column.


def test_a_planted_column_changes_the_rounding_as_plant_does(huginn: Bench) -> None:
    context = huginn.context()
    (p,) = context.exposed
    (_, plain), (_, planted) = feedback._alone(context, p)
    assert not np.array_equal(plain[p.name], planted[p.name])
    source = plant(open_source("huginn_small"), "outlier", huginn.model.calibration)
    other = bench("huginn_small").context()
    same = Context(
        source.loaded.system, context.tokens, context.n_steps, context.config, execution=other.execution
    )
    config = context.config.layer(PER_CHANNEL)
    loud = rounded(same.system, same.exposed, config, same.rounder)
    column = np.flatnonzero(np.abs(loud[p.name] - planted[p.name]).max(0) > 0)
    assert column.size == 1
    assert parameter_of(same.system.model, p).shape == loud[p.name].shape
    ends = [run_variants(c, {"a": w})["a"].to_json() for c, w in ((context, planted), (same, loud))]
    assert ends[0]["kl"] == pytest.approx(ends[1]["kl"], rel=1e-5)


def curve(reset: float, natural: float, first: float, last: float) -> dict[str, Any]:
    return {
        "lambdas": [0.0, 1.0],
        "agreement": [[reset] * 5, [natural] * 5],
        "error": [[first] * 5, [last] * 5],
        "returned": [0.25] * 5,
    }


def test_share_of_feedback_and_loudest_layer_have_verdicts() -> None:
    parts = {
        "all columns": curve(0.7, 0.1, 0.5, 1.0),
        "state columns": curve(0.9, 0.8, 0.1, 0.15),
        "embedding columns": curve(0.9, 0.8, 0.1, 0.3),
    }
    alone = {
        "c.adapter.weight": {"plain": curve(0.9, 0.8, 1, 1), "planted": curve(0.5, 0.1, 1, 1)},
        "c.b.weight": {"plain": curve(0.9, 0.7, 1, 1), "planted": curve(0.5, 0.5, 1, 1)},
        "c.d.weight": {"plain": curve(0.9, 1.0, 1, 1), "planted": curve(0.5, 0.6, 1, 1)},
    }
    exposed, others = curve(0.8, 0.6, 1, 1), curve(0.6, 0.5, 1, 1)
    places = {"4": {"exposed layers": exposed, "all other layers": others, "all layers": others}}
    result = {
        "model": "m", "parts": {"g": parts}, "alone": alone, "places": places, "exposed": ["c.adapter.weight"]
    }  # fmt: skip
    shown = feedback.show([result])
    cosine = "0.25 [0.25, 0.25]"
    ends = ("2.00 [2.00, 2.00]", cosine)
    assert shown.tables[0].rows[0] == (
        "m",
        "g",
        "all columns",
        "70.0 %",
        "10.0 %",
        "67 % [67, 67]",
        "0.5",
        *ends,
    )
    assert shown.tables[2].rows[0] == (
        "m",
        "x 4",
        "exposed layers",
        "80.0 %",
        "60.0 %",
        "50 % [50, 50]",
        "1",
        "1.00 [1.00, 1.00]",
        cosine,
    )
    # Nothing changed, so there is no share of it; and where one end has no error there is no ratio.
    assert feedback._row(curve(0.9, 0.8, 0, 1))[2:] == ("50 % [50, 50]", "0", None, cosine)
    assert shown.tables[1].rows[4] == (
        "m",
        "d",
        "plain",
        "90.0 %",
        "100.0 %",
        None,
        "1",
        "1.00 [1.00, 1.00]",
        cosine,
    )
    assert [(c.found.split()[0], c.holds, c.differs) for c in shown.claims] == [
        ("+60.0", True, "feedback"),
        ("share", True, "feedback"),
        ("2.000", True, "feedback"),
        ("2.000", True, "columns"),
        ("-10.0", False, "place of the error"),
        ("-10.0", False, "layer"),
        ("+40.0", True, "layer"),
    ]
    assert "points beyond b" in shown.claims[6].found
    (picture,) = shown.pictures()
    (axes,) = picture.figure.axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[0, 70], [1, 10]]


def test_a_model_without_tokens_is_refused(huginn: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert feedback.refuses(huginn) is None
    monkeypatch.setattr(type(huginn.system), "output", "hidden")
    assert "no logits" in str(feedback.refuses(huginn))


# The table of benchmarks.


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
    # Eight, not ten: this model's word perplexity is beyond what has a verdict.
    choices = {"arc_easy", "arc_challenge", "hellaswag", "lambada"}
    assert len(measured.shown.claims) == 8
    assert {claim.text.partition(":")[0] for claim in measured.shown.claims} == choices
    monkeypatch.setattr(benchmarks, "MOST_PERPLEXITY", np.inf)
    assert len(benchmarks.show(measured.found).claims) == 10
    # Of a run that was killed every variant's score on a task is there already.
    assert len(scored) == 5 * 5
    assert one.once("huginn_small lambada 0", lambda: pytest.fail("scored again"))["sizes"] is None


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
    assert list(found) == [FULL, RTN, ONE, ALL, components.TURNED]
    assert scored == [[("0",), ("1",), ("2",)]] * 5
    assert found[ALL] == {"lambada": {"values": [0.0, 1.0, 0.0], "sizes": None}}
