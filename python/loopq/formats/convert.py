"""Find the format of a checkpoint on the disk, read it, and write it in any format, using only the registry."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from loopq.errors import CheckpointError
from loopq.formats import FORMATS, hf_folder
from loopq.formats import native as store
from loopq.formats.base import Format, Written
from loopq.formats.checkpoint import Checkpoint
from loopq.formats.record import config_of
from loopq.layers.loop_spec import parse_spec, with_loop
from loopq.storage.folders import check_folder
from loopq.storage.schema import Object, shown


def format_names() -> list[str]:
    """All formats, the native one first."""
    return [name for name, _ in sorted(FORMATS, key=lambda entry: not entry[1].own)]


def format_of(path: str | Path) -> Format:
    """Find the format of a checkpoint on the disk.

    Raises
    ------
    CheckpointError
        If loopq does not know the format. The message names the content instead.
    """
    path = Path(path)
    for _, target in FORMATS:
        if target.holds(path):
            return target
    if not (path / hf_folder.CONFIG).is_file():
        check_folder(path)
        raise CheckpointError(f"{path}: no checkpoint: neither {store.INDEX} nor config.json is there")
    _, quantization = hf_folder.read_config(path)
    if quantization is None:
        raise CheckpointError(f"{path}: a model that is not quantized: config.json has no {hf_folder.KEY}")
    method = quantization.get("quant_method")
    if method == hf_folder.METHOD:
        raise CheckpointError(
            f"{path}: codes of loopq without {store.INDEX}, as transformers saves them again: give the folder that "
            "loopq wrote, or open this one by from_pretrained after `import loopq.runtime.transformers`"
        )
    version = quantization.get("checkpoint_format") or quantization.get("format")
    known = [name for name, target in FORMATS if target.reads and not target.own]
    raise CheckpointError(
        f"{path / hf_folder.CONFIG}: quant_method {shown(method)}, format {shown(version)}: loopq reads "
        f"{', '.join(known)}"
    )


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder holds a quantized checkpoint, readable or not, instead of a model."""
    if (folder / store.INDEX).is_file():
        return True
    return (folder / hf_folder.CONFIG).is_file() and hf_folder.read_config(folder)[1] is not None


def settings_of(path: str | Path) -> Object:
    """Return the settings of the run that made a checkpoint.

    Raises
    ------
    CheckpointError
        If loopq did not make it.
    """
    return format_of(path).read_settings(Path(path))


def read_any(path: str | Path) -> Checkpoint:
    """Read a checkpoint of any format that loopq reads, from any tool.

    Raises
    ------
    CheckpointError
        If the file is damaged or of a kind that loopq does not read. The message names the tensor.
    """
    return format_of(path).read(Path(path))


def read_model(source: str | Path) -> Checkpoint:
    """Read a checkpoint, or an unquantized model as one without quantized layers.

    Parameters
    ----------
    source : path
        Checkpoint of any format that loopq reads, a model's folder, or ``looped:FOLDER[FIRST:LAST]xTIMES``.
    """
    name, loop = parse_spec(str(source))
    folder = Path(name)
    if is_checkpoint(folder) or not (folder / hf_folder.CONFIG).is_file():
        checkpoint = read_any(folder)
    else:
        side_files = hf_folder.side_files(folder, frozenset(), hf_folder.SIDE_FILES)
        side_files[hf_folder.CONFIG] = json.dumps(hf_folder.read_config(folder)[0]).encode()
        dense = hf_folder.read_all_tensors(folder)
        checkpoint = Checkpoint({}, dense, {}, {"system": None}, side_files).check(folder)
    if loop is None:
        return checkpoint
    looped = json.dumps(with_loop(config_of(checkpoint.side_files), loop), indent=2).encode()
    return dataclasses.replace(checkpoint, side_files={**checkpoint.side_files, hf_folder.CONFIG: looped})


def write_as(out: str | Path, checkpoint: Checkpoint, format_name: str, **options: Any) -> Written:
    """Write a checkpoint in one of `FORMATS`.

    It gets its name after it has been read back and compared. Options are those that the format declares.

    Raises
    ------
    CheckpointError
        If the format cannot hold the checkpoint exactly, or the content read back differs. The message names the
        layer, the reason and a remedy.
    ConfigError
        If the format does not read an option, or its source is not a checkpoint.
    """
    target = FORMATS.get(format_name)
    target.refuse_checkpoint()
    return target.write(Path(out), checkpoint, target.taken(options))


def check_readable(path: str | Path) -> None:
    """Reject input that loopq cannot read as a checkpoint, before any work.

    Raises
    ------
    CheckpointError
        As in `format_of`. Also for a format that loopq writes but does not read.
    """
    target = format_of(path)
    if not target.reads:
        target.read(Path(path))


def verify(path: str | Path, checkpoint: Checkpoint) -> Checkpoint | None:
    """Compare the disk's content with a checkpoint. Return it if loopq reads the format.

    Raises
    ------
    CheckpointError
        Anything differs.
    """
    return format_of(path).verify(Path(path), checkpoint)


def inspect_any(path: str | Path) -> dict[str, Any]:
    """Describe the disk's content as plain data. See `Format.facts`."""
    return format_of(path).facts(Path(path))
