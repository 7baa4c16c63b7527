"""The treatment of every tensor: of a real checkpoint, and of several beside each other."""

from __future__ import annotations

import pytest

import loopq
from loopq.analysis.commands.page import reasons
from loopq.analysis.report.weights import done, tensors
from tests.analysis.report.conftest import left, weight


def test_every_tensor_is_shown_with_its_grid_or_reason(loaded, tokens, monkeypatch):
    monkeypatch.setattr("loopq.run.outside.LEAST", 16)
    result = loopq.quantize(
        loaded, tokens, n_steps=3, group_size=16, method="gptq", outside=8, exclude=("*attn.proj*",)
    )
    rows = {row["name"]: row for row in tensors(result, reasons(loaded.system, 3))}
    assert set(rows) == {*result.layers, *result.dense}
    assert sum(row["n_bytes"] for row in rows.values()) == result.n_bytes
    report = result.layers["transformer.adapter.weight"].report
    assert rows["transformer.adapter.weight"]["error"] == pytest.approx(
        (report["proxy"] / report["proxy_total"]) ** 0.5
    )
    assert rows["transformer.adapter.weight"]["error_rtn"] > rows["transformer.adapter.weight"]["error"]
    assert rows["transformer.core_block.0.attn.proj.weight"]["reason"] == "excluded by the settings"
    assert rows["transformer.ln_f.weight"]["reason"].startswith("no matrix")
    table = rows["transformer.wte.weight"]
    assert (table["bits"], table["error"]) == (8, None)
    text = done({"Q": list(rows.values())})
    assert "INT8, groups of 16" in text
    assert f"{len(result.layers)} of {len(rows)} tensors are quantized" in text


def test_a_table_outside_the_loop_says_how_it_is_rounded(loaded, tokens):
    result = loopq.quantize(loaded, tokens, n_steps=3, group_size=16, method="rtn")
    (row,) = [r for r in tensors(result, reasons(loaded.system, 3)) if r["name"] == "transformer.wte.weight"]
    assert row["reason"].startswith("outside the loop")
    assert "--outside 8" in row["reason"]


def test_tensors_of_one_reason_share_a_row_largest_first():
    rows = [weight("a.weight"), left("n1.weight", "no matrix"), left("n2.weight", "no matrix")]
    text = done({"Q": [*rows, left("e.weight", "excluded <by> the settings", n_bytes=9999)]})
    assert "1 of 4 tensors are quantized (INT4, groups of 32): 4.10 kB. The other 3 are as they were" in text
    assert '<td class=names>n1, n2</td><td>float32</td><td class=number data-sort="2.0">2</td>' in text
    assert text.index("excluded &lt;by&gt; the settings") < text.index("no matrix")


def test_checkpoints_stand_beside_each_other():
    first = [weight("a.weight"), left("b.weight", "excluded by the settings")]
    second = [
        weight("a.weight", bits=3, grid="INT3", group_size=-1),
        weight("b.weight", error=None, error_rtn=None),
    ]
    text = done({"Q4": first, "Q3": second})
    heads = ("Q4: stored as", "Q4: error [%]", "Q3: stored as", "Q3: error [%]")
    assert all(f">{head}</button>" in text for head in heads)
    assert "<td class=short>INT3 row</td>" in text
    assert "<td>as it was</td>" in text
    assert "b (in Q4)" in text


def test_what_another_tool_solved_has_no_error():
    rows = [weight("a.weight", method=None, error=None, error_rtn=None)]
    text = done({"Q": rows})
    assert "not known" in text
    assert 'class="bar"' not in text
    assert "error [%]" not in text
