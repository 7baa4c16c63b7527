"""The native checkpoint: a folder that gives the model back exactly. Format: docs/formats/checkpoint.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from loopq import _native
from loopq.checkpoint.files import (
    RawTensor,
    float_to_raw,
    new_folder,
    read_json,
    read_tensors,
    replacing,
    sha256,
    write_json,
    write_tensors,
)
from loopq.checkpoint.layer import QuantizedLayer
from loopq.checkpoint.model_files import TENSORS, check_files, to_torch
from loopq.errors import CheckpointError

if TYPE_CHECKING:
    from torch import nn

FORMAT = "loopq-checkpoint"
VERSION = 1
INDEX = "loopq.json"
REPORT = "report.jsonl"


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

    def state(self, weight_dtypes: Mapping[str, str]) -> dict[str, RawTensor]:
        """Return a full state dict with dequantized weights in the types given, float32 where none is."""
        out = dict(self.dense)
        for name, layer in self.layers.items():
            out[name] = float_to_raw(layer.in_model_orientation(), weight_dtypes.get(name, "F32"))
        return out


def report_lines(layers: Iterable[QuantizedLayer]) -> str:
    """Return the run report: one JSON object for each layer, keys sorted."""
    return "".join(
        json.dumps({"layer": layer.name, **layer.report}, sort_keys=True, allow_nan=False) + "\n"
        for layer in layers
    )


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run report: layer name to what the run said of it; empty where there is none."""
    if not path.is_file():
        return {}
    reports = {}
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        try:
            entry = json.loads(line)
            reports[entry.pop("layer")] = entry
        except (ValueError, KeyError, AttributeError, TypeError) as cause:
            raise CheckpointError(f"{path}: line {number} is not an entry of a run report") from cause
    return reports


def write(out: Path, checkpoint: Checkpoint) -> None:
    """Write a checkpoint folder, whole or not at all.

    The same checkpoint gives the same bytes: no time, path or host is in it.

    Raises
    ------
    CheckpointError
        `out` exists and is not empty, or the disk is too small.
    """
    with new_folder(out, checkpoint.n_bytes) as folder:
        _write_files(folder, checkpoint)


def _write_files(folder: Path, checkpoint: Checkpoint) -> None:
    tensors = dict(checkpoint.dense)
    for layer in checkpoint.layers.values():
        tensors.update(layer.tensors())
    entries = []
    for name, data in checkpoint.side_files.items():
        with replacing(folder / name) as path:
            path.write_bytes(data)
        entries.append(name)
    with replacing(folder / REPORT) as path:
        path.write_text(report_lines(checkpoint.layers.values()), "utf-8")
    write_tensors(folder / TENSORS, tensors, {"format": "pt", "loopq": _native.__version__})
    files = [
        {"file": name, "sha256": sha256(folder / name), "n_bytes": (folder / name).stat().st_size}
        for name in sorted([*entries, REPORT, TENSORS])
    ]
    index = {
        "format": FORMAT,
        "version": VERSION,
        "loopq_version": _native.__version__,
        "settings": checkpoint.settings,
        "layers": [layer.settings() for layer in checkpoint.layers.values()],
        "ties": checkpoint.ties,
        "files": files,
    }
    write_json(folder / INDEX, index)


def read_index(folder: Path) -> dict[str, Any]:
    """Read and check `loopq.json`."""
    path = folder / INDEX
    if not path.is_file():
        raise CheckpointError(f"{folder}: not a loopq checkpoint: it has no {INDEX}")
    index = read_json(path)
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise CheckpointError(f"{path}: not the index of a loopq checkpoint")
    if index.get("version") != VERSION:
        raise CheckpointError(f"{path}: version {index.get('version')}; this loopq reads version {VERSION}")
    missing = {"settings", "layers", "ties", "files"} - set(index)
    if missing:
        raise CheckpointError(f"{path}: damaged: no {', '.join(sorted(missing))}")
    return index


def read(folder: Path, *, deep: bool = True) -> Checkpoint:
    """Read a checkpoint folder to plain arrays; needs no torch.

    Parameters
    ----------
    folder : Path
        Checkpoint.
    deep : bool
        Compare SHA-256 sums too.

    Raises
    ------
    CheckpointError
        Unknown format or version, a missing, truncated or altered file, a tensor of a wrong shape or type.
    """
    index = read_index(folder)
    check_files(folder, index["files"], CheckpointError, deep=deep)
    tensors = read_tensors(folder / TENSORS)
    reports = read_report(folder / REPORT)
    layers = {}
    used: set[str] = set()
    for settings in index["layers"]:
        name = settings["name"]
        layers[name] = QuantizedLayer.from_tensors(
            settings, tensors, reports.get(name, {}), str(folder / TENSORS)
        )
        used.update(layers[name].tensor_names())
    side = {
        e["file"]: (folder / e["file"]).read_bytes()
        for e in index["files"]
        if e["file"] not in (TENSORS, REPORT)
    }
    dense = {name: t for name, t in tensors.items() if name not in used}
    return Checkpoint(layers, dense, dict(index["ties"]), dict(index["settings"]), side)


def load_into(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Put a checkpoint's tensors into a model, quantized weights dequantized in the model's own type.

    Weights are written in place, so that ties stay ties and modules that use their weight without being
    called see it too.

    Raises
    ------
    CheckpointError
        Names or shapes do not fit the model; the model is unchanged then.
    """
    import torch

    own = dict(model.state_dict(keep_vars=True))
    dtypes = {"torch.float16": "F16", "torch.bfloat16": "BF16"}
    kinds = {n: dtypes[str(t.dtype)] for n, t in own.items() if str(t.dtype) in dtypes}
    state = checkpoint.state(kinds)
    names = set(state) | set(checkpoint.ties)
    # Files of other tools store a tied tensor once and leave its other names to the model.
    filled = {id(own[name]) for name in names if name in own}
    names |= {name for name, tensor in own.items() if id(tensor) in filled}
    if names != set(own):
        raise CheckpointError(
            f"the checkpoint does not fit the model: missing {sorted(set(own) - names)[:5]}, "
            f"unexpected {sorted(names - set(own))[:5]}"
        )
    for name, tensor in state.items():
        if tuple(own[name].shape) != tensor.shape:
            raise CheckpointError(
                f"tensor {name!r}: shape {list(tensor.shape)}, the model has {list(own[name].shape)}"
            )
    with torch.no_grad():
        for name, tensor in state.items():
            own[name].copy_(to_torch(tensor))
