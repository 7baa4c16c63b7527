"""What a published model or a folder needs to be loaded."""

from __future__ import annotations

import json

import pytest

from loopq.commands.needs import needs
from loopq.formats.hf_folder import looped_files
from loopq.layers.loop_spec import with_loop
from loopq.models.hf import TESTED_TRANSFORMERS


def text_of(model):
    """The lines about a model as one text."""
    return "\n".join(f"{subject} {text}" for subject, text in needs(str(model)))


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
def test_what_a_published_model_needs(model, lines):
    text = text_of(model)
    assert all(line in text for line in lines)
    assert "dtype" in text


def test_other_names_need_nothing_that_is_known():
    assert needs("nothing") == needs("huginn_small") == needs("looped:D[1:3]x2") == []


def test_what_a_folder_needs(tmp_path):
    config = {
        "model_type": "ouro",
        "auto_map": {},
        "torch_dtype": "bfloat16",
        "transformers_version": "4.55.0",
    }
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    text = text_of(tmp_path)
    for part in (
        "--trust-remote-code",
        "written with 4.55.0",
        "bfloat16, as stored",
        "none of transformers beside",
    ):
        assert part in text
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "albert"}), "utf-8")
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    text = text_of(tmp_path)
    assert "a class of transformers" in text
    assert "beside the weights" in text
    assert "Mamba-130M, Mamba-2.8B" in text_of("mamba")


def test_a_folder_with_the_code_of_its_loop_needs_no_code(tmp_path):
    config = with_loop({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}, [1, 3, 2])
    files = looped_files({"config.json": json.dumps(config).encode()}, remote_code=True)
    (tmp_path / "config.json").write_bytes(files["config.json"])
    text = text_of(tmp_path)
    assert "model_type loopq_looped" in text
    assert "a class of transformers" in text
    assert "trust-remote-code" not in text
