"""Build a model without weights from the config files of a checkpoint."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from loopq.errors import CheckpointError, model_code, require
from loopq.layers.loop_spec import without_type
from loopq.models import hf
from loopq.models.blank import building, drawn
from loopq.models.classes import find_class
from loopq.models.files import find_names
from loopq.models.load import LoadedModel, choose_system, describe, text_encoder
from loopq.models.plain import plain
from loopq.storage.files import read_json
from loopq.storage.schema import Object, checked, parse_json
from loopq.systems.base import LoopedSystem
from loopq.systems.capabilities import ModelClass

if TYPE_CHECKING:
    from torch import nn


def build_model(
    side_files: Mapping[str, bytes], system: str | None = None, *, trust_remote_code: bool = False
) -> LoadedModel:
    """Build the model that config files describe. The caller fills it with a checkpoint's tensors.

    Raises
    ------
    CheckpointError
        If there is no config.json, or no known class for it.
    """
    if "config.json" not in side_files:
        raise CheckpointError("the checkpoint carries no config.json: give the model it is to be loaded into")
    where = "config.json of the checkpoint"
    config = without_type(checked(Object, parse_json(side_files["config.json"], where, finite=False), where))
    registered = find_class(config, system, where)
    if registered is None:
        hf.check_remote_code(config, "the checkpoint", trust_remote_code)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in side_files.items():
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_bytes(data)
        model = _built(registered, folder, config, trust_remote_code)
        tokenizer, encode = text_encoder(registered, folder, config, trust_remote_code)
    model, _ = plain(model.eval())
    return LoadedModel(
        model=model,
        system=choose_system(model, system),
        encode=encode,
        tokenizer=tokenizer,
        config=config,
        folder=None,
        side_files=dict(side_files),
        report=describe(model, "checkpoint", "registered" if registered else "transformers"),
    )


def build_shape(
    folder: Path, system: str | None = None, trust_remote_code: bool = False, *, device: str = "meta"
) -> LoopedSystem:
    """Build the adapter of a model from its ``config.json`` alone: all shapes, and on "cpu" drawn values.

    Raises
    ------
    ConfigError
        If the configuration has no class, or needs code that is not trusted.
    """
    torch = require("torch")
    where = folder / "config.json"
    config = without_type(checked(Object, read_json(where, finite=False), where))
    registered = find_class(config, system, where)
    if registered is None:
        hf.check_remote_code(config, str(folder), trust_remote_code)
    with torch.device(device), model_code(f"{where}: building the model", CheckpointError):
        model = _built(registered, folder, config, trust_remote_code)
        if registered is None and device != "meta":
            _draw(model)
    find_names(model, ())
    return choose_system(model.eval(), system)


def _draw(model: nn.Module) -> None:
    """Draw matrices, and set vectors to one: transformers leaves the memory of a built model as it was."""
    torch = require("torch")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.02, generator=generator)
            else:
                parameter.fill_(1.0)


def _built(registered: ModelClass | None, folder: Path, config: Object, trust_remote_code: bool) -> nn.Module:
    with building(), drawn(seed=0):
        if registered is not None:
            return registered.build(config)
        return hf.from_config(folder, config, trust_remote_code)
