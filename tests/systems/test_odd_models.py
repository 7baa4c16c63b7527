"""Models that cannot be run, or not as they are: each is refused in one line that names the place."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import loopq
import loopq.terminal.progress
from loopq.errors import CalibrationError, CheckpointError
from tests.support.odd_models import quantized

from ..soak.inputs import Loop
from ..support.runs import digest


def test_the_device_meta_is_refused(saved_model, command, tmp_path):
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "q", "--device", "meta")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no values" in err
    assert list(tmp_path.iterdir()) == []


class InPlace(Loop):
    def step(self, x, t):
        y = torch.sigmoid(self.core(x))
        z = y * y
        y.mul_(2)
        return x + z


def test_a_gradient_that_cannot_be_had_names_the_prompt():
    with pytest.raises(
        CalibrationError, match="gradient of prompt 0: the model raises RuntimeError: one of the"
    ):
        quantized(InPlace(), preset="best", method="gptq-cd")
    with pytest.warns(UserWarning, match="metric inputs, since gradient of prompt 0"):
        assert len(quantized(InPlace(), method="gptq-cd").layers) == 1


def test_train_mode_is_said_and_left():
    class Said(loopq.terminal.progress.Silent):
        lines: list[str] = []  # noqa: RUF012

        def note(self, text):
            self.lines.append(text)

    model = Loop(nn.Sequential(nn.Dropout(0.5), nn.Linear(16, 16))).train()
    quantized(model, progress=Said())
    assert "the model was in train mode: it is in eval mode now" in Said.lines
    assert not model.training
    Said.lines.clear()
    quantized(model, progress=Said())
    assert not any("train mode" in line for line in Said.lines)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_pipe_among_the_files_is_refused(tiny_folder, tmp_path, file):
    (tiny_folder / file).unlink(missing_ok=True)
    os.mkfifo(tiny_folder / file)
    with pytest.raises(CheckpointError, match=f"{file}: not a plain file"):
        loopq.quantize(tiny_folder, method="rtn")


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (
            '"vocab_size": 256',
            '"vocab_size": 256, "architectures": [1]',
            r"architectures\[0\]: 1; allowed: text",
        ),
        ('"vocab_size": 256', '"vocab_size": 256, "auto_map": ["a"]', "auto_map: "),
        ('"vocab_size": 256', '"vocab_size": 18446744073709551617', "building the model: the model raises"),
    ],
)
def test_a_config_of_another_kind(tiny_folder, old, new, match):
    path = tiny_folder / "config.json"
    path.write_text(path.read_text().replace(old, new))
    with pytest.raises(CheckpointError, match=match):
        loopq.quantize(tiny_folder, method="rtn")


def test_a_run_killed_after_writing_its_output_is_resumed(tiny_folder, tokens, tmp_path, monkeypatch):
    """The work folder is kept: the test compares the run's result with its files."""
    out, settings = tmp_path / "q", {"preset": "paper", "group_size": 16, "threads": 1}
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def killed(*args, **kwargs):
            raise KeyboardInterrupt

        patch.setattr(
            "loopq.run.result.remove_own", lambda folder, if_empty=False: None if if_empty else killed()
        )
        loopq.quantize(tiny_folder, tokens, out=out, **settings)
    before = digest(out)
    assert (tmp_path / ".q.work").is_dir()
    with pytest.raises(CheckpointError, match="reads back differently"):
        loopq.quantize(tiny_folder, tokens, out=out, bits=3, **settings)
    loopq.quantize(tiny_folder, tokens, out=out, **settings)
    assert digest(out) == before
    assert not (tmp_path / ".q.work").exists()
    with pytest.raises(CheckpointError, match="exists and is not empty"):
        loopq.quantize(tiny_folder, tokens, out=out, **settings)
