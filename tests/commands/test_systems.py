"""`loopq systems`: the table, and what a model or a folder needs."""

from __future__ import annotations

import json

import pytest

from loopq.models.hf import TESTED_TRANSFORMERS
from loopq.systems import SYSTEMS


@pytest.mark.parametrize(
    ("model", "lines"),
    [
        (
            "Ouro-1.4B",
            [
                "Ouro-1.4B",
                "--trust-remote-code",
                f"transformers=={TESTED_TRANSFORMERS}",
                "beside the weights",
            ],
        ),
        ("tomg-group-umd/huginn-0125", ["Huginn-3.5B", "--trust-remote-code"]),
        ("hrm_text", ["HRM-Text-1B", "a class of transformers", "transformers>=5.9,<6"]),
        ("COCONUT GPT-2", ["--system coconut --allow-pickle"]),
        ("parcae", ["Parcae-140M, Parcae-1.3B", "a plain torch class", "token ids"]),
    ],
)
def test_systems_says_what_a_published_model_needs(model, lines, command):
    code, text, _ = command("systems", model)
    assert code == 0
    assert all(line in text for line in lines)
    assert "dtype" in text


def test_the_table_has_every_system(command):
    code, text, _ = command("systems")
    assert code == 0
    rows = {line.split()[0]: line.rstrip() for line in text.splitlines() if line.strip()}
    assert all(system.summary and system.summary in rows[name] for name, system in SYSTEMS)
    assert "Huginn-3.5B: 17" in rows["huginn"]
    assert rows["huginn"].endswith("adapter")


def test_systems_names_the_models_that_it_knows(command):
    code, _, err = command("systems", "nothing")
    assert code == 2
    assert "'nothing' is no folder with a config.json and no published model" in err
    assert "Ouro-2.6B" in err


def test_systems_says_what_a_folder_needs(tmp_path, command):
    config = {
        "model_type": "ouro",
        "auto_map": {},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    text = command("systems", tmp_path)[1]
    for part in (
        "--trust-remote-code",
        "written with 4.55.0",
        "bfloat16, as stored",
        "none of transformers beside",
    ):
        assert part in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}), "utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    text = command("systems", tmp_path, "mamba")[1]
    assert "a class of transformers" in text
    assert "beside the weights" in text
    assert "Mamba-130M, Mamba-2.8B" in text
