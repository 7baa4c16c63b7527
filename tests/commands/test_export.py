"""`loopq export` where torch is not installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import benches.zoo.models  # noqa: F401  registers the classes
from loopq.formats.convert import read_any


def test_export_without_torch_checks_numbers_and_names_the_rest(quantized, tmp_path):
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from loopq.cli import main\n"
        f"sys.exit(main(['export', {str(quantized)!r}, '--out', {str(tmp_path / 'e')!r}, '--format', 'gptq']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "9 layers equal, number by number" in done.stdout
    assert "logits not compared: this needs torch" in done.stdout


def test_export_refuses_before_it_writes(quantized, tmp_path, command):
    args = (
        "export",
        quantized,
        "--out",
        tmp_path / "e",
        "--format",
        "compressed-tensors",
        "--for",
        "sglang",
    )
    code, _, err = command(*args)
    assert code == 1
    assert "sglang does not run huginn (loopq-zoo-huginn): no support is known" in err
    assert not (tmp_path / "e").exists()
    code, text, _ = command(*args, "--force")
    assert code == 0
    assert "read back from disk" in text


def test_options_of_another_format_are_refused(quantized, tmp_path, command):
    for form, option, reads in (("gptq", "vocabulary", "ragged"), ("native", "steps", "none")):
        code, _, err = command(
            "export", quantized, "--out", tmp_path / "e", "--format", form, f"--{option}", "1"
        )
        assert code == 2
        assert f"format {form} does not read {option}; its options: {reads}" in err
    code, _, err = command("export", quantized, "--out", tmp_path / "e", "--format", "imatrix")
    assert code == 1
    assert not list(tmp_path.iterdir())


def test_command_line(solved, tmp_path, capsys):
    from loopq.cli import main

    assert main(["export", str(solved), "--out", str(tmp_path / "ct"), "--format", "compressed-tensors"]) == 0
    assert "largest difference 0" in capsys.readouterr().out
    assert main(["inspect", str(tmp_path / "ct"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["format"] == "compressed-tensors"
    assert main(["export", str(tmp_path / "ct"), "--out", str(tmp_path / "n"), "--format", "native"]) == 0
    whole, again = read_any(solved), read_any(tmp_path / "n")
    assert all(layer.same_as(again.layers[name]) for name, layer in whole.layers.items())
    assert {p.name: p.read_bytes() for p in solved.iterdir()} == {
        p.name: p.read_bytes() for p in (tmp_path / "n").iterdir()
    }
    capsys.readouterr()
