"""Ouro's and Nanbeige4.2's classes in small: a stack of Llama layers that is looped, with a norm after each loop."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import ClassVar

import torch
from torch import Tensor, nn

from benches.zoo.models.layers import GatedMLP, Rope, Rotary, SplitAttention
from loopq.zoo.config import SmallConfig
from loopq.zoo.layers import RMSNorm, init_linears


@dataclasses.dataclass
class OuroConfig(SmallConfig):
    """Settings of `SmallOuro`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    total_ut_steps : int
        Loops.
    n_layers : int
        Layers of the looped stack.
    rope_base : float
        Base of the rotary angles.
    early_exit_threshold : float
        The first loop whose cumulative exit probability reaches it is read out.
    """

    model_type: ClassVar[str] = "loopq-zoo-ouro"
    multiples: ClassVar = (("n_embd", 2, "n_heads"),)

    total_ut_steps: int = 4
    n_layers: int = 2
    rope_base: float = 10_000.0
    early_exit_threshold: float = 1.0


@dataclasses.dataclass
class NanbeigeConfig(SmallConfig):
    """Settings of `SmallNanbeige`; see `SmallConfig` for the common ones.

    Parameters
    ----------
    num_loops : int
        Loops, unless there are `loop_loss_weights`: then one more than those.
    n_layers : int
        Layers of the looped stack.
    n_kv_heads : int
        Key/value heads (grouped-query attention).
    head_dim : int
        Width of a head; not ``n_embd / n_heads``.
    rope_base : float
        Base of the rotary angles.
    loop_loss_weights : list of float
        Weights of the loops' losses; only their number matters here.
    """

    model_type: ClassVar[str] = "loopq-zoo-nanbeige"
    multiples: ClassVar = (("n_heads", 1, "n_kv_heads"), ("head_dim", 2, None))

    num_loops: int = 2
    n_layers: int = 3
    n_kv_heads: int = 2
    head_dim: int = 48
    rope_base: float = 10_000.0
    loop_loss_weights: list[float] = dataclasses.field(default_factory=list)


class Layer(nn.Module):
    """``x += attn(norm(x)); x += mlp(norm(x))``; Ouro has one more norm on each branch's output."""

    def __init__(self, config: SmallConfig, n_kv_heads: int, head_dim: int, branch_norms: bool) -> None:
        super().__init__()

        def norm() -> nn.Module:
            return RMSNorm(config.n_embd, config.norm_eps)

        self.input_layernorm = norm()
        self.self_attn = SplitAttention(config.n_embd, config.n_heads, n_kv_heads, head_dim)
        self.input_layernorm_2 = norm() if branch_norms else None
        self.post_attention_layernorm = norm()
        self.mlp = GatedMLP(config.n_embd, config.intermediate_size)
        self.post_attention_layernorm_2 = norm() if branch_norms else None

    def forward(self, x: Tensor, rope: Rope) -> Tensor:
        branch = self.self_attn(self.input_layernorm(x), rope)
        x = x + (branch if self.input_layernorm_2 is None else self.input_layernorm_2(branch))
        branch = self.mlp(self.post_attention_layernorm(x))
        after = self.post_attention_layernorm_2
        return x + (branch if after is None else after(branch))


class LoopedStack(nn.Module):
    """Parts of the inner models of both classes: embeddings, layers, norm and rotary tables."""

    def __init__(
        self, config: OuroConfig | NanbeigeConfig, n_kv_heads: int, head_dim: int, branch_norms: bool
    ) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.n_embd)
        self.layers = nn.ModuleList(
            Layer(config, n_kv_heads, head_dim, branch_norms) for _ in range(config.n_layers)
        )
        self.norm = RMSNorm(config.n_embd, config.norm_eps)
        self.rotary_emb = Rotary(head_dim, config.rope_base)

    def loops(self, input_ids: Tensor | None, inputs_embeds: Tensor | None, n_loops: int) -> list[Tensor]:
        """Return the state (batch, seq, d) after each loop."""
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        rope = self.rotary_emb(x, torch.arange(x.shape[1], device=x.device)[None])
        states = []
        for _ in range(n_loops):
            for layer in self.layers:
                x = layer(x, rope)
            x = self.norm(x)
            states.append(x)
        return states


def _output(state: Tensor, use_cache: bool | None) -> SimpleNamespace:
    """As in the published classes, a cache is kept unless it is declined; here it is empty."""
    return SimpleNamespace(last_hidden_state=state, past_key_values=None if use_cache is False else ())


class OuroModel(LoopedStack):
    """Inner model: keeps its own copy of the loop count and gives the states and exit gates of all loops."""

    def __init__(self, config: OuroConfig) -> None:
        super().__init__(config, config.n_heads, config.n_embd // config.n_heads, branch_norms=True)
        self.total_ut_steps = config.total_ut_steps
        self.early_exit_gate = nn.Linear(config.n_embd, 1)

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> tuple[SimpleNamespace, list[Tensor], list[Tensor]]:
        states = self.loops(input_ids, inputs_embeds, self.total_ut_steps)
        return _output(states[-1], use_cache), states, [self.early_exit_gate(s) for s in states]


class SmallOuro(nn.Module):
    """Ouro's class: ``s_0 = embed_tokens(ids)``, ``s_{t+1} = norm(layers(s_t))``, logits ``lm_head(s)``.

    Unless `exit_at_step` names the loop that is read, the exit gate picks one for each token. The gate is not trained.
    """

    def __init__(self, config: OuroConfig) -> None:
        super().__init__()
        self.config = config
        self.model = OuroModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.total_ut_steps)

    def forward(
        self, input_ids: Tensor, use_cache: bool | None = None, exit_at_step: int | None = None
    ) -> SimpleNamespace:
        """Return float32 `logits` (batch, seq, vocab) and `past_key_values`."""
        out, states, gates = self.model(input_ids, use_cache=use_cache)
        state = self.picked(states, gates) if exit_at_step is None else states[exit_at_step]
        return SimpleNamespace(logits=self.lm_head(state).float(), past_key_values=out.past_key_values)

    def picked(self, states: list[Tensor], gates: list[Tensor]) -> Tensor:
        """Return each token's state after the first loop at which the cumulative exit probability reaches the
        threshold."""
        stay = torch.cumprod(1 - torch.stack(gates).float().sigmoid(), 0)
        reached = 1 - stay >= self.config.early_exit_threshold
        reached[-1] = True
        chosen = reached.int().argmax(0, keepdim=True)
        return torch.stack(states).gather(0, chosen.expand(1, *states[0].shape))[0]


class NanbeigeModel(LoopedStack):
    """Inner model: reads the number of loops from the configuration at each call."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__(config, config.n_kv_heads, config.head_dim, branch_norms=False)
        self.config: NanbeigeConfig

    def forward(
        self,
        input_ids: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> SimpleNamespace:
        weights = self.config.loop_loss_weights
        n_loops = len(weights) + 1 if weights else self.config.num_loops
        return _output(self.loops(input_ids, inputs_embeds, n_loops)[-1], use_cache)


class SmallNanbeige(nn.Module):
    """Nanbeige4.2's class: ``s_0 = embed_tokens(ids)``, ``s_{t+1} = norm(layers(s_t))``, untied ``lm_head(s_N)``."""

    def __init__(self, config: NanbeigeConfig) -> None:
        super().__init__()
        self.config = config
        self.model = NanbeigeModel(config)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        init_linears(self, config.n_layers * config.num_loops)

    def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> SimpleNamespace:
        """Return float32 `logits` (batch, seq, vocab) and `past_key_values`."""
        out = self.model(input_ids, use_cache=use_cache)
        logits = self.lm_head(out.last_hidden_state).float()
        return SimpleNamespace(logits=logits, past_key_values=out.past_key_values)
