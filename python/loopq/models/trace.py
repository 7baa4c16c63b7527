"""Observe one rollout from outside: the called matrices, their order and their numbers of rows."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError, model_code
from loopq.storage.model_files import is_streamed
from loopq.systems.routing import routing_module

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.storage.weights import Orientation


_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")


@dataclass(frozen=True)
class Routed:
    """A matrix of an expert, the module that routes rows to it, and its number of rows at each call of that one."""

    module: str
    rows: list[int]


@dataclass(frozen=True)
class Trace:
    """Uses of a model's weights in one run.

    Parameters
    ----------
    calls : tuple of (str, int)
        Parameter name and number of input rows, in call order. Products stand for weights without module calls.
    watched : dict of str to str
        Storage of weights that no module is called with. Only their products show their input.
    uncalled : dict of str to str
        Weights with other uses, and the operations. Their input cannot be observed. Includes parameters with more
        dimensions.
    once : frozenset of str
        Names in `uncalled` with a single use.
    idle : tuple of str
        Weights without any use in the run.
    entered : dict of str to int
        Calls of each module that contains a list of modules (`nn.ModuleList`).
    routed : dict of str to Routed
        Experts: list members that got different parts of such a module's rows.
    """

    calls: tuple[tuple[str, int], ...]
    watched: dict[str, Orientation]
    uncalled: dict[str, str]
    once: frozenset[str]
    idle: tuple[str, ...]
    entered: dict[str, int] = field(default_factory=dict)
    routed: dict[str, Routed] = field(default_factory=dict)

    @property
    def rows(self) -> dict[str, list[int]]:
        """Input rows of each call of each parameter, ordered by first call."""
        rows_of: dict[str, list[int]] = {}
        for name, rows in self.calls:
            rows_of.setdefault(name, []).append(rows)
        return rows_of

    @property
    def repeated(self) -> dict[str, list[int]]:
        """`rows` of the parameters that are called more than once: the loop. Experts count calls of their module."""
        rows_of = {
            name: self.routed[name].rows if name in self.routed else rows for name, rows in self.rows.items()
        }
        rows_of |= {name: sent.rows for name, sent in self.routed.items() if name not in rows_of}
        return {name: rows for name, rows in rows_of.items() if len(rows) > 1}


def trace(model: nn.Module, run: Callable[[], object]) -> Trace:
    """Run a model once and record every use of its weights.

    Parameters
    ----------
    model : nn.Module
        The whole model. Weights are its two-dimensional parameters, and the kernels of its convolutions.
        Embeddings that are only looked up are left out.
    run : callable
        Runs one rollout.

    Returns
    -------
    Trace
        Parameters have the names of `named_parameters`. A tied one has its first name.
    """
    import torch  # lazy: loopq imports without torch
    from torch import nn  # lazy: loopq imports without torch

    from loopq.models.products import Products, plain_attention  # lazy: loopq imports without torch

    tables = {
        id(p) for module in model.modules() if isinstance(module, nn.Embedding) for p in module.parameters()
    }
    script = next((n for n, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)), None)
    if script is not None:
        raise SystemContractError(
            f"module {script or type(model).__name__}: TorchScript, whose layers no hook sees: give the module that it "
            "was made from"
        )
    # Stacked experts are `loopq.systems.routing.stacked_experts`.
    convolutions = nn.Conv1d | nn.Conv2d | nn.Conv3d
    conv = {id(m._parameters.get("weight")) for m in model.modules() if isinstance(m, convolutions)}
    weights = {n: p for n, p in model.named_parameters() if p.ndim == 2 or id(p) in conv}
    names = {id(p): name for name, p in weights.items() if p.ndim == 2}
    uses = _Uses(_Lists(model, names))

    def on_call(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        value = args[0] if args else next(iter(kwargs.values()))
        name = names[id(module._parameters["weight"])]
        if value.is_floating_point():
            uses.called(name, math.prod(value.shape[:-1]))
        else:
            uses.looked_up.add(name)

    handles = []
    for module in model.modules():
        if id(module._parameters.get("weight")) in names:
            handles.append(module.register_forward_pre_hook(_here(on_call), with_kwargs=True))
    for name in uses.lists.entered:
        count = functools.partial(uses.lists.enter, name)
        handles.append(model.get_submodule(name).register_forward_pre_hook(_here(count), with_kwargs=True))
    also = {n: p for n, p in model.named_parameters() if p.ndim > 1 and n not in weights}
    watch = Products(weights, uses.multiplied, uses.used, also, moving=is_streamed(model))
    run_code = model_code(lambda: f"trial run, {uses.reached()}")
    with _removed(handles), torch.no_grad(), plain_attention(), watch, run_code:
        run()
    # A table of positions or steps is often read as `weight[...]`, so its rows are not outputs of a product.
    uses.looked_up |= {names[key] for key in tables if key in names}
    return uses.trace(list(weights))


def _here(hook: Callable[..., None]) -> Callable[..., None]:
    """A hook that ignores calls of other threads."""
    thread = threading.get_ident()

    def call(*args: Any) -> None:
        if threading.get_ident() == thread:
            hook(*args)

    return call


@contextlib.contextmanager
def _removed(handles: Sequence[Any]) -> Iterator[None]:
    """Remove hooks after the block."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """Name the first module whose output holds NaN or infinity in one run, and the step: its earlier calls.

    The model has no further hooks afterwards. The text is as in "layer model.layers.1.mlp, step 0", or "no module" if
    all outputs are finite.
    """
    import torch  # lazy: loopq imports without torch

    calls: Counter[str] = Counter()
    places: list[str] = []

    def note(name: str, module: Any, args: tuple[Any, ...], output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        floats = [v for v in parts if isinstance(v, torch.Tensor) and v.is_floating_point()]
        if not places and not all(bool(torch.isfinite(v).all()) for v in floats):
            places.append(f"layer {name}, step {calls[name]}")
        calls[name] += 1

    handles = [
        module.register_forward_hook(_here(functools.partial(note, name)))
        for name, module in model.named_modules()
        if name
    ]
    with _removed(handles), torch.no_grad():
        run()
    return places[0] if places else "no module"


def token_tables(model: nn.Module, ids: Tensor, run: Callable[[], object]) -> list[nn.Embedding]:
    """Embedding tables that one run calls with the token ids themselves, not with positions or steps."""
    from torch import nn  # lazy: loopq imports without torch

    called: list[nn.Embedding] = []

    def note(table: nn.Embedding, inputs: tuple[Any, ...]) -> None:
        if inputs and inputs[0].cpu().equal(ids.cpu()):
            called.append(table)

    tables = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    with _removed([table.register_forward_pre_hook(_here(note)) for table in tables]):
        run()
    return called


class _Uses:
    """Every use of a model's weights in one run."""

    def __init__(self, lists: _Lists) -> None:
        self.lists = lists
        self.looked_up: set[str] = set()
        #: Name, rows, whether by a call of a module, and the call of the module that holds it in a list.
        self._events: list[tuple[str, int, bool, int]] = []
        self._stored: dict[str, set[Orientation]] = {}
        self._others: dict[str, str] = {}
        self._n_others: Counter[str] = Counter()

    def called(self, name: str, rows: int) -> None:
        self._events.append((name, rows, True, self.lists.step(name)))

    def multiplied(self, name: str, rows: Tensor, stored: Orientation) -> None:
        self._events.append((name, rows.shape[0], False, self.lists.step(name)))
        self._stored.setdefault(name, set()).add(stored)

    def used(self, name: str, operation: str) -> None:
        from loopq.models.products import GROUPS  # lazy: loopq imports without torch

        how = "multiplied in parts" if operation in _PRODUCTS else f"used by {operation}"
        reason = GROUPS if operation == GROUPS else f"{how}, without a call of its module"
        self._others.setdefault(name, reason)
        self._n_others[name] += 1

    def reached(self) -> str:
        calls = [name for name, _, called, _ in self._events if called]
        if not calls:
            return (
                "before the first layer (it was given token ids, or one batch; for other inputs give a list of "
                "batches, each a tuple, a dict or a float tensor)"
            )
        return f"after layer {calls[-1]} was called at step {calls.count(calls[-1]) - 1}"

    def trace(self, names: list[str]) -> Trace:
        n_calls = Counter((name, called) for name, _, called, _ in self._events)
        # A module call also shows its product. Extra products come from other code.
        watched = {n: s for n, s in self._stored.items() if n_calls[n, False] > n_calls[n, True]}
        watched = {n: s for n, s in watched.items() if n not in self.looked_up}
        turned = {n: "multiplied from both sides" for n, s in watched.items() if len(s) > 1}
        # A head without a module of its own is used once, and is no part of the loop.
        tables = [n for n in self.looked_up if n_calls[n, False] > n_calls[n, True] + 1]
        kept = [e for e in self._events if e[2] != (e[0] in watched) and e[0] not in turned]
        for name, rows, _, step in kept:
            self.lists.called(name, step, rows)
        routed = self.lists.routed()
        calls = tuple((name, rows) for name, rows, _, _ in kept)
        seen = {name for name, _ in calls} | self.looked_up
        return Trace(
            calls,
            {n: next(iter(s)) for n, s in watched.items() if n not in turned},
            {n: why for n, why in (self._others | turned).items() if n not in seen}
            | dict.fromkeys(tables, "the input embedding, which other code multiplies with"),
            frozenset(n for n, count in self._n_others.items() if count == 1 and n not in (*turned, *tables)),
            tuple(n for n in names if not (n in seen or n in self._others or n in turned or n in routed)),
            {name: len(rows) for name, rows in self.lists.entered.items()},
            routed,
        )


class _Lists:
    """Rows that list members get from the modules that hold the lists."""

    def __init__(self, model: nn.Module, names: dict[int, str]) -> None:
        #: Rows of each call of a module that holds a list, None where its input does not tell.
        self.entered: dict[str, list[int | None]] = {}
        self._held_by: dict[str, str] = {}
        self._calls: dict[str, list[tuple[int, int]]] = {}
        self._most = 0
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

    def step(self, name: str) -> int:
        """Call of the module that holds a weight in a list. -1 before the first, and without such a module."""
        return len(self.entered[self._held_by[name]]) - 1 if name in self._held_by else -1

    def called(self, name: str, step: int, rows: int) -> None:
        self._most = max(self._most, rows)
        if name in self._calls:
            self._calls[name].append((step, rows))

    def routed(self) -> dict[str, Routed]:
        """Matrices of lists with different rows per member, if some rows differ from those of the outer module."""
        lists: dict[tuple[str, str], list[str]] = {}
        for name, holder in self._held_by.items():
            before = re.match(rf"{re.escape(holder)}\b.*?\.?(?=\d+\.)", name)
            lists.setdefault((holder, before[0] if before else name), []).append(name)
        routed = {}
        for (holder, place), names in lists.items():
            if self._are_experts(holder, place, names):
                for name in names:
                    steps = range(len(self.entered[holder]))
                    sent = [sum(r for step, r in self._calls[name] if step == t) for t in steps]
                    routed[name] = Routed(holder, sent)
        return routed

    def _are_experts(self, holder: str, place: str, names: list[str]) -> bool:
        whole = self.entered[holder]
        alike: dict[str, set[tuple[tuple[int, int], ...]]] = {}
        for name in names:
            rest = name.removeprefix(place).partition(".")[2]
            alike.setdefault(rest, set()).add(tuple(self._calls[name]))
        calls = [call for name in names for call in self._calls[name]]
        given = [None if step < 0 else whole[step] for step, _ in calls]
        # A module that takes token ids does not show its rows. Members with equal numbers of rows then count as
        # layers.
        uneven = any(of is not None and of != rows for of, (_, rows) in zip(given, calls, strict=True))
        uneven |= None in given and len({rows for _, rows in calls}) > 1
        # A member that one call of the module calls repeatedly with all rows is a loop inside the list.
        full = [
            (step, rows)
            for step, rows in calls
            if rows == ((whole[step] if step >= 0 else None) or self._most)
        ]
        loops = any(Counter(self._calls[name])[call] > 1 for name in names for call in full)
        return uneven and not loops and any(len(calls) > 1 for calls in alike.values())
