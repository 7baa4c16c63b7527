"""Hooks that pass the inputs and output gradients of some layers to a side of the sums."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from loopq.calibrate.hooks import modules_of
from loopq.errors import SystemContractError
from loopq.gradients.sketch import Kept, Side
from loopq.quantizers.task import Task
from loopq.systems.base import LoopedSystem
from loopq.systems.declare import parameter_of
from loopq.systems.views import system_of


class Taps:
    """Hooks that pass inputs and output gradients of some layers to a `Side`. Use it as a context manager.

    `system` runs the model over parameters of its own that need no gradient. The graph begins at the first call of one
    of these layers.
    """

    def __init__(self, system: LoopedSystem, tasks: Sequence[Task], side: Side) -> None:
        self.system, self._here = _without_gradients(system), threading.local()
        self.side, system = side, self.system
        # No module is called with these weights and rows. Torch gives their gradients, one layer at a time.
        self._bare = [(t, parameter_of(system.model, t.parameter)) for t in tasks if not _is_called(t)]
        called = [t for t in tasks if _is_called(t)]
        self._tasks = {id(parameter_of(system.model, t.parameter)): t for t in called}
        self._parameters = [t.parameter for t in called]
        self._stack = contextlib.ExitStack()
        self.anchor = torch.zeros((), device=system.device, requires_grad=True)

    @property
    def side(self) -> Side:
        """The receiver of this thread's gradients."""
        side: Side = self._here.side
        return side

    @side.setter
    def side(self, side: Side) -> None:
        self._here.side = side

    def __enter__(self) -> Taps:
        for _, weight in self._bare:
            self._stack.callback(weight.requires_grad_(True).requires_grad_, False)
        for module in modules_of(self.system, self._parameters):
            self._stack.callback(module.register_forward_hook(self._on_call, with_kwargs=True).remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def backward(self, target: Tensor, *, last: bool) -> None:
        """Run a backward pass from a sum; `last` frees the graph."""
        wanted = [self.anchor, *(weight for _, weight in self._bare)]
        # A device's own thread would have no side, and would wait for itself where prompts run in turns.
        with torch.autograd.set_multithreading_enabled(False):
            gradients = torch.autograd.grad(target, wanted, retain_graph=not last, allow_unused=True)[1:]
        for (task, _), gradient in zip(self._bare, gradients, strict=True):
            if gradient is not None:
                # This equals a call with the unit matrix as rows.
                p = task.parameter
                rows = torch.eye(p.in_features, device=gradient.device)
                self.side.take(p.name, self.side.keep(task, rows), p.matrix(gradient).T)
        self.side.end()

    def _on_call(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor) -> Any:
        task = self._tasks[id(module.weight)]
        p = task.parameter
        rows = (args[0] if args else next(iter(kwargs.values()))).detach().reshape(-1, p.in_features)
        side: Side | None = getattr(self._here, "side", None)
        if side is None or not torch.is_grad_enabled() or not rows.shape[0]:
            return None
        if (
            not isinstance(out, Tensor)
            or out.shape[-1] != p.out_features
            or out.numel() != rows.shape[0] * p.out_features
        ):
            raise SystemContractError(
                f"layer {p.name}: its module returns something else than one row of {p.out_features} for each of "
                f"{rows.shape[0]} input rows: use metric 'inputs' there"
            )
        kept = side.keep(task, rows)

        def take(kept: Kept, gradient: Tensor) -> None:
            side.take(p.name, kept, gradient.reshape(-1, p.out_features))

        # A view, or a leaf of the graph, cannot be marked as changed in place.
        result = out.clone() if out._is_view() or (out.is_leaf and out.requires_grad) else out
        return _Tap.apply(result, self.anchor, take, *kept)


def _without_gradients(system: LoopedSystem) -> LoopedSystem:
    """The adapter of the same model, with parameters that need no gradient. They share the memory of the model's."""
    needed = [p for p in system.model.parameters() if p.requires_grad]
    return system_of(system, *((p, nn.Parameter(p.detach(), requires_grad=False)) for p in needed))


def _is_called(task: Task) -> bool:
    return bool(task.parameter.owners) and task.parameter.orientation != "table"


class _Tap(torch.autograd.Function):  # type: ignore[misc]  # torch does not say its type
    """In-place identity that forwards its gradient. A checkpointed step recomputes the kept tensors."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, take: Any, *kept: Tensor) -> Tensor:
        ctx.save_for_backward(*kept)
        ctx.take = take
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        # Read once, because a checkpointed step recomputes them at each access.
        kept = ctx.saved_tensors
        ctx.take(kept, gradient)
        return gradient, None, None, *(None for _ in kept)
