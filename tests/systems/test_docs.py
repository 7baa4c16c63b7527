"""The pages on systems say what is there, and their examples run."""

from __future__ import annotations

from pathlib import Path

from loopq.systems import SYSTEMS

DOCS = Path(__file__).parents[2] / "docs"


def test_table_is_that_of_the_registry() -> None:
    text = (DOCS / "systems.md").read_text("utf-8")
    # Other tests register adapters of their own.
    for name, system in ((n, s) for n, s in SYSTEMS if s.__module__.startswith("loopq.")):
        models = ", ".join(f"{model}: {n}" for model, n in system.published.checkpoints.items()) or "-"
        exposed = ", ".join(system.published.exposed) or "-"
        assert f"| `{name}` | {system.summary} | {models} | {exposed} |" in text


def test_every_check_is_explained() -> None:
    from loopq.models.check import check_model
    from loopq.models.load import load_model

    text = (DOCS / "check-your-checkpoint.md").read_text("utf-8")
    report = check_model(load_model("huginn_small"))
    assert report.ok
    for verdict in report.verdicts:
        assert f"| {verdict.check} |" in text
