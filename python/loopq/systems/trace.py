"""One rollout watched from outside: which matrices are called, in what order, with how many rows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopq.systems.base import model_code

if TYPE_CHECKING:
    from torch import nn


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
    """

    calls: tuple[tuple[str, int], ...]
    uncalled: tuple[str, ...]
    idle: tuple[str, ...]

    @property
    def rows(self) -> dict[str, list[int]]:
        """Input rows of each call of each parameter, in the order of first calls."""
        found: dict[str, list[int]] = {}
        for name, rows in self.calls:
            found.setdefault(name, []).append(rows)
        return found

    @property
    def repeated(self) -> dict[str, list[int]]:
        """`rows` of the parameters that are called more than once: the loop."""
        return {name: rows for name, rows in self.rows.items() if len(rows) > 1}


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
    import torch
    from torch import nn
    from torch.overrides import TorchFunctionMode

    tables = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    names = {id(p): name for name, p in model.named_parameters() if p.ndim == 2}
    calls: list[tuple[str, int]] = []
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
        else:
            looked_up.add(key)

    handles = []
    for module in model.modules():
        if id(module._parameters.get("weight")) in names:
            handles.append(module.register_forward_pre_hook(on_call, with_kwargs=True))
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
    return Trace(tuple(calls), tuple(functional), tuple(idle))


def _reached(calls: list[tuple[str, int]]) -> str:
    if not calls:
        return "before the first layer"
    name = calls[-1][0]
    step = sum(other == name for other, _ in calls) - 1
    return f"after layer {name} was called at step {step}"
