"""The native checkpoint: a folder that gives the model back exactly. Format: docs/formats/checkpoint.md."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq import _native
from loopq.errors import CheckpointError
from loopq.formats.hf_folder import CONFIG, add_own, describe_layers, without_own
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import (
    DTYPE_NAMES,
    MAX_SIZE,
    RawTensor,
    float_to_raw,
    inside,
    map_tensors,
    read_bytes,
    read_json,
    write_json,
)
from loopq.storage.model_files import TENSORS, FileEntry, check_files, to_torch, write_files
from loopq.storage.schema import Depth, Name, Object, checked, parse_json, sealed, shown, unsealed

if TYPE_CHECKING:
    from torch import nn

FORMAT = "loopq-checkpoint"
INDEX = "loopq.json"
REPORT = "report.jsonl"


@dataclass(frozen=True)
class Index:
    """What `loopq.json` holds."""

    loopq_version: str
    settings: Object
    layers: tuple[LayerSettings, ...]
    ties: dict[Name, Name]
    files: tuple[FileEntry, ...]


@dataclass(frozen=True)
class _Settings:
    """What every reader needs of the settings; the rest is for those who wrote them."""

    system: str | None
    n_steps: Depth | None = None


@dataclass(frozen=True)
class Checkpoint:
    """A quantized model as plain arrays.

    Parameters
    ----------
    layers : dict of str to QuantizedLayer
        By parameter name, in order of first invocation.
    dense : dict of str to RawTensor
        Every other tensor of the model, once.
    ties : dict of str to str
        Names of tied tensors to the name that is stored.
    settings : dict
        Everything that fixed the result: system, depth, calibration, quantizer settings.
    side_files : dict of str to bytes
        Config and tokenizer files.
    """

    layers: dict[str, QuantizedLayer]
    dense: dict[str, RawTensor]
    ties: dict[str, str]
    settings: dict[str, Any]
    side_files: dict[str, bytes] = field(default_factory=dict)

    @property
    def n_bytes(self) -> int:
        """Bytes of all tensors: packed layers and dense ones."""
        return sum(layer.n_bytes for layer in self.layers.values()) + sum(
            t.data.size for t in self.dense.values()
        )

    def check(self, where: object) -> Checkpoint:
        """Return the checkpoint if its parts fit together; asked before it is written and after it was read.

        Raises
        ------
        CheckpointError
            A tensor that is stored twice, packed codes of no layer, a tie to nothing, settings without a system.
        """
        checked(_Settings, self.settings, f"{where}: settings", others=True)
        for name in [*self.layers, *self.dense]:
            if name in self.ties or (name in self.dense and name in self.layers):
                raise CheckpointError(f"{where}: tensor {shown(name)} is stored twice, or tied and stored")
            if name.endswith(".weight_packed"):
                raise CheckpointError(f"{where}: tensor {shown(name)} holds packed codes of no layer")
        for name, source in self.ties.items():
            if source not in self.layers and source not in self.dense:
                raise CheckpointError(f"{where}: {name} is tied to {source}, which is not stored")
        return self


def report_lines(layers: Iterable[QuantizedLayer]) -> str:
    """Return the run report: one JSON object for each layer, keys sorted."""
    return "".join(
        json.dumps({"layer": layer.name, **layer.report}, sort_keys=True, allow_nan=False) + "\n"
        for layer in layers
    )


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run report: layer name to what the run said of it; empty where there is none."""
    if not path.exists():
        return {}
    reports = {}
    for number, line in enumerate(read_bytes(inside(path.parent, path.name), MAX_SIZE).splitlines(), 1):
        where = f"{path}: line {number}"
        entry = checked(dict[str, Any], parse_json(line, where), where)
        name = entry.pop("layer", None)
        if not isinstance(name, str) or name in reports:
            raise CheckpointError(f"{where}: layer {shown(name)}; allowed: each layer's name, once")
        reports[name] = entry
    return reports


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a checkpoint into a folder, which `convert.write_as` makes: whole or not at all.

    The same checkpoint gives the same bytes: no time, path or host is in it.
    """
    tensors = dict(checkpoint.check("the checkpoint").dense)
    for layer in checkpoint.layers.values():
        tensors.update(layer.tensors())
    texts = {**checkpoint.side_files, REPORT: report_lines(checkpoint.layers.values()).encode()}
    if CONFIG in texts:
        # Without it transformers would leave the quantized layers at random values.
        told = describe_layers(checkpoint.layers.values(), checkpoint.ties)
        texts[CONFIG] = add_own(texts[CONFIG], told)
    files = write_files(folder, tensors, texts, {"format": "pt", "loopq": _native.__version__})
    index = {
        "loopq_version": _native.__version__,
        "settings": checkpoint.settings,
        "layers": [layer.settings() for layer in checkpoint.layers.values()],
        "ties": checkpoint.ties,
        "files": files,
    }
    write_json(folder / INDEX, sealed(FORMAT, index))


def read_index(folder: Path) -> Index:
    """Read and check `loopq.json`: every version that there was becomes the same here."""
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"{folder}: not a loopq checkpoint: it has no {INDEX}")
    index = checked(Index, unsealed(read_json(inside(folder, INDEX)), FORMAT, path), path)
    files = [entry.file for entry in index.files]
    layers = [layer.name for layer in index.layers]
    for what, names in (("files", files), ("layers", layers)):
        if len(set(names)) != len(names):
            raise CheckpointError(f"{path}: {what}: a name stands twice")
    if not {TENSORS, REPORT} <= set(files):
        raise CheckpointError(f"{path}: files: {shown(files)}; {TENSORS} and {REPORT} must be among them")
    return index


def read(folder: Path) -> Checkpoint:
    """Read a checkpoint folder to plain arrays; needs no torch.

    Tensors that are not quantized stay in the file, mapped (`map_tensors`).

    Raises
    ------
    CheckpointError
        Unknown format or version, a missing, truncated or altered file, a tensor of a wrong shape or type.
    """
    index = read_index(folder)
    check_files(folder, index.files)
    reader = TensorReader(str(folder / TENSORS), map_tensors(folder / TENSORS))
    reports = read_report(folder / REPORT)
    layers = {s.name: QuantizedLayer.from_tensors(s, reader, reports.get(s.name, {})) for s in index.layers}
    side = [e.file for e in index.files if e.file not in (TENSORS, REPORT)]
    dense = {name: t for name, t in reader.tensors.items() if name not in reader.used}
    files = {name: read_bytes(folder / name, MAX_SIZE) for name in side}
    if CONFIG in files:
        files[CONFIG] = without_own(files[CONFIG])
    return Checkpoint(layers, dense, index.ties, index.settings, files).check(folder)


def load_into(model: nn.Module, checkpoint: Checkpoint, without: Collection[str] = ()) -> None:
    """Put a checkpoint's tensors into a model, quantized weights dequantized in the model's own type.

    Weights are written in place, one after another, so that ties stay ties and modules that use their weight without
    being called see it too.

    Parameters
    ----------
    model : nn.Module
        Of the checkpoint's kind.
    checkpoint : Checkpoint
        Its tensors.
    without : collection of str
        Quantized layers to leave as they are, since other modules will hold their codes.

    Raises
    ------
    CheckpointError
        Names or shapes do not fit the model; the model is unchanged then.
    """
    import torch  # lazy: loopq imports without torch

    own = dict(model.state_dict(keep_vars=True))
    stored: dict[str, RawTensor | QuantizedLayer] = {**checkpoint.dense, **checkpoint.layers}
    sources = {name: name for name in stored}
    # A model that does not tie what the checkpoint ties gets the value under both names.
    sources |= {n: source for n, source in checkpoint.ties.items() if own.get(n) is not own.get(source)}
    names = set(sources) | set(checkpoint.ties)
    # Files of other tools store a tied tensor once and leave its other names to the model.
    filled = {id(own[name]) for name in names if name in own}
    names |= {name for name, tensor in own.items() if id(tensor) in filled}
    if names != set(own):
        missing, more = shown(sorted(set(own) - names)), shown(sorted(names - set(own)))
        raise CheckpointError(f"the checkpoint does not fit the model: missing {missing}, unexpected {more}")
    for name, source in sources.items():
        what = stored[source]
        given = what.model_shape if isinstance(what, QuantizedLayer) else what.shape
        if tuple(own[name].shape) != given:
            shape = list(own[name].shape)
            raise CheckpointError(f"tensor {name!r}: shape {list(given)}, the model has {shape}")
    half = (torch.float16, torch.bfloat16)
    with torch.no_grad():
        for name, source in sources.items():
            what = stored[source]
            if isinstance(what, QuantizedLayer):
                if source in without:
                    continue
                dtype = own[source].dtype
                kind = DTYPE_NAMES[str(dtype).removeprefix("torch.")] if dtype in half else "F32"
                what = float_to_raw(what.in_model_orientation(), kind)
            own[name].copy_(to_torch(what))
