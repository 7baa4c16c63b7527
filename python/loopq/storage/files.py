"""Files and folders that are complete or absent, and safetensors without a framework.

Numpy has no bfloat16, so tensors are passed as bytes with the dtype name of the safetensors specification.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import platform
import re
import secrets
import shutil
import stat
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from loopq.errors import CheckpointError, LoopqError
from loopq.storage.schema import parse_json, shown

#: Names of the safetensors specification, and of numpy and torch.
DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "U16": "uint16", "U32": "uint32",
    "U64": "uint64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "C64": "complex64",
}  # fmt: skip
DTYPE_NAMES = {known: name for name, known in DTYPES.items()}
_BITS = {"BF16": "uint16", "F8_E4M3": "uint8", "F8_E5M2": "uint8"}  # numpy has no such types
_NUMPY = {name: np.dtype(_BITS.get(name, known)).newbyteorder("<") for name, known in DTYPES.items()}
ITEM_SIZE = {name: kind.itemsize for name, kind in _NUMPY.items()}
#: Maximum bytes of a file that is read completely: JSON, tokenizers, code.
MAX_SIZE = 256 * 2**20
#: This machine, in names of unfinished files.
HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node())[:16]


@dataclass(frozen=True)
class Stored:
    """Place of one tensor in a safetensors file. `offset` is its first byte from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor as little-endian bytes (uint8, 1-D) in row-major order, the common form of all storage types."""

    dtype: str
    shape: tuple[int, ...]
    data: NDArray[np.uint8]

    @classmethod
    def of(cls, array: NDArray[Any], dtype: str | None = None) -> RawTensor:
        """Wrap an array; `dtype="BF16"` says that a uint16 array holds bfloat16 bits."""
        contiguous = np.ascontiguousarray(array)
        name = dtype or DTYPE_NAMES[contiguous.dtype.name]
        return cls(name, tuple(array.shape), contiguous.view(np.uint8).reshape(-1))

    def array(self) -> NDArray[Any]:
        """The values as an array. For bfloat16 they are uint16 bits."""
        return self.data.view(_NUMPY[self.dtype]).reshape(self.shape)

    def float32(self) -> NDArray[np.float32]:
        """The values in float32. They are exact for F32, F16 and BF16."""
        if self.dtype == "BF16":
            return (self.array().astype(np.uint32) << 16).view(np.float32)
        if self.dtype not in ("F32", "F16", "F64"):
            raise CheckpointError(f"expected a floating tensor, got {self.dtype}")
        return np.asarray(self.array(), dtype=np.float32)


def float_to_raw(values: NDArray[np.float32], dtype: str) -> RawTensor:
    """Round float32 values to "F32", "F16" or "BF16", half to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return RawTensor.of(rounded.astype(np.uint16), "BF16")
    return RawTensor.of(values.astype({"F32": np.float32, "F16": np.float16}[dtype]))


def check_regular(path: Path, error: type[LoopqError] = CheckpointError) -> int:
    """Refuse a missing or special file and return the size in bytes. Opening a pipe would wait forever."""
    try:
        status = path.stat()
    except OSError as cause:
        missing = isinstance(cause, FileNotFoundError)
        raise error(f"{path}: {'missing' if missing else f'cannot be read ({cause.strerror})'}") from cause
    if not stat.S_ISREG(status.st_mode):
        raise error(f"{path}: not a plain file")
    return status.st_size


def inside(folder: Path, name: str, error: type[LoopqError] = CheckpointError) -> Path:
    """Return the path of a file in a folder. It must be a plain file, and no link may lead out of the folder.

    The cache of the Hugging Face hub keeps files in `blobs`, beside the `snapshots` that link to them. Such links pass.
    """
    path, root = folder / name, folder.resolve()
    check_regular(path, error)
    places = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.resolve().is_relative_to(place) for place in places):
        raise error(f"{path}: a link that leads out of the folder")
    return path


def check_size(path: Path, limit: int = MAX_SIZE, error: type[LoopqError] = CheckpointError) -> None:
    """Refuse a missing or special file, and one of more than `limit` bytes."""
    size = check_regular(path, error)
    if size > limit:
        raise error(f"{path}: {size} bytes; allowed: {limit}")


def read_bytes(path: Path, limit: int, error: type[LoopqError] = CheckpointError) -> bytes:
    """Read a file of at most `limit` bytes."""
    check_size(path, limit, error)
    try:
        return path.read_bytes()
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause


def read_header(
    path: Path, error: type[LoopqError] = CheckpointError
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors and the `__metadata__` of a safetensors file, checked by the safetensors library.

    The library refuses tensors that overlap, leave holes or do not fill the file. It takes the last of two tensors with
    one name. This function refuses such files.

    Raises
    ------
    LoopqError
        Error of the given class: the file is missing, truncated or not a safetensors file.
    """
    check_regular(path, error)
    try:
        with safe_open(path, framework="np") as checked_file:
            metadata: dict[str, str] = checked_file.metadata() or {}
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length), path, error)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror or cause})") from cause
    except SafetensorError as cause:
        raise error(f"{path}: damaged, truncated or not a safetensors file ({shown(str(cause))})") from cause
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise error(f"{path}: tensor {shown(name)} is {entry['dtype']}; known: {', '.join(DTYPES)}")
        first, last = entry["data_offsets"]
        tensors[name] = Stored(entry["dtype"], tuple(entry["shape"]), 8 + length + first, last - first)
    return tensors, metadata


def read_tensor(path: Path, stored: Stored, error: type[LoopqError] = CheckpointError) -> RawTensor:
    """Read one tensor with its header from `read_header`."""
    try:
        data = np.fromfile(path, dtype=np.uint8, count=stored.n_bytes, offset=stored.offset)
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    except MemoryError as cause:
        raise error(f"{path}: a tensor of {stored.n_bytes / 2**20:.0f} MiB does not fit in memory") from cause
    if data.size != stored.n_bytes:
        raise error(f"{path}: shorter than its header says")
    return RawTensor(stored.dtype, stored.shape, data)


def read_tensors(path: Path, error: type[LoopqError] = CheckpointError) -> dict[str, RawTensor]:
    """Read every tensor of a safetensors file."""
    tensors, _ = read_header(path, error)
    return {name: read_tensor(path, stored, error) for name, stored in tensors.items()}


def map_tensors(path: Path, error: type[LoopqError] = CheckpointError) -> dict[str, RawTensor]:
    """Map every tensor of a safetensors file: read-only bytes that the system loads on use.

    The system can reclaim mapped memory at any time. Writers replace files by renaming, so mapped bytes stay unchanged.
    If a file is truncated in place meanwhile, the process ends.
    """
    tensors, _ = read_header(path, error)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    mapped = {}
    for name, stored in tensors.items():
        if stored.offset % ITEM_SIZE[stored.dtype]:
            # Other writers may not align their tensors, but arrays must be aligned.
            mapped[name] = read_tensor(path, stored, error)
        else:
            part = data[stored.offset : stored.offset + stored.n_bytes]
            mapped[name] = RawTensor(stored.dtype, stored.shape, part.view(np.ndarray))
    return mapped


def file_order(tensors: Mapping[str, RawTensor]) -> list[str]:
    """Return the names in file order: by falling item size, so that each tensor is aligned, then by name."""
    return sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))


def write_tensors(
    path: Path,
    tensors: Mapping[str, RawTensor],
    metadata: Mapping[str, str] | None = None,
    values: Callable[[str], RawTensor] | None = None,
) -> str:
    """Write a complete safetensors file and return its SHA-256 in hexadecimal.

    With `values` the data of `tensors` gives only the sizes, and each tensor is computed when it is written.

    The safetensors library writes files too, but without their SHA-256. Hashing afterwards would read a large file
    again.
    """
    order = file_order(tensors)
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
        read = values or tensors.__getitem__
        head: list[bytes | memoryview] = [struct.pack("<Q", len(text)), text]
        for part in itertools.chain(head, (read(name).data.data for name in order)):
            file.write(part)
            total.update(part)
    return total.hexdigest()


def beside(path: Path, suffix: str) -> Path:
    """Return a path beside `path` that no other process uses. Its name identifies the process."""
    return path.with_name(f".{path.name}.{writer()}.{suffix}")


def writer() -> str:
    """Return a name that no other process uses."""
    return f"{HOST}-{os.getpid()}-{secrets.token_hex(4)}"


#: Maximum bytes of an output's name. Its work folder has this longer name before it is removed.
_LONGEST = 255 - len(f"..work.{HOST}-9999999-00000000.partial")


def check_named(out: Path, error: type[LoopqError] = LoopqError) -> None:
    """Refuse a path without its own name, which other paths beside it need, and names that no system supports."""
    n_bytes = len(os.fsencode(out.name))
    if n_bytes > _LONGEST:
        raise error(f"{shown(str(out))}: a name of {n_bytes} bytes; allowed: {_LONGEST}")
    if "\0" in str(out):
        raise error(f"{shown(str(out))}: holds a zero byte, which no path can")
    if out.name in ("", ".."):
        raise error(f"{str(out)!r}: the folder that the command runs in, or one above it; give a new name")


def check_replaceable(path: Path, error: type[LoopqError] = LoopqError, ours: bytes = b"") -> None:
    """Refuse an output file in whose place something else than a plain file stands.

    A rename over a device, a pipe or a link would remove it, even for the whole machine if it lies in /dev. `ours`
    are bytes that each file of loopq of this kind holds. With them, refuse a file without them too.

    Raises
    ------
    LoopqError
        Error of the given class, also for a path without its own name.
    """
    check_named(path, error)
    try:
        mode = path.lstat().st_mode
    except OSError:
        # Nothing stands there, or the write says why it cannot be seen.
        return
    kinds = ((stat.S_ISLNK, "link"), (stat.S_ISDIR, "folder"), (stat.S_ISFIFO, "pipe"), (stat.S_ISREG, ""))
    kind = next((name for test, name in kinds if test(mode)), "device or socket")
    if kind:
        raise error(f"{path}: is a {kind}; name a file that is new, or a plain one")
    if ours:
        try:
            with path.open("rb") as file:
                known = ours in file.read(MAX_SIZE)
        except OSError as cause:
            raise error(f"{path}: cannot be read ({cause.strerror})") from cause
        if not known:
            raise error(f"{path}: exists, and loopq, or this version of it, did not write it; move it away")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` and rename it over `path` if the block succeeds.

    Readers see the old or the new file, never a part. An error leaves nothing behind.

    Raises
    ------
    LoopqError
        A device, pipe, link or folder stands there, or the file cannot be written.
    """
    check_replaceable(path)
    temporary = beside(path, "tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        # Without a sync first, the rename may reach the disk before the data.
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # Again, because the block may have taken hours.
        check_replaceable(path)
        temporary.replace(path)
    except OSError as cause:
        raise LoopqError(f"{path}: cannot be written ({cause.strerror or cause})") from cause
    finally:
        # If nothing can be written, nothing needs removal, and the first error must be reported.
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def nearest(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    # For a link to itself, `Path.resolve` raises an error that is not loopq's.
    place = Path(os.path.realpath(path))
    while not place.exists():
        place = place.parent
    return place


def json_bytes(data: Any) -> bytes:
    """Return JSON in file form: sorted keys, one space of indent, a final line end."""
    return (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, data: Any) -> None:
    """Write a complete JSON file."""
    with replacing(path) as temporary:
        temporary.write_bytes(json_bytes(data))


def write_text(path: str | Path, text: str) -> Path:
    """Write a complete UTF-8 text file or nothing. Return the path."""
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    return path


def read_json(path: Path, error: type[LoopqError] = CheckpointError, *, finite: bool = True) -> Any:
    """Read JSON with the limits of `parse_json`. Problems raise the given error class with the file's name."""
    return parse_json(read_bytes(path, MAX_SIZE, error), path, error, finite=finite)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Free space on the present or future disk of `path`."""
    return shutil.disk_usage(nearest(path)).free
