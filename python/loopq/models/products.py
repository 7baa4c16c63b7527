"""Observe products with weights where torch executes them, including those outside of module calls."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import BaseTorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from loopq.storage.weights import conv_orientation

if TYPE_CHECKING:
    from torch import Tensor

    from loopq.storage.weights import Orientation

#: A product: name of the weight, rows of its input (n_rows, in_features), and how the weight is stored.
OnProduct = Callable[[str, "Tensor", "Orientation"], None]

_aten = torch.ops.aten
_MATRICES = {_aten.mm, _aten.bmm, _aten.matmul}
_CONVOLUTIONS = {_aten.convolution, _aten.conv1d, _aten.conv2d, _aten.conv3d}
#: The use of a kernel whose groups of outputs read different inputs. Each group would need a Hessian of its own, for
#: few weights: depthwise kernels are 1.5 % of the block in a published forecaster.
GROUPS = "a convolution in groups, which have different inputs and few weights"
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
        Matrices (a, b) by name, or kernels of convolutions (out, in, ...). A convolution is a product with the patch
        under its kernel at each place.
    on_product : callable
        Called for every product with a whole weight.
    on_other : callable, optional
        Called with name and operation for every other use. This includes the parameters in `also`.
    also : mapping of str to Tensor, optional
        Parameters of other shapes.
    moving : bool
        Whether weights change their memory, as those of a model that is read layer by layer do.
    """

    def __init__(
        self,
        weights: Mapping[str, Tensor],
        on_product: OnProduct,
        on_other: Callable[[str, str], None] | None = None,
        also: Mapping[str, Tensor] | None = None,
        *,
        moving: bool = False,
    ) -> None:
        super().__init__()
        self._on_product, self._on_other = on_product, on_other
        self._weights, self._every, self._moving = weights, {**weights, **(also or {})}, moving
        self._locate()
        self._kernels = {n: conv_orientation(w.shape[2:]) for n, w in weights.items() if w.ndim > 2}
        # Casts of weights, while their memory is alive.
        self._casts: dict[int, tuple[str, Any, tuple[int, ...], tuple[int, ...], bool]] = {}

    def _locate(self) -> None:
        """Note the memory of the weights. One whose layer is not in memory is a single number, with strides of 0."""
        there = {name: w for name, w in self._every.items() if 0 not in w.stride()}
        self._ranges = sorted((w.data_ptr(), w.data_ptr() + w.nbytes, name) for name, w in there.items())
        self._whole: dict[int, tuple[str, Tensor]] = {
            w.data_ptr(): (n, w) for n, w in there.items() if n in self._weights
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No. To skip it, torch would import it, which takes seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        op = func.overloadpacket
        if self._moving:
            self._locate()
        taken = self._product(op, args)
        if taken is None and self._on_other is not None and op not in _VIEWS:
            use = GROUPS if op in _CONVOLUTIONS and _places(op, args).groups > 1 else op.__name__
            for name in {n for n in map(self._within, _tensors(args)) if n}:
                if not (op in _COPIES and self._match(args[0])):
                    self._on_other(name, use)
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
            return self._convolution(op, args)
        else:
            return None
        for weight, other, right in ((pair[1], pair[0], True), (pair[0], pair[1], False)):
            matched = self._match(weight) if len(_plane(tuple(weight.shape), weight.stride())) == 2 else None
            if matched:
                name, turned = matched
                rows = other if right or other.ndim < 2 else other.transpose(-1, -2)
                stored: Orientation = "out_in" if turned == right else "in_out"
                if name in self._kernels and stored == "in_out":
                    return None
                stored = self._kernels.get(name, stored)
                self._on_product(name, rows.reshape(-1, rows.shape[-1]), stored)
                return name
        return None

    def _convolution(self, op: Any, args: Any) -> str | None:
        """As `_product`, for a convolution as a product with the same matrix at each place."""
        places, weight = _places(op, args), args[1]
        matched = self._match(weight)
        if matched is None or places.groups > 1 or places.transposed:
            return None
        kernel = tuple(weight.shape[2:])
        self._on_product(matched[0], places.patches(args[0], kernel), conv_orientation(kernel))
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
        if len(sides) < 2:  # A vector has no sides.
            return None
        if given == sides:
            return name, flipped
        return (name, not flipped) if len(sides) == 2 and given == sides[::-1] else None

    def _within(self, tensor: Tensor) -> str | None:
        """Name of the weight with the start of a tensor in its memory."""
        place = tensor.data_ptr()
        return next((name for first, end, name in self._ranges if first <= place < end), None)


class _Places:
    """Where a convolution puts its kernel.

    Parameters
    ----------
    stride, dilation : sequence of int
        Steps between places, and between the numbers under the kernel, by axis or for all axes.
    padding : sequence of int, or {"same", "valid"}
        Zeros before and after each axis.
    groups : int
        Groups of outputs. Each reads inputs of its own.
    transposed : bool
        Whether the kernel is spread over the outputs instead.
    """

    def __init__(
        self, stride: Sequence[int], padding: Any, dilation: Sequence[int], groups: int, transposed: bool
    ) -> None:
        self._stride, self._padding, self._dilation = stride, padding, dilation
        self.groups, self.transposed = groups, transposed

    def patches(self, x: Tensor, kernel: tuple[int, ...]) -> Tensor:
        """Return the numbers under the kernel at each place, shape (n_places, in_channels * kernel size)."""
        n = len(kernel)
        x = x if x.ndim == n + 2 else x[None]
        stride, dilation = _each(self._stride, n), _each(self._dilation, n)
        spans = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        if self._padding == "same":
            edges = [(span // 2, span - span // 2) for span in spans]
        else:
            edges = [(p, p) for p in ([0] * n if self._padding == "valid" else _each(self._padding, n))]
        x = torch.nn.functional.pad(x, [p for edge in reversed(edges) for p in edge])
        ends = [(size - span - 1) // s + 1 for size, span, s in zip(x.shape[2:], spans, stride, strict=True)]
        across = [s * step for s, step in zip(stride, x.stride()[2:], strict=True)]
        within = [d * step for d, step in zip(dilation, x.stride()[2:], strict=True)]
        view = x.as_strided(
            (x.shape[0], *ends, x.shape[1], *kernel), (x.stride(0), *across, x.stride(1), *within)
        )
        return view.reshape(-1, x.shape[1] * math.prod(kernel))


def _places(op: Any, args: Any) -> _Places:
    """Read the arguments of a convolution, some of which torch leaves out."""
    given = list(args[3:6])
    stride, padding, dilation = given + [[1], [0], [1]][len(given) :]
    whole = op is _aten.convolution
    more = args[8:] if whole else args[6:]
    return _Places(stride, padding, dilation, more[0] if more else 1, whole and args[6])


def _each(values: Sequence[int], n: int) -> list[int]:
    """One value for each axis."""
    return [*values] * n if len(values) == 1 else [*values]


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
