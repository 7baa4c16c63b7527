"""`loopq reproduce` on the command line: its usage, its refusals, and a model with its own tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from loopq import zoo
from loopq.cli import main, parser
from tests.support.subwords import subword_folder


def test_its_usage_is_what_it_cannot_do_without():
    usage = parser()._subparsers._group_actions[0].choices["reproduce"].format_usage()
    assert " ".join(usage.split()) == "usage: loopq reproduce TABLE [MODEL ...] [options]"


@pytest.mark.parametrize("place", [("--work", "{empty}/o"), ("--out", "{empty}")])
def test_a_file_in_the_place_of_a_folder_is_said_before_any_work(place, tmp_path, command):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    args = ("reproduce", "main-table", "nowhere", *place)
    code, out, err = command(*(a.format(empty=empty) for a in args))
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no folder that can be written to" in err
    assert list(tmp_path.iterdir()) == [empty]


def test_a_model_is_measured_on_its_own_tokens(tmp_path, command):
    torch.manual_seed(0)
    model, texts = subword_folder(tmp_path / "model"), tmp_path / "text.txt"
    texts.write_text(zoo.evaluation_text().decode()[:1500].replace("e", "é"), "utf-8")
    few = ("--seq-len", 16, "--n-calibration", 2, "--n-evaluation", 2, "--group-size", 16)
    read = ("--calibration", texts, "--text", texts)
    assert command("reproduce", "bits-per-byte", model, *read, "--work", tmp_path / "w", *few)[0] == 0


def test_the_command_lists_makes_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    listed = capsys.readouterr().out
    assert "Figure 3, Table 6, Table 7" in listed
    sizes = ["--n-calibration", "2", "--n-evaluation", "2", "--seq-len", "24", "--threads", "1"]
    text = tmp_path / "own.txt"
    text.write_text("It was the best of times, it was the worst of times. " * 8)
    places = ["--work", str(tmp_path / "w"), "--out", str(tmp_path / "o"), "--text", str(text)]
    assert (
        main(
            [
                "reproduce",
                "table-11",
                "huginn_small",
                *sizes,
                *places,
                "--n-steps",
                "3",
                "--dtype",
                "bfloat16",
            ]
        )
        == 0
    )
    out = capsys.readouterr().out
    assert "Table 11" in out
    assert "The paper: Seven checkpoints" in out
    record = json.loads(next((tmp_path / "o").glob("bits-per-byte-*.json")).read_text())
    assert record["tables"]["bits-per-byte"]["models"][0]["n_steps"] == 3
    assert main(["reproduce", "table-20"]) == 0
    assert "24 of 24" in capsys.readouterr().out
    assert main(["reproduce", "table-99"]) == 2
