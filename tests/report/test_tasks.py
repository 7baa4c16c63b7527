"""The table of tasks: what was scored and cut."""

from __future__ import annotations

import json
import re

import benches.zoo.chains  # noqa: F401  registers the letter task


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
