"""Ouro: a stack of layers looped four times, with the final norm between loops and an exit gate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.capabilities import ExitRule
from loopq.systems.llama_loops import LlamaLoops
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.views import changed, view

if TYPE_CHECKING:
    from torch import Tensor, nn


@SYSTEMS.register("ouro")
class Ouro(LlamaLoops):
    """Ouro-1.4B and Ouro-2.6B (remote code).

    The output is read from the last loop. Otherwise the gate's cumulative probability would pick a loop per token. In
    bfloat16 it reaches 1.0 before the last loop for some tokens.
    """

    summary = "s = norm(layers(s)) from the token embeddings; the exit gate is not used"
    published = Published({"Ouro-1.4B": 168, "Ouro-2.6B": 336}, code="checkpoint")

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `model.early_exit_gate` beside `model.layers`."""
        names = dict(model.named_modules())
        return "model.early_exit_gate" in names and "model.layers.0.self_attn.q_proj" in names

    @property
    def n_steps(self) -> int:
        """`config.total_ut_steps`."""
        return int(self.model.config.total_ut_steps)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Seven linears of every layer: 168 of 24 layers or 336 of 48."""
        return self.layers(n_steps)

    def left_out(self) -> dict[str, str]:
        """The exit gate."""
        return {"model.early_exit_gate.weight": "chooses a loop to leave at; the last one is read always"}

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._loops(n_steps)(ids, use_cache=False, exit_at_step=n_steps - 1))

    def _grown(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self._loops(n_steps)(ids, exit_at_step=n_steps - 1, **past(self.model, cache)))

    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        model = self._loops(n_steps, *self._placed(positions))
        return logits_of(model(ids, use_cache=False, exit_at_step=n_steps - 1))

    def exit_rule(self) -> ExitRule:
        """Exit when the exit gate's cumulative probability reaches the threshold."""
        staying = 1.0

        def reached(state: Tensor, logits: Tensor, threshold: float) -> bool:
            nonlocal staying
            staying *= 1.0 - float(self.model.model.early_exit_gate(state).sigmoid())
            return 1.0 - staying >= threshold

        return reached

    def _loops(self, n: int, *others: tuple[nn.Module, nn.Module]) -> Any:
        """The model with this number of loops, and with other modules in place of some."""
        config = self.model.config
        looped = view(self.model, (config, changed(config, total_ut_steps=n)), *others)
        # The inner model has a separate copy of the loop count.
        looped.model.total_ut_steps = n
        return looped

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One loop from given embeddings: layers, then the norm."""
        out = self._loops(1).model(inputs_embeds=state, use_cache=False)
        after: Tensor = out[0].last_hidden_state
        return after
