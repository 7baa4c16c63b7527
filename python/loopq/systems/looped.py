"""Any dense decoder of transformers with some layers run several times: a loop without training."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
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


#: Settings of classes whose layers read tables or caches of their own number.
_BY_NUMBER = ("hidden_size_per_layer_input", "num_kv_shared_layers")
#: Roles of the parts of a layer.
_ROLES = {"self_attn": "attention", "attn": "attention"}


@dataclass(frozen=True)
class DecoderParts:
    """Where a model of transformers has its layers.

    Parameters
    ----------
    path : str
        Name of the module with the layers: the base of a published class, or the text model in a multimodal one.
    layers, norm, head : str
        Names of the list of layers and of the final norm in that module, and of the head in the model.
    """

    path: str
    layers: str
    norm: str
    head: str

    @classmethod
    def of(cls, model: Any) -> DecoderParts | None:
        """Find the parts of a model by what they are. None if it is no such decoder."""
        from torch import nn  # lazy: loopq imports without torch

        path = str(getattr(model, "base_model_prefix", "") or "model")
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        while isinstance(inner := _submodule(model, path), nn.Module):
            depth = getattr(getattr(inner, "config", None), "num_hidden_layers", None)
            parts = dict(inner.named_children())
            lists = [n for n, m in parts.items() if isinstance(m, nn.ModuleList) and len(m) == depth]
            norms = [n for n, m in parts.items() if "norm" in type(m).__name__.lower()]
            if lists and norms and head is not None:
                layers = parts[lists[0]]
                name = next(n for n, m in model.named_modules() if m is head)
                # Layers in codes have it, too; transformers' Conv1D has not.
                held = any(hasattr(m, "in_features") for m in layers.modules())
                return cls(path, lists[0], norms[-1], name) if held else None
            path += ".language_model"
        return None


def _submodule(model: nn.Module, path: str) -> Any:
    found: Any = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found


@SYSTEMS.register("looped")
class Looped(StepwiseSystem):
    """Decoders of transformers, such as Llama, Qwen, Mistral, GPT-NeoX or LFM2, looped without training.

    They have one list of layers, a norm after it and a head. In a multimodal model it is the text model that is looped.

    ``looped:MODEL[8:20]x2`` runs layers 8 to 19 twice. The others run once, before and after. All layers are
    quantized, each over its own invocations. ``config.json`` stores the loop as ``looped_layers`` and names the
    architecture ``LoopedLlamaForCausalLM``. vLLM runs it through `loopq.runtime.vllm`. Its ``model_type`` is
    ``loopq_looped``, which transformers refuses without `loopq.runtime.transformers` or ``--remote-code``.
    """

    summary = "layers before the loop; s = layers(s) TIMES times; layers after it (looped:MODEL[8:20]x2)"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._parts = _parts_of(model)
        by_number = [n for n in _BY_NUMBER if getattr(self._inner.config, n, None)]
        if by_number:
            raise SystemContractError(
                f"{type(model).__name__}: config sets {', '.join(by_number)}, with which a layer's number decides what "
                "it reads; such layers cannot run twice"
            )
        self._loop = getattr(model.config, LOOP)
        layer_order(self._loop, len(self._layers))
        self._first, self._last, self._times = self._loop

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by `looped_layers` in the configuration."""
        if getattr(getattr(model, "config", None), LOOP, None) is None:
            return False
        if DecoderParts.of(model) is None:
            raise SystemContractError(
                f"{type(model).__name__}: only decoders with model.layers (one list of layers with nn.Linear in them), "
                "a norm after it and a head can be looped"
            )
        return True

    @property
    def _inner(self) -> Any:
        return self.model.get_submodule(self._parts.path)

    @property
    def _layers(self) -> Any:
        return getattr(self._inner, self._parts.layers)

    @property
    def _prefix(self) -> str:
        return f"{self._parts.path}.{self._parts.layers}"

    @property
    def has_steps(self) -> bool:  # type: ignore[override]
        """Whether layers can be run on their own. A class with a table of positions adds it to each input."""
        from torch import nn  # lazy: loopq imports without torch

        return sum(isinstance(m, nn.Embedding) for m in self._inner.children()) == 1

    @property
    def n_steps(self) -> int:
        """Number of runs of the loop's layers."""
        return int(self._times)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Every linear of every layer. Those outside the loop are called once."""
        from torch import nn  # lazy: loopq imports without torch

        gate = gates(self.model, self._routing())
        modules = []
        for i, layer in enumerate(self._layers):
            times = n_steps if self._first <= i < self._last else 1
            for part, module in layer.named_modules():
                name = f"{self._prefix}.{i}.{part}"
                if not isinstance(module, nn.Linear) or f"{name}.weight" in gate:
                    continue
                fields: dict[str, Any] = {
                    "role": _ROLES.get(part.split(".")[0], part.split(".")[0]),
                    "invocations": times,
                }
                block = routing_module(self.model, name, f"{self._prefix}.{i}")
                if block is not None:
                    fields |= {"role": "expert", "routed_in": block}
                modules.append((name, fields))
        return declare(self.model, modules, n_steps)

    def _routing(self) -> list[str]:
        """Modules that choose experts."""
        modules: dict[str | None, None] = {}
        for i, layer in enumerate(self._layers):
            block = f"{self._prefix}.{i}"
            parts = (f"{block}.{part}" for part, _ in layer.named_modules() if part)
            modules |= dict.fromkeys(routing_module(self.model, part, block) for part in parts)
        return [name for name in modules if name is not None]

    def describe_loop(self) -> tuple[str, ...]:
        """Describe the loop, and the tools that know it."""
        return (
            f"layers {self._first} to {self._last - 1} run {self._times} times; transformers has the loop from "
            "--remote-code, vLLM has the loop from loopq's plugin, and export --format gguf writes it out",
        )

    def left_out(self) -> dict[str, str]:
        """A head that is the embedding, gates of experts, and experts that are not modules."""
        tied = is_embedding(self.model, self._parts.head)
        head = {f"{self._parts.head}.weight": "is the input embedding, which stays as it is"} if tied else {}
        return head | gates(self.model, self._routing()) | stacked_experts(self.model)

    def _order(self, n: int) -> list[int]:
        return layer_order(self._loop, len(self._layers), n)

    def _model(self, order: Sequence[int]) -> Any:
        return _in_order(self.model, self._inner, self._parts, order)

    def _run(self, order: Sequence[int], *args: Any, **given: Any) -> Tensor:
        """Hidden states behind some layers, without the final norm."""
        inner = _in_order(self._inner, self._inner, self._parts, order, norm=False)
        after: Tensor = inner(*args, use_cache=False, **given).last_hidden_state
        return after

    def _rollout(self, ids: Tensor, batch: Batch, n_steps: int) -> Tensor:
        return logits_of(self._model(self._order(n_steps))(ids, use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache: a slot for each run of a layer."""
        ids, model = self.to_device(batch.input_ids[:, n_seen:]), self._model(self._order(n_steps))
        return cached(model(ids, **past(model, cache)))

    def program(self, n_steps: int) -> Program | None:
        """The layers in order, then the norm."""

        inner = self._inner
        blocks = [llama_block(layer, inner.config) for layer in self._layers]
        if not all(blocks) or not hasattr(inner, "rotary_emb"):
            return None
        order = [
            *(("block", blocks[i]) for i in self._order(n_steps)),
            ("norm", getattr(inner, self._parts.norm)),
        ]
        return Program(
            inner.get_input_embeddings(),
            order,
            self.model.get_output_embeddings(),
            lambda n: angles_of(inner.rotary_emb, n),
        )

    def _embed(self, ids: Tensor) -> Tensor:
        return self._run(range(self._first), ids)

    def step(self, state: Tensor, embedding: Any, t: int, n_steps: int) -> Tensor:
        """The loop's layers, once."""
        return self._run(range(self._first, self._last), inputs_embeds=state)

    def predict(self, state: Tensor, embedding: Any) -> Tensor:
        """The layers after the loop, the norm and the head."""
        model = self._model(range(self._last, len(self._layers)))
        return logits_of(model(inputs_embeds=state, use_cache=False))


def run_loop(model: Any) -> None:
    """Let a decoder with `looped_layers` in its configuration run the loop when it is called or generates.

    Parameters
    ----------
    model : nn.Module
        Changed in place. Its parameters keep their names.
    """
    parts = _parts_of(model)
    inner = model.get_submodule(parts.path)
    # The configuration of a text model is its own.
    setattr(inner.config, LOOP, getattr(model.config, LOOP))
    inner._looped_parts = parts
    inner.__class__ = _looping(_plain(type(inner)), _Inner)
    if hasattr(model, "generate"):
        model.__class__ = _looping(_plain(type(model)), _Generator)


def unlooped(model: Any) -> Any:
    """Return a view of a model of `run_loop` that has the published classes again; any other model as it is."""
    if not isinstance(model, _Loops):
        return model
    inner = model.get_submodule(_parts_of(model).path)  # type: ignore[attr-defined]
    plain = copied(inner)
    plain.__class__ = _plain(type(inner))
    bare: Any = view(model, (inner, plain))
    bare.__class__ = _plain(type(bare))
    return bare


class _Loops:
    """Marks the classes of models that run their loop. The class after it runs every layer once."""


class _Inner(_Loops):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _whole(self, self, self._looped_parts).forward(*args, **kwargs)  # type: ignore[attr-defined]


class _Generator(_Loops):
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        # The cache takes its number of slots from the configuration, so the whole model is the one with the loop.
        parts = _parts_of(self)
        inner = self.get_submodule(parts.path)  # type: ignore[attr-defined]
        return _whole(self, inner, parts).generate(*args, **kwargs)


def _parts_of(model: Any) -> DecoderParts:
    parts = DecoderParts.of(model)
    assert parts is not None  # as `matches` has found
    return parts


@functools.cache
def _looping(plain: type, loops: type) -> type:
    return type(f"{PREFIX}{plain.__name__}", (loops, plain), {"__module__": plain.__module__})


def _plain(kind: type) -> type:
    return kind.__mro__[3] if issubclass(kind, _Loops) else kind


def _whole(module: Any, inner: Any, parts: DecoderParts) -> Any:
    order = layer_order(getattr(inner.config, LOOP), len(getattr(inner, parts.layers)))
    return _in_order(module, inner, parts, order)


def _in_order(module: Any, inner: Any, parts: DecoderParts, order: Sequence[int], norm: bool = True) -> Any:
    """A module that runs these layers in this order. A repeated layer has two slots in a cache.

    Parameters
    ----------
    module : nn.Module
        The model, or its inner model.
    inner : nn.Module
        Holds the layers. A copy of a layer shares its parameters, buffers, submodules and hooks. Only its slot number
        differs.
    parts : DecoderParts
        Names of the parts.
    order : sequence of int
        Numbers of layers.
    norm : bool
        Run the final norm.
    """
    from torch import nn  # lazy: loopq imports without torch

    held = getattr(inner, parts.layers)
    others = [(held, nn.ModuleList(_in_slot(held[i], slot) for slot, i in enumerate(order)))]
    others += [] if norm else [(getattr(inner, parts.norm), nn.Identity())]
    kinds = getattr(inner.config, "layer_types", None)
    values: dict[str, Any] = {} if kinds is None else {"layer_types": [kinds[i] for i in order]}
    values["num_hidden_layers"] = len(order)
    text = changed(inner.config, **values)
    others.append((inner.config, text))
    if module.config is not inner.config:
        values = {"text_config": text} if hasattr(module.config, "text_config") else values
        others.append((module.config, changed(module.config, **values)))
    reordered = view(module, *others)
    again = reordered.get_submodule("" if module is inner else parts.path)
    if hasattr(again, "first_kv_shared_layer_idx"):
        # Gemma-4 counts to the first layer that shares a cache, and none does.
        again.first_kv_shared_layer_idx = len(order)
    for part in (reordered, again):
        part.__class__ = _plain(type(part))
    return reordered


def _in_slot(layer: nn.Module, slot: int) -> nn.Module:
    """Copy a layer so that its attention uses the given cache slot. The rest is shared with the original."""
    parts = layer._modules.values()
    slots = ((part, copied(part, layer_idx=slot)) for part in parts if hasattr(part, "layer_idx"))
    new: nn.Module = view(layer, *slots)
    return new
