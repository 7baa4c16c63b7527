"""Checked access to the tensors of a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

import loopq._native as native
from loopq.errors import CheckpointError
from loopq.storage.files import RawTensor
from loopq.storage.schema import shown


@dataclass(frozen=True)
class TensorReader:
    """The tensors of a file, with checks on access. `where` is for messages; `used` holds the names that were read."""

    where: str
    tensors: Mapping[str, RawTensor]
    used: set[str] = field(default_factory=set)

    def get(self, name: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> RawTensor:
        """Return a tensor. None in `shape` allows any size of that dimension.

        Raises
        ------
        CheckpointError
            The tensor is missing, or has another type or shape.
        """
        if name not in self.tensors:
            raise CheckpointError(f"{self.where}: tensor {name!r} is missing")
        tensor = self.tensors[name]
        same = [want in (None, got) for want, got in zip(shape, tensor.shape, strict=False)]
        if tensor.dtype not in dtypes or len(tensor.shape) != len(shape) or not all(same):
            wanted = [n if n is not None else "any" for n in shape]
            raise CheckpointError(
                f"{self.where}: tensor {name!r} is {tensor.dtype} {shown(list(tensor.shape))}; "
                f"expected {' or '.join(dtypes)} {wanted}"
            )
        self.used.add(name)
        return tensor

    def scales(
        self, name: str, shape: tuple[int, ...], dtypes: Sequence[str] = ("F16", "BF16", "F32")
    ) -> NDArray[np.float32]:
        """Return scales, which must be finite and not zero."""
        values = self.get(name, dtypes, shape).float32()
        if not np.isfinite(values).all() or (values == 0).any():
            raise CheckpointError(f"{self.where}: tensor {name!r} holds a scale that is zero or not finite")
        return values

    def codes(
        self, name: str, bits: int, count: int, n_streams: int, *, offset: int = 0, down: bool = False
    ) -> NDArray[Any]:
        """Unpack bit streams of `count` codes each, I32, shape (n_streams, ceil(count * bits / 32)).

        `offset` is subtracted from every code: 0 gives uint8, 2^(bits-1) signed codes in int8. With `down` the streams
        run down the columns: the tensor is transposed. The result has shape (n_streams, count).

        Raises
        ------
        CheckpointError
            Bits after the last code are not zero. Shape or bits then differ from those of the file.
        """
        shape = (n_streams, -(-count * bits // 32))
        stored = self.get(name, ("I32",), shape[::-1] if down else shape).array()
        words = np.ascontiguousarray(stored.T if down else stored)
        used = count * bits % 32
        rest = words[:, -1].view(np.uint32) >> np.uint32(used) if used else np.zeros(0)
        if rest.any():
            raise CheckpointError(
                f"{self.where}: tensor {name!r}: row {np.flatnonzero(rest)[0]} has bits after its last code: "
                f"{count} codes of {bits} bits do not fill it so"
            )
        codes: NDArray[Any] = native.unpack_dense(words, bits, count, offset)
        return codes
