"""`loopq reproduce` on the command line: its usage, what it refuses, and a model with a tokenizer of its own."""

from __future__ import annotations

import pytest
import torch

from loopq import zoo
from loopq.cli import parser
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
