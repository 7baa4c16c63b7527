"""Common parts of Huginn and R-Llama: noise state, core blocks, and an adapter on cat(state, embedding)."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import Tensor

from loopq.errors import SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.systems.base import Batch
from loopq.systems.blocks import raven_block
from loopq.systems.capabilities import ExitRule
from loopq.systems.declare import declare
from loopq.systems.fixed import FixedCached
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.program import Program
from loopq.systems.views import copied

BLOCK_LINEARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attn.Wqkv", {"role": "attention", "fused": "q+k+v"}),
    ("attn.proj", {"role": "attention"}),
    ("mlp.fc", {"role": "mlp", "fused": "gate+up"}),
    ("mlp.proj", {"role": "mlp"}),
)


def initial_noise(batch: Batch, width: int, std: float, first: int = 0) -> Tensor:
    """Truncated normal noise of the initial state, cut at three standard deviations, from the token `first` on.

    It is a float32 Tensor of shape (n_prompts, n_tokens - first, width) on the CPU. `std` is that before the cut.
    """
    return batch.noise(batch.input_ids.shape[1], width, std=std, cut=3.0, first=first)


class Raven(FixedCached):
    """Base of the adapters for the `raven` classes.

    In the published class a depth given as plain number runs without gradient. `step` therefore calls
    `core_block_forward`, which keeps the graph. Prelude and readout run through the model's forward, with
    another `iterate_forward` in a copy. The step functions of the class do not fit: they build a padding mask that
    its forward does not use, and R-Llama's fail.
    """

    state_is_random = True

    @property
    def n_steps(self) -> int:
        """`config.mean_recurrence`."""
        return int(self.model.config.mean_recurrence)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Adapter, then Wqkv, proj, fc and proj of every core block."""
        modules: list[tuple[str, dict[str, Any]]] = [
            ("transformer.adapter", {"role": "adapter", "exposed": True})
        ]
        for i in range(len(self.model.transformer.core_block)):
            modules += [(f"transformer.core_block.{i}.{suffix}", fields) for suffix, fields in BLOCK_LINEARS]
        return declare(self.model, modules, n_steps)

    def check_depth(self, n_steps: int) -> int:
        """Reject a depth below 1, and a model that draws noise inside the loop or starts without noise."""
        if getattr(self.model.config, "test_time_noise", 0):
            raise SystemContractError(
                f"{self.name}: config.test_time_noise = {self.model.config.test_time_noise} draws from the "
                "global generator at every step; set it to 0"
            )
        mode = getattr(self.model.config, "initial_state_mode", "random")
        if mode != "random":
            raise SystemContractError(
                f"{self.name}: config.initial_state_mode = {mode!r} begins from the prelude's output; only a random "
                "initial state, as in the published models, is supported"
            )
        return super().check_depth(n_steps)

    def state_std(self) -> float:
        """Standard deviation of an entry of the initial state."""
        scale = float(self.model.emb_scale) if hasattr(self.model, "emb_scale") else 1.0
        return float(self.model.config.init_values["std"]) * scale

    def noise(self, batch: Batch, first: int = 0) -> Tensor:
        """Initial states (n_prompts, n, width) of the n tokens from `first` on, on the model's device."""
        width = int(self.model.transformer.adapter.out_features)
        return self.to_device(initial_noise(batch, width, self.state_std(), first), dtype=True)

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        # A plain number runs without gradient. The second number of a pair runs with it.
        depth = (0, n_steps) if self.keeps_graph else n_steps
        return logits_of(self.model(ids, num_steps=depth, input_states=self.noise(batch), use_cache=False))

    def _grown(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        where = {} if cache is None else {"cache_position": torch.arange(n_seen, batch.input_ids.shape[1])}
        ids, noise = self.to_device(batch.input_ids[:, n_seen:]), self.noise(batch, n_seen)
        return cached(
            self.model(ids, num_steps=n_steps, input_states=noise, **where, **past(self.model, cache))
        )

    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        model = self._placed(positions)
        return logits_of(model(ids, num_steps=n_steps, input_states=noise, use_cache=False))

    def program(self, n_steps: int) -> Program | None:
        """Prelude, adapter and core blocks, coda."""
        parts = self.model.transformer
        inside, *around = (
            [raven_block(block, self.model.config) for block in parts[name]]
            for name in ("core_block", "prelude", "coda")
        )
        if not all((*inside, *around[0], *around[1])):
            return None
        step = [("adapter", parts.adapter), *(("block", block) for block in inside)]
        order = [
            *(("block", block) for block in around[0]),
            ("keep", 0),
            ("start", None),
            *step * n_steps,
            *self._norms_after_loop(),
            *(("block", block) for block in around[1]),
            ("norm", parts.ln_f),
        ]
        scale = float(getattr(self.model, "emb_scale", 1.0))
        return Program(
            lambda ids: parts.wte(ids) * scale, order, self.model.lm_head, self._angles, self.noise
        )

    def exit_rule(self) -> ExitRule:
        """Exit when the prediction has settled: the KL between two steps falls below the threshold."""
        before: list[Tensor] = []

        def settled(state: Tensor, logits: Tensor, threshold: float) -> bool:
            now = logits.float().log_softmax(-1)
            before.append(now)
            return len(before) > 1 and float((now.exp() * (now - before[-2])).sum()) < threshold

        return settled

    def _forward_around(self, ids: Tensor, loop: Any) -> Tensor:
        model = copied(self.model, iterate_forward=loop)
        return logits_of(model(ids, num_steps=1, use_cache=False))

    def _embed(self, ids: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def loop(embeds: Tensor, *rest: Any) -> tuple[Any, ...]:
            kept.append(embeds)
            return embeds, 0, 0, embeds, rest[2]

        self._forward_around(ids, loop)
        return kept[0]

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """Adapter and core blocks."""
        # The block index is only needed for a cache, and there is none.
        block = torch.tensor(0, dtype=torch.long)
        rotary = self._rotary(state)
        after: Tensor = self.model.core_block_forward(state, embedding, rotary, None, None, block, t)[0]
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Coda, final norm and head."""
        after = self._leave(state)
        ids = torch.zeros(state.shape[:2], dtype=torch.long, device=state.device)
        return self._forward_around(ids, lambda *rest: (after, 0, 0, state, rest[3]))

    @abstractmethod
    def _placed(self, positions: Tensor) -> Any:
        """The model with the rotary angles of these positions."""

    @abstractmethod
    def _rotary(self, state: Tensor) -> Any:
        """Rotary angles that blocks receive for the positions of a state."""

    @abstractmethod
    def _angles(self, n_positions: int) -> Tensor:
        """Cosines and sines of the positions, (n, head / 2, 2)."""

    @abstractmethod
    def _norms_after_loop(self) -> list[tuple[str, Any]]:
        """Steps of a program between loop and coda."""

    @abstractmethod
    def _leave(self, state: Tensor) -> Tensor:
        """Input of the coda for the last state."""
