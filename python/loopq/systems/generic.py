"""Discovery: the loop of any torch model, found by running it once."""

from __future__ import annotations

import fnmatch
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from loopq.errors import ConfigError, SystemContractError
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
from loopq.systems.trace import Trace, trace

if TYPE_CHECKING:
    from torch import Tensor, nn

_PROBE_TOKENS = 8
_PROBE_PROMPTS = 2
_UNCLEAR = (
    "expert of a module that is called once, so that its steps cannot be told apart: put gate and experts into a "
    "module that each step calls"
)


@dataclass(frozen=True)
class Discovery:
    """The loop that one run showed.

    Parameters
    ----------
    order : tuple of str
        Looped parameters in the order of their first calls.
    rows : dict of str to list of int
        Input rows of each parameter at each step.
    n_prompts, n_tokens : int
        Shape of the prompts that were run.
    uncalled : tuple of str
        Matrices used without a call of their module: they may be looped too, but no hook sees their input.
    computed : tuple of str
        Modules whose weight is computed from other parameters, by weight_norm and the like.
    routed_in : dict of str to str
        Weights of experts, and the module that sends rows to them, whose calls are their steps.
    unclear : tuple of str
        Weights of experts that one call of such a module calls several times: their steps cannot be told apart.
    gates : dict of str to str
        Weights that choose experts, and why they stay as they are.
    """

    order: tuple[str, ...]
    rows: dict[str, list[int]]
    n_prompts: int
    n_tokens: int
    uncalled: tuple[str, ...]
    computed: tuple[str, ...] = ()
    routed_in: dict[str, str] = field(default_factory=dict)
    unclear: tuple[str, ...] = ()
    gates: dict[str, str] = field(default_factory=dict)

    @property
    def depth(self) -> int:
        """Largest number of calls of one parameter."""
        return max((len(rows) for rows in self.rows.values()), default=1)

    def lines(self) -> list[str]:
        """Return the findings as lines to print."""
        if not self.order:
            text = ["no parameter is called more than once: this model has no loop that hooks can see"]
        else:
            text = [
                f"{len(self.order)} looped parameters, depth {self.depth}, "
                f"run with {self.n_prompts} prompts of {self.n_tokens} tokens",
            ]
        for name in self.order:
            rows = self.rows[name]
            shown = f"{rows[0]} each" if len(set(rows)) == 1 else ", ".join(map(str, rows))
            what = f"an expert of {self.routed_in[name]}, " if name in self.routed_in else ""
            text.append(f"{name}: {what}{len(rows)} {'steps' if what else 'calls'}, rows {shown}")
        text += [f"{name}: {_UNCLEAR}" for name in self.unclear]
        text += [f"used without a call, cannot be calibrated: {name}" for name in self.uncalled]
        return text + [
            f"{name}: its weight is computed from other parameters (weight_norm, spectral_norm or another "
            "parametrization), so that there is nothing to quantize: make it a plain weight before, by "
            "torch.nn.utils.parametrize.remove_parametrizations or remove_weight_norm"
            for name in self.computed
        ]


def computed_weights(model: nn.Module) -> tuple[str, ...]:
    """Names of modules whose weight is no parameter but computed from others."""
    kinds = ("weight_g", "weight_v", "weight_orig")
    return tuple(
        name
        for name, module in model.named_modules()
        if "weight" in getattr(module, "parametrizations", ()) or any(k in module._parameters for k in kinds)
    )


def discover(model: nn.Module, batch: Batch, run: Callable[[Batch], object] | None = None) -> Discovery:
    """Find the loop of a model by one run.

    Parameters
    ----------
    model : nn.Module
        Any torch model.
    batch : Batch
        Prompts to run.
    run : callable, optional
        Takes the batch and runs one rollout; by default the model is called with the ids, without cache.

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
    found: Trace = trace(model, lambda: run(batch) if run else call_plain(model, batch.input_ids))
    routed = {name: sent.module for name, sent in found.routed.items()}
    gate = gates(model, dict.fromkeys(routed.values()))
    loop = {name: rows for name, rows in found.repeated.items() if name not in gate}
    own = found.rows
    unclear = tuple(n for n, sent in found.routed.items() if len(sent.rows) == 1 < len(own.get(n, ())))
    n_prompts, n_tokens = (int(n) for n in batch.input_ids.shape)
    return Discovery(
        tuple(loop),
        loop,
        n_prompts,
        n_tokens,
        found.uncalled,
        computed_weights(model),
        {name: routed[name] for name in loop if name in routed},
        unclear,
        gate,
    )


def call_plain(model: nn.Module, ids: Tensor, keeps_graph: bool = False, **arguments: int) -> Tensor:
    """Call a model with token ids, without cache where it has one, and take the tensor out of what it gives."""
    import torch  # lazy: loopq imports without torch

    ids = ids.to(next(model.parameters()).device)
    parameters = inspect.signature(model.forward).parameters
    cached = "use_cache" in parameters
    with torch.set_grad_enabled(keeps_graph):
        out = model(ids, use_cache=False, **arguments) if cached else model(ids, **arguments)
    for name in ("logits", "last_hidden_state"):
        if getattr(out, name, None) is not None:
            out = getattr(out, name)
            break
    if isinstance(out, tuple | list):
        out = out[0]
    if not isinstance(out, torch.Tensor) or out.ndim != 3:
        raise SystemContractError(
            f"{type(model).__name__}: its forward gives no tensor (n_prompts, n_tokens, ...); "
            "write an adapter: a subclass of loopq.systems.LoopedSystem with rollout and shared_parameters"
        )
    return out


@SYSTEMS.register("generic")
class Generic(LoopedSystem):
    """Whatever one plain run of the model shows: every matrix that is called more than once.

    It is taken only when it is named, since a run alone cannot tell which layers feed the loop back, or whether the
    model draws its own noise.

    Parameters
    ----------
    model : nn.Module
        Any torch model that is called with token ids.
    select : sequence of str
        Shell patterns of parameter names to take; all looped ones by default.
    depth : str, optional
        Argument of the model's forward that sets the number of steps; without one the depth is what the model runs by
        itself, and no other can be had.
    """

    name = "generic"
    summary = "any model: what one run calls more than once; named by --system generic"

    def __init__(self, model: nn.Module, select: Sequence[str] = ("*",), depth: str | None = None) -> None:
        super().__init__(model)
        self._select = tuple(select)
        self._depth = depth
        self._found: dict[int | None, Discovery] = {}
        if depth is not None and depth not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                f"{type(model).__name__}: its forward has no argument {depth!r} that could set the number of steps; it "
                f"has {', '.join(inspect.signature(model.forward).parameters)}"
            )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Never by itself."""
        return False

    def discovery(self, n_steps: int | None = None) -> Discovery:
        """The loop at a depth, found by one short run when it is first asked for."""
        if n_steps not in self._found:
            import torch  # lazy: loopq imports without torch

            ids = torch.arange(_PROBE_PROMPTS * _PROBE_TOKENS).reshape(_PROBE_PROMPTS, _PROBE_TOKENS)
            batch = Batch(ids, tuple(range(_PROBE_PROMPTS)))
            found = discover(self.model, batch, lambda b: self._call(b, n_steps))
            if not found.order:
                reason = found.lines()[-1 if found.computed else 0]
                raise SystemContractError(f"{type(self.model).__name__}: {reason}")
            self._found[n_steps] = found
        return self._found[n_steps]

    def _call(self, batch: Batch, n_steps: int | None) -> Tensor:
        arguments = {self._depth: n_steps} if self._depth is not None and n_steps is not None else {}
        return call_plain(self.model, batch.input_ids, self.keeps_graph, **arguments)

    @property
    def n_steps(self) -> int:
        """Largest number of calls of one parameter."""
        return self.discovery().depth

    def check_depth(self, n_steps: int) -> int:
        """Refuse every depth but the one the model runs by itself, unless an argument of its sets the depth."""
        if self._depth is not None:
            return super().check_depth(n_steps)
        if n_steps != self.n_steps:
            raise ConfigError(
                f"generic: the model runs {self.n_steps} steps by itself, so n_steps must be that; got {n_steps}. Name "
                "the argument of its forward that sets the number of steps: Generic(model, depth='...')"
            )
        return n_steps

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Parameters called more than once that a pattern selects.

        Raises
        ------
        SystemContractError
            A pattern selects a matrix that the run never called, or none at all.
        """
        found = self.discovery(n_steps if self._depth is not None else None)
        owners = owners_of_parameters(self.model)
        every = [name for name, p in self.model.named_parameters() if p.ndim == 2]
        for pattern in self._select:
            chosen = fnmatch.filter(every, pattern)
            unseen = [name for name in chosen if name in found.uncalled]
            if not chosen or (pattern != "*" and unseen):
                raise SystemContractError(
                    f"{pattern!r} selects {unseen[0] if unseen else 'no matrix'}: "
                    "selected but never observed; exclude it, or declare it in an adapter of your own"
                )
        taken = [n for n in found.order if any(fnmatch.fnmatchcase(n, p) for p in self._select)]
        by_name = dict(self.model.named_parameters())
        modules = [
            (
                owners[id(by_name[name])][0],
                {
                    "role": "expert" if name in found.routed_in else "looped",
                    "invocations": len(found.rows[name]),
                    "routed_in": found.routed_in.get(name, ""),
                },
            )
            for name in taken
        ]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """Matrices that the run used without a call, gates of experts, and experts whose inputs cannot be had."""
        found = self.discovery()
        return (
            dict.fromkeys(found.uncalled, "used without a call of its module")
            | dict.fromkeys(found.unclear, _UNCLEAR)
            | found.gates
            | stacked_experts(self.model)
        )

    def describe_loop(self) -> tuple[str, ...]:
        """Order, depth and row counts, as the run showed them."""
        return tuple(self.discovery().lines())

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Call the model with the ids, without cache."""
        self.check_depth(n_steps)
        return self._call(batch, n_steps)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any] | None:
        """Go on by the cache of a model that is called as those of transformers are."""
        takes = inspect.signature(self.model.forward).parameters
        if "use_cache" not in takes or cache_name(self.model.forward) is None:
            return None
        arguments = {} if self._depth is None else {self._depth: n_steps}
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self.model(ids, **arguments, **past(self.model, cache)))
