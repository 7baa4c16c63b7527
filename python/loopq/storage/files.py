"""Files and folders that are whole or not there, and safetensors without a framework.

numpy has no bfloat16, so tensors travel as bytes with the dtype name of the safetensors specification.
"""

from __future__ import annotations

import contextlib
import glob
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
#: Of a file that is read whole: JSON, tokenizers, code.
MAX_SIZE = 256 * 2**20
_MARKER = ".made-by-loopq"
_HOST = re.sub(r"[^0-9A-Za-z]", "", platform.node())[:16]


@dataclass(frozen=True)
class Stored:
    """Where one tensor lies in a safetensors file: `offset` is its first byte, counted from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    n_bytes: int


@dataclass(frozen=True)
class RawTensor:
    """A tensor as little-endian bytes (uint8, 1-D) in row-major order: what every storage type has in common."""

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
    """Round float32 values to "F32", "F16" or "BF16", half to even."""
    if dtype == "BF16":
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
        return RawTensor.of(rounded.astype(np.uint16), "BF16")
    return RawTensor.of(values.astype({"F32": np.float32, "F16": np.float16}[dtype]))


def check_regular(path: Path, error: type[LoopqError] = CheckpointError) -> int:
    """Refuse what is missing or no plain file (opening a pipe would wait for ever); return its size in bytes."""
    try:
        found = path.stat()
    except OSError as cause:
        missing = isinstance(cause, FileNotFoundError)
        raise error(f"{path}: {'missing' if missing else f'cannot be read ({cause.strerror})'}") from cause
    if not stat.S_ISREG(found.st_mode):
        raise error(f"{path}: not a plain file")
    return found.st_size


def inside(folder: Path, name: str, error: type[LoopqError] = CheckpointError) -> Path:
    """Return the path of a file of a folder, which must be a plain file and no link that leads out of the folder.

    The cache of the Hugging Face hub keeps files in `blobs`, beside the `snapshots` that link to them; such links pass.
    """
    path, root = folder / name, folder.resolve()
    check_regular(path, error)
    places = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(path.resolve().is_relative_to(place) for place in places):
        raise error(f"{path}: a link that leads out of the folder")
    return path


def read_bytes(path: Path, limit: int, error: type[LoopqError] = CheckpointError) -> bytes:
    """Read a file of at most `limit` bytes."""
    size = check_regular(path, error)
    if size > limit:
        raise error(f"{path}: {size} bytes; allowed: {limit}")
    try:
        return path.read_bytes()
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause


def read_header(
    path: Path, error: type[LoopqError] = CheckpointError
) -> tuple[dict[str, Stored], dict[str, str]]:
    """Return the tensors and the `__metadata__` of a safetensors file, checked by the safetensors library.

    The library refuses tensors that overlap, leave holes or do not fill the file. Of two tensors of one name it
    takes the last: that is refused here.

    Raises
    ------
    LoopqError
        Of the class given: the file is missing, truncated or no safetensors file.
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
    """Read one tensor whose header comes from `read_header`."""
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
    """Give every tensor of a safetensors file without reading it: read-only bytes that the system brings when used.

    What is mapped takes no memory that the system cannot take back. Writers replace files by renaming, which leaves
    what is mapped as it was; a file that is cut short in place meanwhile ends the process.
    """
    tensors, _ = read_header(path, error)
    try:
        data = np.memmap(path, dtype=np.uint8, mode="r")
    except OSError as cause:
        raise error(f"{path}: cannot be read ({cause.strerror})") from cause
    found = {}
    for name, stored in tensors.items():
        if stored.offset % ITEM_SIZE[stored.dtype]:
            # Files of other writers need not align their tensors, and arrays have to be.
            found[name] = read_tensor(path, stored, error)
        else:
            part = data[stored.offset : stored.offset + stored.n_bytes]
            found[name] = RawTensor(stored.dtype, stored.shape, part.view(np.ndarray))
    return found


def file_order(tensors: Mapping[str, RawTensor]) -> list[str]:
    """Return the names in the order in which a file holds them: falling item size, so that each is aligned; names."""
    return sorted(tensors, key=lambda name: (-ITEM_SIZE[tensors[name].dtype], name))


def write_tensors(
    path: Path,
    tensors: Mapping[str, RawTensor],
    metadata: Mapping[str, str] | None = None,
    values: Callable[[str], RawTensor] | None = None,
) -> str:
    """Write a safetensors file whole; return its SHA-256 in hexadecimal.

    With `values` the data of `tensors` counts for its size alone, and each tensor is made when it is written.

    The safetensors library writes files too, but gives no SHA-256 on the way: hashing afterwards reads a large file
    once more.
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


def _temporary(path: Path, suffix: str) -> Path:
    """A path beside `path` that no other process uses; its name says which one does."""
    return path.with_name(f".{path.name}.{_writer()}.{suffix}")


def _writer() -> str:
    return f"{_HOST}-{os.getpid()}-{secrets.token_hex(4)}"


def remove_leftovers(folder: Path, name: str = "*") -> None:
    """Remove what killed processes of this machine were writing in a folder, for files and folders of this name."""
    for path in folder.glob(f".{glob.escape(name) if name != '*' else name}.*{_HOST}-*"):
        writer = re.fullmatch(rf".*\.{_HOST}-([0-9]{{1,9}})-[0-9a-f]{{8}}\.(tmp|partial)", path.name)
        if writer is None or runs(int(writer[1])):
            continue
        if writer[2] == "tmp":
            path.unlink(missing_ok=True)
        _clear(path)


def runs(process: int) -> bool:
    """Whether a process of this machine runs."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def own_folder(folder: Path, error: type[LoopqError] = CheckpointError) -> Path:
    """Make a folder for intermediate work, marked as one that may be removed; one that is marked already is taken.

    Raises
    ------
    LoopqError
        Of the class given: something that loopq did not make stands there.
    """
    marker = folder / _MARKER
    # In this order: another process may make the same folder just now, the marker first.
    if folder.is_symlink() or (any(folder.glob("*")) and not marker.is_file()):
        raise error(f"{folder}: stands where intermediate work goes and was not made by loopq; move it away")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        marker.touch()
    except OSError as cause:
        raise error(f"{folder}: cannot be written ({cause.strerror})") from cause
    return folder


def is_own(folder: Path) -> bool:
    """Whether `own_folder` made a folder."""
    return (folder / _MARKER).is_file() and not folder.is_symlink()


def remove_own(folder: Path, *, if_empty: bool = False) -> None:
    """Remove a folder that `own_folder` made, with all that is in it; leave any other as it is.

    With `if_empty`, only where there is no file of work in it.
    """
    if if_empty and any(p.is_file() and p.name != _MARKER for p in folder.rglob("*")):
        return
    if is_own(folder):
        # A name that tells whose it is first: a kill may come at any moment of the removal.
        going = folder.with_name(f"{folder.name}.{_writer()}.partial")
        with contextlib.suppress(OSError):
            folder.rename(going)
            _clear(going)


def _clear(folder: Path) -> None:
    """Remove a folder that is marked, the marker last, or an empty one."""
    with contextlib.suppress(OSError):
        if is_own(folder):
            for path in folder.iterdir():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                elif path.name != _MARKER:
                    path.unlink()
            (folder / _MARKER).unlink()
        folder.rmdir()


def check_named(out: Path, error: type[LoopqError] = LoopqError) -> None:
    """Refuse a path without a name of its own, by which others are made beside it; or that no system takes."""
    if "\0" in str(out):
        raise error(f"{shown(str(out))}: holds a zero byte, which no path can")
    if out.name in ("", ".."):
        raise error(f"{str(out)!r}: the folder that the command runs in, or one above it; give a new name")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path` and rename it over `path` if the block ends well.

    Readers see the old file or the new one, never a part; an error leaves nothing behind.
    """
    check_named(path)
    temporary = _temporary(path, "tmp")
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
    """Refuse an output folder that could not be made, before anything is computed for it; an empty one may be there.

    Raises
    ------
    LoopqError
        Of the class given: something is in the folder, a file or a link stands in its place or a file above it, or the
        place cannot be written.
    """
    check_named(out, error)
    if out.is_symlink():
        raise error(f"{out}: a symbolic link; name the folder itself: {os.path.realpath(out)}")
    if out.is_dir():
        with contextlib.suppress(OSError):
            # A folder is renamed to its name: the shell that gave the command would stand in one that is gone.
            if out.samefile(os.curdir):
                raise error(f"{out}: the folder that the command runs in; name a new one in it")
        if any(out.iterdir()):
            # The kill of an earlier run may have come between the rename and the removal of what was around it.
            remove_leftovers(out.parent, out.name)
            raise error(f"{out}: exists and is not empty; choose a new folder")
    elif out.exists():
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
    """Give a temporary folder beside `out` for some `n_bytes`, renamed to it if the block ends well.

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
    remove_leftovers(out.parent, out.name)
    # What is renamed lies inside a folder that is marked: at any moment of a kill the rest can be told to be ours.
    outer = own_folder(_temporary(out, "partial"), error)
    try:
        inner = outer / out.name
        inner.mkdir()
        yield inner
        inner.rename(out)
    except OSError as cause:
        raise error(f"{out}: cannot be written ({cause.strerror or cause})") from cause
    finally:
        remove_own(outer)


@contextlib.contextmanager
def second(out: Path, error: type[LoopqError] = CheckpointError) -> Iterator[Path]:
    """Give a path for a second copy of an output, which is compared byte for byte and removed.

    Raises
    ------
    LoopqError
        Of the class given: the two differ.
    """
    remove_leftovers(out.parent, out.name)
    outer = own_folder(_temporary(out, "partial"), error)
    try:
        yield outer / out.name
        if _digests(outer / out.name) != _digests(out):
            raise error(f"{out}: holds something else than this command writes; choose a new folder")
    finally:
        remove_own(outer)


def _digests(out: Path) -> dict[str, str]:
    paths = [out] if out.is_file() else [p for p in out.rglob("*") if p.is_file()]
    return {str(p.relative_to(out)): sha256(p) for p in paths}


def nearest(path: Path) -> Path:
    """The path, or what is nearest above it, that exists."""
    # Of a link to itself `Path.resolve` makes an error of no class of ours.
    place = Path(os.path.realpath(path))
    while not place.exists():
        place = place.parent
    return place


def json_bytes(data: Any) -> bytes:
    """JSON as files hold it: sorted keys, one space of indent, a line end at the end."""
    return (json.dumps(data, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole."""
    with replacing(path) as temporary:
        temporary.write_bytes(json_bytes(data))


def write_text(path: str | Path, text: str) -> Path:
    """Write text in UTF-8, whole or not at all; return the path."""
    path = Path(path)
    with replacing(path) as temporary:
        temporary.write_text(text, "utf-8")
    return path


def read_json(path: Path, error: type[LoopqError] = CheckpointError, *, finite: bool = True) -> Any:
    """Read JSON with the limits of `parse_json`; anything wrong is an error of the class given that names the file."""
    return parse_json(read_bytes(path, MAX_SIZE, error), path, error, finite=finite)


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def free_bytes(path: Path) -> int:
    """Free space on the disk that holds `path` or will."""
    return shutil.disk_usage(nearest(path)).free
