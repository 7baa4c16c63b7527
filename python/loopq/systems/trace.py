"""One rollout watched from outside: which matrices are called, in what order, with how many rows."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.systems.base import model_code, routing_module

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class Routed:
    """A matrix of an expert.

    Parameters
    ----------
    module : str
        Module that sends rows to it.
    rows : list of int
        Rows that it got at each call of that module.
    """

    module: str
    rows: list[int]


@dataclass(frozen=True)
class Trace:
    """What one run did with a model's matrices.

    Parameters
    ----------
    calls : tuple of (str, int)
        Parameter name and input rows, in the order of the calls of its modules.
    uncalled : tuple of str
        Matrices that the run used without calling the module that holds them, so that no hook saw the input.
    idle : tuple of str
        Matrices that the run did not use at all.
    entered : dict of str to int
        Calls of each module that holds a list of others (`nn.ModuleList`).
    routed : dict of str to Routed
        Matrices of lists that got some of the rows of such a module, and not all the same: experts.
    """

    calls: tuple[tuple[str, int], ...]
    uncalled: tuple[str, ...]
    idle: tuple[str, ...]
    entered: dict[str, int] = field(default_factory=dict)
    routed: dict[str, Routed] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, list[int]]:
        """Input rows of each call of each parameter, in the order of first calls."""
        found: dict[str, list[int]] = {}
        for name, rows in self.calls:
            found.setdefault(name, []).append(rows)
        return found

    @property
    def repeated(self) -> dict[str, list[int]]:
        """`rows` of the parameters that are called more than once: the loop. Of experts, by call of their module."""
        found = {
            name: self.routed[name].rows if name in self.routed else rows for name, rows in self.rows.items()
        }
        found |= {name: sent.rows for name, sent in self.routed.items() if name not in found}
        return {name: rows for name, rows in found.items() if len(rows) > 1}


def trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Run a model once and note every use of its matrices.

    Parameters
    ----------
    model : nn.Module
        The whole model. Matrices are its parameters of two dimensions; embeddings that are only looked up
        are left out.
    run : callable
        Runs one rollout.

    Returns
    -------
    Trace
        Parameters are named as `named_parameters` does, a tied one by its first name.
    """
    import torch  # lazy: loopq imports without torch
    from torch import nn  # lazy: loopq imports without torch
    from torch.overrides import TorchFunctionMode  # lazy: loopq imports without torch

    tables = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    names = {id(p): name for name, p in model.named_parameters() if p.ndim == 2}
    calls: list[tuple[str, int]] = []
    lists = _Lists(model, names)
    looked_up: set[int] = set()
    used: set[int] = set()

    class Uses(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            # Reading a shape or a device is no use; what gives a tensor is.
            if isinstance(out, torch.Tensor):
                used.update(id(a) for a in args if id(a) in names)
            return out

    def on_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else next(iter(kwargs.values()))
        key = id(module._parameters["weight"])
        if value.is_floating_point():
            calls.append((names[key], math.prod(value.shape[:-1])))
            lists.called(*calls[-1])
        else:
            looked_up.add(key)

    handles = []
    for module in model.modules():
        if id(module._parameters.get("weight")) in names:
            handles.append(module.register_forward_pre_hook(on_call, with_kwargs=True))
    for name in lists.entered:
        count = functools.partial(lists.enter, name)
        handles.append(model.get_submodule(name).register_forward_pre_hook(count, with_kwargs=True))
    try:
        with torch.no_grad(), Uses(), model_code(lambda: f"trial run, {_reached(calls)}"):
            run()
    finally:
        for handle in handles:
            handle.remove()
    called = {name for name, _ in calls}
    seen = {names[key] for key in looked_up}
    # A table of positions or steps is often read as `weight[...]`: its rows are no outputs of a product.
    seen |= {names[key] for key in tables if key in names}
    functional = [n for key, n in names.items() if key in used and n not in called and n not in seen]
    idle = [n for key, n in names.items() if key not in used and n not in called and n not in seen]
    routed = lists.routed()
    idle = [n for n in idle if n not in routed]
    entered = {name: len(rows) for name, rows in lists.entered.items()}
    return Trace(tuple(calls), tuple(functional), tuple(idle), entered, routed)


class _Lists:
    """What the modules in lists get of the rows of the modules that hold the lists."""

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        #: Rows of each call of a module that holds a list, None where its input does not tell.
        self.entered: dict[str, list[int | None]] = {}
        self._held_by: dict[str, str] = {}
        self._calls: dict[str, list[tuple[int, int]]] = {}
        for name in names.values():
            module = name.rpartition(".")[0]
            holder = routing_module(model, module) if module else None
            if holder is not None:
                self._held_by[name] = holder
                self._calls[name] = []
                self.entered[holder] = []

    def enter(self, name: str, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = next((v for v in (*args, *kwargs.values()) if hasattr(v, "shape")), None)
        rows = None if value is None or not value.is_floating_point() else math.prod(value.shape[:-1])
        self.entered[name].append(rows)

    def called(self, name: str, rows: int) -> None:
        if name in self._calls:
            self._calls[name].append((len(self.entered[self._held_by[name]]) - 1, rows))

    def routed(self) -> dict[str, Routed]:
        """Matrices of lists whose members got unlike rows, of which some are not those of the module around them."""
        lists: dict[tuple[str, str], list[str]] = {}
        for name, holder in self._held_by.items():
            before = re.match(rf"{re.escape(holder)}\b.*?\.?(?=\d+\.)", name)
            lists.setdefault((holder, before[0] if before else name), []).append(name)
        found = {}
        for (holder, place), names in lists.items():
            whole = self.entered[holder]
            alike: dict[str, set[tuple[tuple[int, int], ...]]] = {}
            for name in names:
                rest = name.removeprefix(place).partition(".")[2]
                alike.setdefault(rest, set()).add(tuple(self._calls[name]))
            some = any(step < 0 or whole[step] != rows for name in names for step, rows in self._calls[name])
            if some and any(len(calls) > 1 for calls in alike.values()):
                for name in names:
                    sent = [sum(r for step, r in self._calls[name] if step == t) for t in range(len(whole))]
                    found[name] = Routed(holder, sent)
        return found


def _reached(calls: list[tuple[str, int]]) -> str:
    if not calls:
        return "before the first layer"
    name = calls[-1][0]
    step = sum(other == name for other, _ in calls) - 1
    return f"after layer {name} was called at step {step}"
