"""`loopq evaluate`: what it measures, of any format, and how it says it."""

from __future__ import annotations

import json
import math
import re
import shutil
import sys

import pytest
import torch

import benches.zoo.chains  # noqa: F401  registers the letter task
from benches.zoo.store import save_model
from loopq.commands.output import measurement_table
from loopq.evaluate.stats import mcnemar_exact, wilson
from loopq.models.load import load_model
from tests.support.systems import small

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


def test_a_page_says_what_was_done_and_where_the_error_is(
    saved_model, quantized, tmp_path, command, monkeypatch
):
    """Of a checkpoint and of what was exported from it, without matplotlib."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command("export", quantized, "--out", tmp_path / "e", "--format", "gptq")[0] == 0
    page = tmp_path / "page.html"
    code, text, err = command("evaluate", saved_model, quantized, tmp_path / "e", *FEW, "--html", page)
    assert code == 0, err
    assert text.endswith(f"page: {page}\n")
    shown = page.read_text("utf-8")
    data = json.loads(re.search(r'id="data">(.*?)</script>', shown)[1])
    native, foreign = (data["errors"]["weights"][str(folder)] for folder in (quantized, tmp_path / "e"))
    assert native == foreign
    assert len(native["own"]) == 9
    assert all(len(row) == 3 and 0 < min(row) < max(row) < 1 for row in native["own"].values())
    done = data["weights"][str(quantized)]
    assert {row["name"] for row in done if "bits" in row} == set(native["own"])
    assert all("reason" in row for row in done if "bits" not in row)
    assert re.findall(r'<section id="(\w+)">', shown) == ["weights", "where", "cost", "prompts"]
    assert shown.count("<circle") == 2


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


@pytest.fixture
def data(tmp_path):
    """A handful of items of three tasks."""
    items = {
        "lambada/lambada_test.jsonl": [
            {"text": f"He said that the {w}"} for w in ("sea", "sun", "day", "end")
        ],
        "arc/arc_easy_test.jsonl": [
            {"query": f"Question: {q}?", "choices": ["one", "two", "it is none of them"], "gold": g}
            for q, g in (("How many", 0), ("Which", 1), ("What", 2))
        ],
    }
    for name, records in items.items():
        (tmp_path / "data" / name).parent.mkdir(parents=True)
        (tmp_path / "data" / name).write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "data" / "wikitext2").mkdir()
    (tmp_path / "data" / "wikitext2" / "wiki.test.raw").write_text(
        " = A = \n It was . \n = B = \n So be it . \n"
    )
    return tmp_path / "data"


def test_tasks_compare_weights_on_the_same_items(saved_model, quantized, tmp_path, data, command):
    other = tmp_path / "q3"
    settings = ("--preset", "paper", "--group-size", 16, "--bits", 2, "--n-prompts", 4, "--seq-len", 24)
    assert command("quantize", saved_model, "--out", other, *settings)[0] == 0
    asked = ("--tasks", "lambada,arc_easy,wikitext", "--task-data", data)
    code, text, _ = command("evaluate", saved_model, quantized, other, *asked, "--json")
    assert code == 0
    rows = json.loads(text)
    assert [(r["task"], r["metric"]) for r in rows[::3]] == [
        ("lambada", "perplexity"),
        ("lambada", "acc"),
        ("arc_easy", "acc"),
        ("arc_easy", "acc_norm"),
        ("wikitext", "word_perplexity"),
    ]
    assert [r["weights"] for r in rows[:3]] == [str(saved_model), str(quantized), str(other)]
    assert [len(r["values"]) for r in rows[::3]] == [4, 4, 3, 3, 2]
    # Each is what the weights alone give: the checkpoints fill one model, one after the other.
    for folder, at in ((quantized, 1), (other, 2)):
        alone = json.loads(command("evaluate", folder, *asked, "--json")[1])
        assert [r["change"] for r in alone] == [None] * 5
        for one, of_several in zip(alone, rows[at::3], strict=True):
            assert one["values"] == pytest.approx(of_several["values"])
    first, second = rows[0], rows[2]
    assert first["change"] is None
    ratio = math.exp((sum(second["values"]) - sum(first["values"])) / 4)
    assert second["change"]["estimate"] == pytest.approx(ratio)
    assert second["change"]["low"] <= ratio <= second["change"]["high"]
    assert (second["p_value"], rows[5]["p_value"]) == (None, 1.0)


def test_the_table_of_tasks_says_what_was_scored_and_cut(saved_model, quantized, data, command):
    found = command(
        "evaluate", saved_model, quantized, "--tasks", "arc_easy", "--task-data", data, "--limit", 2
    )
    assert (found[0], found[1].count("arc_easy  acc")) == (0, 4)
    head, _, first, second, *_ = found[1].splitlines()
    assert " ".join(head.split()) == "task metric weights items value 95 % change 95 % McNemar p"
    assert re.search(r" 2  +\d+\.\d %  +\[\d+\.\d, \d+\.\d\]  +-  +-  +-$", first), first
    assert re.search(r"  [+-]\d+\.\d  +\[.*\]  +[\d.]+$", second), second
    (data / "lambada" / "lambada_test.jsonl").write_text(json.dumps({"text": "so " * 99 + "on"}))
    text = command("evaluate", saved_model, "--tasks", "lambada", "--task-data", data)[1]
    assert "lambada: 1 of 1 contexts are longer than the model reads and were cut at their left" in text


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        (["--tasks", "arc"], 2, "argument --tasks: no task 'arc'; known: lambada, arc_easy"),
        (["--tasks", "arc_easy"], 2, "--tasks: their files are needed as well: --task-data DIR"),
        (["--tasks", "gsm8k", "--task-data", "{data}"], 2, "task gsm8k: no file "),
        (["--tasks", "arc_easy", "--task-data", "{data}", "--text", "x"], 2, "--text: not read with --tasks"),
        (
            ["--tasks", "arc_easy", "--task-data", "{data}", "--n-prompts", "3"],
            2,
            "--n-prompts: not read with",
        ),
        (["--limit", "3"], 2, "--limit: for --tasks alone; leave it out"),
        ([], 2, "name a checkpoint to compare with the model: DIR; or --tasks"),
    ],
)
def test_options_that_nothing_would_read_are_refused(saved_model, data, command, args, code, match):
    got, out, err = command("evaluate", saved_model, *(a.format(data=data) for a in args))
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert match in err


def test_a_model_with_a_task_is_asked_it_in_every_command(tmp_path, command):
    """Answers by Wilson and McNemar; a text that is named goes before the task."""
    model, out = tmp_path / "model", tmp_path / "q"
    torch.manual_seed(0)
    save_model(small("coconut", block_size=64)(), model)
    few = ("--n-prompts", "5")
    assert (
        command("quantize", model, "--out", out, "--bits", 2, "--group-size", 16, "--method", "gptq", *few)[0]
        == 0
    )
    said = json.loads((out / "loopq.json").read_text())["settings"]["calibration"]
    assert (said["source"], said["n_prompts"]) == ("chains of letters", 5)
    code, text, _ = command("evaluate", model, out, *few)
    assert (code, "5 prompts, 210 tokens of chains of letters" in text) == (0, True)
    full, found = json.loads(command("evaluate", model, out, *few, "--json")[1])
    for row in (full, found):
        interval = wilson(int(sum(row["answers"]["values"])), 5)
        assert row["answers"]["interval"]["low"] == pytest.approx(interval.low)
    both = [row["answers"]["values"] for row in (full, found)]
    gained, lost = (sum(a > b for a, b in zip(x, y, strict=True)) for x, y in (both[::-1], both))
    assert (full["answers"]["p_value"], found["answers"]["p_value"]) == (None, mcnemar_exact(gained, lost))
    assert re.search(r"chains of letters +answer +full precision +5 ", text)
    assert command("diagnose", model, "--only", "ranks,ablation", *few)[0] == 0
    (tmp_path / "text.txt").write_text("What is said here is said once. " * 9)
    plain = command("evaluate", model, out, "--text", tmp_path / "text.txt", "--seq-len", 16, *few)[1]
    assert ("of text.txt" in plain, "McNemar" in plain) == (True, False)
