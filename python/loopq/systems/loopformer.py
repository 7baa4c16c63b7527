"""LoopFormer: a few looped blocks, gated and scaled by time and size of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import declare, find_prefix
from loopq.systems.fixed import FixedCached
from loopq.systems.outputs import logits_of

_MARKER = "transformer.h.blocks.0.adaLN_modulation.1"
_BLOCK: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "adaLN_modulation.1",
        {
            "role": "modulation",
            "treatment": "rtn",
            "reason": "its input is the same for every prompt and token: rank at most the number of steps",
            "fused": "gate_attn+gate_mlp+scale_attn+scale_mlp",
        },
    ),
    ("attn.c_attn", {"role": "attention", "fused": "q+k+v"}),
    ("attn.c_proj", {"role": "attention"}),
    ("mlp.c_fc", {"role": "mlp"}),
    ("mlp.c_proj", {"role": "mlp"}),
)
_DEFAULT_STEPS = 8


@SYSTEMS.register("loopformer")
class LoopFormer(FixedCached):
    """LoopFormer-278M (plain torch class, with or without its hub wrapper).

    A rollout of depth N takes steps of size 1/N. The modulation sees one row per prompt, not per token, and its input
    depends only on the step. The paper's methods therefore round it to nearest. The published forward returns logits
    for the last position only, unless it gets targets.
    """

    summary = "s += gated blocks modulated by (t, dt); fewer steps are coarser ones"
    published = Published({"LoopFormer-278M": 15}, code="own")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._prefix = find_prefix(model, _MARKER) or ""
        self._gpt = model.get_submodule(self._prefix.rstrip("."))

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `transformer.h.blocks` with `adaLN_modulation`."""
        return find_prefix(model, _MARKER) is not None

    @property
    def n_steps(self) -> int:
        """8, since the published class has no setting for it."""
        return _DEFAULT_STEPS

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Modulation and four linears of every block: 3 and 12 of three blocks."""
        modules = [
            (f"{self._prefix}transformer.h.blocks.{i}.{suffix}", fields)
            for i in range(len(self._gpt.transformer.h.blocks))
            for suffix, fields in _BLOCK
        ]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """The embedders of time and step size."""
        reason = "its input is a number per step, the same for every prompt and token"
        return {
            f"{self._prefix}{embedder}.mlp.{i}.weight": reason
            for embedder in ("time_embedder", "dt_embedder")
            for i in (0, 2)
        }

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._gpt(ids, targets=ids, steps=[1.0 / n_steps] * n_steps)[0])

    @property
    def n_positions(self) -> int:
        """Number of learned positions."""
        return int(self._gpt.transformer.wpe.num_embeddings)

    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        state = self._embed(ids, positions)
        for t in range(n_steps):
            state = self.step(state, None, t, n_steps)
        return self.predict(state, None)

    def _embed(self, ids: Tensor, positions: Tensor | None = None) -> Tensor:
        positions = torch.arange(ids.shape[1], device=ids.device) if positions is None else positions
        parts = self._gpt.transformer
        embedding: Tensor = parts.wte(ids) + parts.wpe(positions)
        return embedding

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """Blocks modulated by the time t/N and the size 1/N of the step."""
        size = 1.0 / n_steps
        now = torch.zeros(state.shape[0], dtype=state.dtype, device=state.device)
        sizes = torch.ones_like(now) * size
        # The model adds up its steps, which rounds differently from t / N.
        for _ in range(t):
            now = now + size
        conditioning = self._gpt.time_embedder(now) + self._gpt.dt_embedder(sizes)
        after: Tensor = self._gpt.transformer.h(state, conditioning)
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Final norm and head."""
        logits: Tensor = self._gpt.lm_head(self._gpt.transformer.norm_f(state))
        return logits
