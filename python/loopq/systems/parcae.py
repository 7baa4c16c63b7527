"""Parcae: a diagonal state-space injection and a core of pre-norm blocks with value embeddings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import SystemContractError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.declare import declare, find_prefix
from loopq.systems.fixed import FixedCached
from loopq.systems.outputs import logits_of
from loopq.systems.views import copied

_MARKER = "transformer.core_block.0.attn.c_q"
_GATE = {"role": "gate", "treatment": "dense", "reason": "32 inputs and a row per head: nothing to save"}
_LINEARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("attn.c_q", {"role": "attention"}),
    ("attn.c_k", {"role": "attention"}),
    ("attn.c_v", {"role": "attention"}),
    ("attn.ve_gate", _GATE),
    ("attn.c_proj", {"role": "attention"}),
    ("mlp.fc", {"role": "mlp"}),
    ("mlp.proj", {"role": "mlp"}),
)


@SYSTEMS.register("parcae")
class Parcae(FixedCached):
    """Parcae-140M to 1.3B (plain torch class).

    By default the published forward draws a depth per sequence and discards some of its updates. Rollouts therefore
    set the depth. The token ids re-enter at every step through the value embeddings, so a step receives the pair
    (prelude's output, ids).
    """

    summary = "s = core(decay * s + dt * B e), noise state; token values enter at each step"
    published = Published(
        {"Parcae-140M": 12, "Parcae-1.3B": 48},
        code="own",
        exposed=("the decay of the state (A_log, dt_bias), kept as it is",),
    )
    state_is_random = True

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._prefix = find_prefix(model, _MARKER) or ""
        self._core = model.get_submodule(self._prefix.rstrip("."))

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by core blocks with separate `c_q` and the parameter `transformer.adapter.A_log`."""
        prefix = find_prefix(model, _MARKER)
        return prefix is not None and f"{prefix}transformer.adapter.A_log" in dict(model.named_parameters())

    @property
    def n_steps(self) -> int:
        """`config.mean_recurrence`."""
        return int(self._core.config.mean_recurrence)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Six linears of every core block, 12 or 48. Gates of value embeddings stay unchanged."""
        modules: list[tuple[str, dict[str, Any]]] = []
        for i, block in enumerate(self._core.transformer.core_block):
            stem = f"{self._prefix}transformer.core_block.{i}"
            present = dict(block.named_modules())
            modules += [(f"{stem}.{name}", fields) for name, fields in _LINEARS if name in present]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """The injection, which has no linear module."""
        stem = f"{self._prefix}transformer.adapter"
        return {
            f"{stem}.A_log": "decay of the state, a vector",
            f"{stem}.dt_bias": "step size of the state, a vector",
            f"{stem}.B": "bare parameter, used as e @ B.T without a module to hook",
        }

    @property
    def n_positions(self) -> int:
        """Length of the rotary table."""
        return int(self._core.freqs_cis.shape[1])

    def noise(self, batch: Batch, first: int = 0) -> Tensor:
        """Truncated normal noise, cut at three standard deviations, (n_prompts, n, width) of the tokens from `first`
        on."""
        config = self._core.config
        width = int(self._core.transformer.adapter.A_log.shape[0])
        if config.state_init != "like-init":
            raise SystemContractError(
                f"parcae: config.state_init is {config.state_init!r}; only 'like-init' is supported"
            )
        std = float(config.init.get_std("embedding")) * float(self._core.emb_scale)
        noise = batch.noise(batch.input_ids.shape[1], width, std=std, cut=3.0, first=first)
        return self.to_device(noise, dtype=True)

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        noise = self.noise(batch)
        # Steps without and with gradient.
        depth = [0, n_steps] if self.keeps_graph else [n_steps, 0]
        core = copied(self._core, initialize_state=lambda embeds: noise, _current_input_ids=ids)
        return logits_of(core(ids, num_steps_pair=depth, return_logits=True))

    def _logits_at(self, ids: Tensor, noise: Tensor | None, n_steps: int, positions: Tensor) -> Tensor:
        def loop(embeds: Tensor, *rest: Any) -> tuple[Any, ...]:
            # The published loop counts its steps on the device, and a recording must not wait for it.
            state, total = noise, torch.tensor(n_steps)
            for t in range(n_steps):
                state = core.core_block_forward(state, embeds, *rest[:2], torch.tensor(t), total)
            return state, 0, 0, state

        angles = self._core.freqs_cis[:, positions]
        core = copied(self._core, iterate_forward=loop, freqs_cis=angles, _current_input_ids=ids)
        return logits_of(core(ids, return_logits=True))

    def embed(self, batch: Batch) -> Any:
        """The prelude's output and the token ids, which the value embeddings need."""
        ids = self.to_device(batch.input_ids)
        return self._embed(ids), ids

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One injection and one pass through the core blocks."""
        embeds, ids = embedding
        rotary = self._core.freqs_cis[:, : state.shape[1]]
        now, total = torch.tensor(t), torch.tensor(n_steps)
        core = copied(self._core, _current_input_ids=ids)
        after: Tensor = core.core_block_forward(state, embeds, rotary, None, now, total)
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Projection C, coda, final norm and head."""
        _, ids = embedding
        last = {"iterate_forward": lambda *rest: (state, 0, 0, state), "_current_input_ids": ids}
        core = copied(self._core, **last)
        return logits_of(core(ids, return_logits=True))

    def _embed(self, ids: Tensor) -> Tensor:
        kept: list[Tensor] = []

        def loop(embeds: Tensor, *rest: Any) -> tuple[Any, ...]:
            kept.append(embeds)
            return embeds, 0, 0, embeds

        copied(self._core, iterate_forward=loop, _current_input_ids=ids)(ids, return_logits=True)
        return kept[0]
