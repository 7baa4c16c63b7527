"""Turn a checkpoint back into a torch model."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

from loopq.errors import CheckpointError, ConfigError, LoopqError
from loopq.formats import FORMATS
from loopq.formats.checkpoint import Checkpoint, load_into
from loopq.formats.convert import is_checkpoint, read_model
from loopq.formats.native import NATIVE
from loopq.formats.record import RECORD
from loopq.layers.loop_spec import parse_spec
from loopq.models import hf
from loopq.models.build import build_model
from loopq.models.coded import Activations, coded_layers
from loopq.models.files import find_names
from loopq.models.load import LoadedModel, load_model, to_device


def open_source(
    model: str | Path, *, requantize: bool = False, trust_remote_code: bool = False
) -> LoadedModel | None:
    """Open a quantized folder as a source of weights, also as ``looped:FOLDER[FIRST:LAST]xTIMES``. Else None.

    Raises
    ------
    CheckpointError
        If loopq wrote it and `requantize` is not given.
    """
    folder = Path(parse_spec(str(model))[0])
    # A file is one of GGUF, which says more of itself when it is opened as a model.
    if not folder.is_dir() or not any(target.holds(folder) for _, target in FORMATS):
        return None
    if (NATIVE.holds(folder) or (folder / RECORD).exists()) and not requantize:
        raise CheckpointError(
            f"{folder}: {hf.HOLDS_CODES}; loopq.quantize(..., requantize=True) quantizes its rounded weights once more"
        )
    loaded = load_checkpoint(read_model(model), trust_remote_code=trust_remote_code)
    note = "weights of a quantized file, dequantized"
    report = dataclasses.replace(loaded.report, source=str(model), notes=(*loaded.report.notes, note))
    return dataclasses.replace(loaded, folder=folder, report=report)


def load_checkpoint(
    checkpoint: Checkpoint,
    model: LoadedModel | None = None,
    *,
    quantized: bool = False,
    activations: Activations = "float",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Put a checkpoint into a model. See `loopq.load`."""
    loaded = model or build_model(
        checkpoint.side_files, system=checkpoint.settings.get("system"), trust_remote_code=trust_remote_code
    )
    if model is None:
        find_names(loaded.model, names_in(checkpoint))
    else:
        name_module(loaded, checkpoint)
    if not quantized:
        if activations != "float":
            raise ConfigError(
                f"activations={activations!r} is for loading codes: give quantized=True as well"
            )
        load_into(loaded.model, checkpoint)
        return loaded
    modules = coded_layers()
    # A loop is discovered by a run while the weights exist. A model without a loop reports this on request.
    with contextlib.suppress(LoopqError):
        _ = loaded.system.n_steps
    load_into(loaded.model, checkpoint, without=modules.coded(loaded.model, checkpoint))
    kept = modules.install(loaded.model, checkpoint, activations)
    notes = tuple(f"dequantized weight kept: {name}: {reason}" for name, reason in kept.items())
    report = dataclasses.replace(loaded.report, notes=(*loaded.report.notes, *notes))
    return dataclasses.replace(loaded, report=report)


def names_in(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors."""
    return [*checkpoint.layers, *checkpoint.dense, *checkpoint.ties]


def name_module(loaded: LoadedModel, checkpoint: Checkpoint) -> None:
    """Let a module that came from no folder know its names in the files, as a checkpoint has them."""
    names = names_in(checkpoint)
    if loaded.report.kind == "module" and not {*names} <= {*loaded.model.state_dict(keep_vars=True)}:
        find_names(loaded.model, names)


def open_any(
    model: str | Path, *, quantized: bool = False, activations: Activations = "float", **loading: Any
) -> LoadedModel:
    """Load a checkpoint of any format, with layers as codes or dequantized, or else a full-precision model.

    `quantized` and `activations` are those of `loopq.load`. Other options are those of `load_model`; a checkpoint uses
    only "device" and "trust_remote_code".
    """
    if not is_checkpoint(Path(parse_spec(str(model))[0])):
        return load_model(model, **loading)
    trusted = loading.get("trust_remote_code", False)
    loaded = load_checkpoint(
        read_model(model), quantized=quantized, activations=activations, trust_remote_code=trusted
    )
    to_device(loaded.model, loading.get("device", "cpu"))
    return loaded
