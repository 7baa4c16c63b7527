"""Build a model without its weights, from the config files that a checkpoint carries."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path

from loopq.errors import CheckpointError
from loopq.lazy import require
from loopq.systems.hf import auto_class
from loopq.systems.load import ZOO_PREFIX, LoadedModel, choose_system, describe, encode_bytes


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
    try:
        config = json.loads(side_files["config.json"])
    except ValueError as cause:
        raise CheckpointError(f"config.json of the checkpoint is not valid JSON ({cause})") from cause
    model_type = str(config.get("model_type", ""))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for file, data in side_files.items():
            (folder / file).write_bytes(data)
        files = tuple(sorted(folder.iterdir()))
        tokenizer = None
        if model_type.startswith(ZOO_PREFIX):
            from loopq import zoo

            model = zoo.model_class(model_type).from_config(config).eval()
        else:
            transformers = require("transformers")
            settings = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
            auto = getattr(transformers, auto_class(config, trust_remote_code))
            model = auto.from_config(settings, trust_remote_code=trust_remote_code).eval()
            if any(f.startswith("tokenizer") for f in side_files):
                tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    encode = (
        encode_bytes
        if tokenizer is None
        else (lambda t: list(tokenizer(t, add_special_tokens=False).input_ids))
    )
    return LoadedModel(
        model=model,
        system=choose_system(model, system),
        encode=encode,
        tokenizer=tokenizer,
        config=config,
        folder=None,
        config_files=files,
        report=describe(model, "checkpoint", "zoo" if model_type.startswith(ZOO_PREFIX) else "transformers"),
    )
