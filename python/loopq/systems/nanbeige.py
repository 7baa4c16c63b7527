"""Nanbeige4.2: 22 layers looped twice, with the final norm after each loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import is_embedding
from loopq.systems.llama_loops import LlamaLoops
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.views import changed, view

if TYPE_CHECKING:
    from torch import Tensor, nn

_VARIANTS = (
    "enable_double_loop_split",
    "enable_hyper_connection",
    "enable_depth_attention",
    "loop_share_kv",
    "skip_loop_final_norm",
)


@SYSTEMS.register("nanbeige")
class Nanbeige(LlamaLoops):
    """Nanbeige4.2-3B (remote code).

    The head is read once after the last loop and does not belong to the loop. The paper's methods round it to nearest,
    with the same weights for every calibration of the rest. `gptq-cd` calibrates it.
    """

    summary = "s = norm(layers(s)) from the token embeddings, two loops"
    published = Published({"Nanbeige4.2-3B": 155}, code="checkpoint")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        on = [name for name in _VARIANTS if getattr(model.config, name, False)]
        if on:
            raise SystemContractError(
                f"nanbeige: config sets {', '.join(on)}; only the plain loop of Nanbeige4.2 is supported"
            )

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by the model type, or by a loop count in the configuration of a Llama-style model."""
        config = getattr(model, "config", None)
        if "model.layers.0.self_attn.q_proj" not in dict(model.named_modules()):
            return False
        return "nanbeige" in str(getattr(config, "model_type", "")) or hasattr(config, "num_loops")

    @property
    def n_steps(self) -> int:
        """Number of loops: one more than `config.loop_loss_weights` if there are any, else `config.num_loops`."""
        config = self.model.config
        weights = getattr(config, "loop_loss_weights", None)
        return len(weights) + 1 if weights else int(config.num_loops)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Seven linears of every layer, and the head: 155 of 22 layers."""
        head = {
            "role": "head",
            "invocations": 1,
            "treatment": "rtn",
            "reason": "called once, outside the loop; rounded alike whatever calibrates the rest",
        }
        return self.layers(n_steps) if self._tied else self.layers(n_steps, ("lm_head", head))

    def left_out(self) -> dict[str, str]:
        """The head, if it is the embedding."""
        return {"lm_head.weight": "is the input embedding, which stays as it is"} if self._tied else {}

    @property
    def _tied(self) -> bool:
        return is_embedding(self.model, "lm_head")

    def _loops(self, n: int, *others: tuple[nn.Module, nn.Module]) -> Any:
        """The model with this number of loops, and with other modules in place of some."""
        config = self.model.config
        return view(self.model, (config, changed(config, num_loops=n, loop_loss_weights=[])), *others)

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._loops(n_steps)(ids, use_cache=False))

    def _grown(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self._loops(n_steps)(ids, **past(self.model, cache)))

    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        return logits_of(self._loops(n_steps, *self._placed(positions))(ids, use_cache=False))

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One loop from given embeddings: layers, then the norm."""
        after: Tensor = self._loops(1).model(inputs_embeds=state, use_cache=False).last_hidden_state
        return after
