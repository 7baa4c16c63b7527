"""Table 21: errors in a selective scan."""

from __future__ import annotations

from pathlib import Path

from loopq.paper import run
from loopq.paper.bench import Bench
from loopq.terminal.progress import Silent


def test_a_model_without_it_is_refused_with_the_reason(huginn: Bench, tmp_path: Path) -> None:
    made = run.make("mamba", [huginn], tmp_path, Silent())
    assert "no selective-scan layer" in made.refused["huginn_small"]
