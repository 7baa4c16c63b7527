"""Every table of the registry on the embedded model: measured, shown, and made again from what was saved."""

from __future__ import annotations

from pathlib import Path

import pytest

from loopq.analysis.diagnosis.weights import quantizable
from loopq.paper import results
from loopq.paper.bench import Bench
from loopq.paper.results import Made
from loopq.paper.shown import TABLES
from loopq.terminal.progress import Silent
from tests.support.marks import slow_unless
from tests.support.paper import measured_shown_and_resumed

#: Three studies that most tables share: of whole models, of single steps, and of a grid.
QUICK = ("main-table", "loop", "int3")
#: Tables that the embedded model cannot have, with the reason.
REFUSED = {
    "benchmarks": "tasks need a data folder",
    "gsm8k": "eight solved problems have",
    "mamba": "no selective-scan layer",
}


def check_feedback(made: Made, model: Bench) -> None:
    """Each layer alone, and the exposed one as in the study of it."""
    (result,) = made.found
    n_layers = len(quantizable(model.context().parameters))
    assert len(result["alone"]) == n_layers
    assert len(made.shown.tables[1].rows) == 2 * n_layers
    # Without feedback and with it, alone and in the study of the exposed layer: the same numbers.
    (adapter,) = result["exposed"]
    whole = result["parts"]["one scale per row"]["all columns"]
    assert result["alone"][adapter]["plain"]["error"] == [whole["error"][0], whole["error"][-1]]
    # A column that is planted in the exposed layers alone is that of the layer alone.
    assert result["places"]["64"]["exposed layers"] == result["alone"][adapter]["planted"]
    assert result["places"]["1"]["exposed layers"] == result["alone"][adapter]["plain"]


@pytest.mark.parametrize(
    "name", slow_unless(QUICK.__contains__, [name for name in TABLES.names() if name not in REFUSED])
)
def test_it_is_measured_shown_and_resumed(name: str, huginn: Bench, tmp_path: Path) -> None:
    made = measured_shown_and_resumed(name, huginn, tmp_path)
    if name == "feedback":
        check_feedback(made, huginn)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_without_it_is_refused_with_the_reason(name: str, huginn: Bench, tmp_path: Path) -> None:
    refused = results.make(name, [huginn], tmp_path, Silent()).refused
    assert REFUSED[name] in refused["huginn_small"]
