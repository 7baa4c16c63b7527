"""Figure 2 and Table 18: rank survey and recovery."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from loopq.paper.bench import Bench
from loopq.paper.tables.rank_survey import layer_class, rank_survey
from tests.support.paper import SMALL, bench, measured_shown_and_resumed, save


def test_it_is_measured_shown_and_resumed(huginn: Bench, tmp_path: Path) -> None:
    measured_shown_and_resumed("rank-survey", huginn, tmp_path)


def test_ranks_are_those_of_the_inputs(tmp_path: Path) -> None:
    folder = save(tmp_path / "tiny", "ouro", n_layers=1, total_ut_steps=2)
    one = bench(folder, SMALL.changed(n_calibration=2, seq_len=24))
    survey = rank_survey(one.sums, one.collected.job.selection)
    assert survey["threshold"] == 1e-3
    by_class = {row["class"]: row for row in survey["layers"]}
    assert set(by_class) == {
        "self_attn.q_proj+k_proj+v_proj", "self_attn.o_proj", "mlp.gate_proj+up_proj", "mlp.down_proj",
    }  # fmt: skip
    rows: list[Any] = []
    hook = one.source.loaded.model.get_submodule("model.layers.0.mlp.down_proj").register_forward_pre_hook(
        lambda _, args: rows.append(args[0].flatten(0, 1).double())
    )
    batch = next(one.model.calibration.batches(8))
    one.system.rollout(batch, 2)
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
