"""Requirements of a model before it can be loaded."""

from __future__ import annotations

import json


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
