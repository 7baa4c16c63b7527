"""The record of an export: everything that a format of another tool loses, and the checksums of the folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loopq import _native
from loopq.errors import CheckpointError
from loopq.formats import hf_folder
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.fitting import Ragged
from loopq.layers.layer import LayerSettings, QuantizedLayer
from loopq.storage.files import DTYPES, RawTensor, inside, read_json, write_json
from loopq.storage.model_files import FileEntry, check_files, write_files
from loopq.storage.schema import Name, Object, Sha256, checked, parse_json, sealed, unsealed

RECORD = "loopq_export.json"
RECORD_FORMAT = "loopq-export"


@dataclass(frozen=True)
class Export:
    """Everything that a format needs to write its config.

    Layers in the format's form, by module (a tied weight appears under each of its modules). Modules with a matrix
    that stays unchanged. Further facts: version of loopq, damping. `loaded` has the names of modules in transformers'
    class, where it renames them. `groups` as of `FileLayout`.
    """

    layers: Mapping[str, QuantizedLayer]
    dense: tuple[str, ...]
    report: Mapping[str, Any] = field(default_factory=dict)
    loaded: Mapping[str, str] = field(default_factory=dict)
    groups: Mapping[str, Any] = field(default_factory=dict)

    def names(self, modules: Iterable[str]) -> list[str]:
        """Return modules by their names in the file, then by those of transformers' class that differ."""
        modules = list(modules)
        return [*modules, *(self.loaded[name] for name in modules if name in self.loaded)]


@dataclass(frozen=True)
class Record:
    """Content of `loopq_export.json`: everything that a format loses, and the checksums of what it holds.

    `files` lists all other files of the folder. `native_sha256` is the checksum of the checkpoint that was exported
    (`Checkpoint.digest`). Exports before these two entries have neither. `forced` says why no engine reads it right.
    `joined` names the modules under published names, which hold several modules of the model.
    """

    loopq_version: str
    target: str
    ragged: Ragged | None
    settings: Object
    layers: tuple[LayerSettings, ...]
    ties: dict[Name, Name]
    config: str | None
    files: tuple[FileEntry, ...] = ()
    native_sha256: Sha256 | None = None
    forced: str | None = None
    joined: tuple[Name, ...] = ()


def write_sealed(
    folder: Path, *, tensors: Mapping[str, RawTensor], files: Mapping[str, bytes], record: Mapping[str, Any]
) -> None:
    """Write a folder's files, then the record with the checksum of each."""
    entries = write_files(folder, tensors, files, {"format": "pt"})
    write_json(folder / RECORD, sealed(RECORD_FORMAT, {**record, "files": entries}))


def read_record(folder: Path) -> Record:
    """Read the record of an export.

    Raises
    ------
    CheckpointError
        It is damaged, or a file of the folder is not as it was exported. The message names the file.
    """
    data = unsealed(read_json(inside(folder, RECORD)), RECORD_FORMAT, folder / RECORD)
    record = checked(Record, data, folder / RECORD)
    check_files(folder, record.files)
    return record


def modules_of(settings: Object) -> dict[str, str]:
    """Modules of layers that their names in the model's files do not identify."""
    return checked(dict[str, Name], settings.get("modules", {}), "settings: modules")


def owners_of(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """Modules of every quantized layer, including tied ones, which other tools load separately."""
    modules = modules_of(checkpoint.settings)
    for name in checkpoint.layers:
        if not name.endswith(".weight") and name not in modules:
            raise CheckpointError(
                f"layer {name}: its codes are of no linear layer, and other tools take a module's 'weight' alone; "
                "--exclude the layer"
            )
    owners = {name: [modules.get(name, layer.module)] for name, layer in checkpoint.layers.items()}
    for name, source in checkpoint.ties.items():
        if source in owners:
            owners[source].append(name.removesuffix(".weight"))
    return owners


def config_of(side_files: Mapping[str, bytes]) -> dict[str, Any]:
    """The model's config.json. Empty if there is none."""
    config = parse_json(side_files.get(hf_folder.CONFIG, b"{}"), hf_folder.CONFIG, finite=False)
    return checked(Object, config, hf_folder.CONFIG)


def facts_of(checkpoint: Checkpoint) -> dict[str, Any]:
    facts: dict[str, Any] = {"quantizer": [f"loopq:{_native.__version__}"]}
    layer = checkpoint.settings.get("quantization", {}).get("layer", {})
    damping = layer.get("method", {}).get("damping", {}).get("fraction")
    if damping is not None:
        facts["damp_percent"] = damping
    return facts


def dense_modules(dense: Mapping[str, RawTensor], ties: Mapping[str, str]) -> tuple[str, ...]:
    """Every module with an unchanged matrix, including tied ones. A superset of the linear layers."""
    names = {n for n, t in dense.items() if len(t.shape) == 2}
    names |= {tied for tied, source in ties.items() if source in names}
    return tuple(sorted(n.removesuffix(".weight") for n in names if n.endswith(".weight")))


def float_type(config: Mapping[str, Any], dense: Mapping[str, RawTensor]) -> dict[str, str]:
    """Return the "dtype" of a config.json of transformers without one: the type of most bytes that stay unchanged.

    The type "auto" of transformers is that of the scales without it.
    """
    if "architectures" not in config or config.get("dtype") or config.get("torch_dtype"):
        return {}
    kinds = ("float32", "float16", "bfloat16")
    sizes = {k: sum(t.data.size for t in dense.values() if DTYPES[t.dtype] == k) for k in kinds}
    return {"dtype": max(sizes, key=sizes.__getitem__)}
