"""Tensors of the source that a run does not change."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loopq.errors import CheckpointError, ConfigError
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.convert import read_model
from loopq.run.config import QuantConfig
from loopq.run.source import Layers
from loopq.settings.patterns import check_patterns, matches
from loopq.storage.files import RawTensor


@dataclass(frozen=True)
class Kept:
    """Tensors of the source that a run does not change, bit for bit.

    Parameters
    ----------
    layers : dict of str to QuantizedLayer
        Layers with codes in the source.
    dense : dict of str to RawTensor
        Other tensors.
    """

    layers: Layers
    dense: dict[str, RawTensor]

    @classmethod
    def of(cls, folder: Path | None, patterns: Sequence[str]) -> Kept:
        """Find the tensors that match patterns in the files of a folder.

        Raises
        ------
        ConfigError
            The model comes from no folder, or a pattern matches no tensor of its files.
        """
        if not patterns:
            return cls({}, {})
        if folder is None:
            raise ConfigError("keep: the model comes from no folder whose tensors could be kept")
        source = read_model(folder)
        check_patterns("keep", patterns, [*source.layers, *source.dense])

        def chosen(name: str) -> bool:
            return any(matches(name, pattern) for pattern in patterns)

        return cls(
            {name: layer for name, layer in source.layers.items() if chosen(name)},
            {name: tensor for name, tensor in source.dense.items() if chosen(name)},
        )

    def exclude(self, config: QuantConfig, names: Iterable[str]) -> QuantConfig:
        """Return settings that exclude the kept layers among `names`."""
        kept = tuple(name for name in names if name in self.layers or name in self.dense)
        return dataclasses.replace(config, exclude=(*config.exclude, *kept))

    def put(self, checkpoint: Checkpoint) -> Checkpoint:
        """Return a checkpoint that contains the kept tensors.

        Raises
        ------
        CheckpointError
            The checkpoint has no tensor of this name: the model keeps it in another layout.
        """
        for name in (*self.layers, *self.dense):
            if name not in checkpoint.dense:
                raise CheckpointError(
                    f"keep: {name} is made into other tensors at loading, and cannot be kept as it is; exclude the "
                    "layers that it holds instead"
                )
        dense = {n: self.dense.get(n, t) for n, t in checkpoint.dense.items() if n not in self.layers}
        return dataclasses.replace(checkpoint, layers={**checkpoint.layers, **self.layers}, dense=dense)
