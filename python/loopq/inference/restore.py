"""A checkpoint as a torch model again."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING

from loopq.errors import ConfigError, LoopqError
from loopq.formats.checkpoint import Checkpoint, load_into
from loopq.models.build import build_model
from loopq.models.load import LoadedModel

if TYPE_CHECKING:
    from loopq.inference.layout import Activations


def load_checkpoint(
    checkpoint: Checkpoint,
    model: LoadedModel | None = None,
    *,
    quantized: bool = False,
    activations: Activations = "float",
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Put a checkpoint into a model; see `loopq.load`."""
    loaded = model or build_model(
        checkpoint.side_files,
        system=checkpoint.settings.get("system"),
        trust_remote_code=trust_remote_code,
    )
    if not quantized:
        if activations != "float":
            raise ConfigError(
                f"activations={activations!r} is for loading codes: give quantized=True as well"
            )
        load_into(loaded.model, checkpoint)
        return loaded
    # torch is needed for modules that hold codes, and for nothing before.
    from loopq.inference.quantized import coded, install  # lazy: loopq imports without torch

    # A loop that is found by a run is found while its weights are there. What has none says so when it is asked.
    with contextlib.suppress(LoopqError):
        _ = loaded.system.n_steps
    load_into(loaded.model, checkpoint, without=coded(loaded.model, checkpoint))
    kept = install(loaded.model, checkpoint, activations)
    notes = tuple(f"dequantized weight kept: {name}: {reason}" for name, reason in kept.items())
    report = dataclasses.replace(loaded.report, notes=(*loaded.report.notes, *notes))
    return dataclasses.replace(loaded, report=report)
