"""Files that are whole or not there, and raw safetensors without a framework.

numpy has no bfloat16, so tensors travel as bytes with the dtype name of the safetensors specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import shutil
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopq.errors import CheckpointError, LoopqError

ITEM_SIZE = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
    "U16": 2, "U32": 4, "U64": 8, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2", "I64": "<i8", "I32": "<i4", "I16": "<i2",
    "I8": "i1", "U8": "u1", "BOOL": "?", "U16": "<u2", "U32": "<u4", "U64": "<u8",
}  # fmt: skip
_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "int64": "I64", "int32": "I32", "int16": "I16",
    "int8": "I8", "uint8": "U8", "bool": "BOOL", "uint16": "U16", "uint32": "U32", "uint64": "U64",
}  # fmt: skip
_MAX_HEADER = 100_000_000


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a safetensors file.

    Parameters
    ----------
    dtype : str
        Name of the safetensors specification: "F32", "BF16", ...
    shape : tuple of int
        Shape.
    offset : int
        First byte, counted from the start of the file.
    """

    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def n_bytes(self) -> int:
        """Bytes of the tensor's data."""
        return math.prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class RawTensor:
    """A tensor as bytes: what every storage type has in common.

    Parameters
    ----------
    dtype : str
        Name of the safetensors specification.
    shape : tuple of int
        Shape.
    data : ndarray, uint8, 1-D
        Little-endian bytes in row-major order.
    """

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str | None = None) -> RawTensor:
        """Wrap an array; `dtype="BF16"` says that a uint16 array holds bfloat16 bits."""
        contiguous = np.ascontiguousarray(array)
        return cls(
            dtype or _NAMES[contiguous.dtype.name], tuple(array.shape), contiguous.view(np.uint8).reshape(-1)
        )

    def array(self) -> NDArray[Any]:
        """The values as an array; bfloat16 comes as uint16 bits."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)

    def float32(self) -> NDArray[np.float32]:
        """The values in float32; exact for F32, F16 and BF16."""
        if self.dtype == "BF16":
            return (self.array().astype(np.uint32) << 16).view(np.float32)
        if self.dtype not in ("F32", "F16", "F64"):
            raise CheckpointError(f"expected a floating tensor, got {self.dtype}")
        return np.asarray(self.array(), dtype=np.float32)


def float_to_raw(values: NDArray[np.float32], dtype: str) -> RawTensor:
    """Round float32 values to a storage type, half to even.

    Parameters
    ----------
    values : ndarray, float32
        Values.
    dtype : str
        "F32", "F16" or "BF16".
    """
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return RawTensor.of(rounded.astype(np.uint16), "BF16")
    return RawTensor.of(values.astype({"F32": np.float32, "F16": np.float16}[dtype]))


def read_header(
    path: Path, error: type[LoopqError] = CheckpointError
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Read and check the header of a safetensors file.

    Returns
    -------
    tensors : dict of str to Stored
        Every tensor, with bytes that are known to lie inside the file.
    metadata : dict of str to str
        The `__metadata__` entry.

    Raises
    ------
    LoopqError
        Of the class given: the file is missing, truncated or no safetensors file.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            prefix = file.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 2 <= length <= min(_MAX_HEADER, size - 8):
                raise error(f"{path}: not a safetensors file, or truncated in its header")
            header = json.loads(file.read(length))
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        raise error(f"{path}: the safetensors header is damaged") from cause
    metadata = header.pop("__metadata__", {})
    start = 8 + length
    tensors = {}
    for name, entry in header.items():
        try:
            first, last = entry["data_offsets"]
            stored = Stored(entry["dtype"], tuple(int(n) for n in entry["shape"]), start + int(first))
            n_bytes = stored.n_bytes
        except (KeyError, TypeError, ValueError) as cause:
            raise error(f"{path}: tensor {name!r}: its header entry is damaged") from cause
        if n_bytes != last - first or first < 0:
            raise error(
                f"{path}: tensor {name!r}: {last - first} bytes for shape {list(stored.shape)} {stored.dtype}"
            )
        if start + last > size:
            raise error(f"{path}: truncated: tensor {name!r} ends at byte {start + last}, the file at {size}")
        tensors[name] = stored
    return tensors, metadata


def read_tensor(path: Path, stored: Stored) -> RawTensor:
    """Read one tensor; the header must have been checked by `read_header`."""
    data = np.fromfile(path, dtype=np.uint8, count=stored.n_bytes, offset=stored.offset)
    if data.size != stored.n_bytes:
        raise CheckpointError(f"{path}: shorter than its header says")
    return RawTensor(stored.dtype, stored.shape, data)


def read_tensors(path: Path, error: type[LoopqError] = CheckpointError) -> dict[str, RawTensor]:
    """Read every tensor of a safetensors file."""
    tensors, _ = read_header(path, error)
    return {name: read_tensor(path, stored) for name, stored in tensors.items()}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` and rename it over `path` if the block ends well.

    Readers see the old file or the new one, never a part; an error leaves nothing behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # The rename may reach the disk before the data does unless the data is forced out first.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as cause:
        raise LoopqError(f"{path}: cannot be written ({cause.strerror or cause})") from cause
    finally:
        # Where nothing can be written there is nothing to remove, and the reason is what has to be told.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def check_new(out: Path, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse an output folder that could not be made, before anything is computed for it.

    Parameters
    ----------
    out : Path
        Folder that is to be written; it may exist if it is empty.
    error : type
        Class of the error.

    Raises
    ------
    LoopqError
        Of the class given: something is in the folder, a file stands in its place or above it, or the place cannot
        be written.
    """
    if out.is_dir():
        if any(out.iterdir()):
            raise error(f"{out}: exists and is not empty; choose a new folder")
    elif out.exists() or out.is_symlink():
        raise error(f"{out}: a file stands there; name a new folder")
    for place in (nearest(out.parent), nearest(out)):
        if not place.is_dir():
            raise error(f"{out}: {place} is a file, so that no folder can be made in it")
        if not os.access(place, os.W_OK | os.X_OK):
            raise error(
                f"{out}: {place} cannot be written to (read-only, or another owner's); name another folder"
            )


def check_folder(folder: Path, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse what is to be read and is no folder."""
    if not folder.is_dir():
        raise error(f"{folder}: {'a file, not a folder' if folder.exists() else 'no such folder'}")


@contextlib.contextmanager
def new_folder(out: Path, n_bytes: int, error: type[LoopqError] = CheckpointError) -> Iterator[Path]:
    """Give a temporary folder beside `out`, renamed to it if the block ends well.

    Parameters
    ----------
    out : Path
        Folder that is to be written; it may exist if it is empty.
    n_bytes : int
        What will be written.
    error : type
        Class of the error.

    Raises
    ------
    LoopqError
        Of the class given: `out` cannot be made (`check_new`), or the disk is too small.
    """
    check_new(out, error)
    free = free_bytes(out)
    if n_bytes > free:
        raise error(
            f"{out}: takes {n_bytes / 2**20:.1f} MiB, the disk has {free / 2**20:.1f}; free some space and give the "
            "same command again"
        )
    temporary = out.with_name(f".{out.name}.partial")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except OSError as cause:
        raise error(f"{out}: cannot be written ({cause.strerror or cause})") from cause
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def nearest(path: Path) -> Path:
    """The path, or what is nearest above it, that exists."""
    place = path.resolve()
    while not place.exists():
        place = place.parent
    return place


def write_tensors(
    path: Path, tensors: Mapping[str, RawTensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Write a safetensors file whole.

    Tensors lie in the order of falling item size and then of names, as the safetensors library puts them, so
    that each is aligned. They are written from their own memory, without a copy.

    Returns
    -------
    str
        SHA-256 of the file, in hexadecimal.
    """
    order = sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    end = 0
    for name in order:
        tensor = tensors[name]
        first, end = end, end + tensor.data.size
        header[name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [first, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    total = hashlib.sha256()
    with replacing(path) as temporary, temporary.open("wb") as file:
        parts: list[bytes | memoryview] = [struct.pack("<Q", len(text)) + text]
        parts += [tensors[name].data.data for name in order]
        for part in parts:
            file.write(part)
            total.update(part)
    return total.hexdigest()


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole: sorted keys, one space of indent, a line end at the end."""
    with replacing(path) as temporary:
        temporary.write_text(json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n", "utf-8")


def read_json(path: Path, error: type[LoopqError] = CheckpointError) -> Any:
    """Read JSON; anything wrong is an error of the class given that names the file."""
    try:
        return json.loads(path.read_text("utf-8"))
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    except ValueError as cause:
        raise error(f"{path}: not valid JSON ({cause})") from cause


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Free space on the disk that holds `path` or will."""
    return shutil.disk_usage(nearest(path)).free
