"""Any dense decoder of transformers with some layers run several times: a loop without training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from loopq.errors import SystemContractError
from loopq.layers.loop_spec import LOOP, PREFIX, layer_order
from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch
from loopq.systems.blocks import angles_of, llama_block
from loopq.systems.declare import declare, is_embedding
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.program import Program
from loopq.systems.routing import gates, routing_module, stacked_experts
from loopq.systems.stepwise import StepwiseSystem
from loopq.systems.views import changed, copied, view

if TYPE_CHECKING:
    from torch import Tensor, nn


_PARTS = ("layers", "norm", "embed_tokens")


@SYSTEMS.register("looped")
class Looped(StepwiseSystem):
    """Dense decoders with ``model.layers``, such as Llama, Qwen, Mistral or SmolLM, looped without training.

    ``looped:MODEL[8:20]x2`` runs layers 8 to 19 twice. The others run once, before and after. All layers are
    quantized, each over its own invocations. ``config.json`` stores the loop as ``looped_layers`` and names the
    architecture ``LoopedLlamaForCausalLM``. vLLM runs it through `loopq.runtime.vllm`. Its ``model_type`` is
    ``loopq_looped``, which transformers refuses without `loopq.runtime.transformers` or ``--remote-code``.
    """

    summary = "layers before the loop; s = layers(s) TIMES times; layers after it (looped:MODEL[8:20]x2)"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._loop = getattr(model.config, LOOP)
        layer_order(self._loop, len(self._inner.layers))
        self._first, self._last, self._times = self._loop

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `looped_layers` in the configuration."""
        if getattr(getattr(model, "config", None), LOOP, None) is None:
            return False
        inner = getattr(model, "model", None)
        if not all(hasattr(inner, part) for part in _PARTS) or not hasattr(model, "lm_head"):
            raise SystemContractError(
                f"{type(model).__name__}: only decoders with model.layers, model.norm, model.embed_tokens and lm_head "
                "can be looped"
            )
        return True

    @property
    def _inner(self) -> Any:
        return self.model.model

    @property
    def n_steps(self) -> int:
        """Number of runs of the loop's layers."""
        return int(self._times)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Every linear of every layer. Those outside the loop are called once."""
        from torch import nn  # lazy: loopq imports without torch

        gate = gates(self.model, self._routing())
        modules = []
        for i, layer in enumerate(self._inner.layers):
            times = n_steps if self._first <= i < self._last else 1
            for part, module in layer.named_modules():
                name = f"model.layers.{i}.{part}"
                if not isinstance(module, nn.Linear) or f"{name}.weight" in gate:
                    continue
                fields: dict[str, Any] = {
                    "role": part.split(".")[0].replace("self_attn", "attention"),
                    "invocations": times,
                }
                block = routing_module(self.model, name, f"model.layers.{i}")
                if block is not None:
                    fields |= {"role": "expert", "routed_in": block}
                modules.append((name, fields))
        return declare(self.model, modules, n_steps)

    def _routing(self) -> list[str]:
        """Modules that choose experts."""
        modules: dict[str | None, None] = {}
        for i, layer in enumerate(self._inner.layers):
            parts = (f"model.layers.{i}.{part}" for part, _ in layer.named_modules() if part)
            modules |= dict.fromkeys(routing_module(self.model, part, f"model.layers.{i}") for part in parts)
        return [name for name in modules if name is not None]

    def describe_loop(self) -> tuple[str, ...]:
        """Describe the loop, and the tools that know it."""
        return (
            f"layers {self._first} to {self._last - 1} run {self._times} times; transformers has the loop from "
            "--remote-code, vLLM has the loop from loopq's plugin, and export --format gguf writes it out",
        )

    def left_out(self) -> dict[str, str]:
        """A head that is the embedding, gates of experts, and experts that are not modules."""
        tied = is_embedding(self.model, "lm_head")
        head = {"lm_head.weight": "is the input embedding, which stays as it is"} if tied else {}
        return head | gates(self.model, self._routing()) | stacked_experts(self.model)

    def _order(self, n: int) -> list[int]:
        return layer_order(self._loop, len(self._inner.layers), n)

    def _model(self, order: Sequence[int], *, norm: bool = True) -> Any:
        return _in_order(self.model, self._inner, order, norm)

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._model(self._order(n_steps))(ids, use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache: a slot for each run of a layer."""
        ids, model = self.to_device(batch.input_ids[:, n_seen:]), self._model(self._order(n_steps))
        return cached(model(ids, **past(model, cache)))

    def program(self, n_steps: int) -> Program | None:
        """The layers in order, then the norm."""

        inner = self._inner
        blocks = [llama_block(layer, self.model.config) for layer in inner.layers]
        if not all(blocks):
            return None
        order = [*(("block", blocks[i]) for i in self._order(n_steps)), ("norm", inner.norm)]
        return Program(
            inner.embed_tokens, order, self.model.lm_head, lambda n: angles_of(inner.rotary_emb, n)
        )

    def _embed(self, ids: Tensor) -> Tensor:
        inner = self._model(range(self._first), norm=False).model
        before: Tensor = inner(ids, use_cache=False).last_hidden_state
        return before

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """The loop's layers, once."""
        inner = self._model(range(self._first, self._last), norm=False).model
        after: Tensor = inner(inputs_embeds=state, use_cache=False).last_hidden_state
        return after

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """The layers after the loop, the norm and the head."""
        model = self._model(range(self._last, len(self._inner.layers)))
        return logits_of(model(inputs_embeds=state, use_cache=False))


def run_loop(model: Any) -> None:
    """Let a decoder with `looped_layers` in its configuration run the loop when it is called or generates.

    Parameters
    ----------
    model : nn.Module
        Changed in place. Its parameters keep their names.
    """
    model.model.__class__ = _looping(_plain(type(model.model)), _Inner)
    if hasattr(model, "generate"):
        model.__class__ = _looping(_plain(type(model)), _Generator)


class _Loops:
    """Marks the classes of models that run their loop. The class after it runs every layer once."""


class _Inner(_Loops):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _whole(self, self).forward(*args, **kwargs)


class _Generator(_Loops):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # The cache takes its number of slots from the configuration, so the whole model is the one with the loop.
        return _whole(self, self.model).generate(*args, **kwargs)  # type: ignore[attr-defined]


@functools.cache
def _looping(plain: type, loops: type) -> type:
    return type(f"{PREFIX}{plain.__name__}", (loops, plain), {"__module__": plain.__module__})


def _plain(kind: type) -> type:
    return kind.__mro__[3] if issubclass(kind, _Loops) else kind


def _whole(module: Any, inner: Any) -> Any:
    return _in_order(module, inner, layer_order(getattr(inner.config, LOOP), len(inner.layers)))


def _in_order(module: Any, inner: Any, order: Sequence[int], norm: bool = True) -> Any:
    """A module that runs these layers in this order. A repeated layer has two slots in a cache.

    Parameters
    ----------
    module : nn.Module
        The model, or its inner model.
    inner : nn.Module
        Holds the layers. A copy of a layer shares its parameters, buffers, submodules and hooks. Only its slot number
        differs.
    order : sequence of int
        Numbers of layers.
    norm : bool
        Run the final norm.
    """
    from torch import nn  # lazy: loopq imports without torch

    layers = nn.ModuleList(_in_slot(inner.layers[i], slot) for slot, i in enumerate(order))
    parts = [(inner.layers, layers)] if norm else [(inner.layers, layers), (inner.norm, nn.Identity())]
    for config in {id(m.config): m.config for m in (module, inner)}.values():
        kinds = getattr(config, "layer_types", None)
        other = {} if kinds is None else {"layer_types": [kinds[i] for i in order]}
        parts.append((config, changed(config, num_hidden_layers=len(order), **other)))
    reordered = view(module, *parts)
    for part in (reordered, getattr(reordered, "model", reordered)):
        part.__class__ = _plain(type(part))
    return reordered


def _in_slot(layer: nn.Module, slot: int) -> nn.Module:
    """Copy a layer so that its attention uses the given cache slot. The rest is shared with the original."""
    parts = layer._modules.values()
    slots = ((part, copied(part, layer_idx=slot)) for part in parts if hasattr(part, "layer_idx"))
    new: nn.Module = view(layer, *slots)
    return new
