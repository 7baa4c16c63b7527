"""Modules with weights that accelerate keeps elsewhere (`device_map="auto"`): tensors, and copies without hooks."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from loopq.storage.files import DTYPE_NAMES, RawTensor, map_tensors
from loopq.storage.model_files import raw

if TYPE_CHECKING:
    from torch import nn

_HOOK, _FORWARD = "_hf_hook", "_old_forward"
_map = cache(map_tensors)


def is_offloaded(model: nn.Module) -> bool:
    """Whether some parameters have values only while accelerate's hooks load them."""
    return any(_places(module) is not None for module in model.modules())


def device_of(model: nn.Module) -> str:
    """Where layers with offloaded weights run."""
    hook = next(hook for module in model.modules() for hook in _hooks(module) if hook.weights_map is not None)
    device = hook.execution_device
    return f"cuda:{device}" if isinstance(device, int) else str(device)


def tensors_of(model: nn.Module) -> dict[str, RawTensor]:
    """Return every tensor of a model by name, mapped or in memory."""
    tensors = {name: raw(t, copy=False) for name, t in model.state_dict().items() if not t.is_meta}
    for place, module in model.named_modules():
        weights = _places(module)
        for name, tensor in module.state_dict().items() if weights is not None else ():
            if tensor.is_meta and name in weights:
                tensors[f"{place}.{name}" if place else name] = _kept(weights, name)
    return tensors


def unhooked(values: dict[str, Any], new: Any) -> None:
    """Remove accelerate's hooks from a copy of a module and restore its forward."""
    if values.pop(_HOOK, None) is None:
        return
    values.pop("forward", None)
    forward = values.pop(_FORWARD, None)
    if isinstance(forward, MethodType) and forward.__func__ is not type(new).forward:
        values["forward"] = MethodType(forward.__func__, new)


def _hooks(module: Any) -> Iterator[Any]:
    hook = vars(module).get(_HOOK)
    for one in getattr(hook, "hooks", (hook,)):
        if hasattr(one, "weights_map"):
            yield one


def _places(module: Any) -> Any:
    """Locate the weights of a module by their names in it."""
    return next((hook.weights_map for hook in _hooks(module) if hook.weights_map is not None), None)


def _kept(weights: Any, name: str) -> RawTensor:
    """An offloaded tensor: an entry of the disk's index, or a tensor in memory."""
    loader, key = getattr(weights, "dataset", weights), getattr(weights, "prefix", "") + name
    entry = getattr(loader, "index", {}).get(key)
    if entry is None or key in getattr(loader, "state_dict", {}):
        return raw(weights[name], copy=False)
    if entry.get("safetensors_file"):
        return _map(Path(entry["safetensors_file"]))[entry.get("weight_name", key)]
    data = np.memmap(Path(loader.save_folder) / f"{key}.dat", np.uint8, "r")
    return RawTensor(DTYPE_NAMES[entry["dtype"]], tuple(entry["shape"]), data.view(np.ndarray))
