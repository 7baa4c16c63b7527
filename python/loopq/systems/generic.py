"""Discover the loop of any torch model by running it once."""

from __future__ import annotations

import fnmatch
import functools
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.errors import CalibrationError, ConfigError, LoopqError, SystemContractError
from loopq.systems import SYSTEMS
from loopq.systems.base import (
    Batch,
    LoopedSystem,
    SharedParameter,
    cache_name,
    cached,
    declare,
    gates,
    owners_of_parameters,
    past,
    stacked_experts,
)
from loopq.systems.trace import Trace, token_tables, trace

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.systems.base import Orientation, Output

_PROBE_TOKENS = (8, 16, 32, 64, 128, 256)
_PROBE_ROWS = 16
_UNCLEAR = (
    "expert of a module that is called once, so that its steps cannot be told apart: put gate and experts into a "
    "module that each step calls"
)


@dataclass(frozen=True)
class Discovery:
    """The loop found by one run.

    Parameters
    ----------
    order : tuple of str
        Looped parameters, ordered by first call.
    rows : dict of str to list of int
        Input rows of each parameter at each step.
    n_prompts, n_tokens : int
        Shape of the prompts of the run.
    others : dict of str to str
        All other weights, with the number of calls and the reason why they are not taken.
    left_out : dict of str to str
        Entries of `others` that the loop may still use. They are weights used without a call of their module, gates of
        experts, and experts that one call of their module calls several times.
    watched : dict of str to str
        Storage of looped parameters that no module is called with. Their products are watched.
    routed_in : dict of str to str
        Maps expert weights to the module that routes rows to them. Its calls are their steps.
    output : {"logits", "hidden"}
        What the model gives.
    """

    order: tuple[str, ...]
    rows: dict[str, list[int]]
    n_prompts: int
    n_tokens: int
    others: dict[str, str]
    left_out: dict[str, str]
    watched: dict[str, Orientation] = field(default_factory=dict)
    routed_in: dict[str, str] = field(default_factory=dict)
    output: Output = "logits"

    @property
    def depth(self) -> int:
        """Largest number of calls of one parameter."""
        return max((len(rows) for rows in self.rows.values()), default=1)

    def lines(self) -> list[str]:
        """Return the findings as lines to print."""
        if not self.order:
            text = ["no parameter is called more than once: this model has no loop that loopq can see"]
            return text + _alike(self.others)
        text = [
            f"{len(self.order)} looped parameters, depth {self.depth}, "
            f"run with {self.n_prompts} prompts of {self.n_tokens} tokens",
        ]
        for name in self.order:
            rows = self.rows[name]
            shown = f"{rows[0]} each" if len(set(rows)) == 1 else ", ".join(map(str, rows))
            what = f"an expert of {self.routed_in[name]}, " if name in self.routed_in else ""
            calls = "steps" if what else "products" if name in self.watched else "calls"
            text.append(f"{name}: {what}{len(rows)} {calls}, rows {shown}")
        return text + [f"not quantized: {line}" for line in _alike(self.left_out)]


def _alike(reasons: dict[str, str]) -> list[str]:
    """A line for each weight and its reason. Names that differ only in numbers share a line."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, reason in reasons.items():
        kinds.setdefault((re.sub(r"\b\d+\b", "*", name), reason), []).append(name)
    return [
        f"{kind} ({len(names)} weights): {reason}" if len(names) > 1 else f"{names[0]}: {reason}"
        for (kind, reason), names in kinds.items()
    ]


def discover(model: nn.Module, batch: Batch, run: Callable[[Batch], Tensor] | None = None) -> Discovery:
    """Find the loop of a model by one run.

    Parameters
    ----------
    model : nn.Module
        Any torch model.
    batch : Batch
        Prompts to run.
    run : callable, optional
        Takes the batch, runs one rollout and returns its output. By default the model is called with the ids, without
        cache.

    Returns
    -------
    Discovery

    Examples
    --------
    >>> import torch
    >>> from torch import nn
    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.embed, self.core = nn.Embedding(16, 8), nn.Linear(8, 8)
    ...
    ...     def forward(self, ids):
    ...         return self.core(self.core(self.embed(ids)))
    >>> print(discover(Twice(), Batch(torch.zeros(2, 3, dtype=torch.long), (0, 1))).lines()[1])
    core.weight: 2 calls, rows 6 each
    """
    outputs: list[Tensor] = []

    def once() -> None:
        outputs.append(run(batch) if run else call_plain(model, batch.input_ids))

    tables: list[nn.Embedding] = []
    found: Trace = trace(model, lambda: tables.extend(token_tables(model, batch.input_ids, once)))
    routed = {name: sent.module for name, sent in found.routed.items()}
    gate = gates(model, dict.fromkeys(routed.values()))
    loop = {name: rows for name, rows in found.repeated.items() if name not in gate}
    n_prompts, n_tokens = (int(n) for n in batch.input_ids.shape)
    others = {n: why for n, why in _not_taken(model, found).items() if n not in loop} | gate
    hidden = set(found.uncalled) - found.once
    # Padding rows may make a head larger than the table.
    is_logits = all(outputs[0].shape[-1] >= table.num_embeddings for table in tables)
    return Discovery(
        tuple(loop),
        loop,
        n_prompts,
        n_tokens,
        others,
        {n: why for n, why in others.items() if n in hidden or n in gate or why == _UNCLEAR}
        | stacked_experts(model),
        {name: found.watched[name] for name in loop if name in found.watched},
        {name: routed[name] for name in loop if name in routed},
        "logits" if is_logits else "hidden",
    )


def _not_taken(model: nn.Module, found: Trace) -> dict[str, str]:
    """Reasons why weights are not taken, for all that are not called more than once."""
    rows, idle = found.rows, set(found.idle)
    reasons = {}
    for name, parameter in model.named_parameters():
        if name in found.routed and len(found.routed[name].rows) == 1 < len(rows.get(name, ())):
            reasons[name] = _UNCLEAR
        elif name in found.uncalled:
            reasons[name] = found.uncalled[name]
        elif name in idle:
            reasons[name] = "not used by this run"
        elif parameter.ndim >= 2:
            looked_up = "looked up, never multiplied" if parameter.ndim == 2 else "no matrix"
            reasons[name] = f"called {len(rows[name])} time(s)" if name in rows else looked_up
    return reasons


def call_plain(model: nn.Module, ids: Tensor, keeps_graph: bool = False, **arguments: int) -> Tensor:
    """Call a model with token ids, without cache if it has one, and return the tensor in its output.

    Returns
    -------
    Tensor, shape (n_prompts, n_tokens, ...)
        Shape (n_prompts, 1, ...) if the model returns one row per prompt.
    """
    import torch  # lazy: loopq imports without torch

    ids = ids.to(next(model.parameters()).device)
    parameters = inspect.signature(model.forward).parameters
    cached = "use_cache" in parameters
    with torch.set_grad_enabled(keeps_graph):
        out = model(ids, use_cache=False, **arguments) if cached else model(ids, **arguments)
    found = [t for t in _outputs(out) if t.ndim in (2, 3) and t.shape[0] == ids.shape[0]]
    first = next((t for t in found if t.ndim == 3), found[0][:, None] if found else None)
    if first is None:
        raise SystemContractError(
            f"{type(model).__name__}: its forward gives no tensor (n_prompts, n_tokens, ...); "
            "write an adapter: a subclass of loopq.systems.LoopedSystem with rollout and shared_parameters"
        )
    return first


def _outputs(out: Any) -> Iterator[Tensor]:
    """Floating-point tensors in a forward's output, the most likely output first."""
    import torch  # lazy: loopq imports without torch

    if isinstance(out, torch.Tensor):
        yield from [out] if out.is_floating_point() else []
        return
    fields = out if isinstance(out, Mapping) else getattr(out, "__dict__", {})
    for name in ("logits", "last_hidden_state"):
        yield from _outputs(fields[name]) if name in fields else ()
    values = out if isinstance(out, tuple | list) else fields.values()
    for value in values:
        yield from _outputs(value) if isinstance(value, torch.Tensor | tuple | list) else ()


@SYSTEMS.register("generic")
class Generic(LoopedSystem):
    """The loop shown by one plain run of the model: every matrix that is called more than once.

    loopq uses it only when named. A run alone cannot tell which layers feed the loop back, or whether the model draws
    its own noise.

    Parameters
    ----------
    model : nn.Module
        Any torch model that takes token ids.
    select : sequence of str
        Shell patterns of parameter names to take. By default all looped ones.
    depth : str, optional
        Argument of the model's forward that sets the number of steps. Without it, only the model's default depth is
        available.
    """

    name = "generic"
    summary = "any model: what one run calls more than once; named by --system generic"
    fixed_depth = False

    def __init__(self, model: nn.Module, select: Sequence[str] = ("*",), depth: str | None = None) -> None:
        super().__init__(model)
        self._select = tuple(select)
        self._depth = depth
        self._found: dict[int | None, Discovery] = {}
        self._like: Tensor | None = None
        if depth is not None and depth not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                f"{type(model).__name__}: its forward has no argument {depth!r} that could set the number of steps; it "
                f"has {', '.join(inspect.signature(model.forward).parameters)}"
            )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Never by itself."""
        return False

    def look(self, batch: Batch) -> None:
        """Find the loop with prompts of this length, because a loop over blocks of tokens grows with them."""
        if self._like is None or self._like.shape != batch.input_ids.shape:
            self._found.clear()
        self._like = batch.input_ids

    def discovery(self, n_steps: int | None = None) -> Discovery:
        """The loop at a depth, found by one short run at the first request."""
        if n_steps not in self._found:
            found = self._discovered(n_steps)
            if not found.order:
                raise SystemContractError(f"{type(self.model).__name__}: " + "\n  ".join(found.lines()))
            self._found[n_steps] = found
        return self._found[n_steps]

    def _discovered(self, n_steps: int | None) -> Discovery:
        failed: list[LoopqError] = []
        # Some models accept prompts of one length only.
        for n_tokens in _PROBE_TOKENS if self._like is None else (self._like.shape[1],):
            try:
                return discover(self.model, self._probe(n_tokens), lambda b: self._call(b, n_steps))
            except CalibrationError as cause:
                failed.append(cause)
        raise failed[0]

    def _probe(self, n_tokens: int) -> Batch:
        """The given prompts and others, enough different ones for a router to show its experts."""
        import torch  # lazy: loopq imports without torch

        n_prompts = max(2, _PROBE_ROWS // n_tokens)
        tables = (m.num_embeddings for m in self.model.modules() if isinstance(m, torch.nn.Embedding))
        ids = torch.arange(n_prompts * n_tokens) % min(tables, default=_PROBE_TOKENS[0])
        rows = [ids.reshape(n_prompts, n_tokens)]
        if self._like is not None and self._like.shape[1] == n_tokens:
            rows.append(self._like)
        return Batch(torch.cat(rows), tuple(range(sum(map(len, rows)))))

    @property
    def output(self) -> Output:  # type: ignore[override]
        """Hidden states if the output is narrower than the token table, else logits."""
        return self.discovery().output

    def _call(self, batch: Batch, n_steps: int | None) -> Tensor:
        arguments = {self._depth: n_steps} if self._depth is not None and n_steps is not None else {}
        return call_plain(self.model, batch.input_ids, self.keeps_graph, **arguments)

    @property
    def n_steps(self) -> int:
        """Largest number of calls of one parameter."""
        return self.discovery().depth

    def check_depth(self, n_steps: int) -> int:
        """Reject every depth but the model's default, unless an argument of its forward sets the depth."""
        if self._depth is not None:
            return super().check_depth(n_steps)
        if n_steps != self.n_steps and not self._grows:
            raise ConfigError(
                f"generic: the model runs {self.n_steps} steps by itself, so n_steps must be that; got {n_steps}. Name "
                "the argument of its forward that sets the number of steps: Generic(model, depth='...')"
            )
        return n_steps

    @functools.cached_property
    def _grows(self) -> bool:
        """Whether a longer prompt has more steps. Each length then has its own number."""
        try:
            longer = discover(
                self.model, self._probe(2 * self.discovery().n_tokens), lambda b: self._call(b, None)
            )
        except LoopqError:  # Too long for the model.
            return False
        return longer.depth != self.n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Parameters called more than once that a pattern selects.

        Raises
        ------
        SystemContractError
            If a pattern selects no matrix, or one that the run never called.
        """
        found = self.discovery(n_steps if self._depth is not None else None)
        owners = owners_of_parameters(self.model)
        every = [name for name, p in self.model.named_parameters() if p.ndim >= 2]
        for pattern in self._select:
            chosen = fnmatch.filter(every, pattern)
            unseen = [name for name in chosen if name in found.left_out]
            if not chosen or (pattern != "*" and unseen):
                raise SystemContractError(
                    f"{pattern!r} selects {unseen[0] if unseen else 'no matrix'}: "
                    "selected but never observed; exclude it, or declare it in an adapter of your own"
                )
        taken = [n for n in found.order if any(fnmatch.fnmatchcase(n, p) for p in self._select)]
        return tuple(self._shared(name, found, owners) for name in taken)

    def _shared(self, name: str, found: Discovery, owners: dict[int, list[str]]) -> SharedParameter:
        weight, stored = self.model.get_parameter(name), found.watched.get(name)
        fields = {
            "role": "expert" if name in found.routed_in else "looped",
            "invocations": len(found.rows[name]),
            "routed_in": found.routed_in.get(name, ""),
        }
        if stored is None:
            return declare(self.model, [(owners[id(weight)][0], fields)], 1)[0]
        inputs, outputs = weight.shape[:2] if stored == "in_out" else weight.shape[1::-1]
        return SharedParameter(name, (), inputs, outputs, stored, **fields)  # type: ignore[arg-type]

    def left_out(self) -> dict[str, str]:
        """Matrices used without a call, gates of experts, and experts with unobservable inputs."""
        return self.discovery().left_out

    def missed(self) -> dict[str, str]:
        """Weights that the run used without showing their input."""
        gates = {n for n, why in self.left_out().items() if why.startswith("a gate")}
        return {n: why for n, why in self.left_out().items() if n not in gates}

    def describe_loop(self) -> tuple[str, ...]:
        """Order, depth and row counts as shown by the run."""
        return tuple(self.discovery().lines())

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Call the model with the ids, without cache."""
        self.check_depth(n_steps)
        return self._call(batch, n_steps)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Continue with the cache of a model that has the call interface of transformers."""
        takes = inspect.signature(self.model.forward).parameters
        if "use_cache" not in takes or cache_name(self.model.forward) is None:
            return None
        arguments = {} if self._depth is None else {self._depth: n_steps}
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self.model(ids, **arguments, **past(self.model, cache)))
