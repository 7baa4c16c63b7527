"""A model's tensors and side files as plain bytes. Every tied tensor appears once."""

from __future__ import annotations

import hashlib
import re
from collections import ChainMap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.errors import CheckpointError, LoopqError, require
from loopq.storage.files import DTYPE_NAMES, DTYPES, RawTensor, inside, replacing, sha256, write_tensors
from loopq.storage.names import names_of
from loopq.storage.schema import Count, Place, Sha256, checked

if TYPE_CHECKING:
    from torch import Tensor, nn

TENSORS = "model.safetensors"
#: Attribute of a model: `types_of` its files. It may compute in wider types.
HELD_AS = "_loopq_held_as"
_NARROW = ("F16", "BF16")


@dataclass(frozen=True)
class FileEntry:
    """A file's entry in an index."""

    file: Place
    sha256: Sha256
    n_bytes: Count


def raw(tensor: Tensor, copy: bool = True) -> RawTensor:
    """Return a torch tensor as bytes. Without `copy` they share its memory if it is on the CPU in row-major order.

    Raises
    ------
    CheckpointError
        loopq's safetensors files do not support this storage type.
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


def types_of(tensors: Mapping[str, RawTensor]) -> dict[str, str]:
    """Types of the tensors in a model's files. "" has that of tensors with other names, if one 16-bit type occurs."""
    types = {name: tensor.dtype for name, tensor in tensors.items()}
    narrow = {*types.values()} & {*_NARROW}
    return types | ({"": narrow.pop()} if len(narrow) == 1 else {})


def narrowed(name: str, tensor: Tensor, types: Mapping[str, str]) -> Tensor:
    """Return a float32 tensor in the 16-bit type of its file if this changes no value. Others stay as they are."""
    torch, kind = require("torch"), types.get(name, types.get("", ""))
    if kind not in _NARROW or tensor.dtype != torch.float32:
        return tensor
    small = tensor.to(getattr(torch, DTYPES[kind]))
    return small if small.float().equal(tensor) else tensor


_SOURCE = "loopq_stream"


def set_source(model: nn.Module, tensors: Mapping[str, RawTensor]) -> None:
    """Let `model_tensors` read a model's tensors from here. Its parameters have values only during use."""
    vars(model)[_SOURCE] = tensors


def source_of(model: nn.Module) -> Mapping[str, RawTensor] | None:
    """Return the source of a model's tensors from `set_source`, if any."""
    source: Mapping[str, RawTensor] | None = vars(model).get(_SOURCE)
    return source


def is_streamed(model: nn.Module) -> bool:
    """Whether the parameters of a model have values only during use."""
    return _SOURCE in vars(model)


_BESIDE = "loopq_beside"


def set_beside(model: nn.Module, tensors: Mapping[str, RawTensor]) -> None:
    """Let `model_tensors` give tensors of a model's files that its class passes over, such as draft heads."""
    vars(model)[_BESIDE] = dict(tensors)


def beside(model: nn.Module) -> Mapping[str, RawTensor]:
    """Return the tensors of `set_beside`."""
    tensors: Mapping[str, RawTensor] = vars(model).get(_BESIDE, {})
    return tensors


def passed_over(model: nn.Module, names: Iterable[str]) -> set[str]:
    """Return names of tensors in files that a class of transformers knows and does not read."""
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    return {name for name in names if any(re.search(pattern, name) for pattern in patterns)}


def check_ties(state: Mapping[str, Any], tensors: Mapping[str, RawTensor], where: object) -> None:
    """Reject different values for one parameter: the model would have those that come last.

    Parameters
    ----------
    state : mapping of str to Tensor
        Parameters and buffers of a model. A tied one has several names.
    tensors : mapping of str to RawTensor
        Their values by name.

    Raises
    ------
    CheckpointError
        A tied parameter has different values.
    """
    first: dict[int, str] = {}
    for name in filter(state.__contains__, tensors):
        other = first.setdefault(id(state[name]), name)
        one, two = tensors[other], tensors[name]
        if (one.dtype, one.shape) != (two.dtype, two.shape) or not np.array_equal(one.data, two.data):
            raise CheckpointError(
                f"{where}: {other} and {name} have different values, and with config.json they are one parameter; if "
                'the files are right, write "tie_word_embeddings": false into config.json'
            )


def stored_state(model: nn.Module) -> Mapping[str, Tensor]:
    """Return a model's tensors with the names and layout of its files."""
    return names_of(model).stored(model, model.state_dict(keep_vars=True))


def model_tensors(model: nn.Module) -> tuple[Mapping[str, RawTensor], dict[str, str]]:
    """Read every tensor of a model's state once, under its first name. Further names refer to that name.

    A tensor that was widened to float32 when it was loaded has the type of its file (`narrowed`). The bytes are the
    model's own and change when it is modified (`loopq.models.replace` does not modify it). Those of `beside` follow.
    """
    tensors, ties = _own_tensors(model)
    more = beside(model)
    # A chain looks up only, so read-only mappings do.
    return ChainMap(tensors, more) if more else tensors, ties  # type: ignore[arg-type]


def _own_tensors(model: nn.Module) -> tuple[Mapping[str, RawTensor], dict[str, str]]:
    """Read the tensors of `model_tensors` that the model has."""
    if is_streamed(model):
        return vars(model)[_SOURCE], {}
    tensors: dict[str, Tensor] = {}
    ties: dict[str, str] = {}
    held: dict[str, str] = dict(getattr(model, HELD_AS, {}))
    first: dict[int, str] = {}
    for name, tensor in stored_state(model).items():
        source = first.setdefault(id(tensor), name)
        if source == name:
            tensors[name] = tensor.detach()
            # A type that files do not hold is an error here, not at the first access.
            raw(tensor[:0] if tensor.ndim else tensor)
        else:
            ties[name] = source
            # A file may store a tied tensor under another of its names.
            held |= {source: held[name]} if name in held and source not in held else {}
    return _State(tensors, held), ties


class _State(Mapping[str, RawTensor]):
    """Tensors of a model's state, converted to their stored types on access. All at once would be a second model."""

    def __init__(self, tensors: Mapping[str, Tensor], held: Mapping[str, str]) -> None:
        self._tensors, self._held = tensors, held

    def __getitem__(self, name: str) -> RawTensor:
        return raw(narrowed(name, self._tensors[name], self._held), copy=False)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def write_files(
    folder: Path,
    tensors: Mapping[str, RawTensor],
    files: Mapping[str, bytes],
    metadata: Mapping[str, str] | None = None,
    values: Callable[[str], RawTensor] | None = None,
) -> list[FileEntry]:
    """Write `model.safetensors`, as `write_tensors` does, and other files. Return an entry for each, sorted by name.

    Raises
    ------
    CheckpointError
        A name is not a plain file name. Nothing is written then.
    """
    checked(dict[Place, Any], dict.fromkeys(files), folder)
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
    """Check that files of `folder`, or of the folder `within` it, exist and are unchanged.

    Raises
    ------
    LoopqError
        Error of the given class with the file's name. The file is missing, special, outside, or differs in size or
        SHA-256.
    """
    for entry in entries:
        path = inside(folder, f"{within}/{entry.file}", error)
        size = path.stat().st_size
        if size != entry.n_bytes:
            raise error(
                f"{path}: truncated or altered: {size} bytes instead of {entry.n_bytes}; copy it again"
            )
        if sha256(path) != entry.sha256:
            raise error(f"{path}: altered: its SHA-256 is not the one that was written down; copy it again")
