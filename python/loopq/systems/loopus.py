"""LoopUS: a pre-trained decoder with repeated middle layers. A gate mixes their output with the previous state."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from loopq.errors import ConfigError, require
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, Published
from loopq.systems.capabilities import ExitRule, ModelClass
from loopq.systems.declare import declare
from loopq.systems.outputs import cache_name
from loopq.systems.stepwise import StepwiseSystem

_PARTS = ("encoder", "reasoning", "decoder")
_MARKS = ("encoder.embed_tokens", "reasoning.gate.dt_input_proj", "decoder.lm_head")


@SYSTEMS.register("loopus")
class LoopUS(StepwiseSystem):
    """LoopUS-Qwen3-1.7B and similar models. `encoder`, `reasoning` and `decoder` hold the layers of a dense model.

    ``s_0 = encoder(ids)`` starts the state. A step is ``s_{t+1} = a x + (1 - a) s_t`` with ``x = layers(s_t)``. Each
    token and channel has ``a = exp(-softplus(P R (x - s_t) + b) exp(A_log))``. The decoder reads ``s_N``. The
    published class stops at a signal of its `q_head`, but here every prompt runs all N steps. The class is unknown to
    transformers, so `build_loopus` builds the model from ``config.json``. The published class also works.
    """

    summary = "layers of a dense model; s = gate(middle layers(s), s), then the last layers"
    published = Published({"LoopUS-Qwen3-1.7B": 196}, code="own", idle=("q_head.",))

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by the gate beside encoder and decoder."""
        return set(_MARKS) <= set(dict(model.named_modules()))

    @classmethod
    def model_class(cls) -> ModelClass:
        """The published ``config.json`` contains the dense model's, and divides its layers."""
        return ModelClass(build_loopus, rename=_current_names, model_types=("lds",))

    @property
    def n_steps(self) -> int:
        """`config.N`."""
        return int(self.model.config.N)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Every linear of every layer, 196 of 28. Those of encoder and decoder are called once."""
        modules = []
        for part in _PARTS:
            for i, layer in enumerate(self.model.get_submodule(part).layers):
                modules += [
                    (
                        f"{part}.layers.{i}.{name}",
                        {
                            "role": name.split(".")[0].replace("self_attn", "attention"),
                            "invocations": n_steps if part == "reasoning" else 1,
                        },
                    )
                    for name, module in layer.named_modules()
                    if isinstance(module, nn.Linear)
                ]
        return declare(self.model, modules, n_steps)

    def left_out(self) -> dict[str, str]:
        """Gate and exit head."""
        gate = "the gate: says how much of every step is kept, one weight in two thousand"
        return {
            "reasoning.gate.dt_input_proj.weight": gate,
            "reasoning.gate.delta_proj.weight": gate,
            "q_head.1.weight": "chooses a step to leave at; all steps are run",
        }

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return self._run(ids, n_steps, 0, None)

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with keys and values of the layers outside the loop, and of those inside for each step."""
        if cache is None:
            dynamic = require("transformers").DynamicCache
            cache = [dynamic() for _ in range(n_steps + 1)]
        return self._run(self.to_device(batch.input_ids[:, n_seen:]), n_steps, n_seen, cache), cache

    def _run(self, ids: Tensor, n_steps: int, n_seen: int, cache: Any) -> Tensor:
        outside, inside = (None, [None] * n_steps) if cache is None else (cache[0], cache[1:])
        state = self._layers("encoder", self.model.encoder.embed_tokens(ids), n_seen, outside)
        for t in range(n_steps):
            state = self._gated(state, n_seen, inside[t])
        return self._read(state, n_seen, outside)

    def _layers(self, part: str, x: Tensor, n_seen: int = 0, cache: Any = None) -> Tensor:
        """Run the layers of a part on tokens that follow the `n_seen` tokens of a cache."""
        end = n_seen + x.shape[1]
        at, keys = torch.arange(n_seen, end, device=x.device), torch.arange(end, device=x.device)
        rope = self.model.encoder.rotary_emb(x, at[None])
        # Set even without a cache, since without a mask some attention types would see later tokens.
        unseen = x.new_full((len(at), end), torch.finfo(x.dtype).min)
        mask = unseen.masked_fill(at[:, None] >= keys, 0.0)[None, None]
        for layer in self.model.get_submodule(part).layers:
            out = layer(
                x,
                attention_mask=mask,
                position_ids=at[None],
                position_embeddings=rope,
                use_cache=cache is not None,
                cache_position=at,
                **{str(cache_name(layer.forward)): cache},
            )
            x = out[0] if isinstance(out, tuple) else out
        return x

    def _gated(self, state: Tensor, n_seen: int = 0, cache: Any = None) -> Tensor:
        gate = self.model.reasoning.gate
        # The gate may still be float32.
        before = state.to(gate.A_log.dtype)
        after = self._layers("reasoning", state, n_seen, cache).to(gate.A_log.dtype)
        delta = F.softplus(gate.delta_proj(gate.dt_input_proj(after - before)))
        kept = (-delta * gate.A_log.exp()).exp()
        return (kept * after + (1 - kept) * before).to(state.dtype)

    def _read(self, state: Tensor, n_seen: int = 0, cache: Any = None) -> Tensor:
        decoder = self.model.decoder
        logits: Tensor = decoder.lm_head(decoder.norm(self._layers("decoder", state, n_seen, cache)))
        return logits

    def _embed(self, ids: Tensor) -> Tensor:
        return self._layers("encoder", self.model.encoder.embed_tokens(ids))

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """The middle layers, then the gate."""
        return self._gated(state)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """The last layers, the norm and the head."""
        return self._read(state)

    def exit_rule(self) -> ExitRule:
        """Exit when `q_head`'s probability reaches the threshold."""

        def sure(state: Tensor, logits: Tensor, threshold: float) -> bool:
            return float(self.model.q_head(state).sigmoid()) >= threshold

        return sure


def build_loopus(config: dict[str, Any]) -> nn.Module:
    """Build the untrained model that a LoopUS ``config.json`` describes.

    Parameters
    ----------
    config : dict
        It contains `base_config_dict`, the ``config.json`` of the dense model. `encoder_layer_indices`,
        `reasoning_layer_indices` and `decoder_layer_indices` divide its layers. `N` is the number of steps.

    Raises
    ------
    ConfigError
        If a setting is missing, or the three lists do not divide the layers.
    """
    transformers = require("transformers")

    absent = {"base_config_dict", "N", *(f"{part}_layer_indices" for part in _PARTS)} - set(config)
    if absent:
        raise ConfigError(f"config.json of LoopUS: no {', '.join(sorted(absent))}")
    base_config = {k: v for k, v in config["base_config_dict"].items() if k != "transformers_version"}
    settings = transformers.AutoConfig.for_model(**base_config)
    base = transformers.AutoModelForCausalLM.from_config(settings)
    numbers = {part: sorted(config[f"{part}_layer_indices"]) for part in _PARTS}
    if sorted(i for part in _PARTS for i in numbers[part]) != list(range(len(base.model.layers))):
        raise ConfigError(
            f"config.json of LoopUS: {numbers} do not divide the {len(base.model.layers)} layers of the dense model"
        )
    model = nn.Module()
    for part in _PARTS:
        block = nn.Module()
        block.layers = nn.ModuleList(base.model.layers[i] for i in numbers[part])
        model.add_module(part, block)
    width = int(settings.hidden_size)
    model.encoder.embed_tokens, model.encoder.rotary_emb = base.model.embed_tokens, base.model.rotary_emb
    # Under the published names, with `LoopUS` doing the computation.
    gate = model.reasoning.gate = nn.Module()
    gate.A_log = nn.Parameter(torch.arange(1, width + 1, dtype=torch.float32).log())
    gate.dt_input_proj = nn.Linear(width, -(-width // 16), bias=False)
    gate.delta_proj = nn.Linear(-(-width // 16), width)
    model.decoder.norm, model.decoder.lm_head = base.model.norm, base.lm_head
    model.q_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 1))
    model.config = SimpleNamespace(**base_config, **{k: v for k, v in config.items() if k not in base_config})
    return model.eval()


def _current_names(tensors: dict[str, Any]) -> dict[str, Any]:
    """Early checkpoints call the loop "plateau". Those saved by several processes have "module" in a name."""
    plain = {name.replace(".module.", "."): tensor for name, tensor in tensors.items()}
    return {re.sub(r"^plateau\.", "reasoning.", name): tensor for name, tensor in plain.items()}
