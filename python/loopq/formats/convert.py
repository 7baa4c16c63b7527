"""Read any checkpoint that loopq knows, write it in any format that can hold it, and say what it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from loopq import _native
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import FORMATS, hf_folder
from loopq.formats import native as store
from loopq.formats.base import Export, Format, Ragged, prepare_all, restore
from loopq.formats.native import Checkpoint
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor, check_folder, inside, json_bytes, new_folder, read_json
from loopq.storage.model_files import write_files
from loopq.storage.schema import Name, Object, checked, parse_json, sealed, shown, unsealed

NATIVE = "native"
RECORD = "loopq_export.json"
RECORD_FORMAT = "loopq-export"


@dataclass(frozen=True)
class Record:
    """What `loopq_export.json` holds: all that a format loses."""

    loopq_version: str
    target: str
    ragged: Ragged | None
    settings: Object
    layers: tuple[LayerSettings, ...]
    ties: dict[Name, Name]
    config: str | None


@dataclass(frozen=True)
class Written:
    """What an export wrote and what it cost: bytes of the quantized layers as loopq stores them and in the format.

    `notes` says by layer what had to be changed (groups cut, padding), `checked` how many layers were read back and
    compared, `remarks` what readers of the format are known not to do with this file.
    """

    folder: Path
    format: str
    n_bytes_before: int
    n_bytes: int
    notes: dict[str, tuple[str, ...]]
    checked: int
    remarks: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """Return the report as lines to print."""
        more = self.n_bytes - self.n_bytes_before
        lines = [
            f"{self.folder}: {self.format}, {self.checked} layers in {self.n_bytes} bytes "
            f"({more:+d}, {more / max(self.n_bytes_before, 1):+.2%} against the native checkpoint)"
        ]
        lines += [f"{name}: {note}" for name, notes in self.notes.items() for note in notes]
        lines += [f"note: {remark}" for remark in self.remarks]
        return [*lines, f"read back from disk: {self.checked} layers equal, number by number"]


def format_names() -> list[str]:
    """Every format that can be written, the native one first."""
    return [NATIVE, *FORMATS.names()]


def format_of(folder: Path) -> str:
    """Name the format of a checkpoint folder.

    Raises
    ------
    CheckpointError
        It is none that loopq reads; the message says what it is instead.
    """
    if (folder / store.INDEX).is_file():
        return NATIVE
    if not (folder / hf_folder.CONFIG).is_file():
        check_folder(folder)
        raise CheckpointError(f"{folder}: no checkpoint: neither {store.INDEX} nor config.json is there")
    _, quantization = hf_folder.read_config(folder)
    if quantization is None:
        raise CheckpointError(f"{folder}: a model that is not quantized: config.json has no {hf_folder.KEY}")
    return _target(folder, quantization).name


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a quantized checkpoint, readable or not, rather than a model."""
    if (folder / store.INDEX).is_file():
        return True
    return (folder / hf_folder.CONFIG).is_file() and hf_folder.read_config(folder)[1] is not None


def settings_of(folder: str | Path) -> Object:
    """Return the settings of the run that made a checkpoint.

    Raises
    ------
    CheckpointError
        loopq did not make it.
    """
    folder = Path(folder)
    if format_of(folder) == NATIVE:
        return store.read_index(folder).settings
    if not (folder / RECORD).exists():
        raise CheckpointError(f"{folder}: loopq did not make it, so the settings are not known")
    return _read_record(folder).settings


def _target(folder: Path, quantization: Mapping[str, Any]) -> Format:
    for _, target in FORMATS:
        if target.describes(quantization):
            return target
    method = quantization.get("quant_method")
    version = quantization.get("checkpoint_format") or quantization.get("format")
    raise CheckpointError(
        f"{folder / hf_folder.CONFIG}: quant_method {shown(method)}, format {shown(version)}: loopq reads "
        f"{', '.join(FORMATS.names())}"
    )


def read_any(folder: str | Path) -> Checkpoint:
    """Read a native checkpoint, or a folder with config.json and safetensors in one of `FORMATS`, whoever wrote it.

    Of files that loopq did not export, `settings["system"]` is None, ties are those that the model itself makes, and
    there is no run report.

    Raises
    ------
    CheckpointError
        The file is damaged or of a kind that loopq does not read; the message names the tensor.
    """
    folder = Path(folder)
    if format_of(folder) == NATIVE:
        return store.read(folder)
    config, quantization = hf_folder.read_config(folder)
    quantization = quantization or {}
    target = _target(folder, quantization)
    reader = TensorReader(str(folder), hf_folder.read_all_tensors(folder))
    layers = {}
    for module in target.modules(list(reader.tensors)):
        checked(Name, module, f"{folder}: name of a quantized module")
        layer = target.read(module, reader, quantization)
        layers[layer.name] = layer
    if not layers:
        raise CheckpointError(f"{folder}: config.json says {target.name}, but there is no quantized layer")
    dense = {name: t for name, t in reader.tensors.items() if name not in reader.used}
    side = hf_folder.side_files(folder, frozenset({RECORD, store.REPORT, hf_folder.CARD}))
    if (folder / RECORD).exists():
        return _recorded(folder, target, layers, dense, side).check(folder)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    # Read again as strictly as loopq's own files are, into which it goes.
    kept = parse_json(json.dumps(quantization), f"{folder / hf_folder.CONFIG}: {hf_folder.KEY}")
    settings = {"system": None, "imported": {"format": target.name, "quantization_config": kept}}
    return Checkpoint(layers, dense, {}, settings, {hf_folder.CONFIG: text.encode(), **side}).check(folder)


def _read_record(folder: Path) -> Record:
    data = unsealed(read_json(inside(folder, RECORD)), RECORD_FORMAT, folder / RECORD)
    return checked(Record, data, folder / RECORD)


def _recorded(
    folder: Path,
    target: Format,
    layers: dict[str, QuantizedLayer],
    dense: dict[str, RawTensor],
    side: dict[str, bytes],
) -> Checkpoint:
    """Undo an export of loopq with the help of the record that it left."""
    record = _read_record(folder)
    if record.target != target.name:
        raise CheckpointError(f"{folder}: config.json says {target.name}, {RECORD} {shown(record.target)}")
    reports = store.read_report(folder / store.REPORT)
    restored = {}
    for settings in record.layers:
        name = settings.name
        if name not in layers:
            raise CheckpointError(f"{folder}: layer {name!r} is in {RECORD} and not in the tensors")
        layer = restore(layers[name], settings, str(folder))
        restored[name] = dataclasses.replace(layer, report=reports.get(name, {}))
    again = {name: stored.layer for name, stored in prepare_all(target, restored, record.ragged).items()}
    for name, layer in layers.items():
        same = again.get(record.ties.get(name, name))
        if same is None:
            raise CheckpointError(f"{folder}: layer {name!r} is not in {RECORD}, nor tied to one that is")
        if layer.grid.group_size != same.grid.group_size or not layer.same_as(same):
            raise CheckpointError(f"{folder}: layer {name!r}: it or {RECORD} was changed after the export")
    if record.config is not None:
        side = {hf_folder.CONFIG: record.config.encode(), **side}
    return Checkpoint(restored, dense, record.ties, record.settings, side)


def write_as(
    out: str | Path,
    checkpoint: Checkpoint,
    format_name: str,
    *,
    ragged: Ragged | None = None,
    also: Callable[[Checkpoint], None] | None = None,
) -> Written:
    """Write a checkpoint to a new folder, "native" or in one of `FORMATS`.

    The folder gets its name when it has been read back and compared, and `also` has checked what was read. `ragged`
    says what to do with a last group that is shorter than the others; it is asked for where there is one.

    Raises
    ------
    CheckpointError
        The format cannot hold the checkpoint exactly: the message names the layer, the reason and what can
        be done; or what was read back differs.
    """
    out = Path(out)
    before = sum(layer.n_bytes for layer in checkpoint.layers.values())
    written = Written(out, format_name, before, before, {}, len(checkpoint.layers))
    files: dict[str, bytes] = {}
    tensors: dict[str, RawTensor] = {}
    if format_name != NATIVE:
        written, tensors, files = _foreign(checkpoint, FORMATS.get(format_name), ragged, written)
    with new_folder(out, max(checkpoint.n_bytes, sum(t.data.size for t in tensors.values()))) as folder:
        if format_name == NATIVE:
            store.write(folder, checkpoint)
        else:
            write_files(folder, tensors, files, {"format": "pt"})
        again = verify(folder, checkpoint)
        if also is not None:
            also(again)
    return written


def verify(folder: Path, checkpoint: Checkpoint) -> Checkpoint:
    """Read a folder back, compare all that is in it with the checkpoint, and return what was read.

    Raises
    ------
    CheckpointError
        Anything differs.
    """
    again = read_any(folder)
    equal = {"ties": again.ties == checkpoint.ties, "side files": again.side_files == checkpoint.side_files}
    equal["settings"] = json_bytes(again.settings) == json_bytes(checkpoint.settings)
    for name, layer in checkpoint.layers.items():
        found = again.layers.get(name)
        equal[f"layer {name}"] = (
            found is not None and layer.same_as(found) and layer.settings() == found.settings()
        )
    for name, tensor in checkpoint.dense.items():
        other = again.dense.get(name, RawTensor("", (), tensor.data))
        same = (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        equal[f"tensor {name}"] = same and np.array_equal(other.data, tensor.data)
    wrong = [what for what, same in equal.items() if not same]
    if wrong:
        raise CheckpointError(f"{folder}: {wrong[0]}: reads back differently from what was written")
    return again


def refuse_own(
    transformed: Sequence[str], trellis: Sequence[str], target: Format, tables: Sequence[str] = ()
) -> None:
    """Refuse layers that only loopq's own format holds: for a transformed input, on a trellis, embedding tables."""
    for names, what, instead in (
        (transformed, "for a transformed input", "without rotation and without awq"),
        (trellis, "on a trellis", "with another method than trellis"),
        (tables, "of an embedding table", "without --outside"),
    ):
        if names:
            raise CheckpointError(
                f"layer {names[0]}: its codes are {what} ({len(names)} such layers), which {target.name} cannot hold; "
                f"quantize {instead}, or keep loopq's own format"
            )


def _foreign(
    checkpoint: Checkpoint, target: Format, ragged: Ragged | None, written: Written
) -> tuple[Written, dict[str, RawTensor], dict[str, bytes]]:
    """Tensors and other files of a checkpoint in the format of another tool, and what to say of it."""
    if not checkpoint.layers:
        raise ConfigError("nothing to export: the checkpoint has no quantized layer")
    whole = checkpoint.layers.items()
    transformed = [name for name, layer in whole if layer.transform is not None]
    tables = [name for name, layer in whole if layer.orientation == "table"]
    refuse_own(transformed, [name for name, layer in whole if not layer.grid.portable], target, tables)
    prepared = prepare_all(target, checkpoint.layers, ragged)
    owners = _owners(checkpoint)
    tensors: dict[str, RawTensor] = {}
    layers = {}
    for name, stored in prepared.items():
        for module in owners[name]:
            tensors.update(target.tensors(module, stored.layer))
            layers[module] = stored.layer
    n_bytes = sum(t.data.size for n, t in tensors.items() if not n.endswith("weight_shape"))
    clash = sorted(set(tensors) & set(checkpoint.dense))
    if clash:
        raise CheckpointError(f"tensor {clash[0]!r} of the model has a name that {target.name} uses itself")
    tensors.update(checkpoint.dense)
    export = Export(layers, _dense_modules(checkpoint), _facts(checkpoint))
    notes = {name: stored.notes for name, stored in prepared.items() if stored.notes}
    for name, (_, *copies) in owners.items():
        if copies:
            notes[name] = (*notes.get(name, ()), f"tied: stored again for {', '.join(copies)}")
    files = _files(checkpoint, target, ragged, target.config(export))
    written = dataclasses.replace(written, n_bytes=n_bytes, notes=notes, remarks=target.remarks(export))
    return written, tensors, files


def _files(
    checkpoint: Checkpoint, target: Format, ragged: Ragged | None, quantization: Object
) -> dict[str, bytes]:
    """Everything but the tensors: config.json in the order of its keys, side files byte for byte, the record."""
    side = dict(checkpoint.side_files)
    original = side.pop(hf_folder.CONFIG, None)
    config = {} if original is None else parse_json(original, hf_folder.CONFIG, finite=False)
    config = checked(dict[str, Any], config, hf_folder.CONFIG) | {hf_folder.KEY: quantization}
    record = {
        "loopq_version": _native.__version__,
        "target": target.name,
        "ragged": ragged,
        "settings": checkpoint.settings,
        "layers": [layer.settings() for layer in checkpoint.layers.values()],
        "ties": checkpoint.ties,
        "config": None if original is None else original.decode(),
    }
    own = {
        hf_folder.CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
        RECORD: json_bytes(sealed(RECORD_FORMAT, record)),
        store.REPORT: store.report_lines(checkpoint.layers.values()).encode(),
    }
    if quantization["quant_method"] == "gptq":
        own[hf_folder.QUANTIZE_CONFIG] = json_bytes(quantization)
    clash = sorted({*own, hf_folder.SHARDS} & set(side))
    if clash:
        raise CheckpointError(f"the checkpoint brings a file {clash[0]}, which {target.name} uses itself")
    return side | own


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"quantizer": [f"loopq:{_native.__version__}"]}
    layer = checkpoint.settings.get("quantization", {}).get("layer", {})
    damping = layer.get("method", {}).get("damping", {}).get("fraction")
    if damping is not None:
        facts["damp_percent"] = damping
    return facts


def _owners(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Modules of every quantized layer: its own, and those tied to it, which other tools load apart."""
    owners = {name: [layer.module] for name, layer in checkpoint.layers.items()}
    for name, source in checkpoint.ties.items():
        if source in owners:
            owners[source].append(name.removesuffix(".weight"))
    return owners


def _dense_modules(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Every module with a matrix that was left alone, tied ones too: a superset of the linear layers."""
    names = {n for n, t in checkpoint.dense.items() if len(t.shape) == 2}
    names |= {tied for tied, source in checkpoint.ties.items() if source in names}
    return tuple(sorted(n.removesuffix(".weight") for n in names if n.endswith(".weight")))


def inspect_any(folder: str | Path) -> dict[str, Any]:
    """Say what a checkpoint is, as plain data: layers as they were solved, without what the format added.

    Of other tools' formats there is also the `quantization_config`, `n_bytes_files` (the safetensors files, with
    padding and cut groups), and of an export of loopq its version (`exported_by_loopq`) and its policy for ragged
    groups, else None.
    """
    folder = Path(folder)
    format_name = format_of(folder)
    checkpoint = read_any(folder)
    found: dict[str, Any] = {
        "format": format_name,
        "n_bytes": checkpoint.n_bytes,
        "layers": [
            {**x.settings(), "n_bytes": x.n_bytes, "bits_per_weight": 8 * x.n_bytes / x.codes.size}
            for x in checkpoint.layers.values()
        ],
        "dense": [{"name": n, "dtype": t.dtype, "shape": list(t.shape)} for n, t in checkpoint.dense.items()],
        "ties": checkpoint.ties,
        "settings": checkpoint.settings,
    }
    if format_name != NATIVE:
        found["quantization_config"] = hf_folder.read_config(folder)[1]
        record = _read_record(folder) if (folder / RECORD).exists() else None
        found["exported_by_loopq"] = record.loopq_version if record else None
        found["ragged"] = record.ragged if record else None
        found["n_bytes_files"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return found
