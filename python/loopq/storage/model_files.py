"""A model's tensors and side files as plain bytes, every tied tensor once."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.errors import CheckpointError, LoopqError
from loopq.lazy import require
from loopq.storage.files import (
    DTYPE_NAMES,
    DTYPES,
    RawTensor,
    inside,
    replacing,
    sha256,
    write_tensors,
)
from loopq.storage.names import names_of
from loopq.storage.schema import Count, Name, Sha256, checked

if TYPE_CHECKING:
    from torch import Tensor, nn

TENSORS = "model.safetensors"
#: Attribute of a model that computes in another type than its checkpoint holds: type of each such tensor.
HELD_AS = "_loopq_held_as"


@dataclass(frozen=True)
class FileEntry:
    """What an index says of a file."""

    file: Name
    sha256: Sha256
    n_bytes: Count


def raw(tensor: Tensor, copy: bool = True) -> RawTensor:
    """Give a torch tensor as bytes; without a copy, its own, where it lies on the processor in row-major order.

    Raises
    ------
    CheckpointError
        A storage type that safetensors files of loopq do not hold.
    """
    torch = require("torch")
    name = DTYPE_NAMES.get(str(tensor.dtype).removeprefix("torch."))
    if name is None:
        raise CheckpointError(f"tensors of {tensor.dtype} cannot be stored")
    host = tensor.detach().to("cpu").contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.zeros(0, np.uint8)
    if copy:
        return RawTensor(name, tuple(tensor.shape), np.array(data))
    data.flags.writeable = False
    return RawTensor(name, tuple(tensor.shape), data)


def to_torch(tensor: RawTensor) -> Tensor:
    """Copy bytes to a torch tensor on the CPU."""
    torch = require("torch")
    out: Tensor = torch.empty(tensor.shape, dtype=getattr(torch, DTYPES[tensor.dtype]))
    if out.numel():
        out.view(-1).view(torch.uint8).numpy()[:] = tensor.data
    return out


_SOURCE = "loopq_stream"


def set_source(model: nn.Module, tensors: Mapping[str, RawTensor]) -> None:
    """Let `model_tensors` read a model's tensors there, since its parameters have no values but while they are used."""
    vars(model)[_SOURCE] = tensors


def source_of(model: nn.Module) -> Mapping[str, RawTensor] | None:
    """Where `model_tensors` reads a model's tensors, if `set_source` has said."""
    found: Mapping[str, RawTensor] | None = vars(model).get(_SOURCE)
    return found


def is_streamed(model: nn.Module) -> bool:
    """Whether parameters of a model have no values but while they are used."""
    return _SOURCE in vars(model)


def stored_state(model: nn.Module) -> Mapping[str, Tensor]:
    """Return a model's tensors under the names, and in the layout, that its files have."""
    return names_of(model).stored(model, model.state_dict(keep_vars=True))


def model_tensors(model: nn.Module) -> tuple[Mapping[str, RawTensor], dict[str, str]]:
    """Read every tensor of a model's state once, by the first name that holds it; further names go to that name.

    The bytes are the model's own: they change when it is written to (`loopq.models.replace` does not).
    """
    if is_streamed(model):
        return vars(model)[_SOURCE], {}
    tensors: dict[str, RawTensor] = {}
    ties: dict[str, str] = {}
    first: dict[int, str] = {}
    held = getattr(model, HELD_AS, {})
    for name, tensor in stored_state(model).items():
        source = first.setdefault(id(tensor), name)
        if source == name:
            tensors[name] = raw(tensor.detach().to(held.get(name, tensor.dtype)), copy=False)
        else:
            ties[name] = source
    return tensors, ties


def write_files(
    folder: Path,
    tensors: Mapping[str, RawTensor],
    files: Mapping[str, bytes],
    metadata: Mapping[str, str] | None = None,
    values: Callable[[str], RawTensor] | None = None,
) -> list[FileEntry]:
    """Write `model.safetensors`, as of `write_tensors`, and other files; return an entry for each, sorted by name.

    Raises
    ------
    CheckpointError
        A name that is no plain file name: nothing is written then.
    """
    checked(dict[Name, Any], dict.fromkeys(files), folder)
    if TENSORS in files:
        raise CheckpointError(f"{folder}: {TENSORS} among the config and tokenizer files")
    entries = [FileEntry(name, hashlib.sha256(data).hexdigest(), len(data)) for name, data in files.items()]
    for name, data in files.items():
        with replacing(folder / name) as temporary:
            temporary.write_bytes(data)
    digest = write_tensors(folder / TENSORS, tensors, metadata, values)
    entries.append(FileEntry(TENSORS, digest, (folder / TENSORS).stat().st_size))
    return sorted(entries, key=lambda entry: entry.file)


def check_files(
    folder: Path,
    entries: Sequence[FileEntry],
    error: type[LoopqError] = CheckpointError,
    *,
    within: str = ".",
) -> None:
    """Check that files are there, whole and unaltered: those of `folder`, or of the folder `within` it.

    Raises
    ------
    LoopqError
        Of the class given, naming the file: missing, no plain file, outside, of another size or of another SHA-256.
    """
    for entry in entries:
        path = inside(folder, f"{within}/{entry.file}", error)
        size = path.stat().st_size
        if size != entry.n_bytes:
            raise error(f"{path}: truncated or altered: {size} bytes instead of {entry.n_bytes}")
        if sha256(path) != entry.sha256:
            raise error(f"{path}: altered: its SHA-256 is not the one that was written down")
