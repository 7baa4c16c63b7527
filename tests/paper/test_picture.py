"""The README's picture: drawn from records, even if models are missing."""

from __future__ import annotations

import json
import sys

import pytest

from benches.quality import picture

VARIANTS = (
    "RTN", "GPTQ, one step, paper", "GPTQ, trajectory, paper", "loopq default", "loopq best", "llm-compressor",
)  # fmt: skip


def peers(models, variants):
    grids = (picture.BLIND_GRID, *((b, picture.GROUP) for b in picture.BITS))
    return [
        {"model": m, "variant": v, "bits": b, "group": g, "kl": (n + 1.0) / 4**b, "output": "logits"}
        for m in models for n, v in enumerate(reversed(variants)) for b, g in grids
    ]  # fmt: skip


def main_table(models):
    ratios = {"one step / RTN": {"estimate": 2.0}, "N steps / RTN": {"estimate": 0.5}}
    grid = {"bits": 4, "group_size": 128, "ratios": ratios}
    return {"models": [{"model": m, "looped": True, "output": "logits", "grids": [grid]} for m in models]}


@pytest.fixture
def draw(tmp_path, monkeypatch, capsys):
    """Draw from a comparison and a main table; return what was printed and the text of the light picture."""
    pytest.importorskip("matplotlib")

    def drawn(records, table):
        (tmp_path / "peers-2026-01-02.json").write_text(json.dumps({"records": records}), "utf-8")
        (tmp_path / "peers-2026-01-01.json").write_text("no record", "utf-8")
        (tmp_path / "peers-2026-01-03-idle.json").write_text("of another bench", "utf-8")
        (tmp_path / "main-table-2026-01-01.json").write_text(json.dumps(table), "utf-8")
        row = {"bits": 4.5, "tool, importance": 0.2, "loopq": 0.1}
        types = {"x": {"matrices": 7, "rows": {"q4_0": row, "nvfp4": row | {"loopq": 0.11}}}}
        (tmp_path / "gguf-2026-01-01.json").write_text(json.dumps(types), "utf-8")
        real = [
            {"variant": v, "bits": b, "group": 64, "draw": d, "kl": 0.125 * (n + 1) / b + d}
            for n, v in enumerate(("loopq default", "llm-compressor", "RTN"))
            for b in (3, 4)
            for d in (0, 1)
        ]
        (tmp_path / "smollm2-peers-2026-01-01.json").write_text(json.dumps({"peers": real}), "utf-8")
        monkeypatch.setattr(sys, "argv", ["picture", "--records", str(tmp_path), "--out", str(tmp_path)])
        picture.main()
        assert (tmp_path / "picture-dark.svg").is_file()
        lines = (tmp_path / "claim-light.svg").read_text("utf-8")
        # Rows of the record that the picture does not name, as RTN, have no line.
        assert [lines.count(f"<!-- {name} -->") for name in ("loopq", "llm-compressor", "RTN")] == [1, 1, 0]
        assert "<!-- NVFP4, 4.50 bits -->" in (tmp_path / "types-light.svg").read_text("utf-8")
        return capsys.readouterr().out, (tmp_path / "picture-light.svg").read_text("utf-8")

    return drawn


def test_blindness_is_of_the_comparison_where_it_has_the_models(draw):
    printed, svg = draw(peers("ab", VARIANTS), main_table("abc"))
    assert "left: 2 models of peers-2026-01-02.json" in printed
    assert "right: a, b of peers-2026-01-02.json; not drawn: HQQ, GPTQModel, auto-round" in printed
    assert "<!-- loopq -->" in svg


@pytest.mark.slow
def test_blindness_is_the_main_tables_if_the_comparison_is_thin(draw):
    records = peers("ab", VARIANTS[3:]) + peers(["a+outlier"], VARIANTS) + peers("c", VARIANTS[:4])
    printed, _ = draw(records, main_table(["a", "b", "d", "b_seed1"]))
    assert "left: 3 models of main-table-2026-01-01.json" in printed
    assert "right: a, b of" in printed


def test_numbers_are_those_of_the_records():
    rows = picture.ratios_of_peers(peers("a", VARIANTS))
    assert rows == {"a": {"one step": 5 / 6, "all steps": 4 / 6, "loopq": 3 / 6}}
    drawn, models, lacking = picture.curves(peers("ab", VARIANTS))
    assert models == ["a", "b"]
    assert drawn["loopq default"] == pytest.approx([3 / 4**b for b in picture.BITS])
    assert lacking == ["HQQ", "GPTQModel", "auto-round", "llm-compressor, mse", "loopq best, trellis"]


def test_a_tool_of_one_model_does_not_drive_out_the_others():
    """Three models with three tools show more than one with four, and less than two with five."""
    three = ("loopq default", "loopq best", "llm-compressor")
    _, models, lacking = picture.curves(peers("bc", three) + peers("a", (*three, "HQQ")))
    assert sorted(models) == ["a", "b", "c"]
    assert "HQQ" in lacking
    _, models, _ = picture.curves(peers("ab", (*three, "HQQ", "GPTQModel")) + peers("c", three))
    assert models == ["a", "b"]
