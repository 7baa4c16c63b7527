"""Owned forward hooks: step t of a parameter is its t-th invocation within one rollout.

An expert is called at some steps only. Its steps are the calls of the module that sends rows to it.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from loopq.calibrate.calls import is_finite
from loopq.errors import CalibrationError, NonFiniteError, model_code
from loopq.layers.shared import SharedParameter
from loopq.storage.model_files import is_streamed, source_of, to_torch
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.capabilities import Discovers
from loopq.systems.declare import parameter_of

if TYPE_CHECKING:
    from torch import Tensor, nn

Sink = Callable[[SharedParameter, int, "Tensor"], None]
InputKey = tuple[int, tuple[int, ...], tuple[int, ...], float]


class _AllSeen(BaseException):
    """Ends a rollout whose rows are all seen. A model's own handlers of errors let it pass."""


class Observer:
    """Passes the input rows of every shared parameter, step by step, to a sink.

    Use it as a context manager. The hooks exist inside the block and are removed after it, also after an error.
    Each rollout has its own scope, in which invocations are counted from 0 and checked at the end.

    Parameters
    ----------
    parameters : sequence of SharedParameter
        Parameters to watch. Others are ignored.
    sink : callable
        Called with parameter, step and input rows, Tensor (n_rows, in_features), in the order of the calls. Calls of
        an expert without rows are skipped.
    check_finite : bool
        Refuse NaN and infinity.
    ends : bool
        End each rollout after the last row, so the layers behind it and the head do not run. This applies to systems of
        `fixed_depth` only, where no later call can be missed.
    """

    def __init__(
        self,
        system: LoopedSystem,
        parameters: Sequence[SharedParameter],
        sink: Sink,
        *,
        check_finite: bool = True,
        ends: bool = False,
    ) -> None:
        self._system = system
        self._parameters = {id(parameter_of(system.model, p)): p for p in parameters}
        self._watched = {p.name: p for p in parameters if not p.owners}
        #: Whether the number of calls may differ between prompts: a run showed the loop, and its end may be its own.
        self._open = isinstance(system, Discovers)
        #: Least and most calls of a parameter in a rollout, where they differ from those that the system declares.
        self.differing: tuple[int, int] | None = None
        ends = ends and not self._open and not any(p.routed_in for p in parameters)
        #: Calls of a rollout that ends with the last one; 0 if it runs to its output.
        self._n_calls = ends * sum(p.invocations for p in self._parameters.values())
        self._sink = sink
        self._failed: list[Exception] = []
        self._check_finite = check_finite
        self._counts: dict[str, int] = {}
        self._last = ""
        self._batch: Batch | None = None
        self._thread = 0
        self._handles: list[Any] = []
        self._entered = False

    def __enter__(self) -> Observer:
        self._entered = True
        for module in modules_of(self._system, self._parameters.values()):
            self._handles.append(module.register_forward_pre_hook(self._on_call, with_kwargs=True))
        names = dict(self._system.model.named_modules(remove_duplicate=False))
        for name, invocations in {p.routed_in: p.invocations for p in self._parameters.values()}.items():
            if name:
                count = functools.partial(self._on_step, name, invocations)
                self._handles.append(names[name].register_forward_pre_hook(count))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._entered = False

    @contextlib.contextmanager
    def rollout(self, batch: Batch) -> Iterator[None]:
        """Scope of one rollout. Invocations are counted from 0 and checked at its end.

        Raises
        ------
        CalibrationError
            A parameter is called never, or not as often as its system declares. Or the model itself fails: the message
            then names the last layer and step.
        """
        if not self._entered:
            raise CalibrationError("the observer is used outside its block: its hooks are not attached")
        self._batch, self._thread = batch, threading.get_ident()
        self._counts = {p.routed_in or p.name: 0 for p in self._parameters.values()}
        self._last = "before the first layer"
        self._failed.clear()
        try:
            with self._watch(), model_code(lambda: f"rollout of {batch.name}, {self._last}"):
                with contextlib.suppress(_AllSeen):
                    yield
            self._check_counts()
        except CalibrationError as error:
            # An error of the sink passes through the model, but is not the model's error.
            if any(error.__cause__ is failed for failed in self._failed):
                raise self._failed[0] from None
            raise
        finally:
            self._batch = None

    @contextlib.contextmanager
    def _watch(self) -> Iterator[None]:
        """Observe the products of weights that belong to no called module."""
        if not self._watched:
            yield
            return
        from loopq.models.products import Products, plain_attention  # lazy: loopq imports without torch

        model = self._system.model
        weights = {name: parameter_of(model, p) for name, p in self._watched.items()}
        watch = Products(
            weights,
            lambda name, rows, _: self._observed(self._watched[name], rows),
            moving=is_streamed(model),
        )
        with plain_attention(), watch:
            yield

    def _check_counts(self) -> None:
        for parameter in self._parameters.values():
            count = self._counts[parameter.routed_in or parameter.name]
            if count == 0:
                modules = parameter.routed_in or ", ".join(parameter.owners)
                raise CalibrationError(
                    f"layer {parameter.name}: selected but never observed: no hooked module that holds it was "
                    f"called (modules: {modules}). Exclude it, or declare it as used without a call"
                )
            if count != parameter.invocations and not self._open:
                raise CalibrationError(
                    f"layer {parameter.name}: called {count} times in one rollout, its system declares "
                    f"{parameter.invocations}; {self._differs()}"
                )
            if count != parameter.invocations:
                least, most = self.differing or (parameter.invocations,) * 2
                self.differing = min(least, count), max(most, count)

    def _differs(self) -> str:
        assert self._batch is not None
        return (
            "depth, caching or chunking differ from what was declared. A loop that ends by its own state (halting, "
            "early exit) needs `--system generic`, which counts no calls"
        )

    def _on_step(self, name: str, invocations: int, *_: Any) -> None:
        """Count a call of a module that sends rows to experts."""
        if self._is_rollout():
            self._next(name, f"module {name}", invocations)

    def _is_rollout(self) -> bool:
        """Whether a call belongs to a rollout. One outside its scope (a warm-up, another thread's) has no step."""
        return self._batch is not None and self._thread == threading.get_ident()

    def _next(self, counted: str, what: str, invocations: int) -> int:
        """Return the step of a call and count it under a name."""
        step = self._counts[counted]
        self._counts[counted] = step + 1
        if step >= invocations:
            if self._open:
                # Sums run over all calls, however many. The last step holds the further ones.
                return invocations - 1
            raise CalibrationError(
                f"{what}: invocation {step} in one rollout, its system declares "
                f"{invocations}; {self._differs()}"
            )
        return step

    def _on_call(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> None:
        # While a hook is set or removed, torch may call it from another thread without the keywords.
        if not self._is_rollout():
            return
        value = args[0] if args else next(iter((kwargs or {}).values()))
        self._observed(self._parameters[id(module.weight)], value)

    def _observed(self, parameter: SharedParameter, value: Tensor) -> None:
        if parameter.routed_in:
            step = min(self._counts[parameter.routed_in], parameter.invocations) - 1
        else:
            step = self._next(parameter.name, f"layer {parameter.name}", parameter.invocations)
        if step < 0:
            raise CalibrationError(
                f"layer {parameter.name}: called before {parameter.routed_in}, whose calls are its steps"
            )
        self._last = f"after layer {parameter.name} was called at step {step}"
        rows = value.detach().reshape(-1, parameter.in_features)
        if parameter.routed_in and not rows.shape[0]:
            return
        if self._check_finite:
            self._refuse_non_finite(parameter, step, rows)
        try:
            self._sink(parameter, step, rows)
        except Exception as cause:
            self._failed.append(cause)
            raise
        if self._n_calls and sum(self._counts.values()) == self._n_calls:
            raise _AllSeen

    def _refuse_non_finite(self, parameter: SharedParameter, step: int, rows: Tensor) -> None:
        finite = rows.isfinite()
        if bool(finite.all()):
            return
        row, column = (int(i) for i in (~finite).nonzero()[0])
        assert self._batch is not None
        per_prompt = max(1, rows.shape[0] // len(self._batch.prompts))
        prompt = self._batch.prompts[min(row // per_prompt, len(self._batch.prompts) - 1)]
        where = f" ({self._batch.unit} {prompt}, position {row % per_prompt})" * (not parameter.routed_in)
        cause = (
            f"the model overflows here: run it in bfloat16 or float32, or leave this {self._batch.unit} out"
        )
        if self._batch.call is not None and not is_finite(self._batch.call):
            cause = (
                "the batch itself holds NaN or infinity, and the model does not take them for missing values"
            )
        raise NonFiniteError(
            f"layer {parameter.name}, step {step}, row {row}{where}, column {column}: {float(rows[row, column])}; "
            f"{damaged_weight(self._system) or cause}"
        )


def damaged_weight(system: LoopedSystem) -> str:
    """Name a parameter of rollouts that holds NaN, or a matrix that holds infinity. Empty if there is none."""
    import torch  # lazy: loopq imports without torch

    stream = source_of(system.model)
    named: Iterable[tuple[str, Tensor]] = system.model.named_parameters()
    for name, tensor in named if stream is None else ((n, to_torch(t)) for n, t in stream.items()):
        if not tensor.is_floating_point() or name.startswith(system.published.idle):
            continue
        # A sum is one pass without memory. Single numbers are checked only if it is not finite.
        if not bool(torch.isfinite(tensor.detach().sum(dtype=torch.float32))):
            wrong = tensor.isnan() if tensor.ndim < 2 else ~torch.isfinite(tensor)
            if bool(wrong.any()):
                place = ", ".join(str(int(i)) for i in torch.nonzero(wrong)[0])
                return (
                    f"the model's own {name} holds NaN or infinity, at [{place}]: its file is damaged; copy or convert "
                    "it again"
                )
    return ""


def modules_of(system: LoopedSystem, parameters: Iterable[SharedParameter]) -> list[nn.Module]:
    """Return the modules that hold some parameters. One object under two names is one module."""
    names = dict(system.model.named_modules(remove_duplicate=False))
    return list({id(names[owner]): names[owner] for p in parameters for owner in p.owners}.values())


@contextlib.contextmanager
def counted_calls(system: LoopedSystem, n_steps: int) -> Iterator[Counter[str]]:
    """Count the calls of each shared parameter inside the block. Weights that no module is called with are left out."""
    calls: Counter[str] = Counter()
    thread = threading.get_ident()

    def count(name: str, *_: Any) -> None:
        if threading.get_ident() == thread:
            calls[name] += 1

    with contextlib.ExitStack() as stack:
        for parameter in system.shared_parameters(n_steps):
            for module in modules_of(system, [parameter]):
                hook = functools.partial(count, parameter.name)
                stack.callback(module.register_forward_pre_hook(hook).remove)
        yield calls


def input_key(value: Tensor) -> InputKey:
    """Identity of a tensor's contents while it is alive and unmodified."""
    # Tensors of an inference mode do not count their changes.
    version = float(value.sum()) if value.is_inference() else value._version
    return (value.data_ptr(), tuple(value.shape), tuple(value.stride()), version)


def find_input_groups(
    system: LoopedSystem, parameters: Sequence[SharedParameter], batch: Batch, n_steps: int
) -> tuple[dict[str, str], dict[str, float], Tensor]:
    """Find parameters that read the same input at every invocation, as q, k and v do, and the rows of experts.

    Parameters
    ----------
    parameters : sequence of SharedParameter
        Parameters to group.
    batch : Batch
        Prompts of one small rollout. All its inputs stay in memory until it ends.

    Returns
    -------
    input_groups : dict of str to str
        Parameter name to the name of the parameter of its group that is called first.
    shares : dict of str to float
        Rows of each expert's parameter, as a share of the tokens, in the order of the calls. It is the mean over the
        steps.
    output : Tensor
        The rollout's output.
    """
    # In the order of the calls, which need not be the order of the declarations (BioGPT).
    inputs: dict[str, list[InputKey]] = {}
    n_rows: dict[str, int] = {}
    alive = []

    def keep(parameter: SharedParameter, step: int, rows: Tensor) -> None:
        # Holding every input prevents the reuse of its memory, so addresses identify tensors.
        alive.append(rows)
        inputs.setdefault(parameter.name, []).append(input_key(rows))
        if parameter.routed_in:
            n_rows[parameter.name] = n_rows.get(parameter.name, 0) + rows.shape[0]

    with Observer(system, parameters, keep) as observer, observer.rollout(batch):
        output = system.rollout(batch, n_steps)
    input_groups: dict[tuple[Any, ...], str] = {}
    # Torch copies the rows of a product for some shapes only, so each product has its own group.
    products = {p.name for p in parameters if not p.owners}
    group_of = {
        name: input_groups.setdefault((name,) if name in products else tuple(keys), name)
        for name, keys in inputs.items()
    }
    like = _experts_alike(parameters, group_of)
    tokens = batch.input_ids.numel()
    experts = {p.name: p for p in parameters if p.routed_in}
    called = [experts[name] for name in dict.fromkeys((*n_rows, *experts))]
    shares = {p.name: n_rows.get(p.name, 0) / (tokens * p.invocations) for p in called}
    groups = {p.name: group_of.get(p.name) or like.get(p.name, p.name) for p in parameters}
    return groups, shares, output


def _experts_alike(parameters: Sequence[SharedParameter], group_of: dict[str, str]) -> dict[str, str]:
    """Give experts without rows the input groups of an expert of the same module that has rows."""
    places = {p.name: place for p in parameters if (place := p.expert) is not None}
    names = {place: name for name, place in places.items()}
    within: dict[tuple[str, str], str] = {}
    for name, (before, number, after) in places.items():
        group = places.get(group_of.get(name, ""))
        if group is not None and group[:2] == (before, number):
            within.setdefault((before, after), group[2])
    like = {}
    for name, (before, number, after) in places.items():
        first = names.get((before, number, within.get((before, after), after)))
        if first is not None:
            like[name] = first
    return like
