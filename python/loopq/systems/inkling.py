"""Inkling-2-Mini: passes over the middle layers that start alike and receive messages of the previous pass."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from loopq.layers.shared import SharedParameter
from loopq.systems import SYSTEMS
from loopq.systems.base import Batch, LoopedSystem, Published
from loopq.systems.declare import declare, find_prefix
from loopq.systems.outputs import cached, logits_of, past
from loopq.systems.routing import routing_module, stacked_experts
from loopq.systems.views import changed, view

if TYPE_CHECKING:
    from torch import Tensor, nn

#: Modules of a layer that run in float32, whatever the type of the rest.
_FLOAT32 = ("forget_gate_proj", "message_gate_proj")
#: Products with an output for each head or tap, whose bytes do not count.
_SMALL = ("sink_proj", "weight_proj")


@SYSTEMS.register("inkling")
class Inkling(LoopedSystem):
    """Inkling-2-Mini of Thinking Machines (transformers from 5.24 on), the text model or the one with images.

    A layer of the loop is called in every pass. Its message gates are called in every pass but the first. The weights
    of the layers around the loop are called once.
    """

    summary = "layers before the loop give s; passes over the loop from s, each with messages of the last; layers after"
    published = Published({"Inkling-2-Mini": 9408}, transformers=">=5.24")

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._config = model.config.get_text_config()
        self._layers = f"{find_prefix(model, 'message_input')}layers"

    @classmethod
    def matches(cls, model: nn.Module) -> bool:
        """Recognised by the queries for messages between passes, and a head."""
        return find_prefix(model, "message_input") is not None and hasattr(model, "lm_head")

    @property
    def n_steps(self) -> int:
        """`config.loop_num_passes`."""
        return int(self._config.loop_num_passes)

    def shared_parameters(self, n_steps: int) -> tuple[SharedParameter, ...]:
        """Linears of every layer and of every expert. Those outside the loop are called once."""
        first, end = self._config.loop_layer_index_start, self._config.loop_layer_index_end
        modules: list[tuple[str, dict[str, Any]]] = []
        gates: list[tuple[str, dict[str, Any]]] = []
        for i in range(self._config.num_hidden_layers):
            layer = f"{self._layers}.{i}"
            times = n_steps if first <= i < end else 1
            for part in self._linears(layer):
                name = f"{layer}.{part}"
                if "message_gate" in part:
                    gates += [(name, {"role": "message", "invocations": times - 1})] * (times > 1)
                    continue
                block = routing_module(self.model, name, layer)
                role = "attention" if block is None else "expert"
                modules.append((name, {"role": role, "invocations": times, "routed_in": block or ""}))
            if i == end - 1:
                modules += gates
        return declare(self.model, modules, n_steps)

    def _linears(self, layer: str) -> list[str]:
        """Linear layers of a layer in call order. Attention output gates come last in the attention part."""
        from torch import nn  # lazy: loopq imports without torch

        linears = [
            part
            for part, module in self.model.get_submodule(layer).named_modules()
            if isinstance(module, nn.Linear) and not part.endswith((*_FLOAT32, *_SMALL))
        ]
        outputs = [part for part in linears if ".o_proj." in part]
        at = next((n for n, part in enumerate(linears) if not part.startswith("self_attn")), len(linears))
        inner = [part for part in linears[:at] if part not in outputs]
        return [*inner, *outputs, *linears[at:]]

    def left_out(self) -> dict[str, str]:
        """Weights that are float32, choose experts, or have few outputs."""
        left = {}
        for name, parameter in self.model.get_submodule(self._layers).named_parameters():
            module = name.rpartition(".")[0]
            if module.endswith((*_FLOAT32, "mlp.gate")):
                left[f"{self._layers}.{name}"] = "declared float32, and stays so"
            elif module.endswith(_SMALL) and parameter.ndim == 2:
                left[f"{self._layers}.{name}"] = "a few outputs for each head"
            elif name.endswith("attention_input.query"):
                left[f"{self._layers}.{name}"] = "queries for the states of earlier blocks, a few vectors"
            elif name.endswith("relative_position_bias.proj"):
                left[f"{self._layers}.{name}"] = (
                    "a bank of position profiles, used without a call of its module"
                )
        return left | stacked_experts(self.model)

    def rollout(self, batch: Batch, n_steps: int) -> Tensor:
        """Run the model's own forward with this number of passes."""
        import torch  # lazy: loopq imports without torch

        depth = self.check_depth(n_steps)
        ids = self.to_device(batch.input_ids)
        with torch.set_grad_enabled(self.keeps_graph):
            return logits_of(self._passes(depth)(ids, use_cache=False))

    def extend(self, batch: Batch, n_steps: int, n_seen: int, cache: Any) -> tuple[Tensor, Any]:
        """Continue with the model's cache: a slot for each layer of each pass."""
        ids = self.to_device(batch.input_ids[:, n_seen:])
        return cached(self._passes(n_steps)(ids, **past(self.model, cache)))

    def _passes(self, n: int) -> Any:
        """The model with this number of passes."""
        return view(self.model, (self._config, changed(self._config, loop_num_passes=n)))
