"""Models that cannot be run, or not as they are: each is refused in one line that names the place."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import loopq
import loopq.terminal.progress
from loopq.errors import CalibrationError, CheckpointError, ConfigError, SystemContractError

from ..soak.inputs import Loop
from ..support.runs import digest

IDS = [[1, 2, 3, 4], [5, 6, 7, 8]]


def quantized(model, **settings):
    return loopq.quantize(model, IDS, threads=1, **({"method": "rtn", "group_size": 8} | settings))


@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "orthogonal"])
def test_a_weight_that_is_computed_is_called_so(name):
    made = getattr(nn.utils.parametrizations, name)(nn.Linear(16, 16))
    with pytest.raises(
        SystemContractError, match=r"Loop: core: its weight is computed from other parameters"
    ):
        quantized(Loop(made))
    nn.utils.parametrize.remove_parametrizations(made, "weight")
    assert len(quantized(Loop(made)).layers) == 1


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: Loop(nn.LazyLinear(16)), r"core\.weight has no values \(lazy module"),
        (lambda: Loop().to("meta"), r"embed\.weight has no values \(device meta"),
    ],
)
def test_parameters_without_values(make, match):
    with pytest.raises(ConfigError, match=match):
        quantized(make())


def test_the_device_meta_is_refused(saved_model, command, tmp_path):
    code, _, err = command("quantize", saved_model, "--out", tmp_path / "q", "--device", "meta")
    assert (code, err.count("\n")) == (2, 1)
    assert "has no values" in err
    assert list(tmp_path.iterdir()) == []


class Fails(Loop):
    """Its core fails at a step, from a call on."""

    def __init__(self, first):
        super().__init__()
        self.calls, self.first = 0, first

    def step(self, x, t):
        self.calls += 1
        if self.calls > self.first:
            raise ValueError("boom\nand more")
        return x + self.core(x)


@pytest.mark.parametrize(
    ("first", "match"),
    [
        (0, "trial run, before the first layer: the model raises ValueError: boom$"),
        (3, r"trial run, after layer core\.weight was called at step 2: the model raises ValueError: boom$"),
        (6, r"rollout of prompt 0, after layer core\.weight was called at step 1: the model raises"),
    ],
)
def test_what_a_forward_raises_names_the_step_and_the_layer(first, match):
    with pytest.raises(CalibrationError, match=match):
        quantized(Fails(first), method="gptq", inputs="open")


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


def test_a_run_that_was_killed_after_it_wrote_its_output_is_resumed(
    tiny_folder, tokens, tmp_path, monkeypatch
):
    """The work folder is there still: what the run comes to is compared with what it wrote."""
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
