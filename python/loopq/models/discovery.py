"""Discover the loop of any torch model by running it once."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.models.trace import Trace, token_tables, trace
from loopq.systems.base import Batch
from loopq.systems.routing import gates, stacked_experts

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.storage.weights import Orientation
    from loopq.systems.base import Output

_UNCLEAR = (
    "expert of a module that is called once, so that its steps cannot be told apart: put gate and experts into a "
    "module that each step calls"
)
_TIED = "the input embedding too, so that rounding it would round the inputs"


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
    inputs : str
        The inputs of the run in words. Empty for prompts of token ids.
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
    inputs: str = ""

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
            f"run with {self.inputs or f'{self.n_prompts} prompts of {self.n_tokens} tokens'}",
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
    from torch import nn  # lazy: loopq imports without torch

    outputs: list[Tensor] = []

    def once() -> None:
        outputs.append(run(batch) if run else call_plain(model, batch.input_ids))

    tables: list[nn.Embedding] = []
    traced: Trace = trace(model, lambda: tables.extend(token_tables(model, batch.input_ids, once)))
    routed = {name: sent.module for name, sent in traced.routed.items()}
    gate = gates(model, dict.fromkeys(routed.values()))
    embeddings = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    tied = {n: _TIED for n, p in model.named_parameters() if id(p) in embeddings and n in traced.repeated}
    loop = {name: rows for name, rows in traced.repeated.items() if name not in gate and name not in tied}
    n_prompts, n_tokens = (int(n) for n in batch.input_ids.shape)
    others = {n: why for n, why in _not_taken(model, traced).items() if n not in loop} | gate | tied
    hidden = (set(traced.uncalled) - traced.once) | set(gate)
    # Padding rows may make a head larger than the table.
    is_logits = batch.call is None and all(outputs[0].shape[-1] >= table.num_embeddings for table in tables)
    left_out = {n: why for n, why in others.items() if n in hidden or why in (_UNCLEAR, _TIED)}
    return Discovery(
        tuple(loop),
        loop,
        n_prompts,
        n_tokens,
        others,
        left_out | stacked_experts(model),
        {name: traced.watched[name] for name in loop if name in traced.watched},
        {name: routed[name] for name in loop if name in routed},
        "logits" if is_logits else "hidden",
        "" if batch.call is None else "one batch",
    )


def _not_taken(model: nn.Module, traced: Trace) -> dict[str, str]:
    """Reasons why weights are not taken, for all that are not called more than once."""
    rows, idle = traced.rows, set(traced.idle)
    reasons = {}
    for name, parameter in model.named_parameters():
        if name in traced.routed and len(traced.routed[name].rows) == 1 < len(rows.get(name, ())):
            reasons[name] = _UNCLEAR
        elif name in traced.uncalled:
            reasons[name] = traced.uncalled[name]
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
    tensors = [t for t in _outputs(out) if t.ndim in (2, 3) and t.shape[0] == ids.shape[0]]
    # Logits may come behind states and losses.
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, torch.nn.Embedding)]
    tensors.sort(key=lambda t: t.shape[-1] not in tables)
    first = next((t for t in tensors if t.ndim == 3), tensors[0][:, None] if tensors else None)
    if first is None:
        raise SystemContractError(
            f"{type(model).__name__}: its forward gives no tensor (n_prompts, n_tokens, ...); "
            "write an adapter: a subclass of loopq.systems.LoopedSystem with rollout and shared_parameters"
        )
    return first


def first_output(model: nn.Module, out: Any) -> Tensor:
    """Return the first floating tensor that a call gives, as rows of one prompt: shape (1, n_rows, width).

    Fields "logits" and "last_hidden_state" come before others.
    """
    first = next(_outputs(out), None)
    if first is None:
        raise SystemContractError(f"{type(model).__name__}: its forward gives no floating tensor")
    return first.reshape(1, -1, first.shape[-1] if first.ndim else 1)


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
