"""A second device without an accelerator: tensors that call themselves "cuda" and are computed by the processor.

Every operation that mixes them with the processor's tensors raises, as on a GPU; so does a look into their
memory. It does not round differently: results are the processor's, bit by bit.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

#: The argument of `--device`: among the types without a backend, autograd treats this one as the processor.
DEVICE = "lazy"
_DEVICE = torch.device(DEVICE, 0)


class Far(torch.Tensor):  # type: ignore[misc]  # torch does not say its type
    """A tensor of the second device: it holds one of the processor."""

    near: torch.Tensor

    @staticmethod
    def __new__(cls, near: torch.Tensor) -> Far:
        far: Far = torch.Tensor._make_wrapper_subclass(
            cls,
            near.size(),
            strides=near.stride(),
            storage_offset=near.storage_offset(),
            dtype=near.dtype,
            layout=near.layout,
            requires_grad=False,
            device=_DEVICE,
        )
        far.near = near
        return far

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def __repr__(self, **_: Any) -> str:
        return f"Far({self.near!r})"

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        self.near = value.near

    def __getitem__(self, index: Any) -> torch.Tensor:
        return super().__getitem__(_far_lists(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_far_lists(index), value)

    def data_ptr(self) -> int:
        return int(self.near.data_ptr())


def _far_lists(index: Any) -> Any:
    """An index without lists; torch makes their tensors past every mode."""
    parts = index if isinstance(index, tuple) else (index,)
    return tuple(Far(_TENSOR(i)) if isinstance(i, list) else i for i in parts)


def _tensor(*args: Any, device: Any = None, **kwargs: Any) -> torch.Tensor:
    """As `torch.tensor`, which makes one past every mode."""
    tensor = _TENSOR(*args, **kwargs)
    return tensor if device is None else tensor.to(device)


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    flat = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    far = any(isinstance(x, Far) for x in flat)
    # In inference mode `Tensor.to` comes whole, with its device by place.
    named = {a.name: value for a, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    wanted = named.get("device")
    to_far = far if wanted is None else torch.device(wanted).type == DEVICE
    name = func._schema.name
    moves = name in ("aten::_to_copy", "aten::copy_", "aten::to")
    if far and not moves:
        for x in flat:
            if not isinstance(x, Far) and x.ndim:
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two, lazy:0 and cpu! ({name})"
                )
    if wanted is not None:
        here = torch.device("cpu")
        kwargs = {name: here if name == "device" else value for name, value in kwargs.items()}
        args = tuple(here if value is wanted else value for value in args)
    known = {id(x.near): x for x in flat if isinstance(x, Far)}
    near = [tree_map_only(Far, lambda x: x.near, part) for part in (args, kwargs)]
    out = func(*near[0], **near[1])
    if name == "aten::copy_":
        return args[0]

    def back(x: torch.Tensor) -> torch.Tensor:
        if not to_far or isinstance(x, Far):
            return x
        return known[id(x)] if id(x) in known else Far(x)

    return tree_map_only(torch.Tensor, back, out)


class _Mode(TorchDispatchMode):  # type: ignore[misc]
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _moved(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
    """As `nn.Module.to`, which gives a parameter of another class to each of its holders anew."""
    tied: dict[int, list[tuple[Any, str]]] = {}
    for holder in module.modules():
        for name, parameter in holder._parameters.items():
            tied.setdefault(id(parameter), []).append((holder, name))
    _TO(module, *args, **kwargs)
    for (first, first_name), *others in tied.values():
        for holder, name in others:
            holder._parameters[name] = first._parameters[first_name]
    return module


_TO, _TENSOR = torch.nn.Module.to, torch.tensor


@contextlib.contextmanager
def accelerator() -> Iterator[None]:
    """A second device inside the block."""
    with mock.patch.object(torch.nn.Module, "to", _moved), mock.patch("torch.tensor", _tensor), _Mode():
        yield
