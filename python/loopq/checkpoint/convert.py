"""Read any checkpoint that loopq knows, write it in any format that can hold it, and say what it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopq import _native
from loopq.checkpoint import FORMATS, hf_folder
from loopq.checkpoint import native as store
from loopq.checkpoint.files import RawTensor, check_folder, new_folder, read_json
from loopq.checkpoint.form import Export, Format, Ragged, Shelf, even_out, restore
from loopq.checkpoint.layer import QuantizedLayer, check_settings
from loopq.checkpoint.native import Checkpoint
from loopq.errors import CheckpointError, ConfigError

NATIVE = "native"
RECORD = "loopq_export.json"
RECORD_FORMAT = "loopq-export"
RECORD_VERSION = 1


@dataclass(frozen=True)
class Written:
    """What an export wrote and what it cost.

    Parameters
    ----------
    folder : Path
        Where.
    format : str
        Name of the format.
    n_bytes_before, n_bytes : int
        Bytes of the quantized layers as loopq stores them, and in the format.
    notes : dict of str to tuple of str
        Layer name to what had to be changed for the format: groups cut, padding; empty where nothing was.
    checked : int
        Layers that were read back from the disk and compared, number by number.
    remarks : tuple of str
        What readers of the format are known not to do with this file.
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
        raise CheckpointError(
            f"{folder}: no checkpoint: neither {store.INDEX} nor {hf_folder.CONFIG} is there"
        )
    _, quantization = hf_folder.read_config(folder)
    if quantization is None:
        raise CheckpointError(f"{folder}: a model that is not quantized: config.json has no {hf_folder.KEY}")
    return _form(folder, quantization).name


def _form(folder: Path, quantization: Mapping[str, Any]) -> Format:
    for _, form in FORMATS:
        if form.describes(quantization):
            return form
    method = quantization.get("quant_method")
    version = quantization.get("checkpoint_format") or quantization.get("format")
    raise CheckpointError(
        f"{folder / hf_folder.CONFIG}: quant_method {method!r}, format {version!r}: loopq reads "
        f"{', '.join(FORMATS.names())}"
    )


def read_any(folder: str | Path) -> Checkpoint:
    """Read a checkpoint of any format that loopq knows, whoever wrote it.

    Parameters
    ----------
    folder : path
        Native checkpoint, or a folder with config.json and safetensors in one of `FORMATS`.

    Returns
    -------
    Checkpoint
        Of files that loopq did not export, `settings["system"]` is None, ties are those that the model itself
        makes, and there is no run report.

    Raises
    ------
    CheckpointError
        The file is damaged or of a kind that loopq does not read; the message names the tensor.
    """
    folder = Path(folder)
    if format_of(folder) == NATIVE:
        return store.read(folder)
    config, quantization = hf_folder.read_config(folder)
    form = _form(folder, quantization or {})
    shelf = Shelf(str(folder), hf_folder.read_all_tensors(folder))
    layers: dict[str, QuantizedLayer] = {}
    used: set[str] = set()
    for module in form.modules(list(shelf.tensors)):
        layer, names = form.read(module, shelf, quantization or {})
        layers[layer.name] = layer
        used.update(names)
    if not layers:
        raise CheckpointError(
            f"{folder}: no quantized layer: config.json says {form.name}, the tensors do not"
        )
    dense = {name: t for name, t in shelf.tensors.items() if name not in used}
    side = hf_folder.side_files(folder, frozenset({RECORD, store.REPORT}))
    if (folder / RECORD).is_file():
        return _recorded(folder, layers, dense, side)
    text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    settings = {"system": None, "imported": {"format": form.name, "quantization_config": quantization}}
    return Checkpoint(layers, dense, {}, settings, {hf_folder.CONFIG: text.encode(), **side})


def _recorded(
    folder: Path, layers: dict[str, QuantizedLayer], dense: dict[str, RawTensor], side: dict[str, bytes]
) -> Checkpoint:
    """Undo an export of loopq with the help of the record that it left."""
    path = folder / RECORD
    record = read_json(path)
    if not isinstance(record, dict) or record.get("format") != RECORD_FORMAT:
        raise CheckpointError(f"{path}: not the record of an export")
    if record.get("version") != RECORD_VERSION:
        raise CheckpointError(
            f"{path}: version {record.get('version')}; this loopq reads version {RECORD_VERSION}"
        )
    missing = {"settings", "layers", "ties", "config"} - set(record)
    if missing:
        raise CheckpointError(f"{path}: damaged: no {', '.join(sorted(missing))}")
    reports = store.read_report(folder / store.REPORT)
    ties = {str(k): str(v) for k, v in record["ties"].items()}
    restored = {}
    for settings in record["layers"]:
        check_settings(settings, str(path))
        name = str(settings["name"])
        if name not in layers:
            raise CheckpointError(f"{folder}: layer {name!r} is in {RECORD} and not in the tensors")
        layer = restore(layers[name], settings, str(folder))
        restored[name] = dataclasses.replace(layer, report=reports.get(name, {}))
    for name in set(layers) - set(restored):
        if ties.get(name) not in restored or not layers[name].same_as(layers[ties[name]]):
            raise CheckpointError(
                f"{folder}: layer {name!r} is quantized and not in {RECORD}, nor tied to one that is"
            )
    if record["config"] is not None:
        side = {hf_folder.CONFIG: str(record["config"]).encode(), **side}
    return Checkpoint(restored, dense, ties, dict(record["settings"]), side)


def write_as(
    out: str | Path, checkpoint: Checkpoint, form: str, *, ragged: Ragged | None = None, check: bool = True
) -> Written:
    """Write a checkpoint in a format, read it back and compare.

    Parameters
    ----------
    out : path
        New folder; whole or not there.
    checkpoint : Checkpoint
        What to write.
    form : str
        "native" or a name in `FORMATS`.
    ragged : {"keep", "split", "pad"}, optional
        What to do with a last group that is shorter than the others; asked for where there is one.
    check : bool
        Read the folder back and compare every number.

    Raises
    ------
    CheckpointError
        The format cannot hold the checkpoint exactly: the message names the layer, the reason and what can
        be done; or what was read back differs.
    """
    out = Path(out)
    before = sum(layer.n_bytes for layer in checkpoint.layers.values())
    if form == NATIVE:
        store.write(out, checkpoint)
        written = Written(out, form, before, before, {}, 0)
    else:
        written = _write_foreign(out, checkpoint, FORMATS.get(form), ragged, before)
    return dataclasses.replace(written, checked=compare(out, checkpoint)) if check else written


def compare(folder: Path, checkpoint: Checkpoint) -> int:
    """Read a folder back and compare codes, scales, zero points and dense tensors, bit for bit.

    Returns
    -------
    int
        Layers that were compared.

    Raises
    ------
    CheckpointError
        Anything differs.
    """
    again = read_any(folder)
    for name, layer in checkpoint.layers.items():
        if name not in again.layers or not layer.same_as(again.layers[name]):
            raise CheckpointError(f"{folder}: layer {name} reads back differently from what was written")
    for name, tensor in checkpoint.dense.items():
        found = again.dense.get(name)
        same = found is not None and (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        if found is None or not same or found.data.tobytes() != tensor.data.tobytes():
            raise CheckpointError(f"{folder}: tensor {name} reads back differently from what was written")
    return len(checkpoint.layers)


def refuse_transformed(names: list[str], form: Format) -> None:
    """Refuse layers whose codes are for a transformed input: no other format than loopq's own holds the transform."""
    if names:
        raise CheckpointError(
            f"layer {names[0]}: its codes are for a transformed input ({len(names)} such layers), which {form.name} "
            "cannot hold; quantize without rotation and without awq, or keep loopq's own format"
        )


def _write_foreign(
    out: Path, checkpoint: Checkpoint, form: Format, ragged: Ragged | None, before: int
) -> Written:
    if not checkpoint.layers:
        raise ConfigError("nothing to export: the checkpoint has no quantized layer")
    refuse_transformed([n for n, layer in checkpoint.layers.items() if layer.transform is not None], form)
    fitted = {name: form.fit(layer, ragged) for name, layer in checkpoint.layers.items()}
    if form.one_group_size:
        fitted = even_out(checkpoint.layers, fitted)
    owners = _owners(checkpoint)
    tensors: dict[str, RawTensor] = {}
    layers = {}
    for name, fit in fitted.items():
        for module in owners[name]:
            tensors.update(form.tensors(module, fit.layer))
            layers[module] = fit.layer
    stored = sum(t.data.size for n, t in tensors.items() if not n.endswith("weight_shape"))
    clash = sorted(set(tensors) & set(checkpoint.dense))
    if clash:
        raise CheckpointError(
            f"tensor {clash[0]!r} of the model has a name that {form.name} gives to its own"
        )
    tensors.update(checkpoint.dense)
    original = checkpoint.side_files.get(hf_folder.CONFIG)
    whole = Export(layers, _dense_modules(checkpoint), _facts(checkpoint))
    config = _parse(original) | {hf_folder.KEY: form.config(whole)}
    record = _record(checkpoint, form, ragged, original)
    side = {n: d for n, d in checkpoint.side_files.items() if n != hf_folder.CONFIG}
    texts = {
        RECORD: json.dumps(record, indent=1, sort_keys=True, allow_nan=False) + "\n",
        store.REPORT: store.report_lines(checkpoint.layers.values()),
    }
    with new_folder(out, sum(t.data.size for t in tensors.values())) as folder:
        hf_folder.write_files(folder, tensors, config, side, texts)
    notes = {name: fit.notes for name, fit in fitted.items() if fit.notes}
    copies = {name: modules[1:] for name, modules in owners.items() if len(modules) > 1}
    for name, modules in copies.items():
        notes[name] = (*notes.get(name, ()), f"tied: stored again for {', '.join(modules)}")
    return Written(out, form.name, before, stored, notes, 0, form.remarks(whole))


def _parse(config: bytes | None) -> dict[str, Any]:
    """Read the model's config, without any quantization config that it came with."""
    if config is None:
        return {}
    found = json.loads(config)
    if not isinstance(found, dict):
        raise CheckpointError("config.json of the checkpoint is not a JSON object")
    found.pop(hf_folder.KEY, None)
    return found


def _record(
    checkpoint: Checkpoint, form: Format, ragged: Ragged | None, config: bytes | None
) -> dict[str, Any]:
    return {
        "format": RECORD_FORMAT,
        "version": RECORD_VERSION,
        "loopq_version": _native.__version__,
        "target": form.name,
        "ragged": ragged,
        "settings": checkpoint.settings,
        "layers": [layer.settings() for layer in checkpoint.layers.values()],
        "ties": checkpoint.ties,
        "config": None if config is None else config.decode(),
    }


def _facts(checkpoint: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"quantizer": [f"loopq:{_native.__version__}"]}
    layer = checkpoint.settings.get("quantization", {}).get("layer", {})
    method = layer.get("method")
    # Version 1 of the native checkpoint had flat settings.
    damping = method.get("damping", {}).get("fraction") if isinstance(method, dict) else layer.get("damping")
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
    dense = checkpoint.dense
    names = {n for n, t in dense.items() if n.endswith(".weight") and len(t.shape) == 2}
    names |= {
        tied for tied, source in checkpoint.ties.items() if source in names and tied.endswith(".weight")
    }
    return tuple(sorted(n.removesuffix(".weight") for n in names))


def convert(source: str | Path, out: str | Path, form: str, *, ragged: Ragged | None = None) -> Written:
    """Rewrite a checkpoint in another format; see `write_as`."""
    return write_as(out, read_any(source), form, ragged=ragged)


def inspect_any(folder: str | Path) -> dict[str, Any]:
    """Say what a checkpoint is.

    Returns
    -------
    dict
        `format`, `n_bytes`, `layers` (name, shape, bits, group_size, symmetric, scale_dtype, n_bytes, bits a
        weight), `dense` (name, dtype, shape), `ties`, `settings`, and of other tools' formats the
        `quantization_config`, `n_bytes_files` (the safetensors files, with padding and cut groups), and of an
        export of loopq its version (`exported_by_loopq`) and its policy for ragged groups (`ragged`), else None.
        Layers are those that loopq solved, without what the format added.
    """
    folder = Path(folder)
    form = format_of(folder)
    checkpoint = read_any(folder)
    found: dict[str, Any] = {
        "format": form,
        "n_bytes": checkpoint.n_bytes,
        "layers": [_describe(layer) for layer in checkpoint.layers.values()],
        "dense": [{"name": n, "dtype": t.dtype, "shape": list(t.shape)} for n, t in checkpoint.dense.items()],
        "ties": checkpoint.ties,
        "settings": checkpoint.settings,
    }
    if form != NATIVE:
        found["quantization_config"] = hf_folder.read_config(folder)[1]
        record = read_json(folder / RECORD) if (folder / RECORD).is_file() else None
        found["exported_by_loopq"] = record["loopq_version"] if record else None
        found["ragged"] = record["ragged"] if record else None
        found["n_bytes_files"] = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return found


def _describe(layer: QuantizedLayer) -> dict[str, Any]:
    return layer.settings() | {
        "n_bytes": layer.n_bytes,
        "bits_per_weight": 8 * layer.n_bytes / layer.codes.size,
    }
