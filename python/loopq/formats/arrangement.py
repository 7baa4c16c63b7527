"""What a quantized folder holds of a checkpoint: layers by module, the unchanged tensors, and what was done to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from loopq.formats.checkpoint import Checkpoint
from loopq.formats.fitting import StoredLayer
from loopq.formats.fused import joined_dense, joined_layers, published_parts
from loopq.formats.layouts import FileLayout
from loopq.formats.record import Export, dense_modules, facts_of, owners_of
from loopq.layers.layer import QuantizedLayer
from loopq.storage.files import RawTensor


@dataclass(frozen=True)
class Arrangement:
    """Layers and tensors of a folder, by their names there.

    Parameters
    ----------
    layers : mapping of str to QuantizedLayer
        By module, in the format's shape. A tied layer is there for each of its modules.
    dense : mapping of str to RawTensor
        Unchanged tensors.
    joined : list of str
        Modules of the published files that hold several of the model's.
    notes : dict of str to tuple of str
        What was done to a layer of the checkpoint.
    """

    layers: Mapping[str, QuantizedLayer]
    dense: Mapping[str, RawTensor]
    joined: list[str]
    notes: dict[str, tuple[str, ...]]

    def export(self, source: Checkpoint, layout: FileLayout) -> Export:
        """Return what a format needs to write its config."""
        unchanged = dense_modules(self.dense, source.ties)
        loaded = layout.loaded((*self.layers, *unchanged))
        return Export(self.layers, unchanged, facts_of(source), loaded, layout.groups)


def arranged(
    source: Checkpoint,
    prepare: Callable[[Mapping[str, QuantizedLayer]], Mapping[str, StoredLayer]],
    config: Mapping[str, Any],
    names: str | None,
) -> Arrangement:
    """Arrange the layers of a checkpoint. `names` "published" joins matrices as the published files do.

    `prepare` fits the layers to the format. It runs after every layer has been found to belong to a module.

    Raises
    ------
    CheckpointError
        A layer has no module, or matrices that are joined differ.
    """
    owners, prepared = owners_of(source), prepare(source.layers)
    layers = {module: stored.layer for name, stored in prepared.items() for module in owners[name]}
    dense = dict(source.dense)
    if names is not None:
        parts = published_parts(config)
        layers, dense = joined_layers(layers, parts), joined_dense(dense, parts)
    joined = sorted({*layers} - {m for modules in owners.values() for m in modules})
    joined += sorted(name.removesuffix(".weight") for name in {*dense} - {*source.dense})
    notes = {name: stored.notes for name, stored in prepared.items() if stored.notes}
    for name, (_, *copies) in owners.items():
        if copies:
            notes[name] = (*notes.get(name, ()), f"tied: stored again for {', '.join(copies)}")
    return Arrangement(layers, dense, joined, notes)
