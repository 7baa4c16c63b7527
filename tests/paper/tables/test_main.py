"""Table 2: rounding, one-step and trajectory calibration."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benches.zoo.chains import QUESTION_LENGTH, marked
from loopq.calibrate.prompts import register_prompts
from loopq.cli import main as run
from loopq.errors import ConfigError
from loopq.evaluation.compare import compare
from loopq.models.load import load_model
from loopq.paper import bench, main_text
from loopq.paper.bench import Bench
from loopq.paper.main_text import ALL, GRIDS, ONE, RTN
from loopq.paper.models import Sizes, open_source
from loopq.paper.tables import main as table
from tests.support.paper import main_table, save


def test_a_looped_model_is_measured_by_every_arm_on_every_grid(tmp_path: Path) -> None:
    result = main_table(save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=3))
    assert result["model"] == "tiny"
    assert (result["system"], result["n_steps"], result["looped"]) == ("ouro", 3, True)
    assert [(a["bits"], a["group_size"], a["variant"]) for a in result["variants"]] == [
        (bits, group, variant) for bits, group in GRIDS for variant in (RTN, ONE, ALL)
    ]
    for variant in result["variants"]:
        # Rounding looks at no text, so it has one seed.
        assert (
            np.shape(variant["kl"])
            == np.shape(variant["nll"])
            == ((1 if variant["variant"] == RTN else 2), 3)
        )
        assert np.min(variant["kl"]) > 0
    first, second = result["variants"][1]["kl"]
    assert first != second, "calibration seeds see the same prompts"
    assert len(result["full_precision"]) == 3


def test_the_numbers_are_those_of_compare(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "huginn", mean_recurrence=3)
    result = main_table(folder)
    model = open_source(folder).prompts(Sizes(4, 4, 3, 24))
    system = model.loaded.system
    base = compare(system, {}, model.evaluation, count_bytes=model.loaded.count_bytes)[0]
    assert result["full_precision"] == pytest.approx(base.nll[0], rel=1e-7)
    row = main_text.summarize_model(result)
    assert row["bits_per_byte"]["estimate"] == pytest.approx(base.bits_per_byte)
    # A byte-level model: nats over ln 2 are bits of a byte.
    variant = result["variants"][-1]
    lost = (np.mean(variant["nll"]) - base.nll.mean()) / math.log(2)
    assert row["grids"][1]["variants"][ALL]["bits_lost"]["estimate"] == pytest.approx(lost)
    gap = row["grids"][1]["variants"][ALL]["gap_closed"]
    assert gap["estimate"] == pytest.approx(1 - np.mean(variant["kl"]) / np.mean(result["variants"][3]["kl"]))
    assert gap["low"] < gap["estimate"] < gap["high"]


def test_the_adapter_is_damped_as_in_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = bench.solve_from

    def watch(plan: Any, source: Any, sums: Any) -> Any:
        seen.append(plan.config)
        return plain(plan, source, sums)

    monkeypatch.setattr(bench, "solve_from", watch)
    main_table(save(tmp_path / "tiny", "rllama", mean_recurrence=2, n_heads=4))
    # Rounding, which has no damping, comes first.
    assert seen[1].for_layer("transformer.adapter.weight").method.damping.fraction == 0.1
    assert seen[1].for_layer("transformer.core_block.0.mlp.fc.weight").method.damping.fraction == 0.01


def test_without_a_loop_one_step_is_all(tmp_path: Path) -> None:
    result = main_table(save(tmp_path / "tiny", "control"))
    assert not result["looped"]
    variants = {a["variant"]: a for a in result["variants"][:3]}
    assert variants[ONE]["kl"] == variants[ALL]["kl"]


@pytest.mark.slow
def test_coconut_is_asked_its_task_and_scored_on_answers(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "coconut")
    prepared = open_source(folder).prompts(Sizes(2, 2, 3, 24))
    first = prepared.evaluation.scored_from
    assert first == QUESTION_LENGTH + 1
    assert [s.size for s in prepared.evaluation.sequences] == [QUESTION_LENGTH + 2 + 12 - 4] * 3
    assert not {s.tobytes() for s in prepared.calibration.sequences} & {
        s.tobytes() for s in prepared.evaluation.sequences
    }
    result = main_table(folder)
    assert result["task"] == "chains of letters"
    loaded = load_model(folder)
    ids = np.stack(prepared.evaluation.sequences)
    answer = torch.from_numpy(ids[:, first + 1 :])
    with torch.no_grad():
        whole = marked(ids[:, :QUESTION_LENGTH], ids[:, first + 1 :], 256, 257, 4, 258)
        log = loaded.model(torch.from_numpy(whole)).logits.double().log_softmax(-1)
    nll = -log[:, first + 4 : -1].gather(-1, answer[..., None]).squeeze(-1).mean(-1)
    assert result["full_precision"] == pytest.approx(nll.numpy(), rel=1e-6)
    (table, *_) = main_text.tables(main_text.summarize([result]))
    assert "tiny is measured on chains of letters instead of text." in table.text
    last = len(ids[0]) - 1
    with pytest.raises(ConfigError, match=f"at least two tokens after {last}"):
        compare(loaded.system, {}, dataclasses.replace(prepared.evaluation, scored_from=last))
    with pytest.raises(ConfigError, match="'loopq-zoo-coconut' are registered twice"):
        register_prompts("loopq-zoo-coconut", lambda *_: prepared.evaluation)


def test_the_command_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2)
    flags = [
        "--n-calibration",
        "2",
        "--n-evaluation",
        "3",
        "--seq-len",
        "24",
        "--n-seeds",
        "2",
        "--threads",
        "1",
    ]
    args = [
        "reproduce",
        "main-table",
        folder,
        *flags,
        "--work",
        str(tmp_path / "w"),
        "--out",
        str(tmp_path / "o"),
    ]
    assert run(args) == 0
    text = capsys.readouterr().out
    for title in (
        "INT4, group size 128",
        "INT3, group size 32",
        "Does the paper's ordering hold?",
        "Rank survey",
    ):
        assert title in text
    assert "on 0 of 1 models" in text or "on 1 of 1 models" in text
    assert "no logits" not in text
    assert "letter task" not in text
    data = next((tmp_path / "o").glob("main-table-*.json"))
    record = json.loads(data.read_text())
    assert record["tables"]["main-table"]["models"][0]["model"] == "tiny"
    page = data.with_suffix(".md").read_text()
    assert "### Rank survey" in page
    assert data.name in page
    assert "<svg" in data.with_suffix(".html").read_text()
    # Every row of a table has the cells of its head.
    for line in page.splitlines():
        if line.startswith("| "):
            width = line.count("|")
        assert not line.startswith("|") or line.count("|") == width
    assert run([*args[:2], folder, folder]) == 2
    assert "named twice" in capsys.readouterr().err


def test_each_seed_needs_a_calibration_prompt(huginn: Bench) -> None:
    model = open_source("huginn_small").prompts(Sizes(2, 2, 3, 24))
    with pytest.raises(ConfigError, match="too few for 3 seeds"):
        next(table._seeds(huginn, model, 3))
