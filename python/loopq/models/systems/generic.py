"""Any torch model: the loop that one run shows."""

from __future__ import annotations

import fnmatch
import functools
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopq.errors import CalibrationError, ConfigError, LoopqError, SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.models.discovery import Discovery, call_plain, discover, first_output
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem
from loopq.systems.declare import declare, owners_of_parameters
from loopq.systems.outputs import cache_name, cached, past

if TYPE_CHECKING:
    from torch import Tensor, nn

    from loopq.systems.base import Output

_PROBE_TOKENS = (8, 16, 32, 64, 128, 256)
_PROBE_ROWS = 16


@SYSTEMS.register("generic")
class Generic(LoopedSystem):
    """The loop shown by one plain run of the model: every matrix that is called more than once.

    loopq uses it only when named. A run alone cannot tell which layers feed the loop back, or whether the model draws
    its own noise.

    Parameters
    ----------
    model : nn.Module
        Any torch model. It takes token ids, or any arguments that batches hold.
    select : sequence of str
        Shell patterns of parameter names to take. By default all looped ones.
    depth : str, optional
        Argument of the model's forward that sets the number of steps. Without it, only the model's default depth is
        available.
    """

    summary = "any model: what one run calls more than once; named by --system generic"

    def __init__(self, model: nn.Module, select: Sequence[str] = ("*",), depth: str | None = None) -> None:
        super().__init__(model)
        self._select = tuple(select)
        self._depth = depth
        self._found: dict[int | None, Discovery] = {}
        self._like: Batch | None = None
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
        """Find the loop with prompts of this length, because a loop over blocks of tokens grows with them.

        A module that takes other inputs than token ids is run with the call of the batch.
        """
        like = self._like
        if like is None or like.input_ids.shape != batch.input_ids.shape or like.call is not batch.call:
            self._found.clear()
        self._like = batch

    def discovery(self, n_steps: int | None = None) -> Discovery:
        """The loop at a depth, found by one short run at the first request."""
        if n_steps not in self._found:
            discovery = self._discovered(n_steps)
            if not discovery.order:
                raise SystemContractError(f"{type(self.model).__name__}: " + "\n  ".join(discovery.lines()))
            self._found[n_steps] = discovery
        return self._found[n_steps]

    def _discovered(self, n_steps: int | None) -> Discovery:
        if self._like is not None and self._like.call is not None:
            return discover(self.model, self._like, lambda b: self._call(b, n_steps))
        failed: list[LoopqError] = []
        # Some models accept prompts of one length only.
        for n_tokens in _PROBE_TOKENS if self._like is None else (self._like.input_ids.shape[1],):
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
        if self._like is not None and self._like.input_ids.shape[1] == n_tokens:
            rows.append(self._like.input_ids)
        return Batch(torch.cat(rows), tuple(range(sum(map(len, rows)))))

    @property
    def output(self) -> Output:  # type: ignore[override]
        """Hidden states if the output is narrower than the token table, else logits."""
        return self.discovery().output

    def _call(self, batch: Batch, n_steps: int | None) -> Tensor:
        if batch.call is not None:
            return first_output(self.model, self.answer(batch, n_steps))
        return call_plain(self.model, batch.input_ids, self.keeps_graph, **self._arguments(n_steps))

    def _arguments(self, n_steps: int | None) -> dict[str, int]:
        return {self._depth: n_steps} if self._depth is not None and n_steps is not None else {}

    def answer(self, batch: Batch, n_steps: int | None = None) -> Any:
        """Call the model with the arguments of a batch, and return what it gives."""
        import torch  # lazy: loopq imports without torch

        assert batch.call is not None
        args, kwargs = batch.call.on(self.device)
        with torch.set_grad_enabled(self.keeps_graph):
            return self.model(*args, **(kwargs | self._arguments(n_steps)))

    def n_rows(self, batch: Batch) -> int:
        """Look at a call, and return the most rows that a looped layer reads in a step."""
        self.look(batch)
        return max(max(rows) for rows in self.discovery().rows.values())

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
        if self._like is not None and self._like.call is not None:
            return False
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
        discovery = self.discovery(n_steps if self._depth is not None else None)
        owners = owners_of_parameters(self.model)
        every = [name for name, p in self.model.named_parameters() if p.ndim >= 2]
        for pattern in self._select:
            chosen = fnmatch.filter(every, pattern)
            unseen = [name for name in chosen if name in discovery.left_out]
            if not chosen or (pattern != "*" and unseen):
                raise SystemContractError(
                    f"{pattern!r} selects {unseen[0] if unseen else 'no matrix'}: "
                    "selected but never observed; exclude it, or declare it in an adapter of your own"
                )
        taken = [n for n in discovery.order if any(fnmatch.fnmatchcase(n, p) for p in self._select)]
        return tuple(self._shared(name, discovery, owners) for name in taken)

    def _shared(self, name: str, discovery: Discovery, owners: dict[int, list[str]]) -> SharedParameter:
        weight, stored = self.model.get_parameter(name), discovery.watched.get(name)
        fields = {
            "role": "expert" if name in discovery.routed_in else "looped",
            "invocations": len(discovery.rows[name]),
            "routed_in": discovery.routed_in.get(name, ""),
        }
        if stored is None:
            return declare(self.model, [(owners[id(weight)][0], fields)], 1)[0]
        inputs, outputs = weight.shape if stored == "in_out" else (weight[0].numel(), weight.shape[0])
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
        """Call the model with the ids, without cache, or with the arguments of a call."""
        if self._like is None and batch.call is not None:
            self.look(batch)
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
