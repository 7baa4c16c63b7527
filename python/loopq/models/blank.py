"""Build modules without the cost of their values. Nothing here reaches another thread."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from loopq.errors import require

if TYPE_CHECKING:
    import torch
    from torch import nn

_BUILDING = threading.RLock()


@contextlib.contextmanager
def building() -> Iterator[None]:
    """Let one thread at a time build models of transformers.

    Its constructors and its loader exchange functions of torch and the default type while they run. Two that overlap
    would restore each other's.
    """
    with _BUILDING:
        yield


def on_meta() -> Any:
    """Return a mode that puts empty tensors on the device "meta". See `loopq.models.modes.Blank`."""
    return _modes().Blank()


def drawn(seed: int | None = None) -> Any:
    """Return a mode that draws values from its own generator. See `loopq.models.modes.Drawn`."""
    return _modes().Drawn(seed)


def _modes() -> Any:
    from loopq.models import modes  # lazy: loopq imports without torch

    return modes


def blank(build: Callable[[], nn.Module], *, memory: bool = True) -> nn.Module:
    """Build a module with real buffers and arbitrary parameters. No value is drawn into them.

    `build` may be called twice. Without `memory` the parameters are on the device "meta". Otherwise their memory stays
    untouched.
    """
    torch = require("torch")
    device = torch.empty(0).device
    if device.type == "meta":
        return build()
    module = None
    # A constructor that computes with its parameters needs real ones, so it is tried once more.
    with contextlib.suppress(Exception), on_meta():
        module = build()
    if module is None or any(buffer.is_meta for buffer in module.buffers()):
        with drawn():
            module = build()
    return _placed(module, device if memory else torch.device("meta"))


def _placed(model: nn.Module, device: torch.device) -> nn.Module:
    """Give parameters memory on a device, or take it away. Tied ones stay tied."""
    torch = require("torch")
    done: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, old in module._parameters.items():
            if old is not None and old.device.type != device.type:
                other = torch.nn.Parameter(torch.empty_like(old, device=device), old.requires_grad)
                module._parameters[name] = done.setdefault(id(old), other)
    return model
