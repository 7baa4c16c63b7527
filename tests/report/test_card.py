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
    code, text, _ = command("evaluate", saved_model, folder, *FEW, "--card")
    assert code == 0
    assert f"model card: {folder / 'README.md'}" in text
    card = (folder / "README.md").read_text()
    assert card.startswith(
        "---\ntags:\n- loopq\n- looped-transformer\n- 4-bit\n---\n\n# tiny-model, quantized by loopq"
    )
    assert "* 9 weights: INT4, groups of 16, symmetric, float16 scales" in card
    assert "4 prompts, 96 tokens of embedded evaluation text, at 3 steps" in card
    kl = json.loads(command("evaluate", saved_model, folder, *FEW, "--json")[1])[1]["kl"]
    assert f"| quantized | {kl:.3g} [" in card
    assert "loopq quantize tiny-model --like DIR --calibration TEXT --out NEW" in card
    # The card is no part of the checkpoint: what it is written from stays as it was.
    assert command("export", folder, "--out", tmp_path / "again", "--format", form)[0] == 0
    assert {p.name: p.read_bytes() for p in (tmp_path / "again").iterdir()} == before


def test_a_card_names_the_licence_of_the_base_model(saved_model, quantized, tmp_path, command):
    base = tmp_path / "base"
    shutil.copytree(saved_model, base)
    (base / "README.md").write_text("---\nlanguage: en\nlicense: apache-2.0\n---\nText\n")
    shutil.copytree(quantized, tmp_path / "q")
    assert command("evaluate", base, tmp_path / "q", *FEW, "--card")[0] == 0
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
    card, measure = tmp_path / "q" / "README.md", ("evaluate", saved_model, tmp_path / "q", *FEW, "--card")
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
