"""A model's tensors and side files as plain bytes, every tied tensor once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.checkpoint.files import RawTensor, read_header, replacing, sha256, write_tensors
from loopq.errors import CheckpointError, LoopqError
from loopq.lazy import require

if TYPE_CHECKING:
    from torch import Tensor, nn

TENSORS = "model.safetensors"
_DTYPES = {
    "torch.float32": "F32", "torch.float16": "F16", "torch.bfloat16": "BF16", "torch.float64": "F64",
    "torch.int64": "I64", "torch.int32": "I32", "torch.int16": "I16", "torch.int8": "I8",
    "torch.uint8": "U8", "torch.bool": "BOOL",
}  # fmt: skip


def raw(tensor: Tensor) -> RawTensor:
    """Copy a torch tensor to bytes.

    Raises
    ------
    CheckpointError
        A storage type that safetensors files of loopq do not hold.
    """
    torch = require("torch")
    name = _DTYPES.get(str(tensor.dtype))
    if name is None:
        raise CheckpointError(f"tensors of {tensor.dtype} cannot be stored")
    host = tensor.detach().to("cpu").contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy() if host.numel() else np.zeros(0, np.uint8)
    return RawTensor(name, tuple(tensor.shape), np.array(data))


def to_torch(tensor: RawTensor) -> Tensor:
    """Copy bytes to a torch tensor on the CPU."""
    torch = require("torch")
    dtype = {v: k for k, v in _DTYPES.items()}[tensor.dtype]
    kind = getattr(torch, dtype.removeprefix("torch."))
    out: Tensor = torch.empty(tensor.shape, dtype=kind)
    if out.numel():
        out.view(-1).view(torch.uint8).copy_(torch.from_numpy(np.array(tensor.data)))
    return out


def model_tensors(model: nn.Module) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """Read every tensor of a model's state once.

    Returns
    -------
    tensors : dict of str to RawTensor
        By the first name that holds the tensor.
    ties : dict of str to str
        Every further name to the first.
    """
    tensors: dict[str, RawTensor] = {}
    ties: dict[str, str] = {}
    first: dict[tuple[int, str], str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        key = (id(tensor), "")
        if key in first:
            ties[name] = first[key]
            continue
        first[key] = name
        tensors[name] = raw(tensor)
    return tensors, ties


def write_model(
    folder: Path, tensors: Mapping[str, RawTensor], side_files: Mapping[str, bytes]
) -> list[dict[str, Any]]:
    """Write tensors and side files; return `{file, sha256, n_bytes}` for each, sorted by name."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for name, data in side_files.items():
        path = folder / name
        with replacing(path) as temporary:
            temporary.write_bytes(data)
        entries.append({"file": name, "sha256": sha256(path), "n_bytes": len(data)})
    digest = write_tensors(folder / TENSORS, tensors)
    entries.append({"file": TENSORS, "sha256": digest, "n_bytes": (folder / TENSORS).stat().st_size})
    return sorted(entries, key=lambda e: str(e["file"]))


def check_files(
    folder: Path, entries: list[dict[str, Any]], error: type[LoopqError], *, deep: bool = True
) -> None:
    """Check that files are there, whole and unaltered.

    Raises
    ------
    LoopqError
        Of the class given, naming the file: missing, of another size, or of another SHA-256 (`deep`).
    """
    for entry in entries:
        path = folder / entry["file"]
        if not path.is_file():
            raise error(f"{path}: missing")
        if path.stat().st_size != entry["n_bytes"]:
            raise error(
                f"{path}: truncated or altered: {path.stat().st_size} bytes instead of {entry['n_bytes']}"
            )
        if deep and sha256(path) != entry["sha256"]:
            raise error(f"{path}: altered: its SHA-256 is not the one in the manifest")
        if path.suffix == ".safetensors":
            read_header(path, error)
