"""A checkpoint as a torch model again."""

from __future__ import annotations

import dataclasses

from loopq.checkpoint import native as store
from loopq.checkpoint.native import Checkpoint
from loopq.systems.build import build_model
from loopq.systems.load import LoadedModel


def load_checkpoint(
    checkpoint: Checkpoint,
    model: LoadedModel | None = None,
    *,
    quantized: bool = False,
    trust_remote_code: bool = False,
) -> LoadedModel:
    """Put a checkpoint into a model; see `loopq.load`."""
    loaded = model or build_model(
        checkpoint.side_files,
        system=checkpoint.settings.get("system"),
        trust_remote_code=trust_remote_code,
    )
    store.load_into(loaded.model, checkpoint)
    if not quantized:
        return loaded
    # torch is needed for modules that hold codes, and for nothing before.
    from loopq.systems.quantized import install

    kept = install(loaded.model, checkpoint)
    notes = tuple(f"dequantized weight kept: {name}: {reason}" for name, reason in kept.items())
    report = dataclasses.replace(loaded.report, notes=(*loaded.report.notes, *notes))
    return dataclasses.replace(loaded, report=report)
