"""Models larger than memory: each visit of a layer reads its weights from the files."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from loopq.errors import CheckpointError
from loopq.models.files import find_names
from loopq.storage.files import RawTensor
from loopq.storage.model_files import narrowed, raw, set_source, to_torch, types_of
from loopq.storage.names import names_of

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


#: No other values than those of the files.
_OWN: Mapping[int, Any] = {}


class _Here(threading.local):
    """A thread's visit: the layer, values other than the files', and a function to call before it."""

    def __init__(self) -> None:
        self.prefix = ""
        self.others: Mapping[int, Callable[[], Tensor]] = _OWN
        self.give: Callable[[], None] | None = None


class Stream(Mapping[str, RawTensor]):
    """Weights of a model's layers, read when a layer is visited and dropped afterwards.

    As a mapping it gives every tensor of the model under its name in the files, with one layer in memory at a time.
    Visits of several threads follow each other. Their backward passes may not mix (`alone`).

    Parameters
    ----------
    model : nn.Module
        A model with parameters that take no memory. Afterwards its experts are modules and parts outside of layers are
        in memory. A layer's parameters keep their values until another layer is visited.
    tensors : mapping of str to RawTensor
        Mapped tensors of its files.
    renamed : bool
        Whether they use the names and layout of files. Otherwise those of the model.

    Raises
    ------
    CheckpointError
        If the files lack a parameter.
    """

    def __init__(self, model: nn.Module, tensors: Mapping[str, RawTensor], *, renamed: bool = True) -> None:
        import torch  # lazy: loopq imports without torch

        if renamed:
            find_names(model, tensors)
        self._model, self._names, self._device = model, names_of(model), torch.device("cpu")
        state = model.state_dict(keep_vars=True)
        self._types = types_of(tensors)
        self._shapes = _Shapes(model, dict(model.named_parameters(remove_duplicate=False)))
        self._members: dict[str, Any] = layers_of(model)
        self._tied = _tied(state, self._members)
        self._blocks: dict[str, dict[str, RawTensor]] = {prefix: {} for prefix in self._members}
        rest: dict[str, RawTensor] = {}
        for key, tensor in tensors.items():
            prefix = self._place(self._names.target(key))
            (rest if prefix is None else self._blocks[prefix])[key] = tensor
        there = {self._names.target(key) for key in tensors}
        #: Tensors of the files without a place in the model.
        self.unread = tuple(sorted(key for key in tensors if self._names.target(key) not in state))
        lacking = sorted(name for name in state if name not in there and not _is_tied(state, name, there))
        if lacking:
            raise CheckpointError(f"the files lack {', '.join(lacking[:5])}; config.json is of another model")
        unfuse(model)
        placed = {id(state[name]): _put(model, name, tensor) for name, tensor in self._read(rest).items()}
        for name, tensor in state.items():
            if name in self._tied and id(tensor) in placed:
                place, _, last = name.rpartition(".")
                model.get_submodule(place)._parameters[last] = placed[id(tensor)]
        if hasattr(model, "tie_weights"):
            model.tie_weights()
        if renamed:
            find_names(model, tensors)
        self._places = self._hold_places()
        self._here, self._lock = _Here(), threading.RLock()
        self._last: tuple[str, dict[str, RawTensor]] = ("", {})
        self._there: tuple[str, Any] = ("", None)
        set_source(model, self)

    def move(self, device: str) -> None:
        """Keep parts outside of layers on a device and read layers to it."""
        import torch  # lazy: loopq imports without torch
        from torch import nn  # lazy: loopq imports without torch

        self._device = torch.device(device)
        moved: dict[int, nn.Parameter] = {}
        for name, old in list(self._model.named_parameters(remove_duplicate=False)):
            module, _, last = name.rpartition(".")
            if id(old) not in moved:
                there = (
                    old.detach().to(self._device) if self._place(name) is None else _empty(old, self._device)
                )
                moved[id(old)] = nn.Parameter(there, requires_grad=False)
            self._model.get_submodule(module)._parameters[last] = moved[id(old)]
        for module in self._model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = None if buffer is None else buffer.to(self._device)

    def _hold_places(self) -> dict[str, str]:
        """Install memory-free parameters and hooks in the layers. Return file names and layers of all tensors."""
        from torch import nn  # lazy: loopq imports without torch

        names, places = names_of(self._model), {}
        for name, tensor in self._model.state_dict(keep_vars=True).items():
            prefix = self._place(name)
            if prefix is not None:
                places[names.in_file(name)] = prefix
            if prefix is not None and isinstance(tensor, nn.Parameter):
                module, _, last = name.rpartition(".")
                empty = nn.Parameter(_empty(tensor, self._device), requires_grad=False)
                self._model.get_submodule(module)._parameters[last] = empty
        # Hooked one by one, since an adapter may run a model with some of its layers, or parts of a layer.
        for prefix, block in self._members.items():
            for part in block.modules():
                part.forward = functools.partial(self._call, prefix, part.forward)
        return places | dict.fromkeys(self._stored(""), "")

    def _stored(self, prefix: str) -> dict[str, RawTensor]:
        """Tensors in file layout of a layer that holds values, or of parts outside of layers."""
        state = self._model.state_dict(keep_vars=True)
        mine = {n: t.data for n, t in state.items() if (self._place(n) or "") == prefix}
        stored = names_of(self._model).stored(self._model, mine)
        return {name: raw(narrowed(name, tensor, self._types), copy=False) for name, tensor in stored.items()}

    def _read(self, keys: Mapping[str, RawTensor]) -> dict[str, Tensor]:
        """Tensors of the model, with stacked experts, from some of the files."""
        tensors = self._names.taken(self._shapes, keys, to_torch, raw)
        return {
            name: to_torch(tensor).to(self._device, dtype)
            for name, tensor in tensors.items()
            if (dtype := self._shapes.dtype_of(name)) is not None
        }

    def _call(self, prefix: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer or a part of it. Outside of a visit of this layer it is a visit."""
        inside = self._here.prefix == prefix
        return forward(*args, **kwargs) if inside else self._visit(prefix, forward, *args, **kwargs)

    def _visit(self, prefix: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a layer. A backward pass visits it again, so a visit stores only its inputs."""
        import torch  # lazy: loopq imports without torch
        from torch.utils.checkpoint import checkpoint  # lazy: loopq imports without torch

        def run(*args: Any, **kwargs: Any) -> Any:
            here, around = self._here, self._here.prefix
            # Threads in turns share the caller's lock. Each waits here for the others.
            with self._lock if here.give is None else contextlib.nullcontext(here.give()):
                self._enter(prefix)
                here.prefix = prefix
                try:
                    return forward(*args, **kwargs)
                finally:
                    here.prefix = around
                    if around:
                        self._enter(around)

        return (
            # Layers in eval mode draw nothing, so torch's generator needs no restoring.
            checkpoint(run, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)
            if torch.is_grad_enabled()
            else run(*args, **kwargs)
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[Callable[[Callable[[], None]], None]]:
        """Keep other threads from visiting layers inside the block, so that backward passes find their weights.

        Yields
        ------
        callable
            Lets the calling thread visit layers too. It takes a function to call before each of the visits.
        """
        with self._lock:
            others = self._here.others

            def join(give: Callable[[], None]) -> None:
                self._here.give, self._here.others = give, others

            yield join

    def visited(self) -> set[int]:
        """Ids of the parameters that have values only while their layer is visited."""
        return {id(parameter) for prefix in self._members for parameter in self._own(prefix)}

    def _own(self, prefix: str) -> list[nn.Parameter]:
        """Parameters of a layer that no other part of the model has."""
        named = self._members[prefix].named_parameters()
        return [p for name, p in named if f"{prefix}{name}" not in self._tied]

    def _place(self, name: str) -> str | None:
        """The layer of a tensor. None for a part that is always in memory."""
        return None if name in self._tied else _prefix(name, self._members)

    @contextlib.contextmanager
    def others(self, values: Mapping[int, Callable[[], Tensor]]) -> Iterator[None]:
        """Visit layers with other values of some parameters, by id, in this thread. The mapping does not change."""
        before, self._here.others = self._here.others, values
        try:
            yield
        finally:
            self._here.others = before

    def _enter(self, prefix: str) -> None:
        """Read a layer in place of the last one."""
        (before, others), wanted = self._there, self._here.others
        if prefix == before and others is wanted:
            return
        if before:
            for parameter in self._own(before):
                parameter.data = _empty(parameter, self._device)
        self._there = ("", None)
        for name, tensor in self._read(self._blocks[prefix]).items():
            _fill(self._members[prefix], name.removeprefix(prefix), tensor)
        for parameter in self._own(prefix) if wanted else ():
            if id(parameter) in wanted:
                parameter.data = wanted[id(parameter)]()
        self._there = (prefix, wanted)

    def __getitem__(self, name: str) -> RawTensor:
        prefix = self._places[name]
        with self._lock:
            if prefix != self._last[0] or not self._last[1]:
                self._last = ("", {})
                if prefix:
                    with self.others(_OWN):
                        self._enter(prefix)
                self._last = (prefix, self._stored(prefix))
            return self._last[1][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


class _Shapes:
    """Interface of a model for conversions: types of its parameters before experts were unstacked."""

    def __init__(self, model: Any, parameters: Mapping[str, nn.Parameter]) -> None:
        self.config, self._parameters = getattr(model, "config", None), parameters
        self._buffers = dict(model.named_buffers(remove_duplicate=False))

    def get_parameter(self, name: str) -> nn.Parameter:
        return self._parameters[name]

    def dtype_of(self, name: str) -> torch.dtype | None:
        """Type of a tensor. None for one of the files that the model lacks."""
        tensor = self._parameters.get(name, self._buffers.get(name))
        return None if tensor is None else tensor.dtype


def _empty(like: Tensor, device: torch.device) -> Tensor:
    """A tensor of the same shape that uses no memory. Floats are NaN, so that a use outside of a visit shows."""
    import torch  # lazy: loopq imports without torch

    value = float("nan") if like.is_floating_point() else 0
    return torch.full((1,), value, dtype=like.dtype, device=device).expand(like.shape)


def layers_of(model: nn.Module) -> dict[str, nn.Module]:
    """Layers that can be read for each visit, by prefix: modules in lists that are not inside other layers.

    Modules without submodules stay in memory, because their weights may be used without a call. So do layers with no
    parameter of their own.
    """
    from torch import nn  # lazy: loopq imports without torch

    layers: dict[str, nn.Module] = {}

    def look(module: nn.Module, prefix: str, listed: bool) -> None:
        for name, child in module._modules.items():
            if child is None:
                continue
            holder = isinstance(child, nn.ModuleList | nn.ModuleDict)
            if listed and child._modules and not holder:
                layers[f"{prefix}{name}."] = child
            else:
                look(child, f"{prefix}{name}.", isinstance(child, nn.ModuleList) or (listed and holder))

    look(model, "", False)
    state = model.state_dict(keep_vars=True)
    tied = _tied(state, layers)
    untied = {_prefix(name, layers) for name in state if name not in tied}
    return {prefix: layer for prefix, layer in layers.items() if prefix in untied}


def _tied(state: Mapping[str, Tensor], layers: Mapping[str, nn.Module]) -> set[str]:
    """Names of tensors that two layers share, or a layer and another part."""
    places: dict[int, set[str | None]] = {}
    for name, tensor in state.items():
        places.setdefault(id(tensor), set()).add(_prefix(name, layers))
    return {name for name, tensor in state.items() if len(places[id(tensor)]) > 1}


def _prefix(name: str, prefixes: Mapping[str, Any]) -> str | None:
    return next((prefix for prefix in prefixes if name.startswith(prefix)), None)


def _is_tied(state: Mapping[str, Tensor], name: str, there: set[str]) -> bool:
    return any(other in there and state[other] is state[name] for other in state)


def _put(model: nn.Module, name: str, tensor: Tensor) -> Any:
    """Assign values to a parameter or a buffer permanently, and return it."""
    from torch import nn  # lazy: loopq imports without torch

    place, _, last = name.rpartition(".")
    module = model.get_submodule(place)
    if last in module._parameters:
        module._parameters[last] = nn.Parameter(tensor, requires_grad=False)
    else:
        module._buffers[last] = tensor
    return module._parameters.get(last, tensor)


def _fill(layer: nn.Module, name: str, tensor: Tensor) -> None:
    """Assign values temporarily to a parameter, a buffer or the layers of a stack of experts."""
    place, _, last = name.rpartition(".")
    module = layer.get_submodule(place)
    if last in module._parameters:
        module._parameters[last].data = tensor
    elif last in module._buffers:
        module._buffers[last] = tensor
    else:
        module.fill(last, tensor)


def unfuse(model: nn.Module) -> list[str]:
    """Turn the stacked experts of transformers 5 into modules. See `loopq.models.experts.unfuse`."""
    from loopq.models import experts  # lazy: loopq imports without torch

    return experts.unfuse(model)
