"""Dory: a loop over middle layers on unit spheres. The number of loops is chosen at loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import declare
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.stepwise import StepwiseSystem
from loopq.systems.views import changed, view

if TYPE_CHECKING:
    from torch import Tensor, nn

_LINEARS = ("q_proj", "k_proj", "v_proj", "gate_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


@SYSTEMS.register("dory")
class Dory(StepwiseSystem):
    """NVIDIA's Dory, a class of transformers from 5.24 on.

    The weights of the layers before and after the loop are called once in a rollout. With the cache "last_loop" the
    served keys and values differ from those of a rollout without cache: earlier loops read the last loop's entries of
    earlier tokens.
    """

    summary = "layers before the loop give e; s = layers(norm(s) + e) from s = e; layers after it, norm, head"
    published = Published({"NVIDIA-Nemotron-Labs-Dory1.0-4B": 288}, transformers=">=5.24")

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by the loop count in the configuration."""
        return hasattr(getattr(model, "config", None), "n_recurrent_loops") and hasattr(model, "lm_head")

    @property
    def n_steps(self) -> int:
        """`config.n_recurrent_loops`."""
        return int(self.model.config.n_recurrent_loops)

    @property
    def served_by_cache(self) -> bool:
        """Whether only the last loop writes the cache."""
        return bool(self.model.config.recurrent_kv_cache_mode == "last_loop")

    @property
    def _ends(self) -> tuple[int, int]:
        """First layer of the loop, and the first layer after it."""
        config = self.model.config
        return config.n_input_layers, config.n_input_layers + config.n_recurrent_layers

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Eight linears of every layer. Those outside the loop are called once."""
        first, end = self._ends
        modules: list[tuple[str, dict[str, Any]]] = []
        for i in range(len(self.model.model.layers)):
            times = n_steps if first <= i < end else 1
            for place, role, names in zip(("self_attn", "mlp"), ("attention", "mlp"), _LINEARS, strict=True):
                fields = {"role": role, "invocations": times}
                modules += [(f"model.layers.{i}.{place}.{name}", fields) for name in names]
        return declare(self.model, modules, n_steps)

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._loops(n_steps)(ids, use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache in the mode of its configuration."""
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self._loops(n_steps)(ids, **past(self.model, cache)))

    def _loops(self, n: int) -> Any:
        """The model with this number of loops."""
        config = self.model.config
        return view(self.model, (config, changed(config, n_recurrent_loops=n)))

    def _only(self, first: int, end: int | None, *, norm: bool = False) -> Any:
        """The inner model with only these layers, run once without a loop."""
        from torch import nn  # lazy: loopq imports without torch

        inner, config = self.model.model, self.model.config
        layers = inner.layers[first:end]
        counts = {"num_hidden_layers": len(layers), "n_input_layers": len(layers), "n_recurrent_layers": 0}
        other = changed(config, n_output_layers=0, n_recurrent_loops=0, **counts)
        parts = [(inner.layers, layers), (inner.norm, inner.norm if norm else nn.Identity())]
        return view(inner, *parts, (config, other))

    def _embed(self, ids: Tensor) -> Tensor:
        before: Tensor = self._only(0, self._ends[0])(ids, use_cache=False).last_hidden_state
        return self.model.model.norm(before)

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """The loop's layers on the normed and added input."""
        given = self.model.model.norm(state) + embedding
        after: Tensor = self._only(*self._ends)(inputs_embeds=given, use_cache=False).last_hidden_state
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """The layers after the loop, the norm and the head."""
        last = self._only(self._ends[1], None, norm=True)
        hidden = last(inputs_embeds=state, use_cache=False).last_hidden_state
        logits: Tensor = self.model.lm_head(hidden)
        return logits
