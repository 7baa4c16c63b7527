"""The main table: what is measured, kept, put in words and printed, on tiny untrained models."""

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
from loopq.calibrate.data import TokenSet
from loopq.calibrate.prompts import register_prompts
from loopq.cli import main
from loopq.errors import ConfigError
from loopq.evaluation.compare import compare
from loopq.models.load import load_model
from loopq.paper import main_table, main_text
from loopq.paper.main_table import ALL, GRIDS, ONE, RTN, VARIANTS, layer_class
from loopq.paper.models import Sizes, prepare_model
from tests.support.main_table import measure, save


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(main_text, "N_RESAMPLES", 300)


def test_a_looped_model_is_measured_by_every_arm_on_every_grid(tmp_path: Path) -> None:
    found = measure(save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=3))
    assert found["model"] == "tiny"
    assert (found["system"], found["n_steps"], found["looped"]) == ("ouro", 3, True)
    assert [(a["bits"], a["group_size"], a["variant"]) for a in found["variants"]] == [
        (bits, group, variant) for bits, group in GRIDS for variant, _, _ in VARIANTS
    ]
    for variant in found["variants"]:
        # Rounding looks at no text, so it has one seed.
        assert (
            np.shape(variant["kl"])
            == np.shape(variant["nll"])
            == ((1 if variant["variant"] == RTN else 2), 3)
        )
        assert np.min(variant["kl"]) > 0
    first, second = found["variants"][1]["kl"]
    assert first != second, "calibration seeds see the same prompts"
    assert len(found["full_precision"]) == 3


def test_the_numbers_are_those_of_compare(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "huginn", mean_recurrence=3)
    found = measure(folder)
    model = prepare_model(folder, Sizes(4, 4, 3, 24))
    system = model.loaded.system
    base = compare(system, {}, model.evaluation, count_bytes=model.loaded.count_bytes)[0]
    assert found["full_precision"] == pytest.approx(base.nll[0], rel=1e-7)
    row = main_text.summarize_model(found)
    assert row["bits_per_byte"]["estimate"] == pytest.approx(base.bits_per_byte)
    # A byte-level model: nats over ln 2 are bits of a byte.
    variant = found["variants"][-1]
    lost = (np.mean(variant["nll"]) - base.nll.mean()) / math.log(2)
    assert row["grids"][1]["variants"][ALL]["bits_lost"]["estimate"] == pytest.approx(lost)
    gap = row["grids"][1]["variants"][ALL]["gap_closed"]
    assert gap["estimate"] == pytest.approx(1 - np.mean(variant["kl"]) / np.mean(found["variants"][3]["kl"]))
    assert gap["low"] < gap["estimate"] < gap["high"]


def test_the_adapter_is_damped_as_in_the_paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    plain = main_table.solve_from

    def watch(plan: Any, source: Any, sums: Any) -> Any:
        seen.append(plan.config)
        return plain(plan, source, sums)

    monkeypatch.setattr(main_table, "solve_from", watch)
    measure(save(tmp_path / "tiny", "rllama", mean_recurrence=2, n_heads=4))
    # Rounding, which has no damping, comes first.
    assert seen[1].for_layer("transformer.adapter.weight").method.damping.fraction == 0.1
    assert seen[1].for_layer("transformer.core_block.0.mlp.fc.weight").method.damping.fraction == 0.01


def test_without_a_loop_one_step_is_all(tmp_path: Path) -> None:
    found = measure(save(tmp_path / "tiny", "control"))
    assert not found["looped"]
    variants = {a["variant"]: a for a in found["variants"][:3]}
    assert variants[ONE]["kl"] == variants[ALL]["kl"]


@pytest.mark.slow
def test_coconut_is_asked_its_task_and_scored_on_answers(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "coconut")
    prepared = prepare_model(folder, Sizes(2, 2, 3, 24))
    first = prepared.evaluation.scored_from
    assert first == QUESTION_LENGTH + 1
    assert [s.size for s in prepared.evaluation.sequences] == [QUESTION_LENGTH + 2 + 12 - 4] * 3
    assert not {s.tobytes() for s in prepared.calibration.sequences} & {
        s.tobytes() for s in prepared.evaluation.sequences
    }
    found = measure(folder)
    assert found["task"] == "chains of letters"
    loaded = load_model(folder)
    ids = np.stack(prepared.evaluation.sequences)
    answer = torch.from_numpy(ids[:, first + 1 :])
    with torch.no_grad():
        whole = marked(ids[:, :QUESTION_LENGTH], ids[:, first + 1 :], 256, 257, 4, 258)
        log = loaded.model(torch.from_numpy(whole)).logits.double().log_softmax(-1)
    nll = -log[:, first + 4 : -1].gather(-1, answer[..., None]).squeeze(-1).mean(-1)
    assert found["full_precision"] == pytest.approx(nll.numpy(), rel=1e-6)
    (table, *_) = main_text.tables(main_text.summarize([found]))
    assert "tiny is measured on chains of letters instead of text." in table.text
    last = len(ids[0]) - 1
    with pytest.raises(ConfigError, match=f"at least two tokens after {last}"):
        compare(loaded.system, {}, dataclasses.replace(prepared.evaluation, scored_from=last))
    with pytest.raises(ConfigError, match="'loopq-zoo-coconut' are registered twice"):
        register_prompts("loopq-zoo-coconut", lambda *_: prepared.evaluation)


def test_ranks_are_those_of_the_inputs(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2)
    survey = measure(folder)["ranks"]
    prepared = prepare_model(folder, Sizes(4, 4, 3, 24))
    assert survey["threshold"] == 1e-3
    by_class = {row["class"]: row for row in survey["layers"]}
    assert set(by_class) == {
        "self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj",
    }  # fmt: skip
    rows: list[Any] = []
    hook = prepared.loaded.model.get_submodule("model.layers.0.mlp.down_proj").register_forward_pre_hook(
        lambda _, args: rows.append(args[0].flatten(0, 1).double())
    )
    batch = next(prepared.calibration.take(0, 2).batches(8))
    prepared.loaded.system.rollout(batch, 2)
    hook.remove()
    ranks = []
    for x in (rows[0], rows[1], torch.cat(rows)):
        values = torch.linalg.eigvalsh(x.T @ x)
        ranks.append(int((values > 1e-3 * values.max()).sum()))
    row = by_class["mlp.down_proj"]
    assert [row["first"], row["last"], row["all"]] == ranks
    assert row["gain"] == pytest.approx(ranks[2] / ranks[0])
    assert row["n_rows"] == 48
    lowest = min(survey["layers"], key=lambda r: r["first"] / r["n_inputs"])
    assert survey["bottleneck"] == lowest["layer"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("transformer.adapter.weight", "adapter"),
        ("transformer.core_block.12.attn.Wqkv.weight", "attn.Wqkv"),
        ("encoder.albert_layer_groups.0.albert_layers.0.ffn_output.weight", "ffn_output"),
    ],
)
def test_layers_are_classed_without_their_numbers(name: str, expected: str) -> None:
    assert layer_class(name) == expected


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
    assert main(args) == 0
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
    assert main([*args[:2], folder, folder]) == 2
    assert "named twice" in capsys.readouterr().err


def test_a_chain_of_calibration_sets_needs_enough_prompts() -> None:
    with pytest.raises(ConfigError, match="too few for 3 seeds"):
        main_table._calibration_sets(TokenSet((np.arange(4),), "text", "prompts"), 3)
