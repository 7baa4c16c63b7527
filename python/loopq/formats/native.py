"""The native checkpoint: a folder that restores the model exactly. Format: docs/formats/checkpoint.md."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from loopq import _native
from loopq.errors import CheckpointError
from loopq.formats import FORMATS
from loopq.formats.base import DEFAULTS, Check, Format, FormatOptions, WrittenLayers, write_folder
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.hf_folder import CONFIG, KEY, METHOD
from loopq.layers.grids import without_kind
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.settings.execution import available_bytes
from loopq.storage.files import MAX_SIZE, RawTensor, inside, map_tensors, read_bytes, read_json, write_json
from loopq.storage.model_files import TENSORS, FileEntry, check_files, write_files
from loopq.storage.schema import Name, Object, checked, parse_json, sealed, shown, unsealed
from loopq.terminal.table import size

FORMAT = "loopq-checkpoint"
INDEX = "loopq.json"
REPORT = "report.jsonl"
#: Tensors that a layer of a native checkpoint may have.
STORED = ("weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "input_scale")
_OWN = re.compile(rb',\n  "quantization_config": \{"quant_method": "loopq".*\}(?=\s*\}\s*$)')


@dataclass(frozen=True)
class Index:
    """The content of `loopq.json`."""

    loopq_version: str
    settings: Object
    layers: tuple[LayerSettings, ...]
    ties: dict[Name, Name]
    files: tuple[FileEntry, ...]


def report_lines(layers: Iterable[QuantizedLayer]) -> str:
    """Return the run report: one JSON object for each layer, keys sorted."""
    return "".join(
        json.dumps({"layer": layer.name, **layer.report}, sort_keys=True, allow_nan=False) + "\n"
        for layer in layers
    )


def read_report(path: Path) -> dict[str, dict[str, Any]]:
    """Read a run report as layer name to the run's entry. Empty if there is none."""
    if not path.exists():
        return {}
    reports = {}
    for number, line in enumerate(read_bytes(inside(path.parent, path.name), MAX_SIZE).splitlines(), 1):
        where = f"{path}: line {number}"
        entry = checked(Object, parse_json(line, where), where)
        name = entry.pop("layer", None)
        if not isinstance(name, str) or name in reports:
            raise CheckpointError(f"{where}: layer {shown(name)}; allowed: each layer's name, once")
        reports[name] = entry
    return reports


def write(folder: Path, checkpoint: Checkpoint) -> None:
    """Write the files of a checkpoint into a folder. `write_folder` makes it completely or not at all.

    The same checkpoint gives the same bytes. They contain no time, path or host.
    """
    tensors, values = _packed(checkpoint.check("the checkpoint"))
    texts = {**checkpoint.side_files, REPORT: report_lines(checkpoint.layers.values()).encode()}
    if CONFIG in texts:
        # Without it transformers would leave the quantized layers at random values.
        description = describe_layers(checkpoint.layers.values(), checkpoint.ties)
        texts[CONFIG] = add_own(texts[CONFIG], description)
    files = write_files(folder, tensors, texts, {"format": "pt", "loopq": _native.__version__}, values)
    index = {
        "loopq_version": _native.__version__,
        "settings": checkpoint.settings,
        "layers": [layer.settings() for layer in checkpoint.layers.values()],
        "ties": checkpoint.ties,
        "files": files,
    }
    write_json(folder / INDEX, sealed(FORMAT, index))


def describe_layers(layers: Iterable[QuantizedLayer], ties: Mapping[str, str]) -> dict[str, Any]:
    """Return the layers of a native checkpoint by their grid, for `loopq.runtime.transformers`."""
    names: dict[str, list[str]] = {}
    for layer in layers:
        rest = {k: v for k, v in without_kind(layer.settings()).items() if k not in ("name", "shape")}
        names.setdefault(json.dumps(rest, sort_keys=True), []).append(layer.name)
    groups = [{**json.loads(grid), "layers": members} for grid, members in names.items()]
    stored = {name for members in names.values() for name in members}
    tied = {name: source for name, source in ties.items() if source in stored}
    return {"quant_method": METHOD, "groups": groups, "ties": tied}


def described(description: Mapping[str, Any]) -> tuple[dict[str, Object], dict[str, str]]:
    """Read what `describe_layers` wrote: the grid of each layer by the name of its weight, and the ties.

    Raises
    ------
    CheckpointError
        A layer stands twice, or a tie names no layer.
    """
    where, grids = f"{CONFIG}: {KEY}", dict[str, Object]()
    for group in checked(tuple[Object, ...], description.get("groups"), where):
        for name in checked(tuple[str, ...], group.get("layers"), f"{where}: layers"):
            if name in grids:
                raise CheckpointError(f"{where}: layer {shown(name)} stands twice")
            grids[name] = {key: value for key, value in group.items() if key != "layers"}
    ties = checked(dict[str, str], description.get("ties", {}), where)
    for name, source in ties.items():
        if source not in grids:
            raise CheckpointError(
                f"{where}: {shown(name)} is tied to {shown(source)}, which is no layer there"
            )
    return grids, ties


def read_layer(name: str, grid: Object, reader: TensorReader, shape: Sequence[int]) -> QuantizedLayer:
    """Return a layer that `describe_layers` described, of the shape that the model has."""
    module = name.removesuffix(".weight")
    stored = reader.get(f"{module}.weight_shape", ("I64", "I32"), (2,)).array().tolist()
    if stored != [*shape]:
        raise CheckpointError(f"layer {name}: of shape {stored}, the model has {[*shape]}")
    settings = checked(LayerSettings, {**grid, "name": name, "shape": stored}, f"{reader.where}: {KEY}")
    return QuantizedLayer.from_tensors(settings, reader, {})


def add_own(config: bytes, quantization: Mapping[str, Any]) -> bytes:
    """Append a `quantization_config` to the config.json of a transformers model and keep its other bytes.

    A model of another library has no "architectures", so its config.json does not change.

    Raises
    ------
    CheckpointError
        It has one already. Readers would take the codes for those of that method.
    """
    head, brace, tail = config.rpartition(b"}")
    body = head.rstrip()
    if not brace or b'"architectures"' not in body:
        return config
    if f'"{KEY}"'.encode() in body and KEY in checked(
        Object, parse_json(config, CONFIG, finite=False), CONFIG
    ):
        raise CheckpointError(
            f"{CONFIG} of the checkpoint has a {KEY} of its source, which readers would follow; quantize the source "
            "again"
        )
    space = head[len(body) :]
    return body + f',\n  "{KEY}": {json.dumps(quantization)}'.encode() + space + brace + tail


def without_own(config: bytes) -> bytes:
    """Undo `add_own`."""
    return _OWN.sub(b"", config)


def _packed(checkpoint: Checkpoint) -> tuple[dict[str, RawTensor], Callable[[str], RawTensor]]:
    """Return all tensors and their maker, one layer at a time. A layer's largest tensor has no data yet."""
    tensors, owners = dict(checkpoint.dense), {}
    for layer in checkpoint.layers.values():
        parts = layer.tensors()
        largest = max(parts, key=lambda name: parts[name].data.size)
        owners[largest] = layer
        size = np.broadcast_to(np.uint8(0), parts[largest].data.shape)
        tensors |= parts | {largest: dataclasses.replace(parts[largest], data=size)}
    return tensors, lambda name: owners[name].tensors()[name] if name in owners else tensors[name]


def read_index(folder: Path) -> Index:
    """Read and check `loopq.json`."""
    path = folder / INDEX
    if not path.exists():
        raise CheckpointError(f"{folder}: not a loopq checkpoint: no {INDEX}; give an interrupted run again")
    index = checked(Index, unsealed(read_json(inside(folder, INDEX)), FORMAT, path), path)
    files = [entry.file for entry in index.files]
    layers = [layer.name for layer in index.layers]
    for what, names in (("files", files), ("layers", layers)):
        if len(set(names)) != len(names):
            raise CheckpointError(f"{path}: {what}: a name stands twice")
    if not {TENSORS, REPORT} <= set(files):
        raise CheckpointError(f"{path}: files: {shown(files)}; {TENSORS} and {REPORT} must be among them")
    return index


class _Unpacked(Mapping[str, QuantizedLayer]):
    """Layers of a file, unpacked on request."""

    def __init__(self, index: Index, reader: TensorReader, reports: Mapping[str, dict[str, Any]]) -> None:
        self._settings = {s.name: s for s in index.layers}
        self._reader, self._reports = reader, reports

    def __getitem__(self, name: str) -> QuantizedLayer:
        return QuantizedLayer.from_tensors(self._settings[name], self._reader, self._reports.get(name, {}))

    def __iter__(self) -> Iterator[str]:
        return iter(self._settings)

    def __len__(self) -> int:
        return len(self._settings)


def read(folder: Path, *, hold: bool | None = None) -> Checkpoint:
    """Read a checkpoint folder to plain arrays. Needs no torch.

    Tensors that are not quantized stay mapped in the file (`map_tensors`). Without `hold` all do, and each request for
    a layer unpacks it. By default the codes are held if they take at most half of the free memory.

    Raises
    ------
    CheckpointError
        If the format or version is unknown, a file is missing or changed, or a tensor has a wrong shape or type.
    """
    index = read_index(folder)
    check_files(folder, index.files)
    reader = TensorReader(str(folder / TENSORS), map_tensors(folder / TENSORS))
    reports = read_report(folder / REPORT)
    unpacked = _Unpacked(index, reader, reports)
    if hold is None:
        hold = sum(math.prod(s.shape) for s in index.layers) <= (available_bytes() or math.inf) / 2
    layers: Mapping[str, QuantizedLayer] = dict(unpacked) if hold else unpacked
    if not hold:
        # Looking at each layer checks it, and shows the tensors of layers.
        deque(unpacked.values(), maxlen=0)
    side = [e.file for e in index.files if e.file not in (TENSORS, REPORT)]
    dense = {name: t for name, t in reader.tensors.items() if name not in reader.used}
    files = {name: read_bytes(folder / name, MAX_SIZE) for name in side}
    if CONFIG in files:
        files[CONFIG] = without_own(files[CONFIG])
    return Checkpoint(layers, dense, index.ties, index.settings, files).check(folder)


class Native(Format):
    """loopq's native format: every layer that loopq makes, exactly."""

    name: ClassVar[str] = "native"
    own: ClassVar[bool] = True
    holds_tables: ClassVar[bool] = True
    loads: ClassVar[str] = "import loopq.runtime.transformers  # or loopq.load(DIR)"

    def holds(self, path: Path) -> bool:
        """Whether the folder has an index of loopq."""
        return (path / INDEX).is_file()

    def write(
        self, out: Path, source: Checkpoint, options: FormatOptions = DEFAULTS, *, also: Check | None = None
    ) -> WrittenLayers:
        """Write the folder."""
        write_folder(self, out, source, 0, partial(write, checkpoint=source), also)
        n_bytes = sum(layer.n_bytes for layer in source.layers.values())
        return WrittenLayers(out, self.name, n_bytes, n_bytes, {}, len(source.layers))

    def read(self, path: Path) -> Checkpoint:
        """Read the folder. See the function `read`."""
        return read(path)

    def verify(self, path: Path, checkpoint: Checkpoint) -> Checkpoint:
        """As in `Format`. Unpacks one layer at a time."""
        again = read(path, hold=False)
        checkpoint.compare(again, path)
        return again

    def read_settings(self, path: Path) -> Object:
        """Return the settings from the index alone."""
        return read_index(path).settings

    def facts(self, path: Path) -> dict[str, Any]:
        """Describe the folder."""
        return {"format": self.name, **read(path).facts()}

    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """Only sizes. The command `inspect` prints the run."""
        return [f"format {self.name}, {len(facts['layers'])} layers, {size(facts['n_bytes'])}"]


NATIVE = Native()
FORMATS.register(NATIVE.name)(NATIVE)
