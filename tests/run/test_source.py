"""Journals of a source: one for each work, and none without a folder."""

from __future__ import annotations

from loopq.run.config import QuantConfig
from tests.support.runs import run_of

CONFIG = QuantConfig.of(method="rtn", group_size=8)


def test_a_journal_knows_its_work_and_what_else_decides(tiny, tokens, tmp_path):
    plan, source = run_of(tiny, tokens, CONFIG, work=tmp_path)
    keys = [source.journal(plan, *asked).key for asked in (("layers",), ("layers", 1), ("layers", 2))]
    assert keys[0] == source.key(plan) == source.journal(plan, "other").key
    assert len(set(keys)) == 3
    assert source.journal(plan, "layers").folder == tmp_path / "layers"
    other = source.plan(CONFIG.changed(bits=3))
    assert source.journal(other, "layers").key != keys[0]


def test_without_a_work_folder_nothing_is_saved_or_hashed(tiny, tokens, monkeypatch):
    plan, source = run_of(tiny, tokens, CONFIG)
    monkeypatch.setattr(type(source), "key", lambda self, plan: 1 / 0)
    journal = source.journal(plan, "layers", 1)
    assert (journal.folder, journal.key) == (None, "")
