"""Modes of torch that place or draw the first values of tensors, in one thread."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import Tensor

#: Modules of the functions that draw initial values. transformers has its own, which skip what a file gave.
_INITS = ("torch.nn.init", "transformers.initialization")
#: Operations that draw into a tensor.
_DRAWS = {
    getattr(torch.Tensor, f"{name}_")
    for name in (
        "bernoulli",
        "cauchy",
        "exponential",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
    )
}


class Blank(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Puts tensors of `torch.empty`, as most parameters are made, on the device "meta" inside the block."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        drawn = _drawn(func, args, given)
        if drawn is not None and drawn.is_meta:
            # Torch would draw nothing either, but it imports its compiler to find that out.
            return drawn
        # An empty list is how transformers asks for the device. On "meta" it goes through no module to draw values.
        asked = func is torch.tensor and len(args) == 1 and args[0] == []
        if (asked or func is torch.empty) and given.get("device") is None:
            given["device"] = "meta"
        return func(*args, **given)


class Drawn(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Draws values on the processor from a generator of its own inside the block. The global one does not change.

    Without a seed it is another generator each time.
    """

    def __init__(self, seed: int | None = None) -> None:
        super().__init__()
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        drawn = _drawn(func, args, given)
        if drawn is not None and drawn.device.type == "cpu" and given.get("generator") is None:
            given["generator"] = self._generator
        return func(*args, **given)


def _drawn(func: Any, args: Any, given: dict[str, Any]) -> Tensor | None:
    """The tensor that an operation draws into."""
    of_init = getattr(func, "__module__", "") in _INITS and "generator" in given
    tensor: Tensor | None = args[0] if args else given.get("tensor")
    return tensor if of_init or func in _DRAWS else None
