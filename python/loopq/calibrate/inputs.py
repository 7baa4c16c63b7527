"""The inputs of a run: the parts of its key, and which of them changed since an interruption."""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterator, Mapping
from modulefinder import ModuleFinder
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

from loopq.errors import LoopqError
from loopq.models.depths import Depths
from loopq.storage.files import read_json, write_json
from loopq.storage.folders import INPUTS
from loopq.storage.journal import digest_of, ran, versions
from loopq.storage.model_files import raw
from loopq.systems.base import LoopedSystem

if TYPE_CHECKING:
    from torch import Tensor, nn

OUTPUT, _CONFIG, _MODULES = "the model's output", "the model's configuration", "the model's modules"


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
        By name: side files, versions of libraries and their code, the processor's instruction set, Python files with
        the code of the model and adapter, Python files that the user gave and what these import, the configuration and
        the modules.
    """
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in side_files.items()}
    digests |= {f"the version of {name}": version for name, version in versions().items()}
    files = {*_code(system.model, system), *(path for given in ran() for path in _imported(given))}
    named: dict[str, list[str]] = {}
    for path in files:
        # Without its folder, because published code is copied to another one with each version.
        named.setdefault(_library(path) or path.name, []).append(hashlib.sha256(_read(path)).hexdigest())
    digests |= {f"the code {name}": digest_of(sorted(same)) for name, same in named.items()}
    config: Any = getattr(system.model, "config", None)
    plain = config.to_dict() if hasattr(config, "to_dict") else {}
    for key in ("_name_or_path", "transformers_version"):
        plain.pop(key, None)
    digests[_CONFIG] = digest_of(_without_addresses(json.dumps(plain, default=repr)))
    digests[_MODULES] = digest_of(_without_addresses(repr(system.model)))
    depths = list(system.depths) if isinstance(system, Depths) else None
    digests["the adapter"] = digest_of(system.name, depths)
    digests["the processor"] = _processor(system)
    return digests


def output_digest(output: Tensor) -> str:
    """Return a digest of what a rollout gave.

    It sees attributes, hooks and buffers that are not saved, and what a Python file of the user reads.

    Notes
    -----
    On an accelerator, the sums of some kernels have another order each time. There the digest is of the sizes of eight
    parts, to two digits.
    """
    if output.device.type == "cpu":
        return hashlib.sha256(raw(output, copy=False).data.data).hexdigest()
    parts = output.detach().float().flatten().tensor_split(8)
    return digest_of([f"{float(part.square().mean().sqrt()):.1e}" for part in parts])


def _processor(system: LoopedSystem) -> str:
    """Return what decides the order of the sums in torch: the instruction set, or the GPU's name."""
    import torch  # lazy: loopq imports without torch

    kind = system.device.type
    if kind == "cuda":
        return str(torch.cuda.get_device_name(system.device))
    return f"{kind} {torch.backends.cpu.get_cpu_capability()}"


def _library(path: Path) -> str:
    """Return the library with a file, of those whose version is an input; "" for other files."""
    owners = {name: getattr(sys.modules.get(name), "__file__", None) for name in versions()}
    return next((name for name, file in owners.items() if file and Path(file).parent in path.parents), "")


def changed_inputs(work: Path, inputs: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs that differ from the last run in a work folder, and save the new ones.

    A consequence of another change is not named: the code of a library with another version, and a model's
    configuration, modules and output.

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
    return differing(before, inputs) if isinstance(before, dict) else []


def differing(before: Mapping[str, str], inputs: Mapping[str, str]) -> list[str]:
    """Return the names of the inputs that differ, without the consequences of another one (`changed_inputs`)."""
    changed = {name for name in {*before, *inputs} if before.get(name) != inputs.get(name)}
    code = {f"the code {name}" for name in versions() if f"the version of {name}" in changed}
    return (
        sorted(changed - code - {OUTPUT, _CONFIG, _MODULES}) or sorted(changed - {OUTPUT}) or sorted(changed)
    )


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
