"""Section 3.1 and Appendix E: damage by the strength of feedback, and each layer with a planted column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.rollouts import run_variants
from loopq.analysis.diagnosis.weights import quantizable, rounded
from loopq.layers.grid import PER_CHANNEL
from loopq.paper.bench import Bench
from loopq.paper.models import open_source
from loopq.paper.planted import plant
from loopq.paper.tables import feedback
from loopq.systems.declare import parameter_of
from tests.support.paper import bench, measured_shown_and_resumed


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured = measured_shown_and_resumed("feedback", huginn, tmp_path)
    (result,) = measured.found
    n_layers = len(quantizable(huginn.context().parameters))
    assert len(result["alone"]) == n_layers
    assert len(measured.shown.tables[1].rows) == 2 * n_layers
    # Without feedback and with it, alone and in the study of the exposed layer: the same numbers.
    (adapter,) = result["exposed"]
    whole = result["parts"]["one scale per row"]["all columns"]
    assert result["alone"][adapter]["plain"]["error"] == [whole["error"][0], whole["error"][-1]]


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
    result = {"model": "m", "parts": {"g": parts}, "alone": alone, "exposed": ["c.adapter.weight"]}
    shown = feedback.show([result])
    assert shown.tables[0].rows[0] == ("m", "g", "all columns", "70.0 %", "10.0 %", "67 %", "0.5", "1")
    # Nothing changed, so there is no share of it.
    assert shown.tables[1].rows[4] == ("m", "d", "plain", "90.0 %", "100.0 %", None, "1", "1")
    assert [(c.found.split()[0], c.holds, c.differs) for c in shown.claims] == [
        ("+60.0", True, "feedback"),
        ("share", True, "feedback"),
        ("2.000", True, "feedback"),
        ("2.000", True, "columns"),
        ("-10.0", False, "layer"),
        ("+40.0", True, "layer"),
    ]
    assert "points beyond b" in shown.claims[5].found
    (picture,) = shown.pictures()
    (axes,) = picture.figure.axes
    assert axes.get_lines()[0].get_xydata().tolist() == [[0, 70], [1, 10]]


def test_a_model_without_tokens_is_refused(huginn: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    assert feedback.refuses(huginn) is None
    monkeypatch.setattr(type(huginn.system), "output", "hidden")
    assert "no logits" in str(feedback.refuses(huginn))
