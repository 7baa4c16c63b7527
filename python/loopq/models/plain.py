"""The plain module without compiled or parallel wrappers, with computed weights as plain parameters. Plain modes."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Iterator
from types import MethodType
from typing import TYPE_CHECKING, Any

from loopq.models.offloaded import device_of, is_offloaded, tensors_of, unhooked
from loopq.models.stream import Stream

if TYPE_CHECKING:
    from torch import nn


#: Kinds of devices that torch can cast for (`torch.autocast`).
_CAST = ("cpu", "cuda", "xpu", "mps", "hpu", "mtia")


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Leave the caller's `torch.no_grad`, `inference_mode` and `autocast` inside the block.

    They would turn off the loop metric, or calibrate in another type. Modes belong to the thread, so no other sees it.
    """
    torch = sys.modules.get("torch")
    if torch is None:  # nothing is loaded that has modes
        yield
        return
    with contextlib.ExitStack() as stack:
        # Also turns gradients on.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in filter(torch.is_autocast_enabled, _CAST):
            stack.enter_context(torch.autocast(kind, enabled=False))
        yield


def plain(model: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a plain module with the same names and weights.

    Returns
    -------
    model : nn.Module
        The same module if it is already plain. Otherwise a new module that shares its parameters and buffers. It drops
        the wrappers of `torch.compile`, `DataParallel` and similar ones. Weights computed by parametrizations
        (weight_norm, spectral_norm and others) become plain parameters. Weights that accelerate keeps on the disk or
        elsewhere (`device_map`) are read at each visit of a layer. Weights made under `torch.inference_mode` have no
        gradient, so they are copied.
    notes : tuple of str
        What was done.
    """
    inside = _inside(model)
    if is_offloaded(inside):
        return _streamed(inside)
    computed = [name for name, m in inside.named_modules() if _is_computed(m)]
    wrapped = inside is not model or any(_inside(m) is not m or _is_compiled(m) for m in inside.modules())
    inferred = any(map(_is_inferred, (*inside.parameters(), *inside.buffers())))
    if not wrapped and not computed and not inferred:
        return model, ()
    notes = ["compiled or parallel modules: the plain ones inside are run"] * wrapped
    notes += [
        f"{name}: its weight is computed from other parameters; what comes out is kept" for name in computed
    ]
    notes += ["made under torch.inference_mode: copies of its weights are run"] * inferred
    return _copied(inside, {}), tuple(notes)


def _streamed(inside: Any) -> tuple[nn.Module, tuple[str, ...]]:
    """Copy a module so that its layers are read from accelerate's storage."""
    new, device = _copied(inside, {}), device_of(inside)
    stream = Stream(new, tensors_of(inside), renamed=False)
    if device != "cpu":
        stream.move(device)
    return new, ("weights that are kept elsewhere (device_map) are read layer by layer",)


def _inside(module: Any) -> Any:
    """The module inside the wrappers."""
    import torch  # lazy: loopq imports without torch

    parallel = (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)
    while True:
        if "_orig_mod" in module._modules:
            module = module._modules["_orig_mod"]
        elif isinstance(module, parallel):
            module = module.module
        else:
            return module


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None


def _hooks(module: Any) -> dict[int, str]:
    """Hooks of `torch.nn.utils` that compute a weight before each call (weight_norm, spectral_norm, prune)."""
    kinds = {"WeightNorm": "name", "SpectralNorm": "name", "BasePruningMethod": "_tensor_name"}
    names = {}
    for key, hook in module._forward_pre_hooks.items():
        named = [kinds[cls.__name__] for cls in type(hook).__mro__ if cls.__name__ in kinds]
        if named:
            names[key] = str(getattr(hook, named[0]))
    return names


def _is_computed(module: Any) -> bool:
    return bool(_hooks(module) or "parametrizations" in module._modules)


def _copied(module: Any, done: dict[int, Any]) -> Any:
    """Copy a module and its submodules over the same parameters. A repeated submodule stays one object."""
    module = _inside(module)
    if id(module) in done:
        return done[id(module)]
    # Parametrized modules do not allow `copy.copy`.
    new = done[id(module)] = object.__new__(type(module))
    for name, value in module.__dict__.items():
        bound = isinstance(value, MethodType) and value.__self__ is module
        new.__dict__[name] = MethodType(value.__func__, new) if bound else value
    for table in ("_parameters", "_buffers", "_modules", "_forward_pre_hooks", "_forward_hooks"):
        new.__dict__[table] = copy.copy(module.__dict__[table])
    for table in (new._parameters, new._buffers):
        table.update({name: _with_gradient(value, done) for name, value in table.items()})
    new.__dict__["_compiled_call_impl"] = None
    unhooked(new.__dict__, new)
    if _is_computed(module):
        _fold(module, new)
    for name, child in new._modules.items():
        new._modules[name] = None if child is None else _copied(child, done)
    return new


def _is_inferred(value: Any) -> bool:
    """Whether a tensor was made under `torch.inference_mode`. One of a lazy module is not made yet."""
    from torch.nn.parameter import is_lazy  # lazy: loopq imports without torch

    return not is_lazy(value) and bool(value.is_inference())


def _with_gradient(value: Any, done: dict[int, Any]) -> Any:
    """Copy a tensor that was made under `torch.inference_mode`. A tied one stays one tensor."""
    if value is None or not _is_inferred(value):
        return value
    if id(value) not in done:
        from torch import nn  # lazy: loopq imports without torch

        done[id(value)] = value.detach().clone()
        if isinstance(value, nn.Parameter):
            done[id(value)] = nn.Parameter(done[id(value)], requires_grad=value.is_floating_point())
    return done[id(value)]


def _fold(module: Any, new: Any) -> None:
    """Store the weights that the module computes as parameters of its copy."""
    from torch import nn  # lazy: loopq imports without torch
    from torch.nn.utils import parametrize  # lazy: loopq imports without torch

    names = list(module.parametrizations) if "parametrizations" in module._modules else []
    if names:
        new.__class__ = parametrize.type_before_parametrizations(module)
        del new._modules["parametrizations"]
    for key, name in _hooks(module).items():
        # The call sets the weight anew, as every forward does.
        module._forward_pre_hooks[key](module, ())
        del new._forward_pre_hooks[key]
        for suffix in ("g", "v", "u", "orig", "mask"):
            new._parameters.pop(f"{name}_{suffix}", None)
            new._buffers.pop(f"{name}_{suffix}", None)
        names.append(name)
    for name in names:
        value = getattr(module, name).detach().clone()
        new.__dict__.pop(name, None)
        new._parameters[name] = nn.Parameter(value, requires_grad=False)
