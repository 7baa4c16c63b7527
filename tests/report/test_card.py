"""Model cards: what was made and measured, the licence, what they replace."""

from __future__ import annotations

import json
import shutil

import pytest

import benches.zoo.chains  # noqa: F401  registers the letter task
from tests.support.evaluated import FEW


@pytest.mark.parametrize("form", ["native", "compressed-tensors"])
def test_a_model_card_says_what_was_made_and_measured(saved_model, quantized, tmp_path, command, form):
    folder = tmp_path / "q"
    assert command("export", quantized, "--out", folder, "--format", form)[0] == 0
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    code, text, _ = command("card", folder, saved_model, *FEW)
    assert code == 0
    assert f"model card: {folder / 'README.md'}" in text
    card = (folder / "README.md").read_text()
    assert card.startswith(
        "---\ntags:\n- loopq\n- looped-transformer\n- 4-bit\n---\n\n# tiny-model, quantized by loopq"
    )
    assert "* 9 weights: INT4, groups of 16, float16 scales" in card
    assert "4 prompts, 96 tokens of embedded evaluation text, at 3 steps" in card
    asked = ("evaluate", saved_model, folder, *FEW, "--llama-cpp-style", "--json")
    found = json.loads(command(*asked)[1])[1]
    assert f"| quantized | {found['kl']:.3g} [" in card
    assert f"| {found['tokens']['quantiles'][50]:.3g} | {found['tokens']['quantiles'][99]:.3g} |" in card
    assert "](card.png)" in card
    assert (folder / "card.png").read_bytes().startswith(b"\x89PNG")
    assert "loopq quantize tiny-model --like DIR --calibration TEXT --out NEW" in card
    # The card is no part of the checkpoint: what it is written from stays as it was.
    assert command("export", folder, "--out", tmp_path / "again", "--format", form)[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


def test_a_card_names_the_licence_of_the_base_model(saved_model, quantized, tmp_path, command):
    base = tmp_path / "base"
    shutil.copytree(saved_model, base)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nText\n")
    shutil.copytree(quantized, tmp_path / "q")
    assert command("card", tmp_path / "q", base, *FEW)[0] == 0
    assert "\nlicense: apache-2.0\n" in (tmp_path / "q" / "README.md").read_text()


@pytest.mark.parametrize(
    "text",
    [
        "My notes.\n",
        "---\ntags:\n- loopq\n---\n\n# A model, made by hand\n",
        "# A model, quantized by loopq\n",
    ],
)
def test_a_card_replaces_its_own_kind_and_nothing_else(saved_model, quantized, tmp_path, command, text):
    shutil.copytree(quantized, tmp_path / "q")
    card, measure = tmp_path / "q" / "README.md", ("card", tmp_path / "q", saved_model, *FEW)
    card.write_text(text)
    code, out, err = command(*measure)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert f"{card}: not a card that loopq wrote; move it away" in err
    assert card.read_text() == text
    card.unlink()
    assert command(*measure)[0] == 0
    first = card.read_text()
    card.write_text(first.replace("A looped transformer", "Measured before: a looped transformer"))
    assert command(*measure)[0] == 0
    assert card.read_text() == first


def test_a_card_needs_no_model_and_names_each_grid(saved_model, tmp_path, command):
    grids = {"nvfp4": "NVFP4", "uneven": "3 bits, uneven levels", "mxfp4": "MXFP4"}
    for levels, shown in grids.items():
        out, group = tmp_path / levels, 32 if levels == "mxfp4" else 16
        bits = ("--bits", 3) if levels == "uneven" else ()
        asked = ("--method", "rtn", "--levels", levels, "--group-size", group, *bits)
        assert command("quantize", saved_model, "--out", out, *asked)[0] == 0
        assert command("card", out)[0] == 0
        card = (out / "README.md").read_text()
        assert f"weights: {shown}, groups of {group}, " in card
        assert "| KL" not in card
        assert shown in command("inspect", out)[1]
