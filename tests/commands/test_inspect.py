"""`loopq inspect`: what it says of checkpoints of both versions, and of what is neither checkpoint nor dump."""

from __future__ import annotations

import json
import shutil

import pytest

from tests.support.checkpoints import reseal


# Settings of a checkpoint of version 1, as loopq wrote them: flat, those of every method.
def test_inspect_says_the_settings_by_their_flat_names(quantized, command):
    code, text, _ = command("inspect", quantized)
    assert code == 0
    assert "INT4" in text
    assert "system huginn, 3 steps, seed 0; calibrated on 6 prompts" in text
    layer, run = text.splitlines()[-2:]
    assert layer.startswith(
        "layer settings: bits 4, group_size 16, symmetric true, levels even, scale_dtype float16"
    )
    assert "method gptq, damping 0.01, damping_kind mean, scales group" in layer
    assert run.startswith("run settings: inputs open, include none, exclude none, rank_threshold none")
    data = json.loads(command("inspect", quantized, "--json")[1])
    assert data["settings"]["system"] == "huginn"
    assert data["settings"]["quantization"]["layer"]["method"]["damping"] == {
        "fraction": 0.01,
        "kind": "mean",
    }


def test_settings_that_are_damaged_are_told(quantized, tmp_path, command):
    old = tmp_path / "old"
    shutil.copytree(quantized, old)
    for damage in ({"layer": {"method": "gptq"}}, {"layer": {}}, {}, {"layer": None}, 3):
        reseal(old / "loopq.json", lambda index, damage=damage: index["settings"].update(quantization=damage))
        code, _, err = command("inspect", old)
        assert code == 1
        assert f"{old}: settings that loopq cannot read" in err
        assert err.count("\n") == 1


def test_a_method_that_is_not_installed_is_named_and_the_rest_is_shown(quantized, tmp_path, command):
    old = tmp_path / "old"
    shutil.copytree(quantized, old)

    def made_elsewhere(index):
        index["settings"]["quantization"]["layer"]["method"] = {"name": "foreign", "strength": 3}

    reseal(old / "loopq.json", made_elsewhere)
    code, text, _ = command("inspect", old)
    assert code == 0
    assert "unknown method 'foreign'; known: " in text
    assert "system huginn, 3 steps" in text
    method = json.loads(command("inspect", old, "--json")[1])["settings"]["quantization"]["layer"]["method"]
    assert method["strength"] == 3


@pytest.mark.parametrize(
    ("place", "match"), [("{tmp}", "neither a checkpoint"), ("{empty}", "a file, not a folder")]
)
def test_what_is_no_checkpoint_is_said(tmp_path, command, place, match):
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    code, out, err = command("inspect", place.format(tmp=tmp_path, empty=empty))
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert match in err
