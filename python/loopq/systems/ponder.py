"""PonderPythia: the whole language model is the loop, fed back through its softmax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import declare, is_embedding
from loopq.systems.outputs import cache_of, past
from loopq.systems.stepwise import StepwiseSystem

if TYPE_CHECKING:
    from torch import Tensor, nn

_LINEARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attention.query_key_value", {"role": "attention", "fused": "q+k+v/head"}),
    ("attention.dense", {"role": "attention"}),
    ("mlp.dense_h_to_4h", {"role": "mlp"}),
    ("mlp.dense_4h_to_h", {"role": "mlp"}),
)


@SYSTEMS.register("ponder")
class Ponder(StepwiseSystem):
    """PonderPythia-2.8B in its remote class, and transformers' GPT-NeoX with its settings.

    A rollout of depth N is N passes of the language model. N-1 passes add the expected embedding under the model's
    prediction to the input. The last one is read. `predict` is therefore a separate pass and `n_updates` is N-1. The
    adapter drives the rollout because cached calls of the published class differ from uncached ones. The head is
    inside the loop without an identity path, so it is feedback-exposed.
    """

    name = "ponder"
    summary = "E += softmax(head(model(E))) W; N-1 such updates, then one pass to read"
    published = Published(
        {"PonderPythia-2.8B": 129},
        code="checkpoint",
        exposed=("embed_out (lm_head in transformers 5)",),
        idle=("adapter.",),
    )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised as a GPT-NeoX model with `pondering_steps` in its configuration."""
        looped = hasattr(getattr(model, "config", None), "pondering_steps")
        return looped and "gpt_neox.layers.0.attention.query_key_value" in dict(model.named_modules())

    @property
    def n_steps(self) -> int:
        """`config.pondering_steps` + 1 passes."""
        return int(self.model.config.pondering_steps) + 1

    def n_updates(self, n_steps: int) -> int:
        """One less than the passes, since the last one is the readout."""
        return n_steps - 1

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Four linears of every layer, and the head unless it is the embedding: 129 of 32 layers."""
        modules = [
            (f"gpt_neox.layers.{i}.{suffix}", fields)
            for i in range(len(self.model.gpt_neox.layers))
            for suffix, fields in _LINEARS
        ]
        if not self._tied:
            modules.append((self._head, {"role": "head", "exposed": True}))
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """The embedding, which multiplies inside the loop."""
        reason = "input embedding; the loop multiplies with it, but no module is called"
        return {"gpt_neox.embed_in.weight": reason}

    @property
    def _head(self) -> str:
        # transformers 5 renamed the head of GPT-NeoX.
        return "embed_out" if hasattr(self.model, "embed_out") else "lm_head"

    @property
    def _tied(self) -> bool:
        return is_embedding(self.model, self._head)

    @property
    def _scale(self) -> float:
        scaled = getattr(self.model.config, "scale_embeds", False)
        return float(self.model.gpt_neox.embed_in.weight.shape[1]) ** 0.5 if scaled else 1.0

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        state = self._start(self._embed(ids))
        for t in range(self.n_updates(n_steps)):
            state = self.step(state, None, t, n_steps)
        return self.predict(state, None)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with a GPT-NeoX cache for each pass. Every pass reads the keys and values of its own inputs."""
        caches = [None] * n_steps if cache is None else cache
        state = self._start(self._embed(self.to_device(batch.input_ids[:, n_seen:])))
        done = []
        for t in range(n_steps):
            out = self.model.gpt_neox(inputs_embeds=state, **past(self.model.gpt_neox, caches[t]))
            logits: Tensor = self.model.get_submodule(self._head)(out.last_hidden_state)
            done.append(cache_of(out))
            if t < n_steps - 1:
                state = state + self._mixture(logits)
        return logits, done

    def _embed(self, ids: Tensor) -> Tensor:
        embedding: Tensor = self.model.gpt_neox.embed_in(ids) * self._scale
        return embedding

    def _start(self, embedding: Any) -> Tensor:
        config = self.model.config
        # The spelling of the published setting.
        factor = config.pondering_steps if getattr(config, "mutiply_pondering_steps", False) else 1
        start: Tensor = embedding * factor
        return start

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """Add the expected embedding under the prediction of one pass."""
        return state + self._mixture(self.predict(state, embedding))

    def _mixture(self, logits: Tensor) -> Tensor:
        """Expected embedding under a prediction."""
        mixture: Tensor = logits.softmax(-1) @ (self.model.gpt_neox.embed_in.weight * self._scale)
        return mixture

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """One pass of the language model."""
        hidden = self.model.gpt_neox(inputs_embeds=state, use_cache=False)[0]
        logits: Tensor = self.model.get_submodule(self._head)(hidden)
        return logits
