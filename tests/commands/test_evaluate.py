"""`loopq evaluate`: what it measures, of any format, and how it says it."""

from __future__ import annotations

import json
import shutil

import pytest

from loopq.commands.output import measurement_table
from loopq.systems.load import load_model

FEW = ("--n-prompts", "4", "--seq-len", "24")


def test_evaluate_prints_json(saved_model, quantized, command):
    code, text, _ = command("evaluate", saved_model, quantized, *FEW, "--n-seeds", 2, "--json")
    reference, found = json.loads(text)
    assert code == 0
    assert reference["kl"] == 0.0
    assert found["kl"] > 0.0
    assert found["n_seeds"] == 2
    assert abs(found["bits_per_byte"] - reference["bits_per_byte"]) < 0.1


@pytest.mark.parametrize("form", ["compressed-tensors", "gptq"])
def test_evaluate_measures_what_export_wrote_and_says_on_what(
    saved_model, quantized, tmp_path, command, form
):
    assert command("export", quantized, "--out", tmp_path / "e", "--format", form)[0] == 0
    measure = ("evaluate", saved_model, quantized, tmp_path / "e", *FEW)
    code, text, _ = command(*measure)
    assert code == 0
    assert text.startswith(
        "4 prompts, 96 tokens of embedded evaluation text, 3 steps, initial states of each: 1"
    )
    full, native, foreign = json.loads(command(*measure, "--json")[1])
    assert native["kl"] == foreign["kl"] > 0
    assert native["kl_95"][0] <= native["kl"] <= native["kl_95"][1]
    n_parameters = sum(p.numel() for p in load_model(saved_model).model.parameters())
    assert native["n_bytes"] < full["n_bytes"] == 4 * n_parameters
    assert f"[{native['kl_95'][0]:.5f}" in text or f"[{native['kl_95'][0]:.2e}" in text


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["{tmp}"], 1, "no checkpoint: neither loopq.json nor config.json"),
        (["{tmp}/none"], 1, "none: no such folder"),
        (["{tmp}/none", "--n-seeds", "0"], 2, "argument --n-seeds: must be between 1 and 65536; got 0"),
    ],
)
def test_errors_are_one_line(saved_model, tmp_path, command, args, code, match):
    got, out, err = command("evaluate", saved_model, *(a.format(tmp=tmp_path) for a in args))
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert match in err


def test_small_divergences_are_not_shown_as_none():
    rows = [{"name": n, "output": "logits", "kl": kl, "agreement": 1.0, "perplexity": 2.0, "bits_per_byte": None}
            for n, kl in (("full precision", 0.0), ("small", 1.234e-6), ("usual", 0.01234))]  # fmt: skip
    lines = measurement_table(rows).splitlines()[2:]
    assert [line.split()[-5 if "full" not in line else 2] for line in lines] == [
        "0.00000",
        "1.23e-06",
        "0.01234",
    ]


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
