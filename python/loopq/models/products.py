"""Observe products with weights where torch executes them, including those outside of module calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.layers.shared import Orientation

#: A product: name of the weight, rows of its input (n_rows, in_features), and how the weight is stored.
OnProduct = Callable[[str, "Tensor", "Orientation"], None]

_aten = torch.ops.aten
_MATRICES = {_aten.mm, _aten.bmm, _aten.matmul}
_CONVOLUTIONS = {_aten.convolution, _aten.conv1d}
_COPIES = {_aten._to_copy, _aten.clone, _aten.contiguous, _aten.to}
#: Functions that give another view of the same numbers, or read none of them.
_VIEWS = {
    *(_aten.alias, _aten.as_strided, _aten.detach, _aten.expand, _aten.numpy_T, _aten.permute, _aten.select),
    *(_aten.slice, _aten.split, _aten.split_with_sizes, _aten.squeeze, _aten.t, _aten.transpose, _aten.chunk),
    *(_aten.unsqueeze, _aten.view, _aten._unsafe_view, _aten.unbind, _aten.reshape, _aten.narrow),
}


class Products(TorchDispatchMode):  # type: ignore[misc, unused-ignore]
    """Reports every product of rows with one of some weights while it is entered.

    A weight is identified by its memory. The caller, the side, views, casts and module calls do not matter.

    Parameters
    ----------
    weights : mapping of str to Tensor
        Matrices (a, b) by name, or convolution weights (out, in, 1).
    on_product : callable
        Called for every product with a whole weight.
    on_other : callable, optional
        Called with name and operation for every other use. This includes the parameters in `also`.
    also : mapping of str to Tensor, optional
        Parameters of other shapes.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        on_product: OnProduct,
        on_other: Callable[[str, str], None] | None = None,
        also: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self._on_product, self._on_other = on_product, on_other
        every = {**weights, **(also or {})}
        self._ranges = sorted((w.data_ptr(), w.data_ptr() + w.nbytes, name) for name, w in every.items())
        self._whole: dict[int, tuple[str, Tensor]] = {w.data_ptr(): (n, w) for n, w in weights.items()}
        # Casts of weights, while their memory is alive.
        self._casts: dict[int, tuple[str, Any, tuple[int, ...], tuple[int, ...], bool]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No. To skip it, torch would import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket
        taken = self._product(op, args)
        if taken is None and self._on_other is not None and op not in _VIEWS:
            for name in {n for n in map(self._within, _tensors(args)) if n}:
                if not (op in _COPIES and self._match(args[0])):
                    self._on_other(name, op.__name__)
        if op in _COPIES and isinstance(out, torch.Tensor):
            matched = self._match(args[0])
            if matched and out.data_ptr() not in self._whole:
                storage = StorageWeakRef(out.untyped_storage())
                cast = (matched[0], storage, tuple(out.shape), tuple(out.stride()), matched[1])
                self._casts[out.data_ptr()] = cast
        return out

    def _product(self, op: Any, args: Any) -> str | None:
        """Report a product. Return the name of its weight, or None if there is none."""
        if op in _MATRICES:
            pair = args[0], args[1]
        elif op is _aten.addmm:
            pair = args[1], args[2]
        elif op is _aten.linear:
            pair = args[0], args[1].t()
        elif op in _CONVOLUTIONS:
            return self._convolution(args)
        else:
            return None
        for weight, other, right in ((pair[1], pair[0], True), (pair[0], pair[1], False)):
            matched = self._match(weight)
            if matched:
                name, turned = matched
                rows = other if right or other.ndim < 2 else other.transpose(-1, -2)
                stored: Orientation = "out_in" if turned == right else "in_out"
                self._on_product(name, rows.reshape(-1, rows.shape[-1]), stored)
                return name
        return None

    def _convolution(self, args: Any) -> str | None:
        """As `_product`, for a convolution with a kernel of size 1 as a product with the same matrix at each place."""
        x, weight = args[0], args[1]
        moves = [list(args[3]) if len(args) > 3 else [1], list(args[4]) if len(args) > 4 else [0]]
        if weight.ndim != 3 or weight.shape[2] != 1 or x.shape[1] != weight.shape[1] or moves != [[1], [0]]:
            return None
        matched = self._match(weight)
        if matched is None:
            return None
        self._on_product(matched[0], x.transpose(1, 2).reshape(-1, x.shape[1]), "conv")
        return matched[0]

    def _match(self, tensor: Any) -> tuple[str, bool] | None:
        """Name of the weight that a tensor covers completely, and whether it is transposed."""
        if not isinstance(tensor, torch.Tensor) or tensor.ndim < 2:
            return None
        if tensor.data_ptr() in self._whole:
            name, weight = self._whole[tensor.data_ptr()]
            shape, stride, flipped = tuple(weight.shape), tuple(weight.stride()), False
        elif tensor.data_ptr() in self._casts:
            name, storage, shape, stride, flipped = self._casts[tensor.data_ptr()]
            if storage.expired():
                return None
        else:
            return None
        sides, given = _plane(shape, stride), _plane(tuple(tensor.shape), tuple(tensor.stride()))
        if len(sides) != 2:  # A vector has no sides.
            return None
        if given == sides:
            return name, flipped
        return (name, not flipped) if given == sides[::-1] else None

    def _within(self, tensor: Tensor) -> str | None:
        """Name of the weight with the start of a tensor in its memory."""
        place = tensor.data_ptr()
        return next((name for first, end, name in self._ranges if first <= place < end), None)


def _plane(shape: tuple[int, ...], stride: tuple[int, ...]) -> list[tuple[int, int]]:
    """Length and stride of each axis that is not a single repeated value."""
    return [(n, s) for n, s in zip(shape, stride, strict=True) if n > 1 and s > 0]


def _tensors(args: Any) -> Iterator[Tensor]:
    for value in args:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def plain_attention() -> BaseTorchFunctionMode:
    """Let nn.MultiheadAttention multiply by its weights separately inside a block, not in one fused operation.

    Any mode that watches functions has this effect, in its thread only.
    """
    return BaseTorchFunctionMode()
