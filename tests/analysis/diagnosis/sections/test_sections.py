"""Sections: one that cannot be had, unknown ones, resuming."""

from __future__ import annotations

import dataclasses

import pytest

from loopq.analysis.diagnosis import survey
from loopq.analysis.diagnosis.config import DiagnoseConfig
from loopq.analysis.diagnosis.context import Context
from loopq.analysis.diagnosis.sections import SECTIONS
from loopq.errors import ConfigError, MissingExtraError
from loopq.settings.execution import Execution
from loopq.terminal.progress import Silent
from tests.support.diagnosed import QUICK, Notes
from tests.support.looptoys import LinearLoop, LinearSystem, tokens


def replaced(monkeypatch, name, run):
    """Put a function in the place of what a section does."""
    monkeypatch.setitem(SECTIONS._entries, name, dataclasses.replace(SECTIONS.get(name), run=run))


def test_a_section_that_cannot_be_had_takes_no_other_with_it(monkeypatch):
    def missing(context):
        raise MissingExtraError("this needs scipy, which is not installed")

    replaced(monkeypatch, "groups", missing)
    diagnosis = survey.diagnose(
        Context(
            LinearSystem(LinearLoop(width=8)),
            tokens(n_prompts=3, n_tokens=12),
            5,
            QUICK,
            execution=Execution(threads=1),
        ),
        only=["ranks", "groups"],
    )
    assert list(diagnosis["sections"]) == ["ranks"]
    assert diagnosis["unavailable"] == [
        {"section": "groups", "reason": "this needs scipy, which is not installed"}
    ]


def test_parts_that_a_system_cannot_have_are_named():
    class Hidden(LinearSystem):
        output = "hidden"
        state_is_random = False

    diagnosis = survey.diagnose(
        Context(Hidden(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)),
        only=["ablation", "injection"],
    )
    reasons = {u["section"]: u["reason"] for u in diagnosis["unavailable"]}
    assert set(reasons) == {"agreement and KL", "unpaired runs"}
    assert "hidden states and no logits" in reasons["agreement and KL"]
    ranked = survey.diagnose(
        Context(Hidden(LinearLoop(width=8)), tokens(n_tokens=12), 5, QUICK, execution=Execution(threads=1)),
        only=["ranks"],
    )
    assert ranked["unavailable"] == []


def test_finished_sections_are_resumed(tmp_path, monkeypatch):
    system, data = LinearSystem(LinearLoop(width=8)), tokens(n_tokens=12)
    only = ["ranks", "groups"]

    def run(work=tmp_path, progress=None, config=QUICK):
        how = Execution(threads=1, work=work, progress=progress or Silent())
        return survey.diagnose(Context(system, data, 5, config, execution=how), only=only)

    def broken(context):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        replaced(patch, "groups", broken)
        with pytest.raises(KeyboardInterrupt):
            run()
    (saved,) = tmp_path.rglob("*.safetensors")
    assert saved.name == "ranks.safetensors"
    stamp = saved.stat().st_mtime_ns
    notes = Notes()
    resumed = run(progress=notes)
    assert any("read from" in n for n in notes.notes)
    assert saved.stat().st_mtime_ns == stamp
    fresh = run(work=None)
    assert resumed["sections"] == fresh["sections"]
    again = Notes()
    run(progress=again, config=dataclasses.replace(QUICK, bits=3))
    assert not any("read from" in n for n in again.notes)


def test_unknown_sections_are_refused():
    with pytest.raises(ConfigError, match="known: ranks, overlap"):
        survey.diagnose(Context(LinearSystem(LinearLoop()), tokens(), 2), only=["rank"])
    with pytest.raises(ConfigError, match="n_prompts must be at least 1"):
        DiagnoseConfig(n_prompts=0)


def test_the_data_of_small_sections(whole):
    sections = whole[0]["sections"]
    assert [row["group_size"] for row in sections["groups"]["rows"]] == list(QUICK.group_sizes)
    # Parts are rounded per channel and in groups.
    assert list(sections["injection"]) == ["per channel", "grouped"]
    assert len({frozenset(rows) for rows in sections["injection"].values()}) == 1
