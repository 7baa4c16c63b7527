"""Build a model without its weights, from the config files that a checkpoint carries."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError
from loopq.lazy import require
from loopq.models import hf
from loopq.models.load import LoadedModel, choose_system, describe, text_encoder
from loopq.models.plain import plain
from loopq.storage.schema import checked, parse_json
from loopq.systems.classes import find_class

if TYPE_CHECKING:
    from torch import nn


def build_model(
    side_files: Mapping[str, bytes], system: str | None = None, *, trust_remote_code: bool = False
) -> LoadedModel:
    """Build the model that config files describe, to be filled with a checkpoint's tensors.

    Parameters
    ----------
    side_files : mapping of str to bytes
        File name to contents; "config.json" is needed.
    system : str, optional
        Name of the adapter.
    trust_remote_code : bool
        Allow code among the files to run.

    Raises
    ------
    CheckpointError
        There is no config.json, or no known class for it.
    """
    if "config.json" not in side_files:
        raise CheckpointError("the checkpoint carries no config.json: give the model it is to be loaded into")
    where = "config.json of the checkpoint"
    config = checked(dict[str, Any], parse_json(side_files["config.json"], where, finite=False), where)
    registered = find_class(config, system)
    if registered is None:
        hf.check_remote_code(config, "the checkpoint", trust_remote_code)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in side_files.items():
            (folder / file).write_bytes(data)
        model = registered.build(config) if registered else _from_config(folder, config, trust_remote_code)
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


def _from_config(folder: Path, config: Mapping[str, Any], trust_remote_code: bool) -> nn.Module:
    transformers = require("transformers")
    auto = getattr(transformers, hf.auto_class(config, trust_remote_code))
    settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    with _no_initial_values():
        model: nn.Module = auto.from_config(settings, trust_remote_code=trust_remote_code)
    # What is tied is tied where values are drawn.
    model.tie_weights()
    hf.unfuse(model)
    return model


def _no_initial_values() -> contextlib.AbstractContextManager[None]:
    """Parameters are not drawn inside the block, so that memory which codes take the place of is never touched."""
    try:
        from transformers.initialization import no_init_weights
    except ImportError:  # transformers 4
        from transformers.modeling_utils import no_init_weights
    found: contextlib.AbstractContextManager[None] = no_init_weights()
    return found
