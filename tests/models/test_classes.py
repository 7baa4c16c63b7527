"""Registered classes: folders that transformers knows nothing of, opened, refused and quantized."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import benches.zoo.models
from benches.zoo.store import save_model
from loopq.cli import main
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import native
from loopq.models.build import build_shape
from loopq.models.classes import register_model
from loopq.models.load import load_model
from tests.support.systems import small

# A user's file: a class that loops twice over one matrix, stored under other names than it has.
USER_FILE = """
from torch import nn
from loopq.models.classes import register_model
from loopq.models.load import encode_bytes


class Twice(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.core, self.head = nn.Embedding(256, width), nn.Linear(width, width), nn.Linear(width, 256)

    def forward(self, ids):
        return self.head(self.core(self.core(self.embed(ids))))


register_model(
    "test-twice",
    lambda config: Twice(config["width"]),
    encode=encode_bytes,
    rename=lambda tensors: {name.removeprefix("model."): t for name, t in tensors.items()},
)
"""


@pytest.mark.parametrize("opened", [load_model, build_shape])
@pytest.mark.parametrize("model_type", ["llama", "huginn_raven", "hrm_text"])
def test_a_config_that_asks_for_layers_without_end_is_refused(tmp_path, opened, model_type):
    for name in (
        "num_hidden_layers",
        "num_layers_per_stack",
        "n_layers_in_recurrent_block",
        "num_experts",
        "num_labels",
    ):
        for more in ({name: 2**63}, {"text_config": {name: 2**63}}):
            (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type, **more}))
            with pytest.raises(
                ConfigError, match=rf"config\.json: {name} is {2**63}; loopq builds at most 10000"
            ):
                opened(tmp_path)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny Ouro as a folder."""
    torch.manual_seed(0)
    save_model(small("ouro")(), tmp_path / "ouro")
    return tmp_path / "ouro"


def test_the_command_line_checks_and_quantizes_a_users_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    file, model = tmp_path / "twice.py", tmp_path / "model"
    file.write_text(USER_FILE)
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "test-twice", "width": 16}))
    torch.manual_seed(0)
    tensors = {
        "model.embed.weight": torch.randn(256, 16),
        "model.core.weight": torch.randn(16, 16),
        "model.core.bias": torch.randn(16),
        "model.head.weight": torch.randn(256, 16),
        "model.head.bias": torch.randn(256),
    }
    save_file(tensors, model / "model.safetensors")
    assert main(["check", str(model), "--system", "generic"]) == 2
    printed = capsys.readouterr().err
    assert "'test-twice' is not known to transformers" in printed
    assert "--register FILE" in printed
    assert main(["--register", str(file), "check", str(model), "--system", "generic"]) == 0
    assert "registered model, 8,720 parameters" in capsys.readouterr().out
    out = tmp_path / "out"
    options = ["--method", "rtn", "--group-size", "16", "--n-prompts", "2", "--seq-len", "8"]
    assert main(["quantize", str(model), "--system", "generic", "--out", str(out), *options]) == 0
    checkpoint = native.read(out)
    assert list(checkpoint.layers) == ["core.weight"]
    assert main(["--register", str(tmp_path / "nowhere.py"), "check"]) == 2
    assert "nowhere.py: no such file" in capsys.readouterr().err


def test_a_name_is_registered_once() -> None:
    for taken in ("loopq-zoo-huginn", "loopq-zoo-ouro"):
        with pytest.raises(ConfigError, match=f"'{taken}' is registered twice"):
            register_model(taken, benches.zoo.models.build)


def test_missing_surplus_and_misshapen_tensors_are_reported(folder: Path) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "stray.weight": torch.ones(2)}, path)
    assert load_model(folder).report.unexpected == ("stray.weight",)
    gone = "model.layers.0.mlp.up_proj.weight"
    save_file({k: v for k, v in tensors.items() if k != gone}, path)
    with pytest.raises(CheckpointError, match=rf"lacks {gone}"):
        load_model(folder)
    save_file({**tensors, gone: torch.ones(3, 3)}, path)
    with pytest.raises(
        CheckpointError, match=rf"{gone} has shape \[3, 3\], with config.json it is \[48, 32\]"
    ):
        load_model(folder)


def test_damaged_and_missing_weights_are_refused(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"the weights cannot be read .* copy them again"):
        load_model(folder)
    path.unlink()
    with pytest.raises(CheckpointError, match="no weights in it"):
        load_model(folder)


def test_tied_parameters_are_stored_once(tmp_path: Path) -> None:
    save_model(small("huginn")(), tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    report = load_model(tmp_path).report
    assert report.missing == ()
    assert ("transformer.wte.weight", "lm_head.weight") in report.tied


def test_old_names_of_parcaes_value_embeddings_are_read(tmp_path: Path) -> None:
    save_model(small("parcae")(), tmp_path)
    path = tmp_path / "model.safetensors"
    old = {
        f"transformer.{name}" if name.startswith("value_embeds.") else name: tensor
        for name, tensor in load_file(path).items()
    }
    assert any(name.startswith("transformer.value_embeds.") for name in old)
    save_file(old, path)
    report = load_model(tmp_path).report
    assert report.missing == report.unexpected == ()


@pytest.mark.parametrize(
    ("key", "wrong"),
    [("intermediate_size", "is not that of these weights"), ("block_size", "GiB of memory, and")],
)
def test_a_config_larger_than_its_file_takes_no_memory(tmp_path, key, wrong):
    save_model(small("huginn")(), tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {key: 1 << 40}))
    with pytest.raises(CheckpointError, match=wrong):
        load_model(tmp_path / "model")
