"""TRM and HRM: a small net called repeatedly, with its state carried over several forward calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from loopq.errors import ConfigError
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch
from loopq.systems.declare import declare
from loopq.systems.stepwise import SingleSteps

_LINEARS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("self_attn.qkv_proj", {"role": "attention", "fused": "q+k+v"}),
    ("self_attn.o_proj", {"role": "attention"}),
    ("mlp_t.gate_up_proj", {"role": "mixing", "fused": "gate+up"}),
    ("mlp_t.down_proj", {"role": "mixing"}),
    ("mlp.gate_up_proj", {"role": "mlp", "fused": "gate+up"}),
    ("mlp.down_proj", {"role": "mlp"}),
)


@SYSTEMS.register("trm")
class Trm(SingleSteps):
    """TRM and HRM (plain torch classes). A rollout is several calls of the root forward with a carry.

    A step is one such call. In it the net runs H_cycles times (L_cycles updates of z_L, one of z_H). TRM uses one net
    for both, HRM a net for each. Halting is left out because evaluation always runs to the end. The state is cat(z_H,
    z_L) along the width.
    """

    name = "trm"
    summary = "z_L = net(z_L + z_H + e) L times, z_H = net(z_H + z_L); carried over calls"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `inner.L_level` and a method `initial_carry`."""
        return "inner.L_level.layers.0" in dict(model.named_modules()) and hasattr(model, "initial_carry")

    @property
    def n_steps(self) -> int:
        """`config.halt_max_steps` calls."""
        return int(self.model.config.halt_max_steps)

    @property
    def prompt_length(self) -> int:
        """`config.seq_len`, since positions are built in."""
        return int(self.model.config.seq_len)

    def check_depth(self, n_steps: int) -> int:
        """Reject more calls than the model makes before it restarts."""
        if n_steps > self.n_steps:
            raise ConfigError(f"trm: after {self.n_steps} calls the state is reset; got n_steps = {n_steps}")
        return super().check_depth(n_steps)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Linears of the net, or of both nets."""
        config = self.model.config
        low, high = n_steps * config.H_cycles * config.L_cycles, n_steps * config.H_cycles
        two = hasattr(self.model.inner, "H_level")
        nets = (("L_level", low), ("H_level", high)) if two else (("L_level", low + high),)
        modules: list[tuple[str, dict[str, Any]]] = []
        for net, calls in nets:
            for i, layer in enumerate(getattr(self.model.inner, net).layers):
                present = dict(layer.named_modules())
                modules += [
                    (f"inner.{net}.layers.{i}.{suffix}", {"invocations": calls} | fields)
                    for suffix, fields in _LINEARS
                    if suffix in present
                ]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """The heads, which feed nothing back."""
        return {
            "inner.lm_head.weight": "read at every call, but only the last one counts",
            "inner.q_head.weight": "decides on halting, which evaluation does not follow",
        }

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Call the root forward `n_steps` times from the learned initial state."""
        depth = self.check_depth(n_steps)
        self._check_length(batch)
        given = self._given(batch)
        # The published classes create the carry on torch's default device.
        with torch.set_grad_enabled(self.keeps_graph), self.device:
            carry = self.model.initial_carry(given)
            for _ in range(depth):
                carry, out = self.model(carry, given)
        logits: Tensor = out["logits"]
        return logits

    def embed(self, batch: Batch) -> Tensor:
        """Token (and puzzle) embeddings, injected at every update of z_L."""
        self._check_length(batch)
        given = self._given(batch)
        embedding: Tensor = self.model.inner._input_embeddings(given["inputs"], given["puzzle_identifiers"])
        return embedding

    def initial_state(self, batch: Batch, embedding: Any) -> Tensor:
        """Learned vectors, equal at all positions, as (n_prompts, n_positions, 2 * width)."""
        inner = self.model.inner
        high, low = (start.expand_as(embedding) for start in (inner.H_init, inner.L_init))
        return torch.cat((high, low), -1).to(embedding.dtype)

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """One call: H_cycles times (L_cycles updates of z_L, one of z_H)."""
        inner, config = self.model.inner, self.model.config
        high, low = state.chunk(2, -1)
        rotary = inner.rotary_emb() if hasattr(inner, "rotary_emb") else None
        upper = getattr(inner, "H_level", inner.L_level)
        for _ in range(config.H_cycles):
            for _ in range(config.L_cycles):
                low = inner.L_level(low, high + embedding, cos_sin=rotary)
            high = upper(high, low, cos_sin=rotary)
        return torch.cat((high, low), -1)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """Head on z_H, without the positions of the puzzle embedding."""
        inner = self.model.inner
        logits: Tensor = inner.lm_head(state.chunk(2, -1)[0])[:, inner.puzzle_emb_len :]
        return logits

    def _given(self, batch: Batch) -> dict[str, Tensor]:
        ids = self.to_device(batch.input_ids)
        puzzles = torch.zeros(ids.shape[0], dtype=torch.int32, device=ids.device)
        return {"inputs": ids, "puzzle_identifiers": puzzles}

    def _check_length(self, batch: Batch) -> None:
        if batch.input_ids.shape[1] != self.prompt_length:
            raise ConfigError(
                f"trm: prompts have exactly {self.prompt_length} tokens (config.seq_len); got "
                f"{batch.input_ids.shape[1]}"
            )
