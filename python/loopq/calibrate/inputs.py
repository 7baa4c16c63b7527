"""The inputs of a run: the parts of its key, and which of them changed since an interruption."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from loopq.errors import LoopqError
from loopq.models.depths import Depths
from loopq.storage.files import read_json, write_json
from loopq.storage.folders import INPUTS
from loopq.storage.journal import fingerprint, ran, versions
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import nn


def model_inputs(system: LoopedSystem, side_files: Mapping[str, bytes]) -> dict[str, str]:
    """Return a digest of each input that describes the model, without its weights.

    Parameters
    ----------
    system : LoopedSystem
        The model's adapter.
    side_files : mapping of str to bytes
        Config, tokenizer and code beside the weights.

    Returns
    -------
    dict of str to str
        By name: side files, versions of libraries, Python files with the code of the model and adapter, Python files
        that the user gave and what these import, the configuration and the modules.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in side_files.items()}
    digests |= {f"the version of {name}": version for name, version in versions().items()}
    files = {*_code(system.model, system), *(path for given in ran() for path in _imported(given))}
    for name in sorted({path.name for path in files}):
        # Without their folders, because published code is copied to another one with each version.
        same = sorted(hashlib.sha256(_read(path)).hexdigest() for path in files if path.name == name)
        digests[f"the code {name}"] = fingerprint(same)
    config: Any = getattr(system.model, "config", None)
    plain = config.to_dict() if hasattr(config, "to_dict") else {}
    plain.pop("_name_or_path", None)
    digests["the model's configuration"] = fingerprint(_without_addresses(json.dumps(plain, default=repr)))
    digests["the model's modules"] = fingerprint(_without_addresses(repr(system.model)))
    depths = list(system.depths) if isinstance(system, Depths) else None
    digests["the adapter"] = fingerprint(system.name, depths, system.device.type)
    return digests


def changed_inputs(work: Path, inputs: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs that differ from the last run in a work folder, and save the new ones.

    Parameters
    ----------
    work : Path
        Work folder of the run.
    inputs : mapping of str to str
        Digest of each input, as in `model_inputs`.
    """
    path = work / INPUTS
    try:
        before: Any = read_json(path) if path.is_file() else None
    except LoopqError:
        # Its pieces have keys of their own, so a damaged list changes only what is said.
        before = None
    # Other processes remove the folder when they finish, and it must not reappear.
    if before != dict(inputs) and work.is_dir():
        write_json(path, dict(inputs))
    if not isinstance(before, dict):
        return []
    return sorted(name for name in {*before, *inputs} if before.get(name) != inputs.get(name))


def _code(model: nn.Module, system: LoopedSystem) -> Iterator[Path]:
    """Files with the code of the classes. Functions know theirs, also where no module is registered for the file."""
    kinds = {kind for part in (*model.modules(), system) for kind in type(part).__mro__}
    names = {
        value.__code__.co_filename
        for kind in kinds
        for value in vars(kind).values()
        # One from another module was put there from outside.
        if isinstance(value, FunctionType) and value.__module__ == kind.__module__
    }
    return (path for path in map(Path, names) if path.is_file())


def _imported(file: Path) -> set[Path]:
    """Return the file, and those beside it that it imports."""
    finder = ModuleFinder([str(file.resolve().parent)])
    try:
        finder.run_script(str(file))
    except (OSError, SyntaxError):
        # Changed meanwhile. Its own bytes count.
        return {file}
    return {file, *(Path(m.__file__) for m in finder.modules.values() if m.__file__)}  # type: ignore[attr-defined]


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.is_file() else b""


def _without_addresses(text: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "", text)
