"""Quantized folders of other tools: config.json with a `quantization_config`, and safetensors of transformers.

A format of this kind defines how to store and read a layer. This module writes and reads the folder. A record turns an
export of loopq back into the native checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from loopq import _native
from loopq.errors import CheckpointError, ConfigError
from loopq.formats import hf_folder
from loopq.formats import native as store
from loopq.formats.arrangement import Arrangement, arranged
from loopq.formats.base import (
    Check,
    Format,
    FormatOptions,
    Option,
    Planned,
    WrittenLayers,
    refuse_own,
    write_folder,
)
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.fitting import RAGGED, Ragged, StoredLayer, costs, cut_alike, is_ragged, restore
from loopq.formats.float_codes import plain
from loopq.formats.folder_lines import folder_lines
from loopq.formats.fused import joined_layers, published_parts, taken_apart
from loopq.formats.layouts import layout_of
from loopq.formats.record import (
    RECORD,
    Export,
    Record,
    config_of,
    float_type,
    modules_of,
    read_record,
    write_sealed,
)
from loopq.layers.grids import without_kind
from loopq.layers.layer import QuantizedLayer
from loopq.layers.reader import TensorReader
from loopq.storage.files import RawTensor
from loopq.storage.schema import Name, Object, checked, parse_json, shown
from loopq.storage.weights import kernel_of


@dataclass(frozen=True)
class FolderOptions(FormatOptions):
    """`ragged` is the policy for a last group shorter than the others (`QuantizedFolder.ragged`)."""

    ragged: Ragged | None = None


_DEFAULTS = FolderOptions()


class QuantizedFolder(Format):
    """A format of another tool with a transformers folder.

    Attributes
    ----------
    ragged : tuple of {"keep", "split"}
        Policies for a last group shorter than the others: stored unchanged ("keep"), or cut into smaller groups with
        the same scale ("split").
    reason : str
        Why the other policy is not possible.
    one_group_size : bool
        Some readers support one group size per file. Splitting one layer then splits all layers of its group size.
    has_floats : bool
        Folders of other tools may hold codes of `loopq.formats.float_codes`.
    """

    options: ClassVar[tuple[Option, ...]] = (
        Option(
            "ragged",
            "what is done with a last group that is shorter than the others: kept, or all groups cut to a width that "
            "divides",
            choices=RAGGED,
        ),
        Option(
            "remote_code",
            "of a looped: model: put a file with the loop into the folder, which transformers runs with "
            "trust_remote_code=True",
            flag=True,
        ),
        Option(
            "names",
            "names of the published files, where transformers splits their matrices: vLLM and SGLang read HRM-Text so",
            choices=("published",),
        ),
    )
    values: ClassVar[type[FormatOptions]] = FolderOptions
    ragged: ClassVar[tuple[Ragged, ...]]
    reason: ClassVar[str] = ""
    one_group_size: ClassVar[bool] = False
    has_floats: ClassVar[bool] = False

    @abstractmethod
    def describes(self, config: Mapping[str, Any]) -> bool:
        """Whether a `quantization_config` has this format."""

    @abstractmethod
    def prepare(self, layer: QuantizedLayer, ragged: Ragged | None) -> StoredLayer:
        """Bring a layer into the format's shape without changing a number.

        Raises
        ------
        CheckpointError
            If the format cannot hold the layer. The message gives the reason and a suitable format.
        """

    @abstractmethod
    def tensors(self, module: str, layer: QuantizedLayer) -> dict[str, RawTensor]:
        """Return the stored tensors of a prepared layer."""

    @abstractmethod
    def config(self, export: Export) -> dict[str, Any]:
        """Return the `quantization_config`."""

    def more_files(self, quantization: Mapping[str, Any]) -> dict[str, bytes]:
        """Return files that readers expect beside config.json. Most formats have none."""
        return {}

    def remarks(self, export: Export) -> tuple[str, ...]:
        """Known problems of the format's readers with such a file, in sentences. Empty if there are none."""
        return ()

    @abstractmethod
    def modules(self, names: Sequence[str]) -> list[str]:
        """Return the quantized modules, found by the tensor names of a file."""

    @abstractmethod
    def read_layer(self, module: str, reader: TensorReader, config: Mapping[str, Any]) -> QuantizedLayer:
        """Read one layer."""

    def plain(self, tensors: Mapping[str, RawTensor], path: Path) -> Mapping[str, RawTensor]:
        """Return tensors, with weights outside loopq's grids as plain numbers. The same object without any."""
        if not self.has_floats or (path / RECORD).exists():
            return tensors
        dense = plain(tensors, path)
        return tensors if dense.keys() == tensors.keys() else dense

    def holds(self, path: Path) -> bool:
        """Whether the folder's config.json names this format."""
        if (path / store.INDEX).is_file() or not (path / hf_folder.CONFIG).is_file():
            return False
        quantization = hf_folder.read_config(path)[1]
        return quantization is not None and self.describes(quantization)

    def choose(self, layer: QuantizedLayer, ragged: Ragged | None) -> Ragged | None:
        """Return the policy for a layer. None if it needs none.

        Raises
        ------
        CheckpointError
            If the layer is ragged and no policy was chosen, or the format does not support the chosen one.
        """
        if not is_ragged(layer):
            return None
        columns = layer.shape[1]
        last = columns % layer.grid.group_size
        what = (
            f"layer {layer.name}: the last of its groups has {last} of {layer.grid.group_size} columns "
            f"(in_features {columns})"
        )
        if ragged is None:
            raise CheckpointError(f"{what}; choose what to do with it: {costs(layer, self.ragged)}")
        if ragged not in self.ragged:
            raise CheckpointError(
                f"{what}; {self.name} cannot {ragged} it: {self.reason}; it can: {costs(layer, self.ragged)}"
            )
        return ragged

    def prepare_all(
        self, layers: Mapping[str, QuantizedLayer], ragged: Ragged | None
    ) -> dict[str, StoredLayer]:
        """Bring the layers of a checkpoint into the format's shape.

        If a format has one group size per file, the groups of all layers with the same size are cut alike.
        """
        whole = layers.items()
        refuse_own(
            self,
            [layer for _, layer in whole],
            [name for name, layer in whole if layer.transform is not None],
            [name for name, layer in whole if kernel_of(layer.orientation)],
        )
        stored = {name: self.prepare(layer, ragged) for name, layer in whole}
        return cut_alike(layers, stored) if self.one_group_size else stored

    def stored(
        self, layers: Mapping[str, QuantizedLayer], options: FolderOptions = _DEFAULTS
    ) -> Mapping[str, QuantizedLayer]:
        """Return layers in the form that the format stores."""
        return {name: prepared.layer for name, prepared in self.prepare_all(layers, options.ragged).items()}

    def refuse(self, planned: Planned, options: FolderOptions = _DEFAULTS) -> None:
        """Reject grids, groups and layers that the format cannot hold, and code of a loop for a model without one.

        Limits on the values of scales (float16 for GPTQ) are only checked after the run.
        """
        super().refuse(planned)
        hf_folder.looped_files(planned.side_files, options.remote_code)
        stored = self.prepare_all({layer.name: layer for layer in planned.layers}, options.ragged)
        if options.names is not None:
            parts = published_parts(config_of(planned.side_files))
            joined_layers({prepared.layer.module: prepared.layer for prepared in stored.values()}, parts)

    def write(
        self, out: Path, source: Checkpoint, options: FolderOptions = _DEFAULTS, *, also: Check | None = None
    ) -> WrittenLayers:
        """Write the folder. The record holds `forced`, and what undoes the export."""
        files = hf_folder.looped_files(source.side_files, options.remote_code)
        source, config = dataclasses.replace(source, side_files=files), config_of(files)
        if not source.layers:
            raise ConfigError("nothing to export: the checkpoint has no quantized layer")
        held = arranged(source, partial(self.prepare_all, ragged=options.ragged), config, options.names)
        coded = self._coded(held)
        layout = layout_of(config)
        tensors = dict(layout.stacked({**coded, **held.dense}))
        export = held.export(source, layout)
        more = float_type(config, held.dense) if options.typed else {}
        fill = partial(
            write_sealed,
            tensors=tensors,
            files=self._files(source, self.config(export), more),
            record=self._record(source, options, held.joined),
        )
        write_folder(self, out, source, sum(t.data.size for t in tensors.values()), fill, also)
        before = sum(layer.n_bytes for layer in source.layers.values())
        n_bytes = sum(t.data.size for n, t in coded.items() if not n.endswith("weight_shape"))
        return WrittenLayers(
            out, self.name, before, n_bytes, held.notes, len(source.layers), self.remarks(export)
        )

    def _coded(self, held: Arrangement) -> dict[str, RawTensor]:
        """Tensors of the layers, whose names are none of the model's."""
        coded = {
            n: t for module, layer in held.layers.items() for n, t in self.tensors(module, layer).items()
        }
        clash = sorted(set(coded) & set(held.dense))
        if clash:
            raise CheckpointError(f"tensor {clash[0]!r} of the model has a name that {self.name} uses itself")
        return coded

    def _record(self, source: Checkpoint, options: FolderOptions, joined: list[str]) -> Object:
        """What turns the folder back into the checkpoint."""
        original = source.side_files.get(hf_folder.CONFIG)
        record = {
            "loopq_version": _native.__version__,
            "target": self.name,
            "ragged": options.ragged,
            "settings": source.settings,
            "layers": [without_kind(layer.settings()) for layer in source.layers.values()],
            "ties": source.ties,
            "config": None if original is None else original.decode(),
            "native_sha256": source.digest(),
        }
        return record | {k: v for k, v in (("forced", options.forced), ("joined", joined)) if v}

    def _files(self, source: Checkpoint, quantization: Object, more: Object) -> dict[str, bytes]:
        """Everything but the tensors: config.json in the order of its keys, side files byte for byte."""
        side = {name: data for name, data in source.side_files.items() if name != hf_folder.CONFIG}
        config = config_of(source.side_files) | more | {hf_folder.KEY: quantization}
        files = {
            hf_folder.CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(),
            store.REPORT: store.report_lines(source.layers.values()).encode(),
            **self.more_files(quantization),
        }
        clash = sorted({*files, RECORD, hf_folder.SHARDS} & set(side))
        if clash:
            raise CheckpointError(f"the checkpoint brings a file {clash[0]}, which {self.name} uses itself")
        return side | files

    def verify(self, path: Path, checkpoint: Checkpoint) -> Checkpoint:
        """Compare the folder with a checkpoint. The code of a loop (`remote_code`) is the folder's alone."""
        again = self.read(path)
        coded = hf_folder.LOOP_CODE in again.side_files.keys() - checkpoint.side_files.keys()
        files = hf_folder.looped_files(checkpoint.side_files, coded)
        dataclasses.replace(checkpoint, side_files=files).compare(again, path)
        return again

    def read(self, path: Path) -> Checkpoint:
        """Read a folder from any tool.

        For files that loopq did not export, `settings["system"]` is None. Ties then come from the model itself, and
        there is no run report.
        """
        # Before anything is read from them.
        record = read_record(path) if (path / RECORD).exists() else None
        config, quantization = hf_folder.read_config(path)
        quantization = quantization or {}
        stored = layout_of(config).unstacked(hf_folder.read_all_tensors(path))
        reader = TensorReader(str(path), self.plain(stored, path))
        layers = {}
        for module in self.modules(list(reader.tensors)):
            checked(Name, module, f"{path}: name of a quantized module")
            layer = self.read_layer(module, reader, quantization)
            layers[layer.name] = layer
        if not layers and reader.tensors is stored:
            raise CheckpointError(
                f"{path}: config.json says {self.name}, but no layer has codes; transformers writes plain weights when "
                "it saves such a model again. Give the folder before that, or remove quantization_config from "
                "config.json to have a model in full precision"
            )
        dense = {name: t for name, t in reader.tensors.items() if name not in reader.used}
        side = hf_folder.side_files(
            path, frozenset({RECORD, store.REPORT, hf_folder.CARD, hf_folder.PICTURE})
        )
        if record is not None:
            return self._recorded(path, record, layers, dense, side).check(path)
        text = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
        # Checked as strictly as loopq's own files, because it becomes one of them.
        kept = parse_json(json.dumps(quantization), f"{path / hf_folder.CONFIG}: {hf_folder.KEY}")
        settings = {"system": None, "imported": {"format": self.name, "quantization_config": kept}}
        return Checkpoint(layers, dense, {}, settings, {hf_folder.CONFIG: text.encode(), **side}).check(path)

    def _recorded(
        self,
        folder: Path,
        record: Record,
        layers: dict[str, QuantizedLayer],
        dense: dict[str, RawTensor],
        side: dict[str, bytes],
    ) -> Checkpoint:
        """Undo an export of loopq with the help of its record."""
        if record.target != self.name:
            raise CheckpointError(f"{folder}: config.json says {self.name}, {RECORD} {shown(record.target)}")
        reports = store.read_report(folder / store.REPORT)
        if record.joined:
            config = config_of({hf_folder.CONFIG: (record.config or "{}").encode()})
            layers, dense = taken_apart(layers, dense, record.joined, published_parts(config))
        names = {f"{module}.weight": name for name, module in modules_of(record.settings).items()}
        layers = {
            names.get(n, n): dataclasses.replace(layer, name=names.get(n, n)) for n, layer in layers.items()
        }
        restored = {}
        for settings in record.layers:
            name = settings.name
            if name not in layers:
                raise CheckpointError(f"{folder}: layer {name!r} is in {RECORD} and not in the tensors")
            layer = restore(layers[name], settings, str(folder))
            restored[name] = dataclasses.replace(layer, report=reports.get(name, {}))
        again = {name: stored.layer for name, stored in self.prepare_all(restored, record.ragged).items()}
        for name, layer in layers.items():
            same = again.get(record.ties.get(name, name))
            if same is None:
                raise CheckpointError(f"{folder}: layer {name!r} is not in {RECORD}, nor tied to one that is")
            if layer.grid.group_size != same.grid.group_size or not layer.same_as(same):
                raise CheckpointError(
                    f"{folder}: layer {name!r}: it or {RECORD} was changed after the export"
                )
        if record.config is not None:
            side = {hf_folder.CONFIG: record.config.encode(), **side}
        checkpoint = Checkpoint(restored, dense, record.ties, record.settings, side)
        if record.native_sha256 not in (None, checkpoint.digest()):
            raise CheckpointError(
                f"{folder}: does not give back the checkpoint that was exported: its SHA-256 differs from the one in "
                f"{RECORD}; export again"
            )
        return checkpoint

    def read_settings(self, path: Path) -> Object:
        """Return the settings stored by an export of loopq."""
        if not (path / RECORD).exists():
            raise CheckpointError(f"{path}: loopq did not make it, so the settings are not known")
        return read_record(path).settings

    def facts(self, path: Path) -> dict[str, Any]:
        """Describe the folder: layers as solved, without the format's additions.

        The facts include the `quantization_config` and `n_bytes_files` (the safetensors files, with padding and cut
        groups). An export of loopq adds its version (`exported_by_loopq`) and its policy for ragged groups, else None.
        """
        record = read_record(path) if (path / RECORD).exists() else None
        return {
            "format": self.name,
            **self.read(path).facts(),
            "quantization_config": hf_folder.read_config(path)[1],
            "exported_by_loopq": record.loopq_version if record else None,
            "ragged": record.ragged if record else None,
            "forced": record.forced if record else None,
            "n_bytes_files": sum(file.stat().st_size for file in path.glob("*.safetensors")),
        }

    def describe(self, facts: Mapping[str, Any]) -> list[str]:
        """A table of the layers, sizes, and the writing tool."""
        return folder_lines(facts)
