"""`loopq evaluate`: what it measures, of any format, and how it says it."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
import torch

import benches.zoo.chains  # noqa: F401  registers the letter task
import loopq
from benches.zoo.store import save_model
from loopq.evaluation.stats import mcnemar_exact, wilson
from loopq.models.load import load_model
from loopq.systems.base import Batch
from tests.support.evaluated import FEW
from tests.support.systems import small


def test_evaluate_prints_json(saved_model, quantized, command):
    code, text, _ = command("evaluate", saved_model, quantized, *FEW, "--n-seeds", 2, "--json")
    reference, data = json.loads(text)
    assert code == 0
    assert reference["kl"] == 0.0
    assert data["kl"] > 0.0
    assert data["n_seeds"] == 2
    assert abs(data["bits_per_byte"] - reference["bits_per_byte"]) < 0.1


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
        (["huginn_small"], 2, "the model comes first: loopq evaluate huginn_small CHECKPOINT"),
        (["{model}"], 2, "{model}: a model in full precision, not a checkpoint"),
        (["{tmp}/none", "--n-seeds", "0"], 2, "argument --n-seeds: must be between 1 and 65536; got 0"),
    ],
)
def test_errors_are_one_line(saved_model, tmp_path, command, args, code, match):
    places = {"tmp": tmp_path, "model": saved_model}
    got, out, err = command("evaluate", saved_model, *(a.format(**places) for a in args))
    assert (got, out, err.count("\n")) == (code, "", 1)
    assert match.format(**places) in err


@pytest.mark.parametrize(
    ("args", "code", "match"),
    [
        ([], 2, "name a checkpoint to compare with the model: DIR"),
        (["Q", "--tasks", "arc_easy"], 2, "--tasks"),
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
    full, data = json.loads(command("evaluate", model, out, *few, "--json")[1])
    for row in (full, data):
        interval = wilson(int(sum(row["answers"]["values"])), 5)
        assert row["answers"]["interval"]["low"] == pytest.approx(interval.low)
    both = [row["answers"]["values"] for row in (full, data)]
    gained, lost = (sum(a > b for a, b in zip(x, y, strict=True)) for x, y in (both[::-1], both))
    assert (full["answers"]["p_value"], data["answers"]["p_value"]) == (None, mcnemar_exact(gained, lost))
    assert re.search(r"chains of letters +answer +full precision +5 ", text)
    assert command("diagnose", model, "--only", "ranks,ablation", *few)[0] == 0
    (tmp_path / "text.txt").write_text("What is said here is said once. " * 9)
    plain = command("evaluate", model, out, "--text", tmp_path / "text.txt", "--seq-len", 16, *few)[1]
    assert ("of text.txt" in plain, "McNemar" in plain) == (True, False)


def _as_llama_perplexity(full, other, targets):
    """KL and same top token of positions by the arithmetic of llama-perplexity: base log-probabilities in 16 bits."""
    kl, same = [], []
    for base, logits, _ in zip(full, other, targets, strict=True):
        low = np.float32(max(base.min(), base.max() - 16))
        scale = np.float32((base.max() - low) / 65535)
        log_sum = np.float32(np.log(np.exp(base - base.max()).astype(np.float64).sum()))
        stored = np.where(base > low, np.rint((base - low) / scale), 0).astype(np.uint16)
        p = scale * stored.astype(np.float32) + (low - base.max() - log_sum)
        q = logits - logits.max() - np.float32(np.log(np.exp(logits - logits.max()).astype(np.float64).sum()))
        kept = p > -16
        kl.append(float((np.exp(p[kept]) * (p[kept] - q[kept])).sum()))
        same.append(int(logits.argmax()) == int(p.argmax()))
    return np.array(kl), np.array(same)


def test_chunks_are_scored_as_llama_perplexity_scores_them(saved_model, quantized, tmp_path, command):
    text = tmp_path / "held-out.txt"
    text.write_text("She sells sea shells on the sea shore, and the shells she sells are hers. " * 4)
    asked = ("--text", text, "--seq-len", 32, "--llama-cpp-style")
    code, shown, _ = command("evaluate", saved_model, quantized, *asked)
    row = json.loads(command("evaluate", saved_model, quantized, *asked, "--json")[1])[1]["tokens"]
    model, other = load_model(saved_model), loopq.load(quantized)
    ids = np.frombuffer(text.read_bytes(), np.uint8).astype(np.int64)
    kl, same = [], []
    for chunk in range(len(ids) // 32):
        piece = ids[32 * chunk : 32 * (chunk + 1)]
        batch = Batch(torch.from_numpy(piece[None]), (chunk,), 0)
        full, logits = (m.system.rollout(batch, 3)[0, 16:31].float().numpy() for m in (model, other))
        for total, values in zip((kl, same), _as_llama_perplexity(full, logits, piece[17:]), strict=True):
            total.extend(values)
    assert code == 0
    assert row["n_scored"] == len(kl) == 15 * (len(ids) // 32)
    assert row["kl"] == pytest.approx(np.mean(kl), rel=2e-3)
    assert row["kl_error"] == pytest.approx(np.std(kl) / (len(kl) - 1) ** 0.5, rel=2e-2)
    assert row["quantiles"][50] == pytest.approx(np.median(kl), rel=5e-3)
    assert row["quantiles"][99] == pytest.approx(np.quantile(kl, 0.99), rel=5e-3)
    assert row["same_top"] == pytest.approx(np.mean(same), abs=1.5 / len(kl))
    assert f"{row['kl']:.6f} ± {row['kl_error']:.6f}" in shown


def test_chunks_are_cut_from_a_text_alone(saved_model, quantized, tmp_path, command):
    (tmp_path / "p.jsonl").write_text('{"text": "some words"}\n' * 3)
    asked = ("evaluate", saved_model, quantized, "--llama-cpp-style")
    code, _, err = command(*asked, "--text", tmp_path / "p.jsonl")
    assert (code, "chunks are cut from a text, and this has prompts" in err) == (2, True)
    code, _, err = command(*asked, "--seq-len", 3)
    assert (code, "--seq-len 3: half of a chunk is context" in err) == (2, True)


def test_several_depths_are_one_table(saved_model, quantized, tmp_path, command):
    asked = ("evaluate", saved_model, quantized, *FEW, "--n-steps", "1,3")
    code, _, err = command(*asked, "--html", tmp_path / "depths.html")
    assert (code, "--html: a page is about one depth" in err) == (2, True)
    code, text, _ = command(*asked)
    assert code == 0
    assert text.count("perplexity") == 1
    rows = json.loads(command(*asked, "--json")[1])
    assert [(r["n_steps"], r["name"]) for r in rows[::2]] == [(1, "full precision"), (3, "full precision")]
    for depth, row in zip((1, 3), rows[1::2], strict=True):
        (alone,) = json.loads(command(*asked[:-1], depth, "--json")[1])[1:]
        assert row["kl"] == alone["kl"]
        assert row["tokens_per_second"] > 0
        assert re.search(rf"^ *{depth} +{re.escape(str(quantized))} +{row['kl']:.5f}", text, re.MULTILINE)


def test_the_text_of_the_calibration_is_told_in_every_output(tmp_path, saved_model, command):
    text, out, page = tmp_path / "t.txt", tmp_path / "q", tmp_path / "p.html"
    text.write_text(" ".join(f"{n} times {n * 7} is {n * n * 7}." for n in range(400)))
    (tmp_path / "other.txt").write_text(text.read_text()[::-1])
    options = ("--out", out, "--group-size", 16, "--preset", "fast", "--calibration", text)
    assert command("quantize", saved_model, *options, "--n-prompts", 8, "--seq-len", 64)[0] == 0
    words = "prompts were used for calibration: KL is too low"
    few = ("--n-prompts", 4, "--seq-len", 64)
    code, shown, err = command("evaluate", saved_model, out, "--text", text, *few, "--json", "--html", page)
    assert code == 0
    assert f"{out}: these {words}" in err
    data = json.loads(shown)[1]
    assert data["warning"] == f"these {words}"
    assert data["n_prompts_of_calibration"] == 4
    assert data["prompts_sha256"] != data["calibration_sha256"]
    assert f"{out}: these {words}" in page.read_text()
    assert command("card", out, saved_model, "--text", text, "--seq-len", 128)[0] == 0
    assert words in (out / "README.md").read_text()
    other = command("evaluate", saved_model, out, "--text", tmp_path / "other.txt", *few, "--json")
    assert words not in other[2]
    assert "warning" not in other[1]
